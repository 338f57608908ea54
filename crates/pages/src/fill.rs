//! The way out of an image: read, verify, hand to a sink.
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use abi::{Addr, Span};
use image::{ChunkId, PAGE_BYTES, Reader};

use crate::buffer::Buffer;
use crate::{Error, PIECES_MAX, Placement, Result, Sink, workers};

/// Bytes of a huge page; batches do not cross its boundaries in the target.
const BLOCK_BYTES: u64 = 2 << 20;
/// Pages of chunks read for one batch: what stays in a processor's own cache.
const BATCH_BYTES: u64 = BLOCK_BYTES;
/// Blocks that a sink prepares at once.
const GROUP_BLOCKS: u64 = 16;

/// Summary of a fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FillSummary {
    /// Pages handed to the sink.
    pub pages: u64,
    /// Batches in which that was done.
    pub batches: u64,
}

/// Reads the chunks of `placed`, verifies their checksums, and only then hands the wanted pages to
/// `sink`. A megabyte, in however many pieces, costs one read where the chunks are neighbours in
/// the image, and one call of the sink.
///
/// Calls `progress` with the number of bytes filled so far, from several threads when there is much
/// to fill.
///
/// # Errors
/// [`Error::Image`] for what cannot be read or is damaged, and the sink's. Pages filled before
/// stay.
pub fn fill(
    reader: &Reader,
    placed: &[Placement],
    sink: &dyn Sink,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<FillSummary> {
    let mut placed = placed.to_vec();
    placed.sort_by_key(|piece| piece.at);
    let batches = batches(reader, &placed);
    let depth = sink.depth();
    // One after the other where more are under way, so that they come in order.
    let group_blocks = depth.map_or(GROUP_BLOCKS, |_| 1);
    let groups = groups(&placed, &batches, group_blocks);
    let pages: u64 = placed.iter().map(|piece| u64::from(piece.pages)).sum();
    let done_bytes = AtomicU64::new(0);
    let most = batches
        .iter()
        .map(|batch| chunk_bytes(reader, &placed[batch.clone()]))
        .max();
    let buffer = |_| Buffer::new(most.unwrap_or(0) as usize);
    let threads = workers::threads(pages * PAGE_BYTES as u64);
    workers::work(
        depth.map_or(threads, |depth| depth.max(threads)),
        groups.len(),
        buffer,
        |buffer, number| {
            let group = &batches[groups[number].clone()];
            sink.prepare(&full_blocks(&placed, group))?;
            for batch in group {
                let bytes = fill_batch(reader, &placed[batch.clone()], sink, buffer.bytes())?;
                progress(done_bytes.fetch_add(bytes, Relaxed) + bytes);
            }
            Ok(())
        },
    )?;
    Ok(FillSummary {
        pages,
        batches: batches.len() as u64,
    })
}

/// Moves one batch and returns how many bytes it had.
fn fill_batch(
    reader: &Reader,
    batch: &[Placement],
    sink: &dyn Sink,
    buffer: &mut [u8],
) -> Result<u64> {
    // A chunk of which several parts are wanted is read once.
    let mut used = 0;
    let place = |chunk| {
        let at = used;
        used += bytes_of(reader, chunk) as usize;
        (chunk, at)
    };
    let wanted = chunks_of(batch).into_iter().map(place).collect::<Vec<_>>();
    let loaded = reader.load(&wanted, buffer);
    loaded.map_err(Error::image("read"))?;
    let place_of = |chunk: ChunkId| {
        let at = wanted.binary_search_by_key(&chunk, |one| one.0);
        wanted[at.expect("every chunk of the batch was read")].1
    };
    let mut pieces: Vec<(Addr, &[u8])> = Vec::with_capacity(batch.len());
    let mut last_end = None;
    let mut filled = 0;
    for piece in batch {
        let start = place_of(piece.part.chunk) + piece.part.skip_pages as usize * PAGE_BYTES;
        let end = start + piece.pages as usize * PAGE_BYTES;
        let target_end = piece.at.plus((end - start) as u64);
        match pieces.last_mut() {
            Some((at, bytes)) if last_end == Some((piece.at, start)) => {
                *bytes = &buffer[start - bytes.len()..end];
                debug_assert_eq!(at.plus(bytes.len() as u64), target_end);
            }
            _ => pieces.push((piece.at, &buffer[start..end])),
        }
        last_end = Some((target_end, end));
        filled += end - start;
    }
    sink.fill(&pieces)?;
    Ok(filled as u64)
}

fn block(addr: Addr) -> u64 {
    addr.0 / BLOCK_BYTES
}

fn bytes_of(reader: &Reader, chunk: ChunkId) -> u64 {
    u64::from(reader.chunk_pages(chunk)) * PAGE_BYTES as u64
}

/// The chunks that a batch needs, each once, in the order in which they are stored.
fn chunks_of(batch: &[Placement]) -> Vec<ChunkId> {
    let mut chunks = batch
        .iter()
        .map(|piece| piece.part.chunk)
        .collect::<Vec<_>>();
    chunks.sort_unstable();
    chunks.dedup();
    chunks
}

fn chunk_bytes(reader: &Reader, batch: &[Placement]) -> u64 {
    let chunks = chunks_of(batch).into_iter();
    chunks.map(|chunk| bytes_of(reader, chunk)).sum()
}

/// Groups pieces, sorted by address, into batches: small ones together, large ones by the block in
/// which they start.
fn batches(reader: &Reader, placed: &[Placement]) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    let total = chunk_bytes(reader, placed);
    let mut seen = HashSet::new();
    for (number, piece) in placed.iter().enumerate() {
        let chunk = piece.part.chunk;
        let own = match seen.contains(&chunk) {
            true => 0,
            false => bytes_of(reader, chunk),
        };
        match batches.last_mut() {
            Some(batch)
                if bytes + own <= BATCH_BYTES
                    && batch.len() < PIECES_MAX
                    && (total <= BATCH_BYTES
                        || block(placed[batch.start].at) == block(piece.at)) =>
            {
                batch.end = number + 1;
            }
            _ => {
                batches.push(number..number + 1);
                bytes = 0;
                seen.clear();
            }
        }
        if seen.insert(chunk) {
            bytes += bytes_of(reader, chunk);
        }
    }
    batches
}

