//! Processes that share descriptor tables, directories, undo lists and I/O contexts by clone(2).
//! Argument: the shape, one of those in [`SHAPES`].
//!
//! `check` has each of them open a file, go to a folder and set its umask, and answers "right" if
//! exactly those see it who share it; `unshare N` gives process N everything as its own.
use std::cell::RefCell;
use std::fs::{create_dir, read_link, read_to_string};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{chdir, getpid, umask};
use rustix::thread::{Timespec, nanosleep};
use sys::fork::Fork;
use sys::io_class::{self, Class};
use sys::kcmp::{self, Shared};
use sys::process::Process;

use super::{Control, Failure, not_understood};
use crate::calls::Mapping;
use crate::calls::clone::{DESCRIPTORS, DIRECTORIES, IO_CONTEXT, SEMAPHORE_UNDO, clone, unshare};
use crate::wait;

const ALL: u64 = DESCRIPTORS | DIRECTORIES | SEMAPHORE_UNDO;
const KINDS: [(u64, Shared); 4] = [
    (DESCRIPTORS, Shared::Descriptors),
    (DIRECTORIES, Shared::Directories),
    (SEMAPHORE_UNDO, Shared::SemaphoreUndo),
    (IO_CONTEXT, Shared::Io),
];

/// What process `.0` does, in order: it makes the next process that shares `.1` with it, or
/// leaves that.
#[derive(Clone, Copy)]
enum Step {
    Make(usize, u64),
    Leave(usize, u64),
}

use Step::{Leave, Make};

/// The shape in which each process has an I/O context, by a priority.
const IO_SHAPE: &str = "io";

/// Process 0 is the root, those that are made are numbered in the order of their steps.
const SHAPES: &[(&str, &[Step])] = &[
    ("child", &[Make(0, ALL)]),
    ("line", &[Make(0, ALL), Make(1, ALL), Make(2, ALL)]),
    (
        "siblings",
        &[Make(0, ALL), Make(0, ALL), Leave(0, ALL), Make(0, 0)],
    ),
    ("grandchild", &[Make(0, ALL), Make(1, ALL), Leave(1, ALL)]),
    (
        "pairs",
        &[
            Make(0, DESCRIPTORS),
            Make(0, DESCRIPTORS),
            Leave(0, DESCRIPTORS),
            Make(0, DIRECTORIES),
            Make(0, DESCRIPTORS),
            Make(0, DESCRIPTORS),
            Leave(0, DESCRIPTORS),
            Make(0, DESCRIPTORS),
        ],
    ),
    (
        IO_SHAPE,
        &[
            Make(0, IO_CONTEXT),
            Make(1, IO_CONTEXT | DESCRIPTORS),
            Make(0, 0),
            Make(3, IO_CONTEXT),
            Make(4, 0),
        ],
    ),
    (
        "mixed",
        &[
            Make(0, DESCRIPTORS),
            Make(0, DIRECTORIES),
            Make(1, DIRECTORIES),
            Make(2, DESCRIPTORS | SEMAPHORE_UNDO),
            Make(3, ALL),
            Make(3, 0),
        ],
    ),
];

/// Words of each process in the memory that all have.
const WORDS: usize = 8;
const PID: usize = 0;
const ASKED: usize = 1;
const VERB: usize = 2;
const ARGUMENT: usize = 3;
const ANSWERED: usize = 4;
const ANSWER: usize = 5;

const OPEN: u64 = 1;
const CLOSE: u64 = 2;
const HAS: u64 = 3;
const GO: u64 = 4;
const WHERE: u64 = 5;
const SET_MASK: u64 = 6;
const MASK: u64 = 7;
const UNSHARE: u64 = 8;

