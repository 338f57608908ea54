//! What timerfds can do beyond what rustix has.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use linux_raw_sys::ioctl::TFD_IOC_SET_TICKS;

/// Sets how many expirations are waiting to be read, at least 1 (`TFD_IOC_SET_TICKS`).
///
/// # Errors
/// `ENOTTY` on a kernel without checkpoint support.
pub fn set_ticks(fd: BorrowedFd<'_>, ticks: u64) -> io::Result<()> {
    let request = libc::Ioctl::from(TFD_IOC_SET_TICKS);
    // SAFETY: the call reads eight bytes from where `ticks` lives.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const ticks) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
