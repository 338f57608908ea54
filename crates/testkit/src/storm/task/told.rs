//! What the ledger's samples tell of a thread and its process, as far as filters let it.
use crate::samples::{self, Owner, Sample};

/// getitimer, personality, get_mempolicy, userfaultfd, membarrier: a dump makes them in a task, and
/// the storm's filters kill for them.
pub(super) const OF_DUMPS: [u32; 5] = [36, 135, 239, 323, 324];

/// What a sample tells, in a line.
pub(super) fn line(whose: &str, sample: &Sample) -> Option<String> {
    let told = sample.told()?;
    Some(format!("{whose} {}: {}", sample.name, told.escape_debug()))
}

/// Tells whether a filter lets a task live that reads it.
pub(super) fn may_read(sample: &Sample, is_filtered: bool) -> bool {
    !is_filtered || sample.call.is_none_or(|call| !OF_DUMPS.contains(&call))
}

/// What the calling thread has of its own, a line each.
pub(super) fn of_thread(is_filtered: bool) -> impl Iterator<Item = String> {
    let own = samples::own().filter(|sample| sample.owner == Owner::Thread);
    let own = own.filter(move |sample| may_read(sample, is_filtered));
    own.filter_map(|sample| line("thread", sample))
}
