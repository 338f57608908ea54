//! A job of the shell in which a restore runs: it has the terminal as long as it is in front.
//!
//! What a shell does for `fg`, the restorer does for the restored tree, and hands on what the shell
//! and the terminal do to it: stopped by the terminal, the tree stops the restorer, and goes on
//! with it; what would interrupt, stop or end the restorer does so to the tree.

use std::io;
use std::os::fd::BorrowedFd;

use freeze::stat_of;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpgrp, kill_process_group, waitpid};
use rustix::termios::tcgetpgrp;
use sys::job::{Told, set_foreground};

use crate::records::Saved;
use crate::{Error, Result};

/// A restored tree whose session is the restorer's, and whose terminal is the standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The group of the tree that belongs in front.
    group: Pid,
    /// The restorer's own.
    own: Pid,
    /// Whether the tree has been put in front and nobody else has been since, as far as the shell
    /// is concerned.
    in_front: bool,
}

fn terminal() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}

impl Job {
    /// The job that `saved` is for the shell, if it has a process group of its own and the standard
    /// input is the terminal of the restorer's session.
    pub(super) fn of(saved: &Saved<'_>) -> Option<Self> {
        tcgetpgrp(terminal()).ok()?;
        Some(Self {
            group: group_of(saved).and_then(Pid::from_raw)?,
            own: getpgrp(),
            in_front: false,
        })
    }

    /// True if the shell has put the restorer in front, and the restorer has not passed that on.
    fn is_owed_the_front(&self) -> bool {
        tcgetpgrp(terminal()).ok() == Some(self.own)
    }

    /// Puts the tree in front, if the restorer is.
    pub(super) fn give(&mut self) -> Result<()> {
        if !self.is_owed_the_front() {
            return Ok(());
        }
        let failed = |e| Error::kernel("cannot give the terminal to the restored tree", e);
        set_foreground(terminal(), self.group).map_err(failed)?;
        self.in_front = true;
        Ok(())
    }

    /// Puts the restorer in front again, where the tree was.
    pub(super) fn take_back(&mut self) {
        if !std::mem::take(&mut self.in_front) {
            return;
        }
        if let Err(error) = set_foreground(terminal(), self.own) {
            log::warn!("the terminal is not taken back: {error}");
        }
    }

    /// Waits until the root task, a child of this process, has ended, and takes the terminal back
    /// when it has or when it is stopped. Until then a signal that the shell or the terminal sends
    /// the restorer takes effect on the tree.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn wait(&mut self, root: Pid) -> Result<WaitStatus> {
        let told = Told::begin();
        let told = told.map_err(|e| Error::kernel("cannot notice what the shell tells", e))?;
        // Its stop may be one that was told before the dump.
        if stat_of(root.as_raw_nonzero().get()).is_some_and(|stat| stat.state == b'T') {
            self.suspend(&told);
        }
        let ended = self.wait_told(root, &told);
        self.take_back();
        ended.map_err(|e| Error::kernel(format!("cannot wait for the root task {root}"), e))
    }

    fn wait_told(&mut self, root: Pid, told: &Told) -> io::Result<WaitStatus> {
        loop {
            let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
            match waitpid(Some(root), options) {
                Ok(Some((_, status))) if status.stopped() => self.stopped(status, told),
                Ok(Some((_, status))) => return Ok(status),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(None) => {
                    for signal in told.wait()? {
                        self.hear(signal);
                    }
                }
            }
        }
    }

    /// Does what a signal to the restorer asks of the job.
    fn hear(&mut self, signal: Signal) {
        match signal {
            Signal::CHILD => {}
            Signal::CONT => self.go_on(),
            signal => {
                // The shell brings a job that runs to the front without a word to it.
                self.come_to_the_front();
                let _ = kill_process_group(self.group, signal);
            }
        }
    }

    /// Stops with the tree, unless it only wanted the terminal, which the restorer has for it.
    fn stopped(&mut self, status: WaitStatus, told: &Told) {
        let signal = status.stopping_signal().and_then(Signal::from_named_raw);
        let wants_terminal = matches!(signal, Some(Signal::TTIN | Signal::TTOU));
        match wants_terminal && self.is_owed_the_front() {
            true => self.go_on(),
            false => self.suspend(told),
        }
    }

    /// Stops as the tree has, so that the shell sees it, and goes on with it.
    fn suspend(&mut self, told: &Told) {
        self.take_back();
        if let Err(error) = told.stop_group() {
            log::warn!("cannot stop with the restored tree: {error}");
        }
        self.go_on();
    }

    /// Has the tree go on, in front if the shell has put this process there.
    fn go_on(&mut self) {
        self.come_to_the_front();
        let _ = kill_process_group(self.group, Signal::CONT);
    }

    fn come_to_the_front(&mut self) {
        // Somebody else is where the shell has taken the terminal away.
        self.in_front &= tcgetpgrp(terminal()).ok() == Some(self.group);
        if let Err(error) = self.give() {
            log::warn!("{}", error.with_causes());
        }
    }
}

/// The group of the tree that was in front at the dump, or else its root's, in a tree whose session
/// is led from outside.
fn group_of(saved: &Saved<'_>) -> Option<i32> {
    let root = &saved.tasks.first()?.node;
    let has = |pid| saved.tasks.iter().any(|task| task.node.pid == pid);
    let living = saved.tasks.iter().filter(|task| !task.threads.is_empty());
    let groups = living.map(|task| task.node.group).collect::<Vec<_>>();
    // One that is led from outside as well is the restorer's own afterwards.
    let of_tree = |group: i32| groups.contains(&group) && (group != root.group || has(group));
    let candidates = [root.foreground, root.group].into_iter();
    let mut candidates = candidates.filter(|group| *group > 0 && of_tree(*group));
    candidates.next().filter(|_| !has(root.session))
}
