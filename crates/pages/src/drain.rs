//! The way into an image: read, drop zero pages, checksum, write.
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use abi::spans::Ranges;
use image::{NewRun, PAGE_BYTES, Run, RunKind, Writer};

use crate::buffer::Buffer;
use crate::extent::Chunks;
use crate::readahead::{Batch, Readahead};
use crate::{EqualIndex, Error, Extent, PIECES_MAX, Result, Source, workers};

/// Pages read with one call and written with one: what stays in a processor's own cache meanwhile.
const BATCH_PAGES: u64 = 256;

/// Counts of the pages that went through the pipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainSummary {
    /// Pages read.
    pub read_pages: u64,
    /// Those of them that were all zero and are not stored.
    pub zero_pages: u64,
    /// Those with the contents of others, which are stored once for all.
    pub equal_pages: u64,
    /// Those that are stored.
    pub stored_pages: u64,
    /// Pages that were not there any more when they were to be read; the image does not describe
    /// them.
    pub lost_pages: u64,
    /// How long each thread spent on storing them, on average.
    pub writing: Duration,
}

impl DrainSummary {
    /// The size of the stored pages.
    #[must_use]
    pub const fn stored_bytes(&self) -> u64 {
        self.stored_pages * PAGE_BYTES as u64
    }
}

/// How pages are drained.
#[derive(Clone, Copy)]
pub struct Drain<'a> {
    /// Finds pages that are equal to others, which are stored once.
    pub equals: Option<&'a EqualIndex>,
    /// True if tasks run meanwhile, which are left a processor: with a thread for each processor, a
    /// busy target gets hardly any of them (5 % of one of two, for 170 ms).
    pub beside: bool,
    /// Is called with the number of bytes read so far, from several threads when there is much to
    /// read.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

impl Default for Drain<'_> {
    fn default() -> Self {
        Self {
            equals: None,
            beside: false,
            progress: &|_| (),
        }
    }
}

