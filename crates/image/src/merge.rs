//! Squashing a chain: an image that equals a layer and has pages of no other image, or only of
//! older ones.

use std::collections::HashMap;

use abi::spans::Ranges;

use crate::parts;
use crate::run::{PAGE_BYTES, Part};
use crate::writer::lock;
use crate::{CHUNK_PAGES, ChunkId, NewRun, Reader, Result, Run, RunKind, SpaceId, Writer};

/// How much is written at once.
const WRITE_BYTES: usize = 1 << 20;

/// Counts of a merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeSummary {
    /// Pages stored in the new image.
    pub stored_pages: u64,
    /// Pages that it still has from older images.
    pub parent_pages: u64,
}

/// Writes everything of `reader` to `writer`: records, and pages in ascending order, so that the
/// new image is read with few large reads. What `writer`'s own parent has, where there is one,
/// stays there; that must be an image of `reader`'s chain.
///
/// # Errors
/// Those of reading and of writing; then the new image must not be sealed.
pub fn merge(reader: &Reader, writer: &Writer) -> Result<MergeSummary> {
    for record in reader.records() {
        writer.record(record.clone());
    }
    for space in reader.spaces() {
        writer.space(space.said());
    }
    let mut merging = Merge {
        reader,
        writer,
        bytes: Vec::with_capacity(WRITE_BYTES),
        runs: Vec::new(),
        places: Vec::new(),
        moved: SharedPages::of(reader),
        merged: MergeSummary::default(),
    };
    for space in reader.spaces() {
        for run in reader.runs(space.id) {
            match run.kind {
                RunKind::Zero | RunKind::Same { .. } => writer.mark(run),
                RunKind::Part(part) => merging.take(&run, part)?,
            }
        }
    }
    merging.flush()?;
    Ok(merging.merged)
}

struct Merge<'a> {
    reader: &'a Reader,
    writer: &'a Writer,
    /// Pages to be written, and whose.
    bytes: Vec<u8>,
    runs: Vec<NewRun>,
    places: Vec<u64>,
    moved: SharedPages,
    merged: MergeSummary,
}

/// Stored pages that several pages of the image are: they are stored once in the new image, too.
struct SharedPages {
    /// Their places, in ascending order: see [`place_of`].
    wanted: Ranges<u64>,
    /// Those that have a new place, by the old one: the number of the run, and how many of its
    /// pages come before.
    pages: HashMap<u64, (usize, u32)>,
    runs: Vec<Run>,
}

impl SharedPages {
    fn of(reader: &Reader) -> Self {
        let runs = reader.spaces().iter();
        let runs = runs.flat_map(|space| reader.runs(space.id));
        let all = runs.filter_map(|run| {
            let start = place_of(run.part()?);
            Some(start..start + u64::from(run.pages))
        });
        let mut all = all.collect::<Vec<_>>();
        all.sort_unstable_by_key(|range| (range.start, range.end));
        let mut wanted = Ranges::new();
        let mut end = 0;
        for range in all {
            let common = range.start..range.end.min(end);
            end = end.max(range.end);
            wanted.push(common);
        }
        Self {
            wanted,
            pages: HashMap::new(),
            runs: Vec::new(),
        }
    }

    fn wants(&self, place: u64) -> bool {
        self.wanted.contains(place)
    }

    /// Returns the page's run in the new image.
    fn find(&self, place: u64) -> Option<(&Run, u32)> {
        let (run, skip_pages) = self.pages.get(&place)?;
        Some((&self.runs[*run], *skip_pages))
    }

    /// Notes that the pages at `places` are stored as `stored` now.
    fn learn(&mut self, places: &[u64], stored: &[Run]) {
        let mut places = places.iter();
        for run in stored {
            for (skip_pages, place) in (0..run.pages).zip(places.by_ref()) {
                if self.wants(*place) {
                    if self.runs.last() != Some(run) {
                        self.runs.push(*run);
                    }
                    self.pages.insert(*place, (self.runs.len() - 1, skip_pages));
                }
            }
        }
    }
}

/// Identity of the first of some stored pages: the chunk's number and the page's.
fn place_of(part: Part) -> u64 {
    u64::from(part.chunk.0) << 32 | u64::from(part.skip_pages)
}

impl Merge<'_> {
    /// Takes the pages of a run that are parts of a chunk.
    fn take(&mut self, run: &Run, part: Part) -> Result<()> {
        if self.writer.inherit_chunk(self.reader, run, part)? {
            self.merged.parent_pages += u64::from(run.pages);
            return Ok(());
        }
        let chunk = self.reader.read_chunk(part.chunk)?;
        let first_place = place_of(part);
        for page in 0..run.pages {
            let place = first_place + u64::from(page);
            let first_page = run.first_page + u64::from(page);
            if self.moved.wants(place) {
                if self.places.contains(&place) {
                    self.flush()?;
                }
                if let Some((stored, skip_pages)) = self.moved.find(place) {
                    let equal = stored.equal(run.space, first_page, 1, skip_pages);
                    self.writer.describe([equal]);
                    continue;
                }
            }
            self.places.push(place);
            let start = (part.skip_pages + page) as usize * PAGE_BYTES;
            self.bytes
                .extend_from_slice(&chunk[start..start + PAGE_BYTES]);
            self.push(run.space, first_page);
            // A chunk is not cut in two.
            let boundary = (first_page + 1).is_multiple_of(CHUNK_PAGES.into());
            if boundary && self.bytes.len() + CHUNK_PAGES as usize * PAGE_BYTES > WRITE_BYTES
                || self.bytes.len() >= 2 * WRITE_BYTES
            {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Notes whose the page is that was just added.
    fn push(&mut self, space: SpaceId, page: u64) {
        match self.runs.last_mut() {
            Some(last)
                if last.space == space && last.first_page + u64::from(last.pages) == page =>
            {
                last.pages += 1;
            }
            _ => self.runs.push(NewRun {
                space,
                first_page: page,
                pages: 1,
            }),
        }
    }

    fn flush(&mut self) -> Result<()> {
        let stored = self.writer.store(0, &self.bytes, &self.runs)?;
        self.moved.learn(&self.places, &stored);
        self.writer.describe(stored);
        self.merged.stored_pages += (self.bytes.len() / PAGE_BYTES) as u64;
        self.bytes.clear();
        self.places.clear();
        self.runs.clear();
        Ok(())
    }
}

impl Writer {
    /// Notes that the pages of `run`, a part of a chunk of `reader`, are where that has them. Tells
    /// whether this image's parent, or an image that the parent has pages from, holds the chunk.
    fn inherit_chunk(&self, reader: &Reader, run: &Run, part: Part) -> Result<bool> {
        let chunk = *reader.chunk(part.chunk);
        let (owner, number) = parts::owner(chunk.object as usize);
        let (Some(owner), Some(parent)) = (owner, self.parent_image()) else {
            return Ok(false);
        };
        let Some(chunk) = parent.chunk_of(reader.ancestors()[owner].id, number, chunk) else {
            return Ok(false);
        };
        let chunk: ChunkId = lock(&self.table).add_inherited(chunk)?;
        self.describe([Run {
            kind: RunKind::Part(Part { chunk, ..part }),
            ..*run
        }]);
        Ok(true)
    }
}
