//! Files as loop devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` of linux/loop.h.
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
/// `LO_FLAGS_READ_ONLY` and `LO_FLAGS_AUTOCLEAR`.
const READ_ONLY: u32 = 1;
const AUTOCLEAR: u32 = 4;
/// How often another device is tried, where somebody else was faster.
const TRIES: u32 = 100;

/// `struct loop_config`, with the fields that are not set as bytes.
#[repr(C)]
struct Config {
    file: u32,
    block_bytes: u32,
    before: [u8; 52],
    flags: u32,
    after: [u8; 176],
    reserved: [u64; 8],
}

/// What is done with a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is only read.
    Read,
    /// It is written to as well.
    Write,
}

/// Attaches an open file as a loop device, which is detached when nobody uses it any
/// more: loop(4). Gives the device and its name.
///
/// # Errors
/// `EPERM`, `ENOENT` where there are no such devices.
pub fn attach_loop(file: BorrowedFd<'_>, access: Access) -> io::Result<(File, PathBuf)> {
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/loop-control")?;
    let mut config = Config {
        file: file.as_raw_fd().cast_unsigned(),
        block_bytes: 0,
        before: [0; 52],
        flags: match access {
            Access::Read => AUTOCLEAR | READ_ONLY,
            Access::Write => AUTOCLEAR,
        },
        after: [0; 176],
        reserved: [0; 8],
    };
    for _ in 0..TRIES {
        // SAFETY: takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let mut options = OpenOptions::new();
        let device = options
            .read(true)
            .write(access == Access::Write)
            .open(&path)?;
        // SAFETY: the kernel reads the structure.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw mut config) };
        if done == 0 {
            return Ok((device, path));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_is_the_kernels() {
        assert_eq!(size_of::<Config>(), 304);
        assert_eq!(std::mem::offset_of!(Config, flags), 8 + 52);
    }
}
