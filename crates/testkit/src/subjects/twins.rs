//! Children that have written the same to memory of their own, and watch it. Arguments: the number
//! of children, and the pages that each writes.
//!
//! `write N BYTE` has child N write all its pages again, `rounds` answers how often the one that
//! looked least has looked, `check` "right" while every child finds its pages as it wrote them.
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::{Fork, fork};
use sys::subject::Mapping;

use super::{Control, Failure, not_understood, number};
use crate::wait;

const PAGE_BYTES: usize = 4096;
const PAUSE_NS: i64 = 1_000_000;

/// The words of a child in the memory that all share.
const SLOT_BYTES: usize = 64;
const ROUNDS: usize = 0;
const WRONG: usize = 8;
const WANTED: usize = 16;
const WRITTEN: usize = 24;

struct State {
    slots: Mapping,
    own: Mapping,
    pages: usize,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let children = number(arguments, 0, 2)? as usize;
    let pages = number(arguments, 1, 64)? as usize;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let state = State {
        slots: Mapping::anonymous(children * SLOT_BYTES, both, MapFlags::SHARED)?,
        own: Mapping::anonymous(pages * PAGE_BYTES, both, MapFlags::PRIVATE)?,
        pages,
    };
    for child in 0..children {
        state.slots.store(child * SLOT_BYTES + WANTED, 1);
        if fork()? == Fork::Child {
            work(&state, child * SLOT_BYTES);
        }
    }
    let all = |word: usize| (0..children).map(move |child| child * SLOT_BYTES + word);
    let rounds = || {
        all(ROUNDS)
            .map(|at| state.slots.load(at))
            .min()
            .unwrap_or(0)
    };
    wait::wait_until("every child to write", wait::SOON, || rounds() > 0);
    control.serve(|question| match question.verb.as_str() {
        "rounds" => Ok(rounds().to_string()),
        "check" => Ok(match all(WRONG).find(|at| state.slots.load(*at) != 0) {
            None => "right".into(),
            Some(at) => format!("wrong in child {}", at / SLOT_BYTES),
        }),
        "write" => {
            let slot = number(&question.words, 0, 0)? as usize * SLOT_BYTES;
            let value = number(&question.words, 1, 1)?;
            state.slots.store(slot + WANTED, value);
            wait::wait_until("the child to write", wait::SOON, || {
                state.slots.load(slot + WRITTEN) == value
            });
            Ok(String::new())
        }
        _ => not_understood(question),
    })
}

fn work(state: &State, slot: usize) -> ! {
    let mut written = 0;
    loop {
        let wanted = state.slots.load(slot + WANTED);
        for page in 0..state.pages {
            let at = page * PAGE_BYTES;
            if wanted != written {
                state.own.store(at, wanted << 32 | page as u64);
            } else if state.own.load(at) != written << 32 | page as u64 {
                state.slots.add(slot + WRONG, 1);
            }
        }
        written = wanted;
        state.slots.store(slot + WRITTEN, written);
        state.slots.add(slot + ROUNDS, 1);
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: PAUSE_NS,
        };
        let _ = nanosleep(&pause);
    }
}
