//! How long a tree may be stopped.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rustix::thread::set_current_timer_slack;
use sys::tick::Deadline;

use crate::{Error, Result};

/// How long a stop may take where nobody says so.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// The end of a dumper that stands still while a tree is stopped, with this `timeout`: as long as
/// it can do anything, it sees for itself that the time is over. Where nobody has set one, it may
/// be slow.
pub(super) fn outlasted(timeout: Duration) -> Result<Deadline> {
    let times = if timeout == DEFAULT_TIMEOUT { 6 } else { 2 };
    let deadline = Deadline::start(timeout.saturating_mul(times));
    deadline.map_err(|e| Error::kernel("cannot start a timer", e))
}

/// Has this thread's timers be exact: what tasks are waited for takes microseconds, and the kernel
/// may add 50 where that is allowed.
pub(super) fn be_exact() {
    let _ = set_current_timer_slack(NonZeroU64::new(1));
}

/// How long a tree may be stopped.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    since: Instant,
    pub(super) deadline: Option<Instant>,
}

impl Limit {
    /// Of a stop that began at `since`.
    pub fn new(since: Instant, timeout: Option<Duration>) -> Self {
        Self {
            since,
            deadline: timeout.map(|timeout| since + timeout),
        }
    }

    /// Takes the limit away.
    pub fn lift(&mut self) {
        self.deadline = None;
    }

    /// To be called after every step.
    ///
    /// # Errors
    /// [`tracee::Error::Stuck`], about thread `tid`, when the time is over.
    pub fn check(self, tid: i32) -> tracee::Result<()> {
        let waited_ms = self.since.elapsed().as_millis();
        match self
            .deadline
            .is_some_and(|deadline| Instant::now() > deadline)
        {
            true => Err(tracee::Error::Stuck { tid, waited_ms }),
            false => Ok(()),
        }
    }
}
