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
