//! A process that ends half restored machines if we are killed.
//!
//! It is told of each before that executes QEMU, and a process that was not let go ends by itself.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, setsid, waitpid};
use sys::fork::fork_for_numbers;
use sys::socket::{self, Along};

use crate::{Error, Result};

/// What it is told: of a process, or that all goes well.
const PROCESS: &[u8] = b"p";
const DISMISSED: &[u8] = b"d";

/// The waiting process. Dropped without [`Reaper::dismiss`], it ends the machines.
#[derive(Debug)]
pub(crate) struct Reaper {
    /// Its process, if it is a child of this one.
    child: Option<Pid>,
    line: Option<OwnedFd>,
}

impl Reaper {
    /// Posts it, from a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post() -> Result<Self> {
        let failed = |source: io::Error| Error::Kernel {
            doing: "cannot post a watchdog",
            source,
        };
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (theirs, own) = pair.map_err(|errno| failed(errno.into()))?;
        log::logger().flush();
        let child = fork_for_numbers(&[theirs.as_raw_fd()], || {
            // Nothing that ends our group may end this process.
            let _ = setsid();
            for process in wait(&theirs) {
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
        });
        Ok(Self {
            child: Some(child.map_err(failed)?),
            line: Some(own),
        })
    }

    /// The one at the other end of a line that [`Reaper::into_line`] gave away.
    pub const fn of(line: OwnedFd) -> Self {
        Self {
            child: None,
            line: Some(line),
        }
    }

    /// Has it end the machines when nobody has this line any more.
    pub fn into_line(mut self) -> OwnedFd {
        self.child = None;
        self.line.take().expect("only drop takes it")
    }

    /// Has a process ended if this one dies.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone.
    pub fn watch(&self, process: BorrowedFd<'_>) -> Result<()> {
        self.tell(PROCESS, &[process])
    }

    /// Leaves the machines to themselves.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone: then the machines may be.
    pub fn dismiss(&self) -> Result<()> {
        self.tell(DISMISSED, &[])
    }

    fn tell(&self, what: &[u8], rights: &[BorrowedFd<'_>]) -> Result<()> {
        let line = self.line.as_ref().expect("only drop takes it");
        let along = Along {
            rights,
            ..Along::default()
        };
        let told = socket::send(line.as_fd(), what, along, 0);
        told.map(drop).map_err(|source| Error::Kernel {
            doing: "cannot tell the watchdog",
            source,
        })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.line.take());
        if let Some(child) = self.child {
            let _ = rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()));
        }
    }
}

/// Whom to end, when the other side of the line is gone.
fn wait(line: &OwnedFd) -> Vec<OwnedFd> {
    let mut processes = Vec::new();
    loop {
        let mut what = [0];
        match socket::receive(line, &mut what, 0) {
            Ok(received) if received.len == 1 && what == PROCESS => {
                processes.extend(received.rights);
            }
            Ok(received) if received.len == 1 => return Vec::new(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return processes,
        }
    }
}