struct State {
    words: Mapping,
    folder: PathBuf,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let shape = arguments.first().map_or("child", String::as_str);
    let shape = SHAPES.iter().find(|(name, _)| *name == shape);
    let steps = shape.ok_or("no such shape")?.1;
    let count = 1 + steps.iter().filter(|step| matches!(step, Make(..))).count();
    for task in 0..count {
        create_dir(control.folder().join(place(task)))?;
    }
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let state: &State = Box::leak(Box::new(State {
        words: Mapping::anonymous(count * WORDS * 8, both, MapFlags::SHARED)?,
        folder: control.folder().to_owned(),
    }));
    let has_io = shape.is_some_and(|(name, _)| *name == IO_SHAPE);
    if has_io {
        io_class::set(Class::BestEffort(5))?;
    }
    let own = act(state, steps, 0)?;
    let opened = RefCell::new(Vec::new());
    if own != 0 {
        return serve(state, own, &opened);
    }
    for task in 1..count {
        wait::wait_until("all processes", wait::SOON, || state.load(task, PID) != 0);
    }
    let mut classes = KINDS.map(|(kind, _)| classes(steps, kind));
    let ask = |task: usize, verb: u64, argument: u64| match task {
        0 => perform(state, &opened, verb, argument),
        _ => Ok(state.ask(task, verb, argument)),
    };
    control.serve(move |question| match question.verb.as_str() {
        "check" => {
            let checked = check(state, &classes, has_io, &ask);
            Ok(checked.map_or_else(|error| error.to_string(), |()| "right".to_owned()))
        }
        "unshare" => {
            let task = question.words.first().ok_or("which one?")?.parse()?;
            ask(task, UNSHARE, 0)?;
            classes.iter_mut().for_each(|of| of[task] = 1000 + task);
            Ok("done".to_owned())
        }
        _ => not_understood(question),
    })
}

fn place(task: usize) -> String {
    format!("place-{task}")
}

/// Does the steps of process `own`; which one this is in the end.
fn act(state: &State, steps: &[Step], mut own: usize) -> Result<usize, Failure> {
    let mut next = 1;
    for step in steps {
        match *step {
            Leave(by, kinds) if by == own => unshare(kinds)?,
            Make(by, kinds) => {
                if by == own && clone(kinds, None)? == Fork::Child {
                    own = next;
                }
                next += 1;
            }
            Leave(..) => {}
        }
    }
    let pid = getpid().as_raw_nonzero().get();
    state.store(own, PID, u64::from(pid.cast_unsigned()));
    Ok(own)
}

/// Who shares what is of `kind`: those with the same number.
fn classes(steps: &[Step], kind: u64) -> Vec<usize> {
    let mut of = vec![0];
    let mut last = 0;
    for step in steps {
        last += 1;
        match *step {
            Make(by, kinds) if kinds & kind != 0 => of.push(of[by]),
            Make(..) => of.push(last),
            Leave(by, kinds) if kinds & kind != 0 => of[by] = last,
            Leave(..) => {}
        }
    }
    of
}

impl State {
    fn load(&self, task: usize, word: usize) -> u64 {
        self.words.load((task * WORDS + word) * 8)
    }

    fn store(&self, task: usize, word: usize, value: u64) {
        self.words.store((task * WORDS + word) * 8, value);
    }

    fn ask(&self, task: usize, verb: u64, argument: u64) -> u64 {
        self.store(task, VERB, verb);
        self.store(task, ARGUMENT, argument);
        let number = self.load(task, ASKED) + 1;
        self.store(task, ASKED, number);
        let what = format!("the answer of process {task}");
        wait::wait_until(&what, wait::SOON, || self.load(task, ANSWERED) == number);
        self.load(task, ANSWER)
    }
}

/// Answers the root for ever.
fn serve(state: &State, own: usize, opened: &RefCell<Vec<OwnedFd>>) -> Result<(), Failure> {
    loop {
        let asked = state.load(own, ASKED);
        if asked == state.load(own, ANSWERED) {
            let pause = Timespec {
                tv_sec: 0,
                tv_nsec: 1_000_000,
            };
            let _ = nanosleep(&pause);
            continue;
        }
        let (verb, argument) = (state.load(own, VERB), state.load(own, ARGUMENT));
        let answer = perform(state, opened, verb, argument)?;
        state.store(own, ANSWER, answer);
        state.store(own, ANSWERED, asked);
    }
}