/// Groups batches of so many blocks, which a sink prepares together.
fn groups(placed: &[Placement], batches: &[Range<usize>], blocks: u64) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let group_of = |number: usize| block(placed[batches[number].start].at) / blocks;
    for number in 0..batches.len() {
        match groups.last_mut() {
            Some(group) if group_of(group.start) == group_of(number) => group.end = number + 1,
            _ => groups.push(number..number + 1),
        }
    }
    groups
}

/// The blocks of the batches all of whose pages are placed, neighbours as one span.
fn full_blocks(placed: &[Placement], batches: &[Range<usize>]) -> Vec<Span> {
    let mut full: Vec<Span> = Vec::new();
    let mut solid = Span::default();
    let pieces = batches.iter().flat_map(|batch| &placed[batch.clone()]);
    let mut note = |solid: Span| {
        let start = Addr(solid.start.0.next_multiple_of(BLOCK_BYTES));
        let end = Addr(solid.end.0 / BLOCK_BYTES * BLOCK_BYTES);
        if start < end {
            full.push(Span { start, end });
        }
    };
    for piece in pieces {
        let span = Span::new(piece.at, u64::from(piece.pages) * PAGE_BYTES as u64);
        if span.start == solid.end {
            solid.end = span.end;
        } else {
            note(solid);
            solid = span;
        }
    }
    note(solid);
    full
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use std::sync::Arc;

    use image::{NewRun, Seal, SpaceId, Writer};

    use super::*;
    use crate::{Extent, place};

    /// An image of runs of so many pages from some page on, and where they go.
    fn placed(runs: &[(u64, u32)]) -> (Reader, Vec<Placement>) {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).expect("a writer");
        let space = SpaceId(1);
        let extents = runs.iter().map(|&(first_page, pages)| {
            let run = NewRun {
                space,
                first_page,
                pages,
            };
            let bytes = vec![1; pages as usize * PAGE_BYTES];
            writer.append(&bytes, &[run]).expect("stored");
            Extent {
                space,
                first_page,
                at: Addr::of_page(first_page),
                pages: pages.into(),
            }
        });
        let extents = extents.collect::<Vec<_>>();
        writer.seal(Seal::default()).expect("sealed");
        let reader = Reader::open(&*store).expect("an image");
        let placed = place(&reader, &extents).expect("placed");
        (reader, placed)
    }

    #[test]
    fn few_pages_anywhere_are_one_batch() {
        let runs = (0..30).map(|number| (number * 5008, 3)).collect::<Vec<_>>();
        let (reader, placed) = placed(&runs);
        assert_eq!(batches(&reader, &placed), [0..30]);
    }

    #[test]
    fn many_pages_are_batched_by_block() {
        let (reader, placed) = placed(&[(512, 2048)]);
        let batches = batches(&reader, &placed);
        assert_eq!(batches, [0..32, 32..64, 64..96, 96..128]);
        assert_eq!(groups(&placed, &batches, GROUP_BLOCKS), [0..4]);
        assert_eq!(groups(&placed, &batches, 1), [0..1, 1..2, 2..3, 3..4]);
        let full = Span::of_pages(512..512 + 2048);
        assert_eq!(full_blocks(&placed, &batches), [full]);
    }

    #[test]
    fn blocks_with_a_hole_are_not_full() {
        let (_, placed) = placed(&[(500, 12), (512, 256), (769, 255), (1024, 600)]);
        let whole = 0..placed.len();
        let full = full_blocks(&placed, &[whole]);
        assert_eq!(full, [Span::of_pages(1024..1536)]);
    }
}
