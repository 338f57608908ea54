//! Pages with the same contents, stored once: those of tasks that were forked from each other, and
//! the copies that tasks have of pages of the same file.
//!
//! Only pages that may be equal with some likelihood are looked at, because that costs an eighth of
//! the time to store them: pages that several spaces have at the same place, and those that the
//! caller names. A page is equal to another if a hash finds it and all of its bytes are the same.
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use abi::spans::Ranges;
use image::{NewRun, PAGE_BYTES, Run, SpaceId, Writer};
use twox_hash::XxHash3_64;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, Extent, Result};

/// Pages that are remembered: 2 GiB of them, which takes 48 MiB at the most.
const KNOWN_MAX: usize = 1 << 19;

/// From so many bytes on it is worth asking the processor what it can, as for checksums: the same
/// hash takes three fifths of the time.
const LARGE_BYTES: usize = 512 << 10;

/// Index of a dump's pages that may be equal to others.
pub struct EqualIndex {
    /// Pages to be looked at, by space.
    wanted: HashMap<SpaceId, Ranges<u64>>,
    known: Mutex<StoredPages>,
}

/// Stored pages by the hash of their contents.
#[derive(Default)]
struct StoredPages {
    /// The number of the run, and how many of its pages come before.
    pages: HashMap<u64, (u32, u32), BuildHasherDefault<IdentityHasher>>,
    runs: Vec<Run>,
}

/// Hashes what is a hash already.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("only numbers are hashed");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

/// Fate of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is stored, and nobody looks for it.
    Stored,
    /// It is stored, and found by its hash.
    Found(u64),
    /// It is equal to this page of a run that was stored before.
    Equal(Run, u32),
    /// It is equal to a page before it.
    Before(usize),
}

/// Plan for the pages in a buffer.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    fates: Vec<Fate>,
    pages: Vec<(SpaceId, u64)>,
}

