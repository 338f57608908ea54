//! Calls that a task makes while it still has the pool's descriptors.

use std::collections::HashMap;

use resources::fd;
use resources::script::{PoolId, Script};
use syscalls::Sysno;

use super::late::duplicate;
use super::{Plan, portions};
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
        if saved.descriptions[*id as usize].is_late() {
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

/// Goes where the task was in the file system.
pub(super) fn place(task: &SavedTask<'_>, script: &mut Script) {
    if let Some(root) = task.place.root {
        let dot = script.string(b".");
        script.call(Sysno::fchdir, [PoolId(root).into()]);
        script.call(Sysno::chroot, [dot.into()]);
    }
    script.call(Sysno::fchdir, [PoolId(task.place.cwd).into()]);
    script.note("working directory");
}

/// Gives all descriptors their numbers, and closes the others then: those of the pool may stand
/// between them. Where there is no room for that, they are fetched.
pub(super) fn descriptors(
    (saved, task): (&Saved<'_>, &SavedTask<'_>),
    plan: &Plan,
    script: &mut Script,
) {
    let task = saved.with_descriptors_of(task);
    if plan.fetches {
        return portions::fetch(task, plan, script);
    }
    let mut sorted = task.descriptors.iter().collect::<Vec<_>>();
    sorted.sort_unstable_by_key(|descriptor| descriptor.fd);
    for descriptor in &sorted {
        duplicate(PoolId(descriptor.description).into(), descriptor, script);
    }
    let mut next = 0;
    for descriptor in sorted {
        if descriptor.fd > next {
            let last = descriptor.fd - 1;
            script.call(Sysno::close_range, [next.into(), last.into()]);
        }
        next = descriptor.fd + 1;
    }
    script.call(Sysno::close_range, [next.into(), u32::MAX.into()]);
}
