//! Contexts of asynchronous I/O in states made at random. Arguments: the seed, and what is besides:
//! nothing, `poll` (a request that waits for a pipe), `disk` (reads with direct I/O, one after the
//! other), `unmapped` (a part of a ring), `forked` (a child has the rings).
//!
//! `check` fetches all events, answers "right", or what is wrong, and leaves other states; `wake`
//! has a thread that has waited since the beginning fetch an event, and answers how many it has
//! fetched; `one` posts an event of which another thread wants three at once, and `threes` answers
//! how many it has had; `write` makes the pipe readable; `reads` tells how many pages were read.
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32};
use std::thread;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};
use crate::calls::aio::{Context, Event, Operation, Request};
use crate::chance::Chance;
use crate::wait::{SOON, wait_until};

const PAGE_BYTES: usize = 4096;
const FILE_PAGES: u64 = 64;
const CONTEXTS: usize = 4;

/// A context, and the events that are to be fetched from it.
struct ContextState {
    context: Context,
    expected: VecDeque<(u64, i64)>,
}

struct Subject {
    chance: Chance,
    file: File,
    told: OwnedFd,
    memory: &'static [AtomicU8],
    all: Vec<ContextState>,
    next: u64,
    tells: u64,
}

/// Memory for ever, on pages of its own.
fn memory(pages: usize) -> &'static [AtomicU8] {
    let bytes = (0..(pages + 1) * PAGE_BYTES).map(|_| AtomicU8::new(0));
    let bytes: &'static [AtomicU8] = Box::leak(bytes.collect());
    let start = bytes.as_ptr().align_offset(PAGE_BYTES);
    &bytes[start..start + pages * PAGE_BYTES]
}

/// What a byte of the file is.
fn pattern(at: u64) -> u8 {
    (at / PAGE_BYTES as u64 * 31 + at % 251) as u8
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let seed = arguments.first().map_or(Ok(0), |seed| seed.parse())?;
    let path = control.folder().join("through-requests");
    let bytes = (0..FILE_PAGES * PAGE_BYTES as u64).map(pattern);
    std::fs::write(&path, bytes.collect::<Vec<_>>())?;
    let mut subject = Subject {
        chance: Chance::with(seed),
        file: File::open(&path)?,
        told: eventfd(0, EventfdFlags::NONBLOCK)?,
        memory: memory(1),
        all: Vec::new(),
        next: 0,
        tells: 0,
    };
    subject.change()?;
    let reads = Arc::new(AtomicU32::new(0));
    let (readable, mut writes) = std::io::pipe()?;
    let hinders = arguments.get(1).map_or("", String::as_str);
    hinder(hinders, &path, (&readable, &reads))?;
    let (fetched, waiting) = wait_for_events(1)?;
    let (threes, several) = wait_for_events(3)?;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let checked = subject.check().and_then(|()| subject.change());
            Ok(checked.map_or_else(|error| error.to_string(), |()| "right".into()))
        }
        "one" => {
            several.submit(&mut [subject.read_all()])?;
            Ok(threes.load(Acquire).to_string())
        }
        "threes" => Ok(threes.load(Acquire).to_string()),
        "wake" => {
            let before = fetched.load(Acquire);
            waiting.submit(&mut [subject.read_all()])?;
            wait_until("the thread to fetch it", SOON, || {
                fetched.load(Acquire) > before
            });
            Ok(fetched.load(Acquire).to_string())
        }
        "write" => {
            writes.write_all(b"x")?;
            Ok("written".into())
        }
        "reads" => Ok(reads.load(Acquire).to_string()),
        _ => not_understood(question),
    })
}

/// Has a thread wait for as many events of a context that has none, again and again.
fn wait_for_events(least: usize) -> Result<(Arc<AtomicU32>, Context), Failure> {
    let fetched = Arc::new(AtomicU32::new(0));
    let (context, count) = (Context::new(3)?, fetched.clone());
    thread::Builder::new().name("waits".into()).spawn(move || {
        loop {
            let events = context.fetch(least, least, None);
            let events = events.expect("it waits until they are there");
            assert_eq!(events.len(), least, "no fewer than it waits for");
            count.fetch_add(events.len() as u32, Release);
        }
    })?;
    Ok((fetched, context))
}

/// Does with one more context what a dump has to wait for, or refuses.
fn hinder(
    how: &str,
    path: &Path,
    (readable, reads): (&std::io::PipeReader, &Arc<AtomicU32>),
) -> Result<(), Failure> {
    if how.is_empty() {
        return Ok(());
    }
    let context = Context::new(64)?;
    match how {
        "poll" => {
            context.submit(&mut [Request::poll(readable, 5)])?;
        }
        "unmapped" => {
            let large = Context::new(1000)?;
            large.unmap(PAGE_BYTES)?;
        }
        "forked" => {
            if fork()? == Fork::Child {
                loop {
                    thread::park();
                }
            }
        }
        "disk" => {
            let direct = OFlags::DIRECT.bits().cast_signed();
            let file = File::options().read(true).custom_flags(direct).open(path)?;
            let count = reads.clone();
            thread::spawn(move || read_ever(context, &file, &count));
        }
        other => return Err(format!("{other:?} hinders nothing").into()),
    }
    Ok(())
}

