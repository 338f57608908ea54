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

use sys::process::Process;

use super::seen::{self, Looked};
use super::{Context, Contexts};
use crate::map::listing::Listed;
use crate::{Error, Result};

/// Whether requests are under way in a stopped process that end by themselves. What cannot be told
/// is told of by [`dump`].
#[must_use]
pub fn is_busy(process: &Process) -> bool {
    let looked = look(process).unwrap_or_default();
    looked.iter().any(|one| one.under_way > 0 && !one.waits)
}

fn look(process: &Process) -> std::io::Result<Vec<Looked>> {
    seen::look(process.open("mem")?.as_fd())
}

/// The contexts of a process that has the rings `rings`; those that are not saved are added to
/// `refused`. Nothing where none can be looked at.
pub fn dump<'a>(
    process: &Process,
    rings: impl Iterator<Item = &'a Listed> + Clone,
    refused: &mut Vec<Error>,
) -> Option<Contexts> {
    let pid = process.pid();
    let first = rings.clone().next()?;
    let looked = look(process).map_err(|error| match error.kind() {
        ErrorKind::Unsupported => {
            let why = format!("its state cannot be looked up in the kernel ({error})");
            Error::unsupported(pid, first.place()).because(why)
        }
        _ => {
            let doing = format!("look {} of pid {pid} up in the kernel", first.place());
            Error::kernel(doing, error)
        }
    });
    let looked = looked.map_err(|error| refused.push(error)).ok()?;
    let mut contexts = Vec::new();
    for ring in rings {
        let is_its = |one: &&Looked| {
            let start = one.context.address;
            (start..start.saturating_add(one.bytes)).contains(&ring.span.start.0)
        };
        match context_of(process, ring, looked.iter().find(is_its)) {
            Ok(context) => contexts.push(context),
            Err(error) => refused.push(error),
        }
    }
    Some(Contexts { contexts })
}

fn context_of(process: &Process, ring: &Listed, looked: Option<&Looked>) -> Result<Context> {
    let pid = process.pid();
    let refuse = |why: &str| Err(Error::unsupported(pid, ring.place()).because(why));
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
        return Err(passing);
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
