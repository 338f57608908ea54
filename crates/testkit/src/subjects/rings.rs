//! A ring of io_uring(7) with all that can stand in it while no request is under way. Argument:
//! `plain`, `single` (one thread alone may submit), `bare` (without an array of indices) or `wide`
//! (large entries).
//!
//! `check` uses it and answers "right", or what is wrong; `wake` has a thread see a completion that
//! has waited for one since the beginning, and answers how many it has seen. `open FILE` has a
//! worker of the kernel's open a file for reading, and `opened` waits for that and answers "right",
//! or what came of it.
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU32};
use std::thread;

use rustix::event::{EventfdFlags, eventfd};
use sys::ring::{self, Part, Places, RingMemory};

use super::{Control, Failure, not_understood};
use crate::wait::{SOON, wait_until};

const ENTRIES: u32 = 8;
const NOP: u8 = 0;
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const OPENAT: u8 = 18;
const FIXED_FILE: u8 = 1;
const ASYNC: u8 = 1 << 4;
const PAGE_BYTES: usize = 4096;
/// The slot of the file, and the number of the ring.
const SLOT: i32 = 2;
const NUMBER: u32 = 3;
/// Whose completions wait to be seen, and whose entries to be submitted.
const UNREAD: u64 = 70;
const PREPARED: u64 = 80;

/// What a program knows of a ring.
pub(super) struct Ring {
    pub own: OwnedFd,
    places: Places,
    queues: RingMemory,
    entries: RingMemory,
    entry_bytes: usize,
    has_array: bool,
}

/// An entry to submit.
#[derive(Clone, Copy, Default)]
pub(super) struct Entry {
    pub opcode: u8,
    pub flags: u8,
    /// Flags of an operation on a socket.
    pub options: u16,
    pub fd: i32,
    pub offset: u64,
    pub address: u64,
    pub len_bytes: u32,
    /// Events, or flags of the operation.
    pub operation_flags: u32,
    pub data: u64,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    pub data: u64,
    pub result: i32,
    pub flags: u32,
}

impl Ring {
    pub fn new(kind: &str) -> Result<Self, Failure> {
        let flags = match kind {
            "plain" => 0,
            "bare" => 1 << 16,
            // SQE128, CQE32
            "wide" => 1 << 10 | 1 << 11,
            // TASKRUN_FLAG, SINGLE_ISSUER, DEFER_TASKRUN
            "single" => 1 << 9 | 1 << 12 | 1 << 13,
            other => return Err(format!("{other:?} is no kind of ring").into()),
        };
        let made = ring::setup(ENTRIES, 2 * ENTRIES, flags)?;
        let own = made.own;
        let map = |part| RingMemory::map(own.as_fd(), part, PAGE_BYTES);
        Ok(Self {
            queues: map(Part::Queues)?,
            entries: map(Part::Entries)?,
            own,
            places: made.places,
            entry_bytes: if kind == "wide" { 128 } else { 64 },
            has_array: kind != "bare",
        })
    }

    pub fn prepare(&self, entry: Entry) {
        let tail = self.queues.word(self.places.sq_tail());
        let at = tail.load(Acquire) & (ENTRIES - 1);
        let place = at as usize * self.entry_bytes;
        let words = [
            u32::from(entry.opcode) | u32::from(entry.flags) << 8 | u32::from(entry.options) << 16,
            entry.fd.cast_unsigned(),
            entry.offset as u32,
            (entry.offset >> 32) as u32,
            entry.address as u32,
            (entry.address >> 32) as u32,
            entry.len_bytes,
            entry.operation_flags,
            entry.data as u32,
            (entry.data >> 32) as u32,
            0,
            0,
        ];
        for (index, word) in words.into_iter().enumerate() {
            self.entries.word(place + 4 * index).store(word, Relaxed);
        }
        if self.has_array {
            let index = self.places.array() + 4 * at as usize;
            self.queues.word(index).store(at, Relaxed);
        }
        tail.fetch_add(1, Release);
    }

    /// Sees a completion: whose it is, and its result.
    fn see(&self) -> Option<(u64, i32)> {
        let seen = self.take()?;
        Some((seen.data, seen.result))
    }

