//! Pages of an image that targets have in common.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;

use abi::PAGE_BYTES;
use image::{Reader, SpaceId};
use sys::words::Words;

use crate::bits::{self, Bits};
use crate::session::lock;
use crate::{Error, Result};

/// How many threads can bring different parts in.
const PARTS: usize = 64;
/// Pages of a part.
const PART_PAGES: u64 = 512;
const PAGE_WORDS: usize = PAGE_BYTES as usize / 8;

/// The pages of a space as a file, which targets map for themselves alone: what they read is there
/// once, and what they write is their own. Nobody else can write to it. A page is in it when a
/// target wants it, and is the image's from the moment in which [`Share::fill`] says so.
#[derive(Debug)]
pub struct Share {
    words: Words,
    file: OwnedFd,
    space: SpaceId,
    filled: Bits,
    filling: [Mutex<()>; PARTS],
}

impl Share {
    /// None of the `pages` pages of a space.
    ///
    /// # Errors
    /// [`Error::Ledger`] where there is no memory.
    pub fn new(space: SpaceId, pages: u64) -> Result<Self> {
        let len = pages as usize * PAGE_WORDS;
        let (words, file) = Words::published("stillframe-pages", len).map_err(Error::Ledger)?;
        Ok(Self {
            words,
            file,
            space,
            filled: bits::none(pages),
            filling: [const { Mutex::new(()) }; PARTS],
        })
    }

    /// The file, for targets.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Has pages that follow each other in the file.
    pub(crate) fn fill(
        &self,
        image: &Reader,
        first: u64,
        pages: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        let mut at = first;
        let end = first + pages;
        while at < end {
            let part_end = (at / PART_PAGES * PART_PAGES + PART_PAGES).min(end);
            if self.filled.next(at, false) < part_end {
                let _alone = lock(&self.filling[(at / PART_PAGES) as usize % PARTS]);
                self.fill_alone(image, at, part_end, buffer)?;
            }
            at = part_end;
        }
        Ok(())
    }

    fn fill_alone(&self, image: &Reader, from: u64, to: u64, buffer: &mut [u8]) -> Result<()> {
        let mut at = self.filled.next(from, false);
        while at < to {
            let end = self.filled.next(at, true).min(to);
            let bytes = &mut buffer[..((end - at) * PAGE_BYTES) as usize];
            image.read_pages(self.space, at, bytes)?;
            let words = &self.words[at as usize * PAGE_WORDS..];
            for (word, bytes) in words.iter().zip(bytes.as_chunks::<8>().0) {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
            // The kernel maps them by a call that comes after this.
            self.filled.insert(at..end);
            at = self.filled.next(end, false);
        }
        Ok(())
    }

    /// How many bytes of the image it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.filled.count() * PAGE_BYTES
    }
}
