//! A ring in an image.

use std::fmt;

use prost::Message;

use super::advance::Counters;
use super::request::{Request, entry, operation};
use super::seen::{Seen, flag};

/// A ring, and its requests that wait.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Flags of io_uring_setup(2).
    #[prost(uint32, tag = "1")]
    pub(super) flags: u32,
    /// How many entries each queue has.
    #[prost(uint32, tag = "2")]
    pub(super) sq_entries: u32,
    /// See `sq_entries`.
    #[prost(uint32, tag = "3")]
    pub(super) cq_entries: u32,
    /// How many entries the kernel has taken.
    #[prost(uint32, tag = "4")]
    pub(super) sq_head: u32,
    /// How many completions it has posted.
    #[prost(uint32, tag = "5")]
    pub(super) cq_tail: u32,
    /// How many of them the program has seen.
    #[prost(uint32, tag = "6")]
    pub(super) cq_head: u32,
    /// Whether there were entries that asked for no completion.
    #[prost(bool, tag = "7")]
    pub(super) has_skipped: bool,
    /// The thread that alone may use it, if there is such a one.
    #[prost(int32, optional, tag = "8")]
    pub(super) submitter: Option<i32>,
    /// Where things are in its memory: `sq_off` and `cq_off` of `struct io_uring_params`.
    #[prost(uint32, repeated, tag = "9")]
    pub(super) places: Vec<u32>,
    /// The sizes of its memory in pages: queues and entries.
    #[prost(uint32, repeated, tag = "10")]
    pub(super) pages: Vec<u32>,
    /// The space that has its memory, the queues before the entries.
    #[prost(uint32, tag = "11")]
    pub(super) space: u32,
    /// The registered files.
    #[prost(message, repeated, tag = "12")]
    pub(super) files: Vec<FileSlot>,
    /// Which slots are given to files that choose none, from and to, unless all are.
    #[prost(uint32, repeated, tag = "13")]
    pub(super) slots: Vec<u32>,
    /// The registered buffers.
    #[prost(message, repeated, tag = "14")]
    pub(super) buffers: Vec<BufferSlot>,
    /// The eventfd that is told of completions: its description.
    #[prost(uint32, optional, tag = "15")]
    pub(super) eventfd: Option<u32>,
    /// Whether it is told only of those that others than the submitter post.
    #[prost(bool, tag = "16")]
    pub(super) eventfd_async: bool,
    /// How many workers there may be, bounded and unbounded; none for the kernel's own limits.
    #[prost(uint32, repeated, tag = "17")]
    pub(super) worker_limits: Vec<u32>,
    /// Threads and the numbers under which they have registered the ring, in turn.
    #[prost(uint32, repeated, tag = "18")]
    pub(super) numbers: Vec<u32>,
    /// Access mode and status flags of the description.
    #[prost(uint32, tag = "19")]
    pub(super) status: u32,
    /// The requests that wait; a timeout of another one follows on that.
    #[prost(message, repeated, tag = "20")]
    pub(super) requests: Vec<Request>,
}

/// A place for a registered file.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct FileSlot {
    /// Its description, if it is not empty.
    #[prost(uint32, optional, tag = "1")]
    pub file: Option<u32>,
    /// Its tag.
    #[prost(uint64, tag = "2")]
    pub tag: u64,
}

/// A place for a registered buffer.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct BufferSlot {
    /// Where it is; 0 for an empty place.
    #[prost(uint64, tag = "1")]
    pub address: u64,
    /// How long it is, in bytes.
    #[prost(uint64, tag = "2")]
    pub len_bytes: u64,
    /// Its tag.
    #[prost(uint64, tag = "3")]
    pub tag: u64,
}

impl BufferSlot {
    fn is_sound(&self) -> bool {
        let end = self.address.checked_add(self.len_bytes);
        self.address == 0 || end.is_some_and(|end| end < 1 << 56)
    }
}

impl Record {
    /// Tells whether a request that takes something from its file has ended since, or may have had
    /// a completion.
    pub(super) fn has_taken(&self, now: &Seen) -> bool {
        let then = self.requests.iter().filter(|request| request.takes());
        let now_waiting = now.waiting.iter().map(|waiting| &waiting.request);
        let is_one_less = now_waiting.filter(|one| one.takes()).count() != then.count();
        let goes_on = self.requests.iter().any(Request::accepts_more);
        is_one_less || goes_on && now.cq_tail != self.cq_tail
    }

