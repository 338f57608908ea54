//! Files without a name in memory, beyond what rustix has.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// A file whose memory the kernel itself cannot read (memfd_secret(2)).
///
/// # Errors
/// `ENOSYS` where it is not enabled.
pub fn secret() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, 0) };
    let fd = i32::try_from(fd).expect("a descriptor or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and belongs to no one else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