impl EqualIndex {
    /// Finds the pages of `extents` that several spaces have at the same place, and adds `more`,
    /// which may be equal to others for another reason. None where there are none.
    #[must_use]
    pub fn new<'a>(
        extents: impl Iterator<Item = &'a Extent>,
        more: impl IntoIterator<Item = (SpaceId, Range<u64>)>,
    ) -> Option<Self> {
        let places = extents.map(|extent| {
            let pages = extent.numbers();
            (pages.start, pages.end, extent.space)
        });
        Self::of(places.collect(), more)
    }

    /// Does what [`EqualIndex::new`] does for the pages of those of `runs` that are stored.
    #[must_use]
    pub fn of_runs<'a>(
        runs: impl Iterator<Item = &'a Run>,
        more: impl IntoIterator<Item = (SpaceId, Range<u64>)>,
    ) -> Option<Self> {
        let stored = runs.filter(|run| run.part().is_some());
        let places = stored.map(|run| (run.first_page, run.end_page(), run.space));
        Self::of(places.collect(), more)
    }

    fn of(
        places: Vec<(u64, u64, SpaceId)>,
        more: impl IntoIterator<Item = (SpaceId, Range<u64>)>,
    ) -> Option<Self> {
        let mut all = at_the_same_place(places);
        for (space, pages) in more {
            all.entry(space).or_default().push(pages);
        }
        let wanted = all
            .into_iter()
            .map(|(space, pages)| (space, Ranges::of(pages)));
        let wanted = wanted.collect::<HashMap<_, _>>();
        (!wanted.is_empty()).then(|| Self {
            wanted,
            known: Mutex::default(),
        })
    }

    /// Finds out which of the pages in `bytes`, which are those of `runs`, are equal to others;
    /// none where all are to be stored without a look.
    ///
    /// # Errors
    /// [`Error::Image`] when what was stored cannot be read.
    pub(crate) fn plan(
        &self,
        writer: &Writer,
        bytes: &[u8],
        runs: &[NewRun],
    ) -> Result<Option<Plan>> {
        if !runs.iter().any(|run| self.wants(run)) {
            return Ok(None);
        }
        let mut plan = Plan::default();
        let hash_of = match bytes.len() {
            ..LARGE_BYTES => xxh3_64,
            LARGE_BYTES.. => XxHash3_64::oneshot,
        };
        for run in runs {
            let wanted = self.wanted.get(&run.space).map_or(&[][..], |wanted| wanted);
            let all = run.first_page..run.first_page + u64::from(run.pages);
            let mut at = wanted.partition_point(|range| range.end <= all.start);
            for page in all {
                while wanted.get(at).is_some_and(|range| range.end <= page) {
                    at += 1;
                }
                let number = plan.fates.len();
                let wanted = wanted.get(at).is_some_and(|range| range.contains(&page));
                plan.fates.push(match wanted {
                    true => Fate::Found(hash_of(page_of(bytes, number))),
                    false => Fate::Stored,
                });
                plan.pages.push((run.space, page));
            }
        }
        plan.find_before(bytes);
        let known = self.known();
        for fate in &mut plan.fates {
            if let Fate::Found(hash) = fate
                && let Some((run, skip_pages)) = known.pages.get(hash)
            {
                *fate = Fate::Equal(known.runs[*run as usize], *skip_pages);
            }
        }
        drop(known);
        plan.compare(writer, bytes)?;
        Ok(Some(plan))
    }

    /// Remembers the pages of a plan that were stored as `stored`.
    fn learn(&self, plan: &Plan, stored: &[Run]) {
        let mut known = self.known();
        let mut fates = plan.fates.iter().filter(|fate| fate.is_stored());
        for run in stored {
            let mut number = None;
            for skip_pages in 0..run.pages {
                let Some(Fate::Found(hash)) = fates.next() else {
                    continue;
                };
                if known.pages.len() >= KNOWN_MAX {
                    return;
                }
                let number = *number.get_or_insert_with(|| {
                    known.runs.push(*run);
                    known.runs.len() as u32 - 1
                });
                known.pages.entry(*hash).or_insert((number, skip_pages));
            }
        }
    }

    /// Tells whether any pages of a run are to be looked at.
    pub(crate) fn wants(&self, run: &NewRun) -> bool {
        let Some(wanted) = self.wanted.get(&run.space) else {
            return false;
        };
        wanted.meets(&(run.first_page..run.first_page + u64::from(run.pages)))
    }

    fn known(&self) -> MutexGuard<'_, StoredPages> {
        // A thread that panicked while it held it left whole values behind.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fate {
    fn is_stored(&self) -> bool {
        matches!(self, Self::Stored | Self::Found(_))
    }
}

impl Plan {
    /// Finds pages that are equal to one before them in the same buffer.
    fn find_before(&mut self, bytes: &[u8]) {
        let mut first = HashMap::<u64, usize, BuildHasherDefault<IdentityHasher>>::default();
        for number in 0..self.fates.len() {
            let Fate::Found(hash) = self.fates[number] else {
                continue;
            };
            let before = *first.entry(hash).or_insert(number);
            if before != number && page_of(bytes, before) == page_of(bytes, number) {
                self.fates[number] = Fate::Before(before);
            }
        }
    }

    /// Compares the pages that seem equal to stored ones with those, byte by byte; the others are
    /// stored, but not found.
    fn compare(&mut self, writer: &Writer, bytes: &[u8]) -> Result<()> {
        let mut stored = Vec::new();
        let mut number = 0;
        while number < self.fates.len() {
            let Fate::Equal(run, skip_pages) = self.fates[number] else {
                number += 1;
                continue;
            };
            // Neighbours in both are read at once.
            let next = (skip_pages..run.pages).zip(&self.fates[number..]);
            let count = next.take_while(|(skip, fate)| **fate == Fate::Equal(run, *skip));
            let count = count.count();
            stored.resize(count * PAGE_BYTES, 0);
            let read = writer.read_back(&run, skip_pages, &mut stored);
            read.map_err(Error::image("read"))?;
            for (page, fate) in self.fates[number..number + count].iter_mut().enumerate() {
                if page_of(&stored, page) != page_of(bytes, number + page) {
                    *fate = Fate::Stored;
                }
            }
            number += count;
        }
        Ok(())
    }

