//! Rings of io_uring(7): descriptor and memory at once.
//!
//! A ring is saved with all that stands in its memory: completions that nobody has seen yet,
//! entries that are not submitted. Requests that wait for a file or a time have done nothing yet
//! ([`pending`] reads them in the kernel); others are waited for ([`seen`] says how that is known).
//! A new ring is brought to the same counters ([`advance`]) and gets the same memory. Its mappings
//! are made by the tasks, at their addresses, and the threads that made requests submit them again
//! ([`resubmit`]).
//!
//! - Kept: both queues with their counters, unread completions and entries that are not submitted;
//!   requests that wait: polls, also repeated ones, accepts, also repeated ones, receives
//!   (also of messages), reads, timeouts with the time that remains, alone or of another request;
//!   registered files, buffers, eventfd and numbers; limits of workers; who alone may submit. Needs
//!   bpf(2) and the kernel's description of its types (Linux 6.15).
//! - Refused: "a request is under way that may never end: …" (of another operation, with others
//!   linked to it, a timeout that repeats, one that has begun); "a request is under way for a file
//!   that is open nowhere else"; "a request is under way for a file that its process has closed";
//!   "a request is under way for a file that has become non-blocking"; "a request is under way that
//!   reads from a TCP socket (not a receive)"; "a request is under way whose message header has
//!   changed since"; "a request is under way for buffers of a group that
//!   is gone"; "a thread with a request under way has no descriptor of it"; "what it polls time and
//!   again is ready", for all of `--timeout` (read it); "… requests are under way", for all of
//!   `--timeout`; "its completion queue has overflowed", for all of `--timeout`; "the kernel polls
//!   it for entries (IORING_SETUP_SQPOLL)"; "it is in the program's own memory
//!   (IORING_SETUP_NO_MMAP)"; "it has restrictions"; "it has registered personalities"; "it has
//!   groups of provided buffers"; "its file … (…) is open nowhere else"; "its eventfd is open
//!   nowhere"; "its buffer at … is not the memory that is there now" (it was unmapped since); "the
//!   thread that alone may use it has ended"; "the thread that alone may use it has no descriptor
//!   of it"; "the thread that alone may use it has no descriptor of its eventfd"; "a thread that
//!   has no descriptor of it has a number for it"; "no task has a descriptor of it"; "several
//!   processes have it, and the memory of one is registered with it"; "its state cannot be looked
//!   up in the kernel (…)".
//! - At a restore: "this kernel arranges the memory of io_uring in another way".
//! - CRIU 4.2: refused.

mod advance;
mod header;
mod mapping;
mod memory;
mod message;
mod pending;
mod pinned;
mod record;
mod request;
mod resubmit;
mod seen;
mod start;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use abi::Span;
use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, OFlags, memfd_create};
use sys::ring::{self, Part, Ring, RingMemory};
use syscalls::Sysno;

use self::advance::Submit;
use self::header::Header;
pub use self::mapping::map;
use self::memory::{Memory, PAGE_BYTES};
use self::message::Sender;
use self::pending::PendingRequest;
pub use self::record::Record;
use self::record::{BufferSlot, FileSlot};
use self::request::{Request, entry, operation};
use self::seen::{Hindrance, Seen, Submitter, flag};
use super::eventfd::Eventfd;
use super::{DescriptionId, DumpContext, Kind, Open, RestoreContext, Stage, ready, status, tags};
use crate::callers::Callers;
use crate::kernel::Kernel;
use crate::script::{Script, Width};
use crate::{Allow, Error, Result};

/// What the kernel calls one, also where it is mapped.
pub const LINK: &[u8] = b"anon_inode:[io_uring]";

/// See the file.
pub struct IoUring;

fn kernel_for(open: &Open<'_>) -> Result<&'static Kernel> {
    let refused = |why: &str| {
        let why = format!("its state cannot be looked up in the kernel ({why})");
        open.unsupported(&why, None)
    };
    Kernel::get().map_err(refused)
}

/// What a member that the kernel lacks, or memory that is not there, makes of a dump.
fn unclear(open: &Open<'_>, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::Unsupported => {
            let why = format!("its state cannot be looked up in the kernel ({error})");
            open.unsupported(&why, None)
        }
        _ => Error::kernel(format!("look {} up in the kernel", open.place()), error),
    }
}

impl Kind for IoUring {
    type Record = Record;
    const TAG: u16 = tags::IO_URING;
    const NAME: &'static str = "io_uring";
    const STAYS: bool = true;
    const LINK: Option<&'static [u8]> = Some(LINK);
    const LOOKED_UP: bool = true;
    const WORKS: bool = true;

    fn is_busy(open: &Open<'_>) -> bool {
        let (Ok(kernel), Ok(own)) = (Kernel::get(), open.own()) else {
            return false;
        };
        matches!(seen::look(kernel, own), Ok(Err(Hindrance::Passing(_))))
    }

