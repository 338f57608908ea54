//! Before an image is sealed, room that its chunks do not use goes, as far as that is cheap: pages
//! that no run has leave their chunks, and chunks at the end of a pages object move into holes
//! before them. Then the object is as long as its chunks, and need have no holes.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::chunk::{CHUNK_MAX_PAGES, Chunk, ChunkId};
use crate::page::PAGE_BYTES;
use crate::table::{ChunkUsage, Table};
use crate::unused::{self, ObjectUsage};
use crate::{Result, Run, RunKind, Writer};

impl Writer {
    /// Takes pages that none of `runs` has out of chunks of which they have others.
    pub(crate) fn shrink(
        &self,
        table: &mut Table,
        uses: &ChunkUsage,
        runs: &mut [Run],
    ) -> Result<()> {
        let own = table.iter().filter(|(_, chunk)| !chunk.is_inherited());
        let some = own.filter_map(|(id, chunk)| Some((id, *chunk, uses.some_of(id, chunk)?)));
        let some = some.collect::<Vec<_>>();
        if some.is_empty() {
            return Ok(());
        }
        let mut masks = vec![None; table.len()];
        for (id, chunk, mask) in some {
            let mut pages = vec![0; chunk.len_bytes()];
            self.read_chunk(&chunk, &mut pages)?;
            let mut kept = 0;
            for page in (0..chunk.pages as usize).filter(|page| mask >> page & 1 == 1) {
                let at = page * PAGE_BYTES;
                pages.copy_within(at..at + PAGE_BYTES, kept);
                kept += PAGE_BYTES;
            }
            if let Some(chunk) = self.store_in(&chunk, &pages[..kept])? {
                table.set(id, chunk);
                masks[id.0 as usize] = Some(mask);
            }
        }
        for run in runs {
            if let RunKind::Part(part) = &mut run.kind
                && let Some(mask) = masks[part.chunk.0 as usize]
            {
                let before = mask & ((1_u32 << part.skip_pages) - 1) as u16;
                part.skip_pages = before.count_ones();
            }
        }
        Ok(())
    }

    /// Moves chunks from the ends of the pages objects. Nothing is stored any more.
    pub(crate) fn compact(&self, table: &mut Table, uses: &ChunkUsage) -> Result<()> {
        let used = table.iter().filter(|(id, _)| uses.is_used(*id));
        let own = used.filter(|(_, chunk)| !chunk.is_inherited());
        let mut own = own.map(|(id, chunk)| (id, *chunk)).collect::<Vec<_>>();
        let own_bytes = own.iter().map(|(_, chunk)| u64::from(chunk.stored_bytes));
        if own_bytes.sum::<u64>() >= self.given_bytes() {
            return Ok(());
        }
        // Mostly sorted already; the stable sort knows how to use that.
        own.sort_by_key(|(_, chunk)| chunk.position());
        let mut bytes = Vec::new();
        for (id, chunk, to_bytes) in plan(&own) {
            let from_bytes = chunk.offset_bytes;
            bytes.resize(chunk.stored_bytes as usize, 0);
            self.read_stored(&chunk, &mut bytes)?;
            let moved = Chunk {
                offset_bytes: to_bytes,
                ..chunk
            };
            debug_assert!(to_bytes < from_bytes, "towards the start");
            self.write_stored(&moved, &bytes)?;
            table.set(id, moved);
        }
        Ok(())
    }
}

/// Which chunks move where in their pages objects, in that order.
fn plan(own: &[(ChunkId, Chunk)]) -> Vec<(ChunkId, Chunk, u64)> {
    let objects = own.chunk_by(|one, other| one.1.object == other.1.object);
    let moves = objects.flat_map(|chunks| {
        if chunks.iter().all(|(_, chunk)| chunk.is_plain()) {
            fill_holes(chunks)
        } else {
            close_up(chunks)
        }
    });
    moves.collect()
}

/// Finds holes for the last chunks of a pages object, until there is none that is large enough.
fn fill_holes(chunks: &[(ChunkId, Chunk)]) -> Vec<(ChunkId, Chunk, u64)> {
    let mut moves = Vec::new();
    let used = unused::used(chunks.iter().map(|(_, chunk)| chunk));
    let mut free = Holes::default();
    for ObjectUsage { holes, .. } in used {
        holes.into_iter().for_each(|hole| free.add(hole));
    }
    for (id, chunk) in chunks.iter().rev() {
        let Some(to_bytes) = free.take(chunk.stored_bytes.into(), chunk.offset_bytes) else {
            break;
        };
        moves.push((*id, *chunk, to_bytes));
    }
    moves
}

