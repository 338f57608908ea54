//! A watchdog: finishes or takes back the one step of a dump or restore that is not atomic, if we
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

use crate::{Error, Result, stat_of};

/// A waiting child process. Dropped, it does what it would do if this process ended.
#[derive(Debug)]
pub struct Watchdog {
    child: Pid,
    pipe: Option<OwnedFd>,
}

/// A task that a watchdog sends signals to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its pid.
    pub pid: i32,
    /// When it was started, which tells it from a later one with its pid.
    pub start_ticks: u64,
    /// Whether it was stopped by a signal before we stopped it.
    pub stopped: bool,
}

/// What the parent says, as the first word of a message.
const TARGETS: u64 = 1;
const COMMITTED: u64 = 2;
const DISMISSED: u64 = 3;

impl Watchdog {
    /// Posts a watchdog that has copies of the descriptors `kept`, and sees itself when the tasks
    /// `pids` were started. When this process ends before it has dismissed it, the watchdog calls
    /// `take_back` with these tasks or those that it was told, or, after [`Watchdog::commit`],
    /// `finish`.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn post(
        kept: &[BorrowedFd<'_>],
        pids: &[i32],
        take_back: impl FnOnce(&[Target]),
        finish: impl FnOnce(&[Target]),
    ) -> Result<Self> {
        let failed = |e: std::io::Error| Error::kernel("cannot post a watchdog", e);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        // It keeps nothing else of the parent's, not even the other end.
        let kept = [kept, &[reader.as_fd()]].concat();
        let child = fork_for(&kept, || {
            // Nothing that ends the parent's group may end this process.
            let _ = setsid();
            match end_of(&reader, found(pids)) {
                End::Dismissed => {}
                End::Before(targets) => take_back(&targets),
                End::Within(targets) => finish(&targets),
            }
        });
        Ok(Self {
            child: child.map_err(failed)?,
            pipe: Some(writer),
        })
    }

    /// Tells the watchdog which tasks it is about.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn tell(&self, targets: &[Target]) -> Result<()> {
        let mut words = vec![TARGETS, targets.len() as u64];
        for target in targets {
            let pid = u64::from(target.pid.cast_unsigned());
            words.extend([pid << 1 | u64::from(target.stopped), target.start_ticks]);
        }
        let said = self.say(&words);
        said.map_err(|errno| Error::kernel("cannot tell the watchdog", errno))
    }

    /// Tells the watchdog that the step has begun and is to be finished, whoever ends.
    pub fn commit(&self) {
        // Where it was killed, nothing can be told.
        let _ = self.say(&[COMMITTED]);
    }

    /// Sends the watchdog away: the step is complete, or nothing is to be done about it. Its end is
    /// waited for when this is dropped.
    pub fn dismiss(&self) {
        let _ = self.say(&[DISMISSED]);
    }

    fn say(&self, words: &[u64]) -> rustix::io::Result<()> {
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        let bytes = bytes.collect::<Vec<_>>();
        let pipe = self.pipe.as_ref().expect("only drop takes it");
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            rest = &rest[rustix::io::retry_on_intr(|| rustix::io::write(pipe, rest))?..];
        }
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = rustix::io::retry_on_intr(|| waitpid(Some(self.child), WaitOptions::empty()));
    }
}

/// How the process ended that a watchdog watches.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It did not, or all went well.
    Dismissed,
    /// Before the step.
    Before(Vec<Target>),
    /// Within the step.
    Within(Vec<Target>),
}

/// The tasks with these pids.
fn found(pids: &[i32]) -> Vec<Target> {
    let target = |pid: &i32| {
        Some(Target {
            pid: *pid,
            start_ticks: stat_of(*pid)?.start_ticks,
            stopped: false,
        })
    };
    pids.iter().filter_map(target).collect()
}

