//! What is in a map: its entries, in the order in which the kernel has them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use sys::bpf_map::{self, Entries, Sizes};
use sys::per_cpu;

use super::Record;
use super::holders::LookedUp;
use crate::fd::{DumpContext, RestoreContext};
use crate::{Error, Result};

/// Contents up to this size stand in the record itself.
const INLINE_BYTES: usize = 4096;
/// How much is written at a time, as far as an entry is no larger.
const PIECE_BYTES: usize = 1 << 20;
/// How often what a map has forgotten is written again.
const TRIES: usize = 3;

/// The entries of a map.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Contents {
    /// How many.
    #[prost(uint64, tag = "1")]
    pub(super) entries: u64,
    /// Each key and, behind it, its value; of an array, a queue or a stack the values alone. Empty
    /// where they have a space.
    #[prost(bytes = "vec", tag = "2")]
    inline: Vec<u8>,
    /// The space.
    #[prost(uint32, optional, tag = "3")]
    space: Option<u32>,
    /// How many processors have values of their own, each of a multiple of eight bytes; 0 where
    /// there is one value.
    #[prost(uint32, tag = "4")]
    processors: u32,
}

/// A file in memory.
fn memory() -> Result<File> {
    let made = rustix::fs::memfd_create("entries", MemfdFlags::CLOEXEC);
    let made = made.map_err(|errno| Error::kernel("make room for entries", errno))?;
    Ok(made.into())
}

fn processors() -> Result<u32> {
    let possible = per_cpu::possible();
    let possible = possible.map_err(|error| Error::kernel("count possible processors", error))?;
    Ok(possible.len() as u32)
}

impl Record {
    fn sizes(&self, processors: u32) -> Sizes {
        let value = self.value_bytes as usize;
        let value = match processors {
            0 => value,
            count => value.next_multiple_of(8) * count as usize,
        };
        let key = self.key_bytes as usize;
        Sizes { key, value }
    }

    /// How many bytes an entry has in an image.
    fn entry_bytes(&self, sizes: Sizes) -> usize {
        match self.is_array() {
            true => sizes.value,
            false => sizes.key + sizes.value,
        }
    }
}

impl Contents {
    /// Describes what is in `map`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a queue that cannot be looked into.
    pub(super) fn dump(
        map: &OwnedFd,
        record: &Record,
        looked_up: &LookedUp,
        cx: &mut dyn DumpContext,
    ) -> Result<Self> {
        let mut contents = Self::default();
        if record.is_per_cpu() {
            contents.processors = processors()?;
        }
        let sizes = record.sizes(contents.processors);
        let mut file = memory()?;
        let bytes = match record.is_keyed() {
            true => write_entries(map, record, sizes, &mut file)?,
            false => {
                let values = looked_up.values(sizes.value)?;
                let written = file.write_all(&values);
                written.map_err(|error| record.failed("keep what is in", error))?;
                values.len() as u64
            }
        };
        contents.entries = bytes / record.entry_bytes(sizes) as u64;
        if bytes > INLINE_BYTES as u64 {
            contents.space = Some(cx.store(file.into(), bytes)?);
        } else {
            contents.inline = vec![0; bytes as usize];
            let read = file.read_exact_at(&mut contents.inline, 0);
            read.map_err(|error| record.failed("keep what is in", error))?;
        }
        Ok(contents)
    }

    /// Contents that may make no sense.
    #[cfg(test)]
    pub(super) fn made_of(entries: u64, inline: &[u8], processors: u32) -> Self {
        Self {
            entries,
            inline: inline.to_vec(),
            processors,
            space: None,
        }
    }

    /// Puts all of it into a new map.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for entries that do not fit into it; [`Error::Mismatch`] on a machine
    /// with other processors.
    pub(super) fn load(
        &self,
        map: &OwnedFd,
        record: &Record,
        cx: &mut dyn RestoreContext,
    ) -> Result<()> {
        let place = record.place();
        let corrupt = || Error::corrupt(format!("BPF map {place}"), "its entries make no sense");
        if record.is_per_cpu() != (self.processors > 0) {
            return Err(corrupt());
        }
        if self.processors > 0 && self.processors != processors()? {
            let (then, now) = (self.processors, processors()?);
            return Err(Error::Mismatch {
                what: format!(
                    "the BPF map {place} has values of {then} processors, and there can be {now} \
                     here"
                ),
            });
        }
        let sizes = record.sizes(self.processors);
        let bytes = self.entries.checked_mul(record.entry_bytes(sizes) as u64);
        let bytes = bytes.filter(|_| self.entries <= u64::from(record.max_entries));
        let bytes = bytes.ok_or_else(corrupt)?;
        let mut file = memory()?;
        match self.space {
            None if self.inline.len() as u64 == bytes => {
                let written = file.write_all(&self.inline);
                written.map_err(|error| record.failed("fill", error))?;
            }
            None => return Err(corrupt()),
            Some(space) => cx.load(space, file.as_fd())?,
        }
        let there = file.metadata();
        let there = there.map_err(|error| record.failed("fill", error))?.len();
        // A space has whole pages.
        if there < bytes || there > bytes.next_multiple_of(4096) {
            return Err(corrupt());
        }
        let filler = Filler {
            map,
            record,
            sizes,
            file: &file,
            entries: self.entries,
        };
        filler.fill().map_err(|error| record.failed("fill", error))
    }
}

