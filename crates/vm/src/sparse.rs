//! Memory in files with holes, on its way into an image or a layer.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::slice;

use abi::spans::{Ranges, subtract};
use abi::{Addr, PAGE_BYTES};
use image::{Reader, SpaceId, Writer};
use pages::source::{Object, allocated};
use pages::{Drain, DrainSummary, Extent, Source};

use crate::Result;

/// A memory that is a part of a file.
#[derive(Debug)]
pub(crate) struct Memory {
    source: Object,
    space: SpaceId,
    pages: u64,
    /// Its offset in the file.
    offset_bytes: u64,
    /// Its pages that are no holes.
    data: Ranges<u64>,
    /// Those that are as the parent has them, where that is known.
    unwritten: Option<Ranges<u64>>,
}

/// Meaning of holes over a parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holes {
    /// Pages of zeros.
    Zero,
    /// Pages that are as the parent has them.
    Unchanged,
}

/// Counts of pages by their fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageCounts {
    pub pages: u64,
    pub stored_pages: u64,
    pub zero_pages: u64,
    pub parent_pages: u64,
}

impl Memory {
    /// `pages` pages of a file, with the holes that it has now.
    pub fn new(file: OwnedFd, space: SpaceId, pages: u64, offset_bytes: u64) -> Self {
        let data = match allocated(file.as_fd()) {
            Ok(spans) => {
                let of_file = |at: Addr| at.0.saturating_sub(offset_bytes);
                let ranges = spans.iter().map(|span| {
                    let first = of_file(span.start) / PAGE_BYTES;
                    let end = of_file(span.end).div_ceil(PAGE_BYTES);
                    first.min(pages)..end.min(pages)
                });
                ranges.filter(|range| !range.is_empty()).collect()
            }
            // The file system does not tell: all of it is read.
            Err(error) => {
                log::debug!("holes are read: {error}");
                std::iter::once(0..pages).collect()
            }
        };
        Self {
            source: Object::new(file),
            space,
            pages,
            offset_bytes,
            data,
            unwritten: None,
        }
    }

    /// The same memory, of which only pages that are not in `unwritten` are read for a layer.
    pub fn knowing(self, unwritten: Ranges<u64>) -> Self {
        Self {
            unwritten: Some(unwritten),
            ..self
        }
    }

    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Its pages that are no holes.
    pub const fn data(&self) -> &Ranges<u64> {
        &self.data
    }

    /// Pages of its holes.
    pub fn holes(&self) -> u64 {
        self.pages
            - self
                .data
                .iter()
                .map(|range| range.end - range.start)
                .sum::<u64>()
    }

    /// Notes that its holes are zero.
    pub fn mark_holes(&self, writer: &Writer) {
        for hole in &gaps(&self.data, self.pages) {
            writer.mark_zero(self.space, hole.clone());
        }
    }

    /// All of its pages that are no holes, and those that are not known to be the parent's.
    fn extents(&self) -> Vec<Extent> {
        let known = self.unwritten.iter().flat_map(|ranges| ranges.iter());
        let read = subtract(&self.data, &known.cloned().collect::<Vec<_>>());
        read.iter().map(|range| self.extent(range)).collect()
    }

    /// Some of its pages, as its file has them.
    pub fn extent(&self, range: &Range<u64>) -> Extent {
        Extent {
            space: self.space,
            first_page: range.start,
            at: Addr(self.offset_bytes + range.start * PAGE_BYTES),
            pages: range.end - range.start,
        }
    }
}

