//! Requests that the kernel works on while the tree is stopped, and that end by themselves.
//!
//! Some end only if stopped threads make calls, until nothing is under way any more: new requests
//! come from nobody.

use std::collections::{BTreeMap, HashSet};

use freeze::Frozen;
use resources::map::placed;
use resources::script::Script;

use super::found::Found;
use super::outside::Listed;
use super::patience::wait_while;
use crate::Result;
use crate::obstacles::Obstacles;

/// Has requests end that will. Those that do not are told of where their descriptions are
/// described.
pub(super) fn settle(frozen: &mut Frozen, found: &mut [Found], listed: &Listed) -> Result<()> {
    wait_while(|| {
        let mut calls: BTreeMap<i32, Script> = BTreeMap::new();
        for (open, kind, numbers) in listed.working() {
            if kind.is_busy(open) {
                for (pid, fd) in numbers {
                    kind.settle(fd, calls.entry(pid).or_default());
                }
            }
        }
        for (task, found) in frozen.tasks.iter_mut().zip(&mut *found) {
            if let Some(script) = calls.get(&task.pid()) {
                found.call(task, script)?;
            }
        }
        Ok(!calls.is_empty())
    })
}

/// Descriptions with requests are not kept where memory is shared: a restore has a process map its
/// own.
pub(super) fn check_memory(found: &[Found], obstacles: &mut Obstacles) -> Result<()> {
    let shared = found.iter().map(|one| one.node.memory_of);
    let shared = shared.filter(|of| *of != 0).collect::<HashSet<_>>();
    for one in found {
        if !shared.contains(&one.node.memory_number()) {
            continue;
        }
        let links = one.rows.iter().map(|row| (row.fd, &*row.link));
        let checked = placed::refuse_shared(one.node.pid, links, &one.listed);
        obstacles.note(checked)?;
    }
    Ok(())
}
