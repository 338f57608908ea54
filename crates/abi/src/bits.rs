//! Sets of numbers, kept as a bit for each: one that grows, and one that several threads change.
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::iter::from_fn;
use core::ops::Range;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{AcqRel, Acquire};

/// Words of a piece: 65,536 numbers.
const WORDS: usize = 1024;
const PIECE: u64 = WORDS as u64 * 64;

/// The words in which the numbers of `range` have their bits, each with a mask of them.
fn masks(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let mut at = range.start;
    from_fn(move || {
        if at >= range.end {
            return None;
        }
        let word = at / 64;
        let until = (word * 64 + 64).min(range.end);
        let mask = (u64::MAX >> (64 - (until - at))) << (at % 64);
        at = until;
        Some((word as usize, mask))
    })
}

/// The numbers of a set as ranges in ascending order that do not touch. `words` are its words in
/// ascending order, each with its first number; those that have no number may be missing.
fn ranges(words: impl Iterator<Item = (u64, u64)>) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut push = |start: u64, end: u64| match ranges.last_mut() {
        Some(last) if last.end == start => last.end = end,
        _ => ranges.push(start..end),
    };
    for (first, word) in words {
        let mut rest = word;
        let mut at = 0;
        while rest != 0 {
            let start = at + rest.trailing_zeros();
            let end = start + (word >> start).trailing_ones();
            push(first + u64::from(start), first + u64::from(end));
            at = end;
            rest = word.checked_shr(at).unwrap_or(0);
        }
    }
    ranges
}

/// A set of block or page numbers, in pieces that are there where any is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bits(BTreeMap<u64, Box<[u64; WORDS]>>);

impl Bits {
    /// Adds the numbers of a range.
    pub fn insert(&mut self, range: Range<u64>) {
        self.change(range, true, |word, mask| *word |= mask);
    }

    /// Takes the numbers of a range out.
    pub fn remove(&mut self, range: Range<u64>) {
        self.change(range, false, |word, mask| *word &= !mask);
    }

    fn change(&mut self, range: Range<u64>, make: bool, change: impl Fn(&mut u64, u64)) {
        let mut at = range.start;
        while at < range.end {
            let (piece, first) = (at / PIECE, at % PIECE);
            let last = (range.end - piece * PIECE).min(PIECE);
            let words = match make {
                true => Some(self.0.entry(piece).or_insert_with(|| Box::new([0; WORDS]))),
                false => self.0.get_mut(&piece),
            };
            if let Some(words) = words {
                masks(first..last).for_each(|(word, mask)| change(&mut words[word], mask));
            }
            at = piece * PIECE + last;
        }
    }

    /// True if the set has the number.
    #[must_use]
    pub fn contains(&self, number: u64) -> bool {
        let words = self.0.get(&(number / PIECE));
        let at = number % PIECE;
        words.is_some_and(|words| words[(at / 64) as usize] & (1 << (at % 64)) != 0)
    }

    /// How many numbers there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        let words = self.0.values().flat_map(|words| words.iter());
        words.map(|word| u64::from(word.count_ones())).sum()
    }

    /// Adds all of another set.
    pub fn add(&mut self, other: &Self) {
        for (piece, words) in &other.0 {
            let own = self.0.entry(*piece).or_insert_with(|| Box::new([0; WORDS]));
            own.iter_mut().zip(words.iter()).for_each(|(a, b)| *a |= b);
        }
    }

    /// Takes all of another set out.
    pub fn subtract(&mut self, other: &Self) {
        for (piece, own) in &mut self.0 {
            if let Some(words) = other.0.get(piece) {
                own.iter_mut().zip(words.iter()).for_each(|(a, b)| *a &= !b);
            }
        }
    }

    /// Keeps what another set has as well.
    pub fn intersect(&mut self, other: &Self) {
        self.0.retain(|piece, own| {
            let Some(words) = other.0.get(piece) else {
                return false;
            };
            own.iter_mut().zip(words.iter()).for_each(|(a, b)| *a &= b);
            true
        });
    }

    /// The numbers as ranges in ascending order that do not touch.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let words = self.0.iter().flat_map(|(piece, words)| {
            let first = piece * PIECE;
            let firsts = (first..).step_by(64);
            firsts.zip(words.iter().copied())
        });
        ranges(words)
    }
}

/// Memory of words that several threads change.
pub trait AtomicWords {
    /// All of them.
    fn words(&self) -> &[AtomicU64];
}

impl AtomicWords for Vec<AtomicU64> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

impl<W: AtomicWords> AtomicWords for Arc<W> {
    fn words(&self) -> &[AtomicU64] {
        (**self).words()
    }
}

/// A set of numbers below a limit, changed by several threads. Who needs what several calls tell
/// to fit together holds a lock of his own.
#[derive(Debug)]
pub struct AtomicBits<W> {
    words: W,
    /// The first of its words.
    from: usize,
    limit: u64,
}

impl<W: AtomicWords> AtomicBits<W> {
    /// The set of numbers of `0..limit` that stands in `words` from the word `from` on.
    ///
    /// # Panics
    /// Where it has no room there.
    pub fn new(words: W, from: usize, limit: u64) -> Self {
        let room = words.words().len();
        assert!(from + words_of(limit) <= room, "it has room");
        Self { words, from, limit }
    }