fn perform(
    state: &State,
    opened: &RefCell<Vec<OwnedFd>>,
    verb: u64,
    argument: u64,
) -> Result<u64, Failure> {
    Ok(match verb {
        OPEN => {
            let file = open("/dev/full", OFlags::RDONLY, Mode::empty())?;
            let number = u64::from(file.as_raw_fd().cast_unsigned());
            opened.borrow_mut().push(file);
            number
        }
        CLOSE => {
            opened.borrow_mut().clear();
            0
        }
        HAS => {
            let link = read_link(format!("/proc/self/fd/{argument}"));
            u64::from(link.is_ok_and(|target| target == Path::new("/dev/full")))
        }
        GO => {
            chdir(state.folder.join(place(argument as usize)))?;
            0
        }
        WHERE => {
            let own = std::env::current_dir()?;
            let name = own.file_name().and_then(|name| name.to_str());
            let number = name.and_then(|name| name.strip_prefix("place-")?.parse().ok());
            number.unwrap_or(u64::MAX)
        }
        SET_MASK => {
            umask(Mode::from_bits_truncate(argument as u32));
            0
        }
        MASK => {
            let status = read_to_string("/proc/self/status")?;
            let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
            u64::from_str_radix(mask.ok_or("no umask")?.trim(), 8)?
        }
        UNSHARE => {
            unshare(ALL)?;
            0
        }
        other => return Err(format!("what is {other}?").into()),
    })
}

/// Checks who sees what each of them does.
fn check(
    state: &State,
    classes: &[Vec<usize>; 4],
    has_io: bool,
    ask: &impl Fn(usize, u64, u64) -> Result<u64, Failure>,
) -> Result<(), Failure> {
    let count = classes[0].len();
    let wrong = |what: &str, task: usize, other: usize, seen: bool| -> Result<(), Failure> {
        let seen = if seen { "is" } else { "is not" };
        Err(format!("what process {task} {what} {seen} seen by {other}").into())
    };
    for task in 0..count {
        let number = ask(task, OPEN, 0)?;
        for other in 0..count {
            let seen = ask(other, HAS, number)? == 1;
            if seen != (classes[0][task] == classes[0][other]) {
                return wrong("opens", task, other, seen);
            }
        }
        ask(task, CLOSE, 0)?;
        // Where nobody else is, and a umask that nobody else has.
        let mask = 0o700 + task as u64;
        for other in 0..count {
            ask(other, GO, other as u64)?;
            ask(other, SET_MASK, 0o22)?;
        }
        ask(task, GO, task as u64)?;
        ask(task, SET_MASK, mask)?;
        for other in 0..count {
            let is_to = classes[1][task] == classes[1][other];
            let seen = ask(other, WHERE, 0)? == task as u64;
            if seen != is_to {
                return wrong("goes to", task, other, seen);
            }
            let seen = ask(other, MASK, 0)? == mask;
            if seen != is_to {
                return wrong("masks", task, other, seen);
            }
        }
    }
    for ((_, kind), classes) in KINDS.iter().zip(classes) {
        for task in 0..count {
            for other in 0..count {
                let process = |task| Process::new((state.load(task, PID) as u32).cast_signed());
                let equal = kcmp::compare(&process(task), &process(other), *kind)?.is_eq();
                let is_to = classes[task] == classes[other];
                // Those who have none are all equal.
                let told_apart = match kind {
                    Shared::SemaphoreUndo => false,
                    Shared::Io => has_io,
                    _ => true,
                };
                if is_to && !equal || equal && !is_to && told_apart {
                    return Err(format!("{kind:?} of {task} and {other}: equal {equal}").into());
                }
            }
        }
    }
    Ok(())
}
