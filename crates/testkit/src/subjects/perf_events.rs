//! A process of two threads and a child of it, with performance events: of page faults of each of
//! them, one that does not count, a group, one that signals, a breakpoint, and one of a processor.
//!
//! `check` has all of them touch new pages and answers "right" if the events have counted those;
//! `counts` tells what the events have counted, by the process, its thread and its child.
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::gettid;
use sys::fcntl::{Owner, set_owner, set_signal};
use sys::fork::{Fork, fork};
use sys::perf_event::{self, Watched};

use super::{Control, Failure, not_understood};
use crate::calls::{Mapping, count_signal, counted};

const PAGE_FAULTS: u64 = 2;
const CONTEXT_SWITCHES: u64 = 3;
const MINOR_FAULTS: u64 = 5;
const PAGES: usize = 200;
/// How many pages of programs may come in besides.
const OTHER_PAGES: u64 = 100;
/// How many page faults lie between two signals.
const PERIOD: u64 = 50;
/// How many signals there may be: more than any test has.
const SIGNALS: u32 = 1 << 20;
/// `SIGRTMIN`, as the C library counts.
const SIGNAL: i32 = 36;
const F_OWNER_PID: i32 = 1;

/// Touches as many new pages as it is told, until nobody tells any more.
fn touch_when_told(mut told: PipeReader, mut says: PipeWriter) -> Result<(), Failure> {
    loop {
        told.read_exact(&mut [0])?;
        touch()?;
        says.write_all(b"x")?;
    }
}

fn touch() -> Result<(), Failure> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let memory = Mapping::anonymous(4096 * PAGES, both, MapFlags::PRIVATE)?;
    (0..PAGES).for_each(|page| memory.store(4096 * page, 1));
    Ok(())
}

/// Somebody else who touches pages.
struct Toucher {
    tells: PipeWriter,
    answers: PipeReader,
    /// Counts its page faults.
    faults: OwnedFd,
}

impl Toucher {
    fn touch(&mut self) -> Result<(), Failure> {
        self.tells.write_all(b"x")?;
        Ok(self.answers.read_exact(&mut [0])?)
    }
}

fn opened(number: u64, tid: i32, leader: Option<&OwnedFd>) -> Result<OwnedFd, Failure> {
    let watched = Watched { tid, cpu: -1 };
    let attr = perf_event::software(number);
    let leader = leader.map(|leader| leader.as_fd());
    Ok(perf_event::open(&attr, watched, leader)?)
}

fn counting(number: u64, tid: i32) -> Result<OwnedFd, Failure> {
    let event = opened(number, tid, None)?;
    perf_event::enable(&event)?;
    Ok(event)
}

fn count(event: &OwnedFd) -> Result<u64, Failure> {
    let mut word = [0; 8];
    match rustix::io::read(event, &mut word)? {
        8 => Ok(u64::from_ne_bytes(word)),
        bytes => Err(format!("{bytes} bytes were read of an event").into()),
    }
}

struct Events {
    own: OwnedFd,
    still: OwnedFd,
    leader: OwnedFd,
    member: OwnedFd,
    signals: OwnedFd,
    breakpoint: OwnedFd,
    processor: OwnedFd,
    thread: Toucher,
    child: Toucher,
    watched: Mapping,
}

/// Has page faults signal.
fn signalling(tid: i32) -> Result<OwnedFd, Failure> {
    let mut attr = perf_event::software(PAGE_FAULTS);
    attr[16..24].copy_from_slice(&PERIOD.to_ne_bytes());
    let watched = Watched { tid, cpu: -1 };
    let event = perf_event::open(&attr, watched, None)?;
    count_signal(SIGNAL, 0)?;
    let (kind, pid) = (F_OWNER_PID, tid);
    set_owner(event.as_fd(), Owner { kind, pid })?;
    set_signal(event.as_fd(), SIGNAL)?;
    let flags = OFlags::from_bits_retain(0o20_000) | OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(&event, flags)?;
    perf_event::refresh(&event, SIGNALS)?;
    Ok(event)
}

