//! Trying again: what keeps a tree from being saved, and passes.

use std::time::{Duration, Instant};

use resources::Error as Resource;
use sys::nft;

use crate::{Error, Result};

/// How long the tree runs before the second try; each time twice as long, up to the last.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// From which try on nobody gets a new connection.
const HOLD_FROM: u32 = 4;

/// How a dump goes about what passes.
pub(crate) struct Patience {
    root: i32,
    deadline: Option<Instant>,
    /// Whether it can begin anew after it has looked at memory.
    again_late: bool,
    tries: u32,
    /// Keeps new connections away.
    held: Option<nft::Owned>,
}

impl Patience {
    /// A dump of the tree under `root` that waits for at most `timeout`.
    pub fn new(root: i32, timeout: Option<Duration>, again_late: bool) -> Self {
        Self {
            root,
            deadline: timeout.map(|timeout| Instant::now() + timeout),
            again_late,
            tries: 1,
            held: None,
        }
    }

    /// Waits for a while in which the tree runs.
    ///
    /// # Errors
    /// `error`, when another try is of no use or there is no time for one.
    pub fn wait(&mut self, error: Error) -> Result<()> {
        let Error::Resource(Resource::Passing {
            early, listeners, ..
        }) = &error
        else {
            return Err(error);
        };
        let in_time = self
            .deadline
            .is_none_or(|deadline| Instant::now() < deadline);
        if !in_time || !(*early || self.again_late) {
            return Err(error);
        }
        log::info!("try {} is over: {error}", self.tries);
        self.tries += 1;
        if self.tries >= HOLD_FROM && self.held.is_none() && !listeners.is_empty() {
            // A server that is busy enough always has somebody waiting when it is stopped.
            let name = format!("stillframe-{}-new", self.root);
            self.held = nft::hold_new_meanwhile(&name, listeners)
                .inspect_err(|error| log::debug!("new connections are not held: {error}"))
                .ok();
        }
        let pause = PAUSE * 2u32.saturating_pow(self.tries.min(16) - 2);
        std::thread::sleep(pause.min(LONGEST_PAUSE));
        Ok(())
    }

    /// Lets new connections come again. The result is to be dropped when the tree runs.
    pub fn done(self) -> Option<nft::Leftover> {
        self.held.and_then(nft::Owned::lift)
    }
}
