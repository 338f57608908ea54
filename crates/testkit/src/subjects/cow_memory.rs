//! Children that keep what they had of their parent while both write to it, a page of every 16, in
//! one block of 16 pages after the other: what they have in common becomes less all the time.
//! Arguments: the number of children, and that of blocks.
//!
//! `rounds` answers how often the task that looked least has looked at all its pages, `check`
//! "right" while all have found theirs as they should be.
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::{Fork, fork};

use super::{Control, Failure, number};
use crate::calls::Mapping;
use crate::slots::Slots;

const PAGE_BYTES: usize = 4096;
const BLOCK_PAGES: usize = 16;
const PAUSE_NS: i64 = 1_000_000;
/// Every how many writes a task looks at all its pages.
const WRITES: u64 = 16;

struct State {
    slots: Slots,
    own: Mapping,
    blocks: usize,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let children = number(arguments, 0, 2)? as usize;
    let blocks = number(arguments, 1, 1024)? as usize;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let bytes = blocks * BLOCK_PAGES * PAGE_BYTES;
    let state: &State = Box::leak(Box::new(State {
        slots: Slots::new(children + 1)?,
        own: Mapping::anonymous(bytes, both, MapFlags::PRIVATE)?,
        blocks,
    }));
    for page in 0..blocks * BLOCK_PAGES {
        state.own.store(page * PAGE_BYTES, stamp(0, 0, page));
    }
    for child in 1..=children {
        if fork()? == Fork::Child {
            work(state, child);
        }
    }
    std::thread::Builder::new().spawn(move || work(state, 0))?;
    state.slots.wait_rounds(0);
    state.slots.serve_alone(control)
}

/// What `task` writes to a page in its lap `lap`; nobody's lap 0 is what all had at first.
fn stamp(task: usize, lap: u64, page: usize) -> u64 {
    (task as u64) << 56 | lap << 24 | page as u64
}

/// Writes and looks for ever: the parent from the first block on, children from others.
fn work(state: &State, task: usize) -> ! {
    let mut laps = vec![0_u64; state.blocks];
    let mut written = 0;
    loop {
        let block = (written as usize + task * state.blocks / 3) % state.blocks;
        let page = block * BLOCK_PAGES + task;
        laps[block] += 1;
        state
            .own
            .store(page * PAGE_BYTES, stamp(task, laps[block], page));
        written += 1;
        if written % WRITES == 0 {
            look(state, task, &laps);
        }
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: PAUSE_NS,
        };
        let _ = nanosleep(&pause);
    }
}

/// Looks at all pages.
fn look(state: &State, task: usize, laps: &[u64]) {
    for (block, lap) in laps.iter().enumerate() {
        for at in 0..BLOCK_PAGES {
            let page = block * BLOCK_PAGES + at;
            let expected = match (at == task, lap) {
                (true, 1..) => stamp(task, *lap, page),
                _ => stamp(0, 0, page),
            };
            if state.own.load(page * PAGE_BYTES) != expected {
                state.slots.add_wrong(task);
            }
        }
    }
    state.slots.add_round(task);
}
