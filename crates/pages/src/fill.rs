//! The way out of an image: read, verify, hand to a sink.
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use abi::{Addr, Span};
use image::{PAGE_BYTES, Reader, Run, RunKind};

use crate::buffer::Buffer;
use crate::{Error, Placed, Result, Sink, crew};

/// What a huge page holds; batches do not cross its boundaries in the target.
const BLOCK_BYTES: u64 = 2 << 20;
/// Stored bytes read for one batch: one read that stays in a processor's own cache.
const BATCH_BYTES: u64 = BLOCK_BYTES;
/// Blocks that a sink prepares at once.
const GROUP_BLOCKS: u64 = 16;

/// What was filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filled {
    /// Pages handed to the sink.
    pub pages: u64,
    /// Batches in which that was done.
    pub batches: u64,
}

/// Reads the runs of `placed`, verifies their checksums, and only then hands the wanted pages to
/// `sink`. A megabyte, in however many pieces, costs one read where the runs are neighbours in the
/// image, and one call of the sink.
///
/// Calls `progress` with the number of bytes filled so far, from several threads when there is much
/// to fill.
///
/// # Errors
/// [`Error::Image`] for what cannot be read or is damaged, and the sink's. Pages filled before
/// stay.
pub fn fill(
    reader: &Reader,
    placed: &[Placed],
    sink: &dyn Sink,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Filled> {
    let mut placed = placed.to_vec();
    placed.sort_by_key(|piece| piece.at);
    let batches = batches(&placed);
    let groups = groups(&placed, &batches);
    let pages: u64 = placed.iter().map(|piece| u64::from(piece.pages)).sum();
    let done_bytes = AtomicU64::new(0);
    let most = batches
        .iter()
        .map(|batch| stored_bytes(&placed[batch.clone()]))
        .max();
    let buffer = |_| Buffer::new(most.unwrap_or(0) as usize);
    crew::work(
        crew::threads(pages * PAGE_BYTES as u64),
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
    Ok(Filled {
        pages,
        batches: batches.len() as u64,
    })
}

/// Moves one batch and returns how many bytes it had.
fn fill_batch(
    reader: &Reader,
    batch: &[Placed],
    sink: &dyn Sink,
    buffer: &mut [u8],
) -> Result<u64> {
    // A run of which several parts are wanted is read once.
    let mut read = runs_of(batch)
        .into_iter()
        .map(|run| (run, 0..0))
        .collect::<Vec<_>>();
    let mut used = 0;
    for (run, range) in &mut read {
        *range = used..used + run.len_bytes() as usize;
        used = range.end;
    }
    read_runs(reader, &read, buffer)?;
    let place_of = |run: &Run| {
        let at = read.binary_search_by_key(&key(run), |(run, _)| key(run));
        read[at.expect("every run of the batch was read")].1.start
    };
    let mut pieces: Vec<(Addr, &[u8])> = Vec::with_capacity(batch.len());
    let mut last_end = None;
    let mut filled = 0;
    for piece in batch {
        let start = place_of(&piece.run) + piece.skip_pages as usize * PAGE_BYTES;
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

/// Reads runs, sorted by place, to their places in `buffer`, neighbours in the image with one read,
/// and verifies each.
fn read_runs(reader: &Reader, runs: &[(Run, Range<usize>)], buffer: &mut [u8]) -> Result<()> {
    let mut next = 0;
    while let Some((first, range)) = runs.get(next) {
        let mut end = range.end;
        let mut count = 1;
        for ((last, _), (run, range)) in runs[next..].iter().zip(&runs[next + 1..]) {
            if offset_bytes(run) != offset_bytes(last) + last.len_bytes() {
                break;
            }
            end = range.end;
            count += 1;
        }
        let bytes = &mut buffer[range.start..end];
        reader
            .read_stored(bytes, offset_bytes(first), first.space)
            .map_err(Error::image("read"))?;
        for (run, range) in &runs[next..next + count] {
            reader
                .check(run, &buffer[range.clone()])
                .map_err(Error::image("read"))?;
        }
        next += count;
    }
    Ok(())
}

fn offset_bytes(run: &Run) -> u64 {
    match run.kind {
        RunKind::Data { offset_bytes, .. } => offset_bytes,
        other => panic!("only data runs are placed, not {other:?}"),
    }
}

fn block(addr: Addr) -> u64 {
    addr.0 / BLOCK_BYTES
}

/// What tells stored runs apart and sorts them by place.
fn key(run: &Run) -> (u64, u32) {
    (offset_bytes(run), run.pages)
}

/// The runs that a batch needs, each once, sorted by place.
fn runs_of(batch: &[Placed]) -> Vec<Run> {
    let mut runs = batch.iter().map(|piece| piece.run).collect::<Vec<_>>();
    runs.sort_unstable_by_key(key);
    runs.dedup_by_key(|run| key(run));
    runs
}

fn stored_bytes(batch: &[Placed]) -> u64 {
    runs_of(batch).iter().map(Run::len_bytes).sum()
}

/// Groups pieces, sorted by address, into batches: small ones together, large ones by the block in
/// which they start.
fn batches(placed: &[Placed]) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0;
    let total = stored_bytes(placed);
    let mut seen = HashSet::new();
    for (number, piece) in placed.iter().enumerate() {
        let own = match seen.contains(&key(&piece.run)) {
            true => 0,
            false => piece.run.len_bytes(),
        };
        match batches.last_mut() {
            Some(batch)
                if bytes + own <= BATCH_BYTES
                    && batch.len() < sys::vm::PIECES_MAX
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
        if seen.insert(key(&piece.run)) {
            bytes += piece.run.len_bytes();
        }
    }
    batches
}

/// Groups batches whose blocks a sink prepares together.
fn groups(placed: &[Placed], batches: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let group_of = |number: usize| block(placed[batches[number].start].at) / GROUP_BLOCKS;
    for number in 0..batches.len() {
        match groups.last_mut() {
            Some(group) if group_of(group.start) == group_of(number) => group.end = number + 1,
            _ => groups.push(number..number + 1),
        }
    }
    groups
}

/// The blocks of the batches all of whose pages are placed, neighbours as one span.
fn full_blocks(placed: &[Placed], batches: &[Range<usize>]) -> Vec<Span> {
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
    use image::SpaceId;

    use super::*;

    fn piece(page: u64, pages: u32) -> Placed {
        let kind = RunKind::Data {
            offset_bytes: page * 4096,
            checksum: 0,
        };
        let run = Run {
            space: SpaceId(1),
            first_page: page,
            pages,
            kind,
        };
        Placed {
            run,
            skip_pages: 0,
            pages,
            at: Addr::of_page(page),
        }
    }

    #[test]
    fn few_pages_anywhere_are_one_batch() {
        let placed: Vec<Placed> = (0..30).map(|number| piece(number * 5000, 3)).collect();
        assert_eq!(batches(&placed), [0..30]);
    }

    #[test]
    fn many_pages_are_batched_by_block() {
        let placed: Vec<Placed> = (0..8)
            .map(|number| piece(512 + number * 256, 256))
            .collect();
        let batches = batches(&placed);
        assert_eq!(batches, [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(groups(&placed, &batches), [0..4]);
        let full = Span {
            start: Addr::of_page(512),
            end: Addr::of_page(512 + 2048),
        };
        assert_eq!(full_blocks(&placed, &batches), [full]);
    }

    #[test]
    fn blocks_with_a_hole_are_not_full() {
        let placed = [
            piece(500, 12),
            piece(512, 256),
            piece(769, 255),
            piece(1024, 600),
        ];
        let full = full_blocks(&placed, &[0..4]);
        assert_eq!(
            full,
            [Span {
                start: Addr::of_page(1024),
                end: Addr::of_page(1536)
            }]
        );
    }
}