    /// Gives, for each of the `runs` that this is about, which of its pages are stored, numbered
    /// from its first.
    pub fn kept(&self, runs: &[NewRun]) -> Vec<Ranges<u32>> {
        let mut fates = self.fates.iter();
        let kept = runs.iter().map(|run| {
            let pages = (0..run.pages).zip(&mut fates);
            let stored = pages.filter(|(_, fate)| fate.is_stored());
            stored.map(|(page, _)| page..page + 1).collect()
        });
        kept.collect()
    }

    /// Moves the pages to be stored to the front of `bytes` and puts their runs into `runs`; gives
    /// how many bytes those are.
    pub fn take_out(&self, bytes: &mut [u8], runs: &mut Vec<NewRun>) -> usize {
        runs.clear();
        let mut kept = 0;
        for (number, fate) in self.fates.iter().enumerate() {
            if !fate.is_stored() {
                continue;
            }
            if kept != number {
                let page = number * PAGE_BYTES;
                bytes.copy_within(page..page + PAGE_BYTES, kept * PAGE_BYTES);
            }
            kept += 1;
            let (space, page) = self.pages[number];
            match runs.last_mut() {
                Some(last)
                    if last.space == space && last.first_page + u64::from(last.pages) == page =>
                {
                    last.pages += 1;
                }
                _ => runs.push(NewRun {
                    space,
                    first_page: page,
                    pages: 1,
                }),
            }
        }
        kept * PAGE_BYTES
    }

    /// Gives the runs of the pages that are not stored, after the others were stored as `stored`.
    pub fn finish(&self, equals: &EqualIndex, stored: &[Run]) -> Vec<Run> {
        equals.learn(self, stored);
        if self.fates.iter().all(Fate::is_stored) {
            return Vec::new();
        }
        // Where each stored page of the buffer is now.
        let places = stored
            .iter()
            .flat_map(|run| (0..run.pages).map(move |skip| (*run, skip)));
        let numbers = self.fates.iter().enumerate();
        let kept = numbers
            .clone()
            .filter(|(_, fate)| fate.is_stored())
            .map(|(number, _)| number);
        let places = kept.zip(places).collect::<HashMap<_, _>>();
        let mut equal: Vec<EqualRun> = Vec::new();
        for (number, fate) in numbers {
            let (stored, skip_pages) = match fate {
                Fate::Stored | Fate::Found(_) => continue,
                Fate::Equal(run, skip_pages) => (*run, *skip_pages),
                Fate::Before(before) => match self.fates[*before] {
                    Fate::Equal(run, skip_pages) => (run, skip_pages),
                    _ => places[before],
                },
            };
            let (space, first_page) = self.pages[number];
            let one = EqualRun {
                place: NewRun {
                    space,
                    first_page,
                    pages: 1,
                },
                stored,
                skip_pages,
            };
            match equal.last_mut() {
                Some(last) if last.goes_on_with(&one) => last.place.pages += 1,
                _ => equal.push(one),
            }
        }
        equal.iter().map(EqualRun::run).collect()
    }
}

/// Pages that are equal to those of a stored run after some of it.
struct EqualRun {
    place: NewRun,
    stored: Run,
    skip_pages: u32,
}

impl EqualRun {
    fn goes_on_with(&self, next: &Self) -> bool {
        let end_page = self.place.first_page + u64::from(self.place.pages);
        self.place.space == next.place.space
            && end_page == next.place.first_page
            && self.stored == next.stored
            && self.skip_pages + self.place.pages == next.skip_pages
    }

    fn run(&self) -> Run {
        let NewRun {
            space,
            first_page,
            pages,
        } = self.place;
        self.stored.equal(space, first_page, pages, self.skip_pages)
    }
}

