//! Exit status of an ended process, by its pidfd (`PIDFD_GET_INFO`, Linux 6.15).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IOWR(0xff, 11, struct pidfd_info)`, in the size that it had first.
const GET_INFO: u32 = 0xc040_ff0b;
const INFO_BYTES: usize = 64;
/// `PIDFD_INFO_EXIT`.
const EXIT: u64 = libc::PIDFD_INFO_EXIT as u64;
const EXIT_CODE_AT: usize = 60;

/// The wait status of a process, or of a thread, that has ended and was waited for; `None` where
/// the kernel does not tell it, and where it has not ended.
///
/// # Errors
/// Those of ioctl(2), but for what older kernels say, and but for `ESRCH`.
pub fn exit_status(pidfd: BorrowedFd<'_>) -> io::Result<Option<i32>> {
    let mut info = [0u8; INFO_BYTES];
    info[..8].copy_from_slice(&EXIT.to_ne_bytes());
    let request = libc::Ioctl::from(GET_INFO);
    // SAFETY: the kernel writes no more than the size that the request names.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), request, info.as_mut_ptr()) };
    if result != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ESRCH | libc::ENOTTY | libc::EINVAL) => Ok(None),
            _ => Err(error),
        };
    }
    let (mask, _) = info.split_first_chunk().expect("eight bytes");
    let code = info[EXIT_CODE_AT..].try_into().expect("four bytes");
    let is_told = u64::from_ne_bytes(*mask) & EXIT != 0;
    Ok(is_told.then(|| i32::from_ne_bytes(code)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::process::{PidfdFlags, pidfd_open};

    use super::*;
    use crate::fork::{ended_child, reap};

    #[test]
    fn how_a_process_ended_is_told() {
        for status in [0, 7 << 8, 255 << 8, 9, 15, 6] {
            let child = ended_child(status).expect("it has ended");
            let pidfd = pidfd_open(child, PidfdFlags::empty()).expect("a pidfd");
            reap(child).expect("waited for");
            match exit_status(pidfd.as_fd()).expect("told") {
                Some(told) => assert_eq!(told, status),
                None => eprintln!("skipped: this kernel does not tell how a process ended"),
            }
        }
    }
}
