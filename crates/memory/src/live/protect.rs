//! Finds what is not protected, and protects it.
use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use abi::{Addr, PAGE_BYTES, Span};
use pages::workers;
use rustix::io::Errno;
use sys::pagemap::{Category, Pagemap, Query};

use super::blocks::{BLOCK_BYTES, cut_around};
use super::events::hear_out;
use super::slices::{SLICE_BYTES, slices};
use super::state::SharedState;
use super::task::Task;

use crate::scan::each_found;
use crate::{Error, Result};
use abi::spans::{Spans, intersect, subtract};

/// What is not protected, as fast as the kernel tells; entries without a page among them.
const OPEN: Query = Query {
    inverted: Category::empty(),
    all: Category::WRITTEN,
    any: Category::empty(),
    told: Category::WRITTEN,
};

/// Pages with contents, and guard pages.
const THERE: Query = Query {
    inverted: Category::ZERO,
    all: Category::ZERO,
    any: Category::PRESENT.union(Category::SWAPPED),
    told: Category::GUARD,
};

/// Pages, whatever they are.
const POPULATED: Query = Query {
    inverted: Category::empty(),
    all: Category::empty(),
    any: Category::PRESENT.union(Category::SWAPPED),
    told: Category::PRESENT,
};

/// Pages with contents that are protected.
const PROTECTED: Query = Query {
    inverted: Category::WRITTEN.union(Category::ZERO),
    all: Category::WRITTEN.union(Category::ZERO),
    any: Category::PRESENT.union(Category::SWAPPED),
    told: Category::WRITTEN,
};

/// Up to this distance, spans are protected together with what lies between them.
const GAP_BYTES: u64 = 64 * PAGE_BYTES;

impl Task {
    /// Protects what is not protected in `areas` of a running task: those pages' blocks are stale.
    ///
    /// The order matters: first the pages are protected, then those that are there are noted, so
    /// that no page is protected that was not noted. One that comes in between is not protected,
    /// and is found by the next pass.
    pub fn protect_areas(&self, areas: &[Span]) -> Result<()> {
        areas
            .iter()
            .try_for_each(|area| self.protect_part(*area, None).map(drop))
    }

    /// Does the same, and looks only where it is not known what is protected.
    pub fn protect_unknown(&self, areas: &[Span]) -> Result<()> {
        let known = intersect(areas, &self.book().known);
        self.protect_areas(&subtract(areas, &known))?;
        self.protect_lifted(&known, None)
    }

    /// Protects all that is not protected in `areas` of a stopped task, with several threads where
    /// they are large: those pages' blocks are stale. Returns the guard regions found.
    ///
    /// Who is `trusting` looks only where it is not known what is protected, and asks
    /// [`Task::confirm`] when the task runs again.
    pub fn protect_stopped(&self, areas: &[Span], trusting: bool) -> Result<Spans> {
        /// Bytes that one thread scans faster than another one starts.
        const ALONE_BYTES: u64 = 256 << 20;
        let (suspects, trusted) = {
            let mut book = self.book();
            let suspects = std::mem::take(&mut book.suspects);
            suspects.iter().for_each(|span| book.known.cut(*span));
            if !trusting || book.surprised {
                book.known = Spans::new();
            }
            let trusted = intersect(areas, &book.known);
            book.trusted.clone_from(&trusted);
            (suspects, trusted)
        };
        let unknown = subtract(areas, &trusted);
        let threads = match unknown.bytes() {
            ..=ALONE_BYTES => 1,
            more => workers::threads(more),
        };
        let slices = slices(self.around_blocks(&unknown));
        let guards = Mutex::new(BTreeMap::new());
        workers::work(
            threads,
            slices.len(),
            |_| (),
            |(), number| {
                let mut found = Vec::new();
                for part in &slices[number] {
                    found.extend(self.protect_part(*part, Some(areas))?);
                }
                if !found.is_empty() {
                    let mut guards = guards.lock().unwrap_or_else(PoisonError::into_inner);
                    guards.insert(number, found);
                }
                Ok::<_, Error>(())
            },
        )?;
        self.protect_lifted(&trusted, Some(areas))?;
        for suspect in suspects {
            self.scan_again(areas, suspect)?;
        }
        let guards = guards.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(guards.into_values().flatten().collect())
    }

