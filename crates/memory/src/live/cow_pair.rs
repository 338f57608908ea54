//! Pages that a child has of its parent: by copy-on-write since the fork, and not copied twice.
//!
//! Two tasks have a physical page in common only as long as neither writes to it, and a write is
//! not missed where both are protected. So a look at the page maps while the tasks run is enough:
//! what was protected in both before the look, and has been ever since, is still the same page, or
//! has at least the same contents.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use abi::Span;

use super::blocks::{Block, State, bits_of, block_of};
use super::task::Task;
use crate::{CowSharing, PageMaps, Result};
use abi::spans::Spans;

/// A task and the one that it has pages of.
pub struct CowPair {
    child: Arc<Task>,
    pub parent: Arc<Task>,
    /// How much was looked at of what the parent wrote since.
    seen: AtomicUsize,
}

impl CowPair {
    /// Finds the blocks of `areas` of which the child has all pages of its parent. Both run, and
    /// have anonymous memory there.
    pub fn find(child: Arc<Task>, parent: Arc<Task>, areas: &[Span]) -> Result<Self> {
        parent.protect_areas(areas)?;
        child.protect_areas(areas)?;
        let seen = parent.book().blocks.watch();
        let since = child.book().blocks.watch();
        let spans = child.book().blocks.stale_spans(areas);
        let mut maps = PageMaps::default();
        let mut look = |spans: &[Span]| -> Result<Spans> {
            let sharing = &mut CowSharing::default();
            let shared = sharing.shared_with(&parent.process, &child.process, spans, &mut maps);
            Ok(shared?.common)
        };
        // A page that was moved by the kernel may have left its number to another: of that the
        // second look knows nothing.
        let once = look(&spans)?;
        let twice = look(&once)?;
        let mut book = child.book();
        for (number, bits) in by_block(&twice) {
            let is_whole = |block: &Block| block.mask == bits && block.state == State::Stale;
            if book.blocks.get(number).is_some_and(is_whole) {
                book.blocks.set(number, State::Common(parent.space));
            }
        }
        let written = book.blocks.renewed(since).to_vec();
        written
            .iter()
            .for_each(|number| book.blocks.unshare(*number));
        drop(book);
        let seen = seen.into();
        Ok(Self {
            child,
            parent,
            seen,
        })
    }

    /// Makes those blocks stale that may not be the parent's any more. A parent that is not `there`
    /// at the instant has nothing.
    pub fn unshare(&self, there: bool) {
        let changed = if there {
            let parent = self.parent.book();
            let changed = parent.blocks.renewed(self.seen.load(Relaxed)).to_vec();
            self.seen.fetch_add(changed.len(), Relaxed);
            changed
        } else {
            self.child.book().blocks.common()
        };
        let mut book = self.child.book();
        changed
            .iter()
            .for_each(|number| book.blocks.unshare(*number));
    }
}

/// The blocks of sorted spans, with the bits of their pages.
fn by_block(spans: &[Span]) -> Vec<(u64, u16)> {
    let mut blocks: Vec<(u64, u16)> = Vec::new();
    for span in spans.iter().filter(|span| !span.is_empty()) {
        let last = block_of(abi::Addr(span.end.0 - 1));
        for number in block_of(span.start)..=last {
            let bits = bits_of(number, *span);
            match blocks.last_mut() {
                Some((same, all)) if *same == number => *all |= bits,
                _ => blocks.push((number, bits)),
            }
        }
    }
    blocks
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn spans_are_bits_of_blocks() {
        let pages = |first, end| Span::of_pages(first..end);
        let spans = [pages(1, 2), pages(15, 33), pages(40, 40), pages(47, 48)];
        assert_eq!(
            by_block(&spans),
            [(0, 0b1000_0000_0000_0010), (1, 0xffff), (2, 0x8001)]
        );
    }
}
