//! A child that ends and has a successor with the very same pid, which writes other things to the
//! same addresses, and leaves half of them as its parent had them.
//!
//! `replace` lets the next one take the child's place, `child` answers its pid, `check` "right"
//! while the child finds its memory as it should be.
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::Fork;

use super::{Control, Failure, not_understood};
use crate::calls::Mapping;
use crate::calls::clone::clone;
use crate::slots::Slots;

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 256;

struct State {
    slots: Slots,
    memory: Mapping,
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let state: &State = Box::leak(Box::new(State {
        slots: Slots::new(1)?,
        memory: Mapping::anonymous(PAGES * PAGE_BYTES, both, MapFlags::PRIVATE)?,
    }));
    for page in 0..PAGES {
        state.memory.store(page * PAGE_BYTES, stamp(0, page));
    }
    let mut generation = 1;
    let mut child = start(state, generation, None)?;
    state.slots.wait_rounds(0);
    control.serve(move |question| match question.verb.as_str() {
        "replace" => {
            kill_process(child, Signal::KILL)?;
            waitpid(Some(child), WaitOptions::empty())?;
            generation += 1;
            child = start(state, generation, Some(child))?;
            let seen = state.slots.rounds();
            state.slots.wait_rounds(seen);
            Ok(child.to_string())
        }
        "child" => Ok(child.to_string()),
        "check" => {
            let seen = state.slots.rounds();
            state.slots.wait_rounds(seen);
            Ok(state.slots.check())
        }
        _ => not_understood(question),
    })
}

/// What a page says that is the parent's, or was written by child `generation`.
fn stamp(generation: u64, page: usize) -> u64 {
    generation << 32 | page as u64 | 1 << 60
}

/// Starts a child, with the pid of the one before it, that writes every other page and then looks.
fn start(state: &State, generation: u64, pid: Option<Pid>) -> Result<Pid, Failure> {
    let child = match clone(0, pid)? {
        Fork::Parent(child) => return Ok(child),
        Fork::Child => generation,
    };
    let is_own = |page: &usize| (page + generation as usize).is_multiple_of(2);
    for page in (0..PAGES).filter(is_own) {
        state.memory.store(page * PAGE_BYTES, stamp(child, page));
    }
    loop {
        for page in 0..PAGES {
            let of = if is_own(&page) { child } else { 0 };
            if state.memory.load(page * PAGE_BYTES) != stamp(of, page) {
                state.slots.add_wrong(0);
            }
        }
        state.slots.add_round(0);
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        let _ = nanosleep(&pause);
    }
}