    /// Sorted spans of which little is known, cut for several threads.
    fn around_blocks(&self, spans: &[Span]) -> Vec<Span> {
        let book = self.book();
        let pieces = spans.iter();
        let pieces = pieces.flat_map(|span| book.blocks.pieces(*span, SLICE_BYTES));
        pieces.map(|(piece, _)| piece).collect()
    }

    /// Sorted spans of a running task, cut for several threads where pages are.
    pub fn populated(&self, spans: &[Span]) -> Result<Vec<Span>> {
        let mut pieces = Vec::new();
        for span in spans {
            let failed = |source| Error::scan(self.pid(), span.start, source);
            let found = match span.bytes() {
                ..=SLICE_BYTES => vec![*span],
                _ => {
                    let found = scan(&self.pagemap, *span, &POPULATED).map_err(failed)?;
                    found.into_iter().map(|(span, _)| span).collect()
                }
            };
            let cut = cut_around(*span, SLICE_BYTES, |from| {
                let next = found.partition_point(|span| span.end <= from);
                found.get(next).map(|span| span.start.max(from))
            });
            pieces.extend(cut.into_iter().map(|(piece, _)| piece));
        }
        Ok(pieces)
    }

    /// Tells whether what the last [`Task::protect_stopped`] took to be protected was so. The task
    /// runs.
    ///
    /// The kernel says nothing when a task makes guard pages where others were (madvise(2),
    /// MADV_GUARD_INSTALL), and drops protection where it merges equal pages (MADV_MERGEABLE).
    pub fn confirm(&self, shared: &SharedState) -> Result<bool> {
        let trusted = self.book().trusted.clone();
        let mut open = Vec::new();
        for span in &trusted {
            let found = scan(&self.pagemap, *span, &OPEN);
            let found = found.map_err(|source| Error::scan(self.pid(), span.start, source))?;
            open.extend(found.into_iter().map(|(span, _)| span));
        }
        // What was discarded before the look is known when all was heard that came before now.
        hear_out(self, shared);
        let mut book = self.book();
        let suspects = Spans::of(book.suspects.clone());
        let surprises = subtract(&open, &suspects);
        let mut surprises = surprises.into_iter().collect::<Vec<_>>();
        surprises.retain(|span| !book.lifted.has(*span));
        if let Some(first) = surprises.first() {
            let (pid, count) = (self.pid(), surprises.len());
            log::info!("pid {pid}: {count} spans were open unexpectedly, the first at {first:?}");
            book.surprised = true;
        }
        Ok(surprises.is_empty())
    }

    /// Protects what is not protected in a part of an area, and returns the guard regions found.
    /// With the areas of a stopped task, nothing may stay unprotected.
    fn protect_part(&self, part: Span, stopped: Option<&[Span]>) -> Result<Spans> {
        {
            let mut book = self.book();
            book.known.cut(part);
            book.lifted.take(part);
        }
        let failed = |source| Error::scan(self.pid(), part.start, source);
        let open = scan(&self.pagemap, part, &OPEN).map_err(failed)?;
        let open = blockwise(open.into_iter().map(|(span, _)| span), part);
        let (is_whole, guards) = self.protect_open(&open, stopped)?;
        if is_whole {
            self.book().learn(part);
        }
        Ok(guards)
    }

    /// Protects again what was protected in `known` until somebody wrote to it, piece by piece:
    /// who writes meanwhile waits for as long as the book is open.
    fn protect_lifted(&self, known: &[Span], stopped: Option<&[Span]>) -> Result<()> {
        for area in known {
            for (piece, _) in cut_around(*area, SLICE_BYTES, Some) {
                let lifted = self.book().lifted.take(piece);
                let open = blockwise(lifted.iter().copied(), *area);
                let (is_whole, _) = self.protect_open(&open, stopped)?;
                if !is_whole {
                    self.book().known.cut(*area);
                }
            }
        }
        Ok(())
    }

