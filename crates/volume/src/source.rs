//! A volume as a source of pages: what is not in use reads as zeros.

use std::fs::File;
use std::os::unix::fs::FileExt;

use image::PAGE_BYTES;
use pages::{Error, Extent, Source};

use crate::bits::Bits;

/// Pages of a device, without the bytes of blocks that mean nothing.
pub struct Blocks<'a> {
    /// The device, open past the cache.
    pub file: &'a File,
    /// The blocks whose bytes are wanted.
    pub live: &'a Bits,
    /// Bytes of a block.
    pub block_bytes: u32,
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

    /// Clears what is not wanted of a page.
    fn mask(&self, page: u64, bytes: &mut [u8]) {
        let per_page = PAGE_BYTES as u64 / u64::from(self.block_bytes);
        let blocks = bytes.chunks_exact_mut(self.block_bytes as usize);
        for (block, bytes) in (page * per_page..).zip(blocks) {
            if !self.live.contains(block) {
                bytes.fill(0);
            }
        }
    }
}

impl Source for Blocks<'_> {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> pages::Result<()> {
        let (mut first, mut at) = (0, 0);
        while first < extents.len() {
            let mut end = extents[first].numbers().end;
            let mut next = first + 1;
            while extents.get(next).is_some_and(|one| one.first_page == end) {
                end = extents[next].numbers().end;
                next += 1;
            }
            let start = extents[first].first_page;
            let len = (end - start) as usize * PAGE_BYTES;
            let bytes = &mut buffer[at..at + len];
            self.read_run(start * PAGE_BYTES as u64, bytes)?;
            if (self.block_bytes as usize) < PAGE_BYTES {
                let pages = bytes.chunks_exact_mut(PAGE_BYTES);
                (start..)
                    .zip(pages)
                    .for_each(|(page, bytes)| self.mask(page, bytes));
            }
            (first, at) = (next, at + len);
        }
        Ok(())
    }
}
