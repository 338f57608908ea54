//! A part of a target's memory that is served.
use std::ops::Range;
use std::sync::Arc;

use abi::bits::words_of;
use abi::{Addr, PAGE_BYTES, Span};
use image::{Granule, SpaceId};
use sys::words::Words;

use crate::bits::Bits;

/// Consecutive pages of a space and where the target has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Their address in the target: a multiple of the granule.
    pub at: Addr,
    /// How long they are in bytes: a multiple of the granule.
    pub bytes: u64,
    /// Their space.
    pub space: SpaceId,
    /// The number of the first in the space.
    pub first_page: u64,
    /// How large the target's pages are.
    pub granule: Granule,
}

impl Region {
    /// The target's addresses.
    #[must_use]
    pub const fn span(&self) -> Span {
        Span::new(self.at, self.bytes)
    }

    /// The size of one of the target's pages.
    #[must_use]
    pub const fn granule_bytes(&self) -> u64 {
        self.granule.pages() * PAGE_BYTES
    }

    /// How many of the target's pages it has.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.bytes / self.granule_bytes()
    }

    /// Tells whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the addresses of pages in the target.
    pub(crate) const fn span_of(&self, pages: &Range<u64>) -> Span {
        let size = self.granule_bytes();
        Span::new(
            self.at.plus(pages.start * size),
            (pages.end - pages.start) * size,
        )
    }

    /// The number of the target's page that holds `addr`, which is in the region.
    pub(crate) const fn number_of(&self, addr: Addr) -> u64 {
        (addr.0 - self.at.0) / self.granule_bytes()
    }

    /// The pages of the target that lie wholly in `span`, and those that it cuts.
    pub(crate) fn numbers_of(&self, span: Span) -> (Range<u64>, Vec<u64>) {
        let part = span.intersect(self.span());
        if part.is_empty() {
            return (0..0, Vec::new());
        }
        let size = self.granule_bytes();
        let (from, to) = (part.start.0 - self.at.0, part.end.0 - self.at.0);
        let (start, end) = (from.div_ceil(size), to / size);
        let mut cut = Vec::new();
        if start > end {
            // All of it lies in one page.
            return (0..0, vec![end]);
        }
        if !from.is_multiple_of(size) {
            cut.push(start - 1);
        }
        if !to.is_multiple_of(size) {
            cut.push(end);
        }
        (start..end, cut)
    }

    /// The pages of the image that the target's are.
    pub(crate) const fn image_pages(&self, pages: &Range<u64>) -> Range<u64> {
        let size = self.granule.pages();
        self.first_page + pages.start * size..self.first_page + pages.end * size
    }
}

/// State of a region's pages, by their number in it.
#[derive(Debug)]
pub(crate) struct PageStates {
    /// Brought in by us.
    pub installed: Bits,
    /// Somebody is bringing them in.
    pub claimed: Bits,
    /// The kernel brings them in by itself, as zeros.
    pub native: Bits,
    /// Given up by the target: they read as zeros, unless it has written to them since.
    pub removed: Bits,
    /// The same, since the last diff.
    pub removed_since: Bits,
    /// Given up before a diff not long ago, which found them there all the same: the target's call
    /// may not have come to them yet.
    pub late: Bits,
    /// Parts of huge pages, in pages of 4 KiB, that were given up before the page came in.
    pub punched: Bits,
    /// Brought in before anybody asked.
    pub early: Bits,
    /// Those of which the next diff must look at the contents.
    pub suspects: Bits,
    /// Told to be written, where the kernel tells each.
    pub written: Bits,
    /// Found to be written for a diff that is not kept yet.
    pub unsaved: Bits,
    /// Given up before such a diff.
    pub unsaved_removed: Bits,
    /// Looked at for such a diff.
    pub unsaved_suspects: Bits,
}

impl PageStates {
    /// What stands in `words`, from the word `from` on, of the pages of a region.
    pub fn new(region: &Region, words: &Arc<Words>, mut from: usize) -> Self {
        let mut next = |limit: u64| {
            let bits = Bits::new(words.clone(), from, limit);
            from += words_of(limit);
            bits
        };
        let pages = region.len();
        Self {
            installed: next(pages),
            claimed: next(pages),
            native: next(pages),
            removed: next(pages),
            removed_since: next(pages),
            late: next(pages),
            punched: next(Self::parts(region)),
            early: next(pages),
            suspects: next(pages),
            written: next(pages),
            unsaved: next(pages),
            unsaved_removed: next(pages),
            unsaved_suspects: next(pages),
        }
    }

