//! Bringing in what comes next for a target that goes through its memory in order.
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::session::lock;

/// How far ahead of the target the image is read, at the most.
const AHEAD_BYTES: u64 = 16 << 20;
/// Most bytes of one prefetch: small pages take longer than huge ones.
const PIECE_BYTES: u64 = 512 << 10;
/// Over how many gaps of pages that nobody has to bring in that is looked, at the most.
const GAPS_MAX: usize = 1024;

/// State of the pages of a target, by region.
pub(crate) trait Pages {
    /// How large the pages of region `number` are.
    fn page_bytes(&self, number: usize) -> u64;
    /// The first page from `from` on that is still to be brought in.
    fn next_missing(&self, number: usize, from: u64) -> u64;
    /// The first page from `from` on that is not, as it is there or left to the kernel.
    fn next_settled(&self, number: usize, from: u64) -> u64;
}

/// Position of the target, and its next pages.
#[derive(Debug, Default)]
struct Stream {
    /// The region.
    number: usize,
    /// End of the last pages that were fetched for a fault.
    last: u64,
    /// The next page to be brought in ahead.
    next: u64,
    /// End of the window.
    limit: u64,
    /// How far from the last fault, in bytes; none before two faults were in order.
    window_bytes: u64,
    ended: bool,
}

/// State that prefetching threads share.
#[derive(Debug, Default)]
pub(crate) struct Prefetcher {
    stream: Mutex<Stream>,
    more: Condvar,
}

/// Consecutive pages of a region that are to be brought in.
pub(crate) type Piece = (usize, Range<u64>);

impl Prefetcher {
    /// Notes that a thread waited for `pages` of region `number`, which has `len`. The second one
    /// in order has more brought in, and each one after twice that. Pages that nobody has to bring
    /// in, as they are there or left to the kernel, do not count in that order.
    pub fn note(&self, number: usize, pages: Range<u64>, len: u64, known: &impl Pages) {
        let mut stream = lock(&self.stream);
        let reached = stream.limit.max(stream.last);
        let in_order = stream.number == number
            && pages.start >= stream.last
            && (pages.start <= reached || known.next_missing(number, reached) >= pages.start);
        if in_order {
            let page_bytes = known.page_bytes(number);
            let window_bytes = (2 * stream.window_bytes).max(2 * PIECE_BYTES.max(page_bytes));
            stream.window_bytes = window_bytes.min(AHEAD_BYTES);
            stream.next = stream.next.max(pages.end);
            let window_pages = stream.window_bytes / page_bytes;
            stream.limit = end_of_window(known, number, pages.end, window_pages).min(len);
        } else {
            stream.number = number;
            stream.window_bytes = 0;
            stream.next = pages.end;
            stream.limit = pages.end;
        }
        stream.last = pages.end;
        if stream.next < stream.limit {
            self.more.notify_one();
        }
    }

    /// Tells whether there is something to be done.
    pub fn is_wanted(&self) -> bool {
        let stream = lock(&self.stream);
        stream.next < stream.limit
    }

    /// Returns the next piece to fetch, where there is one.
    pub fn take(&self, known: &impl Pages) -> Option<Piece> {
        take(&mut lock(&self.stream), known)
    }