    fn word(&self, number: u64) -> &AtomicU64 {
        &self.own()[(number / 64) as usize]
    }

    /// True if the set has the number.
    pub fn contains(&self, number: u64) -> bool {
        let word = self.word(number).load(Acquire);
        word >> (number % 64) & 1 == 1
    }

    /// Adds the numbers of a range, as far as they are below the limit.
    pub fn insert(&self, range: Range<u64>) {
        self.change(range, |word, mask| {
            word.fetch_or(mask, AcqRel);
        });
    }

    /// Takes the numbers of a range out.
    pub fn remove(&self, range: Range<u64>) {
        self.change(range, |word, mask| {
            word.fetch_and(!mask, AcqRel);
        });
    }

    fn change(&self, range: Range<u64>, change: impl Fn(&AtomicU64, u64)) {
        let own = self.own();
        for (word, mask) in masks(range.start..range.end.min(self.limit)) {
            change(&own[word], mask);
        }
    }

    /// Adds numbers from the beginning of `range` on, up to the first that is in the set already;
    /// those that were added.
    #[must_use]
    pub fn claim(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.limit);
        for (number, mask) in masks(range.start..end) {
            let word = &self.own()[number];
            let taken = word.fetch_or(mask, AcqRel) & mask;
            if taken != 0 {
                // Numbers behind the first one that was taken go back.
                let first = taken.trailing_zeros();
                let behind = mask & !taken & u64::MAX << first;
                word.fetch_and(!behind, AcqRel);
                return range.start..number as u64 * 64 + u64::from(first);
            }
        }
        range.start..end.max(range.start)
    }

    /// Moves all numbers to another set with the same limit.
    pub fn move_to(&self, other: &Self) {
        for range in self.ranges() {
            other.insert(range.clone());
            self.remove(range);
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

    /// The numbers as ranges in ascending order that do not touch.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let words = self.own().iter().map(|word| word.load(Acquire));
        ranges((0..).step_by(64).zip(words))
    }

    /// How many numbers are in the set.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Acquire).count_ones());
        self.own().iter().map(ones).sum()
    }

    fn own(&self) -> &[AtomicU64] {
        &self.words.words()[self.from..self.from + words_of(self.limit)]
    }
}

/// How many words the numbers of `0..limit` take in an [`AtomicBits`].
#[must_use]
pub const fn words_of(limit: u64) -> usize {
    limit.div_ceil(64) as usize
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sets_are_what_a_plain_set_is(
            steps in prop::collection::vec((0_u64..140_000, 0_u64..70_000, 0..4), 0..12)
        ) {
            let (mut bits, mut plain) = (Bits::default(), BTreeSet::new());
            for (start, len, step) in steps {
                let range = start..start + len;
                let mut other = Bits::default();
                other.insert(range.clone());
                match step {
                    0 => bits.remove(range.clone()),
                    1 => bits.subtract(&other),
                    2 => bits.insert(range.clone()),
                    _ => bits.add(&other),
                }
                match step {
                    0 | 1 => plain.retain(|number| !range.contains(number)),
                    _ => plain.extend(range),
                }
            }
            prop_assert_eq!(bits.count(), plain.len() as u64);
            let all = bits.ranges();
            prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert_eq!(all.into_iter().flatten().collect::<BTreeSet<_>>(), plain);
        }
    }

    #[test]
    fn single_numbers_are_found() {
        let mut bits = Bits::default();
        bits.insert(63..66);
        bits.insert(1 << 40..(1 << 40) + 1);
        assert!(bits.contains(65) && bits.contains(1 << 40));
        assert!(!bits.contains(66) && !bits.contains(0));
        let mut other = Bits::default();
        other.insert(65..100);
        bits.intersect(&other);
        assert_eq!(bits.ranges(), [65..66]);
    }

    fn none(limit: u64) -> AtomicBits<Vec<AtomicU64>> {
        let words = (0..=words_of(limit)).map(|_| AtomicU64::new(0));
        AtomicBits::new(words.collect(), 1, limit)
    }

    #[test]
    fn ranges_come_and_go() {
        let bits = none(200);
        assert_eq!(bits.ranges(), []);
        bits.insert(0..1);
        bits.insert(63..130);
        bits.insert(190..900);
        assert_eq!(bits.ranges(), [0..1, 63..130, 190..200]);
        bits.remove(64..128);
        assert_eq!(bits.ranges(), [0..1, 63..64, 128..130, 190..200]);
        assert_eq!(bits.count(), 14);
        assert!(bits.contains(63) && !bits.contains(64) && bits.contains(199));
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
        one.insert(10..20);
        other.insert(15..30);
        one.move_to(&other);
        assert_eq!((one.ranges(), other.ranges()), (vec![], vec![10..30]));
    }

    #[test]
    fn whole_words_are_no_special_case() {
        let bits = none(128);
        bits.insert(0..128);
        assert_eq!(bits.ranges(), [0..128]);
        bits.remove(0..64);
        assert_eq!(bits.ranges(), [64..128]);
        assert_eq!(bits.next(0, true), 64);
    }
}
