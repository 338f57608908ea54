//! Performance events: perf_event_open(2).
//!
//! Their attributes, and whose they are, stand in the kernel's memory alone. An event is opened
//! again by a task, as one that does not count; when nothing of the restore is left to be done by
//! the tasks, it counts from 0 on, as nobody can set a count.
//!
//! - What: performance events
//! - Kept: with `--perf-events`: attributes, the thread and the processor, groups, whether it
//!   counts, for how many samples more. Its count begins at 0. Needs bpf(2) and the kernel's
//!   description of its types.
//! - Refused: "its count would begin at 0 again" (`--perf-events`); "it is about …, which is not in
//!   the tree"; "its task has ended"; "it was to count at any price, and could not"; "it counts for
//!   tasks that its own has made since, too" (attr.inherit); "it counts for a control group"; "a
//!   program of BPF is attached to it"; "it has a filter, of which the kernel does not tell"; "it
//!   has filters of addresses"; "a pointer told what it counts (…)"; "which functions it counts is
//!   not told"; "it stops at the kernel's own code or data"; "what is read of it tells its number
//!   (PERF_FORMAT_ID), which no event can be given"; "its records go to a ring in memory"; "the
//!   first event of its group is open nowhere in the tree"; "process … has not the first event of
//!   its group"; "nobody tells by which name its kind … is known"; "its state cannot be looked up
//!   in the kernel (…)"; one that is on its way in a socket.
//! - At a restore: "a performance event of … is in the image (use --perf-events to restore it)";
//!   "performance events of … have another number here, or none"; "tracepoint … has another number
//!   here, or is not there".
//! - CRIU 4.2: refused.

mod attr;
mod named;
mod seen;
#[cfg(test)]
mod tests;

use std::os::fd::{BorrowedFd, OwnedFd};

use prost::Message;
use rustix::fs::OFlags;
use syscalls::Sysno;

use self::attr::{Attr, kind};
use self::named::Tracepoints;
use self::seen::{Counts, Seen};
use super::{DescriptionId, DumpContext, Kind, Open, RestoreContext, Stage, Task};
use super::{late, status, tags};
use crate::kernel::Kernel;
use crate::script::Script;
use crate::{Allow, Error, Result};

/// What the kernel calls one.
pub const LINK: &[u8] = b"anon_inode:[perf_event]";

/// See the file.
pub struct PerfEvent;

/// A performance event.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// `struct perf_event_attr`, as large as it says.
    #[prost(bytes = "vec", tag = "1")]
    attr: Vec<u8>,
    /// The thread that it is about; none for all that a processor runs.
    #[prost(int32, optional, tag = "2")]
    tid: Option<i32>,
    /// The processor; -1 for any.
    #[prost(sint32, tag = "3")]
    cpu: i32,
    /// The process that opens it.
    #[prost(int32, tag = "4")]
    opener: i32,
    /// The description of the first event of its group, where that is another one.
    #[prost(uint32, optional, tag = "5")]
    leader: Option<u32>,
    /// Whether it counts.
    #[prost(bool, tag = "6")]
    counts: bool,
    /// For how many samples more it counts; 0 without a limit.
    #[prost(uint32, tag = "7")]
    limit: u32,
    /// The driver whose number on the dump's host is in the attributes, if there is one.
    #[prost(string, tag = "8")]
    driver: String,
    /// The tracepoint whose number on the dump's host is in the attributes: "sched/sched_switch".
    #[prost(string, tag = "9")]
    tracepoint: String,
    /// Status flags.
    #[prost(uint32, tag = "10")]
    flags: u32,
}

/// The access mode of every event.
const MODE: u32 = OFlags::RDWR.bits();
/// Drivers whose attributes point at text.
const BY_POINTER: [&str; 2] = ["kprobe", "uprobe"];

impl Record {
    fn is_sound(&self) -> bool {
        let is_watching = match self.tid {
            Some(tid) => tid > 0 && self.cpu >= -1,
            None => self.cpu >= 0,
        };
        let named = [&self.driver, &self.tracepoint];
        let is_path = |name: &&String| name.split('/').all(|word| word != "..");
        is_watching
            && self.opener > 0
            && named.iter().all(is_path)
            && self.limit <= i32::MAX.cast_unsigned()
    }

    fn attr(&self) -> Attr {
        Attr::read(&self.attr).expect("checked when decoded")
    }

    fn whose(&self) -> String {
        match (self.tid, self.cpu) {
            (Some(tid), -1) => format!("thread {tid}"),
            (Some(tid), cpu) => format!("thread {tid} on processor {cpu}"),
            (None, cpu) => format!("processor {cpu}"),
        }
    }

    /// Checks that numbers which a host gives mean here what they meant at the dump.
    fn check_numbers(&self) -> Result<()> {
        let attr = self.attr();
        let name = &self.driver;
        if !name.is_empty() && named::driver(name) != Some(number_of_driver(&attr)) {
            let what = format!("performance events of {name} have another number here, or none");
            return Err(Error::Mismatch { what });
        }
        if !self.tracepoint.is_empty() {
            let name = &self.tracepoint;
            let number = Tracepoints::open().and_then(|all| all.number(name));
            let number = number.map_err(|error| failed_tracepoints(name, error))?;
            if number != Some(attr.config()) {
                let what = format!("tracepoint {name} has another number here, or is not there");
                return Err(Error::Mismatch { what });
            }
        }
        Ok(())
    }
}