    /// A device is done with a request sooner or later, but the thread that submitted it posts its
    /// completion, on its way out of a system call.
    fn settle(fd: i32, script: &mut Script) {
        const GETEVENTS: u32 = 1;
        let args = [fd.into(), 0u32.into(), 0u32.into(), GETEVENTS.into()];
        script.attempt(Sysno::io_uring_enter, args);
    }

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let kernel = kernel_for(open)?;
        let own = open.own()?;
        let looked = seen::look(kernel, own).map_err(|error| unclear(open, error))?;
        let seen = match looked {
            Ok(seen) => seen,
            Err(Hindrance::Lasting(why)) => return Err(open.unsupported(&why, None)),
            Err(Hindrance::Passing(why)) => return Err(passing(open, &why)),
        };
        check_threads(open, &seen, cx)?;
        let known = Known::of(kernel, &seen, cx)?;
        let mut record = Record {
            files: known.files(open, &seen)?,
            eventfd: known.eventfd(open, &seen, cx)?,
            requests: known.requests(open, &seen, cx)?,
            status: open.info.flags,
            ..Record::of(&seen)
        };
        let failed = |error| Error::kernel(format!("map {}", open.place()), error);
        let places = ring::setup(
            seen.sq_entries,
            seen.cq_entries,
            seen.flags | flag::R_DISABLED,
        );
        let places = places.map_err(failed)?.places;
        let [queues, entries] = seen.pages.map(|pages| pages * PAGE_BYTES);
        let queues = RingMemory::map(own, Part::Queues, queues).map_err(failed)?;
        let entries = RingMemory::map(own, Part::Entries, entries).map_err(failed)?;
        record.places = places.0.to_vec();
        let head = queues.word(places.cq_head());
        record.cq_head = head.load(std::sync::atomic::Ordering::Acquire);
        let lost = pinned::find_lost(kernel, &open.process, &queues, &seen);
        if let Some(address) = lost.map_err(|error| unclear(open, error))? {
            let why = format!("its buffer at {address:#x} is not the memory that is there now");
            return Err(open.unsupported(&why, None));
        }
        if let Some(why) = record.counters().hindrance() {
            return Err(open.unsupported(why, None));
        }
        let contents = [queues.copy(), entries.copy()].concat();
        let made = memfd_create("contents", MemfdFlags::CLOEXEC);
        let file = File::from(made.map_err(|error| failed(error.into()))?);
        file.write_all_at(&contents, 0).map_err(failed)?;
        record.space = cx.store(file.into(), contents.len() as u64)?;
        Ok(record)
    }

    /// A request that ends because a task made a call takes what its file has, or brings a
    /// descriptor. A timeout or a poll that ends takes nothing.
    fn check_last(open: &Open<'_>, record: &Record) -> Result<()> {
        match seen::look(kernel_for(open)?, open.own()?) {
            Ok(Err(Hindrance::Passing(why))) => Err(passing(open, &why)),
            Ok(Ok(seen)) if record.has_taken(&seen) => {
                Err(passing(open, "a request has just ended"))
            }
            Ok(_) => Ok(()),
            Err(error) => Err(unclear(open, error)),
        }
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.status)?;
        match record.nonsense() {
            Some(what) => Err(Error::corrupt(Self::NAME, what)),
            None => Ok(()),
        }
    }

    fn describe(record: &Record) -> String {
        record.to_string()
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let failed = |doing: &str, error: std::io::Error| Error::kernel(doing.to_owned(), error);
        let status = status::opening(record.status);
        let mut flags = record.flags;
        if record.starts_late() {
            flags |= flag::R_DISABLED;
        }
        let made = ring::setup(record.sq_entries, record.cq_entries, flags);
        let Ring { own, places } = made.map_err(|error| failed("make an io_uring", error))?;
        if places.0[..] != record.places {
            let what = "this kernel arranges the memory of io_uring in another way".to_owned();
            return Err(Error::Mismatch { what });
        }
        let made = memfd_create("contents", MemfdFlags::CLOEXEC);
        let file = made.map_err(|error| failed("make a memfd", error.into()))?;
        let [queues_bytes, entries_bytes] = record.sizes();
        // Pages of zeros are not among those that come.
        let sized = rustix::fs::ftruncate(&file, (queues_bytes + entries_bytes) as u64);
        sized.map_err(|error| failed("make a memfd larger", error.into()))?;
        cx.load(record.space, file.as_fd())?;
        let mut contents = vec![0; queues_bytes + entries_bytes];
        let read = File::from(file).read_exact_at(&mut contents, 0);
        read.map_err(|error| failed("read the contents of an io_uring", error))?;
        let memory = Memory::map(&own, record)?;
        if record.is_enabled() && !record.starts_late() {
            let (own, sender) = (own.as_fd(), None);
            let mut itself = Itself { own, sender };
            memory.reach(record, &places, &mut itself)?;
        }
        memory.fill(&contents);
        status::set(&own, status)?;
        Ok(own)
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        let failed = |what: &str, error| Error::kernel(format!("{what} an io_uring"), error);
        if !record.files.is_empty() {
            let open = |slot: &FileSlot| match slot.file {
                Some(id) => cx.description(DescriptionId(id)).map(Some),
                None => Ok(None),
            };
            let files = record.files.iter().map(open).collect::<Result<Vec<_>>>()?;
            let tags = record.files.iter().map(|slot| slot.tag).collect::<Vec<_>>();
            let registered = ring::register_files(own, &files, &tags);
            registered.map_err(|error| failed("register files with", error))?;
            if let Some((start, len)) = record.slots() {
                let set = ring::set_slots(own, start, len);
                set.map_err(|error| failed("choose the slots of", error))?;
            }
        }
        if let [bounded, unbounded] = record.worker_limits[..] {
            let limited = ring::limit_workers(own, [bounded, unbounded]);
            limited.map_err(|error| failed("limit the workers of", error))?;
        }
        if let Some(eventfd) = record.eventfd.filter(|_| !record.starts_late()) {
            let eventfd = cx.description(DescriptionId(eventfd))?;
            let registered = ring::register_eventfd(own, eventfd, record.eventfd_async);
            registered.map_err(|error| failed("register an eventfd with", error))?;
        }
        Ok(())
    }

    fn stages(record: &Record, _allow: &Allow) -> &'static [Stage] {
        let waits = !record.requests.is_empty();
        match record.starts_late() || !record.numbers.is_empty() || waits {
            true => &[Stage::Call],
            false => &[],
        }
    }

    fn call(
        record: &Record,
        at: (DescriptionId, BorrowedFd<'_>),
        callers: &mut dyn Callers,
    ) -> Result<()> {
        start::start(record, at, callers)
    }

    fn pins_memory(record: &Record) -> bool {
        !record.buffers.is_empty() || !record.requests.is_empty()
    }

    fn check_memory(record: &Record, at: (i32, i32), written: &[Span]) -> Result<()> {
        pinned::check(record, at, written)
    }

    fn in_task(record: &Record, fd: i32, script: &mut Script) {
        if record.buffers.is_empty() {
            return;
        }
        let words = |words: Vec<u64>| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        let iovecs = record
            .buffers
            .iter()
            .flat_map(|slot| [slot.address, slot.len_bytes]);
        let iovecs = script.bytes(&words(iovecs.collect()));
        let tags = script.bytes(&words(record.buffers.iter().map(|slot| slot.tag).collect()));
        // `struct io_uring_rsrc_register`.
        let argument = [record.buffers.len() as u64, 0, 0, 0];
        let argument = script.bytes(&words(argument.to_vec()));
        script.fix(argument, 16, iovecs, Width::Eight);
        script.fix(argument, 24, tags, Width::Eight);
        let args = [
            fd.into(),
            ring::register::BUFFERS2.into(),
            argument.into(),
            32u32.into(),
        ];
        script.call(Sysno::io_uring_register, args);
        script.note(format!("{} buffers of fd {fd}", record.buffers.len()));
    }
}

