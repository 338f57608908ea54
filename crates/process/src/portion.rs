//! Processes that hold what does not fit into the restorer's table of descriptors.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::{read, retry_on_intr};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitOptions, kill_process, pidfd_getfd, pidfd_open,
    set_parent_process_death_signal, waitpid,
};
use sys::fork::fork_for;

use crate::{Error, Result};

/// A child that holds some of the restorer's descriptors under the numbers that they had there,
/// until this is dropped. It ends with the restorer.
pub(crate) struct Portion {
    child: Child,
    pidfd: Arc<OwnedFd>,
}

/// Killed and reaped on drop.
struct Child(Pid);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        let _ = retry_on_intr(|| waitpid(Some(self.0), WaitOptions::empty()));
    }
}

impl Portion {
    /// Forks a holder of the descriptors `numbers`, whose pid is none of `reserved`. It has closed
    /// all others when this returns.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn begin(numbers: &[RawFd], reserved: &HashSet<i32>) -> Result<Self> {
        let mut rejected = Vec::new();
        loop {
            let child = hold(numbers)?;
            if reserved.contains(&child.0.as_raw_nonzero().get()) {
                // It lives until another one is found: the kernel gives its pid to nobody else.
                rejected.push(child);
                continue;
            }
            let pidfd = pidfd_open(child.0, PidfdFlags::empty());
            let pidfd = pidfd.map_err(|e| Error::kernel("cannot make a pidfd of a holder", e))?;
            let pidfd = Arc::new(pidfd);
            return Ok(Self { child, pidfd });
        }
    }

    /// The holder's pidfd.
    pub fn pidfd(&self) -> Arc<OwnedFd> {
        self.pidfd.clone()
    }

    /// A copy of descriptor `number` (pidfd_getfd(2)).
    ///
    /// # Errors
    /// [`Error::Kernel`] when the holder is gone, or there is no room.
    pub fn fetch(&self, number: RawFd) -> Result<OwnedFd> {
        let fetched = pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty());
        fetched.map_err(|e| {
            let holder = self.child.0.as_raw_nonzero();
            Error::kernel(format!("cannot fetch fd {number} of holder {holder}"), e)
        })
    }
}

/// Forks a process that keeps the descriptors `numbers`, and waits until it has closed the others.
fn hold(numbers: &[RawFd]) -> Result<Child> {
    let failed = |e: std::io::Error| Error::kernel("cannot make a holder of descriptors", e);
    let (reader, writer) = std::io::pipe().map_err(failed)?;
    let restorer = rustix::process::getpid();
    let ready = writer.as_raw_fd();
    let kept = numbers.iter().copied().chain([ready]).collect::<Vec<_>>();
    let mut ends = Some(writer);
    let child = fork_for(&kept, || {
        let tied = set_parent_process_death_signal(Some(Signal::KILL));
        if tied.is_err() || rustix::process::getppid() != Some(restorer) {
            return;
        }
        if let Some(end) = ends.take() {
            let _ = rustix::io::write(&end, b"x");
        }
        loop {
            rustix::event::pause();
        }
    });
    let child = Child(child.map_err(failed)?);
    drop(ends);
    let told = retry_on_intr(|| read(&reader, &mut [0; 1]));
    match told.map_err(|e| failed(e.into()))? {
        1 => Ok(child),
        _ => Err(failed(std::io::ErrorKind::UnexpectedEof.into())),
    }
}