fn page_of(bytes: &[u8], number: usize) -> &[u8] {
    &bytes[number * PAGE_BYTES..(number + 1) * PAGE_BYTES]
}

/// Of pages given by their first, the one after the last, and the space: those that more than one
/// space has at the same place.
fn at_the_same_place(mut all: Vec<(u64, u64, SpaceId)>) -> HashMap<SpaceId, Vec<Range<u64>>> {
    let mut found = HashMap::<SpaceId, Vec<Range<u64>>>::new();
    if all.iter().all(|one| one.2 == all[0].2) {
        return found;
    }
    all.sort_unstable();
    // The furthest that any space, and any other than that one, reached so far.
    let mut reach: [Option<(u64, SpaceId)>; 2] = [None, None];
    for &(start, end, space) in &all {
        for (until, other) in reach.into_iter().flatten() {
            let common = start..end.min(until);
            if other != space && !common.is_empty() {
                found.entry(space).or_default().push(common.clone());
                found.entry(other).or_default().push(common);
            }
        }
        reach = furthest(reach, end, space);
    }
    found
}

/// The two spaces that reach the furthest, with what `space` reaches.
fn furthest(
    reach: [Option<(u64, SpaceId)>; 2],
    until: u64,
    space: SpaceId,
) -> [Option<(u64, SpaceId)>; 2] {
    let others = reach
        .into_iter()
        .flatten()
        .filter(|(_, other)| *other != space);
    let own = reach
        .into_iter()
        .flatten()
        .find(|(_, other)| *other == space);
    let new = (until, space);
    let own = own.map_or(new, |own| own.max(new));
    let mut all = others.chain([own]).collect::<Vec<_>>();
    all.sort_unstable_by_key(|(until, _)| std::cmp::Reverse(*until));
    let mut all = all.into_iter();
    [all.next(), all.next()]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use abi::Addr;
    use image::{Reader, Seal};

    use super::*;
    use crate::Source;

    /// Pages that are filled with a byte each; all spaces have the same memory.
    struct PatternPages(Vec<u8>);

    impl Source for PatternPages {
        fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> Result<()> {
            let pages = extents
                .iter()
                .flat_map(|extent| extent.at.page()..extent.at.page() + extent.pages);
            for (page, bytes) in pages.zip(buffer.chunks_mut(PAGE_BYTES)) {
                bytes.fill(self.0[page as usize]);
            }
            Ok(())
        }
    }

    /// `pages` pages of `space` from `first_page` on, that lie at page `at` of the source.
    fn extent(space: u32, first_page: u64, at: u64, pages: u64) -> Extent {
        Extent {
            space: SpaceId(space),
            first_page,
            at: Addr::of_page(at),
            pages,
        }
    }

    fn wanted(extents: &[Extent]) -> Vec<(u32, Range<u64>)> {
        let Some(equals) = EqualIndex::new(extents.iter(), []) else {
            return Vec::new();
        };
        let all = equals.wanted.into_iter();
        let mut all = all
            .flat_map(|(space, ranges)| ranges.into_iter().map(move |range| (space.0, range)))
            .collect::<Vec<_>>();
        all.sort_unstable_by_key(|(space, range)| (*space, range.start));
        all
    }

    #[test]
    fn pages_at_the_same_place_are_looked_at() {
        assert_eq!(wanted(&[extent(1, 0, 0, 9), extent(1, 5, 0, 9)]), []);
        assert_eq!(wanted(&[extent(1, 0, 0, 9), extent(2, 9, 0, 9)]), []);
        assert_eq!(
            wanted(&[
                extent(1, 10, 0, 100),
                extent(2, 20, 0, 10),
                extent(3, 25, 0, 10),
                extent(2, 105, 0, 10),
            ]),
            [
                (1, 20..35),
                (1, 105..110),
                (2, 20..30),
                (2, 105..110),
                (3, 25..35)
            ]
        );
    }

    /// Stores what two sources have; gives the reader, and how many pages were stored and equal.
    fn drain(sources: &[(&PatternPages, Vec<Extent>)]) -> (Reader, u64, u64) {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let all = sources.iter().flat_map(|(_, extents)| extents);
        let equals = EqualIndex::new(all, []);
        let sources = sources
            .iter()
            .map(|(source, extents)| (*source as &dyn Source, extents.as_slice()))
            .collect::<Vec<_>>();
        let how = crate::Drain {
            equals: equals.as_ref(),
            ..crate::Drain::default()
        };
        let drained = crate::drain_all(&sources, &writer, how).unwrap();
        writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(1).unwrap();
        (reader, drained.stored_pages, drained.equal_pages)
    }

    fn read(reader: &Reader, space: u32, first_page: u64, pages: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; pages * PAGE_BYTES];
        reader
            .read_pages(SpaceId(space), first_page, &mut bytes)
            .unwrap();
        let pages = bytes.chunks(PAGE_BYTES);
        assert!(
            pages
                .clone()
                .all(|page| page.iter().all(|byte| *byte == page[0]))
        );
        pages.map(|page| page[0]).collect()
    }

    #[test]
    fn equal_pages_of_one_chunk_are_stored_once() {
        let one = PatternPages(vec![1, 2, 0, 3, 4]);
        let other = PatternPages(vec![1, 9, 0, 3, 4]);
        let (reader, stored, equal) = drain(&[
            (&one, vec![extent(1, 100, 0, 5)]),
            (&other, vec![extent(2, 100, 0, 5)]),
        ]);
        assert_eq!((stored, equal), (5, 3));
        assert_eq!(read(&reader, 1, 100, 5), one.0);
        assert_eq!(read(&reader, 2, 100, 5), other.0);
        assert_eq!(reader.features(), ["equal"]);
        let chunk = |run: &Run| run.part().map(|part| part.chunk);
        let first = reader.runs(SpaceId(1)).next().unwrap();
        let equal = reader
            .runs(SpaceId(2))
            .filter(|run| chunk(run) == chunk(&first));
        // The last two are one run.
        assert_eq!(equal.map(|run| run.pages).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn equal_pages_far_apart_are_stored_once() {
        // Two megabytes of pages that differ from their neighbours, at one place in both.
        let fills = (0..512_u32)
            .map(|page| (page % 251) as u8 + 1)
            .collect::<Vec<_>>();
        let one = PatternPages(fills);
        let mut changed = one.0.clone();
        changed[300] = 255;
        let other = PatternPages(changed);
        let (reader, stored, equal) = drain(&[
            (&one, vec![extent(1, 0, 0, 512)]),
            (&other, vec![extent(2, 0, 0, 512)]),
        ]);
        assert_eq!((stored, equal), (252, 1024 - 252));
        assert_eq!(read(&reader, 1, 0, 512), one.0);
        assert_eq!(read(&reader, 2, 0, 512), other.0);
    }

    #[test]
    fn a_hash_alone_makes_no_page_equal() {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let run = |first_page| NewRun {
            space: SpaceId(1),
            first_page,
            pages: 1,
        };
        let stored = writer.store(0, &[1; PAGE_BYTES], &[run(0)]).unwrap();
        let equals = EqualIndex::new([].iter(), [(SpaceId(1), 0..9)]).unwrap();
        let other = [2; PAGE_BYTES];
        let mut known = equals.known();
        known.runs.push(stored[0]);
        known.pages.insert(xxh3_64(&other), (0, 0));
        drop(known);
        let plan = equals.plan(&writer, &other, &[run(1)]).unwrap().unwrap();
        assert_eq!(plan.fates, [Fate::Stored]);
    }

    #[test]
    fn what_is_not_wanted_is_not_looked_at() {
        let one = PatternPages(vec![1, 1, 1]);
        let (_, stored, equal) = drain(&[(&one, vec![extent(1, 0, 0, 3)])]);
        assert_eq!((stored, equal), (3, 0));
    }
}
