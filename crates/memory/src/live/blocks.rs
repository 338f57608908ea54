//! What is known of the blocks of a task: 16 pages each.
use std::collections::{BTreeMap, BTreeSet};

use abi::{Addr, PAGE_BYTES, Span};
use image::{CHUNK_PAGES, ChunkId, Run, SpaceId};

use abi::spans::Spans;

/// Pages of a block: what a write makes stale, and is a chunk of the image.
pub const BLOCK_PAGES: u64 = CHUNK_PAGES as u64;
pub const BLOCK_BYTES: u64 = BLOCK_PAGES * PAGE_BYTES;

/// The number of the block that holds an address.
pub const fn block_of(addr: Addr) -> u64 {
    addr.0 / BLOCK_BYTES
}

/// The addresses of a block.
pub const fn span_of(block: u64) -> Span {
    Span::new(Addr(block * BLOCK_BYTES), BLOCK_BYTES)
}

/// State of a block's contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// In the task only.
    Stale,
    /// The very pages of the same addresses in another space, which are copied there.
    Common(SpaceId),
    /// On the way into the image: being read from the task.
    Copying,
    /// On the way into the image: in memory of ours.
    Saved,
    /// In the image, as these runs of one chunk; pages without one are zero.
    Done(Vec<Run>),
}

/// A chunk of an earlier copy, which may hold as many other pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OldChunk {
    pub id: ChunkId,
    pub pages: u64,
}

#[derive(Debug)]
pub struct Block {
    /// A bit for each page that there is.
    pub mask: u16,
    pub state: State,
    /// That of its earlier copy.
    pub old_chunk: Option<OldChunk>,
}

/// The blocks of a task that have pages.
#[derive(Debug, Default)]
pub struct Blocks {
    map: BTreeMap<u64, Block>,
    stale: BTreeSet<u64>,
    /// Blocks found unprotected, if that is watched, in the order of time.
    renewed: Option<Vec<u64>>,
    /// Old chunks that no block has any more, by their pages.
    free: BTreeMap<u64, Vec<ChunkId>>,
}

impl Blocks {
    pub fn get(&self, block: u64) -> Option<&Block> {
        self.map.get(&block)
    }

    pub fn state(&self, block: u64) -> Option<&State> {
        self.map.get(&block).map(|block| &block.state)
    }

    /// The blocks from a number on.
    pub fn from(&self, first: u64) -> impl Iterator<Item = (u64, &Block)> {
        let range = self.map.range(first..);
        range.map(|(number, block)| (*number, block))
    }

    /// The stale blocks of `span`, the first `most` of them.
    pub fn stale_in(&self, span: Span, most: usize) -> Vec<u64> {
        let first = block_of(span.start);
        let end = span.end.0.div_ceil(BLOCK_BYTES);
        let range = self.stale.range(first..end.max(first));
        range.take(most).copied().collect()
    }

    /// Cuts a span as [`cut_around`] does, around its blocks.
    pub fn pieces(&self, span: Span, bytes: u64) -> Vec<(Span, bool)> {
        let end = span.end.0.div_ceil(BLOCK_BYTES);
        cut_around(span, bytes, |from| {
            let mut rest = self.map.range(block_of(from)..end);
            rest.next().map(|(number, _)| span_of(*number).start)
        })
    }

    /// Tells whether every page of `span` is there.
    pub fn has_all(&self, span: Span) -> bool {
        let end = span.end.0.div_ceil(BLOCK_BYTES);
        let mut next = block_of(span.start);
        let all = self.map.range(next..end).all(|(number, block)| {
            let follows = *number == std::mem::replace(&mut next, number + 1);
            follows && bits_of(*number, span) & !block.mask == 0
        });
        all && next == end
    }

    /// Notes from now on which blocks are found unprotected. Returns how many have been so far.
    pub fn watch(&mut self) -> usize {
        self.renewed.get_or_insert_default().len()
    }

    /// The blocks found unprotected after the first `seen`, some of them several times.
    pub fn renewed(&self, seen: usize) -> &[u64] {
        self.renewed.as_ref().map_or(&[], |all| &all[seen..])
    }

