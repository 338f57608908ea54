//! Requests of io_uring(7) that are under way while the tree is stopped, and end by themselves.
//!
//! A device is done with them sooner or later, but it is the thread that submitted one which posts
//! its completion, on its way out of a system call. So stopped threads make calls until nothing is
//! under way any more: new requests come from nobody.
//!
//! - What: rings of io_uring of processes that share memory
//! - Refused: "fd …, an io_uring:", or the ring that is mapped, as "its memory is shared with other
//!   processes".
//! - CRIU 4.2: refuses rings altogether.

use std::collections::{BTreeMap, HashSet};

use freeze::Frozen;
use resources::fd::io_uring;
use resources::map::listing::Listed as Mapped;
use resources::script::Script;
use syscalls::Sysno;

use super::found::Found;
use super::outside::Listed;
use super::patience::wait_while;
use crate::Result;
use crate::obstacles::Obstacles;

/// Has requests end that will. Those that do not are told of where the rings are described.
pub(super) fn settle(frozen: &mut Frozen, found: &mut [Found], listed: &Listed) -> Result<()> {
    wait_while(|| {
        let mut holders: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for (open, numbers) in listed.rings() {
            if io_uring::will_settle(open) {
                for (pid, fd) in numbers {
                    holders.entry(pid).or_default().push(fd);
                }
            }
        }
        for (task, found) in frozen.tasks.iter_mut().zip(&mut *found) {
            if let Some(fds) = holders.get(&task.pid()) {
                found.call(task, &reap(fds))?;
            }
        }
        Ok(!holders.is_empty())
    })
}

/// Calls by which a thread posts what completions are ready, and waits for none.
fn reap(fds: &[i32]) -> Script {
    const GETEVENTS: u32 = 1;
    let mut script = Script::default();
    for fd in fds {
        let args = [(*fd).into(), 0u32.into(), 0u32.into(), GETEVENTS.into()];
        script.attempt(Sysno::io_uring_enter, args);
    }
    script
}

/// Rings of io_uring are not kept where their memory is shared: a restore has a process map its
/// own.
pub(super) fn check_memory(found: &[Found], obstacles: &mut Obstacles) -> Result<()> {
    let shared = found.iter().map(|one| one.node.memory_of);
    let shared = shared.filter(|of| *of != 0).collect::<HashSet<_>>();
    for one in found {
        if !shared.contains(&one.node.memory_number()) {
            continue;
        }
        let why = "its memory is shared with other processes";
        let mut rows = one.rows.iter();
        let ring = rows.find(|row| row.link == io_uring::LINK);
        let ring = ring.map(|row| format!("fd {}, an io_uring:", row.fd));
        let mut mapped = one.listed.iter();
        let mapped = mapped.find(|map| map.is_ring()).map(Mapped::place);
        if let Some(what) = ring.or(mapped) {
            let refused = resources::Error::unsupported(one.node.pid, what);
            obstacles.note(Err::<(), _>(refused.because(why)))?;
        }
    }
    Ok(())
}
