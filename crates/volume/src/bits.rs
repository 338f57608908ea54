//! A set of block or page numbers: a bit for each, in pieces that are there where any is set.

use std::collections::BTreeMap;
use std::ops::Range;

/// Words of a piece: 65,536 numbers.
const WORDS: usize = 1024;
const PIECE: u64 = WORDS as u64 * 64;

/// A set of numbers.
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
                let mut bit = first;
                while bit < last {
                    let word = (bit / 64) as usize;
                    let end = last.min((bit / 64 + 1) * 64);
                    let count = end - bit;
                    let mask = (u64::MAX >> (64 - count)) << (bit % 64);
                    change(&mut words[word], mask);
                    bit = end;
                }
            }
            at = piece * PIECE + last;
        }
    }

    /// Whether a number is in the set.
    pub fn contains(&self, number: u64) -> bool {
        let words = self.0.get(&(number / PIECE));
        let at = number % PIECE;
        words.is_some_and(|words| words[(at / 64) as usize] & (1 << (at % 64)) != 0)
    }

    /// How many numbers there are.
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
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut push = |start: u64, end: u64| match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        };
        for (piece, words) in &self.0 {
            for (number, word) in words.iter().enumerate() {
                let base = piece * PIECE + number as u64 * 64;
                let mut rest = *word;
                let mut at = 0;
                while rest != 0 {
                    let skip = rest.trailing_zeros();
                    let ones = (rest >> skip).trailing_ones();
                    push(
                        base + u64::from(at + skip),
                        base + u64::from(at + skip + ones),
                    );
                    at += skip + ones;
                    rest = (*word).checked_shr(at).unwrap_or(0);
                }
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
        assert_eq!(bits.ranges(), std::slice::from_ref(&(65..66)));
    }
}
