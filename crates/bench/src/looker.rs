//! A target that looks at all of its memory as soon as it was restored, and tells when.
use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Result, kernel_error};
use crate::subject::{PAGE_BYTES, fill_page, keep_stdout, now_ns};

/// A time in which it did not look at the clock was spent in an image.
pub const AWAY: Duration = Duration::from_millis(500);

/// What it is.
#[derive(clap::Args)]
pub struct Arguments {
    /// Memory in MiB, every page with other contents.
    mib: u64,
}

/// What it tells: when it ran again and when it had looked at every page, since 1970 in
/// nanoseconds, and the sum of what it saw.
static TOLD: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// Becomes the target: writes `TOLD-ADDRESS SUM` on stdout when its memory is there, and never
/// returns.
///
/// # Errors
/// When stdout cannot be written.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut ready = keep_stdout()?;
    let bytes = usize::try_from(arguments.mib << 20).expect("64-bit addresses");
    let mut memory = vec![0u8; bytes];
    let mut word = 0x9e37_79b9_7f4a_7c15;
    for page in memory.chunks_exact_mut(PAGE_BYTES) {
        fill_page(page, &mut word);
    }
    // It may be dumped as soon as it has told.
    let last_ns = now_ns();
    let told = writeln!(ready, "{} {}", TOLD.as_ptr().addr(), sum(&memory));
    told.map_err(kernel_error("tell that the target is ready"))?;
    drop(ready);
    let [runs_ns, looked_ns, seen] = &TOLD;
    runs_ns.store(wait_until_back(last_ns), Ordering::Relaxed);
    seen.store(sum(black_box(&memory)), Ordering::Relaxed);
    looked_ns.store(now_ns(), Ordering::Release);
    loop {
        std::thread::park();
    }
}

/// The sum of the first word of each page, in order.
fn sum(memory: &[u8]) -> u64 {
    let pages = memory.chunks_exact(PAGE_BYTES);
    let words = pages.map(|page| u64::from_ne_bytes(page[..8].try_into().expect("eight bytes")));
    words.fold(0, u64::wrapping_add)
}

/// Looks at the clock until it has been away; returns when it was back.
fn wait_until_back(mut last_ns: u64) -> u64 {
    let away_ns = u64::try_from(AWAY.as_nanos()).expect("less than a second");
    loop {
        let now_ns = now_ns();
        if now_ns.saturating_sub(last_ns) >= away_ns {
            return now_ns;
        }
        last_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_page_the_first_word_counts() {
        let mut memory = vec![0; 2 * PAGE_BYTES];
        memory[0] = 3;
        memory[8] = 100;
        memory[PAGE_BYTES] = 4;
        assert_eq!(sum(&memory), 7);
    }
}