fn end_of(pipe: &OwnedFd, mut targets: Vec<Target>) -> End {
    let mut committed = false;
    loop {
        match next(pipe) {
            Some(COMMITTED) => committed = true,
            Some(DISMISSED) => return End::Dismissed,
            // What was told in part does not count: nothing has been done with it.
            Some(_) => targets = read_targets(pipe).unwrap_or_default(),
            None if committed => return End::Within(targets),
            None => return End::Before(targets),
        }
    }
}

fn read_targets(pipe: &OwnedFd) -> Option<Vec<Target>> {
    let target = |_| {
        let (word, start_ticks) = (next(pipe)?, next(pipe)?);
        Some(Target {
            pid: i32::try_from(word >> 1).ok()?,
            start_ticks,
            stopped: word & 1 != 0,
        })
    };
    (0..next(pipe)?).map(target).collect()
}

/// Reads a word; none when the pipe is broken.
fn next(pipe: &OwnedFd) -> Option<u64> {
    let mut word = [0; size_of::<u64>()];
    let mut filled = 0;
    while filled < word.len() {
        match rustix::io::read(pipe, &mut word[filled..]) {
            Err(Errno::INTR) => {}
            Ok(got @ 1..) => filled += got,
            _ => return None,
        }
    }
    Some(u64::from_ne_bytes(word))
}

/// Sends a signal to those tasks that are still there.
pub fn send<'a>(targets: impl IntoIterator<Item = &'a Target>, signal: Signal) {
    for target in targets {
        let is_it = stat_of(target.pid).is_some_and(|stat| stat.start_ticks == target.start_ticks);
        if let (true, Some(pid)) = (is_it, Pid::from_raw(target.pid)) {
            let _ = kill_process(pid, signal);
        }
    }
}

/// Has those tasks go on that were stopped by us and by nobody before.
pub fn send_on(targets: &[Target]) {
    send(
        targets.iter().filter(|target| !target.stopped),
        Signal::CONT,
    );
}

#[cfg(test)]
mod tests {
    use testkit::program::{Program, Spawned};
    use testkit::wait::{SOON, wait_until};

    use super::*;

    fn target(pid: i32, start_ticks: u64, stopped: bool) -> Target {
        Target {
            pid,
            start_ticks,
            stopped,
        }
    }

    /// What a watchdog makes of these words, of which the last bytes may be missing.
    fn end_after(words: &[u64], missing: usize) -> End {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
        let bytes = bytes.collect::<Vec<_>>();
        rustix::io::write(&writer, &bytes[..bytes.len() - missing]).expect("it is short");
        drop(writer);
        end_of(&reader, Vec::new())
    }

    #[test]
    fn what_was_told_in_part_has_not_begun() {
        let both = vec![target(4_194_303, u64::MAX, true), target(7, 5, false)];
        let told = [TARGETS, 2, 4_194_303 << 1 | 1, u64::MAX, 14, 5];
        assert_eq!(end_after(&[], 0), End::Before(vec![]));
        assert_eq!(end_after(&told, 0), End::Before(both.clone()));
        assert_eq!(end_after(&told, 1), End::Before(vec![]));
        let committed = [told.as_slice(), &[COMMITTED]].concat();
        assert_eq!(end_after(&committed, 0), End::Within(both.clone()));
        assert_eq!(end_after(&committed, 1), End::Before(both));
        let dismissed = [committed.as_slice(), &[DISMISSED]].concat();
        assert_eq!(end_after(&dismissed, 0), End::Dismissed);
    }

    #[test]
    fn signals_reach_those_that_were_told_and_no_later_ones() {
        let [one, later] = [(); 2].map(|()| Program::new("sleep").arg("1000").spawn());
        let started = |program: &Spawned| {
            let pid = program.pid().cast_signed();
            (pid, stat_of(pid).expect("it lives").start_ticks)
        };
        let ((one_pid, ticks), (later_pid, late)) = (started(&one), started(&later));
        let targets = [
            target(one_pid, ticks, false),
            target(later_pid, late - 1, false),
        ];
        send(&targets, Signal::KILL);
        wait_until("its end", SOON, || !testkit::tree::is_alive(one.pid()));
        assert!(testkit::tree::is_alive(later.pid()));
    }
}
