//! What a target wanted, in order, so that the next one has it before it asks.
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use abi::PAGE_BYTES;
use image::SpaceId;

use crate::install::MOST_BYTES;
use crate::prefetch::Piece;
use crate::session::lock;
use crate::{Region, Result, Session};

/// Recorded ranges of one session, at the most.
const RECORDED_MAX: usize = 1 << 20;

/// Consecutive pages of a space that were wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Their space.
    pub space: SpaceId,
    /// Which, by number, in pages of 4 KiB.
    pub pages: Range<u64>,
}

impl Session {
    /// Has what is brought in from here on recorded, unless nobody asked for it.
    pub fn record(&self) {
        let _ = self.trace.set(Mutex::default());
    }

    /// Returns the recorded ranges, in order.
    #[must_use]
    pub fn recorded(&self) -> Vec<PageRange> {
        self.trace
            .get()
            .map_or_else(Vec::new, |all| lock(all).clone())
    }

    /// Notes that pages were brought in for who wants them.
    pub(crate) fn note_wanted(&self, space: SpaceId, pages: Range<u64>) {
        let Some(all) = self.trace.get() else {
            return;
        };
        let mut all = lock(all);
        if let Some(last) = all.last_mut()
            && last.space == space
            && last.pages.end == pages.start
        {
            last.pages.end = pages.end;
        } else if all.len() < RECORDED_MAX {
            all.push(PageRange { space, pages });
        }
    }

    /// Brings in what others wanted, in their order, giving way to faults; until it is done or
    /// `stopped` says so. Several threads may do it together: `at` is where they are, 0 at first.
    ///
    /// # Errors
    /// Those of [`Session::serve`].
    pub fn fetch_wanted(
        &self,
        wanted: &[PageRange],
        at: &AtomicUsize,
        stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        let pieces = self.pieces(wanted);
        let next = || pieces.get(at.fetch_add(1, Relaxed)).cloned();
        self.fetch_pieces(next, stopped)
    }

    /// The target's pages that hold those of `wanted`, in pieces.
    fn pieces(&self, wanted: &[PageRange]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for wanted in wanted {
            for (number, (region, _)) in self.regions.iter().enumerate() {
                cut(region, wanted, |piece| pieces.push((number, piece)));
            }
        }
        pieces
    }
}

fn cut(region: &Region, wanted: &PageRange, mut push: impl FnMut(Range<u64>)) {
    let end = region.first_page + region.bytes / PAGE_BYTES;
    let start = wanted.pages.start.max(region.first_page);
    let end = wanted.pages.end.min(end);
    if region.space != wanted.space || start >= end {
        return;
    }
    let size = region.granule.pages();
    let (mut at, end) = (
        (start - region.first_page) / size,
        (end - region.first_page).div_ceil(size),
    );
    let most = (MOST_BYTES / region.granule_bytes()).max(1);
    while at < end {
        let until = (at / most * most + most).min(end);
        push(at..until);
        at = until;
    }
}

#[cfg(test)]
mod tests {
    use abi::Addr;
    use image::Granule;

    use super::*;

    #[test]
    fn what_was_wanted_is_cut_to_the_pages_of_a_region() {
        let pieces = |granule, first_page, pages: Range<u64>| {
            let region = Region {
                at: Addr(1 << 30),
                bytes: 8 << 21,
                space: SpaceId(1),
                first_page,
                granule,
            };
            let space = SpaceId(1);
            let mut pieces = Vec::new();
            cut(&region, &PageRange { space, pages }, |piece| {
                pieces.push(piece)
            });
            pieces
        };
        assert_eq!(
            pieces(Granule::Small, 512, 0..600),
            vec![Range { start: 0, end: 88 }]
        );
        assert_eq!(
            pieces(Granule::Small, 0, 500..1030),
            [500..512, 512..1024, 1024..1030]
        );
        assert_eq!(pieces(Granule::Large, 512, 1000..1025), [0..1, 1..2]);
        assert_eq!(pieces(Granule::Large, 512, 5000..6000), []);
        assert_eq!(pieces(Granule::Small, 512, 0..512), []);
    }
}