/// This process submits.
struct Itself<'a> {
    own: BorrowedFd<'a>,
    sender: Option<Sender>,
}

impl Submit for Itself<'_> {
    fn submit(&mut self, count: u32) -> Result<u32> {
        let done = ring::submit(self.own, count);
        done.map_err(|error| Error::kernel("submit to an io_uring", error))
    }

    fn send(&mut self, count: u32) -> Result<()> {
        let sender = match self.sender.take() {
            Some(sender) => sender,
            None => Sender::new()?,
        };
        self.sender.insert(sender).send(self.own, count)
    }

    fn receive(&mut self) -> Result<()> {
        let done = ring::reap(self.own);
        done.map_err(|error| Error::kernel("receive messages of an io_uring", error))
    }
}

/// Whether it is a socket of TCP, which cannot be read before it runs again.
fn is_tcp(open: &Open<'_>) -> Result<bool> {
    use rustix::net::{ipproto, sockopt};
    let protocol = sockopt::socket_protocol(open.own()?);
    Ok(matches!(protocol, Ok(Some(ipproto::TCP | ipproto::MPTCP))))
}

/// A state that cannot be saved, and that passes.
fn passing(open: &Open<'_>, why: &str) -> Error {
    Error::Passing {
        pid: open.process.pid(),
        what: format!("{}: {why}", open.place()),
        allow: None,
        early: true,
        by_tree: false,
    }
}

/// Refuses what no thread or more than one process would have to do.
fn check_threads(open: &Open<'_>, seen: &Seen, cx: &dyn DumpContext) -> Result<()> {
    let refuse = |why: &str| Err(open.unsupported(why, None));
    let mut holders = cx
        .numbers(open.id)
        .iter()
        .map(|at| at.0)
        .collect::<Vec<_>>();
    holders.dedup();
    let is_holders = |tid: i32| cx.process(tid).is_some_and(|pid| holders.contains(&pid));
    match seen.submitter {
        _ if open.fd < 0 || open.in_flight => refuse("no task has a descriptor of it"),
        _ if holders.len() > 1 && !seen.buffers.is_empty() => {
            refuse("several processes have it, and the memory of one is registered with it")
        }
        Submitter::Gone => refuse("the thread that alone may use it has ended"),
        Submitter::Thread(tid) if !is_holders(tid) => {
            refuse("the thread that alone may use it has no descriptor of it")
        }
        submitter => {
            let may = |tid: i32| match submitter {
                Submitter::Thread(own) => tid == own,
                _ => is_holders(tid),
            };
            match seen.numbers.iter().all(|(tid, _)| may(*tid)) {
                true => Ok(()),
                false => refuse("a thread that has no descriptor of it has a number for it"),
            }
        }
    }
}

