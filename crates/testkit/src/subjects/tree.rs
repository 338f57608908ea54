//! A tree of tasks over shared memory: each counts in a slot of its own and watches its copy of
//! pages that it shares with its parent until it writes. Arguments: the number of tasks, and
//! `still` for tasks that wait in a futex instead of counting.
//!
//! `counts` answers the slots, `total` their sum, `check` "right" while every task finds its
//! copy of the pages as it should be, `wake` makes waiting tasks count once.
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, futex, nanosleep};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::wait;

const PAGE_BYTES: usize = 4096;
/// Pages that every task has from the root, and of which it writes one.
const COPIED_PAGES: usize = 64;
const PAUSE_NS: i64 = 1_000_000;
const SLOT_BYTES: usize = 64;
const MARK: u64 = 0x5449_4c4c;

/// What every task holds.
struct State {
    slots: Mapping,
    copied: Mapping,
    still: bool,
    tasks: usize,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let tasks = number(arguments, 0, 10)? as usize;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let state = State {
        slots: Mapping::anonymous(tasks * SLOT_BYTES, both, MapFlags::SHARED)?,
        copied: Mapping::anonymous(COPIED_PAGES * PAGE_BYTES, both, MapFlags::PRIVATE)?,
        still: arguments.get(1).is_some_and(|word| word == "still"),
        tasks,
    };
    for page in 0..COPIED_PAGES {
        state.copied.store(page * PAGE_BYTES, MARK + page as u64);
    }
    // A binary tree: task N forks 2N+1 and 2N+2. The root is task 0 and answers.
    fork_children(&state, 0)?;
    wait::wait_until("every task to count", wait::SOON, || {
        (1..tasks).all(|task| count(&state, task) > 0)
    });
    control.serve(|question| match question.verb.as_str() {
        "counts" => {
            let counts: Vec<String> = (0..tasks).map(|n| count(&state, n).to_string()).collect();
            Ok(counts.join(" "))
        }
        "total" => Ok((0..tasks)
            .map(|n| count(&state, n))
            .sum::<u64>()
            .to_string()),
        "check" => {
            let wrong: Vec<usize> = (0..tasks)
                .filter(|&n| state.slots.load(n * SLOT_BYTES + 8) != 0 || !copy_is_right(&state, 0))
                .collect();
            Ok(if wrong.is_empty() {
                "right".into()
            } else {
                format!("wrong in {wrong:?}")
            })
        }
        "wake" => {
            for task in 1..tasks {
                wake_word(&state, task)?;
            }
            Ok(String::new())
        }
        _ => not_understood(question),
    })
}

fn count(state: &State, task: usize) -> u64 {
    state.slots.load(task * SLOT_BYTES)
}

fn fork_children(state: &State, task: usize) -> Result<(), Failure> {
    for child in [2 * task + 1, 2 * task + 2] {
        if child < state.tasks && fork()? == Fork::Child {
            fork_children(state, child)?;
            work(state, child);
        }
    }
    Ok(())
}

/// Each task writes its own page of the copied ones; the others must stay the root's.
fn own_page(task: usize) -> usize {
    task % COPIED_PAGES
}

/// Tells whether the pages that `task` has not written are still the root's.
fn copy_is_right(state: &State, task: usize) -> bool {
    (0..COPIED_PAGES).all(|page| {
        let written = task != 0 && page == own_page(task);
        written || state.copied.load(page * PAGE_BYTES) == MARK + page as u64
    })
}

fn work(state: &State, task: usize) -> ! {
    let own = (task as u64) << 32 | 1;
    state.copied.store(own_page(task) * PAGE_BYTES, own);
    loop {
        state.slots.add(task * SLOT_BYTES, 1);
        if !copy_is_right(state, task) || state.copied.load(own_page(task) * PAGE_BYTES) != own {
            state.slots.add(task * SLOT_BYTES + 8, 1);
        }
        if state.still {
            wait_for_word(state, task);
        } else {
            let pause = Timespec {
                tv_sec: 0,
                tv_nsec: PAUSE_NS,
            };
            let _ = nanosleep(&pause);
        }
    }
}

/// The word of `task` that it waits on, in the shared slots.
fn word(state: &State, task: usize) -> &AtomicU32 {
    state.slots.half_word(task * SLOT_BYTES + 16)
}

fn wait_for_word(state: &State, task: usize) {
    let word = word(state, task);
    while word.swap(0, Ordering::SeqCst) == 0 {
        // Interrupted, or the word changed meanwhile: look again.
        let _ = futex::wait(word, futex::Flags::empty(), 0, None);
    }
}

fn wake_word(state: &State, task: usize) -> Result<(), Failure> {
    let word = word(state, task);
    word.store(1, Ordering::SeqCst);
    futex::wake(word, futex::Flags::empty(), 1)?;
    Ok(())
}
