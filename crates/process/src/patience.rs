//! Trying again: what keeps a tree from being saved, and passes.

use std::time::{Duration, Instant};

use resources::Error as Resource;
use resources::fd::tcp::newcomers::Newcomers;

use crate::homework::Homework;
use crate::options::Allow;
use crate::{Error, Result};

/// How long the tree runs before the second try; each time twice as long, up to the last.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// From which try on nobody gets a new connection: a server that is busy enough always has somebody
/// waiting when it is stopped.
const HOLD_FROM: u32 = 4;

/// How a dump goes about what passes.
pub(crate) struct Patience {
    deadline: Option<Instant>,
    /// Whether it can begin anew after it has looked at memory.
    again_late: bool,
    tries: u32,
    /// Clients that ask the tree for connections meanwhile.
    pub newcomers: Newcomers,
    /// Facts that the dump finds out while the tree runs.
    pub homework: Homework,
}

impl Patience {
    /// A dump that waits for at most `timeout`.
    pub fn new(newcomers: Newcomers, timeout: Option<Duration>, again_late: bool) -> Self {
        Self {
            deadline: timeout.map(|timeout| Instant::now() + timeout),
            again_late,
            tries: 1,
            newcomers,
            homework: Homework::default(),
        }
    }

    /// Waits for a while in which the tree runs, or does what is to be done meanwhile; `is_halted`
    /// says whether it does not run even then.
    ///
    /// # Errors
    /// `error`, when another try is of no use or there is no time for one.
    pub fn wait(&mut self, error: Error, is_halted: bool, allow: &Allow) -> Result<()> {
        let Error::Resource(Resource::Passing { early, by_tree, .. }) = &error else {
            return Err(error);
        };
        if self.homework.run(allow, self.deadline)? {
            return Ok(());
        }
        let in_time = self
            .deadline
            .is_none_or(|deadline| Instant::now() < deadline);
        let is_vain = *by_tree && is_halted;
        if !in_time || is_vain || !(*early || self.again_late) {
            return Err(error);
        }
        log::info!("try {} is over: {error}", self.tries);
        self.tries += 1;
        if self.tries >= HOLD_FROM {
            self.newcomers.hold_from_now();
        }
        let pause = PAUSE * 2u32.saturating_pow(self.tries.min(16) - 2);
        std::thread::sleep(pause.min(LONGEST_PAUSE));
        Ok(())
    }
}