/// Counts what is written to the first word of some memory, but nothing of the kernel's.
fn breakpoint(watched: &Mapping, tid: i32) -> Result<OwnedFd, Failure> {
    const BREAKPOINT: u32 = 5;
    const WRITES: u32 = 2;
    const USERS_ALONE: u64 = 1 << 5 | 1 << 6;
    let mut attr = perf_event::software(0);
    attr[0..4].copy_from_slice(&BREAKPOINT.to_ne_bytes());
    let flags = perf_event::DISABLED | USERS_ALONE;
    attr[40..48].copy_from_slice(&flags.to_ne_bytes());
    attr[52..56].copy_from_slice(&WRITES.to_ne_bytes());
    attr[56..64].copy_from_slice(&watched.address().to_ne_bytes());
    attr[64..72].copy_from_slice(&8_u64.to_ne_bytes());
    let event = perf_event::open(&attr, Watched { tid, cpu: -1 }, None)?;
    perf_event::enable(&event)?;
    Ok(event)
}

impl Events {
    fn open() -> Result<Self, Failure> {
        let tid = gettid().as_raw_nonzero().get();
        let pipes = || Ok::<_, Failure>((pipe()?, pipe()?));
        let ((told, tells), (answers, says)) = pipes()?;
        let child = match fork()? {
            Fork::Child => {
                touch_when_told(told, says)?;
                std::process::exit(1);
            }
            Fork::Parent(child) => child.as_raw_nonzero().get(),
        };
        let child = Toucher {
            tells,
            answers,
            faults: counting(PAGE_FAULTS, child)?,
        };
        let ((told, tells), (answers, mut says)) = pipes()?;
        std::thread::spawn(move || {
            let tid = gettid().as_raw_nonzero().get();
            let begun = says.write_all(&tid.to_ne_bytes());
            begun.expect("it is read");
            touch_when_told(told, says).map_err(|error| error.to_string())
        });
        let (mut answers, mut thread) = (answers, [0; 4]);
        answers.read_exact(&mut thread)?;
        let thread = Toucher {
            tells,
            answers,
            faults: counting(PAGE_FAULTS, i32::from_ne_bytes(thread))?,
        };
        let leader = counting(PAGE_FAULTS, tid)?;
        let member = opened(MINOR_FAULTS, tid, Some(&leader))?;
        perf_event::enable(&member)?;
        let processor = Watched { tid: -1, cpu: 0 };
        let processor = perf_event::open(&perf_event::software(CONTEXT_SWITCHES), processor, None)?;
        perf_event::enable(&processor)?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let watched = Mapping::anonymous(4096, both, MapFlags::PRIVATE)?;
        Ok(Self {
            own: counting(PAGE_FAULTS, tid)?,
            still: opened(PAGE_FAULTS, tid, None)?,
            signals: signalling(tid)?,
            breakpoint: breakpoint(&watched, tid)?,
            leader,
            member,
            processor,
            thread,
            child,
            watched,
        })
    }

    /// What all of them have counted: pages that were touched, none, writes, anything.
    fn all(&self) -> Result<[u64; 9], Failure> {
        Ok([
            count(&self.own)?,
            count(&self.thread.faults)?,
            count(&self.child.faults)?,
            count(&self.leader)?,
            count(&self.member)?,
            count(&self.signals)?,
            count(&self.still)?,
            count(&self.breakpoint)?,
            count(&self.processor)?,
        ])
    }

    fn check(&mut self) -> Result<(), Failure> {
        let (before, signals) = (self.all()?, counted(SIGNAL).count);
        touch()?;
        self.watched.store(0, 7);
        self.thread.touch()?;
        self.child.touch()?;
        let after = self.all()?;
        let grown = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| after[at].wrapping_sub(before[at]));
        let pages = PAGES as u64;
        let is_right = |grown: &u64| (pages..=pages + OTHER_PAGES).contains(grown);
        if !grown[..6].iter().all(is_right) || grown[6..] != [0, 1] || after[8] < before[8] {
            return Err(format!("{before:?} became {after:?}").into());
        }
        match counted(SIGNAL).count - signals {
            0 => Err("nobody was signalled".into()),
            _ => Ok(()),
        }
    }
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let mut events = Events::open()?;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let checked = events.check();
            Ok(checked.map_or_else(|error| error.to_string(), |()| "right".to_owned()))
        }
        "counts" => {
            let [own, thread, child, ..] = events.all()?;
            Ok(format!("{own} {thread} {child}"))
        }
        _ => not_understood(question),
    })
}
