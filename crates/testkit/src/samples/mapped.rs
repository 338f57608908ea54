//! Mappings in every state: flags of mmap(2), protections, advice, locks, seals, nodes.
//!
//! Each value has a place of its own, so that one process can have all of them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use crate::calls::placed::{Part, place_of};
use sys::ledger::List;

use super::sample::{Sample, Values};
use resources::ledger::memory::{ADVICE, MAP_FLAGS};

/// The states.
#[rustfmt::skip]
pub(super) const MAPPED: &[Sample] = &[
    Sample::new("mappings", Values::Made(all), map, read)
        .about(&[
            "rd", "wr", "ex", "sh", "gd", "lo", "sr", "rr", "dc", "lf", "nr", "ht", "wf", "dd",
            "mg", "hg", "nh", "sl", "dp", "gu", "smaps", "maps", "mem", "pagemap", "map_files",
            "numa_maps", "VmLck", "PR_SET_VMA",
        ])
        .of_lists(&LISTS)
        .adding()
        .of_process(),
];

/// The lists of which each entry is a state.
static LISTS: [&List; 2] = [&MAP_FLAGS, &ADVICE];

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 4;
/// The kinds of states, above the numbers of each.
const FLAGS: u64 = 0;
const PROTECTIONS: u64 = 1;
const OF_PRIVATE: u64 = 2;
const OF_SHARED: u64 = 3;
const LOCKS: u64 = 4;
const SEALS: u64 = 5;
const NODES: u64 = 6;
const NAMES: u64 = 7;

const PRIVATE: i32 = 2;
const SHARED: i32 = 1;
const HUGE: i32 = 0x4_0000;
const DROPPABLE: i32 = 8;
const READ_WRITE: i32 = 3;
/// `MADV_GUARD_INSTALL`, `MADV_GUARD_REMOVE`: in shared memory they do not show.
const GUARDS: [u64; 2] = [102, 103];

/// All states, each a kind and a number of it.
fn all() -> Vec<u64> {
    let flags = Values::Of(&MAP_FLAGS).all();
    let advice = Values::Of(&ADVICE).all();
    let of_shared = advice.iter().copied();
    let of_shared = of_shared.filter(|advice| !GUARDS.contains(advice));
    let kinds = [
        (FLAGS, flags),
        (PROTECTIONS, (0..8).collect()),
        (OF_PRIVATE, advice.clone()),
        (OF_SHARED, of_shared.collect()),
        (LOCKS, vec![0, 1]),
        (SEALS, vec![0, 1]),
        // Preferred, bound, interleaved, local, and with the two flags of nodes.
        (NODES, vec![1, 2, 3, 4, 2 | 1 << 15, 3 | 1 << 14]),
        (NAMES, vec![0, 1]),
    ];
    let all = kinds.into_iter().map(|(kind, numbers)| {
        let numbers = numbers.into_iter();
        numbers
            .map(move |number| kind << 32 | number)
            .collect::<Vec<_>>()
    });
    all.flatten().collect()
}

/// The place of a state.
fn whole(value: u64) -> io::Result<Part> {
    let place = all().iter().position(|known| *known == value);
    let place = place.ok_or(io::ErrorKind::NotFound)?;
    let from = 0;
    let bytes = PAGES * PAGE_BYTES;
    Ok(Part { place, from, bytes })
}

fn map(value: u64) -> io::Result<()> {
    let (kind, number) = (value >> 32, value & 0xffff_ffff);
    let whole = whole(value)?;
    // The second and the third page: the mapping is split where they differ.
    let middle = Part {
        from: PAGE_BYTES,
        bytes: 2 * PAGE_BYTES,
        ..whole
    };
    match kind {
        FLAGS => map_flagged(whole, number as i32),
        PROTECTIONS => map_written(whole, number as i32, PRIVATE),
        OF_PRIVATE | OF_SHARED => {
            let flags = if kind == OF_PRIVATE { PRIVATE } else { SHARED };
            map_written(whole, READ_WRITE, flags)?;
            match undone(number) {
                Some(before) => whole
                    .advise(before)
                    .and_then(|()| middle.advise(number as i32)),
                None => middle.advise(number as i32),
            }
        }
        LOCKS => {
            map_written(whole, READ_WRITE, PRIVATE)?;
            middle.lock(number as u32)
        }
        SEALS => {
            map_written(
                whole,
                READ_WRITE,
                if number == 0 { PRIVATE } else { SHARED },
            )?;
            middle.seal()
        }
        NODES => {
            whole.map(READ_WRITE, PRIVATE)?;
            let nodes = if number == 4 { 0 } else { 1 };
            middle.bind(number as i32, nodes)?;
            write(whole)
        }
        _ => {
            map_written(whole, READ_WRITE, PRIVATE)?;
            middle.name(if number == 0 {
                c"named"
            } else {
                c"with a space"
            })
        }
    }
}