/// Writes all entries of a map into a file; how many bytes.
fn write_entries(map: &OwnedFd, record: &Record, sizes: Sizes, file: &mut File) -> Result<u64> {
    let failed = |error: io::Error| record.failed("read", error);
    let mut entries = Entries::new(map, sizes);
    let mut bytes = 0;
    while let Some((keys, values)) = entries.read().map_err(failed)? {
        let piece = match record.is_array() {
            true => values,
            false => {
                let keys = keys.chunks_exact(sizes.key);
                let pairs = keys.zip(values.chunks_exact(sizes.value));
                pairs
                    .flat_map(|(key, value)| [key, value].concat())
                    .collect()
            }
        };
        file.write_all(&piece).map_err(failed)?;
        bytes += piece.len() as u64;
    }
    Ok(bytes)
}

/// What a new map is filled with.
struct Filler<'a> {
    map: &'a OwnedFd,
    record: &'a Record,
    sizes: Sizes,
    file: &'a File,
    entries: u64,
}

/// Some entries: all keys, and all values.
type Piece = (Vec<u8>, Vec<u8>);

impl Filler<'_> {
    fn fill(&self) -> io::Result<()> {
        if !self.record.is_keyed() {
            return self.each(|(_, values)| {
                let mut values = values.chunks_exact(self.sizes.value);
                values.try_for_each(|value| bpf_map::push(self.map, value))
            });
        }
        if !self.record.forgets() {
            return self.each(|piece| self.update(&piece));
        }
        // The kernel gives each processor room for many entries at a time, and forgets some for
        // that: for one processor so many that those fit in again.
        let _here = Here::stay()?;
        self.each(|piece| self.update(&piece))?;
        for _ in 0..TRIES {
            let mut lost = 0;
            self.each(|piece| {
                let missing = self.missing(&piece)?;
                lost += missing.0.len();
                self.update(&missing)
            })?;
            if lost == 0 {
                return Ok(());
            }
        }
        Err(io::Error::other("it forgets what it is filled with"))
    }

    fn update(&self, (keys, values): &Piece) -> io::Result<()> {
        bpf_map::update(self.map, (keys, values), self.sizes)
    }

    /// Those of some entries that the map does not have.
    fn missing(&self, (keys, values): &Piece) -> io::Result<Piece> {
        let keys = keys.chunks_exact(self.sizes.key);
        let mut missing = Piece::default();
        for (key, value) in keys.zip(values.chunks_exact(self.sizes.value)) {
            if !bpf_map::has(self.map, key, self.sizes)? {
                missing.0.extend(key);
                missing.1.extend(value);
            }
        }
        Ok(missing)
    }

    /// Has something done with all entries, some at a time.
    fn each(&self, mut with: impl FnMut(Piece) -> io::Result<()>) -> io::Result<()> {
        let entry_bytes = self.record.entry_bytes(self.sizes);
        let at_once = (PIECE_BYTES / entry_bytes).max(1) as u64;
        let mut next = 0;
        while next < self.entries {
            let count = at_once.min(self.entries - next);
            let mut bytes = vec![0; count as usize * entry_bytes];
            self.file
                .read_exact_at(&mut bytes, next * entry_bytes as u64)?;
            with(self.split(&bytes, next))?;
            next += count;
        }
        Ok(())
    }

    fn split(&self, bytes: &[u8], first: u64) -> Piece {
        if self.record.is_array() {
            let keys = (first as u32..).take(bytes.len() / self.sizes.value);
            return (keys.flat_map(u32::to_ne_bytes).collect(), bytes.to_vec());
        }
        let mut piece = Piece::default();
        for entry in bytes.chunks_exact(self.sizes.key + self.sizes.value) {
            let (key, value) = entry.split_at(self.sizes.key);
            piece.0.extend(key);
            piece.1.extend(value);
        }
        piece
    }
}

/// This thread stays on one processor until it goes.
struct Here(CpuSet);

impl Here {
    fn stay() -> io::Result<Self> {
        let before = sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one)?;
        Ok(Self(before))
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        if let Err(errno) = sched_setaffinity(None, &self.0) {
            log::warn!("this process stays on one processor: {errno}");
        }
    }
}
