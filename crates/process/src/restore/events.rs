//! Performance events of the tree, which begin to count when its threads have nothing left to do
//! for the restore.

use std::os::fd::AsFd as _;

use resources::fd::{kind_of, perf_event, tags};

use crate::Result;
use crate::records::Saved;

/// Has those count that did.
///
/// # Errors
/// [`resources::Error::Kernel`].
pub(super) fn begin(saved: &Saved<'_>) -> Result<()> {
    let mut firsts = Vec::new();
    for (id, (tag, payload)) in (0u32..).zip(&saved.descriptions) {
        if *tag != tags::PERF_EVENT {
            continue;
        }
        let Some((pid, fd)) = saved.holder(id) else {
            continue;
        };
        let event = crate::collect::fetch(pid, fd)?;
        let kind = kind_of(*tag).expect("there is this one");
        // A group counts when its first event does: all of it at once.
        match kind.needs(payload)? {
            Some(_) => perf_event::begin(payload, event.as_fd())?,
            None => firsts.push((payload, event)),
        }
    }
    for (payload, event) in firsts {
        perf_event::begin(payload, event.as_fd())?;
    }
    Ok(())
}
