//! What is kept of a leader that has ended while other threads of its process run on: what /proc
//! still shows of it.
//!
//! - What: first threads that have ended
//! - Kept: name, ids, groups, capabilities, policy, nice value, real-time priority, affinity, timer
//!   slack, the status with which they have ended.
//! - CRIU 4.2: refuses such processes.

use std::io;

use prost::Message;
use sys::proc::{Stat, Status};
use sys::process::Process;

use super::comm::Comm;
use super::credentials::Credentials;
use super::dumpable::Dumpable;
use super::scheduling::Scheduling;
use super::seccomp::Seccomp;
use super::speculation::Speculation;
use super::{Facts, Part, attributes, comm, credentials, decode, scheduling, seccomp};
use crate::Result;
use crate::kernel::Kernel;

/// The wait status with which the leader of a process has ended, looked up in the kernel's
/// memory: /proc tells the signal of a group stop in its place as long as there is one.
///
/// # Errors
/// Where the kernel may not be looked into, or there is no such leader.
pub fn status(process: &Process) -> io::Result<i32> {
    let untold = |why: &str| io::Error::new(io::ErrorKind::Unsupported, why.to_owned());
    let kernel = Kernel::get().map_err(untold)?;
    let leader = kernel.owner(process)?.word("group_leader")?;
    if kernel.tid(leader)? != Some(process.pid()) {
        return Err(untold("its memory is another process's"));
    }
    let leader = kernel.read("task_struct", leader)?;
    Ok(leader.half("exit_code")?.cast_signed())
}

/// The parts of a leader that has ended, of which /proc says `stat` and `status`, by what the
/// thread `asked` is that speaks for its process, and `living`, the parts of that by their numbers.
/// What the kernel does not tell of the leader any more is taken to be as in that thread.
///
/// # Errors
/// [`crate::Error::Corrupt`], and those of [`Facts::filters`].
pub fn parts<'a>(
    (stat, status): (&Stat, &Status),
    asked: &dyn Facts,
    living: impl Fn(u16) -> Option<&'a [u8]>,
) -> Result<Vec<(u16, Vec<u8>)>> {
    let name = comm::Record {
        name: stat.comm.clone(),
    };
    let mut parts = vec![(Comm.tag(), name.encode_to_vec())];
    if let Some(payload) = living(Credentials.tag()) {
        let asked: credentials::Record = decode(Credentials.name(), payload)?;
        let own = credentials::Record::new(status, asked.securebits);
        parts.push((Credentials.tag(), own.encode_to_vec()));
    }
    if let Some(payload) = living(Scheduling.tag()) {
        let asked: scheduling::Record = decode(Scheduling.name(), payload)?;
        let slack_ns = sys::procfs::read_text(format_args!("{}/timerslack_ns", stat.pid));
        let slack_ns = slack_ns.ok().and_then(|text| text.trim().parse().ok());
        let own = asked.of_ended(stat, status, slack_ns);
        parts.push((Scheduling.tag(), own.encode_to_vec()));
    }
    let no_new_privs = attributes::Record {
        value: u64::from(status.no_new_privs),
    };
    if status.no_new_privs {
        parts.push((attributes::NO_NEW_PRIVS.tag(), no_new_privs.encode_to_vec()));
    }
    for tag in [Dumpable.tag(), Speculation.tag()] {
        parts.extend(living(tag).map(|payload| (tag, payload.to_vec())));
    }
    // Filters that all have in common the others have of it.
    if status.seccomp != 0 {
        let filters = seccomp::of_leader(asked)?;
        parts.extend(filters.map(|payload| (Seccomp.tag(), payload.encode_to_vec())));
    }
    Ok(parts)
}
