//! An event as the kernel has it.

use std::io::Result;
use std::os::fd::BorrowedFd;

use super::attr::{Attr, kind};
use crate::kernel::{Kernel, Structure};

/// `PERF_EVENT_STATE_…`: below them all, its task has ended, or what it counts is gone.
mod state {
    pub const ERROR: i32 = -2;
    pub const OFF: i32 = -1;
}

/// `PERF_PMU_CAP_EXTENDED_HW_TYPE`: its events can be told from others' by the upper half of their
/// number.
const NAMED_BY_EVENTS: u32 = 0x100;

/// Whether an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    /// It is enabled.
    On,
    /// It is disabled.
    Off,
    /// It was to count at any price, and could not.
    Failed,
    /// Its task has ended.
    Over,
}

/// What the kernel has of an event.
pub(super) struct Seen {
    /// Its own address.
    pub at: u64,
    pub attr: Attr,
    pub counts: Counts,
    /// The processor; -1 for any.
    pub cpu: i32,
    /// The thread that it is about, by its own number; none for all that a processor runs.
    pub tid: Option<i32>,
    /// The thread that has opened it, unless that has ended.
    pub owner: Option<i32>,
    /// The address of the first event of its group: its own where it is that.
    pub leader: u64,
    /// The address of the ring that its records go to; 0 for none.
    pub ring: u64,
    /// How often it may still overflow before it is disabled; 0 without a limit.
    pub limit: u32,
    /// Who counts: "cpu", "software".
    pub driver: Vec<u8>,
    /// The system of events that a tracepoint is of.
    pub system: Option<Vec<u8>>,
    /// Why it cannot be opened again.
    pub hindrance: Option<&'static str>,
}

/// Where the kernel has an event.
pub(super) fn address(kernel: &Kernel, own: BorrowedFd<'_>) -> Result<u64> {
    kernel.private(kernel.file(own)?)
}

/// Looks an event up.
pub(super) fn look(kernel: &Kernel, own: BorrowedFd<'_>) -> Result<Seen> {
    let at = address(kernel, own)?;
    let event = kernel.read("perf_event", at)?;
    let size = usize::try_from(kernel.size("perf_event_attr")?).expect("a structure");
    let mut attr = Attr::seen(kernel.bytes(event.address("attr")?, size)?);
    let (tid, is_over) = watched(kernel, &event)?;
    let counts = match event.half("state")?.cast_signed() {
        _ if is_over => Counts::Over,
        0.. => Counts::On,
        state::OFF => Counts::Off,
        state::ERROR => Counts::Failed,
        _ => Counts::Over,
    };
    let owner = owner(kernel, at)?;
    let driver = named(kernel, &event, &mut attr)?;
    Ok(Seen {
        at,
        counts,
        cpu: event.half("cpu")?.cast_signed(),
        tid,
        owner,
        leader: event.word("group_leader")?,
        ring: event.word("rb")?,
        limit: event.half("event_limit")?,
        driver,
        system: system(kernel, &event, &attr)?,
        hindrance: hindrance(&event)?,
        attr,
    })
}

/// The thread that it is about, if it is about one, and whether that has ended.
fn watched(kernel: &Kernel, event: &Structure<'_>) -> Result<(Option<i32>, bool)> {
    /// `TASK_TOMBSTONE`: the task has just ended.
    const ENDED: u64 = u64::MAX;
    let context = kernel.read("perf_event_context", event.word("ctx")?)?;
    match context.word("task")? {
        0 => Ok((None, false)),
        ENDED => Ok((None, true)),
        task => {
            let tid = kernel.tid(task)?;
            Ok((tid, tid.is_none()))
        }
    }
}

/// The name of its driver; the kind in `attr` becomes what it was opened with.
fn named(kernel: &Kernel, event: &Structure<'_>, attr: &mut Attr) -> Result<Vec<u8>> {
    let driver = kernel.read("pmu", event.word("pmu")?)?;
    let name = match driver.word("name")? {
        0 => Vec::new(),
        name => kernel.text(name)?,
    };
    let number = driver.half("type")?;
    match attr.kind() {
        kind::HARDWARE | kind::CACHE => {
            let is_named = driver.half("capabilities")? & NAMED_BY_EVENTS != 0;
            if is_named && number != kind::RAW {
                attr.set_config(attr.config() & u64::from(u32::MAX) | u64::from(number) << 32);
            }
        }
        // Two events of the software's have drivers of their own, under which nobody opens them.
        _ if [&b"cpu_clock"[..], b"task_clock"].contains(&&name[..]) => {
            attr.set_kind(kind::SOFTWARE);
        }
        _ => {}
    }
    Ok(name)
}

fn system(kernel: &Kernel, event: &Structure<'_>, attr: &Attr) -> Result<Option<Vec<u8>>> {
    if attr.kind() != kind::TRACEPOINT {
        return Ok(None);
    }
    let call = kernel.read("trace_event_call", event.word("tp_event")?)?;
    let class = kernel.read("trace_event_class", call.word("class")?)?;
    kernel.text(class.word("system")?).map(Some)
}

fn hindrance(event: &Structure<'_>) -> Result<Option<&'static str>> {
    let when = |is_so: bool, why| is_so.then_some(why);
    let hindrances = [
        when(
            event.word_if_any("cgrp")? != 0,
            "it counts for a control group",
        ),
        when(
            event.word_if_any("prog")? != 0,
            "a program of BPF is attached to it",
        ),
        // Its text is not kept, only what the kernel has made of it.
        when(
            event.word_if_any("filter")? != 0,
            "it has a filter, of which the kernel does not tell",
        ),
        when(
            !event.is_empty_list("addr_filters.list")?,
            "it has filters of addresses",
        ),
        when(
            !event.is_empty_list("child_list")?,
            "it counts for tasks that its own has made since, too",
        ),
    ];
    Ok(hindrances.into_iter().flatten().next())
}

/// The thread that has opened the event that the kernel has at `at`, unless that has ended.
pub(super) fn owner(kernel: &Kernel, at: u64) -> Result<Option<i32>> {
    match kernel.read("perf_event", at)?.word("owner")? {
        0 => Ok(None),
        owner => kernel.tid(owner),
    }
}
