//! A volume as a source of pages: what is not in use reads as zeros.

use std::fs::File;
use std::os::unix::fs::FileExt;

use abi::bits::Bits;
use image::{PAGE_BYTES, SpaceId};
use pages::source::Queue;
use pages::{Buffer, Error, Extent, Source};
use sys::queue::{Done, Piece};

use crate::bad_pages::BadPages;
use crate::ext4::ReplayedSource;
use crate::pace::RateLimit;
use crate::page_sums::PageSums;
use crate::read_at::OpenFile;

/// How many reads, of a megabyte each, are under way at a time: a disk has something to go on with,
/// and who else waits for it is not behind more than that.
const DEPTH: usize = 8;

/// In which I/O contexts a volume is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoContext {
    /// One thread has many reads under way (io_uring), in disk order.
    #[default]
    Shared,
    /// A thread for each processor reads, one after the other, in a context of its own.
    Separate,
}

/// Pages of a device, without the bytes of blocks that mean nothing.
pub struct Blocks<'a> {
    /// The space of the image that they are for.
    pub space: SpaceId,
    /// The device, open past the cache.
    pub file: &'a File,
    /// The blocks whose bytes are wanted.
    pub live: &'a Bits,
    pub block_bytes: u32,
    /// The journal's blocks, where it is to be replayed.
    pub replayed: Option<&'a ReplayedSource<OpenFile>>,
    /// In which contexts it is read.
    pub context: IoContext,
    /// How fast at most.
    pub pace: &'a RateLimit,
    /// Pages that cannot be read.
    pub bad: &'a BadPages,
    /// Checksums of the pages that were read.
    pub seen: Option<&'a PageSums>,
}

impl Blocks<'_> {
    /// Reads consecutive pages.
    fn read_run(&self, at_bytes: u64, bytes: &mut [u8]) -> pages::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let offset_bytes = at_bytes + done as u64;
            match self.file.read_at(&mut bytes[done..], offset_bytes) {
                // Where the last page is not a whole one.
                Ok(0) => {
                    bytes[done..].fill(0);
                    break;
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(Error::Other(Box::new(crate::Error::Read {
                        at_bytes: offset_bytes,
                        len: bytes.len() - done,
                        source,
                    })));
                }
            }
        }
        Ok(())
    }

    /// Reads consecutive pages one by one, where some of them cannot be read.
    fn read_each(&self, at_bytes: u64, bytes: &mut [u8]) -> pages::Result<()> {
        for (number, page) in (0..).zip(bytes.chunks_mut(PAGE_BYTES)) {
            let at_bytes = at_bytes + number * PAGE_BYTES as u64;
            if let Err(error) = self.read_run(at_bytes, page) {
                if !self.bad.skip {
                    return Err(error);
                }
                self.bad.add(at_bytes / PAGE_BYTES as u64);
                page.fill(0);
            }
        }
        Ok(())
    }

    /// Makes of pages that were read what they are to be.
    fn finish(&self, extents: &[Extent], bytes: &mut [u8]) -> crate::Result<()> {
        let mut at = 0;
        for extent in extents.iter().filter(|_| self.replayed.is_some()) {
            let end = at + extent.bytes() as usize;
            if let Some(replayed) = self.replayed {
                let at_bytes = extent.first_page * PAGE_BYTES as u64;
                replayed.patch(at_bytes, &mut bytes[at..end])?;
            }
            at = end;
        }
        self.mask(extents, bytes);
        if let Some(seen) = self.seen {
            seen.note(extents, bytes);
        }
        Ok(())
    }

    /// Clears what is not wanted of them.
    fn mask(&self, extents: &[Extent], bytes: &mut [u8]) {
        let block_bytes = self.block_bytes as usize;
        if block_bytes >= PAGE_BYTES {
            return;
        }
        let per_page = (PAGE_BYTES / block_bytes) as u64;
        let pages = extents.iter().flat_map(Extent::numbers);
        for (page, bytes) in pages.zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            let blocks = bytes.chunks_exact_mut(block_bytes);
            for (block, bytes) in (page * per_page..).zip(blocks) {
                if !self.live.contains(block) {
                    bytes.fill(0);
                }
            }
        }
    }
}

/// Extents that follow each other as one piece; `to_byte` is where the first goes.
fn pieces(extents: &[Extent], to_byte: usize) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut to = to_byte;
    for extent in extents {
        let at_bytes = extent.first_page * PAGE_BYTES as u64;
        let end = to + extent.bytes() as usize;
        match pieces.last_mut() {
            Some(last) if last.at_bytes + last.to.len() as u64 == at_bytes => last.to.end = end,
            _ => pieces.push(Piece {
                at_bytes,
                to: to..end,
            }),
        }
        to = end;
    }
    pieces
}

