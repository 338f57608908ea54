//! Bringing in what comes next for a target that goes through its memory in order.
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::session::lock;

/// How far ahead of the target the image is read, at the most.
const AHEAD_BYTES: u64 = 16 << 20;
/// What is brought in ahead together, at the most: small pages take longer than huge ones.
const PIECE_BYTES: u64 = 512 << 10;

/// Where the target is, and what it is going to want.
#[derive(Debug, Default)]
struct Stream {
    /// The region.
    number: usize,
    /// Where the last pages end that were brought in for a fault.
    last: u64,
    /// The next page to be brought in ahead.
    next: u64,
    /// Where that ends for now.
    limit: u64,
    /// How far from the last fault, in bytes; none before two faults were in order.
    window_bytes: u64,
    ended: bool,
}

/// What threads that bring pages in ahead have in common.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    stream: Mutex<Stream>,
    more: Condvar,
}

/// Consecutive pages of a region that are to be brought in.
pub(crate) type Piece = (usize, Range<u64>);

impl Ahead {
    /// Notes that a thread waited for pages up to `end` of region `number`, which has `len` pages
    /// of `page_bytes`. The second one in order has more brought in, and each one after twice that.
    pub fn note(&self, number: usize, pages: Range<u64>, len: u64, page_bytes: u64) {
        let mut stream = lock(&self.stream);
        let in_order = stream.number == number
            && (stream.last..=stream.limit.max(stream.last)).contains(&pages.start);
        if in_order {
            let window_bytes = (2 * stream.window_bytes).max(2 * PIECE_BYTES.max(page_bytes));
            stream.window_bytes = window_bytes.min(AHEAD_BYTES);
            stream.next = stream.next.max(pages.end);
            stream.limit = (pages.end + stream.window_bytes / page_bytes).min(len);
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

    /// Whether there is something to be done.
    pub fn is_wanted(&self) -> bool {
        let stream = lock(&self.stream);
        stream.next < stream.limit
    }

    /// What is to be brought in next, where there is something.
    pub fn take(&self, page_bytes: impl Fn(usize) -> u64) -> Option<Piece> {
        take(&mut lock(&self.stream), page_bytes)
    }

    /// The same, but waits for it; none when it is over.
    pub fn wait(&self, page_bytes: impl Fn(usize) -> u64) -> Option<Piece> {
        let mut stream = lock(&self.stream);
        while !stream.ended {
            if let Some(piece) = take(&mut stream, &page_bytes) {
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

fn take(stream: &mut Stream, page_bytes: impl Fn(usize) -> u64) -> Option<Piece> {
    if stream.next >= stream.limit {
        return None;
    }
    let page_bytes = page_bytes(stream.number);
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

    fn taken(ahead: &Ahead, page_bytes: u64) -> Vec<Piece> {
        std::iter::from_fn(|| ahead.take(|_| page_bytes)).collect()
    }

    #[test]
    fn who_goes_in_order_has_more_brought_in() {
        let ahead = Ahead::default();
        ahead.note(1, 10..11, 100, HUGE);
        assert_eq!(taken(&ahead, HUGE), []);
        ahead.note(1, 11..12, 100, HUGE);
        assert_eq!(taken(&ahead, HUGE), [(1, 12..13), (1, 13..14)]);
        // It was faster than we are.
        ahead.note(1, 13..14, 100, HUGE);
        assert_eq!(taken(&ahead, HUGE).len(), 4);
        ahead.note(1, 18..19, 100, HUGE);
        assert_eq!(taken(&ahead, HUGE).len(), 8);
        ahead.note(1, 27..28, 30, HUGE);
        assert_eq!(taken(&ahead, HUGE), [(1, 28..29), (1, 29..30)]);
        assert!(!ahead.is_wanted());
    }

    #[test]
    fn who_jumps_has_nothing_more() {
        let ahead = Ahead::default();
        for (number, page) in [(0, 5), (0, 900), (1, 901), (1, 17), (0, 18)] {
            ahead.note(number, page..page + 1, 1000, 4096);
            assert_eq!(taken(&ahead, 4096), []);
        }
        ahead.note(0, 19..35, 1000, 4096);
        let pieces = taken(&ahead, 4096);
        assert_eq!(pieces[..2], [(0, 35..128), (0, 128..256)]);
        assert_eq!(pieces.last(), Some(&(0, 256..291)));
    }
}
