//! Requests that wait are submitted again, by the threads that made them.
//!
//! Each takes an entry that the ring has taken already: its counters stand before these until then.
//! What the program has in the places of these entries is put aside for that moment. A request
//! whose file has become ready since the dump completes at once, as it would have.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::io::Errno;
use sys::ring::Places;
use syscalls::Sysno;

use super::memory::Memory;
use super::record::Record;
use super::request::{Request, entry};
use super::seen::flag;
use crate::callers::Callers;
use crate::fd::DescriptionId;
use crate::{Error, Result};

/// Submits the requests of a ring whose counters stand before them.
pub(super) fn resubmit(
    record: &Record,
    (id, own): (DescriptionId, BorrowedFd<'_>),
    callers: &mut dyn Callers,
) -> Result<()> {
    if record.requests.is_empty() {
        return Ok(());
    }
    let places = record.places.as_slice().try_into();
    let ring = Resubmission {
        record,
        id,
        places: Places(places.expect("checked when read")),
        memory: Memory::map(&own, record)?,
    };
    let (queues, entries) = (&ring.memory.queues, &ring.memory.entries);
    let array = ring.array();
    let (sq_tail, words, bytes) = (ring.sq_tail(), array.clone(), entries.copy());
    let tail = queues.word(sq_tail).load(Acquire);
    let words = words.map(|at| queues.word(at).load(Relaxed));
    let words = words.collect::<Vec<_>>();
    let mut at = record.counters().worked();
    let is_whole = |one: &Request, _: &Request| one.flags & entry::LINK != 0;
    for requests in record.requests.chunk_by(is_whole) {
        ring.submit(requests, at, callers)?;
        at = at.wrapping_add(requests.len() as u32);
    }
    entries.fill(&bytes);
    for (at, word) in array.zip(words) {
        queues.word(at).store(word, Relaxed);
    }
    queues.word(sq_tail).store(tail, Release);
    ring.check()
}

/// A ring that is made again.
struct Resubmission<'a> {
    record: &'a Record,
    id: DescriptionId,
    places: Places,
    memory: Memory,
}

impl Resubmission<'_> {
    fn sq_tail(&self) -> usize {
        self.places.sq_tail()
    }

    /// Where the indices of entries are.
    fn array(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let count = match self.record.flags & flag::NO_SQARRAY {
            0 => self.record.sq_entries as usize,
            _ => 0,
        };
        let start = self.places.array();
        (0..count).map(move |index| start + 4 * index)
    }

    /// Submits requests that are linked, or a single one, as the entries from number `at` on.
    fn submit(&self, requests: &[Request], at: u32, callers: &mut dyn Callers) -> Result<()> {
        let (Memory { queues, entries }, mask) = (&self.memory, self.record.sq_entries - 1);
        let thread = requests[0].thread;
        let number = |callers: &dyn Callers, id| {
            let missing = || Error::corrupt("io_uring", format!("thread {thread} lacks {id:?}"));
            callers.number(thread, id).ok_or_else(missing)
        };
        let entry_words = match self.record.flags & flag::SQE128 {
            0 => 16,
            _ => 32,
        };
        let mut time = [0; 16];
        for (request, at) in requests.iter().zip(at..) {
            let file = request.file.map(|id| number(callers, DescriptionId(id)));
            let words = request.entry(file.transpose()?.unwrap_or(-1), callers.scratch().0);
            if request.is_timed() {
                const BILLION: u64 = 1_000_000_000;
                let ns = request.time_ns();
                time[..8].copy_from_slice(&(ns / BILLION).to_ne_bytes());
                time[8..].copy_from_slice(&(ns % BILLION).to_ne_bytes());
            }
            let slot = (at & mask) as usize;
            let words = words.into_iter().chain([0; 16]).take(entry_words);
            for (index, word) in words.enumerate() {
                let place = entries.word(4 * (entry_words * slot + index));
                place.store(word, Relaxed);
            }
            if let Some(place) = self.array().nth(slot) {
                queues.word(place).store(slot as u32, Relaxed);
            }
        }
        let count = requests.len() as u32;
        let tail = at.wrapping_add(count);
        queues.word(self.sq_tail()).store(tail, Release);
        let fd = u64::from(number(callers, self.id)?.cast_unsigned());
        let args = [fd, count.into(), 0, 0, 0, 0].map(Some);
        let result = callers.call(thread, Sysno::io_uring_enter, args, &time)?;
        match result == i64::from(count) {
            true => Ok(()),
            false => {
                let what = format!("{result} of {count} requests of thread {thread} were taken");
                Err(failed(what))
            }
        }
    }

    /// Refuses completions of requests that the kernel does not take as it took them once.
    fn check(&self) -> Result<()> {
        const REFUSED: [Errno; 5] = [
            Errno::INVAL,
            Errno::BADF,
            Errno::PERM,
            Errno::OPNOTSUPP,
            Errno::NOSYS,
        ];
        const CQES: usize = 15;
        let queues = &self.memory.queues;
        let bytes = match self.record.flags & flag::CQE32 {
            0 => 16,
            _ => 32,
        };
        let mut at = self.record.cq_tail;
        while at != queues.word(self.places.cq_tail()).load(Acquire) {
            let index = (at & (self.record.cq_entries - 1)) as usize;
            let place = self.places.0[CQES] as usize + bytes * index + 8;
            let result = queues.word(place).load(Relaxed).cast_signed();
            if REFUSED.iter().any(|errno| errno.raw_os_error() == -result) {
                return Err(failed(format!("a request ended with {result}")));
            }
            at = at.wrapping_add(1);
        }
        Ok(())
    }
}

fn failed(what: String) -> Error {
    let doing = "submit requests to an io_uring again";
    Error::kernel(doing, std::io::Error::other(what))
}
