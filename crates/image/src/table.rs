//! The table of chunks as a writer collects it.

use crate::chunk::{CHUNKS_MAX, Chunk, ChunkId};
use crate::parts;
use crate::{Error, Result, Run, RunKind};

/// Chunks in the order in which they were stored or found. Those of other images may stand there
/// several times, until they are sorted.
#[derive(Default)]
pub(crate) struct Table(Vec<Chunk>);

impl Table {
    /// Adds chunks; returns the number of the first.
    pub fn add(&mut self, chunks: &[Chunk]) -> Result<ChunkId> {
        let first = self.0.len();
        if (first + chunks.len()) as u64 > CHUNKS_MAX {
            return Err(too_many());
        }
        self.0.extend_from_slice(chunks);
        Ok(ChunkId(first as u32))
    }

    /// Adds a chunk of another image, unless it is the one that was added last: parts of one are
    /// found one after the other, but for a few.
    pub fn add_inherited(&mut self, chunk: Chunk) -> Result<ChunkId> {
        match self.0.last() {
            Some(last) if *last == chunk => Ok(ChunkId(self.0.len() as u32 - 1)),
            _ => self.add(&[chunk]),
        }
    }

    /// The chunk with this number.
    pub fn get(&self, id: ChunkId) -> Chunk {
        self.0[id.0 as usize]
    }

    /// Says that a chunk is another now.
    pub fn set(&mut self, id: ChunkId, chunk: Chunk) {
        self.0[id.0 as usize] = chunk;
    }

    /// All chunks with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (ChunkId, &Chunk)> {
        (0..).map(ChunkId).zip(&self.0)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The numbers of the pages objects that used chunks lie in, sorted.
    pub fn objects(&self, uses: &ChunkUsage) -> Vec<usize> {
        let used = self.iter().filter(|(id, _)| uses.is_used(*id));
        let mut objects: Vec<usize> = used.map(|(_, chunk)| chunk.object as usize).collect();
        objects.sort_unstable();
        objects.dedup();
        objects
    }

    /// Sorts the used chunks by place, each once, with the pages objects numbered anew, and gives
    /// `runs` their new numbers.
    pub fn sorted(
        self,
        uses: &ChunkUsage,
        renumber: &dyn Fn(usize) -> usize,
        runs: &mut [Run],
    ) -> Vec<Chunk> {
        let mut new = vec![u32::MAX; self.0.len()];
        let used = (0..)
            .zip(self.0)
            .filter(|(id, _)| uses.is_used(ChunkId(*id)));
        let mut all: Vec<(u64, u32, Chunk)> = used
            .map(|(id, chunk)| {
                let object = renumber(chunk.object as usize) as u32;
                let chunk = Chunk { object, ..chunk };
                (chunk.position(), id, chunk)
            })
            .collect();
        // They were found in ascending order, of each pages object: that sort makes use of it.
        all.sort_by_key(|(position, id, _)| (*position, *id));
        let mut sorted: Vec<Chunk> = Vec::with_capacity(all.len());
        for (_, id, chunk) in all {
            if sorted.last() != Some(&chunk) {
                sorted.push(chunk);
            }
            new[id as usize] = sorted.len() as u32 - 1;
        }
        for run in runs {
            if let RunKind::Part(part) = &mut run.kind {
                part.chunk = ChunkId(new[part.chunk.0 as usize]);
            }
        }
        sorted
    }
}

fn too_many() -> Error {
    Error::TooLarge {
        of: "chunks",
        limit: CHUNKS_MAX,
    }
}

/// Which pages of which chunks runs are: a bit for each of the first 16 of a chunk, which are all
/// of one that a writer makes.
pub(crate) struct ChunkUsage {
    masks: Vec<u16>,
    /// True if some of the image's own are used several times.
    pub is_shared: bool,
}

