//! The process outside.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use guard::{Channel, UndoList};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};
use sys::procfs;

use super::Way;
use super::message::{Answer, Event, STAGES};
use crate::{Error, Observer, Result};

/// The process outside of the namespace.
#[derive(Debug)]
pub struct Outer {
    pub(super) copy: Pid,
    pub(super) link: Channel,
    /// The way in which the root of a restored tree is made.
    pub(super) way: Way,
    /// The root of a restored tree, once that runs.
    pub(super) root: Option<Pid>,
    /// The root of a tree that is dumped, where that is process 1 of its namespace.
    pub(super) victim: Option<OwnedFd>,
    /// The list of processes that are to end with this one, if they are not its children.
    pub(super) guard: Option<UndoList>,
}

/// The end of the wait outside.
#[derive(Debug)]
pub enum Outcome {
    /// The tree runs; its root has this number outside.
    Runs(Pid),
    /// The copy has ended.
    Ended(WaitStatus),
}

impl Outer {
    /// Passes on to `observer` what the copy tells, until the tree runs or the copy has ended.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn attend(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let failed =
            |e: io::Error| Error::kernel("cannot hear of the work in the tree's namespaces", e);
        while let Some((event, rights)) = self.link.receive::<Event>().map_err(failed)? {
            let root = rights.first().map(number_outside).transpose();
            let root = root.map_err(failed)?;
            let stage = event.stage.and_then(|number| STAGES.get(number as usize));
            let veto = stage.and_then(|stage| observer.stage(*stage, root).err());
            let answer = Answer {
                goes_on: veto.is_none(),
                root: root.map(|root| root.as_raw_nonzero().get()),
                veto: veto.map(|veto| veto.0),
            };
            match self.link.send(&answer, &[]) {
                // It was killed meanwhile, which its end tells.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PIPE) => break,
                sent => sent.map_err(failed)?,
            }
            match (event.is_last, root) {
                (true, Some(root)) => {
                    if let Some(guard) = self.guard.take() {
                        guard.dismiss().map_err(failed)?;
                    }
                    if !matches!(self.way, Way::Child) {
                        // The copy has done its work.
                        self.wait_for_copy()?;
                    }
                    self.root = Some(root);
                    return Ok(Outcome::Runs(root));
                }
                (true, None) => return Err(failed(guard::invalid("no root came along"))),
                (false, _) => {}
            }
        }
        let status = self.wait_for_copy()?;
        if let Way::First(first) = &self.way {
            first.end();
        }
        // The kernel has killed it when its tracer, the copy, ended, where that was wanted.
        if let Some(victim) = &self.victim {
            let number = number_outside(victim);
            if number.is_ok_and(|pid| sys::ending::is_ending(pid.as_raw_nonzero().get())) {
                wait_for_victim(victim);
            }
        }
        Ok(Outcome::Ended(status))
    }

    /// The error for work that has ended so, where that is no success.
    ///
    /// # Errors
    /// [`Error::Inside`], which the copy has told of; [`Error::Died`] where it could not.
    pub fn judge(&self, status: WaitStatus) -> Result<()> {
        match status.exit_status() {
            Some(0) => Ok(()),
            Some(code) => Err(Error::Inside { code }),
            None => {
                let how = crate::text::describe_status(status.as_raw());
                let doing = "the copy of this process in the tree's namespaces ended early";
                Err(Error::kernel(doing, io::Error::other(how)))
            }
        }
    }

    /// Waits until the tree has ended that the copy has brought back, and gives how its root has.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn wait(&self) -> Result<WaitStatus> {
        let failed = |e| Error::kernel("cannot wait for the root's end", e);
        match &self.way {
            Way::Child => self.wait_for_copy(),
            Way::First(first) => first.wait().map_err(failed),
            Way::Sibling => match wait_for(self.root.unwrap_or(self.copy)) {
                Ok(status) => Ok(status),
                Err(errno) => Err(failed(errno.into())),
            },
        }
    }

    fn wait_for_copy(&self) -> Result<WaitStatus> {
        let ended = wait_for(self.copy);
        ended.map_err(|errno| {
            Error::kernel("cannot wait for the copy in the tree's namespaces", errno)
        })
    }
}

/// Waits for the end of a child.
fn wait_for(child: Pid) -> rustix::io::Result<WaitStatus> {
    let ended = rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))?;
    ended.map_or_else(|| unreachable!("it waits"), |(_, status)| Ok(status))
}

/// Waits for the end of process 1 of a namespace, which has to wait itself until somebody reaps
/// those that have entered the namespace from outside.
fn wait_for_victim(victim: &OwnedFd) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let ended = guard::wait([Some(victim.as_fd())], Some(Instant::now() + PATIENCE));
    if !ended.is_ok_and(|[ended]| ended) {
        log::warn!("process 1 of the tree's namespace was killed, and does not end");
    }
}

/// The number that the process of a pidfd has in this process's namespace.
fn number_outside(pidfd: &OwnedFd) -> io::Result<Pid> {
    let text = procfs::read_text(format_args!("self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    let number = number.filter(|number| *number > 0).and_then(Pid::from_raw);
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}