    /// The same, but waits for it; none when it is over.
    pub fn wait(&self, known: &impl Pages) -> Option<Piece> {
        let mut stream = lock(&self.stream);
        while !stream.ended {
            if let Some(piece) = take(&mut stream, known) {
                return Some(piece);
            }
            let woken = self.more.wait(stream);
            stream = woken.unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Has those who wait go on waiting, or end.
    pub fn set_ended(&self, ended: bool) {
        lock(&self.stream).ended = ended;
        self.more.notify_all();
    }
}

/// Where so many pages end that are to be brought in, from `from` on.
fn end_of_window(known: &impl Pages, number: usize, from: u64, mut pages: u64) -> u64 {
    let mut end = from;
    for _ in 0..GAPS_MAX {
        let start = known.next_missing(number, end);
        let next = known.next_settled(number, start);
        end = next.min(start + pages);
        pages -= end - start;
        if pages == 0 || start == next {
            break;
        }
    }
    end
}

fn take(stream: &mut Stream, known: &impl Pages) -> Option<Piece> {
    stream.next = match stream.next < stream.limit {
        true => known.next_missing(stream.number, stream.next),
        false => stream.next,
    };
    if stream.next >= stream.limit {
        return None;
    }
    let page_bytes = known.page_bytes(stream.number);
    let pages = (PIECE_BYTES / page_bytes).max(1);
    // Pieces begin where chunks of the image do.
    let end = (stream.next / pages * pages + pages).min(stream.limit);
    let piece = stream.next..end;
    stream.next = end;
    Some((stream.number, piece))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE: u64 = 2 << 20;

    /// Pages of a size, of which those of each second piece of so many are left to the kernel;
    /// none where there is no such piece.
    struct TestPages {
        page_bytes: u64,
        holes_of: Option<u64>,
    }

    const fn whole(page_bytes: u64) -> TestPages {
        TestPages {
            page_bytes,
            holes_of: None,
        }
    }

    impl Pages for TestPages {
        fn page_bytes(&self, _: usize) -> u64 {
            self.page_bytes
        }

        fn next_missing(&self, _: usize, from: u64) -> u64 {
            match self.holes_of {
                Some(pages) if from / pages % 2 == 1 => (from / pages + 1) * pages,
                _ => from,
            }
        }

        fn next_settled(&self, _: usize, from: u64) -> u64 {
            match self.holes_of {
                Some(pages) if from / pages % 2 == 1 => from,
                Some(pages) => (from / pages + 1) * pages,
                None => u64::MAX,
            }
        }
    }

    fn taken(ahead: &Prefetcher, page_bytes: u64) -> Vec<Piece> {
        taken_of(ahead, &whole(page_bytes))
    }

    fn taken_of(ahead: &Prefetcher, known: &TestPages) -> Vec<Piece> {
        std::iter::from_fn(|| ahead.take(known)).collect()
    }

    #[test]
    fn pages_left_to_the_kernel_are_no_break_of_the_order() {
        let known = TestPages {
            page_bytes: 4096,
            holes_of: Some(16),
        };
        let ahead = Prefetcher::default();
        ahead.note(0, 32..48, 1000, &known);
        ahead.note(0, 64..80, 1000, &known);
        // A window of 256 pages, without those of the holes.
        let pieces = taken_of(&ahead, &known);
        assert_eq!(pieces.first(), Some(&(0, 96..128)));
        assert_eq!(pieces.last(), Some(&(0, 512..592)));
        // Behind all of that and a hole.
        ahead.note(0, 608..624, 1000, &known);
        assert!(taken_of(&ahead, &known).len() > 2);
        // A page between was left out: that is a jump.
        ahead.note(0, 0..16, 1000, &known);
        ahead.note(0, 64..80, 1000, &known);
        assert_eq!(taken_of(&ahead, &known), []);
    }

    #[test]
    fn huge_pages_with_holes_between_them_come_ahead() {
        let known = TestPages {
            page_bytes: HUGE,
            holes_of: Some(1),
        };
        let ahead = Prefetcher::default();
        ahead.note(0, 2..3, 40, &known);
        ahead.note(0, 4..5, 40, &known);
        assert_eq!(taken_of(&ahead, &known), [(0, 6..7), (0, 8..9)]);
        ahead.note(0, 10..11, 40, &known);
        assert_eq!(taken_of(&ahead, &known).len(), 4);
        ahead.note(0, 20..21, 40, &known);
        assert_eq!(taken_of(&ahead, &known).len(), 8);
        ahead.note(0, 38..39, 40, &known);
        assert_eq!(taken_of(&ahead, &known), []);
    }

    #[test]
    fn who_goes_in_order_has_more_brought_in() {
        let ahead = Prefetcher::default();
        ahead.note(1, 10..11, 100, &whole(HUGE));
        assert_eq!(taken(&ahead, HUGE), []);
        ahead.note(1, 11..12, 100, &whole(HUGE));
        assert_eq!(taken(&ahead, HUGE), [(1, 12..13), (1, 13..14)]);
        // It was faster than we are.
        ahead.note(1, 13..14, 100, &whole(HUGE));
        assert_eq!(taken(&ahead, HUGE).len(), 4);
        ahead.note(1, 18..19, 100, &whole(HUGE));
        assert_eq!(taken(&ahead, HUGE).len(), 8);
        ahead.note(1, 27..28, 30, &whole(HUGE));
        assert_eq!(taken(&ahead, HUGE), [(1, 28..29), (1, 29..30)]);
        assert!(!ahead.is_wanted());
    }

    #[test]
    fn who_jumps_has_nothing_more() {
        let ahead = Prefetcher::default();
        for (number, page) in [(0, 5), (0, 900), (1, 901), (1, 17), (0, 18)] {
            ahead.note(number, page..page + 1, 1000, &whole(4096));
            assert_eq!(taken(&ahead, 4096), []);
        }
        ahead.note(0, 19..35, 1000, &whole(4096));
        let pieces = taken(&ahead, 4096);
        assert_eq!(pieces[..2], [(0, 35..128), (0, 128..256)]);
        assert_eq!(pieces.last(), Some(&(0, 256..291)));
    }
}
