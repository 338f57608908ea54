//! Consecutive pages, and how many of them are moved at a time.
use std::ops::Range;

use abi::{Addr, PAGE_BYTES, Span};
use image::SpaceId;

/// Consecutive pages of a space, and the address at which a source or a sink has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Their space.
    pub space: SpaceId,
    /// The number of the first page in its space.
    pub first_page: u64,
    /// Place of the first page: an address of a task, or an offset into an object.
    pub at: Addr,
    /// How many.
    pub pages: u64,
}

impl Extent {
    /// The pages of `span`, which have in their space the numbers that they have there.
    #[must_use]
    pub const fn of(space: SpaceId, span: Span) -> Self {
        Self {
            space,
            first_page: span.start.page(),
            at: span.start,
            pages: span.pages(),
        }
    }

    /// The pages `skip..skip + pages` of these.
    #[must_use]
    pub fn part(self, skip: u64, pages: u64) -> Self {
        let at = self.at.plus(skip * PAGE_BYTES);
        Self {
            first_page: self.first_page + skip,
            at,
            pages,
            ..self
        }
    }

    /// The addresses of the pages.
    ///
    /// # Panics
    /// When they leave the address space.
    #[must_use]
    pub const fn span(&self) -> Span {
        Span::new(self.at, self.pages * PAGE_BYTES)
    }

    /// The numbers of the pages in their space.
    #[must_use]
    pub const fn numbers(&self) -> Range<u64> {
        self.first_page..self.first_page + self.pages
    }

    /// The size of the pages in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.pages * PAGE_BYTES
    }
}

/// Extents of several sources cut into chunks: pieces that are moved together.
///
/// Every piece ends where the page's number in its space is a multiple of `chunk_pages`, so that
/// runs lie the same way in every image and large pages of a target are not cut across.
pub(crate) struct Chunks {
    pieces: Vec<(usize, Extent)>,
    chunks: Vec<Range<usize>>,
}

impl Chunks {
    /// Cuts extents, each with the number of its source, into chunks of at most `chunk_pages` pages
    /// and `max_pieces` pieces.
    pub fn new(
        extents: impl IntoIterator<Item = (usize, Extent)>,
        chunk_pages: u64,
        max_pieces: usize,
    ) -> Self {
        let mut pieces = Vec::new();
        for (source, extent) in extents {
            let mut done = 0;
            while done < extent.pages {
                let to_boundary = chunk_pages - (extent.first_page + done) % chunk_pages;
                let pages = to_boundary.min(extent.pages - done);
                pieces.push((source, extent.part(done, pages)));
                done += pages;
            }
        }
        let mut chunks: Vec<Range<usize>> = Vec::new();
        let mut pages = 0;
        for (number, (_, piece)) in pieces.iter().enumerate() {
            match chunks.last_mut() {
                Some(chunk) if pages + piece.pages <= chunk_pages && chunk.len() < max_pieces => {
                    chunk.end = number + 1;
                }
                _ => {
                    chunks.push(number..number + 1);
                    pages = 0;
                }
            }
            pages += piece.pages;
        }
        Self { pieces, chunks }
    }

    /// How many chunks there are.
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The pieces of one chunk, each with the number of its source.
    pub fn get(&self, number: usize) -> &[(usize, Extent)] {
        &self.pieces[self.chunks[number].clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(first_page: u64, pages: u64) -> Extent {
        Extent {
            space: SpaceId(1),
            first_page,
            at: Addr::of_page(first_page),
            pages,
        }
    }

    fn shape(chunks: &Chunks) -> Vec<Vec<(u64, u64)>> {
        let shape = |(_, piece): &(usize, Extent)| (piece.first_page, piece.pages);
        (0..chunks.len())
            .map(|number| chunks.get(number).iter().map(shape).collect())
            .collect()
    }

    #[test]
    fn small_extents_share_a_chunk() {
        let extents = || (0..30).map(|number| (number as usize / 10, extent(number * 100, 3)));
        let chunks = Chunks::new(extents(), 256, 1024);
        assert_eq!(chunks.len(), 1);
        // One of them lies across a boundary.
        assert_eq!(chunks.get(0).len(), 30);
        assert_eq!(Chunks::new(extents(), 256, 10).len(), 3);
    }

    #[test]
    fn large_extents_are_cut_at_boundaries() {
        let chunks = Chunks::new([(0, extent(250, 600)), (0, extent(1000, 0))], 256, 1024);
        assert_eq!(
            shape(&chunks),
            [
                vec![(250, 6)],
                vec![(256, 256)],
                vec![(512, 256)],
                vec![(768, 82)],
            ]
        );
    }

    #[test]
    fn parts_keep_their_addresses() {
        let part = extent(250, 600).part(6, 10);
        assert_eq!(
            (part.first_page, part.at, part.pages),
            (256, Addr(256 * 4096), 10)
        );
        assert_eq!(part.span(), Span::new(Addr(256 * 4096), 40960));
        assert_eq!(Extent::of(SpaceId(1), part.span()), part);
    }
}
