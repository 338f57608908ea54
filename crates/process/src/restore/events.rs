//! Performance events of the tree, which begin to count when its threads have nothing left to do
//! for the restore.

use std::os::fd::AsFd as _;

use resources::fd::perf_event::{self, PerfEvent};

use crate::Result;
use crate::records::Saved;

/// Has those count that did.
///
/// # Errors
/// [`resources::Error::Kernel`].
pub(super) fn begin(saved: &Saved<'_>) -> Result<()> {
    let mut firsts = Vec::new();
    for (id, description) in (0u32..).zip(&saved.descriptions) {
        let Some(record) = description.record::<PerfEvent>() else {
            continue;
        };
        let Some((pid, fd)) = saved.holder(id) else {
            continue;
        };
        let event = crate::collect::fetch(&saved.process(pid), fd)?;
        // A group counts when its first event does: all of it at once.
        match description.needs() {
            Some(_) => perf_event::begin(record, event.as_fd())?,
            None => firsts.push((record, event)),
        }
    }
    for (record, event) in firsts {
        perf_event::begin(record, event.as_fd())?;
    }
    Ok(())
}
