//! Sets of addresses, pages or bytes, kept as what follows each other.
use alloc::vec;
use alloc::vec::Vec;
use core::ops::{Deref, Range};
use core::slice;

use crate::{Addr, Span};

/// Consecutive things: all from one up to, but without, another.
pub trait Interval: Clone + PartialEq {
    /// What there are consecutive ones of.
    type At: Copy + Ord;

    /// The first.
    fn start(&self) -> Self::At;

    /// The one after the last.
    fn end(&self) -> Self::At;

    /// Those from `start` up to, but without, `end`.
    fn between(start: Self::At, end: Self::At) -> Self;

    /// What both have; it may be nothing.
    #[must_use]
    fn common(&self, other: &Self) -> Self {
        Self::between(self.start().max(other.start()), self.end().min(other.end()))
    }

    /// Whether it is nothing.
    fn is_nothing(&self) -> bool {
        self.start() >= self.end()
    }
}

impl Interval for Span {
    type At = Addr;

    fn start(&self) -> Addr {
        self.start
    }

    fn end(&self) -> Addr {
        self.end
    }

    fn between(start: Addr, end: Addr) -> Self {
        Self { start, end }
    }
}

impl<N: Copy + Ord> Interval for Range<N> {
    type At = N;

    fn start(&self) -> N {
        self.start
    }

    fn end(&self) -> N {
        self.end
    }

    fn between(start: N, end: N) -> Self {
        start..end
    }
}

/// A set: intervals in ascending order, none of which overlap or are empty. Those that touch are
/// one where they were added; where sets were made of parts of others, they stay two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intervals<I>(Vec<I>);

/// Parts of an address space.
pub type Spans = Intervals<Span>;

/// Numbered pages, or bytes.
pub type Ranges<N> = Intervals<Range<N>>;

impl<I: Interval> Intervals<I> {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// All of these, in whatever order they are.
    #[must_use]
    pub fn of(all: impl IntoIterator<Item = I>) -> Self {
        let mut all = all.into_iter().collect::<Vec<_>>();
        all.sort_unstable_by_key(Interval::start);
        all.into_iter().collect()
    }

    /// Appends `one`, which begins before none of the others.
    pub fn push(&mut self, one: I) {
        match self.0.last_mut() {
            _ if one.is_nothing() => {}
            Some(last) if last.end() >= one.start() => {
                *last = I::between(last.start(), last.end().max(one.end()));
            }
            _ => self.0.push(one),
        }
    }

    /// Adds `one`, and joins it with what it touches.
    pub fn insert(&mut self, one: I) {
        let first = self.partition_point(|other| other.end() < one.start());
        let last = self.partition_point(|other| other.start() <= one.end());
        let joined = self[first..last].iter().fold(one, |all, other| {
            I::between(all.start().min(other.start()), all.end().max(other.end()))
        });
        self.0.splice(first..last, [joined]);
    }

    /// Takes `one` out.
    pub fn cut(&mut self, one: I) {
        let touched = self.touched(&one);
        let rest = subtract(&self[touched.clone()], &[one]);
        self.0.splice(touched, rest);
    }

    /// Whether all of `one` is inside of one of them.
    #[must_use]
    pub fn covers(&self, one: &I) -> bool {
        let around = self.get(self.touched(one).start);
        around.is_some_and(|around| around.start() <= one.start() && one.end() <= around.end())
    }

    /// Whether one of them holds `at`.
    #[must_use]
    pub fn contains(&self, at: I::At) -> bool {
        let around = self.get(self.partition_point(|one| one.end() <= at));
        around.is_some_and(|one| one.start() <= at)
    }

    /// Whether they are `one` and nothing else.
    #[must_use]
    pub fn is_just(&self, one: &I) -> bool {
        matches!(&self[..], [only] if only == one)
    }

    /// Whether they have any of `one`.
    #[must_use]
    pub fn meets(&self, one: &I) -> bool {
        !self.touched(one).is_empty()
    }

