//! A sentinel: finishes or takes back the one step of a dump or restore that is not atomic, if we
//! are killed in the middle of it.
//!
//! Killing the tasks of a saved tree, or letting those of a restored one go, takes a call a task,
//! and their connections some more. If this process is killed between two of them, half a tree
//! would be left, or connections that nobody holds back. So a child process waits meanwhile: told
//! that all went well, it ends; if instead the pipe to it breaks, it takes back what was prepared,
//! or finishes what was begun.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setsid, waitpid};
use sys::fork::fork_for;

use crate::{Error, Result};

const COMMITTED: u8 = b'c';
const DISMISSED: u8 = b'.';

/// A waiting child process.
#[derive(Debug)]
pub(crate) struct Sentinel {
    child: Pid,
    pipe: OwnedFd,
}

impl Sentinel {
    /// Posts a sentinel that has copies of the descriptors `kept`. When this process ends before
    /// it has dismissed it, the sentinel calls `take_back`, or, after [`Sentinel::commit`],
    /// `finish`.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn post(
        kept: &[BorrowedFd<'_>],
        take_back: impl FnOnce(),
        finish: impl FnOnce(),
    ) -> Result<Self> {
        let failed = |e: std::io::Error| Error::kernel("cannot post a sentinel", e);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        // It keeps nothing else of the parent's, not even the other end.
        let kept = [kept, &[reader.as_fd()]].concat();
        let child = fork_for(&kept, || match end_of(&reader) {
            End::Dismissed => {}
            End::Before => take_back(),
            End::Within => finish(),
        });
        Ok(Self {
            child: child.map_err(failed)?,
            pipe: writer,
        })
    }

    /// Tells the sentinel that the step has begun and is to be finished, whoever ends.
    pub fn commit(&self) {
        // Where it was killed, nothing can be told.
        let _ = rustix::io::write(&self.pipe, &[COMMITTED]);
    }

    /// Sends the sentinel away: the step is complete, or nothing is to be done about it.
    pub fn dismiss(self) {
        let told = rustix::io::write(&self.pipe, &[DISMISSED]);
        if told.is_ok() {
            let _ = waitpid(Some(self.child), WaitOptions::empty());
        }
    }
}

/// How the process ended that a sentinel watches.
enum End {
    /// It did not, or all went well.
    Dismissed,
    /// Before the step.
    Before,
    /// Within the step.
    Within,
}

fn end_of(pipe: &OwnedFd) -> End {
    // Nothing that ends the parent's group may end this process.
    let _ = setsid();
    let mut end = End::Before;
    loop {
        let mut byte = [0];
        match rustix::io::read(pipe, &mut byte) {
            Err(Errno::INTR) => {}
            Ok(1..) if byte[0] == COMMITTED => end = End::Within,
            Ok(1..) => return End::Dismissed,
            _ => return end,
        }
    }
}

/// Kills processes; some may be gone.
pub(crate) fn kill_all(pids: &[i32]) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}