/// Reads `extents` from `source` and puts their pages into the image: those that are not all zero
/// as data, the others as zero. Pages that the source has lost meanwhile are left out.
///
/// `progress` is that of [`Drain`]. A megabyte, in however many extents, costs one read and one
/// write.
///
/// # Errors
/// The source's, and [`Error::Image`]. Then the image cannot be used.
pub fn drain(
    source: &dyn Source,
    extents: &[Extent],
    writer: &Writer,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<DrainSummary> {
    let how = Drain {
        progress,
        ..Drain::default()
    };
    drain_all(&[(source, extents)], writer, how)
}

/// Does for several sources what [`drain()`] does for one: better than one after the other, because
/// threads share all of the work, and small sources share writes.
///
/// # Errors
/// As [`drain()`].
pub fn drain_all(
    sources: &[(&dyn Source, &[Extent])],
    writer: &Writer,
    how: Drain,
) -> Result<DrainSummary> {
    drain_with(sources, writer, how, &|runs| writer.describe(runs))
}

/// Does what [`drain_all()`] does, but the image does not have the pages yet: they are those of the
/// returned runs, for [`Writer::describe`].
///
/// # Errors
/// As [`drain()`].
pub fn drain_to_runs(
    sources: &[(&dyn Source, &[Extent])],
    writer: &Writer,
    how: Drain,
) -> Result<(DrainSummary, Vec<Run>)> {
    let all = Mutex::new(Vec::new());
    let keep = |runs: Vec<Run>| {
        all.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(runs);
    };
    let drained = drain_with(sources, writer, how, &keep)?;
    let all = all.into_inner();
    Ok((drained, all.unwrap_or_else(PoisonError::into_inner)))
}

fn drain_with(
    sources: &[(&dyn Source, &[Extent])],
    writer: &Writer,
    how: Drain,
    describe: &(dyn Fn(Vec<Run>) + Sync),
) -> Result<DrainSummary> {
    let extents = || {
        let sources = sources.iter().enumerate();
        sources.flat_map(|(number, (_, extents))| extents.iter().map(move |e| (number, *e)))
    };
    let chunks = Chunks::new(extents(), BATCH_PAGES, PIECES_MAX);
    let pages: u64 = extents().map(|(_, extent)| extent.pages).sum();
    let [done_bytes, zero_pages, equal_pages, lost_pages, writing_ns] = [0; 5].map(AtomicU64::new);
    let threads = match how.beside {
        true => workers::threads_beside,
        false => workers::threads,
    };
    let threads = threads(pages * PAGE_BYTES as u64).min(chunks.len().max(1));
    let batch_bytes = pages.min(BATCH_PAGES) as usize * PAGE_BYTES;
    let note = |done: DrainSummary| {
        zero_pages.fetch_add(done.zero_pages, Relaxed);
        equal_pages.fetch_add(done.equal_pages, Relaxed);
        lost_pages.fetch_add(done.lost_pages, Relaxed);
        writing_ns.fetch_add(done.writing.as_nanos() as u64, Relaxed);
        let bytes = (done.read_pages + done.lost_pages) * PAGE_BYTES as u64;
        (how.progress)(done_bytes.fetch_add(bytes, Relaxed) + bytes);
    };
    let to = Destination {
        equals: how.equals,
        writer,
        describe,
    };
    match ahead(sources, chunks.len(), batch_bytes) {
        Some(ahead) => {
            let pieces = |number| chunks.get(number).iter().map(|one| one.1).collect();
            let work = |worker: &mut Worker, batch: &mut Batch| {
                let bytes = batch.buffer.bytes();
                let pieces = pieces(batch.number);
                note(worker.store(pieces, bytes, &Ranges::new(), &to)?);
                Ok(())
            };
            ahead.each(chunks.len(), threads, &pieces, Worker::new, work)?;
        }
        None => {
            // Made by one thread: it may have memory at hand.
            let buffers = (0..threads).map(|_| Buffer::new(batch_bytes));
            let buffers = Mutex::new(buffers.collect::<Vec<_>>());
            let buffer = || buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let state = |part| (Worker::new(part), buffer().expect("one for each thread"));
            workers::work(threads, chunks.len(), state, |(worker, buffer), number| {
                let chunk = chunks.get(number);
                note(worker.drain(sources, chunk, buffer.bytes(), &to)?);
                Ok(())
            })?;
        }
    }
    let [zero_pages, equal_pages, lost_pages] =
        [zero_pages, equal_pages, lost_pages].map(AtomicU64::into_inner);
    Ok(DrainSummary {
        read_pages: pages - lost_pages,
        zero_pages,
        equal_pages,
        stored_pages: pages - lost_pages - zero_pages - equal_pages,
        lost_pages,
        writing: Duration::from_nanos(writing_ns.into_inner() / threads as u64),
    })
}

/// Many reads of a source, where it is the only one and there is enough to read.
fn ahead<'a>(
    sources: &[(&'a dyn Source, &[Extent])],
    batches: usize,
    batch_bytes: usize,
) -> Option<Readahead<'a>> {
    let [(source, _)] = sources else {
        return None;
    };
    let queue = if batches > 1 { source.queue() } else { None };
    queue.map(|queue| Readahead {
        source: *source,
        queue,
        batch_bytes,
    })
}

/// Destination of pages.
struct Destination<'a> {
    equals: Option<&'a EqualIndex>,
    writer: &'a Writer,
    describe: &'a (dyn Fn(Vec<Run>) + Sync),
}

/// State of one thread.
struct Worker {
    /// The pages object that this thread has to itself.
    part: usize,
    runs: Vec<NewRun>,
    zeros: Vec<Run>,
}

impl Worker {
    fn new(part: usize) -> Self {
        Self {
            part,
            runs: Vec::new(),
            zeros: Vec::new(),
        }
    }