    /// Keeps the first `count`.
    pub fn truncate(&mut self, count: usize) {
        self.0.truncate(count);
    }

    /// What of them is inside of `one`.
    #[must_use]
    pub fn within(&self, one: &I) -> Self {
        let inside = self[self.touched(one)].iter();
        Self(inside.map(|inner| inner.common(one)).collect())
    }

    /// What is in one of both.
    #[must_use]
    pub fn and(&self, other: &[I]) -> Self {
        Self::of(self.iter().chain(other).cloned())
    }

    /// Which of them have something of `one`.
    fn touched(&self, one: &I) -> Range<usize> {
        let first = self.partition_point(|other| other.end() <= one.start());
        let last = self.partition_point(|other| other.start() < one.end());
        first..last.max(first)
    }
}

impl Spans {
    /// How many pages they are.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.iter().map(|span| span.pages()).sum()
    }

    /// How much that is.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.iter().map(|span| span.bytes()).sum()
    }

    /// Those at most `gap_bytes` apart as one, with what is between them.
    #[must_use]
    pub fn joined(&self, gap_bytes: u64) -> Self {
        let mut joined = Self::new();
        for span in self {
            match joined.0.last_mut() {
                Some(last) if span.start.0 - last.end.0 <= gap_bytes => last.end = span.end,
                _ => joined.0.push(*span),
            }
        }
        joined
    }
}

impl<I> Default for Intervals<I> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<I> Deref for Intervals<I> {
    type Target = [I];

    fn deref(&self) -> &[I] {
        &self.0
    }
}

impl<I: PartialEq, const N: usize> PartialEq<[I; N]> for Intervals<I> {
    fn eq(&self, other: &[I; N]) -> bool {
        self.0 == other
    }
}

impl<I> IntoIterator for Intervals<I> {
    type Item = I;
    type IntoIter = vec::IntoIter<I>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a, I> IntoIterator for &'a Intervals<I> {
    type Item = &'a I;
    type IntoIter = slice::Iter<'a, I>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// By intervals in ascending order.
impl<I: Interval> Extend<I> for Intervals<I> {
    fn extend<T: IntoIterator<Item = I>>(&mut self, all: T) {
        all.into_iter().for_each(|one| self.push(one));
    }
}

/// Of intervals in ascending order.
impl<I: Interval> FromIterator<I> for Intervals<I> {
    fn from_iter<T: IntoIterator<Item = I>>(all: T) -> Self {
        let all = all.into_iter();
        let mut set = Self(Vec::with_capacity(all.size_hint().0));
        set.extend(all);
        set
    }
}

/// What both have; both sorted and disjoint.
#[must_use]
pub fn intersect<I: Interval>(one: &[I], other: &[I]) -> Intervals<I> {
    let mut both = Vec::new();
    let (mut ones, mut others) = (one.iter().peekable(), other.iter().peekable());
    while let (Some(one), Some(other)) = (ones.peek(), others.peek()) {
        let common = one.common(other);
        if !common.is_nothing() {
            both.push(common);
        }
        if one.end() <= other.end() {
            ones.next();
        } else {
            others.next();
        }
    }
    Intervals(both)
}

/// What `all` has and `some` has not; both sorted and disjoint.
#[must_use]
pub fn subtract<I: Interval>(all: &[I], some: &[I]) -> Intervals<I> {
    let mut rest = Vec::new();
    let mut some = some.iter().peekable();
    for one in all {
        let mut at = one.start();
        while let Some(cut) = some.peek().filter(|cut| cut.start() < one.end()) {
            if at < cut.start() {
                rest.push(I::between(at, cut.start()));
            }
            at = at.max(cut.end());
            if cut.end() > one.end() {
                break;
            }
            some.next();
        }
        if at < one.end() {
            rest.push(I::between(at, one.end()));
        }
    }
    Intervals(rest)
}

#[cfg(test)]
mod tests {
    use crate::PAGE_BYTES;

