//! How long one wait for a thread may last.

use std::time::{Duration, Instant};

/// The end of a wait, as far as a [`sys::tick::Ticker`] sets one. It decides nothing: where it is
/// over, the state of things is looked at once more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    begun: Instant,
    longest: Option<Duration>,
}

impl Limit {
    /// Of a wait that begins now.
    pub fn begin() -> Self {
        Self {
            begun: Instant::now(),
            longest: sys::tick::longest(),
        }
    }

    /// True if the time is over.
    pub fn is_over(self) -> bool {
        self.longest
            .is_some_and(|longest| self.begun.elapsed() > longest)
    }

    /// How long the wait has lasted, in milliseconds.
    pub fn waited_ms(self) -> u128 {
        self.begun.elapsed().as_millis()
    }
}