impl Source for Blocks<'_> {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> pages::Result<()> {
        for piece in pieces(extents, 0) {
            self.pace.wait(piece.to.len() as u64);
            let bytes = &mut buffer[piece.to];
            if self.read_run(piece.at_bytes, bytes).is_err() {
                self.read_each(piece.at_bytes, bytes)?;
            }
        }
        let finished = self.finish(extents, buffer);
        finished.map_err(|error| Error::Other(Box::new(error)))
    }

    fn queue(&self) -> Option<Box<dyn Queue + Send + '_>> {
        if self.context == IoContext::Separate {
            return None;
        }
        let file = self.file.try_clone().ok()?;
        match sys::queue::Queue::new(file.into(), DEPTH) {
            Ok(queue) => Some(Box::new(PendingReads {
                blocks: self,
                queue,
                batches: Vec::new(),
            })),
            Err(error) => {
                log::info!("a read at a time in each thread, as there is no io_uring: {error}");
                None
            }
        }
    }
}

/// Reads under way.
struct PendingReads<'a> {
    blocks: &'a Blocks<'a>,
    queue: sys::queue::Queue,
    /// What is read under each number, and where in its memory the buffer is.
    batches: Vec<(usize, Vec<Extent>, std::ops::Range<usize>)>,
}

impl Queue for PendingReads<'_> {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn start(&mut self, number: usize, extents: &[Extent], buffer: Buffer) -> pages::Result<()> {
        let (memory, range) = buffer.into_memory();
        let pieces = pieces(extents, range.start);
        let len = extents.iter().map(Extent::bytes).sum::<u64>();
        self.blocks.pace.wait(len);
        self.batches.push((number, extents.to_vec(), range));
        let started = self.queue.start(number, memory, &pieces);
        started.map_err(failed)
    }

    fn finish(&mut self) -> pages::Result<(usize, Buffer, bool)> {
        let Done {
            number,
            memory,
            result,
        } = self.queue.wait().map_err(failed)?;
        let at = self.batches.iter().position(|batch| batch.0 == number);
        let (_, extents, range) = self.batches.swap_remove(at.expect("it was started"));
        let mut buffer = Buffer::of_memory(memory, range);
        let is_whole = match result {
            Err(error) => {
                log::debug!("batch {number} is read again: {error}");
                false
            }
            Ok(()) => self.blocks.finish(&extents, buffer.bytes()).is_ok(),
        };
        Ok((number, buffer, is_whole))
    }
}

fn failed(source: std::io::Error) -> Error {
    Error::Other(Box::new(crate::Error::Queue { source }))
}

#[cfg(test)]
mod tests {
    use abi::Addr;
    use image::SpaceId;

    use super::*;

    #[test]
    fn neighbours_are_one_piece() {
        let extent = |first_page, pages| Extent {
            space: SpaceId(1),
            first_page,
            at: Addr::of_page(first_page),
            pages,
        };
        let found = pieces(&[extent(3, 2), extent(5, 1), extent(9, 1)], 100);
        let piece = |page: u64, start, pages: usize| Piece {
            at_bytes: page * 4096,
            to: start..start + pages * 4096,
        };
        assert_eq!(found, [piece(3, 100, 3), piece(9, 100 + 3 * 4096, 1)]);
    }

    #[test]
    fn both_contexts_read_the_same_and_leave_out_what_is_not_wanted() {
        let file = tempfile::tempfile().unwrap();
        let bytes = testkit::volumes::noise(900 << 10, 3);
        file.write_all_at(&bytes, 0).unwrap();
        let mut live = Bits::default();
        live.insert(0..900);
        live.remove(40..41);
        let extents = [(0, 20), (30, 1), (200, 25)].map(|(first_page, pages)| Extent {
            space: SpaceId(1),
            first_page,
            at: Addr::of_page(first_page),
            pages,
        });
        let (pace, bad) = (RateLimit::new(None), BadPages::default());
        let mut blocks = Blocks {
            space: crate::place::VOLUME,
            file: &file,
            live: &live,
            block_bytes: 1024,
            replayed: None,
            context: IoContext::Shared,
            pace: &pace,
            bad: &bad,
            seen: None,
        };
        let mut expected = Vec::new();
        for (at, end) in [(0, 20), (30, 31), (200, 225)] {
            expected.extend_from_slice(&bytes[at * 4096..end * 4096]);
        }
        expected[40 << 10..41 << 10].fill(0);
        let mut read = vec![1; expected.len()];
        blocks.read(&extents, &mut read).unwrap();
        assert!(read == expected);
        if let Some(mut queue) = blocks.queue() {
            queue
                .start(7, &extents, Buffer::new(expected.len()))
                .unwrap();
            // The end of the volume is behind its last page: that is left to the other way.
            let behind = Extent {
                first_page: 224,
                pages: 2,
                ..extents[1]
            };
            queue.start(8, &[behind], Buffer::new(8192)).unwrap();
            for _ in 0..2 {
                let (number, mut buffer, is_whole) = queue.finish().unwrap();
                assert_eq!(is_whole, number == 7);
                assert!(number == 8 || buffer.bytes() == expected);
            }
        }
        blocks.context = IoContext::Separate;
        assert!(blocks.queue().is_none());
    }
}
