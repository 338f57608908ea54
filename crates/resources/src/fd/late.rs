//! Descriptions that can only be opened when all tasks of the tree exist, as they refer to them.
//!
//! Something else keeps their places until then. The first task that has such a description opens
//! it, others fetch it from there.
//!
//! - What: files of processes, pidfds, userfaultfds, performance events and the tree's time
//!   namespace in flight
//! - Refused: "it refers to a task, which does not exist yet when it would be opened" (no task has
//!   a descriptor of it: it is on its way in a socket, or a working directory).
//! - CRIU 4.2: kept.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

use super::perf_event::PerfEvent;
use super::pidfd::Pidfd;
use super::process_file::ProcessFile;
use super::userfaultfd::Userfaultfd;
use super::{ErasedKind, Open};
use crate::{Error, Result};

/// Refuses what no task has a descriptor of: nobody could open it.
///
/// # Errors
/// [`Error::Unsupported`].
pub(super) fn check(open: &Open<'_>) -> Result<()> {
    let why = "it refers to a task, which does not exist yet when it would be opened";
    match open.fd < 0 || open.in_flight {
        true => Err(open.unsupported(why, None)),
        false => Ok(()),
    }
}

/// Whether it is of a kind that may be one.
pub(super) fn refers_to_task(open: &Open<'_>) -> bool {
    let kinds: [&dyn ErasedKind; 4] = [&Pidfd, &ProcessFile, &Userfaultfd, &PerfEvent];
    kinds.iter().any(|kind| kind.claims(open))
}

/// What keeps the place of one.
pub(super) fn placeholder() -> Result<OwnedFd> {
    let made = eventfd(0, EventfdFlags::CLOEXEC);
    made.map_err(|error| Error::kernel("make an eventfd as a placeholder", error))
}
