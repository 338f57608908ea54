//! A process in another namespace of pids that ends with this one: what waits for its end there
//! waits for ours.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::proc::Status;
use crate::watchdog::Watchdog;

/// Such a process. It is gone when this is dropped, and when this process ends.
#[derive(Debug)]
pub struct StandIn {
    /// Ended when this is dropped.
    _process: Watchdog,
    /// Its number in its namespace.
    number: u32,
}

impl StandIn {
    /// Starts it in the namespace of pids that `namespace` is (pid_namespaces(7)).
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN` there; `EINVAL` for one that is no descendant of this
    /// process's; `ENOMEM` where its init has ended.
    pub fn start(namespace: BorrowedFd<'_>) -> io::Result<Self> {
        let kind = Some(LinkNameSpaceType::ProcessID);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let own = openat(
            CWD,
            crate::procfs::path("thread-self/ns/pid_for_children"),
            flags,
            Mode::empty(),
        )?;
        move_into_link_name_space(namespace, kind)?;
        // SAFETY: it makes nothing but system calls, on memory of its own.
        let started = unsafe { Watchdog::with(Vec::new(), wait_for_end) };
        move_into_link_name_space(own.as_fd(), kind)?;
        let process = started?;
        let number = number_of(process.pid)?;
        Ok(Self {
            _process: process,
            number,
        })
    }

    /// Its number in its namespace.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }
}

fn number_of(pid: i32) -> io::Result<u32> {
    let status = crate::procfs::read(format_args!("{pid}/status"))?;
    let status = Status::parse(&status);
    let number = status
        .ok()
        .and_then(|status| status.ns_tids.last().copied());
    let number = number.and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads from a pipe to which nobody writes before the end.
fn wait_for_end(end: RawFd) {
    let mut byte = 0u8;
    // SAFETY: reads one byte into one byte.
    unsafe { libc::syscall(libc::SYS_read, end, &raw mut byte, 1) };
}
