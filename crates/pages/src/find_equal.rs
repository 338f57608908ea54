//! Stores pages once that are stored already, several times: those of a live dump.
//!
//! While a live dump copies pages, they change, and are copied again; so which of them are equal is
//! known when all is over, and found out from what was written. That is no longer the tree's
//! business, which runs as if nothing had been. The room of pages that are equal to others goes
//! when the image is sealed.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use image::{NewRun, PAGE_BYTES, Run, Writer};

use crate::buffer::Buffer;
use crate::{EqualIndex, Error, Result, workers};

/// The most pages that one thread looks at together.
const BATCH_PAGES: u64 = 256;

/// Pages of which equal ones are stored once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EqualPages {
    /// All that there were, for [`Writer::describe`].
    pub runs: Vec<Run>,
    /// Those that are not stored any more, because others are equal.
    pub equal_pages: u64,
}

/// Finds out which pages of `stored`, runs that [`Writer::store`] returned, are equal to others
/// among them, as far as `equals` looks at them. Leaves the tasks, which run meanwhile, a
/// processor.
///
/// Calls `progress` with the number of bytes after each piece that was looked at, [`wanted_bytes`]
/// in all.
///
/// # Errors
/// [`Error::Image`].
pub fn find_equal(
    stored: Vec<Run>,
    equals: &EqualIndex,
    writer: &Writer,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<EqualPages> {
    let wanted = |run: &Run| is_wanted(run, equals);
    let (mut looked_at, others): (Vec<_>, Vec<_>) = stored.into_iter().partition(wanted);
    let all_bytes = looked_at.iter().map(Run::len_bytes).sum::<u64>();
    // What several spaces have at the same place is looked at together.
    looked_at.sort_unstable_by_key(|run| (run.first_page, run.space));
    let batches = batches(&looked_at);
    let longest = batches
        .iter()
        .map(|batch| bytes_of(&looked_at[batch.clone()]));
    let buffer_bytes = longest.max().unwrap_or(0);
    let found = Mutex::new(EqualPages {
        runs: others,
        equal_pages: 0,
    });
    workers::work(
        workers::threads_beside(all_bytes),
        batches.len(),
        |_| Buffer::new(buffer_bytes),
        |buffer, number| {
            let batch = &looked_at[batches[number].clone()];
            let bytes = &mut buffer.bytes()[..bytes_of(batch)];
            let runs = find_in_batch(batch, equals, writer, bytes)?;
            let (runs, equal_pages) = runs;
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.runs.extend(runs);
            found.equal_pages += equal_pages;
            drop(found);
            progress(bytes.len() as u64);
            Ok(())
        },
    )?;
    Ok(found.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// How many bytes of `stored` [`find_equal()`] looks at.
#[must_use]
pub fn wanted_bytes(stored: &[Run], equals: &EqualIndex) -> u64 {
    let wanted = stored.iter().filter(|run| is_wanted(run, equals));
    wanted.map(Run::len_bytes).sum()
}

fn is_wanted(run: &Run, equals: &EqualIndex) -> bool {
    run.part().is_some() && equals.wants(&place_of(run))
}

fn place_of(run: &Run) -> NewRun {
    NewRun {
        space: run.space,
        first_page: run.first_page,
        pages: run.pages,
    }
}

fn bytes_of(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.pages as usize * PAGE_BYTES).sum()
}

/// Puts runs together as long as there are not too many pages.
fn batches(runs: &[Run]) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let (mut first, mut pages) = (0, 0);
    for (number, run) in runs.iter().enumerate() {
        if pages + u64::from(run.pages) > BATCH_PAGES && first < number {
            batches.push(first..number);
            (first, pages) = (number, 0);
        }
        pages += u64::from(run.pages);
    }
    if first < runs.len() {
        batches.push(first..runs.len());
    }
    batches
}

/// Reads stored runs into `bytes`; returns the runs that are to take their places, and how many
/// pages are not stored any more.
fn find_in_batch(
    batch: &[Run],
    equals: &EqualIndex,
    writer: &Writer,
    bytes: &mut [u8],
) -> Result<(Vec<Run>, u64)> {
    let mut rest = &mut *bytes;
    for run in batch {
        let (own, after) = rest.split_at_mut(run.len_bytes() as usize);
        let read = writer.read_back(run, 0, own);
        read.map_err(Error::image("read"))?;
        rest = after;
    }
    let places = batch.iter().map(place_of).collect::<Vec<_>>();
    let Some(plan) = equals.plan(writer, bytes, &places)? else {
        return Ok((batch.to_vec(), 0));
    };
    let parts = batch.iter().zip(plan.kept(&places));
    let parts = parts.flat_map(|(run, kept)| {
        let parts = kept.into_iter();
        parts.map(|pages| run.cut(pages.start, pages.end - pages.start))
    });
    let mut runs = parts.collect::<Vec<_>>();
    let mut equal = plan.finish(equals, &runs);
    let equal_pages = equal.iter().map(|run| u64::from(run.pages)).sum();
    runs.append(&mut equal);
    Ok((runs, equal_pages))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use image::{Reader, Seal, SpaceId};
    use store::{Memory, Store};

    use super::*;

    struct Place {
        store: Arc<Memory>,
        writer: Writer,
        stored: Vec<Run>,
    }

    impl Place {
        fn new() -> Self {
            let store = Arc::new(Memory::default());
            let writer = Writer::create(store.clone()).unwrap();
            Self {
                store,
                writer,
                stored: Vec::new(),
            }
        }

        /// Stores pages filled with a number each, as runs of at most `most` pages, in object
        /// `part`.
        fn store(&mut self, part: usize, space: u32, first_page: u64, most: usize, fills: &[u32]) {
            let mut page = first_page;
            for fills in fills.chunks(most) {
                let bytes = fills.iter().flat_map(|fill| page_of(*fill));
                let run = NewRun {
                    space: SpaceId(space),
                    first_page: page,
                    pages: fills.len() as u32,
                };
                let bytes = bytes.collect::<Vec<_>>();
                let stored = self.writer.store(part, &bytes, &[run]).unwrap();
                self.stored.extend(stored);
                page += fills.len() as u64;
            }
        }

        /// Finds equal pages and seals; gives the reader, how many pages were equal, and the bytes
        /// of the pages objects.
        fn find_and_seal(self, more: &[(u32, Range<u64>)]) -> (Reader, u64, u64) {
            let more = more
                .iter()
                .map(|(space, pages)| (SpaceId(*space), pages.clone()));
            let equals = EqualIndex::of_runs(self.stored.iter(), more).expect("some are wanted");
            let wanted = wanted_bytes(&self.stored, &equals);
            let done_bytes = AtomicU64::new(0);
            let progress = |bytes| {
                done_bytes.fetch_add(bytes, Relaxed);
            };
            let found = find_equal(self.stored, &equals, &self.writer, &progress).unwrap();
            assert_eq!(done_bytes.into_inner(), wanted);
            self.writer.describe(found.runs);
            self.writer.seal(Seal::default()).unwrap();
            let reader = Reader::open(&*self.store).unwrap();
            reader.verify_all(1).unwrap();
            let names = self.store.list().unwrap().into_iter();
            let pages = names.filter(|name| name.starts_with("pages-"));
            let bytes = pages.map(|name| self.store.open(&name).unwrap().len_bytes());
            (reader, found.equal_pages, bytes.sum())
        }
    }

    /// A page of which every word is `fill`.
    fn page_of(fill: u32) -> impl Iterator<Item = u8> {
        std::iter::repeat_n(fill.to_le_bytes(), PAGE_BYTES / 4).flatten()
    }

    fn read(reader: &Reader, space: u32, first_page: u64, pages: usize) -> Vec<u32> {
        let mut bytes = vec![0xee; pages * PAGE_BYTES];
        reader
            .read_pages(SpaceId(space), first_page, &mut bytes)
            .unwrap();
        let pages = bytes.chunks(PAGE_BYTES).map(|page| {
            let fill = u32::from_le_bytes(page[..4].try_into().unwrap());
            assert!(page_of(fill).eq(page.iter().copied()));
            fill
        });
        pages.collect()
    }

    #[test]
    fn pages_of_three_spaces_are_stored_once_and_runs_cut() {
        let mut place = Place::new();
        let one = (1..=40).collect::<Vec<_>>();
        // The second has other pages at both ends of a run and in its middle, the third a run of
        // its own, and one that reaches further.
        let mut two = one.clone();
        for page in [0, 7, 15, 16, 33] {
            two[page] = 1000 + page as u32;
        }
        let mut three = two.clone();
        three[16..32].iter_mut().for_each(|fill| *fill += 2000);
        three.extend([7000, 7001]);
        for (space, fills) in [(1, &one), (2, &two), (3, &three)] {
            place.store(space as usize, space, 100, 16, fills);
        }
        let (reader, equal, bytes) = place.find_and_seal(&[]);
        let stored = 40 + 5 + 16 + 2;
        assert_eq!(equal, 40 + 40 + 42 - stored);
        assert_eq!(read(&reader, 1, 100, 40), one);
        assert_eq!(read(&reader, 2, 100, 40), two);
        assert_eq!(read(&reader, 3, 100, 42), three);
        // What does not fit into the room of others stays where it is.
        let pages = bytes / PAGE_BYTES as u64;
        assert!((stored..40 + 34 + 42).contains(&pages), "{pages}");
    }

    #[test]
    fn memory_larger_than_what_is_looked_at_together_is_stored_once() {
        const PAGES: u32 = 3000;
        let one = (0..PAGES).map(|page| page * 7 + 1).collect::<Vec<_>>();
        let mut two = one.clone();
        two[2999] = 9;
        for most in [16, 256] {
            let mut place = Place::new();
            place.store(0, 1, 0, 16, &one);
            place.store(0, 2, 0, 16, &two);
            place.store(0, 3, 0, most, &one);
            let (reader, equal, bytes) = place.find_and_seal(&[]);
            assert_eq!(equal, 2 * u64::from(PAGES) - 1);
            for (space, fills) in [(1, &one), (2, &two), (3, &one)] {
                assert_eq!(read(&reader, space, 0, PAGES as usize), *fills);
            }
            let stored_bytes = u64::from(PAGES + 1) * PAGE_BYTES as u64;
            assert!(
                (stored_bytes..stored_bytes + (1 << 20)).contains(&bytes),
                "{bytes}"
            );
        }
    }

    #[test]
    fn copies_at_other_places_are_found_and_others_are_not_looked_at() {
        let mut place = Place::new();
        place.store(0, 1, 10, 4, &[1, 2, 3, 4]);
        place.store(0, 2, 90, 4, &[4, 3, 2, 1]);
        place.store(0, 2, 200, 4, &[1, 2, 3, 4]);
        // Pages that are not stored are in the way of nobody.
        place.stored.push(Run {
            space: SpaceId(3),
            first_page: 0,
            pages: 500,
            kind: image::RunKind::Zero,
        });
        let (reader, equal, _) = place.find_and_seal(&[(1, 10..14), (2, 91..94)]);
        assert_eq!(equal, 3);
        assert_eq!(read(&reader, 1, 10, 4), [1, 2, 3, 4]);
        assert_eq!(read(&reader, 2, 90, 4), [4, 3, 2, 1]);
        assert_eq!(read(&reader, 2, 200, 4), [1, 2, 3, 4]);
    }

    #[test]
    fn nothing_equal_changes_nothing() {
        let mut place = Place::new();
        place.store(0, 1, 0, 16, &(1..50).collect::<Vec<_>>());
        place.store(0, 2, 0, 16, &(101..150).collect::<Vec<_>>());
        let before = place.stored.clone();
        let equals = EqualIndex::of_runs(before.iter(), []).unwrap();
        let mut found = find_equal(before.clone(), &equals, &place.writer, &|_| ()).unwrap();
        found.runs.sort_by_key(|run| (run.space, run.first_page));
        assert_eq!((found.runs, found.equal_pages), (before, 0));
    }
}