/// The descriptions of a tree by the kernel's addresses of them.
#[derive(Default)]
struct Known {
    files: HashMap<u64, DescriptionId>,
    eventfds: HashMap<u64, DescriptionId>,
}

impl Known {
    /// Looks up those that a ring may refer to.
    fn of(kernel: &Kernel, seen: &Seen, cx: &dyn DumpContext) -> Result<Self> {
        let mut known = Self::default();
        let has_files = seen.files.iter().flatten().next().is_some() || !seen.waiting.is_empty();
        for open in cx.all().iter() {
            let is_eventfd = seen.eventfd.is_some() && Eventfd::claims(open);
            if !has_files && !is_eventfd || open.fd < 0 && !open.in_flight {
                continue;
            }
            let look = || {
                let file = kernel.file(open.own().map_err(std::io::Error::other)?)?;
                Ok((file, kernel.private(file)?))
            };
            let (file, private) = look().map_err(|error| unclear(open, error))?;
            known.files.insert(file, open.id);
            if is_eventfd {
                known.eventfds.insert(private, open.id);
            }
        }
        Ok(known)
    }

    fn files(&self, open: &Open<'_>, seen: &Seen) -> Result<Vec<FileSlot>> {
        let slot = |(at, slot): (usize, &Option<seen::Registered<u64>>)| {
            let Some(slot) = slot else {
                return Ok(FileSlot::default());
            };
            let Some(file) = self.files.get(&slot.what) else {
                let line = format!("{at:5}");
                let path = open.info.field(&line).unwrap_or("unknown");
                let why = format!("its file {at} ({path}) is open nowhere else");
                return Err(open.unsupported(&why, None));
            };
            Ok(FileSlot {
                file: Some(file.0),
                tag: slot.tag,
            })
        };
        seen.files.iter().enumerate().map(slot).collect()
    }

    /// The requests that wait, whose threads can submit them again.
    fn requests(&self, open: &Open<'_>, seen: &Seen, cx: &dyn DumpContext) -> Result<Vec<Request>> {
        let waiting = seen.waiting.iter();
        let all = waiting.map(|waiting| self.request(open, waiting, cx));
        all.collect()
    }

    fn request(
        &self,
        open: &Open<'_>,
        waiting: &PendingRequest,
        cx: &dyn DumpContext,
    ) -> Result<Request> {
        let refuse = |why: &str| Err(open.unsupported(why, None));
        let mut request = waiting.request.clone();
        let owner = cx.process(request.thread);
        let has = |id| cx.numbers(id).iter().any(|at| Some(at.0) == owner);
        if !has(open.id) {
            return refuse("a thread with a request under way has no descriptor of it");
        }
        if request.is_timed() {
            return Ok(request);
        }
        let Some(id) = self.files.get(&waiting.file) else {
            return refuse("a request is under way for a file that is open nowhere else");
        };
        let file = &cx.all()[id.0 as usize];
        if request.flags & entry::FIXED_FILE == 0 {
            request.file = Some(id.0);
            if !has(*id) {
                return refuse("a request is under way for a file that its process has closed");
            }
        }
        if request.flags & entry::BUFFER_SELECT != 0 {
            return refuse("a request is under way for buffers of a group that is gone");
        }
        if request.reads() && is_tcp(file)? {
            return refuse("a request is under way that reads from a TCP socket (not a receive)");
        }
        if request.reads() && file.info.flags & OFlags::NONBLOCK.bits() != 0 {
            return refuse("a request is under way for a file that has become non-blocking");
        }
        if request.opcode == operation::RECVMSG {
            let process = cx.processes().into_iter();
            let mut process = process.filter(|one| Some(one.pid()) == owner);
            let process = process.next().unwrap_or_else(|| open.process.clone());
            let now = Header::of_program(&process, request.address).ok().flatten();
            if now.is_none() || now != waiting.header {
                return refuse("a request is under way whose message header has changed since");
            }
        }
        if request.is_repeated_poll() {
            let events = PollFlags::from_bits_retain(request.operation_flags as u16);
            let ready = ready::events(file.own()?, events);
            let failed =
                |errno: rustix::io::Errno| Error::kernel(format!("poll {}", file.place()), errno);
            if !ready.map_err(failed)?.is_empty() {
                // Another poll would tell once more what was told already.
                return Err(open.passing("what it polls time and again is ready", None));
            }
        }
        Ok(request)
    }

    fn eventfd(&self, open: &Open<'_>, seen: &Seen, cx: &dyn DumpContext) -> Result<Option<u32>> {
        let Some((counter, _)) = seen.eventfd else {
            return Ok(None);
        };
        let Some(id) = self.eventfds.get(&counter) else {
            return Err(open.unsupported("its eventfd is open nowhere", None));
        };
        let is_theirs = || cx.numbers(*id).iter().any(|at| at.0 == open.process.pid());
        if seen.submitter != Submitter::Any && !is_theirs() {
            let why = "the thread that alone may use it has no descriptor of its eventfd";
            return Err(open.unsupported(why, None));
        }
        Ok(Some(id.0))
    }
}

