//! The memory of a ring in this process.

use std::os::fd::AsFd;

use sys::ring::{Part, Places, RingMemory};

use super::advance::Submit;
use super::record::Record;
use crate::{Error, Result};

pub(super) const PAGE_BYTES: usize = abi::PAGE_BYTES as usize;

/// The memory of a ring that is made again.
pub(super) struct Memory {
    pub queues: RingMemory,
    pub entries: RingMemory,
}

impl Memory {
    pub fn map(own: &impl AsFd, record: &Record) -> Result<Self> {
        let [queues, entries] = record.sizes();
        let map = |part, bytes| {
            let mapped = RingMemory::map(own.as_fd(), part, bytes);
            mapped.map_err(|error| Error::kernel("map an io_uring", error))
        };
        Ok(Self {
            queues: map(Part::Queues, queues)?,
            entries: map(Part::Entries, entries)?,
        })
    }

    pub fn fill(&self, contents: &[u8]) {
        let (queues, entries) = contents.split_at(self.queues.bytes());
        self.queues.fill(queues);
        self.entries.fill(entries);
    }

    pub fn copy(&self) -> Vec<u8> {
        [self.queues.copy(), self.entries.copy()].concat()
    }

    pub fn reach(&self, record: &Record, places: &Places, by: &mut dyn Submit) -> Result<()> {
        let counters = record.counters();
        counters.reach(places, (&self.queues, &self.entries), by)
    }
}
