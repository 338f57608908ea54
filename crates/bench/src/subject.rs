//! What is measured: a tree of tasks with memory, whose first task watches the clock all the time.
//!
//! The first task can be asked from outside, by reading its memory: it counts how often it saw the
//! clock, and keeps the longest time between two looks. That is how long it could not run.
use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::stdio;
use rustix::time::{ClockId, clock_gettime};
use sys::fork::{Fork, fork};

use crate::error::{Error, Result, file_error, kernel_error};
use crate::workload::Workload;
use crate::{furnishing, text};

/// The size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Which subject.
#[derive(clap::Args)]
pub struct Arguments {
    /// A workload's name.
    workload: String,
}

/// What the first task tells: looks at the clock, the longest time between two of them in
/// nanoseconds, and when that ended, in nanoseconds since 1970.
static PULSE: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// Becomes the subject: writes `PULSE-ADDRESS MEMORY-ADDRESS` on stdout when all of it is there,
/// and never returns.
///
/// # Errors
/// When a task cannot be made.
pub fn run(arguments: &Arguments) -> Result<()> {
    let workload = Workload::find(&arguments.workload).ok_or_else(|| Error::Nothing {
        what: format!("no workload {}", arguments.workload),
    })?;
    let mut ready = keep_stdout()?;
    let descriptors = furnishing::descriptors(workload.descriptors)?;
    let mappings = furnishing::mappings(workload.mappings)?;
    let mut memory = Vec::new();
    if !workload.own_memory {
        memory = write_memory(workload, 0)?;
    }
    let (mut started, begun) = std::io::pipe().map_err(kernel_error("make a pipe"))?;
    let place = grow(workload.children)?;
    if workload.own_memory {
        memory = write_memory(workload, std::process::id().into())?;
    }
    if place == Place::Below {
        black_box((&memory, &descriptors, &mappings));
        // The last writer that goes lets the first task's read end.
        drop((ready, started, begun));
        loop {
            std::thread::park();
        }
    }
    drop(begun);
    started
        .read_to_end(&mut Vec::new())
        .map_err(kernel_error("wait for the tree"))?;
    drop(started);
    let memory_at = match &mappings {
        Some(mappings) => mappings.address(),
        None => memory.as_ptr().addr() as u64,
    };
    let told = writeln!(ready, "{} {memory_at}", PULSE.as_ptr().addr());
    told.map_err(kernel_error("tell that the subject is ready"))?;
    drop(ready);
    black_box((&memory, &descriptors, &mappings));
    beat()
}

/// Begins a session with /dev/null as stdout; returns what stdout was.
///
/// # Errors
/// When the kernel refuses that.
pub fn keep_stdout() -> Result<File> {
    rustix::process::setsid().map_err(kernel_error("begin a session"))?;
    let kept = File::from(
        rustix::io::fcntl_dupfd_cloexec(stdio::stdout(), 3).map_err(kernel_error("keep stdout"))?,
    );
    let null = std::path::Path::new("/dev/null");
    let null = File::options()
        .read(true)
        .write(true)
        .open(null)
        .map_err(file_error("open", null))?;
    stdio::dup2_stdout(&null).map_err(kernel_error("let go of stdout"))?;
    Ok(kept)
}

/// Fills a page with numbers that go on from `word`.
pub fn fill_page(page: &mut [u8], word: &mut u64) {
    for eight in page.chunks_exact_mut(8) {
        // xorshift: quick, and nothing that compresses away.
        *word ^= *word << 13;
        *word ^= *word >> 7;
        *word ^= *word << 17;
        eight.copy_from_slice(&word.to_ne_bytes());
    }
}

/// Where in the tree a task stands.
#[derive(PartialEq, Eq)]
enum Place {
    First,
    Below,
}

/// Starts the tree's levels, and returns in every task of it.
fn grow(levels: &[usize]) -> Result<Place> {
    let mut place = Place::First;
    'level: for children in levels {
        for _ in 0..*children {
            if fork().map_err(kernel_error("start a task of the tree"))? == Fork::Child {
                place = Place::Below;
                continue 'level;
            }
        }
        break;
    }
    Ok(place)
}

/// Writes every page: with numbers that differ from page to page, and from those of another
/// `seed`, or with zeros, or with text.
fn write_memory(workload: &Workload, seed: u64) -> Result<Vec<u8>> {
    let bytes = usize::try_from(workload.memory_bytes).expect("64-bit addresses");
    let mut memory = vec![0u8; bytes];
    if workload.is_text {
        text::fill(&mut memory)?;
        return Ok(memory);
    }
    let mut word = 0x9e37_79b9_7f4a_7c15_u64 ^ seed << 32;
    for (number, page) in (0u64..).zip(memory.chunks_exact_mut(PAGE_BYTES)) {
        if number % 100 < workload.zero_percent {
            black_box(page).fill(black_box(0));
            continue;
        }
        fill_page(page, &mut word);
    }
    Ok(memory)
}

/// Looks at the clock for ever.
fn beat() -> ! {
    let [beats, longest_ns, end_ns] = &PULSE;
    let mut last_ns = now_ns();
    loop {
        let now_ns = now_ns();
        let gap_ns = now_ns.saturating_sub(last_ns);
        if gap_ns > longest_ns.load(Ordering::Relaxed) {
            longest_ns.store(gap_ns, Ordering::Relaxed);
            end_ns.store(now_ns, Ordering::Relaxed);
        }
        last_ns = now_ns;
        beats.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the time since 1970 in nanoseconds.
///
/// Of all clocks this one is the same everywhere: CRIU restores into a time namespace in which the
/// monotonic clock goes on as if no time had passed.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    let seconds = u64::try_from(now.tv_sec).expect("the time since 1970 is never below 0");
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).expect("never below 0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload;

    #[test]
    fn nine_of_ten_pages_are_zero() {
        let zero1g = Workload::find("zero1g").unwrap();
        let small = Workload {
            memory_bytes: 1000 * PAGE_BYTES as u64,
            ..*zero1g
        };
        let memory = write_memory(&small, 0).unwrap();
        let zeros = memory
            .chunks(PAGE_BYTES)
            .filter(|page| page.iter().all(|byte| *byte == 0));
        assert_eq!(zeros.count(), 900);
    }

    #[test]
    fn every_workload_can_be_asked_for_by_name() {
        for workload in workload::ALL {
            assert_eq!(Workload::find(workload.name), Some(workload));
        }
    }
}
