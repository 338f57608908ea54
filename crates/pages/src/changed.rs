//! Which pages of a source are not as an image has them.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use image::{PAGE_BYTES, Reader};

use crate::buffer::Buffer;
use crate::extent::Chunks;
use crate::readahead::{Batch, Readahead};
use crate::{Error, Extent, Result, Source, workers};

/// Pages that are read and compared together.
const BATCH_PAGES: u64 = 256;

/// Finds the pages of `extents` that differ from those that `parent` has under the same numbers,
/// and those that it does not describe, in the order of `extents`. The rest may be left to it.
///
/// # Errors
/// The source's, and [`Error::Image`].
pub fn changed(
    source: &dyn Source,
    extents: &[Extent],
    parent: &Reader,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Extent>> {
    let all = extents.iter().map(|extent| (0, *extent));
    let batches = Chunks::new(all, BATCH_PAGES, BATCH_PAGES as usize);
    let bytes: u64 = extents.iter().map(Extent::bytes).sum();
    let found = Mutex::new(Vec::new());
    let done = AtomicU64::new(0);
    let buffer = |_| Buffer::new(BATCH_PAGES as usize * PAGE_BYTES);
    let pieces = |number| batches.get(number).iter().map(|piece| piece.1).collect();
    let look = |number, pieces: &[Extent], own: &[u8], theirs: &mut Buffer| {
        let mut differing = Vec::new();
        let mut at = 0;
        for piece in pieces {
            let end = at + piece.bytes() as usize;
            let own = &own[at..end];
            compare(*piece, own, theirs.bytes(), parent, &mut differing)?;
            at = end;
        }
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.push((number, differing));
        drop(found);
        progress(done.fetch_add(at as u64, Relaxed) + at as u64);
        Ok(())
    };
    let threads = workers::threads(bytes);
    let queue = if batches.len() > 1 {
        source.queue()
    } else {
        None
    };
    if let Some(queue) = queue {
        let batch_bytes = BATCH_PAGES as usize * PAGE_BYTES;
        let ahead = Readahead {
            source,
            queue,
            batch_bytes,
        };
        let work = |theirs: &mut Buffer, batch: &mut Batch| {
            let pieces: Vec<Extent> = pieces(batch.number);
            look(batch.number, &pieces, batch.buffer.bytes(), theirs)
        };
        ahead.each(batches.len(), threads, &pieces, buffer, work)?;
    } else {
        let state = |part| (buffer(part), buffer(part));
        workers::work(threads, batches.len(), state, |(own, theirs), number| {
            let pieces: Vec<Extent> = pieces(number);
            let len = pieces.iter().map(Extent::bytes).sum::<u64>();
            let own = &mut own.bytes()[..len as usize];
            source.read(&pieces, own)?;
            look(number, &pieces, own, theirs)
        })?;
    }
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.sort_unstable_by_key(|batch| batch.0);
    let mut extents: Vec<Extent> = Vec::new();
    for extent in found.into_iter().flat_map(|batch| batch.1) {
        push(&mut extents, extent);
    }
    Ok(extents)
}

/// Adds what differs of one piece, whose pages are `own`.
fn compare(
    piece: Extent,
    own: &[u8],
    theirs: &mut [u8],
    parent: &Reader,
    differing: &mut Vec<Extent>,
) -> Result<()> {
    let mut page = piece.first_page;
    let mut differs = |from: u64, pages: u64| {
        if pages > 0 {
            push(differing, piece.part(from - piece.first_page, pages));
        }
    };
    for known in parent.described(piece.space, piece.first_page, piece.pages) {
        differs(page, known.start - page);
        let pages = (known.end - known.start) as usize;
        let theirs = &mut theirs[..pages * PAGE_BYTES];
        let read = parent.read_pages(piece.space, known.start, theirs);
        read.map_err(Error::image("compare with"))?;
        let skip = (known.start - piece.first_page) as usize * PAGE_BYTES;
        let own = own[skip..].chunks_exact(PAGE_BYTES);
        for (number, (own, theirs)) in (known.start..).zip(own.zip(theirs.chunks_exact(PAGE_BYTES)))
        {
            if own != theirs {
                differs(number, 1);
            }
        }
        page = known.end;
    }
    differs(page, piece.first_page + piece.pages - page);
    Ok(())
}

/// Appends an extent, to the last one where it follows that.
fn push(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last)
            if last.space == next.space
                && last.first_page + last.pages == next.first_page
                && last.at.plus(last.bytes()) == next.at =>
        {
            last.pages += next.pages;
        }
        _ => extents.push(next),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use abi::Addr;
    use image::{NewRun, Run, RunKind, Seal, SpaceId, Writer};

    use super::*;

    /// Pages numbered from 0, each filled with a byte.
    struct PatternPages(Vec<u8>);

    impl Source for PatternPages {
        fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> Result<()> {
            let numbers = extents.iter().flat_map(Extent::numbers);
            for (page, number) in buffer.chunks_exact_mut(PAGE_BYTES).zip(numbers) {
                page.fill(self.0[number as usize]);
            }
            Ok(())
        }
    }

    #[test]
    fn what_differs_or_is_not_described_is_found() {
        let space = SpaceId(1);
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).expect("a writer");
        // Pages 0 to 599 are 1, 600 to 609 zero, 620 to 629 again 1.
        for (first_page, pages) in [(0, 600), (620, 10)] {
            let bytes = vec![1; pages as usize * PAGE_BYTES];
            let run = NewRun {
                space,
                first_page,
                pages,
            };
            writer.append(&bytes, &[run]).expect("stored");
        }
        let zeros = Run {
            space,
            first_page: 600,
            pages: 10,
            kind: RunKind::Zero,
        };
        writer.mark(zeros);
        writer.seal(Seal::default()).expect("sealed");
        let parent = Reader::open(&*store).expect("an image");

        let mut bytes = vec![1; 640];
        bytes[600..610].fill(0);
        bytes[3] = 2;
        bytes[255..258].fill(2);
        bytes[605] = 1;
        let extent = |first_page, pages| Extent {
            space,
            first_page,
            at: Addr::of_page(first_page),
            pages,
        };
        let all = [extent(0, 605), extent(605, 35)];
        let found = changed(&PatternPages(bytes), &all, &parent, &|_| ()).expect("compared");
        let expected = [(3, 1), (255, 3), (605, 1), (610, 10), (630, 10)];
        assert_eq!(
            found,
            expected.map(|(first_page, pages)| extent(first_page, pages))
        );
    }
}