/// Moves each chunk to where the one before it ends: those that are encoded fit into no hole.
fn close_up(chunks: &[(ChunkId, Chunk)]) -> Vec<(ChunkId, Chunk, u64)> {
    let mut end_bytes = 0_u64;
    let mut moves = Vec::new();
    for (id, chunk) in chunks {
        let to_bytes = match chunk.is_plain() {
            true => end_bytes.next_multiple_of(PAGE_BYTES as u64),
            false => end_bytes,
        };
        if to_bytes < chunk.offset_bytes {
            moves.push((*id, *chunk, to_bytes));
        }
        end_bytes = to_bytes.min(chunk.offset_bytes) + u64::from(chunk.stored_bytes);
    }
    moves
}

/// Holes of a pages object by their pages, less one: the ends by the starts. Into the last of them
/// every chunk fits.
struct Holes([BTreeMap<u64, u64>; CHUNK_MAX_PAGES as usize]);

impl Default for Holes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| BTreeMap::new()))
    }
}

impl Holes {
    fn add(&mut self, hole: Range<u64>) {
        let pages = (hole.end - hole.start) as usize / PAGE_BYTES;
        if pages > 0 {
            self.0[pages.min(self.0.len()) - 1].insert(hole.start, hole.end);
        }
    }

    /// Takes the first hole for a chunk from those before `end_bytes`, where the chunk is.
    fn take(&mut self, stored_bytes: u64, end_bytes: u64) -> Option<u64> {
        let least = (stored_bytes as usize / PAGE_BYTES).checked_sub(1)?;
        let large = self.0.get_mut(least..)?.iter_mut();
        let first = large.min_by_key(|holes| holes.keys().next().copied().unwrap_or(u64::MAX))?;
        let hole = first.first_entry().filter(|hole| *hole.key() < end_bytes)?;
        let (start, end) = hole.remove_entry();
        self.add(start + stored_bytes..end);
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use store::{Memory, Store};

    use super::*;
    use crate::chunk::testing::plain;
    use crate::{NewRun, PAGE_BYTES, Reader, Seal, SpaceId};

    const PAGE: u64 = PAGE_BYTES as u64;

    fn moves(chunks: &[Chunk]) -> Vec<(u64, u64)> {
        let mut own = (0..)
            .map(ChunkId)
            .zip(chunks.iter().copied())
            .collect::<Vec<_>>();
        own.sort_by_key(|(_, chunk)| chunk.position());
        let moves = plan(&own).into_iter();
        let mut moves = moves
            .map(|(_, chunk, to)| (chunk.offset_bytes / PAGE, to / PAGE))
            .collect::<Vec<_>>();
        moves.sort_unstable();
        moves
    }

    #[test]
    fn the_last_chunks_move_into_the_first_hole() {
        assert_eq!(moves(&[plain(0, 0, 2), plain(0, 2, 3)]), []);
        assert_eq!(moves(&[plain(0, 3, 3)]), [(3, 0)]);
        // Holes of one page and of four: the last fits in both, the one before in the second, and
        // then there is none.
        let chunks = [
            plain(0, 1, 3),
            plain(0, 8, 9),
            plain(0, 17, 3),
            plain(0, 20, 1),
        ];
        assert_eq!(moves(&chunks), [(17, 4), (20, 0)]);
        // A large hole is for many.
        let chunks = [plain(0, 1000, 256), plain(0, 1256, 2), plain(0, 1258, 100)];
        assert_eq!(moves(&chunks), [(1000, 102), (1256, 100), (1258, 0)]);
        // A chunk moves into no other object, and to no place behind it.
        assert_eq!(moves(&[plain(0, 1, 2), plain(2, 0, 1), plain(2, 3, 3)]), []);
        assert_eq!(moves(&[plain(2, 2, 1), plain(2, 1, 1)]), [(2, 0)]);
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
            let equal = third.equal(SpaceId(2), page, 1, 1);
            let another = last.equal(SpaceId(2), page + 1, 1, 0);
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
                    let equal = stored[0].pages.min(rest);
                    let equal = equal.min(stored[0].pages.saturating_sub(skip as u32));
                    if equal > 0 {
                        let space = SpaceId(2);
                        let equal = stored[0].equal(space, number * 100, equal, skip as u32);
                        writer.describe([equal]);
                        expected.push((2, number * 100, number * 7 + skip, equal.pages.into()));
                    }
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
