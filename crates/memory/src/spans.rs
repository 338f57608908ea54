//! Sets of pages.
use std::ops::Deref;

use abi::Span;

/// A set of pages: spans in ascending order, none of which overlap. Those that touch are one where
/// they were added; where sets were made of parts of mappings, they stay two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans(Vec<Span>);

impl Spans {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// All of these, in whatever order they are.
    #[must_use]
    pub fn of(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut spans = spans.into_iter().collect::<Vec<_>>();
        spans.sort();
        let mut all = Self(Vec::with_capacity(spans.len()));
        spans.into_iter().for_each(|span| all.push(span));
        all
    }

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

    /// Appends `span`, which begins before none of the others.
    pub fn push(&mut self, span: Span) {
        match self.0.last_mut() {
            Some(last) if last.end >= span.start => last.end = last.end.max(span.end),
            _ => self.0.push(span),
        }
    }

    /// Adds `span`, and joins it with what it touches.
    pub fn insert(&mut self, span: Span) {
        let first = self.partition_point(|one| one.end < span.start);
        let last = self.partition_point(|one| one.start <= span.end);
        let joined = self[first..last].iter().fold(span, |all, one| Span {
            start: all.start.min(one.start),
            end: all.end.max(one.end),
        });
        self.0.splice(first..last, [joined]);
    }

    /// Takes `span` out.
    pub fn cut(&mut self, span: Span) {
        let first = self.partition_point(|one| one.end <= span.start);
        let last = self.partition_point(|one| one.start < span.end).max(first);
        let rest = subtract(&self[first..last], &[span]);
        self.0.splice(first..last, rest);
    }

    /// Whether `span` is inside of one of them.
    #[must_use]
    pub fn covers(&self, span: Span) -> bool {
        let after = self.partition_point(|one| one.end <= span.start);
        let around = self.get(after);
        around.is_some_and(|one| one.start <= span.start && span.end <= one.end)
    }

    /// Keeps the first `count`.
    pub fn truncate(&mut self, count: usize) {
        self.0.truncate(count);
    }

    /// What of them is inside of `span`.
    #[must_use]
    pub fn within(&self, span: Span) -> Self {
        let first = self.partition_point(|one| one.end <= span.start);
        let last = self.partition_point(|one| one.start < span.end).max(first);
        let inside = self[first..last].iter();
        Self(inside.map(|one| one.intersect(span)).collect())
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

    /// What is in one of both.
    #[must_use]
    pub fn and(&self, other: &[Span]) -> Self {
        Self::of(self.iter().chain(other).copied())
    }
}

impl Deref for Spans {
    type Target = [Span];

    fn deref(&self) -> &[Span] {
        &self.0
    }
}

impl<const N: usize> PartialEq<[Span; N]> for Spans {
    fn eq(&self, other: &[Span; N]) -> bool {
        self.0 == other
    }
}

impl IntoIterator for Spans {
    type Item = Span;
    type IntoIter = std::vec::IntoIter<Span>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Spans {
    type Item = &'a Span;
    type IntoIter = std::slice::Iter<'a, Span>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// By spans in ascending order.
impl Extend<Span> for Spans {
    fn extend<T: IntoIterator<Item = Span>>(&mut self, spans: T) {
        spans.into_iter().for_each(|span| self.push(span));
    }
}

/// Of spans in ascending order.
impl FromIterator<Span> for Spans {
    fn from_iter<T: IntoIterator<Item = Span>>(spans: T) -> Self {
        let mut all = Self::new();
        all.extend(spans);
        all
    }
}

/// What both have; both sorted and disjoint.
#[must_use]
pub fn intersect(one: &[Span], other: &[Span]) -> Spans {
    let mut both = Vec::new();
    let (mut ones, mut others) = (one.iter().peekable(), other.iter().peekable());
    while let (Some(one), Some(other)) = (ones.peek(), others.peek()) {
        let common = one.intersect(**other);
        if !common.is_empty() {
            both.push(common);
        }
        if one.end <= other.end {
            ones.next();
        } else {
            others.next();
        }
    }
    Spans(both)
}

/// What `all` has and `some` has not; both sorted and disjoint.
#[must_use]
pub fn subtract(all: &[Span], some: &[Span]) -> Spans {
    let mut rest = Vec::new();
    let mut some = some.iter().copied().peekable();
    for span in all {
        let mut at = span.start;
        while let Some(cut) = some.peek().copied().filter(|cut| cut.start < span.end) {
            if at < cut.start {
                let end = cut.start;
                rest.push(Span { start: at, end });
            }
            at = at.max(cut.end);
            if cut.end > span.end {
                break;
            }
            some.next();
        }
        if at < span.end {
            let end = span.end;
            rest.push(Span { start: at, end });
        }
    }
    Spans(rest)
}

#[cfg(test)]
mod tests {
    use abi::{Addr, PAGE_BYTES};

    use super::*;

    fn spans(pages: &[(u64, u64)]) -> Spans {
        let span = |&(start, end)| Span {
            start: Addr::of_page(start),
            end: Addr::of_page(end),
        };
        Spans(pages.iter().map(span).collect())
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
        assert!(spans.covers(page(10, 30)) && spans.covers(page(41, 42)));
        assert!(!spans.covers(page(29, 31)) && !spans.covers(page(30, 40)));
        assert_eq!(*spans.within(page(25, 41)), [page(25, 30), page(40, 41)]);
        assert!(spans.within(page(30, 40)).is_empty());
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
}