    use super::*;

    fn spans(pages: &[(u64, u64)]) -> Spans {
        let span = |&(start, end)| Span::of_pages(start..end);
        pages.iter().map(span).collect()
    }

    #[test]
    fn what_both_have_and_what_only_one_has() {
        let all = spans(&[(1, 4), (6, 9), (10, 20), (30, 31)]);
        let some = spans(&[(0, 2), (3, 7), (8, 9), (11, 12), (15, 40)]);
        let both = spans(&[(1, 2), (3, 4), (6, 7), (8, 9), (11, 12), (15, 20), (30, 31)]);
        assert_eq!(intersect(&all, &some), both);
        assert_eq!(intersect(&some, &all), both);
        let rest = spans(&[(2, 3), (7, 8), (10, 11), (12, 15)]);
        assert_eq!(subtract(&all, &some), rest);
        assert_eq!(subtract(&all, &both), rest);
        assert_eq!(intersect(&all, &[]), Spans::new());
        assert_eq!(subtract(&all, &[]), all);
    }

    #[test]
    fn neighbours_are_joined() {
        let page = |page| Span::new(Addr::of_page(page), PAGE_BYTES);
        let joined = [1, 2, 3, 7, 8].map(page).into_iter().collect::<Spans>();
        assert_eq!(joined, Spans::of([8, 2, 7, 1, 3, 2].map(page)));
        let expected = [
            Span::new(Addr(0x1000), 0x3000),
            Span::new(Addr(0x7000), 0x2000),
        ];
        assert_eq!(*joined, expected);
    }

    #[test]
    fn spans_are_added_and_cut() {
        let page = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let mut spans = Spans::new();
        for (start, end) in [(10, 20), (40, 50), (20, 30), (60, 70), (45, 60)] {
            spans.insert(page(start, end));
        }
        assert_eq!(*spans, [page(10, 30), page(40, 70)]);
        assert!(spans.covers(&page(10, 30)) && spans.covers(&page(41, 42)));
        assert!(!spans.covers(&page(29, 31)) && !spans.covers(&page(30, 40)));
        assert_eq!(*spans.within(&page(25, 41)), [page(25, 30), page(40, 41)]);
        assert!(spans.within(&page(30, 40)).is_empty());
        spans.cut(page(20, 45));
        assert_eq!(*spans, [page(10, 20), page(45, 70)]);
        spans.cut(page(50, 51));
        assert_eq!(*spans, [page(10, 20), page(45, 50), page(51, 70)]);
        spans.cut(page(0, 11));
        spans.cut(page(60, 100));
        spans.cut(page(30, 31));
        assert_eq!(*spans, [page(11, 20), page(45, 50), page(51, 60)]);
        assert_eq!(*spans.joined(1), [page(11, 20), page(45, 60)]);
        assert_eq!(*spans.joined(25), [page(11, 60)]);
    }

    #[test]
    fn numbers_are_in_a_set_or_not() {
        let set = Ranges::of([7..9, 20..20, 1..3, 3..5, 8..12]);
        assert_eq!(set, [1..5, 7..12]);
        let inside = (0..14).filter(|at| set.contains(*at)).collect::<Vec<_>>();
        assert_eq!(inside, [1, 2, 3, 4, 7, 8, 9, 10, 11]);
        assert!(set.meets(&(4..6)) && set.meets(&(0..20)) && set.meets(&(11..12)));
        assert!(!set.meets(&(5..7)) && !set.meets(&(12..30)) && !set.meets(&(0..1)));
        assert!(Ranges::of([1..2, 0..1]).is_just(&(0..2)) && !set.is_just(&(1..5)));
        let rest = subtract(slice::from_ref(&(0..14)), &set);
        assert_eq!(rest, [0..1, 5..7, 12..14]);
    }
}
