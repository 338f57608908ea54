//! What a dump did, as it stands in the image and is told to the caller.

use std::time::Duration;

use image::{PAGE_BYTES, Reader, Record};
use prost::Message;

use crate::records::tag;
use crate::{Error, Result};

/// A time in microseconds.
pub(crate) fn as_micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What made an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DumpKind {
    /// A round of a pre-dump: memory only.
    PreDump,
    /// A dump of a tree that was stopped meanwhile.
    #[default]
    Dump,
    /// A dump of a tree that ran meanwhile.
    Live,
}

/// What a dump or a round of a pre-dump did.
///
/// Each page with contents that was found is of one fate: stored, zero, as in the parent, shared,
/// equal or lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Statistics {
    /// What it was.
    pub kind: DumpKind,
    /// Tasks saved.
    pub tasks: u64,
    /// Threads saved, the leaders included; 0 in a pre-dump, which saves memory only.
    pub threads: u64,
    /// How long it took until all tasks were stopped.
    pub freezing_us: u64,
    /// How long the tree could not run, in all, the time to stop it included. In an image: until
    /// the image was about to be finished.
    pub frozen_us: u64,
    /// How long it took to find out what there is to save.
    pub collect_us: u64,
    /// How long it took to read and store memory.
    pub memory_us: u64,
    /// For how much of that each thread that did it was storing, on average; none where that was
    /// not measured.
    pub write_us: Option<u64>,
    /// How long it took to plan the restore before the image was finished; none of a pre-dump.
    pub plan_us: Option<u64>,
    /// Pages with contents that were found.
    pub scanned_pages: u64,
    /// Those stored in the image.
    pub stored_pages: u64,
    /// Those found to be zero, which are not stored.
    pub zero_pages: u64,
    /// Those that are as they were in the parent image.
    pub parent_pages: u64,
    /// Those that a task has in common with its parent task, stored once for both.
    pub shared_pages: u64,
    /// Those with the contents of other pages of the image, stored once for all.
    pub equal_pages: u64,
    /// Those that had vanished when they were to be read: the next round finds what became of them.
    pub lost_pages: u64,
}

impl Statistics {
    /// The size of the stored pages.
    #[must_use]
    pub const fn stored_bytes(&self) -> u64 {
        self.stored_pages.saturating_mul(PAGE_BYTES as u64)
    }

    /// Adds what went through the pipe.
    pub(crate) fn count(&mut self, drained: &pages::DrainSummary) {
        self.stored_pages += drained.stored_pages;
        self.zero_pages += drained.zero_pages;
        self.equal_pages += drained.equal_pages;
        self.lost_pages += drained.lost_pages;
    }

    /// Notes that all pages found have a fate.
    pub(crate) fn sum_up(&mut self) {
        self.scanned_pages = self.stored_pages
            + self.zero_pages
            + self.parent_pages
            + self.shared_pages
            + self.equal_pages
            + self.lost_pages;
    }

    /// The record of it.
    pub(crate) fn record(&self) -> Record {
        let saved = Saved {
            tasks: self.tasks,
            scanned_pages: self.scanned_pages,
            stored_pages: self.stored_pages,
            zero_pages: self.zero_pages,
            parent_pages: self.parent_pages,
            lost_pages: self.lost_pages,
            frozen_us: self.frozen_us,
            collect_us: self.collect_us,
            memory_us: self.memory_us,
            kind: match self.kind {
                DumpKind::PreDump => SavedKind::PreDump,
                DumpKind::Dump => SavedKind::Dump,
                DumpKind::Live => SavedKind::Live,
            }
            .into(),
            threads: self.threads,
            freezing_us: self.freezing_us,
            write_us: self.write_us,
            shared_pages: self.shared_pages,
            equal_pages: self.equal_pages,
            plan_us: self.plan_us,
        };
        Record {
            tag: tag::STATISTICS,
            version: 2,
            id: 0,
            payload: saved.encode_to_vec(),
        }
    }

