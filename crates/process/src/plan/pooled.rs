//! Calls that a task makes while it still has the pool's descriptors.

use std::collections::HashMap;

use resources::fd;
use resources::script::{PoolId, Script};
use syscalls::Sysno;

use crate::Result;
use crate::records::{Saved, SavedTask};

/// Adds `calls`, for which number 0 must be free: nothing that a task has there by fork is needed
/// any more.
pub(super) fn unplaced(calls: Script, script: &mut Script) {
    if !calls.steps.is_empty() {
        script.call(Sysno::close_range, [0u32.into(), 0u32.into()]);
        script.append(calls);
    }
}

/// Adds the calls of descriptions that one process must make, task `index`, which may not keep
/// them. Where it is gone, the first one that has the description makes them.
pub(super) fn plan(
    saved: &Saved<'_>,
    first_holders: &HashMap<u32, usize>,
    index: usize,
    script: &mut Script,
) -> Result<()> {
    for (id, payload) in &saved.attributes {
        let Some(pid) = fd::attributes::maker(payload)? else {
            continue;
        };
        if fd::late::is_late(saved.descriptions[*id as usize])? {
            continue;
        }
        let alive = |task: &SavedTask<'_>| !task.threads.is_empty() && task.node.pid == pid;
        let known = saved.tasks.iter().position(alive);
        let maker = known.or_else(|| first_holders.get(id).copied());
        if maker.unwrap_or(0) == index {
            fd::attributes::in_pool(payload, PoolId(*id), script)?;
        }
    }
    Ok(())
}
