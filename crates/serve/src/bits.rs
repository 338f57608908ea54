//! Sets of numbers from 0 on, changed by several threads.
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use sys::words::Words;

/// A set of numbers below a limit. Who needs what several calls tell to fit together holds a lock
/// of his own.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Arc<Words>,
    /// The first of its words.
    from: usize,
    limit: u64,
}

impl Bits {
    /// No number of `0..limit`, in memory of its own.
    ///
    /// # Panics
    /// Where there is none.
    pub fn own(limit: u64) -> Self {
        let words = Words::own(Self::words(limit).max(1)).expect("there is memory");
        Self::new(Arc::new(words), 0, limit)
    }

    /// The set of numbers of `0..limit` that stands in `words` from the word `from` on.
    pub fn new(words: Arc<Words>, from: usize, limit: u64) -> Self {
        assert!(from + Self::words(limit) <= words.len(), "it has room");
        Self { words, from, limit }
    }

    /// How many words the numbers of `0..limit` take.
    pub const fn words(limit: u64) -> usize {
        limit.div_ceil(64) as usize
    }

    fn word(&self, number: u64) -> &AtomicU64 {
        &self.words[self.from + (number / 64) as usize]
    }

    /// Whether `number` is in the set.
    pub fn has(&self, number: u64) -> bool {
        let word = self.word(number).load(Acquire);
        word >> (number % 64) & 1 == 1
    }

    /// Adds numbers.
    pub fn add(&self, range: Range<u64>) {
        self.change(range, |word, mask| {
            word.fetch_or(mask, AcqRel);
        });
    }

    /// Takes numbers out.
    pub fn remove(&self, range: Range<u64>) {
        self.change(range, |word, mask| {
            word.fetch_and(!mask, AcqRel);
        });
    }

    /// Adds numbers from the beginning of `range` on, up to the first that is in the set already;
    /// those that were added.
    pub fn claim(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.limit);
        let mut at = range.start;
        while at < end {
            let until = (at / 64 * 64 + 64).min(end);
            let mask = (u64::MAX >> (64 - (until - at))) << (at % 64);
            let word = self.word(at);
            let taken = word.fetch_or(mask, AcqRel) & mask;
            if taken != 0 {
                // What was added behind the first that is taken is nobody's.
                let first = u64::from(taken.trailing_zeros());
                let behind = mask & !taken & u64::MAX.checked_shl(first as u32).unwrap_or(0);
                word.fetch_and(!behind, AcqRel);
                return range.start..at / 64 * 64 + first;
            }
            at = until;
        }
        range.start..end.max(range.start)
    }

    /// Moves all numbers to another set with the same limit.
    pub fn move_to(&self, other: &Self) {
        for range in self.ranges() {
            other.add(range.clone());
            self.remove(range);
        }
    }

    fn change(&self, range: Range<u64>, change: impl Fn(&AtomicU64, u64)) {
        let end = range.end.min(self.limit);
        let mut at = range.start;
        while at < end {
            let until = (at / 64 * 64 + 64).min(end);
            let len = until - at;
            let mask = (u64::MAX >> (64 - len)) << (at % 64);
            change(self.word(at), mask);
            at = until;
        }
    }

    /// The first number from `from` on that is in the set, or, without `set`, that is not; the
    /// limit where there is none.
    pub fn next(&self, from: u64, set: bool) -> u64 {
        let mut at = from;
        while at < self.limit {
            let word = self.word(at).load(Acquire);
            let word = if set { word } else { !word } >> (at % 64);
            if word != 0 {
                return (at + u64::from(word.trailing_zeros())).min(self.limit);
            }
            at = at / 64 * 64 + 64;
        }
        self.limit
    }

    /// The ranges of numbers that are in the set.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = self.next(0, true);
        while at < self.limit {
            let end = self.next(at, false);
            ranges.push(at..end);
            at = self.next(end, true);
        }
        ranges
    }

    /// How many numbers are in the set.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Acquire).count_ones());
        let words = &self.words[self.from..self.from + Self::words(self.limit)];
        words.iter().map(ones).sum()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use super::*;

    fn none(limit: u64) -> Bits {
        let words = Words::own(1 + Bits::words(limit)).expect("memory");
        Bits::new(Arc::new(words), 1, limit)
    }

    #[test]
    fn ranges_come_and_go() {
        let bits = none(200);
        assert_eq!(bits.ranges(), []);
        bits.add(0..1);
        bits.add(63..130);
        bits.add(190..900);
        assert_eq!(bits.ranges(), [0..1, 63..130, 190..200]);
        bits.remove(64..128);
        assert_eq!(bits.ranges(), [0..1, 63..64, 128..130, 190..200]);
        assert_eq!(bits.count(), 14);
        assert!(bits.has(63) && !bits.has(64) && bits.has(199));
        assert_eq!((bits.next(1, true), bits.next(63, false)), (63, 64));
        assert_eq!((bits.next(195, false), bits.next(200, true)), (200, 200));
    }

    #[test]
    fn what_is_claimed_ends_where_others_begin() {
        let bits = none(200);
        assert_eq!(bits.claim(10..150), 10..150);
        assert_eq!(bits.claim(0..20), 0..10);
        assert_eq!(bits.claim(149..199), 149..149);
        assert_eq!(bits.claim(150..900), 150..200);
        assert_eq!(bits.ranges(), [0..200]);
        bits.remove(64..128);
        bits.remove(190..200);
        assert_eq!(bits.claim(100..195), 100..128);
        assert_eq!(bits.ranges(), [0..64, 100..190]);
    }

    #[test]
    fn what_is_moved_joins_what_was_there() {
        let (one, other) = (none(100), none(100));
        one.add(10..20);
        other.add(15..30);
        one.move_to(&other);
        assert_eq!((one.ranges(), other.ranges()), (vec![], vec![10..30]));
    }

    #[test]
    fn whole_words_are_no_special_case() {
        let bits = none(128);
        bits.add(0..128);
        assert_eq!(bits.ranges(), [0..128]);
        bits.remove(0..64);
        assert_eq!(bits.ranges(), [64..128]);
        assert_eq!(bits.next(0, true), 64);
    }
}
