//! Children that try something and end: probes that change the process, and tracees.
use std::fs::File;
use std::io::{Read as _, Write as _};

use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid,
};

use super::{Outcome, why};
use crate::fork::{Fork, exit_now, fork};
use crate::ptrace;

/// Calls `probe` in a child and returns what it found.
pub(super) fn run(probe: fn() -> Outcome) -> Outcome {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| why("pipe2", &error.into()))?;
    match fork().map_err(|error| why("fork", &error))? {
        Fork::Child => {
            drop(reader);
            let text = match probe() {
                Ok(remark) => format!("+{remark}"),
                Err(reason) => format!("-{reason}"),
            };
            // Nobody is told when this fails: the parent finds an empty pipe.
            let _ = File::from(writer).write_all(text.as_bytes());
            exit_now(0)
        }
        Fork::Parent(child) => {
            drop(writer);
            let mut text = String::new();
            let read = File::from(reader).read_to_string(&mut text);
            reap(child);
            read.map_err(|error| why("read", &error))?;
            match text.split_at_checked(1) {
                Some(("+", remark)) => Ok(remark.to_owned()),
                Some((_, reason)) => Err(reason.to_owned()),
                None => Err("the probe's process died".to_owned()),
            }
        }
    }
}

/// Calls `look` with the pid of a stopped tracee that prepared itself with `prepare`.
pub(super) fn traced(prepare: fn(), look: impl FnOnce(i32) -> Outcome) -> Outcome {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| why("pipe2", &error.into()))?;
    match fork().map_err(|error| why("fork", &error))? {
        Fork::Child => {
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            prepare();
            drop((reader, writer));
            loop {
                // SAFETY: pause waits for a signal and touches no memory.
                unsafe { libc::pause() };
            }
        }
        Fork::Parent(child) => {
            drop(writer);
            // The end of file tells that the child has prepared itself.
            let ready = File::from(reader).read(&mut [0]);
            let pid = child.as_raw_nonzero().get();
            let outcome = ready
                .and_then(|_| ptrace::seize(pid, true))
                .and_then(|()| ptrace::interrupt(pid))
                .and_then(|()| ptrace::wait(pid))
                .map_err(|error| why("ptrace", &error))
                .and_then(|_| look(pid));
            let _ = kill_process(child, Signal::KILL);
            reap(child);
            outcome
        }
    }
}

fn reap(child: Pid) {
    while let Err(rustix::io::Errno::INTR) = waitpid(Some(child), WaitOptions::empty()) {}
}
