//! The control groups that the tasks of a tree are in.

use freeze::{Frozen, Task};
use image::Record;
use prost::Message as _;
use resources::Allow;
use resources::cgroup::{self, Found, Management, Membership, Mode};

use crate::Result;
use crate::records::record;

/// The record of the tree's control groups, if they are to be kept and are not this process's own.
///
/// # Errors
/// [`resources::Error::Unsupported`], also for a task that cannot run as its group is frozen.
pub(super) fn collect(frozen: &Frozen, allow: &Allow) -> Result<Option<Record>> {
    if allow.cgroups.mode == Mode::Ignore {
        return Ok(None);
    }
    let own = Membership::own()?;
    let mut found = Found::new();
    for task in frozen.tasks.iter().filter(|task| !task.is_zombie()) {
        let membership = Membership::parse(&task.read("cgroup")?);
        cgroup::check_thawed(task.pid(), &membership, &own)?;
        threads(task, &membership, &allow.cgroups, &mut found)?;
    }
    let cgroups = cgroup::dump(&found, &own, &allow.cgroups)?;
    Ok(cgroups.map(|cgroups| record(cgroup::TAG, 0, cgroups.encode_to_vec())))
}

/// Adds a process, and those of its threads that are somewhere else.
fn threads(
    task: &Task,
    process: &Membership,
    management: &Management,
    found: &mut Found,
) -> Result<()> {
    found.push((task.pid(), process.clone()));
    let others = task.threads().iter().skip(1);
    if others.len() == 0 || !process.may_differ_by_thread(management)? {
        return Ok(());
    }
    for thread in others {
        let membership = Membership::parse(&task.read(&format!("task/{}/cgroup", thread.tid))?);
        if membership != *process {
            found.push((thread.tid, membership));
        }
    }
    Ok(())
}
