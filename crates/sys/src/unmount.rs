//! A mount that goes when this process dies, and files as loop devices.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::watchdog;

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

/// A process that unmounts when this one dies; it is gone when this is dropped.
#[derive(Debug)]
pub struct Unmounter {
    pid: libc::pid_t,
    /// Written to by [`Drop`]; ends when this process does.
    alive: OwnedFd,
}

impl Unmounter {
    /// Starts it: what is mounted on `point` is to go, if it is the mount with this id (statx(2),
    /// `stx_mnt_id`), and nothing else.
    ///
    /// # Errors
    /// The calls' errno.
    pub fn start(point: &Path, id: u64) -> io::Result<Self> {
        let (end, alive) = pipe_with(PipeFlags::CLOEXEC)?;
        let point = CString::new(point.as_os_str().as_bytes())?;
        let end_fd = end.as_fd().as_raw_fd();
        // SAFETY: it makes nothing but system calls, on memory that was prepared before.
        let pid = unsafe { watchdog::start(&[end_fd], || guard(end_fd, &point, id)) }?;
        Ok(Self { pid, alive })
    }
}

impl Drop for Unmounter {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.alive, &[1]);
        watchdog::wait(self.pid);
    }
}

/// The watchdog's life, with all signals blocked.
fn guard(end: RawFd, point: &CString, id: u64) {
    // SAFETY: changes the session of this copy only.
    unsafe { libc::syscall(libc::SYS_setsid) };
    let mut byte = 0_u8;
    // SAFETY: reads one byte into one byte.
    let read = unsafe { libc::syscall(libc::SYS_read, end, &raw mut byte, 1) };
    if read != 0 {
        return;
    }
    let mut facts = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_STATX_DONT_SYNC;
    let (path, to) = (point.as_ptr(), facts.as_mut_ptr());
    let (at, mask) = (libc::AT_FDCWD, libc::STATX_MNT_ID);
    // SAFETY: the path ends with a zero, and the kernel fills the structure in.
    let done = unsafe { libc::syscall(libc::SYS_statx, at, path, flags, mask, to) };
    // SAFETY: zeros are such a structure as well.
    let facts = unsafe { facts.assume_init() };
    if done == 0 && facts.stx_mnt_id == id {
        // SAFETY: the path ends with a zero.
        unsafe { libc::syscall(libc::SYS_umount2, path, libc::MNT_DETACH) };
    }
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
