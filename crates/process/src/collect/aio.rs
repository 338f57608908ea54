//! Contexts of asynchronous I/O while the tree is stopped: requests that are under way are waited
//! for, as they read into its memory and write to its files.
//!
//! - What: contexts of asynchronous I/O (io_setup)
//! - Kept: address and size of the ring, events that nobody has fetched, where the next one goes.
//!   Needs bpf(2) and the kernel's description of its types (Linux 6.15).
//! - Refused: "a request is under way that may never end (a poll)"; "…: … requests are under way",
//!   for all of `--timeout`; "it belongs to no context of this process" (it is that of the process
//!   which forked it, or a second mapping of one); "a part of it was unmapped, moved or protected";
//!   "the kernel's counters of it do not add up"; "its state cannot be looked up in the kernel
//!   (…)".
//! - CRIU 4.2: kept, without looking whether requests are under way.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use image::Record;
use prost::Message;
use resources::Error;
use resources::map::aio::{self, Context, Contexts, Looked};
use resources::map::listing::Listed;
use sys::process::Process;

use super::found::Found;
use super::patience::wait_while;
use crate::Result;
use crate::obstacles::Obstacles;
use crate::records::record;

/// Waits until no requests are under way any more that end by themselves. Gives whether there are
/// contexts. What cannot be told is told of by [`contexts`].
pub(super) fn settle(all: &[Found]) -> Result<bool> {
    let processes = with_contexts(all).collect::<Vec<_>>();
    let is_busy = |process: &&Process| {
        let looked = look(process).unwrap_or_default();
        looked.iter().any(|one| one.under_way > 0 && !one.waits)
    };
    wait_while(|| Ok(processes.iter().any(is_busy)))?;
    Ok(!processes.is_empty())
}

/// The processes that have contexts.
pub(super) fn with_contexts(all: &[Found]) -> impl Iterator<Item = &Process> {
    let having = all.iter().filter(|found| rings(found).next().is_some());
    having.map(|found| &found.process)
}

fn rings(found: &Found) -> impl Iterator<Item = &Listed> {
    found.listed.iter().filter(|listed| listed.is_aio())
}

fn look(process: &Process) -> std::io::Result<Vec<Looked>> {
    aio::look(process.open("mem")?.as_fd())
}

/// The record of a task's contexts, if it has any; those that are not saved are noted.
pub(super) fn contexts(found: &Found, obstacles: &mut Obstacles) -> Result<Option<Record>> {
    let pid = found.node.pid;
    let Some(first) = rings(found).next() else {
        return Ok(None);
    };
    let looked = match look(&found.process) {
        Ok(looked) => looked,
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let why = format!("its state cannot be looked up in the kernel ({error})");
            let refused = Error::unsupported(pid, first.place()).because(why);
            return Ok(obstacles.note(Err(refused))?.flatten());
        }
        Err(error) => {
            let doing = format!("look {} of pid {pid} up in the kernel", first.place());
            return Err(Error::kernel(doing, error).into());
        }
    };
    let mut contexts = Vec::new();
    for ring in rings(found) {
        let is_its = |one: &&Looked| {
            let start = one.context.address;
            (start..start.saturating_add(one.bytes)).contains(&ring.span.start.0)
        };
        let context = context_of(&found.process, ring, looked.iter().find(is_its));
        contexts.extend(obstacles.note(context)?);
    }
    let contexts = Contexts { contexts };
    Ok(Some(record(
        aio::TAG,
        found.node.number,
        contexts.encode_to_vec(),
    )))
}

fn context_of(process: &Process, ring: &Listed, looked: Option<&Looked>) -> Result<Context> {
    let pid = process.pid();
    let refuse = |why: &str| Err(Error::unsupported(pid, ring.place()).because(why).into());
    let Some(looked) = looked else {
        return refuse("it belongs to no context of this process");
    };
    if (ring.span.start.0, ring.span.bytes()) != (looked.context.address, looked.bytes) {
        return refuse("a part of it was unmapped, moved or protected");
    }
    if looked.under_way > 0 && looked.waits {
        return refuse("a request is under way that may never end (a poll)");
    }
    if looked.under_way > 0 {
        let (place, count) = (ring.place(), looked.under_way);
        let passing = Error::Passing {
            pid,
            what: format!("{place}: {count} requests are under way"),
            allow: None,
            early: true,
            by_tree: false,
        };
        return Err(passing.into());
    }
    if !looked.adds_up {
        return refuse("the kernel's counters of it do not add up");
    }
    let failed = |error| Error::kernel(format!("read {} of pid {pid}", ring.place()), error);
    let len = usize::try_from(looked.bytes).expect("it is mapped");
    let mut contents = vec![0; len];
    let memory = process.open("mem").map_err(failed)?;
    let read = memory.read_exact_at(&mut contents, ring.span.start.0);
    read.map_err(failed)?;
    let used = contents.iter().rposition(|byte| *byte != 0);
    contents.truncate(used.map_or(0, |last| last + 1));
    Ok(Context {
        contents,
        ..looked.context.clone()
    })
}
