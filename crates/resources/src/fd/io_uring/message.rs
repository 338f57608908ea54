//! Messages from a ring of our own: completions in another one that no entry of its has.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use sys::ring::{self, Part, Ring, RingMemory};

use crate::{Error, Result};

/// How many messages are sent at once.
pub(super) const MOST: u32 = 16;

/// A ring that sends.
pub(super) struct Sender {
    ring: Ring,
    queues: RingMemory,
    entries: RingMemory,
}

impl Sender {
    /// Makes one.
    pub fn new() -> Result<Self> {
        let failed = |error| Error::kernel("make an io_uring that sends", error);
        let ring = ring::setup(MOST, 2 * MOST, 0).map_err(failed)?;
        let map = |part| {
            RingMemory::map(ring.own.as_fd(), part, abi::PAGE_BYTES as usize).map_err(failed)
        };
        Ok(Self {
            queues: map(Part::Queues)?,
            entries: map(Part::Entries)?,
            ring,
        })
    }

    /// Sends as many messages to a ring, [`MOST`] at the most.
    pub fn send(&self, to: BorrowedFd<'_>, count: u32) -> Result<()> {
        use std::os::fd::AsRawFd;
        const MSG_RING: u32 = 40;
        const SKIP_SUCCESS: u32 = 1 << 6;
        const ENTRY_BYTES: usize = 64;
        let (queues, places) = (&self.queues, &self.ring.places);
        let tail = queues.word(places.sq_tail());
        for _ in 0..count {
            let slot = tail.load(Ordering::Acquire) & (MOST - 1);
            let at = slot as usize * ENTRY_BYTES;
            let words = [MSG_RING | SKIP_SUCCESS << 8, to.as_raw_fd().cast_unsigned()];
            for (index, word) in words.into_iter().enumerate() {
                let place = self.entries.word(at + 4 * index);
                place.store(word, Ordering::Relaxed);
            }
            let index = queues.word(places.array() + 4 * slot as usize);
            index.store(slot, Ordering::Relaxed);
            tail.fetch_add(1, Ordering::Release);
        }
        let failed = |error| Error::kernel("send messages to an io_uring", error);
        let sent = ring::submit(self.ring.own.as_fd(), count).map_err(failed)?;
        // Only one that fails has a completion here.
        let came = queues.word(places.cq_tail()).load(Ordering::Acquire);
        match (sent, came) {
            (sent, 0) if sent == count => Ok(()),
            _ => {
                let what = format!("{sent} of {count} were sent, and {came} failed");
                Err(failed(std::io::Error::other(what)))
            }
        }
    }
}