    /// Sees a completion.
    pub fn take(&self) -> Option<Completion> {
        let head = self.queues.word(self.places.cq_head());
        let at = head.load(Acquire);
        if at == self.queues.word(self.places.cq_tail()).load(Acquire) {
            return None;
        }
        let bytes = if self.entry_bytes == 128 { 32 } else { 16 };
        let index = (at & (2 * ENTRIES - 1)) as usize;
        let place = self.places.0[15] as usize + bytes * index;
        let word = |at: usize| self.queues.word(place + at).load(Acquire);
        let seen = Completion {
            data: u64::from(word(0)) | u64::from(word(4)) << 32,
            result: word(8).cast_signed(),
            flags: word(12),
        };
        head.store(at + 1, Release);
        Some(seen)
    }

    /// Has an entry done, and gives its result.
    fn make(&self, entry: Entry) -> Result<i32, Failure> {
        self.prepare(entry);
        ring::submit(self.own.as_fd(), 1)?;
        ring::wait(self.own.as_fd(), 1)?;
        match self.see() {
            Some((data, result)) if data == entry.data => Ok(result),
            other => Err(format!("{other:?} is not the completion of {}", entry.data).into()),
        }
    }
}

/// A ring and what is registered with it.
struct Subject {
    ring: Ring,
    file: File,
    buffer: Arc<[AtomicU8]>,
    told: OwnedFd,
    posted: u64,
    checked: u32,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let kind = arguments.first().map_or("plain", String::as_str);
    let mut subject = Subject::new(control.folder(), kind)?;
    // One that nobody uses, of many pages, most of them zeros.
    let large = ring::setup(4096, 8192, 0)?;
    let map = |part, pages| RingMemory::map(large.own.as_fd(), part, pages * PAGE_BYTES);
    let _large = (map(Part::Queues, 30)?, map(Part::Entries, 64)?);
    let waits = Arc::new(Ring::new("plain")?);
    let (opens, mut path) = (Ring::new("plain")?, CString::default());
    let seen = Arc::new(AtomicU32::new(0));
    let (theirs, count) = (waits.clone(), seen.clone());
    thread::Builder::new().name("waits".into()).spawn(move || {
        loop {
            ring::wait(theirs.own.as_fd(), 1).expect("it waits until there is one");
            if theirs.see().is_some() {
                count.fetch_add(1, Release);
            }
        }
    })?;
    control.serve(|question| match question.verb.as_str() {
        "check" => Ok(subject
            .check()
            .map_or_else(|error| error.to_string(), |()| "right".into())),
        "wake" => {
            let before = seen.load(Acquire);
            waits.prepare(Entry {
                data: 1,
                ..Entry::default()
            });
            ring::submit(waits.own.as_fd(), 1)?;
            wait_until("the thread to see it", SOON, || seen.load(Acquire) > before);
            Ok(seen.load(Acquire).to_string())
        }
        "open" => {
            path = CString::new(question.words.concat())?;
            opens.prepare(Entry {
                opcode: OPENAT,
                flags: ASYNC,
                fd: libc::AT_FDCWD,
                address: path.as_ptr() as u64,
                ..Entry::default()
            });
            ring::submit(opens.own.as_fd(), 1)?;
            Ok("begun".into())
        }
        "opened" => {
            ring::wait(opens.own.as_fd(), 1)?;
            let (_, fd) = opens.see().ok_or("nothing was completed")?;
            let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
            Ok(match link {
                Ok(link) if link.as_os_str().as_bytes() == path.as_bytes() => "right".into(),
                other => format!("descriptor {fd} leads to {other:?}"),
            })
        }
        _ => not_understood(question),
    })
}

