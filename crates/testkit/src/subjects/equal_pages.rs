//! Children that have written the same to memory of their own, and watch it. Arguments: the number
//! of children, and the pages that each writes.
//!
//! `write N BYTE` has child N write all its pages again, `rounds` answers how often the one that
//! looked least has looked, `check` "right" while every child finds its pages as it wrote them.
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::slots::Slots;
use crate::wait;

const PAGE_BYTES: usize = 4096;
const PAUSE_NS: i64 = 1_000_000;

/// Words of a child: what it is to write, and what it has written.
const WANTED: usize = 0;
const WRITTEN: usize = 1;

struct State {
    slots: Slots,
    own: Mapping,
    pages: usize,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let children = number(arguments, 0, 2)? as usize;
    let pages = number(arguments, 1, 64)? as usize;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let state = State {
        slots: Slots::new(children)?,
        own: Mapping::anonymous(pages * PAGE_BYTES, both, MapFlags::PRIVATE)?,
        pages,
    };
    for child in 0..children {
        state.slots.set_own(child, WANTED, 1);
        if fork()? == Fork::Child {
            work(&state, child);
        }
    }
    state.slots.wait_rounds(0);
    state.slots.serve(control, |question| {
        if question.verb != "write" {
            return not_understood(question);
        }
        let child = number(&question.words, 0, 0)? as usize;
        let value = number(&question.words, 1, 1)?;
        state.slots.set_own(child, WANTED, value);
        wait::wait_until("the child to write", wait::SOON, || {
            state.slots.own(child, WRITTEN) == value
        });
        Ok(String::new())
    })
}

fn work(state: &State, child: usize) -> ! {
    let mut written = 0;
    loop {
        let wanted = state.slots.own(child, WANTED);
        for page in 0..state.pages {
            let at = page * PAGE_BYTES;
            if wanted != written {
                state.own.store(at, wanted << 32 | page as u64);
            } else if state.own.load(at) != written << 32 | page as u64 {
                state.slots.add_wrong(child);
            }
        }
        written = wanted;
        state.slots.set_own(child, WRITTEN, written);
        state.slots.add_round(child);
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: PAUSE_NS,
        };
        let _ = nanosleep(&pause);
    }
}
