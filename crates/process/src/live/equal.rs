//! Equal pages of a live dump are stored once: when the tree runs as if nothing had been.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use image::{Run, SpaceId, Writer};
use pages::{Equals, United};

use crate::statistics::as_micros;
use crate::{Observer, Result, Statistics};

/// Finds equal pages among `stored`, the memory of tasks with these `pids` and objects: pages that
/// tasks have at the same place, and `copies`. Returns the runs for the image. `before_bytes` are
/// those that the observer knows of.
pub(super) fn unite(
    stored: Vec<Run>,
    pids: &[i32],
    copies: Vec<(SpaceId, Range<u64>)>,
    writer: &Writer,
    statistics: &mut Statistics,
    (observer, before_bytes): (&Mutex<&mut dyn Observer>, u64),
) -> Result<Vec<Run>> {
    let looking = Instant::now();
    let tasks = pids.iter().map(|pid| SpaceId(pid.cast_unsigned()));
    let tasks = tasks.collect::<HashSet<_>>();
    let of_tasks = stored.iter().filter(|run| tasks.contains(&run.space));
    let Some(equals) = Equals::of_runs(of_tasks, copies) else {
        return Ok(stored);
    };
    let total_bytes = before_bytes + pages::wanted_bytes(&stored, &equals);
    let done_bytes = AtomicU64::new(before_bytes);
    let progress = |bytes| {
        let done_bytes = done_bytes.fetch_add(bytes, Relaxed) + bytes;
        // Nobody panics while holding it; a bar that misses a step is none to stop for.
        if let Ok(mut observer) = observer.try_lock() {
            observer.progress(done_bytes, total_bytes);
        }
    };
    let United { runs, equal_pages } = pages::unite(stored, &equals, writer, &progress)?;
    log::info!("{equal_pages} pages are equal to others");
    statistics.stored_pages -= equal_pages;
    statistics.equal_pages += equal_pages;
    statistics.memory_us += as_micros(looking.elapsed());
    Ok(runs)
}
