//! Memory that the kernel is to find in its place before a task runs.

use resources::fd::Description;
use resources::map::memory::Mapping;

use crate::Result;
use crate::records::{Saved, SavedTask};

/// Whether a task has such memory, or some that another userfaultfd than ours gets.
pub(super) fn is_needed(saved: &Saved<'_>, task: &SavedTask<'_>) -> bool {
    !task.registered.is_empty()
        || task.descriptors.iter().any(|descriptor| {
            let description = &saved.descriptions[descriptor.description as usize];
            description.pins_memory()
        })
}

/// Refuses a description, of which a task has descriptor `fd`, that needs memory which cannot be
/// looked up.
pub(super) fn check(task: &SavedTask<'_>, fd: i32, description: &dyn Description) -> Result<()> {
    const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
    if !description.pins_memory() {
        return Ok(());
    }
    let written = task.memory.mappings.iter();
    let written = written.filter(|map| map.prot & PROT_WRITE != 0);
    let written = written.map(Mapping::span).collect::<Vec<_>>();
    Ok(description.check_memory((task.node.pid, fd), &written)?)
}