    /// Protects the spans `open` of one area, and notes which pages are there. Returns whether all
    /// were protected, and the guard regions found.
    fn protect_open(&self, open: &Spans, stopped: Option<&[Span]>) -> Result<(bool, Spans)> {
        // While the task runs, a page between two of these may be written before it is
        // protected with them, and would not be noted.
        let near = open.joined(if stopped.is_some() { GAP_BYTES } else { 0 });
        let mut is_whole = true;
        for span in &near {
            let mut protected = self.protect(*span);
            if let (true, Some(areas)) = (is(&protected, Errno::NOENT), stopped) {
                // It was registered while it was unmapped, and is a new mapping since.
                let after = areas.partition_point(|area| area.end <= span.start);
                self.register(*areas.get(after).unwrap_or(span))?;
                protected = self.protect(*span);
            }
            match protected {
                Ok(()) => {}
                error if is(&error, Errno::SRCH) => {
                    return Err(Error::Gone { pid: self.pid() });
                }
                Err(_) if stopped.is_none() => is_whole = false,
                Err(source) => {
                    let (pid, span) = (self.pid(), *span);
                    return Err(Error::Protect { pid, span, source });
                }
            }
        }
        let (mut there, mut guards) = (Spans::new(), Spans::new());
        for span in &near {
            let found = scan_there(&self.pagemap, *span);
            let found = found.map_err(|source| Error::scan(self.pid(), span.start, source))?;
            for (span, categories) in found {
                let guard = categories.contains(Category::GUARD);
                if guard { &mut guards } else { &mut there }.push(span);
            }
        }
        let mut book = self.book();
        for span in open {
            book.blocks.renew(*span, &there.within(span));
        }
        Ok((is_whole, guards))
    }

    /// Looks at a span from which pages may have vanished: not even an entry that is not protected
    /// need be left of them.
    fn scan_again(&self, areas: &[Span], suspect: Span) -> Result<()> {
        let mut there = Spans::new();
        let first = areas.partition_point(|area| area.end <= suspect.start);
        for area in areas[first..]
            .iter()
            .take_while(|area| area.start < suspect.end)
        {
            let failed = |source| Error::scan(self.pid(), area.start, source);
            let found = scan_there(&self.pagemap, area.intersect(suspect)).map_err(failed)?;
            let pages = found
                .into_iter()
                .filter(|(_, categories)| categories.is_empty());
            pages.for_each(|(span, _)| there.push(span));
        }
        self.book().blocks.renew(suspect, &there);
        Ok(())
    }

    /// Finds the pages of `span` that are protected.
    pub fn protected(&self, span: Span) -> Result<Vec<Span>> {
        let found = scan(&self.pagemap, span, &PROTECTED);
        let found = found.map_err(|source| Error::scan(self.pid(), span.start, source))?;
        Ok(found.into_iter().map(|(span, _)| span).collect())
    }
}

fn is<T>(outcome: &io::Result<T>, errno: Errno) -> bool {
    outcome
        .as_ref()
        .is_err_and(|error| Errno::from_io_error(error) == Some(errno))
}

/// Asks [`THERE`]; older kernels do not know guard pages.
fn scan_there(map: &Pagemap, span: Span) -> io::Result<Vec<(Span, Category)>> {
    match scan(map, span, &THERE) {
        error if is(&error, Errno::INVAL) => {
            let told = Category::HUGE;
            let found = scan(map, span, &Query { told, ..THERE })?;
            let plain = found.into_iter().map(|(span, _)| (span, Category::empty()));
            Ok(plain.collect())
        }
        found => found,
    }
}

fn scan(map: &Pagemap, span: Span, query: &Query) -> io::Result<Vec<(Span, Category)>> {
    let mut found = Vec::new();
    each_found(map, span, query, |one| {
        found.push((one.span(), one.categories()))
    })?;
    Ok(found)
}

/// Makes whole blocks of sorted spans, as far as they are inside of `area`, and joins them: all
/// pages of a block are stale when one is.
fn blockwise(spans: impl Iterator<Item = Span>, area: Span) -> Spans {
    let whole = spans.map(|span| Span {
        start: Addr(span.start.0 / BLOCK_BYTES * BLOCK_BYTES),
        end: Addr(span.end.0.next_multiple_of(BLOCK_BYTES)),
    });
    whole.map(|span| span.intersect(area)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_makes_its_block_stale() {
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let pages = |start: u64, end: u64| span(start << 12, end << 12);
        let some = [pages(17, 18), pages(20, 33), pages(100, 101)];
        let whole = blockwise(some.into_iter(), pages(0, 105));
        assert_eq!(*whole, [pages(16, 48), pages(96, 105)]);
    }
}