/// The advice that this one undoes.
fn undone(advice: u64) -> Option<i32> {
    let undone = match advice {
        // MADV_NORMAL undoes MADV_RANDOM.
        0 => 1,
        11 => 10,
        13 => 12,
        17 => 16,
        19 => 18,
        103 => 102,
        _ => return None,
    };
    Some(undone)
}

fn map_flagged(whole: Part, flag: i32) -> io::Result<()> {
    const TYPES: [i32; 3] = [1, 2, 8];
    let kind = if TYPES.contains(&flag) { 0 } else { PRIVATE };
    match flag {
        // What is written there may be gone at any time (docs/limits.md).
        DROPPABLE => whole.map(READ_WRITE, flag),
        HUGE => {
            let bytes = 2 << 20;
            map_written(Part { bytes, ..whole }, READ_WRITE, kind | flag)
        }
        _ => map_written(whole, READ_WRITE, kind | flag),
    }
}

fn map_written(part: Part, protection: i32, flags: i32) -> io::Result<()> {
    part.map(protection, flags)?;
    write(part)
}

/// Writes to the first and the third page, where the kernel lets us.
fn write(part: Part) -> io::Result<()> {
    let memory = File::options().write(true).open("/proc/self/mem")?;
    for page in [0, 2] {
        let at = part.address() + page * PAGE_BYTES;
        // Without a right to write it, shared memory stays as it is.
        let _ = memory.write_all_at(&at.to_ne_bytes(), at as u64);
    }
    Ok(())
}

/// A mapping in one of the places.
#[derive(Debug)]
struct MappingView {
    range: (usize, usize),
    protection: String,
    name: String,
    policy: String,
    flags: Vec<String>,
    words: Vec<Option<u64>>,
}

impl MappingView {
    /// A mapping without its flags, from the first line that smaps has of it.
    fn new(line: &str, range: (usize, usize), nodes: &str, memory: &File) -> Self {
        let mut words = line.split_ascii_whitespace().skip(1);
        let protection = words.next().unwrap_or_default().to_owned();
        // The number of its file is the kernel's own.
        let name: Vec<&str> = words.skip(3).collect();
        Self {
            range,
            protection,
            name: name.join(" "),
            policy: policy(nodes, range.0),
            flags: Vec::new(),
            words: self::words(memory, range),
        }
    }

    /// Tells whether only history keeps the next one apart from it.
    fn goes_on_in(&self, next: &Self) -> bool {
        self.range.1 == next.range.0
            && self.protection == next.protection
            && self.name == next.name
            && self.policy == next.policy
            && self.flags == next.flags
    }
}

/// What stands in smaps and numa_maps of all places, and in their pages.
fn read() -> io::Result<String> {
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let nodes = fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let memory = File::open("/proc/self/mem")?;
    let mut all: Vec<MappingView> = Vec::new();
    let mut is_ours = false;
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some(range) = range(first) {
            is_ours = place_of(range.0).is_ok();
            if is_ours {
                all.push(MappingView::new(line, range, &nodes, &memory));
            }
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && let Some(last) = all.last_mut().filter(|_| is_ours)
        {
            // Written since somebody looked, accounted for, and guards that a mapping may have.
            let noise = |flag: &&str| ["sd", "ac", "gu"].contains(flag);
            let flags = flags.split_ascii_whitespace().filter(|flag| !noise(flag));
            last.flags = flags.map(str::to_owned).collect();
        }
    }
    let mut merged: Vec<MappingView> = Vec::new();
    for next in all {
        match merged.last_mut() {
            Some(last) if last.goes_on_in(&next) => {
                last.range.1 = next.range.1;
                last.words.extend(next.words);
            }
            _ => merged.push(next),
        }
    }
    let told = merged
        .iter()
        .map(|shown| format!("{shown:x?}").replace(", ", " "));
    Ok(told.collect::<Vec<_>>().join(", "))
}

fn range(word: &str) -> Option<(usize, usize)> {
    let (start, end) = word.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

/// The first words of a mapping's pages; none of those that cannot be read.
fn words(memory: &File, (start, end): (usize, usize)) -> Vec<Option<u64>> {
    let pages = (start..end).step_by(PAGE_BYTES).take(PAGES);
    let word = |at: usize| {
        let mut word = [0; 8];
        let read = memory.read_exact_at(&mut word, at as u64);
        read.ok().map(|()| u64::from_ne_bytes(word))
    };
    pages.map(word).collect()
}

fn policy(nodes: &str, start: usize) -> String {
    let start = format!("{start:x}");
    let mut lines = nodes.lines().map(|line| line.split(' '));
    let line = lines.find_map(|mut words| (words.next()? == start).then_some(words));
    let policy = line.and_then(|mut words| words.next());
    policy.unwrap_or_default().to_owned()
}
