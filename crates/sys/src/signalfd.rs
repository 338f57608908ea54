//! signalfd(2).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Makes a descriptor that reads the signals of `mask` (bit 0 is signal 1); closes on exec.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`.
pub fn create(mask: u64, nonblocking: bool) -> io::Result<OwnedFd> {
    let flags = libc::SFD_CLOEXEC | if nonblocking { libc::SFD_NONBLOCK } else { 0 };
    // SAFETY: the kernel reads eight bytes from where `mask` lives.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_signalfd4,
            -1,
            &raw const mask,
            size_of::<u64>(),
            flags,
        )
    };
    let fd = i32::try_from(fd).expect("a descriptor or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and belongs to no one else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has signals of `mask` (bit 0 is signal 1) read from a descriptor instead of ending this program:
/// the calling thread, and those that it makes from now on, block them.
///
/// # Errors
/// Those of [`create`] and pthread_sigmask(3).
pub fn instead_of_ending(mask: u64) -> io::Result<OwnedFd> {
    let fd = create(mask, true)?;
    let signals = (1..=64).filter(|signal| mask >> (signal - 1) & 1 == 1);
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: it makes an empty set where there is room for one.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in signals {
        // SAFETY: the set was made above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: the set was made above; the old one is not asked for.
    let failed =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
    match failed {
        0 => Ok(fd),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
