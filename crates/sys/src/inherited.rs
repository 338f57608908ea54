//! Descriptors that the process was started with and knows by number only.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};

/// Takes over the descriptor that the caller of the program passed as number `fd`. It closes on
/// exec from now on.
///
/// Whatever is passed to a program stays open on exec, and whatever this workspace opens closes: so
/// a number that closes on exec has an owner here, be it by an earlier call of this function.
/// 0, 1 and 2 belong to the standard streams and are refused.
///
/// # Errors
/// `EBADF` where the number is not open, was not inherited or is taken over already, or belongs to
/// a standard stream.
pub fn take(fd: i32) -> io::Result<OwnedFd> {
    let refused = || io::Error::from_raw_os_error(libc::EBADF);
    if fd <= libc::STDERR_FILENO {
        return Err(refused());
    }
    // SAFETY: F_GETFD reads a flag of any number and touches no memory.
    match unsafe { libc::fcntl(fd, libc::F_GETFD) } {
        -1 => return Err(io::Error::last_os_error()),
        flags if flags & libc::FD_CLOEXEC != 0 => return Err(refused()),
        _ => {}
    }
    // SAFETY: the number was inherited, so nothing here owns it, and F_SETFD touches no memory.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the number is open, and nothing in this process owns it: see above.
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

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    use super::*;

    #[test]
    fn what_is_owned_here_is_not_taken_over() {
        let own = std::fs::File::open("/dev/null").unwrap();
        let refused = |fd: i32| take(fd).unwrap_err().raw_os_error() == Some(libc::EBADF);
        assert!(refused(own.as_raw_fd()));
        let passed = own.into_raw_fd();
        // SAFETY: the number is open and has no owner any more.
        unsafe { libc::fcntl(passed, libc::F_SETFD, 0) };
        let taken = take(passed).unwrap();
        assert_eq!(taken.as_raw_fd(), passed);
        assert!(refused(passed) && refused(1) && refused(1_000_000));
    }
}
