//! Scheduling: policies, priorities, processors, nodes.

use std::fs;
use std::io;

use crate::calls::attributes::{memory_policy, set_memory_policy, set_scheduling};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sys::io_class::{self, Class};
use sys::own::{SCHED_ATTR_BYTES, io_priority, sched_attr};

use super::sample::{Sample, Values, status};

/// The states.
#[rustfmt::skip]
pub(super) const SCHEDULING: &[Sample] = &[
    Sample::new("nice", Values::These(&[3, 1, 0]), |nice| attributes(OTHER, nice as u32, 0), read)
        .about(&["stat"]),
    Sample::new("slice", Values::These(&[5_000_000, 100_000, 40_000_000]), slice, read),
    Sample::new("batch", Values::These(&[0]), |_| attributes(BATCH, 2, 0), read),
    Sample::new("real-time", Values::These(&[1, 40, 99]), real_time, read),
    Sample::new("reset-on-fork", Values::These(&[0]), |_| flagged(RESET_ON_FORK), read),
    Sample::new("clamps", Values::These(&[UTIL_MIN, UTIL_MAX]), flagged, read),
    Sample::new("idle", Values::These(&[0]), |_| attributes(IDLE, 0, 0), read).in_helpers(),
    Sample::new("deadline", Values::These(&[3, 5]), deadline, read).in_helpers(),
    Sample::new("processors", Values::These(&[0, 1, 2, 3]), processor, || status("Cpus_allowed"))
        .about(&["Cpus_allowed"]),
    Sample::new("io-priority", Values::Made(io_priorities), set_io_priority, read_io_priority),
    Sample::new("autogroup", Values::These(&[3, 1, 0]), autogroup, read_autogroup)
        .about(&["autogroup"])
        .of_process(),
    Sample::new("memory-policy", Values::Made(policies), policy, read_policy).by_call(239),
];

const OTHER: u32 = 0;
const FIFO: u32 = 1;
const ROUND_ROBIN: u32 = 2;
const BATCH: u32 = 3;
const IDLE: u32 = 5;
const DEADLINE: u32 = 6;
const RESET_ON_FORK: u64 = 1;
const UTIL_MIN: u64 = 0x20;
const UTIL_MAX: u64 = 0x40;

fn read() -> io::Result<String> {
    let attributes = sched_attr()?;
    Ok(format!("{:x?}", attributes.chunks(8).collect::<Vec<_>>()))
}

/// `struct sched_attr`, of which some is set.
struct Attributes([u8; SCHED_ATTR_BYTES]);

impl Attributes {
    const FLAGS_AT: usize = 8;
    const NICE_AT: usize = 16;
    const PRIORITY_AT: usize = 20;
    const RUNTIME_AT: usize = 24;
    const UTIL_MIN_AT: usize = 48;

    fn new(policy: u32) -> Self {
        let mut new = Self([0; SCHED_ATTR_BYTES]);
        new.put(0, &(SCHED_ATTR_BYTES as u32).to_ne_bytes());
        new.put(4, &policy.to_ne_bytes());
        new
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn set(&self) -> io::Result<()> {
        set_scheduling(&self.0)
    }
}

fn attributes(policy: u32, nice: u32, priority: u32) -> io::Result<()> {
    let mut new = Attributes::new(policy);
    new.put(Attributes::NICE_AT, &nice.to_ne_bytes());
    new.put(Attributes::PRIORITY_AT, &priority.to_ne_bytes());
    new.set()
}

fn slice(ns: u64) -> io::Result<()> {
    let mut new = Attributes::new(OTHER);
    new.put(Attributes::RUNTIME_AT, &ns.to_ne_bytes());
    new.set()
}

fn real_time(priority: u64) -> io::Result<()> {
    let policy = if priority == 1 { ROUND_ROBIN } else { FIFO };
    attributes(policy, 0, priority as u32)
}

/// Sets a flag, and what it says is given.
fn flagged(flag: u64) -> io::Result<()> {
    let mut new = Attributes::new(OTHER);
    new.put(Attributes::FLAGS_AT, &flag.to_ne_bytes());
    let clamps = [100_u32, 900].map(u32::to_ne_bytes);
    new.put(Attributes::UTIL_MIN_AT, clamps.as_flattened());
    new.set()
}

/// So many milliseconds in each 50.
fn deadline(ms: u64) -> io::Result<()> {
    let mut new = Attributes::new(DEADLINE);
    let times = [ms, 40, 50].map(|ms| (ms * 1_000_000).to_ne_bytes());
    new.put(Attributes::RUNTIME_AT, times.as_flattened());
    new.set()
}

/// Leaves one of the processors that the thread may use out, or lets it use that alone.
fn processor(value: u64) -> io::Result<()> {
    let now = sched_getaffinity(None)?;
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|at| now.is_set(*at)).collect();
    let one = all[value as usize / 2 % all.len()];
    let mut new = now;
    if value.is_multiple_of(2) {
        new = CpuSet::new();
        new.set(one);
    } else {
        new.unset(one);
    }
    Ok(sched_setaffinity(None, &new)?)
}

fn io_priorities() -> Vec<u64> {
    (0..8)
        .flat_map(|level| [level, 8 + level])
        .chain([16])
        .collect()
}

fn set_io_priority(value: u64) -> io::Result<()> {
    let level = (value % 8) as u8;
    io_class::set(match value / 8 {
        0 => Class::BestEffort(level),
        1 => Class::Realtime(level),
        _ => Class::Idle,
    })
}

fn read_io_priority() -> io::Result<String> {
    io_priority().map(|number| format!("{number:x}"))
}

fn autogroup(nice: u64) -> io::Result<()> {
    fs::write("/proc/self/autogroup", nice.to_string())
}

/// Its nice value: the number is the kernel's own.
fn read_autogroup() -> io::Result<String> {
    let text = fs::read_to_string("/proc/self/autogroup")?;
    let nice = text.split_ascii_whitespace().next_back();
    Ok(nice.unwrap_or_default().to_owned())
}

/// `MPOL_F_STATIC_NODES`, `MPOL_F_RELATIVE_NODES`
const NODE_FLAGS: [u64; 3] = [0, 1 << 15, 1 << 14];
/// `MPOL_F_NUMA_BALANCING`
const BALANCING: u64 = 1 << 13;
/// `MPOL_BIND`
const BIND: u64 = 2;

/// Preferred, bound, interleaved, local, some preferred, interleaved by weight.
fn policies() -> Vec<u64> {
    let modes = [1, 2, 3, 5, 6];
    let flagged = |mode| NODE_FLAGS.map(|flag| mode | flag);
    let all = modes.into_iter().flat_map(flagged);
    all.chain([4, BIND | BALANCING, 0]).collect()
}

fn policy(mode: u64) -> io::Result<()> {
    let nodes = if mode == 4 || mode == 0 { 0 } else { 1 };
    set_memory_policy(mode as i32, nodes)
}

fn read_policy() -> io::Result<String> {
    memory_policy().map(|(mode, nodes)| format!("{mode:x} {nodes:x}"))
}