impl Subject {
    fn new(folder: &std::path::Path, kind: &str) -> Result<Self, Failure> {
        let ring = Ring::new(kind)?;
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true);
        let file = file.open(folder.join("through-the-ring"))?;
        let buffer: Arc<[AtomicU8]> = (0..3 * PAGE_BYTES).map(|_| AtomicU8::new(0)).collect();
        let told = eventfd(0, EventfdFlags::NONBLOCK)?;
        let own = ring.own.as_fd();
        let files: [Option<BorrowedFd<'_>>; 4] =
            [None, Some(told.as_fd()), Some(file.as_fd()), None];
        ring::register_files(own, &files, &[0; 4])?;
        crate::calls::register_buffers(own, &[&buffer])?;
        ring::register_eventfd(own, &told, false)?;
        crate::calls::register_number(own, NUMBER)?;
        let mut subject = Self {
            ring,
            file,
            buffer,
            told,
            posted: 0,
            checked: 0,
        };
        for data in 0..1003 {
            subject.make(Entry {
                data,
                ..Entry::default()
            })?;
        }
        // A worker of the kernel's stays for a while.
        subject.pass(ASYNC)?;
        subject.leave()?;
        Ok(subject)
    }

    fn make(&mut self, entry: Entry) -> Result<i32, Failure> {
        self.posted += 1;
        self.ring.make(entry)
    }

    /// Writes the buffer to the file, and reads it again.
    fn pass(&mut self, flags: u8) -> Result<(), Failure> {
        let pattern = |at: usize, salt: u32| (at as u32 * 7 + salt) as u8;
        self.checked += 1;
        let (salt, len_bytes) = (self.checked, self.buffer.len() as u32);
        for (at, byte) in self.buffer.iter().enumerate() {
            byte.store(pattern(at, salt), Relaxed);
        }
        let entry = |opcode| Entry {
            opcode,
            flags: flags | FIXED_FILE,
            fd: SLOT,
            address: self.buffer.as_ptr() as u64,
            len_bytes,
            data: 1 << 40,
            ..Entry::default()
        };
        let (write, read) = (entry(WRITE_FIXED), entry(READ_FIXED));
        let wrote = self.make(write)?;
        let mut text = vec![0; self.buffer.len()];
        self.file.read_exact_at(&mut text, 0)?;
        let right = |(at, byte): (usize, u8)| byte == pattern(at, salt);
        if wrote.cast_unsigned() != len_bytes || !text.into_iter().enumerate().all(right) {
            return Err(format!("the buffer was not written: {wrote}").into());
        }
        self.buffer.iter().for_each(|byte| byte.store(0, Relaxed));
        let got = self.make(read)?;
        let bytes = self
            .buffer
            .iter()
            .map(|byte| byte.load(Relaxed))
            .enumerate();
        if got.cast_unsigned() != len_bytes || !bytes.into_iter().all(right) {
            return Err(format!("the buffer was not read: {got}").into());
        }
        Ok(())
    }

    /// Leaves completions unseen and entries unsubmitted.
    fn leave(&mut self) -> Result<(), Failure> {
        for number in 0..2 {
            self.ring.prepare(Entry {
                data: UNREAD + number,
                ..Entry::default()
            });
        }
        ring::submit(self.ring.own.as_fd(), 2)?;
        for number in 0..3 {
            self.ring.prepare(Entry {
                opcode: NOP,
                data: PREPARED + number,
                ..Entry::default()
            });
        }
        self.posted += 2;
        Ok(())
    }

    fn check(&mut self) -> Result<(), Failure> {
        let expect = |ring: &Ring, data| match ring.see() {
            Some((seen, 0)) if seen == data => Ok(()),
            other => Err(format!("{other:?} was seen, not {data}")),
        };
        for number in 0..2 {
            expect(&self.ring, UNREAD + number)?;
        }
        if crate::calls::submit_by_number(NUMBER, 8)? != 3 {
            return Err("not all that was prepared was submitted".into());
        }
        for number in 0..3 {
            expect(&self.ring, PREPARED + number)?;
        }
        self.posted += 3;
        self.pass(0)?;
        self.pass(ASYNC)?;
        let mut count = [0; 8];
        rustix::io::read(&self.told, &mut count)?;
        let count = u64::from_ne_bytes(count);
        // Several completions at once count as one, and one may count once more where the submitter
        // has to be told that there is something for it to do.
        if count == 0 || count > 2 * self.posted {
            return Err(format!("{count} completions were told of, of {}", self.posted).into());
        }
        self.posted = 0;
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.ring.own.as_raw_fd()))?;
        if link.as_os_str() != "anon_inode:[io_uring]" {
            return Err(format!("it is {}", link.display()).into());
        }
        self.leave()
    }
}
