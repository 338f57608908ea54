//! Sets of pages: spans in ascending order, none of which touch or overlap.
use abi::Span;

/// Appends `span`, to the last one where it follows that.
pub fn push(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.end >= span.start => last.end = last.end.max(span.end),
        _ => spans.push(span),
    }
}

/// The spans in ascending order, those that touch as one.
pub fn sorted(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort();
    let mut joined = Vec::with_capacity(spans.len());
    spans.into_iter().for_each(|span| push(&mut joined, span));
    joined
}

/// What both have; both sorted and disjoint.
#[must_use]
pub fn intersect(one: &[Span], other: &[Span]) -> Vec<Span> {
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
    both
}

/// What `all` has and `some` has not; both sorted and disjoint.
#[must_use]
pub fn subtract(all: &[Span], some: &[Span]) -> Vec<Span> {
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
    rest
}

#[cfg(test)]
mod tests {
    use abi::{Addr, PAGE_BYTES};

    use super::*;

    fn spans(pages: &[(u64, u64)]) -> Vec<Span> {
        let span = |&(start, end)| Span {
            start: Addr::of_page(start),
            end: Addr::of_page(end),
        };
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
        assert_eq!(intersect(&all, &[]), []);
        assert_eq!(subtract(&all, &[]), all);
    }

    #[test]
    fn neighbours_are_joined() {
        let mut spans = Vec::new();
        for page in [1, 2, 3, 7, 8] {
            push(&mut spans, Span::new(Addr::of_page(page), PAGE_BYTES));
        }
        let expected = [
            Span::new(Addr(0x1000), 0x3000),
            Span::new(Addr(0x7000), 0x2000),
        ];
        assert_eq!(spans, expected);
    }
}
