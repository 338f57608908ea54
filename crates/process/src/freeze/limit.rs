//! How long a tree may be stopped.

use std::time::{Duration, Instant};

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

/// How long a tree may be stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
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
