//! The progress bar of long work: on a terminal, where there is much to do.

use std::io::IsTerminal as _;
use std::sync::OnceLock;

use indicatif::{ProgressBar, ProgressStyle};

/// Below this much memory the work is over before a bar could be read.
const WORTH_A_BAR_BYTES: u64 = 128 << 20;

/// A bar that appears when there is something to show, for several threads; it goes when dropped.
#[derive(Debug, Default)]
pub struct Bar(OnceLock<Option<ProgressBar>>);

impl Bar {
    /// Shows a bar while something is done that tells how far it is.
    pub fn during<T>(work: impl FnOnce(&(dyn Fn(u64, u64) + Sync)) -> T) -> T {
        let bar = Self::default();
        work(&|done_bytes, total_bytes| bar.show(done_bytes, total_bytes))
    }

    /// Shows how far the work is.
    pub fn show(&self, done_bytes: u64, total_bytes: u64) {
        let bar = self.0.get_or_init(|| {
            let wanted = total_bytes >= WORTH_A_BAR_BYTES && std::io::stderr().is_terminal();
            wanted.then(|| new(total_bytes))
        });
        let Some(bar) = bar else { return };
        // There may be more to do than was known.
        if bar.is_finished() && done_bytes < total_bytes {
            bar.reset();
        }
        bar.set_length(total_bytes);
        bar.set_position(done_bytes);
        if done_bytes >= total_bytes {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(Some(bar)) = self.0.get() {
            bar.finish_and_clear();
        }
    }
}

fn new(total_bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:40} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    );
    ProgressBar::new(total_bytes).with_style(style.expect("the template is constant and correct"))
}
