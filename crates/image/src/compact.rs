//! Pages at the end of a pages object move into room before them that no page uses: then the object
//! is as long as its pages, and need have no holes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use crate::parts::{self, PARTS_MAX};
use crate::run::{DATA_RUN_MAX_PAGES, PAGE_BYTES};
use crate::unused::{self, Used};
use crate::{Error, Result, Run, RunKind, Writer};

/// Where runs move to, by where they were.
type Moves = HashMap<u64, u64>;

impl Writer {
    /// Moves pages from the ends of the pages objects. Nothing is stored or described any more.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub(crate) fn compact(&mut self) -> Result<()> {
        let runs = self.runs.get_mut().unwrap_or_else(PoisonError::into_inner);
        let origins = self.origins.get_mut();
        let origins = origins.unwrap_or_else(PoisonError::into_inner);
        let stored = runs
            .iter()
            .filter_map(|run| Some((run.stored_at()?, run.pages)));
        let stored_bytes = stored
            .clone()
            .map(|(_, pages)| u64::from(pages) * PAGE_BYTES as u64);
        let parts_bytes = self.parts.iter().filter_map(|part| part.get());
        let parts_bytes = parts_bytes.map(|part| part.bytes.load(Relaxed));
        if stored_bytes.sum::<u64>() >= parts_bytes.sum() {
            return Ok(());
        }
        let stored = stored.collect::<HashMap<_, _>>();
        let is_own = |(position, _): &(u64, u32)| parts::split(*position).0 < PARTS_MAX;
        let is_whole = |(position, pages): (u64, u32)| stored.get(&position) == Some(&pages);
        if !origins.places().filter(is_own).all(is_whole) {
            // It is not for this to find out what is wrong with it.
            return Ok(());
        }
        let moves = plan(runs);
        let mut bytes = Vec::new();
        for run in runs.iter_mut() {
            let run_bytes = run.len_bytes();
            let RunKind::Data { offset_bytes, .. } = &mut run.kind else {
                continue;
            };
            let Some(to) = moves.get(offset_bytes) else {
                continue;
            };
            bytes.resize(run_bytes as usize, 0);
            let (part, from_bytes) = parts::split(*offset_bytes);
            let part = self.parts[part].get().expect("an object with a run");
            let read = part.object.read_at(&mut bytes, from_bytes);
            read.map_err(Error::store("read pages of"))?;
            let written = part.object.write_at(&bytes, parts::split(*to).1);
            written.map_err(Error::store("write pages of"))?;
            *offset_bytes = *to;
        }
        origins.follow(&|position| moves.get(&position).copied());
        Ok(())
    }
}

/// Finds room for the last runs of each pages object, until there is none that is large enough.
fn plan(runs: &[Run]) -> Moves {
    let mut places = runs
        .iter()
        .filter_map(|run| Some((run.stored_at()?, run.len_bytes())))
        .collect::<Vec<_>>();
    places.sort();
    let mut moves = Moves::new();
    for (part, Used { holes, .. }) in unused::used(runs.iter()).iter().enumerate() {
        let mut rooms = Rooms::default();
        holes.iter().for_each(|hole| rooms.add(hole.clone()));
        let first = places.partition_point(|place| parts::split(place.0).0 < part);
        let end = places.partition_point(|place| parts::split(place.0).0 <= part);
        for (from, bytes) in places[first..end].iter().rev() {
            let (_, from_bytes) = parts::split(*from);
            let Some(to_bytes) = rooms.take(*bytes, from_bytes) else {
                break;
            };
            moves.insert(*from, parts::position(part, to_bytes));
        }
    }
    moves
}

/// Room of a pages object that nothing uses, by its pages, less one: the ends by the starts. The
/// last is that in which every run finds room.
struct Rooms([BTreeMap<u64, u64>; DATA_RUN_MAX_PAGES as usize]);

impl Default for Rooms {
    fn default() -> Self {
        Self(std::array::from_fn(|_| BTreeMap::new()))
    }
}

impl Rooms {
    fn add(&mut self, room: Range<u64>) {
        let pages = (room.end - room.start) as usize / PAGE_BYTES;
        if pages > 0 {
            self.0[pages.min(self.0.len()) - 1].insert(room.start, room.end);
        }
    }