    /// The pages of stale blocks in sorted `areas`.
    pub fn stale_spans(&self, areas: &[Span]) -> Spans {
        let mut spans = Spans::new();
        for area in areas {
            for number in self.stale_in(*area, usize::MAX) {
                let mask = self.map[&number].mask & bits_of(number, *area);
                spans_of(number, mask).for_each(|span| spans.push(span));
            }
        }
        spans
    }

    /// The blocks that are another space's.
    pub fn common(&self) -> Vec<u64> {
        let common = self.map.iter();
        let common = common.filter(|(_, block)| matches!(block.state, State::Common(_)));
        common.map(|(number, _)| *number).collect()
    }

    /// Makes a block stale that was another space's.
    pub fn unshare(&mut self, number: u64) {
        if matches!(self.state(number), Some(State::Common(_))) {
            self.set(number, State::Stale);
        }
    }

    pub fn stale_bytes(&self) -> u64 {
        self.stale.len() as u64 * BLOCK_BYTES
    }

    /// Says that of the pages of `span`, whatever was known, exactly `present` are there now, and
    /// that their contents may be others. `present` is sorted and inside of `span`.
    pub fn renew(&mut self, span: Span, present: &[Span]) {
        if span.is_empty() {
            return;
        }
        let numbers = self.known_or_in(span, present);
        let mut present = present.iter().copied().peekable();
        for number in numbers {
            let place = span_of(number);
            let bits = bits_of(number, span);
            let mut there = 0;
            while let Some(next) = present.peek().filter(|next| next.start < place.end) {
                there |= bits_of(number, *next);
                if next.end > place.end {
                    break;
                }
                present.next();
            }
            let block = self.map.entry(number).or_insert(Block {
                mask: 0,
                state: State::Stale,
                old_chunk: None,
            });
            if let Some(renewed) = &mut self.renewed {
                renewed.push(number);
            }
            block.mask = block.mask & !bits | there & bits;
            if block.mask == 0 {
                self.remove(number);
            } else {
                self.set(number, State::Stale);
            }
        }
    }

    /// Forgets pages of stale blocks that are in none of the sorted `areas`, where nothing is
    /// protected again.
    pub fn forget_outside(&mut self, areas: &[Span]) {
        const LAST: Addr = Addr::of_page(u64::MAX / PAGE_BYTES);
        let starts = areas.iter().map(|area| area.start).chain([LAST]);
        let ends = [Addr(0)]
            .into_iter()
            .chain(areas.iter().map(|area| area.end));
        for (start, end) in ends.zip(starts) {
            let gap = Span { start, end };
            for number in self.stale_in(gap, usize::MAX) {
                let block = self.map.get_mut(&number).expect("a stale block is known");
                block.mask &= !bits_of(number, gap);
                if block.mask == 0 {
                    self.remove(number);
                }
            }
        }
    }

