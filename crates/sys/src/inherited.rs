//! Descriptors that the process was started with and knows by number only.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};

/// Takes over the descriptor that the caller of the program passed as number `fd`.
///
/// Called before the program opens descriptors of its own, so that the number can only be one that
/// was inherited, and once per number. 0, 1 and 2 belong to the standard streams and are refused.
///
/// # Errors
/// `EBADF` where the number is not open, or belongs to a standard stream.
pub fn take(fd: i32) -> io::Result<OwnedFd> {
    if fd <= libc::STDERR_FILENO {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: F_GETFD reads a flag of any number and touches no memory.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the number is open, and nothing in this process owns it: it was inherited.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Duplicates the descriptor that the caller of the program passed as number `fd`; the original
/// stays open. The new one closes on exec.
///
/// # Errors
/// `EBADF` where the number is not open.
pub fn duplicate(fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: F_DUPFD_CLOEXEC takes any number and touches no memory.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