    /// How many words that takes.
    pub fn words(region: &Region) -> usize {
        const SETS_OF_PAGES: usize = 12;
        SETS_OF_PAGES * words_of(region.len()) + words_of(Self::parts(region))
    }

    /// How many parts of pages can be given up.
    fn parts(region: &Region) -> u64 {
        match region.granule {
            // They are given up whole.
            Granule::Small => 0,
            Granule::Large | Granule::Huge => region.bytes / PAGE_BYTES,
        }
    }
}

/// Pages that a thread is bringing in, which others leave to it.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    known: &'a PageStates,
    pub range: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.known.claimed.remove(self.range.clone());
    }
}

impl PageStates {
    /// Claims the first pages of `range`, as many as nobody else has; none where somebody has the
    /// first.
    pub fn claim(&self, range: Range<u64>) -> Option<Claim<'_>> {
        let range = self.claimed.claim(range);
        (!range.is_empty()).then_some(Claim { known: self, range })
    }

    /// The first page from `from` on that is the image's and not there yet; the end of the region
    /// where there is none.
    pub fn next_missing(&self, from: u64) -> u64 {
        let sets = [&self.installed, &self.native, &self.removed];
        let mut at = from;
        loop {
            let next = sets.iter().fold(at, |at, set| set.next(at, false));
            if next == at {
                return at;
            }
            at = next;
        }
    }

    /// The first page from `from` on that is not so.
    pub fn next_settled(&self, from: u64) -> u64 {
        let sets = [&self.installed, &self.native, &self.removed];
        let first = sets.iter().map(|set| set.next(from, true)).min();
        first.unwrap_or(from)
    }

    /// The first pages of `range` that are the image's and not there yet.
    pub fn missing(&self, range: Range<u64>) -> Range<u64> {
        let start = self.next_missing(range.start).min(range.end);
        start..self.next_settled(start).clamp(start, range.end)
    }
}

impl Claim<'_> {
    /// Claims the pages from `start` on before these as well, if all are free.
    pub fn extend_back(&mut self, start: u64) {
        let before = self.known.claimed.claim(start..self.range.start);
        match before.end == self.range.start {
            true => self.range.start = start,
            false => self.known.claimed.remove(before),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_a_span_cuts_are_told_apart() {
        let region = Region {
            at: Addr(4 << 30),
            bytes: 8 << 21,
            space: SpaceId(1),
            first_page: 512,
            granule: Granule::Large,
        };
        let span = |from: u64, to: u64| Span {
            start: Addr((4 << 30) + from),
            end: Addr((4 << 30) + to),
        };
        let mib = 1 << 20;
        assert_eq!(region.numbers_of(span(0, 16 * mib)), (0..8, vec![]));
        assert_eq!(region.numbers_of(span(mib, 7 * mib)), (1..3, vec![0, 3]));
        assert_eq!(region.numbers_of(span(mib / 2, mib)), (0..0, vec![0]));
        assert_eq!(region.numbers_of(span(mib, 3 * mib)), (1..1, vec![0, 1]));
        assert_eq!(region.numbers_of(span(20 * mib, 30 * mib)).0, 0..0);
        assert_eq!(region.image_pages(&(1..3)), 1024..2048);
        assert_eq!(region.number_of(Addr((4 << 30) + 5 * mib)), 2);
    }

    #[test]
    fn missing_pages_lie_between_those_that_are_there_native_or_given_up() {
        let region = Region {
            at: Addr(1 << 30),
            bytes: 200 * PAGE_BYTES,
            space: SpaceId(1),
            first_page: 0,
            granule: Granule::Small,
        };
        let words = Arc::new(Words::own(PageStates::words(&region)).expect("memory"));
        let known = PageStates::new(&region, &words, 0);
        known.installed.insert(0..10);
        known.native.insert(10..130);
        known.removed.insert(130..131);
        known.installed.insert(140..150);
        assert_eq!((known.next_missing(0), known.next_settled(0)), (131, 0));
        assert_eq!(
            (known.next_missing(135), known.next_settled(135)),
            (135, 140)
        );
        assert_eq!(
            (known.next_missing(200), known.next_settled(150)),
            (200, 200)
        );
        assert_eq!(known.missing(0..200), 131..140);
        assert_eq!(known.missing(5..100), 100..100);
        assert_eq!(known.missing(150..170), 150..170);
    }
}