impl ChunkUsage {
    /// Finds out what `runs` use of the chunks of `table`.
    pub fn new(table: &Table, runs: &[Run]) -> Self {
        let mut uses = Self {
            masks: vec![0; table.len()],
            is_shared: false,
        };
        for run in runs {
            let Some(part) = run.part() else {
                continue;
            };
            let mask = &mut uses.masks[part.chunk.0 as usize];
            if table.get(part.chunk).is_inherited() {
                *mask = u16::MAX;
                continue;
            }
            let bits = bits(part.skip_pages, run.pages);
            uses.is_shared |= *mask & bits != 0;
            *mask |= bits;
        }
        uses
    }

    pub fn is_used(&self, id: ChunkId) -> bool {
        self.masks[id.0 as usize] != 0
    }

    /// The pages of one of the image's own chunks that are used; none if all are.
    pub fn some_of(&self, id: ChunkId, chunk: &Chunk) -> Option<u16> {
        let mask = self.masks[id.0 as usize];
        (mask != 0 && mask != bits(0, chunk.pages)).then_some(mask)
    }
}

/// The bits of pages after some others.
fn bits(skip_pages: u32, pages: u32) -> u16 {
    let below = |pages: u32| ((1_u64 << pages.min(16)) - 1) as u16;
    below(skip_pages.saturating_add(pages)) & !below(skip_pages)
}

/// Which pages objects belong to ancestors, by those ancestors' numbers.
pub(crate) fn ancestors(objects: &[usize]) -> Vec<usize> {
    let inherited = objects.iter().filter_map(|object| parts::owner(*object).0);
    let mut ancestors: Vec<usize> = inherited.collect();
    ancestors.dedup();
    ancestors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::testing::plain;
    use crate::{Part, SpaceId};

    fn run(chunk: u32, skip_pages: u32, pages: u32) -> Run {
        let chunk = ChunkId(chunk);
        Run {
            space: SpaceId(1),
            first_page: 0,
            pages,
            kind: RunKind::Part(Part { chunk, skip_pages }),
        }
    }

    #[test]
    fn used_chunks_are_sorted_and_numbered_anew() {
        let mut table = Table::default();
        let own = [plain(1, 4, 2), plain(0, 0, 3), plain(1, 0, 4)];
        assert_eq!(table.add(&own).unwrap(), ChunkId(0));
        let inherited = plain(35, 7, 9);
        let added = [inherited, inherited, plain(19, 0, 1), inherited]
            .map(|inherited| table.add_inherited(inherited).unwrap().0);
        assert_eq!(added, [3, 3, 4, 5]);
        let mut runs = [run(0, 0, 2), run(2, 1, 2), run(3, 8, 1), run(5, 0, 2)];
        let uses = ChunkUsage::new(&table, &runs);
        assert!(!uses.is_used(ChunkId(1)) && !uses.is_used(ChunkId(4)));
        assert_eq!(uses.some_of(ChunkId(0), &own[0]), None);
        assert_eq!(uses.some_of(ChunkId(2), &own[2]), Some(0b110));
        let objects = table.objects(&uses);
        assert_eq!((&objects[..], ancestors(&objects)), (&[1, 35][..], vec![1]));
        let sorted = table.sorted(&uses, &|object| object % 16, &mut runs);
        let inherited = Chunk {
            object: 3,
            ..inherited
        };
        assert_eq!(sorted, [own[2], own[0], inherited]);
        let numbers = runs.map(|run| run.part().unwrap().chunk.0);
        assert_eq!(numbers, [1, 0, 2, 2]);
    }

    #[test]
    fn pages_that_are_used_twice_are_seen() {
        let mut table = Table::default();
        table.add(&[plain(0, 0, 16), plain(16, 0, 256)]).unwrap();
        let uses = |runs: &[Run]| ChunkUsage::new(&table, runs).is_shared;
        assert!(!uses(&[
            run(0, 0, 8),
            run(0, 8, 8),
            run(1, 0, 9),
            run(1, 0, 9)
        ]));
        assert!(uses(&[run(0, 0, 9), run(0, 8, 8)]));
        assert_eq!(bits(0, 16), u16::MAX);
        assert_eq!((bits(15, 1), bits(3, u32::MAX)), (1 << 15, !7));
    }
}
