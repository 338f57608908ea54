//! Freezing a mounted file system, with a helper process that thaws it if this one dies.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use crate::watchdog::Watchdog;

/// `FIFREEZE` and `FITHAW` of linux/fs.h.
const FIFREEZE: libc::c_ulong = linux_raw_sys::ioctl::FIFREEZE as libc::c_ulong;
const FITHAW: libc::c_ulong = linux_raw_sys::ioctl::FITHAW as libc::c_ulong;
/// What the watchdog is told: that its time begins anew.
const AGAIN: u8 = 2;
/// How long the watchdog waits before it tries again to thaw what is still being frozen.
const AGAIN_MS: libc::c_int = 10;

/// A frozen file system; thawed when this is dropped, when the process dies, and when the time is
/// over.
#[derive(Debug)]
pub struct Frozen<'a> {
    fs: BorrowedFd<'a>,
    since: Instant,
    /// There as long as it may be frozen by us.
    watchdog: Option<Watchdog>,
}

/// How a file system was thawed.
#[derive(Clone, Copy, Debug)]
pub struct Thawed {
    /// For how long nobody could write to it.
    pub frozen: Duration,
    /// Whether it was frozen until this call, and not thawed earlier by the watchdog or by others.
    pub held: bool,
}

impl<'a> Frozen<'a> {
    /// Freezes the file system in which `fs` is, for at most `at_most`: ioctl_fs(2), `FIFREEZE`.
    /// Returns when all that was written is on its device, and nobody can write.
    ///
    /// # Errors
    /// `EBUSY` where it is frozen already, `EPERM`, `EOPNOTSUPP`; those of the watchdog's start.
    pub fn freeze(fs: BorrowedFd<'a>, at_most: Duration) -> io::Result<Self> {
        let watchdog = start(fs.as_raw_fd(), at_most)?;
        let since = Instant::now();
        // Where that fails, it is not ours to thaw.
        call(fs.as_raw_fd(), FIFREEZE)?;
        Ok(Self {
            fs,
            since,
            watchdog: Some(watchdog),
        })
    }

    /// Thaws it, so that whoever waits goes on, and freezes it at once again, for as long; gives
    /// for how long nobody could write to it before.
    ///
    /// The kernel waits for grace periods of RCU, 20 to 30 ms, where it freezes what was not
    /// frozen in the last 10 ms, and for all that is in the journal. The second time there is
    /// little to wait for, so what is done then has users wait for itself alone.
    ///
    /// # Errors
    /// As [`Self::freeze`]; it is not frozen then.
    pub fn again(mut self) -> io::Result<(Self, Duration)> {
        match call(self.fs.as_raw_fd(), FITHAW) {
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
            // Somebody else may have thawed it: it matters from now on that nobody does.
            _ => {}
        }
        let frozen = self.since.elapsed();
        self.since = Instant::now();
        self.watchdog.iter().for_each(|it| it.tell(AGAIN));
        if let Err(error) = call(self.fs.as_raw_fd(), FIFREEZE) {
            self.watchdog = None;
            return Err(error);
        }
        Ok((self, frozen))
    }

    /// How long ago it began to be frozen.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Thaws it.
    ///
    /// # Errors
    /// The call's errno; not where somebody else has thawed it.
    pub fn thaw(mut self) -> io::Result<Thawed> {
        let held = match call(self.fs.as_raw_fd(), FITHAW) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => false,
            Err(error) => return Err(error),
        };
        let frozen = self.since.elapsed();
        self.watchdog = None;
        Ok(Thawed { frozen, held })
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if self.watchdog.is_some() {
            let _ = call(self.fs.as_raw_fd(), FITHAW);
        }
    }
}

fn call(fs: RawFd, request: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the kernel reads and writes nothing at the argument of these two.
    let done = unsafe { libc::ioctl(fs, request, 0) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Starts the watchdog: it has `fs` and nothing else, and a session of its own, so that a signal to
/// our process group does not reach it.
fn start(fs: RawFd, at_most: Duration) -> io::Result<Watchdog> {
    let at_most_ms = libc::c_int::try_from(at_most.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: it makes nothing but system calls, on memory of its own.
    unsafe { Watchdog::with(vec![fs], |end| watch(fs, end, at_most_ms)) }
}

/// The watchdog's life, with all signals blocked.
fn watch(fs: RawFd, end: RawFd, at_most_ms: libc::c_int) {
    // SAFETY: changes the session of this copy only.
    unsafe { libc::syscall(libc::SYS_setsid) };
    let mut wait_ms = at_most_ms;
    loop {
        let mut poll = libc::pollfd {
            fd: end,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the kernel reads and writes one entry.
        let ready = unsafe { libc::syscall(libc::SYS_poll, &raw mut poll, 1, wait_ms) };
        if ready > 0 {
            let mut byte = 0_u8;
            // SAFETY: reads one byte into one byte.
            let read = unsafe { libc::syscall(libc::SYS_read, end, &raw mut byte, 1) };
            if read == 1 && byte == AGAIN {
                wait_ms = at_most_ms;
                continue;
            }
            if read == 0 {
                // The process is gone, and with it the call that froze: it is frozen or not.
                // SAFETY: the kernel reads and writes nothing at the argument.
                unsafe { libc::syscall(libc::SYS_ioctl, fs, FITHAW, 0) };
            }
            return;
        }
        // The time is over. What is still being frozen cannot be thawed yet.
        // SAFETY: as above.
        let thawed = unsafe { libc::syscall(libc::SYS_ioctl, fs, FITHAW, 0) };
        wait_ms = if thawed == 0 { -1 } else { AGAIN_MS };
    }
}

/// Has everything written that was changed in the file system of `fs`: syncfs(2).
///
/// # Errors
/// The call's errno.
pub fn sync(fs: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::syncfs(fs)?)
}

/// A range of a block device is to read as zeros, without being written where the device can do
/// that (`BLKZEROOUT`).
///
/// # Errors
/// The call's errno.
pub fn zero_out(device: impl AsFd, at_bytes: u64, len_bytes: u64) -> io::Result<()> {
    range_call(device.as_fd().as_raw_fd(), 0x127f, at_bytes, len_bytes)
}

/// A range of a block device is not needed any more (`BLKDISCARD`).
///
/// # Errors
/// `EOPNOTSUPP` where the device has no use for that.
pub fn discard(device: impl AsFd, at_bytes: u64, len_bytes: u64) -> io::Result<()> {
    range_call(device.as_fd().as_raw_fd(), 0x1277, at_bytes, len_bytes)
}

fn range_call(fd: RawFd, request: libc::c_ulong, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: the kernel reads two numbers of 64 bits.
    let done = unsafe { libc::ioctl(fd, request, range.as_ptr()) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_frozen_leaves_no_watchdog() {
        let pipe = rustix::pipe::pipe().unwrap();
        let frozen = Frozen::freeze(pipe.0.as_fd(), Duration::from_secs(1));
        assert!(frozen.is_err());
        let waited = rustix::process::wait(rustix::process::WaitOptions::NOHANG);
        assert!(!matches!(waited, Ok(Some(_))));
    }
}
