//! Where protection was lifted for somebody to write.
use std::collections::BTreeMap;

use abi::{Addr, Span};

use super::blocks::{BLOCK_BYTES, bits_of, block_of, spans_of};
use abi::spans::Spans;

/// Pages whose protection was lifted. To add or to take some takes the same time however many
/// others there are: the thread that lifts protection waits meanwhile, and who writes for that.
#[derive(Debug, Default)]
pub struct UnprotectedPages {
    /// By block.
    masks: BTreeMap<u64, u16>,
}

impl UnprotectedPages {
    /// Adds pages.
    pub fn add(&mut self, span: Span) {
        if span.is_empty() {
            return;
        }
        let last = block_of(Addr(span.end.0 - 1));
        for number in block_of(span.start)..=last {
            *self.masks.entry(number).or_default() |= bits_of(number, span);
        }
    }

    /// Takes out those of `span`, sorted.
    pub fn take(&mut self, span: Span) -> Spans {
        let mut taken = Spans::new();
        if span.is_empty() {
            return taken;
        }
        let numbers = block_of(span.start)..=block_of(Addr(span.end.0 - 1));
        let inside = self.masks.range(numbers);
        let inside: Vec<_> = inside.map(|(number, mask)| (*number, *mask)).collect();
        for (number, mask) in inside {
            let bits = bits_of(number, span);
            spans_of(number, mask & bits).for_each(|one| taken.push(one));
            match mask & !bits {
                0 => self.masks.remove(&number),
                rest => self.masks.insert(number, rest),
            };
        }
        taken
    }

    /// Tells whether all of `span` was lifted.
    pub fn has(&self, span: Span) -> bool {
        let last = block_of(Addr(span.end.0.saturating_sub(1)));
        (block_of(span.start)..=last).all(|number| {
            let bits = bits_of(number, span);
            self.masks.get(&number).copied().unwrap_or_default() & bits == bits
        })
    }

    /// How much it is: whole blocks of which some was lifted.
    pub fn bytes(&self) -> u64 {
        self.masks.len() as u64 * BLOCK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: u64, end: u64) -> Span {
        Span::of_pages(first..end)
    }

    #[test]
    fn what_was_added_is_taken_once() {
        let mut lifted = UnprotectedPages::default();
        for (first, end) in [(64, 80), (3, 4), (14, 34), (3, 5), (7, 7)] {
            lifted.add(pages(first, end));
        }
        assert_eq!(lifted.bytes(), 4 * BLOCK_BYTES);
        assert!(lifted.has(pages(14, 34)) && lifted.has(pages(3, 5)) && lifted.has(pages(9, 9)));
        assert!(!lifted.has(pages(13, 15)) && !lifted.has(pages(30, 70)));
        assert_eq!(lifted.take(pages(4, 20)), [pages(4, 5), pages(14, 20)]);
        assert_eq!(lifted.take(pages(4, 20)), []);
        assert_eq!(
            lifted.take(pages(0, 1 << 40)),
            [pages(3, 4), pages(20, 34), pages(64, 80)]
        );
        assert_eq!(lifted.bytes(), 0);
    }
}