    /// Moves one chunk.
    fn drain(
        &mut self,
        sources: &[(&dyn Source, &[Extent])],
        chunk: &[(usize, Extent)],
        bytes: &mut [u8],
        to: &Destination<'_>,
    ) -> Result<DrainSummary> {
        let pieces = chunk.iter().map(|(_, piece)| *piece);
        let all_pieces = pieces.collect::<Vec<_>>();
        let mut all_lost = Ranges::new();
        let (mut first, mut used) = (0, 0);
        for same in chunk.chunk_by(|one, other| one.0 == other.0) {
            let pieces = &all_pieces[first..first + same.len()];
            let len = pieces
                .iter()
                .map(|piece| piece.bytes() as usize)
                .sum::<usize>();
            let mut lost = Ranges::new();
            let source = sources[same[0].0].0;
            source.read_there(pieces, &mut bytes[used..used + len], &mut lost)?;
            let before = used / PAGE_BYTES;
            let lost = lost.iter();
            all_lost.extend(lost.map(|pages| pages.start + before..pages.end + before));
            first += same.len();
            used += len;
        }
        self.store(all_pieces, bytes, &all_lost, to)
    }

    /// Stores pages that were read, without those that were lost.
    fn store(
        &mut self,
        mut pieces: Vec<Extent>,
        bytes: &mut [u8],
        lost: &Ranges<usize>,
        to: &Destination<'_>,
    ) -> Result<DrainSummary> {
        let Destination {
            equals,
            writer,
            describe,
        } = *to;
        self.runs.clear();
        self.zeros.clear();
        let mut used = pieces.iter().map(Extent::bytes).sum::<u64>() as usize;
        let all_pages = used / PAGE_BYTES;
        if !lost.is_empty() {
            used = leave_out(&mut pieces, &mut bytes[..used], lost);
        }
        let bytes = &mut bytes[..used];
        let kept = sort_out(&pieces, bytes, &mut self.runs, &mut self.zeros);
        let not_zero = kept;
        let mut kept = kept;
        let mut plan = None;
        if let Some(equals) = equals {
            plan = equals.plan(writer, &bytes[..kept], &self.runs)?;
        }
        if let Some(plan) = &plan {
            kept = plan.take_out(&mut bytes[..kept], &mut self.runs);
        }
        let before = Instant::now();
        let stored = writer.store(self.part, &bytes[..kept], &self.runs);
        let mut runs = stored.map_err(Error::image("write"))?;
        let writing = before.elapsed();
        if let (Some(equals), Some(plan)) = (equals, &plan) {
            runs.append(&mut plan.finish(equals, &runs));
        }
        runs.append(&mut self.zeros);
        describe(runs);
        Ok(DrainSummary {
            read_pages: (used / PAGE_BYTES) as u64,
            zero_pages: ((used - not_zero) / PAGE_BYTES) as u64,
            equal_pages: ((not_zero - kept) / PAGE_BYTES) as u64,
            stored_pages: (kept / PAGE_BYTES) as u64,
            lost_pages: (all_pages - used / PAGE_BYTES) as u64,
            writing,
        })
    }
}

/// Takes the pages `lost`, numbered from the start of `bytes`, out of `pieces` and `bytes`; gives
/// how many bytes are left.
fn leave_out(pieces: &mut Vec<Extent>, bytes: &mut [u8], lost: &[Range<usize>]) -> usize {
    let mut left = Vec::new();
    let (mut first, mut kept) = (0, 0);
    for piece in pieces.iter() {
        let end = first + piece.pages as usize;
        let mut at = first;
        let cuts = lost.iter().filter(|cut| cut.start < end && cut.end > first);
        for cut in cuts.cloned().chain(std::iter::once(end..end)) {
            let until = cut.start.max(first);
            if at < until {
                left.push(piece.part((at - first) as u64, (until - at) as u64));
                bytes.copy_within(at * PAGE_BYTES..until * PAGE_BYTES, kept * PAGE_BYTES);
                kept += until - at;
            }
            at = at.max(cut.end);
        }
        first = end;
    }
    *pieces = left;
    kept * PAGE_BYTES
}