fn failed_tracepoints(name: &str, error: rustix::io::Errno) -> Error {
    Error::kernel(format!("look up tracepoint {name}"), error)
}

/// The number of the driver that attributes name, as this host has given it; 0 for none.
fn number_of_driver(attr: &Attr) -> u32 {
    match attr.kind() {
        own if own > kind::BREAKPOINT => own,
        _ => attr.driver(),
    }
}

impl Kind for PerfEvent {
    type Record = Record;
    const TAG: u16 = tags::PERF_EVENT;
    const NAME: &'static str = "performance event";
    const LINK: Option<&'static [u8]> = Some(LINK);
    const LOOKED_UP: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        if !cx.allow().perf_events {
            let why = "its count would begin at 0 again";
            return Err(open.unsupported(why, Some("--perf-events")));
        }
        late::check(open)?;
        let kernel = Kernel::get().map_err(|why| unclear(open, why))?;
        let seen = seen::look(kernel, open.own()?).map_err(|error| failed(open, error))?;
        check(open, &seen, cx)?;
        let (driver, tracepoint) = names(open, &seen)?;
        let (opener, leader) = opener(open, (kernel, &seen), cx)?;
        Ok(Record {
            attr: seen.attr.bytes().to_vec(),
            tid: seen.tid,
            cpu: seen.cpu,
            opener,
            leader,
            counts: seen.counts == Counts::On,
            limit: seen.limit,
            driver,
            tracepoint,
            flags: open.info.flags & !MODE,
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        match record.is_sound() {
            true => Attr::read(&record.attr).map(drop),
            false => Err(Error::corrupt(Self::NAME, "makes no sense")),
        }
    }

    fn describe(record: &Record) -> String {
        let attr = record.attr();
        let (driver, tracepoint) = (&record.driver, &record.tracepoint);
        let what = match (attr.kind(), driver.is_empty(), tracepoint.is_empty()) {
            (_, false, _) => format!("{driver} {:#x}", attr.config()),
            (_, _, false) => tracepoint.clone(),
            (kind::BREAKPOINT, ..) => format!("breakpoint {:#x}", attr.breakpoint().unwrap_or(0)),
            (kind::HARDWARE, ..) => format!("hardware {:#x}", attr.config()),
            (kind::SOFTWARE, ..) => format!("software {:#x}", attr.config()),
            (kind::CACHE, ..) => format!("cache {:#x}", attr.config()),
            _ => format!("raw {:#x}", attr.config()),
        };
        let counts = if record.counts { "on" } else { "off" };
        format!("{what} of {} {counts}", record.whose())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        if !cx.allow().perf_events {
            let whose = record.whose();
            return Err(Error::Mismatch {
                what: format!(
                    "a performance event of {whose} is in the image (use --perf-events to \
                     restore it)"
                ),
            });
        }
        record.check_numbers()?;
        late::placeholder()
    }

    fn task(record: &Record) -> Option<i32> {
        Some(record.opener)
    }

    fn is_late(_record: &Record) -> bool {
        true
    }

    fn stages(_record: &Record, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    /// A group counts when its first event does: all of it at once.
    fn act(record: &Record, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        begin(record, own)
    }

    fn needs(record: &Record) -> Option<DescriptionId> {
        record.leader.map(DescriptionId)
    }

    fn open_in_task(record: &Record, number: i32, needed: Option<i32>, script: &mut Script) {
        const F_SETFL: u32 = linux_raw_sys::general::F_SETFL;
        let flags = status::opening(record.flags);
        let attr = script.bytes(&record.attr().disabled());
        let (tid, leader) = (record.tid.unwrap_or(-1), needed.unwrap_or(-1));
        let args = [
            attr.into(),
            tid.into(),
            record.cpu.into(),
            leader.into(),
            0u32.into(),
        ];
        script.expect(Sysno::perf_event_open, args, number);
        let flags = flags.intersection(status::SETTABLE);
        if !flags.is_empty() {
            let args = [number.into(), F_SETFL.into(), flags.bits().into()];
            script.call(Sysno::fcntl, args);
        }
    }
}

fn unclear(open: &Open<'_>, why: &str) -> Error {
    let why = format!("its state cannot be looked up in the kernel ({why})");
    open.unsupported(&why, None)
}

fn failed(open: &Open<'_>, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::Unsupported => unclear(open, &error.to_string()),
        _ => Error::kernel(format!("look {} up in the kernel", open.place()), error),
    }
}

/// Refuses what cannot be opened again as it is.
fn check(open: &Open<'_>, seen: &Seen, cx: &dyn DumpContext) -> Result<()> {
    const KERNEL: u64 = 1 << 63;
    let refuse = |why: &str| Err(open.unsupported(why, None));
    let task = seen.tid.map(|tid| cx.task(tid));
    // One that tasks inherited may have changed places with theirs, and ended with one of them.
    if let Some(why) = seen.hindrance {
        return refuse(why);
    }
    match seen.counts {
        Counts::Over => return refuse("its task has ended"),
        Counts::Failed => return refuse("it was to count at any price, and could not"),
        Counts::On | Counts::Off => {}
    }
    match (seen.tid, task) {
        (Some(tid), Some(None)) => {
            return refuse(&format!("it is about {tid}, which is not in the tree"));
        }
        (Some(_), Some(Some(Task::Ended))) => return refuse("its task has ended"),
        _ => {}
    }
    if seen.attr.breakpoint().is_some_and(|at| at >= KERNEL) {
        return refuse("it stops at the kernel's own code or data");
    }
    if seen.attr.reads_number() {
        return refuse(
            "what is read of it tells its number (PERF_FORMAT_ID), which no event can be given",
        );
    }
    if seen.ring != 0 {
        return refuse("its records go to a ring in memory");
    }
    Ok(())
}

/// The names of the driver and of the tracepoint whose numbers are in the attributes.
fn names(open: &Open<'_>, seen: &Seen) -> Result<(String, String)> {
    let attr = &seen.attr;
    let unknown = |number: u64| {
        let why = format!("nobody tells by which name its kind {number} is known");
        open.unsupported(&why, None)
    };
    let number = number_of_driver(attr);
    if number != 0 {
        let name = String::from_utf8_lossy(&seen.driver).into_owned();
        if BY_POINTER.contains(&&*name) {
            let why = format!("a pointer told what it counts ({name})");
            return Err(open.unsupported(&why, None));
        }
        return match named::driver(&name) {
            Some(known) if known == number => Ok((name, String::new())),
            _ => Err(unknown(number.into())),
        };
    }
    let Some(system) = &seen.system else {
        return Ok((String::new(), String::new()));
    };
    let system = String::from_utf8_lossy(system);
    if system == "ftrace" {
        return Err(open.unsupported("which functions it counts is not told", None));
    }
    let name = Tracepoints::open().and_then(|all| all.name(&system, attr.config()));
    let name = name.map_err(|error| failed_tracepoints(&system, error))?;
    let name = name.ok_or_else(|| unknown(attr.config()))?;
    Ok((String::new(), name))
}

/// The process that opens an event again: who has opened it, if that has it still. All events of a
/// group are opened by the same. Also gives the description of the first one of its group.
fn opener(
    open: &Open<'_>,
    (kernel, seen): (&Kernel, &Seen),
    cx: &dyn DumpContext,
) -> Result<(i32, Option<u32>)> {
    let holder = |id, owner: Option<i32>| {
        let owner = owner.and_then(|tid| cx.process(tid));
        let holders = cx.numbers(id).into_iter().map(|(pid, _)| pid);
        let holders = holders.collect::<Vec<_>>();
        let is_there = owner.filter(|pid| holders.contains(pid));
        is_there.or(holders.first().copied())
    };
    if seen.leader == seen.at {
        return Ok((
            holder(open.id, seen.owner).unwrap_or(open.process.pid()),
            None,
        ));
    }
    let leader = find(seen.leader, (kernel, open), cx)?;
    let leader = leader.ok_or_else(|| {
        open.unsupported(
            "the first event of its group is open nowhere in the tree",
            None,
        )
    })?;
    let owner = seen::owner(kernel, seen.leader).map_err(|error| failed(open, error))?;
    let opener = holder(leader, owner).unwrap_or(open.process.pid());
    if !cx.numbers(open.id).iter().any(|(pid, _)| *pid == opener) {
        let why = format!("process {opener} has not the first event of its group");
        return Err(open.unsupported(&why, None));
    }
    Ok((opener, Some(leader.0)))
}

/// The description of the event that the kernel has at `wanted`: mostly one shortly before `open`.
fn find(
    wanted: u64,
    (kernel, open): (&Kernel, &Open<'_>),
    cx: &dyn DumpContext,
) -> Result<Option<DescriptionId>> {
    let all = cx.all();
    let (before, behind) = all.split_at(open.id.0 as usize);
    let others = before.iter().rev().chain(behind);
    for other in others.filter(|other| PerfEvent::claims(other) && other.fd >= 0) {
        let at = seen::address(kernel, other.own()?).map_err(|error| failed(other, error))?;
        if at == wanted {
            return Ok(Some(other.id));
        }
    }
    Ok(None)
}

/// Has an event that was opened again count, if it did.
fn begin(record: &Record, own: BorrowedFd<'_>) -> Result<()> {
    let failed = |what: &str, error| {
        let whose = record.whose();
        Error::kernel(format!("{what} a performance event of {whose}"), error)
    };
    if record.limit > 0 {
        let limited = sys::perf_event::refresh(own, record.limit);
        limited.map_err(|error| failed("limit", error))?;
        if !record.counts {
            let disabled = sys::perf_event::disable(own);
            return disabled.map_err(|error| failed("disable", error));
        }
    } else if record.counts {
        let enabled = sys::perf_event::enable(own);
        enabled.map_err(|error| failed("enable", error))?;
    }
    Ok(())
}
