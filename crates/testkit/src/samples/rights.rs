//! Capabilities, securebits, ids and limits.

use std::io;

use crate::calls::attributes::{FileId, set_file_id, set_number};
use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::sample::{Sample, Values, status};
use resources::ledger::process::{CAPABILITIES, SECURE_BITS};

/// The states.
#[rustfmt::skip]
pub(super) const RIGHTS: &[Sample] = &[
    Sample::new("securebits", Values::Of(&SECURE_BITS), secure, || number(27))
        .about(&["PR_GET_SECUREBITS", "PR_SET_SECUREBITS", "PR_GET_KEEPCAPS", "PR_SET_KEEPCAPS"])
        .adding(),
    Sample::new("bounds", Values::Of(&CAPABILITIES), bound, || status("CapBnd"))
        .about(&["PR_CAPBSET_READ", "PR_CAPBSET_DROP", "CapBnd"])
        .adding(),
    Sample::new("inheritable", Values::Of(&CAPABILITIES), inherit, || status("CapInh"))
        .about(&["CapInh"])
        .adding(),
    Sample::new("ambient", Values::Of(&CAPABILITIES), ambient, || status("CapAmb"))
        .about(&["PR_CAP_AMBIENT", "CapAmb"])
        .adding(),
    Sample::new("effective", Values::Of(&CAPABILITIES), without_effect, || status("CapEff"))
        .about(&["CapEff"])
        .adding()
        .harsh(),
    Sample::new("permitted", Values::Of(&CAPABILITIES), without, || status("CapPrm"))
        .about(&["CapPrm"])
        .adding()
        .harsh(),
    Sample::new("users", Values::These(&[0, 1]), user, || status("Uid")).about(&["Uid"]).adding(),
    Sample::new("users-of-files", Values::These(&[2, 3]), user, || status("Uid")).in_helpers(),
    Sample::new("groups", Values::These(&[0, 1]), group, || status("Gid")).about(&["Gid"]).adding(),
    Sample::new("groups-of-files", Values::These(&[2, 3]), group, || status("Gid")).in_helpers(),
    Sample::new("further-groups", Values::These(&[1, 0, 40, 1000]), groups, || status("Groups"))
        .about(&["Groups"]),
    Sample::new("limits", Values::Made(limited), limit, limits)
        .about(&[
            "limits", "Max cpu time", "Max file size", "Max data size", "Max stack size",
            "Max core file size", "Max resident set", "Max processes", "Max open files",
            "Max locked memory", "Max address space", "Max file locks", "Max pending signals",
            "Max msgqueue size", "Max nice priority", "Max realtime priority",
            "Max realtime timeout",
        ])
        .adding()
        .of_process(),
];

fn number(option: i32) -> io::Result<String> {
    set_number(option, [0; 4]).map(|bits| format!("{bits:x}"))
}

/// Adds a bit to those that there are.
fn secure(bit: u64) -> io::Result<()> {
    let now = set_number(27, [0; 4])?;
    set_number(28, [now | 1 << bit, 0, 0, 0]).map(drop)
}

fn bound(capability: u64) -> io::Result<()> {
    set_number(24, [capability, 0, 0, 0]).map(drop)
}

fn change(change: impl FnOnce(&mut CapabilitySets)) -> io::Result<()> {
    let mut sets = capabilities(None)?;
    change(&mut sets);
    Ok(set_capabilities(None, sets)?)
}

fn one(capability: u64) -> CapabilitySet {
    CapabilitySet::from_bits_retain(1 << capability)
}

fn inherit(capability: u64) -> io::Result<()> {
    change(|sets| sets.inheritable.insert(one(capability)))
}

fn ambient(capability: u64) -> io::Result<()> {
    const RAISE: u64 = 2;
    inherit(capability)?;
    set_number(47, [RAISE, capability, 0, 0]).map(drop)
}

fn without_effect(capability: u64) -> io::Result<()> {
    change(|sets| sets.effective.remove(one(capability)))
}

fn without(capability: u64) -> io::Result<()> {
    change(|sets| {
        sets.effective.remove(one(capability));
        sets.permitted.remove(one(capability));
    })
}

/// Sets the real or the saved id, that for files or the effective one; the last two cost rights.
fn user(which: u64) -> io::Result<()> {
    let (other, none) = (Uid::from_raw(4711), None::<Uid>);
    match which {
        0 => Ok(set_thread_res_uid(other, none, none)?),
        1 => Ok(set_thread_res_uid(none, none, other)?),
        2 => set_file_id(FileId::User, other.as_raw()),
        _ => Ok(set_thread_res_uid(none, other, none)?),
    }
}

fn group(which: u64) -> io::Result<()> {
    let (other, none) = (Gid::from_raw(4712), None::<Gid>);
    match which {
        0 => Ok(set_thread_res_gid(other, none, none)?),
        1 => Ok(set_thread_res_gid(none, none, other)?),
        2 => set_file_id(FileId::Group, other.as_raw()),
        _ => Ok(set_thread_res_gid(none, other, none)?),
    }
}

fn groups(count: u64) -> io::Result<()> {
    let groups: Vec<Gid> = (0..count as u32)
        .map(|at| Gid::from_raw(7000 + at))
        .collect();
    Ok(set_thread_groups(&groups)?)
}

/// All limits, in the order of their numbers.
const LIMITS: [Resource; 16] = [
    Resource::Cpu,
    Resource::Fsize,
    Resource::Data,
    Resource::Stack,
    Resource::Core,
    Resource::Rss,
    Resource::Nproc,
    Resource::Nofile,
    Resource::Memlock,
    Resource::As,
    Resource::Locks,
    Resource::Sigpending,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Rtprio,
    Resource::Rttime,
];

/// Each limit, in two ways.
fn limited() -> Vec<u64> {
    (0..LIMITS.len() as u64 * 2).collect()
}

/// Sets one to a little less than it is; both of its numbers, or the soft one alone.
fn limit(value: u64) -> io::Result<()> {
    const LARGE: u64 = 1 << 42;
    let which = LIMITS[value as usize / 2 % LIMITS.len()];
    let now = getrlimit(which);
    let less = |number: Option<u64>| match number {
        None => LARGE - value,
        // The subject needs these, or has none.
        Some(number) if number < 64 => number + 1,
        Some(number) => number - 1,
    };
    let maximum = match value % 2 {
        0 => now.maximum,
        _ => Some(less(now.maximum)),
    };
    let most = maximum.unwrap_or(u64::MAX);
    let current = Some(less(now.current).min(most));
    Ok(setrlimit(which, Rlimit { current, maximum })?)
}

fn limits() -> io::Result<String> {
    let all = LIMITS.map(|which| {
        let Rlimit { current, maximum } = getrlimit(which);
        format!("{which:?} {current:?} {maximum:?}")
    });
    Ok(all.join(", "))
}