/// Moves the pages of `pieces` that are not all zero to the front of `bytes`, returns how many
/// bytes those are, and notes both kinds.
pub fn sort_out(
    pieces: &[Extent],
    bytes: &mut [u8],
    runs: &mut Vec<NewRun>,
    zeros: &mut Vec<Run>,
) -> usize {
    let (mut from, mut kept) = (0, 0);
    for piece in pieces {
        let space = piece.space;
        let mut page = piece.first_page;
        let end = page + piece.pages;
        while page < end {
            let zero = is_zero(&bytes[from..from + PAGE_BYTES]);
            let rest = bytes[from..]
                .chunks_exact(PAGE_BYTES)
                .take((end - page) as usize);
            let pages = rest.take_while(|page| is_zero(page) == zero).count();
            let len = pages * PAGE_BYTES;
            if zero {
                zeros.push(Run {
                    space,
                    first_page: page,
                    pages: pages as u32,
                    kind: RunKind::Zero,
                });
            } else {
                if kept != from {
                    bytes.copy_within(from..from + len, kept);
                }
                runs.push(NewRun {
                    space,
                    first_page: page,
                    pages: pages as u32,
                });
                kept += len;
            }
            from += len;
            page += pages as u64;
        }
    }
    kept
}

/// Tells whether all bytes of a page are zero; most pages that are not say so in their first bytes.
fn is_zero(page: &[u8]) -> bool {
    static ZERO: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
    page == ZERO
}

#[cfg(test)]
mod tests {
    use abi::Addr;
    use image::SpaceId;

    use super::*;

    fn extent(first_page: u64, pages: u64) -> Extent {
        Extent {
            space: SpaceId(3),
            first_page,
            at: Addr(0),
            pages,
        }
    }

    /// One page for each number, filled with it.
    fn pages(numbers: &[u8]) -> Vec<u8> {
        numbers
            .iter()
            .flat_map(|number| [*number; PAGE_BYTES])
            .collect()
    }

    #[test]
    fn zero_pages_are_taken_out() {
        let mut bytes = pages(&[0, 1, 2, 0, 0, 3, 0]);
        let (mut runs, mut zeros) = (Vec::new(), Vec::new());
        let kept = sort_out(
            &[extent(10, 4), extent(20, 3)],
            &mut bytes,
            &mut runs,
            &mut zeros,
        );
        assert_eq!(bytes[..kept], pages(&[1, 2, 3]));
        let runs: Vec<_> = runs.iter().map(|run| (run.first_page, run.pages)).collect();
        assert_eq!(runs, [(11, 2), (21, 1)]);
        let zeros: Vec<_> = zeros
            .iter()
            .map(|run| (run.first_page, run.pages))
            .collect();
        assert_eq!(zeros, [(10, 1), (13, 1), (20, 1), (22, 1)]);
    }

    #[test]
    fn lost_pages_are_left_out() {
        let mut bytes = pages(&[1, 2, 3, 4, 5, 6, 7]);
        let mut pieces = vec![extent(10, 4), extent(20, 3)];
        let left = leave_out(&mut pieces, &mut bytes, &[0..1, 2..5, 6..7]);
        assert_eq!(bytes[..left], pages(&[2, 6]));
        let pieces: Vec<_> = pieces
            .iter()
            .map(|piece| (piece.first_page, piece.pages))
            .collect();
        assert_eq!(pieces, [(11, 1), (21, 1)]);
        let mut bytes = pages(&[1, 2, 3, 4, 5, 6, 7]);
        let mut none = vec![extent(10, 4), extent(20, 3)];
        assert_eq!(
            leave_out(&mut none, &mut bytes, std::slice::from_ref(&(0..7))),
            0
        );
        assert!(none.is_empty());
    }

    #[test]
    fn a_single_byte_makes_a_page_data() {
        let mut page = [0; PAGE_BYTES];
        assert!(is_zero(&page));
        for at in [0, 63, 64, 2000, PAGE_BYTES - 1] {
            page[at] = 1;
            assert!(!is_zero(&page));
            page[at] = 0;
        }
    }
}