    /// Takes the first room for a run from those before `end_bytes`, where the run is.
    fn take(&mut self, run_bytes: u64, end_bytes: u64) -> Option<u64> {
        let least = (run_bytes as usize / PAGE_BYTES).checked_sub(1)?;
        let large = self.0.get_mut(least..)?.iter_mut();
        let first = large.min_by_key(|rooms| rooms.keys().next().copied().unwrap_or(u64::MAX))?;
        let room = first.first_entry().filter(|room| *room.key() < end_bytes)?;
        let (start, end) = room.remove_entry();
        self.add(start + run_bytes..end);
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use store::{Memory, Store};

    use super::*;
    use crate::unused::testing::data;
    use crate::{NewRun, PAGE_BYTES, Reader, Seal, SpaceId};

    const PAGE: u64 = PAGE_BYTES as u64;

    fn moves(runs: &[Run]) -> Vec<(u64, u64)> {
        let moves = plan(runs).into_iter();
        let mut moves = moves
            .map(|(from, to)| (from / PAGE, to / PAGE))
            .collect::<Vec<_>>();
        moves.sort_unstable();
        moves
    }

    #[test]
    fn the_last_runs_move_into_the_first_room() {
        assert_eq!(moves(&[data(0, 0, 2), data(0, 2, 3)]), []);
        assert_eq!(moves(&[data(0, 3, 3)]), [(3, 0)]);
        // Room of one page and of four: the last fits in both, the one before in the second, and
        // then there is none.
        let runs = [data(0, 1, 3), data(0, 8, 9), data(0, 17, 3), data(0, 20, 1)];
        assert_eq!(moves(&runs), [(17, 4), (20, 0)]);
        // Large room is for many.
        let runs = [data(0, 1000, 256), data(0, 1256, 2), data(0, 1258, 100)];
        assert_eq!(moves(&runs), [(1000, 102), (1256, 100), (1258, 0)]);
        // A run moves into no other object, and to no place behind it.
        assert_eq!(moves(&[data(0, 1, 2), data(2, 0, 1), data(2, 3, 3)]), []);
        let far = parts::position(2, 0) / PAGE;
        assert_eq!(moves(&[data(2, 2, 1), data(2, 1, 1)]), [(far + 2, far)]);
    }

    #[test]
    fn pages_that_moved_are_read_and_so_are_their_equals() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let put = |part, first_page, fills: &[u8]| {
            let bytes = fills.iter().flat_map(|fill| [*fill; PAGE_BYTES]);
            let run = NewRun {
                space: SpaceId(1),
                first_page,
                pages: fills.len() as u32,
            };
            writer
                .store(part, &bytes.collect::<Vec<_>>(), &[run])
                .unwrap()[0]
        };
        for part in [0, 3] {
            let page = part as u64 * 100;
            let first = put(part, page, &[1, 2]);
            put(part, page, &[9, 9, 9]);
            let third = put(part, page + 10, &[3, 4]);
            put(part, page, &[9]);
            let last = put(part, page + 20, &[5]);
            let equal = writer.equal(SpaceId(2), page, 1, &third, 1).unwrap();
            let another = writer.equal(SpaceId(2), page + 1, 1, &last, 0).unwrap();
            writer.describe([first, third, last, equal, another]);
        }
        let id = writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(1).unwrap();
        assert_eq!(reader.features(), ["parts", "equal"]);
        for part in [0, 3] {
            let object = store.open(&id.pages_part_name(part)).unwrap();
            assert_eq!(object.len_bytes(), 5 * PAGE);
            let page = part as u64 * 100;
            let expected = [(1, 0, 1), (1, 1, 2), (1, 10, 3), (1, 11, 4), (1, 20, 5)];
            for (space, at, fill) in expected.into_iter().chain([(2, 0, 4), (2, 1, 5)]) {
                let mut bytes = [0; PAGE_BYTES];
                let read = reader.read_pages(SpaceId(space), page + at, &mut bytes);
                read.unwrap();
                assert_eq!(bytes, [fill; PAGE_BYTES]);
            }
        }
    }

    #[test]
    fn whatever_is_described_is_read() {
        let fill = |number: u64| (number % 251) as u8 + 1;
        let mut state = 1_u64;
        let mut below = |end: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % end
        };
        for _ in 0..100 {
            let store = Arc::new(Memory::default());
            let writer = Writer::create(store.clone()).unwrap();
            let mut expected = Vec::new();
            for number in 0..below(40) {
                let pages = 1 + below(20);
                let bytes = (0..pages).flat_map(|page| [fill(number * 7 + page); PAGE_BYTES]);
                let run = NewRun {
                    space: SpaceId(1),
                    first_page: number * 100,
                    pages: pages as u32,
                };
                let stored = writer.store(below(2) as usize, &bytes.collect::<Vec<_>>(), &[run]);
                if below(2) == 0 {
                    continue;
                }
                let stored = stored.unwrap();
                writer.describe(stored.iter().copied());
                expected.push((1, number * 100, number * 7, pages));
                if below(2) == 0 {
                    let skip = below(pages);
                    let rest = (pages - skip) as u32;
                    let equal =
                        writer.equal(SpaceId(2), number * 100, rest, &stored[0], skip as u32);
                    writer.describe([equal.unwrap()]);
                    expected.push((2, number * 100, number * 7 + skip, pages - skip));
                }
            }
            writer.seal(Seal::default()).unwrap();
            let reader = Reader::open(&*store).unwrap();
            reader.verify_all(1).unwrap();
            for (space, first_page, first, pages) in expected {
                let mut bytes = vec![0; pages as usize * PAGE_BYTES];
                reader
                    .read_pages(SpaceId(space), first_page, &mut bytes)
                    .unwrap();
                for (page, bytes) in bytes.chunks(PAGE_BYTES).enumerate() {
                    assert_eq!(bytes, [fill(first + page as u64); PAGE_BYTES]);
                }
            }
        }
    }
}