    /// The blocks of `span` that are known, and those of `present`, in order. A program may keep
    /// terabytes of addresses for a few pages.
    fn known_or_in(&self, span: Span, present: &[Span]) -> Vec<u64> {
        let of = |span: &Span| block_of(span.start)..span.end.0.div_ceil(BLOCK_BYTES);
        let known = self.map.range(of(&span)).map(|(number, _)| *number);
        let mut numbers: Vec<u64> = known.chain(present.iter().flat_map(of)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    fn remove(&mut self, number: u64) {
        self.stale.remove(&number);
        if let Some(chunk) = self.map.remove(&number).and_then(|block| block.old_chunk) {
            self.free(chunk);
        }
    }

    /// Changes a block's state; one that is not there stays so.
    pub fn set(&mut self, number: u64, state: State) {
        let Some(block) = self.map.get_mut(&number) else {
            return;
        };
        if state == State::Stale {
            self.stale.insert(number);
        } else {
            self.stale.remove(&number);
        }
        block.state = state;
    }

    /// Finds a chunk for `pages` of a block: its own old one, or a free one.
    pub fn take_chunk(&mut self, number: u64, pages: u64) -> Option<OldChunk> {
        let own = self
            .map
            .get_mut(&number)
            .and_then(|block| block.old_chunk.take());
        match own {
            Some(chunk) if chunk.pages == pages => return Some(chunk),
            Some(chunk) => self.free(chunk),
            None => {}
        }
        let id = self.free.get_mut(&pages)?.pop()?;
        Some(OldChunk { id, pages })
    }

    pub fn free(&mut self, chunk: OldChunk) {
        self.free.entry(chunk.pages).or_default().push(chunk.id);
    }

    /// Says where the contents of a block are in the image.
    pub fn done(&mut self, number: u64, runs: Vec<Run>, old_chunk: Option<OldChunk>) {
        match self.map.get_mut(&number) {
            Some(block) => block.old_chunk = old_chunk,
            None => old_chunk.into_iter().for_each(|chunk| self.free(chunk)),
        }
        self.set(number, State::Done(runs));
    }

    /// Tells whether pages of `span` are only in the task.
    pub fn would_lose(&self, span: Span) -> bool {
        let last = span.end.0.div_ceil(BLOCK_BYTES);
        let mut range = self
            .map
            .range(block_of(span.start)..last.max(block_of(span.start)));
        range.any(|(number, block)| {
            let open = matches!(block.state, State::Stale | State::Copying);
            open && block.mask & bits_of(*number, span) != 0
        })
    }
}

/// Cuts a span where addresses are multiples of `bytes`: gives each such piece that has pages, and
/// what is between them as a whole, each with whether it has some. `next` tells where the next
/// pages from an address on are. A program may keep terabytes of addresses for a few pages.
pub fn cut_around(
    span: Span,
    bytes: u64,
    next: impl Fn(Addr) -> Option<Addr>,
) -> Vec<(Span, bool)> {
    let mut pieces = Vec::new();
    let mut start = span.start;
    while start < span.end {
        let with_pages = next(start).map_or(span.end.0, |at| at.0 / bytes * bytes);
        let has_pages = with_pages <= start.0;
        let end = if has_pages {
            (start.0 / bytes + 1) * bytes
        } else {
            with_pages
        };
        let end = Addr(end).min(span.end);
        pieces.push((Span { start, end }, has_pages));
        start = end;
    }
    pieces
}

/// The size of the pages of a mask.
pub fn bytes_of(mask: u16) -> usize {
    mask.count_ones() as usize * PAGE_BYTES as usize
}

/// The bits of a block's pages that are in `span`.
pub fn bits_of(number: u64, span: Span) -> u16 {
    let first = number * BLOCK_PAGES;
    let from = span.start.page().clamp(first, first + BLOCK_PAGES) - first;
    let to = span.end.page().clamp(first, first + BLOCK_PAGES) - first;
    if from >= to {
        return 0;
    }
    let below = |bit: u64| (1_u32 << bit) - 1;
    (below(to) & !below(from)) as u16
}

/// The spans of a block's pages with a bit in `mask`.
pub fn spans_of(number: u64, mask: u16) -> impl Iterator<Item = Span> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = u32::from(mask) >> at;
        if rest == 0 {
            return None;
        }
        let first = at + rest.trailing_zeros();
        let pages = (!(u32::from(mask) >> first)).trailing_zeros();
        at = first + pages;
        let start = Addr::of_page(number * BLOCK_PAGES + u64::from(first));
        Some(Span::new(start, u64::from(pages) * PAGE_BYTES))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: u64, end: u64) -> Span {
        Span::of_pages(first..end)
    }

    #[test]
    fn pages_that_are_no_longer_looked_at_are_forgotten_unless_they_are_copied() {
        let mut blocks = Blocks::default();
        for area in [pages(4, 6), pages(12, 14), pages(32, 40), pages(64, 80)] {
            blocks.renew(area, &[area]);
        }
        blocks.set(2, State::Done(Vec::new()));
        blocks.forget_outside(&[pages(0, 5), pages(13, 14)]);
        let masks = blocks.from(0).map(|(number, block)| (number, block.mask));
        let masks = masks.collect::<Vec<_>>();
        assert_eq!(masks, [(0, 0b10_0000_0001_0000), (2, 0xff)]);
        blocks.forget_outside(&[]);
        assert_eq!(blocks.from(0).count(), 1);
    }

