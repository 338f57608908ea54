//! Processes that share their memory by clone(2), and with it perhaps their signal handlers,
//! descriptors and directories. Argument: the shape, one of those in [`SHAPES`].
//!
//! `check` has each of them write, map and unmap memory, move the end of the heap and set a
//! handler, and answers "right" if exactly those see it who share it; `end N` has process N end;
//! `pids` tells who they are.
use std::io;

use sys::kcmp::{self, Shared};
use sys::process::Process;

use super::{Control, Failure, not_understood};
use crate::calls::callers::Callers;
use crate::calls::clone::{DESCRIPTORS, DIRECTORIES, HANDLERS, MEMORY, SIBLING, THREAD};

const BOTH: u64 = MEMORY | HANDLERS;
const FILES: u64 = DESCRIPTORS | DIRECTORIES;
const ALL_OF_A_THREAD: u64 = THREAD | FILES;

const KINDS: [(u64, Shared); 4] = [
    (MEMORY, Shared::Memory),
    (HANDLERS, Shared::Actions),
    (DESCRIPTORS, Shared::Descriptors),
    (DIRECTORIES, Shared::Directories),
];

/// Who makes the next one, and what that shares with it. The first is number 0.
type Origin = (usize, u64);

const SHAPES: &[(&str, &[Origin])] = &[
    ("child", &[(0, MEMORY)]),
    ("handlers", &[(0, MEMORY), (0, BOTH)]),
    ("files", &[(0, MEMORY | FILES), (0, BOTH | FILES)]),
    ("line", &[(0, MEMORY), (1, BOTH), (2, MEMORY | FILES)]),
    (
        "threads",
        &[
            (0, BOTH),
            (1, ALL_OF_A_THREAD),
            (0, ALL_OF_A_THREAD),
            (2, MEMORY),
        ],
    ),
    (
        "copies",
        &[(0, MEMORY), (1, 0), (0, 0), (2, BOTH), (4, 0), (3, FILES)],
    ),
    (
        "siblings",
        &[
            (0, 0),
            (1, MEMORY | SIBLING),
            (2, BOTH | SIBLING),
            (2, MEMORY),
            (3, 0),
        ],
    ),
    ("alone", &[(0, 0), (1, MEMORY), (1, BOTH), (0, MEMORY)]),
];

struct State {
    callers: Callers,
    pids: Vec<i32>,
    /// By kind and process: those with the same number share it.
    classes: [Vec<usize>; 4],
    /// A word of memory that all have, or have a copy of.
    word: u64,
    ended: Vec<bool>,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let shape = arguments.first().map_or("child", String::as_str);
    let shape = SHAPES.iter().find(|(name, _)| *name == shape);
    let made = shape.ok_or("no such shape")?.1;
    let callers = Callers::new(made.len() + 1)?;
    let word = callers.map(0, 4096)?;
    callers.store(0, word, 1)?;
    let mut pids = vec![std::process::id().cast_signed()];
    for (by, flags) in made {
        pids.push(callers.make(*by, *flags)?);
    }
    let mut state = State {
        callers,
        classes: KINDS.map(|(kind, _)| classes(made, kind)),
        word,
        ended: vec![false; pids.len()],
        pids,
    };
    control.serve(move |question| match question.verb.as_str() {
        "check" => {
            let checked = state.check();
            Ok(checked.map_or_else(|error| error.to_string(), |()| "right".to_owned()))
        }
        "pids" => {
            let pids = state.pids.iter().map(ToString::to_string);
            Ok(pids.collect::<Vec<_>>().join(" "))
        }
        "end" => {
            let which = question
                .words
                .first()
                .ok_or("which one?")?
                .parse::<usize>()?;
            state.callers.end(which);
            state.ended[which] = true;
            Ok("done".to_owned())
        }
        _ => not_understood(question),
    })
}

/// Who shares what is of `kind`.
fn classes(made: &[Origin], kind: u64) -> Vec<usize> {
    let mut of = vec![0];
    for (by, flags) in made {
        let class = if flags & kind == 0 { of.len() } else { of[*by] };
        of.push(class);
    }
    of
}

impl State {
    fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.pids.len()).filter(|one| !self.ended[*one])
    }

    /// Checks that exactly those others see what `one` does who share what is of `kind`.
    fn seen(
        &self,
        what: &str,
        (one, kind): (usize, usize),
        sees: impl Fn(usize) -> io::Result<bool>,
    ) -> Result<(), Failure> {
        for other in self.living() {
            let seen = sees(other)?;
            if seen != (self.classes[kind][one] == self.classes[kind][other]) {
                let seen = if seen { "is" } else { "is not" };
                return Err(format!("what process {one} {what} {seen} seen by {other}").into());
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Failure> {
        const MEMORY_KIND: usize = 0;
        const HANDLERS_KIND: usize = 1;
        let callers = &self.callers;
        for one in self.living() {
            let value = 1000 + one as u64;
            for other in self.living() {
                callers.store(other, self.word, 7)?;
                callers.set_handler(other, 0x1000)?;
            }
            callers.store(one, self.word, value)?;
            let sees = |other| Ok(callers.load(other, self.word)? == value);
            self.seen("writes", (one, MEMORY_KIND), sees)?;
            let heap = callers.end_heap(one, 0)?;
            let more = heap + 4096 * (1 + one as u64);
            callers.end_heap(one, more)?;
            let sees = |other| Ok(callers.end_heap(other, 0)? == more);
            self.seen("has as its heap", (one, MEMORY_KIND), sees)?;
            self.shrink(one, heap)?;
            // Far from what others map.
            let at = callers.map(one, 0x4000_0000 + 4096 * one as u64)?;
            callers.store(one, at, value)?;
            let sees = |other| Ok(callers.has(other, at)? && callers.load(other, at)? == value);
            self.seen("maps", (one, MEMORY_KIND), sees)?;
            callers.unmap(one, at)?;
            callers.set_handler(one, 0x1000 * value)?;
            let sees = |other| Ok(callers.handler(other)? == 0x1000 * value);
            self.seen("handles", (one, HANDLERS_KIND), sees)?;
            for (kind, (_, what)) in KINDS.iter().enumerate() {
                let sees = |other: usize| {
                    let [one, other] = [one, other].map(|task| Process::new(self.pids[task]));
                    let compared = kcmp::compare(&one, &other, *what);
                    compared.map(std::cmp::Ordering::is_eq)
                };
                self.seen(&format!("has of {what:?}"), (one, kind), sees)?;
            }
        }
        Ok(())
    }

    /// Moves the end of the heap back, page by page.
    fn shrink(&self, one: usize, to: u64) -> io::Result<()> {
        loop {
            let now = self.callers.end_heap(one, 0)?;
            if now <= to {
                return Ok(());
            }
            self.callers.end_heap(one, now - 4096)?;
        }
    }
}