    /// What the image says of its dump; none for one that says nothing.
    ///
    /// # Errors
    /// [`resources::Error::Corrupt`].
    pub fn of(reader: &Reader) -> Result<Option<Self>> {
        let mut records = reader.records().iter();
        let Some(record) = records.find(|record| record.tag == tag::STATISTICS) else {
            return Ok(None);
        };
        let damaged = |what| Error::from(resources::Error::corrupt("statistics", what));
        let saved: Saved = image::strict::decode(&record.payload).map_err(damaged)?;
        let kind = SavedKind::try_from(saved.kind);
        let kind = kind.map_err(|error| damaged(error.to_string()))?;
        Ok(Some(Self {
            kind: match kind {
                SavedKind::PreDump => DumpKind::PreDump,
                SavedKind::Dump => DumpKind::Dump,
                SavedKind::Live => DumpKind::Live,
            },
            tasks: saved.tasks,
            threads: saved.threads,
            freezing_us: saved.freezing_us,
            frozen_us: saved.frozen_us,
            collect_us: saved.collect_us,
            memory_us: saved.memory_us,
            write_us: saved.write_us,
            plan_us: saved.plan_us,
            scanned_pages: saved.scanned_pages,
            stored_pages: saved.stored_pages,
            zero_pages: saved.zero_pages,
            parent_pages: saved.parent_pages,
            shared_pages: saved.shared_pages,
            equal_pages: saved.equal_pages,
            lost_pages: saved.lost_pages,
        }))
    }

    /// Whether the image has memory only.
    ///
    /// # Errors
    /// Those of [`Statistics::of`].
    pub(crate) fn is_of_predump(reader: &Reader) -> Result<bool> {
        let statistics = Self::of(reader)?;
        Ok(statistics.is_some_and(|known| known.kind == DumpKind::PreDump))
    }
}

/// The statistics on disk. Version 1 has the fields up to 9 and is a pre-dump's.
#[derive(Clone, PartialEq, Message)]
struct Saved {
    #[prost(uint64, tag = "1")]
    tasks: u64,
    #[prost(uint64, tag = "2")]
    scanned_pages: u64,
    #[prost(uint64, tag = "3")]
    stored_pages: u64,
    #[prost(uint64, tag = "4")]
    zero_pages: u64,
    #[prost(uint64, tag = "5")]
    parent_pages: u64,
    #[prost(uint64, tag = "6")]
    lost_pages: u64,
    #[prost(uint64, tag = "7")]
    frozen_us: u64,
    #[prost(uint64, tag = "8")]
    collect_us: u64,
    #[prost(uint64, tag = "9")]
    memory_us: u64,
    #[prost(enumeration = "SavedKind", tag = "10")]
    kind: i32,
    #[prost(uint64, tag = "11")]
    threads: u64,
    #[prost(uint64, tag = "12")]
    freezing_us: u64,
    #[prost(uint64, optional, tag = "13")]
    write_us: Option<u64>,
    #[prost(uint64, tag = "14")]
    shared_pages: u64,
    #[prost(uint64, tag = "15")]
    equal_pages: u64,
    #[prost(uint64, optional, tag = "16")]
    plan_us: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum SavedKind {
    PreDump = 0,
    Dump = 1,
    Live = 2,
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use image::{Seal, Writer};

    use super::*;

    fn read_back(record: Record) -> Result<Option<Statistics>> {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer.record(record);
        writer.seal(Seal::default()).unwrap();
        Statistics::of(&Reader::open(&*store).unwrap())
    }

    #[test]
    fn statistics_survive() {
        let mut all = Statistics {
            kind: DumpKind::Live,
            tasks: 1,
            threads: 2,
            freezing_us: 3,
            frozen_us: 4,
            collect_us: 5,
            memory_us: 6,
            write_us: None,
            plan_us: Some(13),
            stored_pages: 7,
            zero_pages: 8,
            parent_pages: 9,
            shared_pages: 10,
            equal_pages: 11,
            lost_pages: 12,
            scanned_pages: 0,
        };
        all.sum_up();
        assert_eq!(all.scanned_pages, 57);
        assert_eq!(read_back(all.record()).unwrap(), Some(all.clone()));
        all.kind = DumpKind::Dump;
        all.write_us = Some(0);
        assert_eq!(read_back(all.record()).unwrap(), Some(all));
    }

    #[test]
    fn version_1_is_a_pre_dumps() {
        let record = Record {
            version: 1,
            // tasks: 3
            payload: vec![0x08, 3],
            ..Statistics::default().record()
        };
        let read = read_back(record).unwrap().unwrap();
        assert_eq!((read.kind, read.tasks), (DumpKind::PreDump, 3));
    }

    #[test]
    fn damage_is_told() {
        for payload in [vec![0xff], vec![0x50, 99]] {
            let record = Record {
                payload,
                ..Statistics::default().record()
            };
            let error = read_back(record).unwrap_err();
            assert!(matches!(error, Error::Resource(_)), "{error:?}");
        }
    }
}
