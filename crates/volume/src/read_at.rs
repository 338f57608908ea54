//! Bytes at offsets: of a device, of an image, of memory.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use image::{PAGE_BYTES, Reader, SpaceId};

use crate::{Error, Result};

/// A source of bytes that several threads read at offsets.
pub trait ReadAt: Sync {
    /// How many bytes there are.
    fn len_bytes(&self) -> u64;

    /// Fills `bytes` from `at_bytes` on.
    ///
    /// # Errors
    /// Fails unless all of them were read, also where there are not so many.
    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()>;

    /// Learns that bytes are going to be read soon.
    fn read_ahead(&self, at_bytes: u64, len_bytes: u64) {
        let _ = (at_bytes, len_bytes);
    }
}

/// A file or a device that is open for reading, through the cache that the kernel's own file
/// system uses for its metadata.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    len_bytes: u64,
}

impl OpenFile {
    /// Takes the first `len_bytes` of `file`.
    #[must_use]
    pub const fn new(file: File, len_bytes: u64) -> Self {
        Self { file, len_bytes }
    }
}

fn beyond(at_bytes: u64, len: usize) -> Error {
    let source = io::ErrorKind::UnexpectedEof.into();
    Error::Read {
        at_bytes,
        len,
        source,
    }
}

/// Refuses bytes behind the end.
fn check_inside(len_bytes: u64, at_bytes: u64, len: usize) -> Result<()> {
    let end = at_bytes.checked_add(len as u64);
    match end.is_some_and(|end| end <= len_bytes) {
        true => Ok(()),
        false => Err(beyond(at_bytes, len)),
    }
}

impl ReadAt for OpenFile {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        check_inside(self.len_bytes, at_bytes, bytes.len())?;
        let len = bytes.len();
        let read = self.file.read_exact_at(bytes, at_bytes);
        read.map_err(|source| Error::Read {
            at_bytes,
            len,
            source,
        })
    }

    fn read_ahead(&self, at_bytes: u64, len_bytes: u64) {
        if let Some(len_bytes) = NonZero::new(len_bytes) {
            // Where that is not possible, it is read when it is needed.
            let advice = rustix::fs::Advice::WillNeed;
            let _ = rustix::fs::fadvise(&self.file, at_bytes, Some(len_bytes), advice);
        }
    }
}

impl ReadAt for Vec<u8> {
    fn len_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        check_inside(self.len() as u64, at_bytes, bytes.len())?;
        let at = at_bytes as usize;
        bytes.copy_from_slice(&self[at..at + bytes.len()]);
        Ok(())
    }
}

/// A space of an image, whose pages that the image does not describe are zero.
pub struct ImageSpace {
    reader: Arc<Reader>,
    space: SpaceId,
    len_bytes: u64,
}

impl ImageSpace {
    /// The first `len_bytes` of a space.
    #[must_use]
    pub const fn new(reader: Arc<Reader>, space: SpaceId, len_bytes: u64) -> Self {
        Self {
            reader,
            space,
            len_bytes,
        }
    }
}

impl ReadAt for ImageSpace {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        check_inside(self.len_bytes, at_bytes, bytes.len())?;
        let page_bytes = PAGE_BYTES as u64;
        let first = at_bytes / page_bytes;
        let pages = (at_bytes + bytes.len() as u64).div_ceil(page_bytes) - first;
        let skip = (at_bytes % page_bytes) as usize;
        let mut whole = vec![0; pages as usize * PAGE_BYTES];
        for known in self.reader.described(self.space, first, pages) {
            let at = (known.start - first) as usize * PAGE_BYTES;
            let len = (known.end - known.start) as usize * PAGE_BYTES;
            let part = &mut whole[at..at + len];
            self.reader.read_pages(self.space, known.start, part)?;
        }
        bytes.copy_from_slice(&whole[skip..skip + bytes.len()]);
        Ok(())
    }
}