    #[test]
    fn bits_are_pages() {
        assert_eq!(bits_of(1, pages(0, 100)), 0xffff);
        assert_eq!(bits_of(1, pages(16, 17)), 1);
        assert_eq!(bits_of(1, pages(31, 40)), 0x8000);
        assert_eq!(bits_of(1, pages(0, 16)), 0);
        assert_eq!(bits_of(1, pages(32, 40)), 0);
        for mask in [0, 1, 0x8000, 0xffff, 0b0110_0111, 0x7ffe] {
            let bits = spans_of(3, mask).map(|span| bits_of(3, span));
            assert_eq!(bits.fold(0, |all, bits| all | bits), mask);
        }
        assert_eq!(
            spans_of(1, 0b1011).collect::<Vec<_>>(),
            [pages(16, 18), pages(19, 20)]
        );
    }

    /// Chunks of three pages.
    fn chunks() -> [ChunkId; 3] {
        let store = std::sync::Arc::new(store::Memory::default());
        let writer = image::Writer::create(store).expect("a writer");
        [0, 1, 2].map(|block| {
            let run = image::NewRun {
                space: SpaceId(1),
                first_page: block * BLOCK_PAGES,
                pages: 2,
            };
            let stored = writer.store(0, &[1; 2 * PAGE_BYTES as usize], &[run]);
            let part = stored.expect("stored")[0].part();
            part.expect("a part").chunk
        })
    }

    #[test]
    fn addresses_without_pages_cost_nothing() {
        let mut blocks = Blocks::default();
        let all = pages(0, 1 << 35);
        // A step for each block of these 128 TiB would take minutes.
        for _ in 0..1000 {
            blocks.renew(all, &[pages(7, 8), pages(1 << 30, (1 << 30) + 40)]);
        }
        assert_eq!(blocks.from(0).count(), 4);
        let cut = blocks.pieces(pages(3, 1 << 35), 32 * BLOCK_BYTES);
        assert_eq!(
            cut,
            [
                (pages(3, 512), true),
                (pages(512, 1 << 30), false),
                (pages(1 << 30, (1 << 30) + 512), true),
                (pages((1 << 30) + 512, 1 << 35), false),
            ]
        );
        blocks.renew(all, &[]);
        assert_eq!(blocks.from(0).count(), 0);
        assert_eq!(
            blocks.pieces(pages(3, 9), BLOCK_BYTES),
            [(pages(3, 9), false)]
        );
    }

    #[test]
    fn what_was_seen_again_is_stale() {
        let mut blocks = Blocks::default();
        blocks.renew(pages(0, 64), &[pages(3, 5), pages(14, 18), pages(48, 64)]);
        let masks = |blocks: &Blocks| blocks.from(0).map(|(n, b)| (n, b.mask)).collect::<Vec<_>>();
        assert_eq!(
            masks(&blocks),
            [(0, 0b1100_0000_0001_1000), (1, 0b11), (3, 0xffff)]
        );
        let chunks = chunks();
        for (block, chunk) in [0, 1, 3].into_iter().zip(chunks) {
            blocks.done(
                block,
                Vec::new(),
                Some(OldChunk {
                    id: chunk,
                    pages: 2,
                }),
            );
        }
        assert!(blocks.stale_in(pages(0, 64), 9).is_empty());
        assert!(blocks.has_all(pages(48, 64)) && blocks.has_all(pages(15, 18)));
        assert!(!blocks.has_all(pages(47, 64)) && !blocks.has_all(pages(48, 65)));
        assert!(!blocks.has_all(pages(14, 19)) && !blocks.has_all(pages(17, 49)));
        assert!(!blocks.would_lose(pages(0, 64)));
        // Two pages are gone, one is new; the others of those blocks may be what they were.
        blocks.renew(pages(4, 17), &[pages(5, 6)]);
        assert_eq!(masks(&blocks), [(0, 0b10_1000), (1, 0b10), (3, 0xffff)]);
        assert_eq!(blocks.stale_in(pages(0, 64), 9), [0, 1]);
        assert!(blocks.would_lose(pages(17, 18)) && !blocks.would_lose(pages(6, 17)));
        // A block without pages is none, and its old chunk is another's.
        blocks.renew(pages(17, 18), &[]);
        assert_eq!(masks(&blocks), [(0, 0b10_1000), (3, 0xffff)]);
        for chunk in &chunks[..2] {
            let old = blocks.take_chunk(0, 2).expect("an old chunk");
            assert_eq!(old.id, *chunk);
        }
        assert_eq!(blocks.take_chunk(0, 2), None);
    }
}
