//! A sentinel: finishes the one step of a dump or restore that is not atomic, if we are killed in
//! the middle of it.
//!
//! Killing the tasks of a saved tree, or letting those of a restored one go, takes a call a task.
//! If this process is killed between two of them, half a tree would be left. So for trees of
//! several tasks a child process waits meanwhile: told that all went well, it ends; if instead the
//! pipe to it breaks, it kills the tasks that are left.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setsid, waitpid};
use sys::fork::fork_for;

use crate::{Error, Result};

/// A waiting child process.
#[derive(Debug)]
pub(crate) struct Sentinel {
    child: Pid,
    pipe: OwnedFd,
}

impl Sentinel {
    /// Posts a sentinel that kills `pids` unless it is dismissed; none for a single task, which is
    /// killed or let go by one call.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn post(pids: &[i32]) -> Result<Option<Self>> {
        if pids.len() < 2 {
            return Ok(None);
        }
        let failed = |e: std::io::Error| Error::kernel("cannot post a sentinel", e);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        // It keeps nothing of the parent's, not even the other end.
        let child = fork_for(reader.as_fd(), || watch(&reader, pids)).map_err(failed)?;
        Ok(Some(Self {
            child,
            pipe: writer,
        }))
    }

    /// Sends the sentinel away: the step is complete.
    pub fn dismiss(self) {
        let told = rustix::io::write(&self.pipe, b".");
        if told.is_ok() {
            let _ = waitpid(Some(self.child), WaitOptions::empty());
        }
    }
}

fn watch(pipe: &OwnedFd, pids: &[i32]) {
    // Nothing that ends the parent's group may end this process.
    let _ = setsid();
    loop {
        match rustix::io::read(pipe, &mut [0u8; 1]) {
            Err(Errno::INTR) => {}
            Ok(1..) => return,
            _ => break,
        }
    }
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}
