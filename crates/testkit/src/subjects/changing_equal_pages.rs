//! A parent and its children that write to memory of their own, at the same place in each, what is
//! equal in all of them, what is so at times, and what never is. Arguments: the number of children,
//! and the pages that each task writes.
//!
//! Of four pages, one is written once, after the fork, with the same in every task; one changes
//! between two contents, which are the same for all; one always gets contents that nobody has had;
//! and one is zero every other round. Tasks write all pages in order, over and over, at their own
//! pace, and look before: so at every instant the pages up to some place are of one round, and the
//! others of the round before. Each also writes the same, once, to its copies of the pages of a
//! file, 64 of them.
//!
//! `rounds` answers the rounds of the slowest task, `check` "right" while all have found their
//! pages as they wrote them.
use std::fs::File;

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::{Fork, fork};

use super::{Control, Failure, number};
use crate::calls::Mapping;
use crate::slots::Slots;

const PAGE_BYTES: usize = 4096;
const LAST_WORD: usize = PAGE_BYTES - 8;
const FILE_PAGES: usize = 64;
/// How many pages are written between two pauses, and how long those are.
const PAGES: usize = 16;
const PAUSE_NS: i64 = 50_000;

struct State {
    slots: Slots,
    own: Mapping,
    of_file: Mapping,
    pages: usize,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let children = number(arguments, 0, 2)? as usize;
    let pages = number(arguments, 1, 1024)? as usize;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let file = File::create_new(control.folder().join("mapped"))?;
    file.set_len((FILE_PAGES * PAGE_BYTES) as u64)?;
    let file = File::open(control.folder().join("mapped"))?;
    let state: &State = Box::leak(Box::new(State {
        slots: Slots::new(children + 1)?,
        own: Mapping::anonymous(pages * PAGE_BYTES, both, MapFlags::PRIVATE)?,
        of_file: Mapping::of_file(&file, 0, FILE_PAGES * PAGE_BYTES, both, MapFlags::PRIVATE)?,
        pages,
    }));
    for child in 1..=children {
        if fork()? == Fork::Child {
            work(state, child);
        }
    }
    std::thread::Builder::new().spawn(move || work(state, 0))?;
    state.slots.wait_rounds(1);
    state.slots.serve_alone(control)
}

/// What `task` writes to a page in a round; before the first, all pages are zero.
fn stamp(task: usize, round: u64, page: usize) -> u64 {
    let at = page as u64 + 1;
    match (page % 4, round) {
        (_, 0) => 0,
        (0, _) => at,
        (1, _) => ((round % 2) << 32) | at,
        (2, _) => (task as u64 + 1) << 56 | round << 24 | at,
        (_, round) if round % 2 == 0 => 0,
        (_, _) => (task as u64 + 1) << 48 | at,
    }
}

/// Writes and looks for ever.
fn work(state: &State, task: usize) -> ! {
    let of_file = |page: usize| (page * PAGE_BYTES, stamp(task, 1, 4 * page));
    for (at, mark) in (0..FILE_PAGES).map(of_file) {
        state.of_file.store(at, mark);
    }
    for round in 1.. {
        for page in 0..state.pages {
            let at = page * PAGE_BYTES;
            let before = stamp(task, round - 1, page);
            if [at, at + LAST_WORD]
                .iter()
                .any(|at| state.own.load(*at) != before)
            {
                state.slots.add_wrong(task);
            }
            let now = stamp(task, round, page);
            if now != before {
                state.own.store(at, now);
                state.own.store(at + LAST_WORD, now);
            }
            if page % PAGES == 0 {
                let pause = Timespec {
                    tv_sec: 0,
                    tv_nsec: PAUSE_NS,
                };
                let _ = nanosleep(&pause);
            }
        }
        let mut copies = (0..FILE_PAGES).map(of_file);
        if copies.any(|(at, mark)| state.of_file.load(at) != mark) {
            state.slots.add_wrong(task);
        }
        state.slots.add_round(task);
    }
    unreachable!("rounds are never all used up")
}
