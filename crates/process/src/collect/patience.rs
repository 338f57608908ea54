//! How long a stopped tree is kept waiting for requests that end by themselves.

use std::time::{Duration, Instant};

use crate::Result;

const PATIENCE: Duration = Duration::from_millis(200);

/// Waits while `is_busy`, as long as the tree may be kept waiting.
pub(super) fn wait_while(mut is_busy: impl FnMut() -> Result<bool>) -> Result<()> {
    const LONGEST_PAUSE: Duration = Duration::from_millis(5);
    let begun = Instant::now();
    let mut pause = Duration::from_micros(50);
    while begun.elapsed() <= PATIENCE && is_busy()? {
        std::thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
    Ok(())
}