/// Stores memories in an image: holes are not read, pages of zeros not stored, nor pages that are
/// as the parent has them.
///
/// Where it is known what was written, that is not compared with the parent. `beside`: whether who
/// writes to the memory runs meanwhile, and is left a processor.
///
/// Calls `progress` with the bytes done and to be done.
pub(crate) fn store(
    memories: &[Memory],
    writer: &Writer,
    holes: Holes,
    beside: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PageCounts> {
    let pages = memories.iter().map(|memory| memory.pages).sum();
    let gaps_pages = memories.iter().map(Memory::holes).sum::<u64>();
    let Some(parent) = writer.parent().cloned() else {
        for memory in memories {
            memory.mark_holes(writer);
        }
        let all = memories.iter().map(Memory::extents).collect::<Vec<_>>();
        let drained = drain(memories, &all, writer, beside, progress)?;
        return Ok(PageCounts {
            pages,
            stored_pages: drained.stored_pages,
            zero_pages: gaps_pages + drained.zero_pages,
            parent_pages: 0,
        });
    };
    let (all, total) = changed(memories, &parent, progress)?;
    let mut zero_pages = 0;
    for (memory, changed) in memories.iter().zip(&all) {
        let changed = changed.iter().map(Extent::numbers).collect::<Ranges<_>>();
        let same = match holes {
            Holes::Unchanged => gaps(&changed, memory.pages),
            Holes::Zero => {
                memory.mark_holes(writer);
                zero_pages += memory.holes();
                subtract(&memory.data, &changed)
            }
        };
        writer.inherit_described(memory.space, &same)?;
    }
    let of_all = all.iter().flatten().map(Extent::bytes).sum::<u64>();
    let less = total - of_all / 2;
    let drained = drain(memories, &all, writer, beside, &|done, _| {
        progress((less + done / 2).min(total), total);
    })?;
    Ok(PageCounts {
        pages,
        stored_pages: drained.stored_pages,
        zero_pages: zero_pages + drained.zero_pages,
        parent_pages: pages - zero_pages - drained.read_pages,
    })
}

/// What of each memory differs from the parent, and how many bytes were looked at. What differs is
/// read twice, the second time out of the cache.
fn changed(
    memories: &[Memory],
    parent: &Reader,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Vec<Vec<Extent>>, u64)> {
    let bytes = |memory: &Memory| memory.extents().iter().map(Extent::bytes).sum::<u64>();
    let total = memories.iter().map(bytes).sum();
    let mut before = 0;
    let mut all = Vec::new();
    for memory in memories {
        if memory.unwritten.is_some() {
            all.push(memory.extents());
            before += bytes(memory);
            continue;
        }
        let compared = |done| progress((before + done) / 2, total);
        all.push(pages::changed(
            &memory.source,
            &memory.extents(),
            parent,
            &compared,
        )?);
        before += bytes(memory);
    }
    Ok((all, total))
}

fn drain(
    memories: &[Memory],
    extents: &[Vec<Extent>],
    writer: &Writer,
    beside: bool,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<DrainSummary> {
    let total = extents.iter().flatten().map(Extent::bytes).sum::<u64>();
    writer.reserve(total)?;
    let sources = memories.iter().zip(extents);
    let sources = sources.map(|(memory, extents)| (&memory.source as &dyn Source, &extents[..]));
    let how = Drain {
        beside,
        progress: &|done| progress(done, total),
        ..Drain::default()
    };
    Ok(pages::drain_all(&sources.collect::<Vec<_>>(), writer, how)?)
}

/// Returns the parts of `0..pages` outside of `ranges`.
fn gaps(ranges: &[Range<u64>], pages: u64) -> Ranges<u64> {
    subtract(slice::from_ref(&(0..pages)), ranges)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use image::{Granule, NewSpace, Seal, SpaceKind};
    use store::Images;

    use image::Base;

    use super::*;
    use crate::place;

    #[test]
    fn gaps_are_what_is_left() {
        assert_eq!(gaps(&[], 5), [0..5]);
        assert_eq!(gaps(&[0..5], 5), []);
        assert_eq!(gaps(&[1..2, 2..3, 4..5], 7), [0..1, 3..4, 5..7]);
    }

    const SPACE: SpaceId = SpaceId(1);

    /// A file in memory of 8 pages, of which those of `written` are filled with a byte.
    fn file(written: &[(u64, u8)]) -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("pages", flags).expect("a memfd"));
        file.set_len(8 * PAGE_BYTES).expect("a length");
        for (page, byte) in written {
            let bytes = vec![*byte; PAGE_BYTES as usize];
            let at = page * PAGE_BYTES;
            file.write_all_at(&bytes, at).expect("written");
        }
        file
    }

    /// Stores what a file has from page 2 on; gives the first byte of each page of the image.
    fn round_trip(
        file: File,
        writer: Writer,
        images: &Images,
        holes: Holes,
    ) -> (PageCounts, [u8; 6]) {
        writer.space(NewSpace {
            id: SPACE,
            kind: SpaceKind::Block,
            name: "memory".to_owned(),
            len_pages: 6,
            granule: Granule::Small,
        });
        let memory = Memory::new(file.into(), SPACE, 6, 2 * PAGE_BYTES);
        let fates = super::store(&[memory], &writer, holes, false, &|_, _| ()).expect("stored");
        writer.seal(Seal::default()).expect("sealed");
        let reader = Reader::open(&*images.open().expect("there")).expect("an image");
        let mut bytes = vec![1; 6 * PAGE_BYTES as usize];
        reader.read_pages(SPACE, 0, &mut bytes).expect("all of it");
        let first = |page: usize| bytes[page * PAGE_BYTES as usize];
        (fates, std::array::from_fn(first))
    }

    #[test]
    fn what_is_given_back_is_zero_in_a_layer_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, two, three] = ["1", "2", "3"].map(|name| Images::from(folder.path().join(name)));
        let writer = place::begin(&one, None, None).expect("a writer");
        let first = file(&[(1, 9), (2, 1), (3, 2), (4, 0), (7, 3)]);
        let (fates, pages) = round_trip(first, writer, &one, Holes::Zero);
        assert_eq!(pages, [1, 2, 0, 0, 0, 3]);
        let stored = |stored_pages, zero_pages, parent_pages| PageCounts {
            pages: 6,
            stored_pages,
            zero_pages,
            parent_pages,
        };
        assert_eq!(fates, stored(3, 3, 0));
        let layer = |images: &Images| {
            let parent = Base::open(&one).expect("an image");
            place::begin(images, Some(&parent), None).expect("a writer")
        };
        let second = || file(&[(2, 1), (3, 4)]);
        let (fates, pages) = round_trip(second(), layer(&two), &two, Holes::Zero);
        assert_eq!((pages, fates), ([1, 4, 0, 0, 0, 0], stored(1, 4, 1)));
        let (fates, pages) = round_trip(second(), layer(&three), &three, Holes::Unchanged);
        assert_eq!((pages, fates), ([1, 4, 0, 0, 0, 3], stored(1, 0, 5)));
    }
}
