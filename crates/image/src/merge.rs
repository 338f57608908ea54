//! Squashing a chain: an image that equals a layer and has pages of no other image, or only of
//! older ones.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::ancestors::Ancestor;
use crate::reader::data_offset;
use crate::run::{DATA_RUN_MAX_PAGES, PAGE_BYTES};
use crate::{Error, Located, NewRun, Reader, Result, Run, RunKind, SpaceId, Writer};

/// How much is written at once.
const WRITE_BYTES: usize = DATA_RUN_MAX_PAGES as usize * PAGE_BYTES;

/// How many stored runs are kept for the next parts of them that are wanted: 64 MiB at the most.
const KEPT_RUNS: usize = 64;

/// What a merge did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
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
pub fn merge(reader: &Reader, writer: &Writer) -> Result<Merged> {
    for record in reader.records() {
        writer.record(record.clone());
    }
    let mut lane = Lane {
        reader,
        writer,
        kept: HashMap::new(),
        order: VecDeque::new(),
        bytes: Vec::with_capacity(WRITE_BYTES),
        runs: Vec::new(),
        places: Vec::new(),
        moved: Moved::of(reader),
        merged: Merged::default(),
    };
    for space in reader.spaces() {
        for run in reader.runs(space.id) {
            match run.kind {
                RunKind::Zero | RunKind::Same { .. } => writer.mark(run),
                _ => lane.take(&run)?,
            }
        }
    }
    lane.flush()?;
    Ok(lane.merged)
}

struct Lane<'a> {
    reader: &'a Reader,
    writer: &'a Writer,
    /// Verified contents of stored runs, by place, and in which order they came.
    kept: HashMap<u64, Vec<u8>>,
    order: VecDeque<u64>,
    /// Pages to be written, and whose.
    bytes: Vec<u8>,
    runs: Vec<NewRun>,
    /// Where they were.
    places: Vec<u64>,
    moved: Moved,
    merged: Merged,
}

/// Stored pages that several pages of the image are: they are stored once in the new image, too.
struct Moved {
    /// Where they are, in ascending order.
    wanted: Vec<Range<u64>>,
    /// Those that have a new place, by the old one: the number of the run, and how many of its
    /// pages come before.
    pages: HashMap<u64, (usize, u32)>,
    runs: Vec<Run>,
}

impl Moved {
    fn of(reader: &Reader) -> Self {
        let mut all = Vec::new();
        for run in reader
            .spaces()
            .iter()
            .flat_map(|space| reader.runs(space.id))
        {
            if matches!(run.kind, RunKind::Same { .. } | RunKind::Zero) {
                continue;
            }
            // What lies nowhere is told when it is read.
            if let Ok(located) = reader.locate(run.space, run.first_page, run.pages.into()) {
                let start = place_of(&located);
                all.push(start..start + run.len_bytes());
            }
        }
        all.sort_unstable_by_key(|range| (range.start, range.end));
        let mut wanted: Vec<Range<u64>> = Vec::new();
        let mut end = 0;
        for range in all {
            let common = range.start..range.end.min(end);
            end = end.max(range.end);
            match wanted.last_mut() {
                _ if common.is_empty() => {}
                Some(last) if common.start <= last.end => last.end = last.end.max(common.end),
                _ => wanted.push(common),
            }
        }
        Self {
            wanted,
            pages: HashMap::new(),
            runs: Vec::new(),
        }
    }

    fn wants(&self, place: u64) -> bool {
        let at = self.wanted.partition_point(|range| range.end <= place);
        self.wanted
            .get(at)
            .is_some_and(|range| range.contains(&place))
    }

    /// Where the page is in the new image.
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

/// The place of the first of some pages that are stored.
fn place_of(located: &Located) -> u64 {
    data_offset(&located.run) + u64::from(located.skip_pages) * PAGE_BYTES as u64
}

impl Lane<'_> {
    /// Takes the pages of a run that are stored somewhere.
    fn take(&mut self, run: &Run) -> Result<()> {
        if let Some((ancestor, origin)) = self.reader.origin(run)
            && self.writer.inherit_origin(ancestor, &origin, run)?
        {
            self.merged.parent_pages += u64::from(run.pages);
            return Ok(());
        }
        let located = self
            .reader
            .locate(run.space, run.first_page, u64::from(run.pages))?;
        let Located {
            run: stored,
            skip_pages,
            pages,
        } = located;
        debug_assert_eq!(pages, run.pages, "a run lies in one stored run");
        let place = data_offset(&stored);
        if !self.kept.contains_key(&place) {
            let mut bytes = vec![0; stored.len_bytes() as usize];
            self.reader.read(&stored, &mut bytes)?;
            if self.order.len() == KEPT_RUNS
                && let Some(oldest) = self.order.pop_front()
            {
                self.kept.remove(&oldest);
            }
            self.order.push_back(place);
            self.kept.insert(place, bytes);
        }
        let first_place = place_of(&located);
        for page in 0..u64::from(run.pages) {
            let at = first_place + page * PAGE_BYTES as u64;
            if self.moved.wants(at) {
                if self.places.contains(&at) {
                    self.flush()?;
                }
                if let Some((stored, skip_pages)) = self.moved.find(at) {
                    let first_page = run.first_page + page;
                    let equal = self
                        .writer
                        .equal(run.space, first_page, 1, stored, skip_pages)?;
                    self.writer.describe([equal]);
                    continue;
                }
            }
            self.places.push(at);
            let start = (u64::from(skip_pages) + page) as usize * PAGE_BYTES;
            let bytes = &self.kept[&place][start..start + PAGE_BYTES];
            self.bytes.extend_from_slice(bytes);
            self.push(run.space, run.first_page + page);
            // Runs end where page numbers are a multiple of the longest: so do those of a dump.
            let boundary = (run.first_page + page + 1).is_multiple_of(DATA_RUN_MAX_PAGES.into());
            if self.bytes.len() >= WRITE_BYTES || boundary && self.bytes.len() >= WRITE_BYTES / 2 {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Notes whose the page is that was just added.
    fn push(&mut self, space: SpaceId, page: u64) {
        match self.runs.last_mut() {
            Some(last)
                if last.space == space
                    && last.first_page + u64::from(last.pages) == page
                    && !page.is_multiple_of(DATA_RUN_MAX_PAGES.into()) =>
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
    /// Notes that the pages of `run` are where another layer has them: part of `origin`, which
    /// `ancestor` stores. Tells whether this image's parent is that ancestor or has pages from it.
    fn inherit_origin(&self, ancestor: &Ancestor, origin: &Run, run: &Run) -> Result<bool> {
        let RunKind::Parent(part) = run.kind else {
            return Ok(false);
        };
        let Some(over) = self.over() else {
            return Ok(false);
        };
        let Some(object) = over.object_of(ancestor.id, origin) else {
            return Ok(false);
        };
        let number = self.origin(object, origin).ok_or(Error::TooLarge {
            of: "origins",
            limit: u64::from(u32::MAX),
        })?;
        let part = crate::Part {
            origin: number,
            ..part
        };
        self.describe([Run {
            kind: RunKind::Parent(part),
            ..*run
        }]);
        Ok(true)
    }
}
