//! One round before a save: the memory of a machine while its guest runs.
//!
//! The guest is stopped only until it is known what was written since the last round. What it
//! writes while pages are read, the next round reads again.

use image::Seal;

use super::guest::Guest;
use super::machine::Machine;
use super::save::{Progress, SaveOptions, SaveSummary, begin, knowing, memories};
use super::track::TrackedMemory;
use crate::Result;
use crate::sparse::{self, Holes};

/// Saves the memory of a machine, and has what it writes from then on tracked.
///
/// # Errors
/// As [`save()`](super::save()). The next round reads what this one would have.
pub(crate) fn save(
    options: &SaveOptions,
    machine: &mut Machine,
    seal: Seal,
    progress: Progress<'_>,
) -> Result<SaveSummary> {
    let (writer, record) = begin(options, machine)?;
    let (id, pid) = (writer.id(), machine.pid);
    let tracking = TrackedMemory::start(pid, &machine.blocks)?;
    let mut guest = Guest::guard(&mut machine.qmp, &machine.before, &options.images)?;
    tracking.begin()?;
    guest.stop()?;
    let unwritten = tracking.take()?;
    let stopped = guest.go_on()?;
    let memories = knowing(memories(&machine.blocks)?, &writer, &tracking, unwritten);
    let fates = sparse::store(&memories, &writer, Holes::Zero, true, progress)?;
    writer.record(record.record());
    writer.seal(seal)?;
    tracking.end(id);
    Ok(SaveSummary::new(id, pid, fates, stopped))
}
