//! Equal pages of a live dump are stored once: when the tree runs as if nothing had been.

use std::ops::Range;
use std::time::Instant;

use image::{Run, SpaceId};
use pages::{EqualIndex, EqualPages};

use crate::Result;
use crate::contents::Progress;
use crate::draft::Draft;
use crate::records::FIRST_OBJECT;
use crate::statistics::as_micros;

/// Finds equal pages among `stored`, the memory of tasks and objects: pages that tasks have at the
/// same place, and `copies`. Returns the runs for the image.
pub(super) fn find(
    stored: Vec<Run>,
    copies: Vec<(SpaceId, Range<u64>)>,
    draft: &mut Draft,
    progress: &Progress,
) -> Result<Vec<Run>> {
    let looking = Instant::now();
    let of_tasks = stored.iter().filter(|run| run.space.0 < FIRST_OBJECT);
    let Some(equals) = EqualIndex::of_runs(of_tasks, copies) else {
        return Ok(stored);
    };
    progress.expect(pages::wanted_bytes(&stored, &equals));
    let EqualPages { runs, equal_pages } =
        pages::find_equal(stored, &equals, &draft.writer, &|bytes| progress.add(bytes))?;
    log::info!("{equal_pages} pages are equal to others");
    let statistics = &mut draft.report.statistics;
    statistics.stored_pages -= equal_pages;
    statistics.equal_pages += equal_pages;
    statistics.memory_us += as_micros(looking.elapsed());
    Ok(runs)
}
