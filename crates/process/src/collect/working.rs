//! Requests that the kernel works on while the tree is stopped, and that end by themselves.
//!
//! Some end only if stopped threads make calls, until nothing is under way any more: new requests
//! come from nobody.

use std::collections::{BTreeMap, HashSet};

use freeze::Frozen;
use image::Record;
use resources::map::placed;
use resources::script::Script;
use sys::process::Process;

use super::found::Found;
use super::outside::Listed;
use super::patience::wait_while;
use crate::Result;
use crate::obstacles::Obstacles;
use crate::records::record;

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

/// Waits until no requests of mappings are under way any more that end by themselves. Gives whether
/// there are such mappings. What cannot be told is told of by [`records`].
pub(super) fn settle_mappings(all: &[Found]) -> Result<bool> {
    let processes = with_mappings(all).collect::<Vec<_>>();
    wait_while(|| Ok(processes.iter().any(|process| placed::is_busy(process))))?;
    Ok(!processes.is_empty())
}

/// The processes that have mappings with requests of their own.
pub(super) fn with_mappings(all: &[Found]) -> impl Iterator<Item = &Process> {
    let having = all
        .iter()
        .filter(|found| found.listed.iter().any(placed::works));
    having.map(|found| &found.process)
}

/// The record of such mappings of a task, if it has any; those that are not saved are noted.
pub(super) fn mappings(found: &Found, obstacles: &mut Obstacles) -> Result<Option<Record>> {
    let Some(dumped) = placed::dump(&found.process, &found.listed) else {
        return Ok(None);
    };
    for refused in dumped.refused {
        obstacles.note(Err::<(), _>(refused))?;
    }
    let number = found.node.number;
    let payload = dumped.payload;
    Ok(payload.map(|payload| record(dumped.tag, number, payload)))
}