impl Record {
    /// What does not depend on other descriptions.
    fn of(seen: &Seen) -> Self {
        let buffer = |slot: &Option<seen::Registered<seen::Buffer>>| {
            slot.as_ref()
                .map_or_else(BufferSlot::default, |slot| BufferSlot {
                    address: slot.what.address,
                    len_bytes: slot.what.len_bytes.into(),
                    tag: slot.tag,
                })
        };
        Self {
            flags: seen.flags,
            sq_entries: seen.sq_entries,
            cq_entries: seen.cq_entries,
            sq_head: seen.sq_head,
            cq_tail: seen.cq_tail,
            has_skipped: seen.has_skipped,
            submitter: match seen.submitter {
                Submitter::Thread(tid) => Some(tid),
                _ => None,
            },
            pages: seen.pages.map(|pages| pages as u32).to_vec(),
            slots: match seen.slots {
                (start, end) if (start, end) == (0, seen.files.len() as u32) => Vec::new(),
                (start, end) => vec![start, end],
            },
            buffers: seen.buffers.iter().map(buffer).collect(),
            eventfd_async: seen.eventfd.is_some_and(|(_, is_async)| is_async),
            worker_limits: seen.worker_limits.map_or_else(Vec::new, Vec::from),
            numbers: seen
                .numbers
                .iter()
                .flat_map(|(tid, number)| [tid.cast_unsigned(), *number])
                .collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    macro_rules! skip {
        () => {
            testkit::skip!("no io_uring is allowed, or nobody may look into the kernel")
        };
    }

    use std::sync::atomic::Ordering::{Acquire, Release};

    use rustix::event::EventfdFlags;
    use rustix::io::Errno;
    use sys::ring::Places;

    use super::super::testing::World;
    use super::*;

    const NOP: u8 = 0;
    const POLL_ADD: u8 = 6;
    const TIMEOUT: u8 = 11;
    const SKIP_SUCCESS: u8 = 1 << 6;

    /// A ring of the test's own, with what a program knows of it.
    struct Own {
        own: OwnedFd,
        places: Places,
        queues: RingMemory,
        entries: RingMemory,
        entry_bytes: usize,
        mask: u32,
        has_array: bool,
    }

    /// A ring, unless the system allows none or lets nobody look into the kernel.
    fn ring(entries: u32, flags: u32) -> Option<Own> {
        let missing = Kernel::get().map(drop).err().map(str::to_owned);
        let made = ring::setup(entries, 2 * entries, flags).map_err(|error| error.to_string());
        let made = missing.map_or(made, Err);
        let Ok(made) = made else { return None };
        Some(Own::of(made.own, made.places, entries, flags))
    }

    impl Own {
        fn of(own: OwnedFd, places: Places, entries: u32, flags: u32) -> Self {
            let (entry_bytes, has_array) = match flags {
                flags if flags & flag::SQE128 != 0 => (128, flags & flag::NO_SQARRAY == 0),
                flags => (64, flags & flag::NO_SQARRAY == 0),
            };
            let map = |part| RingMemory::map(own.as_fd(), part, PAGE_BYTES).expect("it is a ring");
            let (queues, sqes) = (map(Part::Queues), map(Part::Entries));
            let mask = entries - 1;
            Self {
                own,
                places,
                queues,
                entries: sqes,
                entry_bytes,
                mask,
                has_array,
            }
        }

        /// Prepares an entry that is not submitted yet.
        fn prepare(&self, opcode: u8, flags: u8, fd: i32, data: u32) {
            let tail = self.queues.word(self.places.sq_tail());
            let at = (tail.load(Acquire) & self.mask) as usize;
            let entry = at * self.entry_bytes;
            for byte in 0..64 {
                self.entries.byte(entry + byte).store(0, Release);
            }
            self.entries.byte(entry).store(opcode, Release);
            self.entries.byte(entry + 1).store(flags, Release);
            self.entries
                .word(entry + 4)
                .store(fd.cast_unsigned(), Release);
            self.entries.word(entry + 32).store(data, Release);
            if opcode == POLL_ADD {
                self.entries.word(entry + 28).store(1, Release);
            }
            if self.has_array {
                self.queues
                    .word(self.places.array() + 4 * at)
                    .store(at as u32, Release);
            }
            tail.fetch_add(1, Release);
        }

        fn submit(&self, count: u32) -> u32 {
            ring::submit(self.own.as_fd(), count).expect("it submits")
        }

        /// Sees a completion; what it says of whose it is.
        fn see(&self) -> Option<u32> {
            let (head, tail) = (self.places.cq_head(), self.places.cq_tail());
            let (head, tail) = (self.queues.word(head), self.queues.word(tail).load(Acquire));
            let at = head.load(Acquire);
            if at == tail {
                return None;
            }
            let wide = if self.entry_bytes == 128 { 32 } else { 16 };
            let entry = self.places.0[15] as usize + wide * (at & (2 * self.mask + 1)) as usize;
            head.store(at + 1, Release);
            Some(self.queues.word(entry).load(Acquire))
        }

        /// Makes a request of each number that does nothing, and sees its completion.
        fn work(&self, numbers: std::ops::Range<u32>) {
            for number in numbers {
                self.prepare(NOP, 0, 0, number);
                assert_eq!(self.submit(1), 1);
                assert_eq!(self.see(), Some(number));
            }
        }
    }

    /// Dumps and restores a ring, and gives what a program knows of it.
    fn cycle(own: Own, world: &mut World, flags: u32) -> Own {
        let (places, entries) = (own.places, own.mask + 1);
        status::set(&own.own, rustix::fs::OFlags::NONBLOCK).expect("a flag");
        let at = world.add(own.own);
        world.cycle();
        Own::of(world.take(at), places, entries, flags)
    }

    #[test]
    fn counters_completions_and_prepared_entries_survive() {
        let wide = flag::SQE128 | flag::CQE32;
        for flags in [
            0,
            flag::NO_SQARRAY,
            wide,
            wide | flag::NO_SQARRAY,
            flag::SUBMIT_ALL,
        ] {
            // Both sides of where a queue wraps.
            for before in [0, 3, 7, 8, 9, 15, 16, 17, 1000] {
                let Some(own) = ring(8, flags) else { skip!() };
                own.work(0..before);
                // Completions that nobody has seen, and entries that were not submitted.
                (1..8).for_each(|number| own.prepare(NOP, 0, 0, 5000 + number));
                assert_eq!(own.submit(4), 4);
                let own = cycle(own, &mut World::default(), flags);
                for number in 1..5 {
                    assert_eq!(own.see(), Some(5000 + number), "{flags:#x} after {before}");
                }
                assert_eq!(own.see(), None);
                assert_eq!(own.submit(8), 3);
                for number in 5..8 {
                    assert_eq!(own.see(), Some(5000 + number), "{flags:#x} after {before}");
                }
                own.work(6000..6040);
            }
        }
    }

    #[test]
    fn a_full_completion_queue_is_not_written_over() {
        for before in [0, 5, 16, 21] {
            let Some(own) = ring(8, 0) else { skip!() };
            own.work(0..before);
            for number in 0..16 {
                own.prepare(NOP, 0, 0, 100 + number);
                assert_eq!(own.submit(1), 1);
            }
            let own = cycle(own, &mut World::default(), 0);
            (0..10).for_each(|number| assert_eq!(own.see(), Some(100 + number)));
            for number in 16..26 {
                own.prepare(NOP, 0, 0, 100 + number);
                assert_eq!(own.submit(1), 1);
            }
            (10..26).for_each(|number| assert_eq!(own.see(), Some(100 + number)));
            assert_eq!(own.see(), None);
        }
    }

    #[test]
    fn entries_without_completions_are_counted() {
        let Some(own) = ring(8, 0) else { skip!() };
        own.work(0..11);
        for _ in 0..21 {
            own.prepare(NOP, SKIP_SUCCESS, 0, 0);
            assert_eq!(own.submit(1), 1);
        }
        let own = cycle(own, &mut World::default(), 0);
        own.work(0..40);
        // One that leads nowhere is dropped.
        let Some(own) = ring(8, 0) else { skip!() };
        own.work(0..3);
        for _ in 0..2 {
            own.prepare(NOP, 0, 0, 0);
            let at = (own.queues.word(own.places.sq_tail()).load(Acquire) - 1) & own.mask;
            let place = own.places.array() + 4 * at as usize;
            own.queues.word(place).store(77, Release);
            own.submit(1);
        }
        let own = cycle(own, &mut World::default(), 0);
        own.work(0..40);
    }

    #[test]
    fn one_that_has_not_begun_stays_so() {
        let Some(own) = ring(4, flag::R_DISABLED | flag::SINGLE_ISSUER) else {
            return;
        };
        let flags = flag::R_DISABLED | flag::SINGLE_ISSUER;
        let own = cycle(own, &mut World::default(), flags);
        let refused = ring::submit(own.own.as_fd(), 0).expect_err("it has not begun");
        assert_eq!(refused.raw_os_error(), Some(Errno::BADFD.raw_os_error()));
    }

    #[test]
    fn what_is_registered_stays_registered() {
        let Some(own) = ring(8, 0) else { skip!() };
        own.work(0..20);
        let mut world = World::default();
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let told = world.add(eventfd());
        let other = world.add(eventfd());
        let files = [None, Some(world.get(other).as_fd()), None];
        ring::register_files(own.own.as_fd(), &files, &[0, 7, 0]).expect("files");
        ring::set_slots(own.own.as_fd(), 1, 2).expect("slots");
        ring::register_eventfd(own.own.as_fd(), world.get(told), false).expect("an eventfd");
        ring::limit_workers(own.own.as_fd(), [3, 5]).expect("limits");
        let own = cycle(own, &mut world, 0);
        let count = |at| {
            let mut bytes = [0; 8];
            rustix::io::read(world.get(at), &mut bytes).map(|_| u64::from_ne_bytes(bytes))
        };
        assert_eq!(count(told), Err(Errno::AGAIN), "what we did is not counted");
        own.work(20..22);
        assert_eq!(count(told), Ok(2));
        // By its slot, it is the same counter.
        const FIXED_FILE: u8 = 1;
        rustix::io::write(world.get(other), &9u64.to_ne_bytes()).expect("a count");
        own.prepare(POLL_ADD, FIXED_FILE, 1, 99);
        assert_eq!(own.submit(1), 1);
        assert_eq!(own.see(), Some(99));
        ring::limit_workers(own.own.as_fd(), [0, 0]).expect("limits");
    }

    /// Dumps a ring with what was prepared, and gives the error.
    fn refusal(prepare: impl FnOnce(&Own)) -> Option<Error> {
        let own = ring(8, 0)?;
        prepare(&own);
        let mut world = World::default();
        world.add(own.own);
        Some(world.dump().expect_err("it is not saved"))
    }

    /// Writes a word of the entry that was prepared first.
    fn set(own: &Own, at: usize, word: u32) {
        own.entries.word(at).store(word, Release);
    }

    /// Has the first entry be one for a timeout of an hour.
    fn last_an_hour(own: &Own) {
        let hour = Box::leak(Box::new([3600_i64, 0]));
        let address = hour.as_ptr() as u64;
        for (at, word) in [(16, address as u32), (20, (address >> 32) as u32), (24, 1)] {
            set(own, at, word);
        }
    }

    #[test]
    fn request_that_nobody_can_make_again_is_refused_by_name() {
        let (quiet, _writer) = rustix::pipe::pipe().expect("a pipe");
        use std::os::fd::AsRawFd;
        let fd = quiet.as_raw_fd();
        let why = |prepare: &dyn Fn(&Own)| refusal(prepare).map(|error| error.to_string());
        let Some(closed) = why(&|own| {
            own.prepare(POLL_ADD, 0, fd, 1);
            own.submit(1);
        }) else {
            skip!()
        };
        assert!(closed.contains("open nowhere else"), "{closed}");
        let repeats = why(&|own| {
            own.prepare(TIMEOUT, 0, -1, 1);
            last_an_hour(own);
            set(own, 28, 1 << 6);
            own.submit(1);
        });
        let repeats = repeats.expect("there are rings");
        assert!(
            repeats.contains("never end: a timeout that repeats"),
            "{repeats}"
        );
        let linked = why(&|own| {
            own.prepare(POLL_ADD, 1 << 2, fd, 1);
            own.prepare(NOP, 0, 0, 2);
            own.submit(2);
        });
        let linked = linked.expect("there are rings");
        assert!(linked.contains("others are linked to"), "{linked}");
    }

    #[test]
    fn repeated_poll_of_a_ready_file_is_waited_for() {
        let Some(own) = ring(8, 0) else { skip!() };
        let mut world = World::default();
        let polled = rustix::event::eventfd(1, EventfdFlags::NONBLOCK).expect("an eventfd");
        let polled = world.add(polled);
        own.prepare(POLL_ADD, 0, world.number(polled), 1);
        set(&own, 24, 1);
        assert_eq!(own.submit(1), 1);
        assert_eq!(own.see(), Some(1));
        let at = world.add(own.own);
        let error = world.dump().expect_err("it was told of that");
        assert!(matches!(error, Error::Passing { .. }), "{error}");
        let mut bytes = [0; 8];
        rustix::io::read(world.get(polled), &mut bytes).expect("a count");
        world.dump().expect("it waits");
        assert!(world.describe(at).ends_with("waiting=1"));
    }

    #[test]
    fn requests_that_wait_are_described() {
        let Some(own) = ring(8, 0) else { skip!() };
        let mut world = World::default();
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let reader = world.add(reader);
        own.prepare(TIMEOUT, 0, -1, 9);
        last_an_hour(&own);
        own.prepare(POLL_ADD, SKIP_SUCCESS, world.number(reader), 7);
        assert_eq!(own.submit(2), 2);
        own.work(0..3);
        let at = world.add(own.own);
        // It goes on meanwhile, and nothing comes of that.
        for _ in 0..3 {
            world.dump().expect("they are known");
        }
        let record = world.description(at).record::<IoUring>().expect("a ring");
        let mut requests = record.requests.clone();
        requests.sort_by_key(|request| request.data);
        let [poll, timeout] = &requests[..] else {
            panic!("{requests:?}")
        };
        assert_eq!((poll.data, poll.file), (7, Some(0)));
        assert_eq!(
            (poll.flags, poll.operation_flags & 0xff),
            (SKIP_SUCCESS.into(), 1 | 8 | 16 | 32)
        );
        let remaining_s = timeout.remaining_ns / 1_000_000_000;
        assert!((3590..3600).contains(&remaining_s), "{timeout:?}");
        assert_eq!(record.counters().worked(), 3);
        IoUring::check(record).expect("it is sound");
    }

    #[test]
    fn a_read_that_ends_once_it_is_described_is_waited_for() {
        const READ: u8 = 22;
        for (opcode, is_taken) in [(READ, true), (POLL_ADD, false)] {
            let Some(own) = ring(8, 0) else { skip!() };
            let mut world = World::default();
            let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
            let (reader, writer) = (world.add(reader), world.add(writer));
            let buffer = Box::leak(Box::new(0_u64));
            own.prepare(opcode, 0, world.number(reader), 7);
            if opcode == READ {
                let address = std::ptr::from_mut(buffer) as u64;
                let words = [
                    u32::MAX,
                    u32::MAX,
                    address as u32,
                    (address >> 32) as u32,
                    8,
                ];
                for (word, at) in words.into_iter().zip((8..).step_by(4)) {
                    set(&own, at, word);
                }
            }
            assert_eq!(own.submit(1), 1);
            world.add(own.own);
            let end = rustix::io::dup(world.get(writer)).expect("a descriptor");
            let dumped = world.dump_while(&|| {
                rustix::io::write(&end, &[1]).expect("there is room");
            });
            match dumped {
                Err(Error::Passing { what, .. }) if is_taken => {
                    assert!(what.contains("a request has just ended"), "{what}");
                }
                Ok(()) if !is_taken => {}
                other => panic!("{opcode}: {other:?}"),
            }
        }
    }

    #[test]
    fn completions_without_entries_are_counted() {
        for flags in [0, flag::NO_SQARRAY] {
            for messages in [1, 16, 17, 300] {
                let Some(own) = ring(8, flags) else { skip!() };
                own.work(0..5);
                let sender = Sender::new().expect("a ring");
                for _ in 0..messages {
                    sender.send(own.own.as_fd(), 1).expect("a message");
                    assert_eq!(own.see(), Some(0));
                }
                sender.send(own.own.as_fd(), 3).expect("messages");
                let own = cycle(own, &mut World::default(), flags);
                (0..3).for_each(|_| assert_eq!(own.see(), Some(0)));
                assert_eq!(own.see(), None);
                own.work(6000..6040);
            }
        }
    }

    #[test]
    fn a_buffer_that_is_not_there_any_more_is_refused() {
        use std::sync::atomic::AtomicU8;
        let Some(own) = ring(8, 0) else { skip!() };
        // So large that it is a mapping of its own.
        let memory = || -> Box<[AtomicU8]> { (0..9 << 20).map(|_| AtomicU8::new(1)).collect() };
        let (kept, lost) = (memory(), memory());
        let odd = &kept[17..5 * PAGE_BYTES + 3];
        let address = lost.as_ptr() as u64;
        let buffers = [odd, &kept[..], &lost[..]];
        testkit::calls::register_buffers(own.own.as_fd(), &buffers).expect("buffers");
        let mut world = World::default();
        let at = world.add(own.own);
        world.dump().expect("they are all there");
        assert!(world.describe(at).ends_with("buffers=3"));
        drop(lost);
        let error = world.dump().expect_err("one is lost").to_string();
        let why = format!("its buffer at {address:#x} is not the memory that is there now");
        assert!(error.contains(&why), "{error}");
    }

    #[test]
    fn nonsense_is_refused() {
        let record = Record {
            sq_entries: 8,
            cq_entries: 16,
            places: vec![0; 20],
            pages: vec![1, 1],
            ..Record::default()
        };
        IoUring::check(&record).expect("it is sound");
        type Change = fn(&mut Record);
        let waiting = |request| Record {
            sq_head: 1,
            requests: vec![request],
            ..record.clone()
        };
        let timeout = Request {
            opcode: TIMEOUT.into(),
            ..Request::default()
        };
        IoUring::check(&waiting(timeout.clone())).expect("it is sound");
        for (at, request) in [
            Request::default(),
            Request {
                file: Some(1),
                ..timeout.clone()
            },
            Request {
                flags: entry::LINK,
                ..timeout.clone()
            },
            Request {
                opcode: 15,
                ..timeout.clone()
            },
            Request {
                operation_flags: 1 << 6,
                ..timeout
            },
        ]
        .into_iter()
        .enumerate()
        {
            let error = IoUring::check(&waiting(request)).expect_err("it makes no sense");
            assert!(matches!(error, Error::Corrupt { .. }), "{at}: {error}");
        }
        let changes: [Change; 13] = [
            |ring| ring.requests = vec![Request::default()],
            |ring| ring.sq_entries = 7,
            |ring| ring.sq_entries = 0,
            |ring| ring.cq_entries = 1 << 17,
            |ring| ring.cq_entries = 4,
            |ring| ring.flags = flag::SQPOLL,
            |ring| ring.flags = flag::SINGLE_ISSUER,
            |ring| ring.submitter = Some(1),
            |ring| ring.cq_tail = (1 << 31) + 1,
            |ring| ring.cq_head = 1,
            |ring| ring.pages = vec![1, 0],
            |ring| ring.places.truncate(19),
            |ring| (ring.flags, ring.sq_head) = (flag::R_DISABLED | flag::NO_SQARRAY, 1),
        ];
        for (at, change) in changes.into_iter().enumerate() {
            let mut record = record.clone();
            change(&mut record);
            let error = IoUring::check(&record).expect_err("it makes no sense");
            assert!(matches!(error, Error::Corrupt { .. }), "{at}: {error}");
        }
    }
}