    /// What no ring has, if the record claims such a thing.
    pub(super) fn nonsense(&self) -> Option<String> {
        const MOST_ENTRIES: u32 = 32768;
        const MOST_SLOTS: usize = 1 << 20;
        const MOST_PAGES: u32 = 1 << 14;
        let is_size = |size: u32, most| size.is_power_of_two() && size <= most;
        let sizes = is_size(self.sq_entries, MOST_ENTRIES)
            && is_size(self.cq_entries, 2 * MOST_ENTRIES)
            && self.sq_entries <= self.cq_entries;
        let is_single = self.flags & flag::SINGLE_ISSUER != 0 && self.is_enabled();
        let checks = [
            (!sizes, "sizes of its queues that no ring has"),
            (self.flags & !flag::KEPT != 0, "unknown flags"),
            (
                self.counters().hindrance().is_some(),
                "counters that no ring comes to",
            ),
            (
                !self.is_enabled() && (self.sq_head != 0 || !self.requests.is_empty()),
                "counters of a ring that has not begun",
            ),
            (
                is_single != self.submitter.is_some(),
                "a submitter too many or too few",
            ),
            (self.places.len() != 20, "no places"),
            (self.pages.len() != 2, "no sizes"),
            (
                self.pages
                    .iter()
                    .any(|pages| *pages == 0 || *pages > MOST_PAGES),
                "sizes",
            ),
            (
                self.files.len().max(self.buffers.len()) > MOST_SLOTS,
                "too many slots",
            ),
            (!matches!(self.slots[..], [] | [_, _]), "a range of slots"),
            (
                !matches!(self.worker_limits[..], [] | [_, _]),
                "limits of workers",
            ),
            (!self.numbers.len().is_multiple_of(2), "numbers of threads"),
            (
                !self.buffers.iter().all(BufferSlot::is_sound),
                "a buffer beyond all addresses",
            ),
        ];
        let requests = self.requests.iter().find_map(Request::nonsense);
        if let Some(what) = requests.or_else(|| self.odd_links()) {
            return Some(format!("has a request with {what}: {self:?}"));
        }
        let wrong = checks.into_iter().find(|(is_wrong, _)| *is_wrong);
        wrong.map(|(_, what)| format!("has {what}: {self:?}"))
    }

    /// What is linked to a request and cannot be, if anything is.
    fn odd_links(&self) -> Option<&'static str> {
        let mut before: Option<&Request> = None;
        for request in &self.requests {
            let is_limit = request.opcode == operation::LINK_TIMEOUT;
            let linked = before.filter(|before| before.flags & entry::LINK != 0);
            if linked.is_some() != is_limit
                || linked.is_some_and(|head| head.thread != request.thread || head.is_timed())
            {
                return Some("a link to another than its timeout");
            }
            before = Some(request);
        }
        let is_open = before.is_some_and(|last| last.flags & entry::LINK != 0);
        is_open.then_some("a link to nothing")
    }

    /// Whether it has begun.
    pub(super) fn is_enabled(&self) -> bool {
        self.flags & flag::R_DISABLED == 0
    }

    /// Whether only one of the tree's threads can have it begin.
    pub(super) fn starts_late(&self) -> bool {
        self.submitter.is_some()
    }

    /// Start and length of the range of slots, if it is not all of them.
    pub(super) fn slots(&self) -> Option<(u32, u32)> {
        match self.slots[..] {
            [start, end] => Some((start, end.saturating_sub(start))),
            _ => None,
        }
    }

    /// The sizes of its memory in bytes: queues and entries.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [0, 1].map(|at| self.pages[at] as usize * abi::PAGE_BYTES as usize)
    }

    pub(super) fn counters(&self) -> Counters {
        Counters {
            flags: self.flags,
            sq_entries: self.sq_entries,
            cq_entries: self.cq_entries,
            sq_head: self.sq_head,
            cq_tail: self.cq_tail,
            cq_head: self.cq_head,
            has_skipped: self.has_skipped,
            waiting: self.requests.len() as u32,
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (submission, completion) = (self.sq_entries, self.cq_entries);
        let unread = self.cq_tail.wrapping_sub(self.cq_head);
        write!(
            f,
            "entries={submission}/{completion} taken={}",
            self.sq_head
        )?;
        write!(
            f,
            " posted={} unread={unread} flags={:#x}",
            self.cq_tail, self.flags
        )?;
        for (count, what) in [
            (self.files.len(), "files"),
            (self.buffers.len(), "buffers"),
            (self.requests.len(), "waiting"),
        ] {
            if count > 0 {
                write!(f, " {what}={count}")?;
            }
        }
        match self.submitter {
            Some(tid) => write!(f, " submitter={tid}"),
            None => Ok(()),
        }
    }
}