/// Reads pages with direct I/O, many at a time, into memory that must have them afterwards.
fn read_ever(context: Context, file: &File, count: &AtomicU32) {
    const DEPTH: usize = 32;
    let memory = memory(DEPTH);
    let mut chance = Chance::with(3);
    let mut begin = |slot: usize| {
        let page = chance.below(FILE_PAGES);
        let own = &memory[slot * PAGE_BYTES..(slot + 1) * PAGE_BYTES];
        own.iter().for_each(|byte| byte.store(0xff, Relaxed));
        let data = page << 16 | slot as u64;
        let request = Request::new(Operation::Read, file, own, page * PAGE_BYTES as u64, data);
        context.submit(&mut [request]).expect("there is room");
    };
    (0..DEPTH).for_each(&mut begin);
    loop {
        for event in context.fetch(1, DEPTH, None).expect("events") {
            let (page, slot) = (event.data >> 16, (event.data & 0xffff) as usize);
            assert_eq!(event.result, PAGE_BYTES as i64, "of page {page}");
            let own = &memory[slot * PAGE_BYTES..(slot + 1) * PAGE_BYTES];
            for (at, byte) in (page * PAGE_BYTES as u64..).zip(own) {
                assert_eq!(byte.load(Relaxed), pattern(at), "at {at} of page {page}");
            }
            count.fetch_add(1, Release);
            begin(slot);
        }
    }
}

impl Subject {
    /// A request that ends at once.
    fn read_all(&self) -> Request {
        Request::new(Operation::Read, &self.file, self.memory, 0, 1)
    }

    /// Brings the contexts into other states.
    fn change(&mut self) -> Result<(), Failure> {
        if self.all.len() == CONTEXTS {
            let at = self.chance.below(CONTEXTS as u64) as usize;
            self.all.swap_remove(at).context.end()?;
        }
        while self.all.len() < CONTEXTS {
            let requests = self.chance.pick(&[1, 8, 100, 500, 1300]);
            self.all.push(ContextState {
                context: Context::new(requests)?,
                expected: VecDeque::new(),
            });
        }
        for at in 0..CONTEXTS {
            let room = u64::from(self.all[at].context.words()[1].load(Relaxed));
            let posted = match self.chance.below(4) {
                0 => 0,
                1 => room - 1 + self.chance.below(3),
                _ => self.chance.below(3 * room),
            };
            for _ in 0..posted {
                self.post(at)?;
            }
            // None of them, some, or as many as there is room for stay.
            let left = self.all[at].expected.len() as u64;
            let fetched = match self.chance.below(4) {
                0 => left,
                1 => 0,
                _ => self.chance.below(left + 1),
            };
            (0..fetched).try_for_each(|_| self.fetch(at))?;
        }
        Ok(())
    }

    /// Has a read posted; where there is no room, an event is fetched before.
    fn post(&mut self, at: usize) -> Result<(), Failure> {
        self.next += 1;
        let len_bytes = self.chance.below(PAGE_BYTES as u64 + 1) as usize;
        let offset = self.chance.below((FILE_PAGES - 1) * PAGE_BYTES as u64);
        let memory = &self.memory[..len_bytes];
        let mut request = Request::new(Operation::Read, &self.file, memory, offset, self.next);
        if self.chance.once_in(5) {
            request = request.telling(&self.told);
            self.tells += 1;
        }
        let room = self.all[at].context.words()[1].load(Relaxed) as usize;
        while self.all[at].context.submit(&mut [request]).is_err() {
            if self.all[at].expected.len() < room / 2 {
                let count = self.all[at].expected.len();
                return Err(format!("no room is left beside {count} events of {room}").into());
            }
            self.fetch(at)?;
        }
        let own = &mut self.all[at];
        own.expected.push_back((self.next, len_bytes as i64));
        match own.expected.len() < room {
            true => Ok(()),
            false => Err(format!("{} events are in a ring of {room}", own.expected.len()).into()),
        }
    }

    /// Fetches an event, which must be the next one.
    fn fetch(&mut self, at: usize) -> Result<(), Failure> {
        let by_itself = self.chance.once_in(2);
        let own = &mut self.all[at];
        let event: Option<Event> = match by_itself {
            true => own.context.take(),
            false => own.context.fetch(1, 1, Some(SOON))?.first().copied(),
        };
        let event = event.map(|event| (event.data, event.result, event.result2));
        let expected = own.expected.pop_front();
        let expected = expected.map(|(data, result)| (data, result, 0));
        match event == expected {
            true => Ok(()),
            false => Err(format!("context {at} has {event:?}, not {expected:?}").into()),
        }
    }

    fn check(&mut self) -> Result<(), Failure> {
        for at in 0..CONTEXTS {
            // With what is there, its room is used up, and the ring wraps.
            let room = u64::from(self.all[at].context.words()[1].load(Relaxed));
            for _ in 0..self.chance.below(2 * room) {
                self.post(at)?;
            }
            while !self.all[at].expected.is_empty() {
                self.fetch(at)?;
            }
            let more = self.all[at].context.take();
            if more.is_some() {
                return Err(format!("context {at} has {more:?} as well").into());
            }
        }
        let mut count = [0; 8];
        let told = match rustix::io::read(&self.told, &mut count) {
            Err(_) => 0,
            Ok(_) => u64::from_ne_bytes(count),
        };
        match std::mem::take(&mut self.tells) {
            tells if tells == told => Ok(()),
            tells => Err(format!("{told} were told of, not {tells}").into()),
        }
    }
}
