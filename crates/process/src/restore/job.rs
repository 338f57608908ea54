//! A job of the shell in which a restore runs: it has the terminal as long as it is in front.
//!
//! What a shell does for `fg`, the restorer does for the restored tree, and hands on what the shell
//! does to it: stopped by the terminal, the tree stops the restorer, and goes on with it.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpgrp, kill_current_process_group, kill_process_group,
    waitpid,
};
use rustix::termios::tcgetpgrp;
use sys::job::{be_interrupted_by_continue, set_foreground};

use crate::freeze::stat_of;
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
    /// The job that `saved` is for the shell, if it has a process group of its own and the restorer
    /// is in front.
    pub(super) fn of(saved: &Saved<'_>) -> Option<Self> {
        let own = getpgrp();
        let in_front = tcgetpgrp(terminal()).ok() == Some(own);
        let group = group_of(saved).and_then(Pid::from_raw);
        Some(Self {
            group: group.filter(|_| in_front)?,
            own,
            in_front: false,
        })
    }

    /// Puts the tree in front.
    pub(super) fn give(&mut self) -> Result<()> {
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
    /// when it has or when it is stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn wait(&mut self, root: Pid) -> Result<WaitStatus> {
        let failed = |e| Error::kernel(format!("cannot wait for the root task {root}"), e);
        be_interrupted_by_continue()
            .map_err(|e| Error::kernel("cannot notice that this process is continued", e))?;
        // Its stop may be one that was told before the dump.
        if stat_of(root.as_raw_nonzero().get()).is_some_and(|stat| stat.state == b'T') {
            self.suspend();
        }
        loop {
            match waitpid(Some(root), WaitOptions::UNTRACED) {
                Ok(Some((_, status))) if status.stopped() => self.suspend(),
                Ok(Some((_, status))) => {
                    self.take_back();
                    return Ok(status);
                }
                Err(Errno::INTR) => self.go_on(),
                Ok(None) => {}
                Err(error) => {
                    self.take_back();
                    return Err(failed(error));
                }
            }
        }
    }

    /// Stops as the tree has, so that the shell sees it, and goes on with it.
    fn suspend(&mut self) {
        self.take_back();
        let _ = kill_current_process_group(Signal::TSTP);
        self.go_on();
    }

    /// Has the tree go on, in front if the shell has put this process there.
    fn go_on(&mut self) {
        let front = tcgetpgrp(terminal()).ok();
        // Somebody else is where the shell has taken the terminal away.
        self.in_front &= front == Some(self.group);
        if front == Some(self.own)
            && let Err(error) = self.give()
        {
            log::warn!("{}", error.with_causes());
        }
        let _ = kill_process_group(self.group, Signal::CONT);
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
