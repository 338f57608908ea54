//! Who has a number that a task of the tree is to get.
//!
//! A number is free when no process, thread, process group or session has it any more. The kernel
//! says only that it is not (`EEXIST` of clone3(2)); who has it stands in /proc.
//!
//! Terminals and addresses may outlive a tree, too: what lies in its unix sockets' own queues is
//! closed by a collector of the kernel's, ten milliseconds after the tree is gone and later. Nobody
//! is told when.

use std::time::{Duration, Instant};

use freeze::stat_of;
use rustix::io::Errno;
use rustix::process::Pid;
use sys::proc::Stat;

use super::ending::is_ending;
use crate::error::Holder;
use crate::{Error, Result};

/// How long is waited for a number whose owners are ending.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long is waited for what the collector may have to close.
const PATIENCE_WITH_COLLECTOR: Duration = Duration::from_millis(250);

/// Refuses a number that a process has, before anything is opened: who connects to a listener of a
/// try that fails is cut off, so there is to be none.
///
/// # Errors
/// [`Error::Taken`], by whom is not looked at.
pub(super) fn check_free(pid: Pid) -> Result<()> {
    match rustix::process::test_kill_process(pid) {
        Err(Errno::SRCH) => Ok(()),
        _ => Err(Error::Taken {
            pid: pid.as_raw_pid(),
            by: Holder::Unseen,
        }),
    }
}

/// Waits for what is to become free, of one restore.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    deadline: Option<Instant>,
    collected_by: Option<Instant>,
}

impl Waiting {
    /// Waits until `pid`, which was taken a moment ago, is free: as long as all that have it are
    /// ending, and not for ever.
    ///
    /// # Errors
    /// [`Error::Taken`] naming who has it and stays.
    pub fn wait_free(&mut self, pid: i32) -> Result<()> {
        let deadline = *self
            .deadline
            .get_or_insert_with(|| Instant::now() + PATIENCE);
        let mut pause = Duration::from_millis(1);
        loop {
            let found = holder(pid);
            let ending = found.as_ref().is_none_or(|(_, ending)| *ending);
            if !ending || Instant::now() > deadline {
                let by = found.map_or(Holder::Unseen, |(by, _)| by);
                return Err(Error::Taken { pid, by });
            }
            // Also where it is free now: whoever it was may not be seen from here.
            std::thread::sleep(pause);
            if found.is_none() {
                return Ok(());
            }
            pause = (2 * pause).min(Duration::from_millis(20));
        }
    }

    /// Gives the kernel's collector a moment; `false` where it has had its time.
    pub fn wait_for_collector(&mut self) -> bool {
        let now = Instant::now();
        let end = *self
            .collected_by
            .get_or_insert(now + PATIENCE_WITH_COLLECTOR);
        if now > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
        true
    }
}

/// Who has the number, and whether they are ending; if there are several, one that is not.
fn holder(pid: i32) -> Option<(Holder, bool)> {
    match stat_of(pid) {
        Some(stat) => Some((process(pid, &stat), is_ending(pid))),
        None => member(pid),
    }
}

fn process(pid: i32, stat: &Stat) -> Holder {
    let name = String::from_utf8_lossy(&stat.comm).into_owned();
    let status = sys::procfs::read(format_args!("{pid}/status"));
    let status = status
        .ok()
        .and_then(|text| sys::proc::Status::parse(&text).ok());
    match status {
        Some(status) if status.tgid != pid => Holder::Thread {
            pid: status.tgid,
            name,
        },
        _ if sys::process::has_ended(stat) => Holder::Zombie {
            parent: stat.ppid,
            name,
        },
        _ => Holder::Process { name },
    }
}

/// A process whose session or process group has the number, though its leader is gone.
fn member(number: i32) -> Option<(Holder, bool)> {
    let mut found = None;
    for (pid, stat) in sys::ending::members(number) {
        let holder = Holder::Member {
            pid,
            name: String::from_utf8_lossy(&stat.comm).into_owned(),
            of: if stat.session == number {
                "session"
            } else {
                "process group"
            },
        };
        let ending = is_ending(pid);
        found = Some((holder, ending));
        if !ending {
            break;
        }
    }
    found
}
