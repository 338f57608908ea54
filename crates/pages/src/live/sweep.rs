//! Finds what is not protected, and protects it.
use std::io;

use abi::{PAGE_BYTES, Span};
use rustix::io::Errno;
use sys::pagemap::{Action, Category, Pagemap, Query, Region};

use super::task::Task;
use crate::scan::push;
use crate::{Error, Result};

const REGIONS: usize = 1024;

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
    /// Protects what is not protected in `areas`: those pages' blocks are stale. Returns the guard
    /// regions found.
    ///
    /// The order matters: first the pages are protected, then those that are there are noted, so
    /// that no page is protected that was not noted. One that comes in between is not protected,
    /// and is found by the next sweep.
    pub fn sweep(&self, areas: &[Span], stopped: bool) -> Result<Vec<Span>> {
        let mut guards = Vec::new();
        let suspects = match stopped {
            true => std::mem::take(&mut self.book().suspects),
            false => Vec::new(),
        };
        for area in areas {
            let failed = |source| Error::look(self.pid, area.start, source);
            let open = scan(&self.pagemap, *area, &OPEN).map_err(failed)?;
            let open = open.into_iter().map(|(span, _)| span).collect::<Vec<_>>();
            let near = joined(&open, GAP_BYTES);
            for span in &near {
                match self.protect(*span) {
                    Ok(()) => {}
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => {
                        return Err(Error::Gone { pid: self.pid });
                    }
                    Err(_) if !stopped => {}
                    Err(source) => {
                        let (pid, span) = (self.pid, *span);
                        return Err(Error::Protect { pid, span, source });
                    }
                }
            }
            let mut there = Vec::new();
            for span in &near {
                for (span, categories) in scan_there(&self.pagemap, *span).map_err(failed)? {
                    let guard = categories.contains(Category::GUARD);
                    push(if guard { &mut guards } else { &mut there }, span);
                }
            }
            let mut book = self.book();
            for span in open {
                book.blocks.renew(span, &within(&there, span));
            }
        }
        for suspect in suspects {
            self.look_again(areas, suspect)?;
        }
        Ok(guards)
    }

    /// Looks at a span from which pages may have vanished: not even an entry that is not protected
    /// need be left of them.
    fn look_again(&self, areas: &[Span], suspect: Span) -> Result<()> {
        let mut there = Vec::new();
        let first = areas.partition_point(|area| area.end <= suspect.start);
        for area in areas[first..]
            .iter()
            .take_while(|area| area.start < suspect.end)
        {
            let failed = |source| Error::look(self.pid, area.start, source);
            let found = scan_there(&self.pagemap, area.intersect(suspect)).map_err(failed)?;
            let pages = found
                .into_iter()
                .filter(|(_, categories)| categories.is_empty());
            pages.for_each(|(span, _)| push(&mut there, span));
        }
        self.book().blocks.renew(suspect, &there);
        Ok(())
    }

    /// Finds the pages of `span` that are protected.
    pub fn protected(&self, span: Span) -> Result<Vec<Span>> {
        let found = scan(&self.pagemap, span, &PROTECTED);
        let found = found.map_err(|source| Error::look(self.pid, span.start, source))?;
        Ok(found.into_iter().map(|(span, _)| span).collect())
    }
}

/// Asks [`THERE`]; older kernels do not know guard pages.
fn scan_there(map: &Pagemap, span: Span) -> io::Result<Vec<(Span, Category)>> {
    match scan(map, span, &THERE) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
            let told = Category::HUGE;
            let found = scan(map, span, &Query { told, ..THERE })?;
            let plain = found.into_iter().map(|(span, _)| (span, Category::empty()));
            Ok(plain.collect())
        }
        found => found,
    }
}

fn scan(map: &Pagemap, span: Span, query: &Query) -> io::Result<Vec<(Span, Category)>> {
    let mut regions = vec![Region::EMPTY; REGIONS];
    let mut found = Vec::new();
    let mut rest = span;
    while !rest.is_empty() {
        let (count, end) = map.scan(rest, query, Action::empty(), &mut regions)?;
        found.extend(
            regions[..count]
                .iter()
                .map(|one| (one.span(), one.categories())),
        );
        if end <= rest.start {
            return Err(Errno::IO.into());
        }
        rest.start = end;
    }
    Ok(found)
}

/// Joins spans that are at most `gap_bytes` apart.
fn joined(spans: &[Span], gap_bytes: u64) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.start.0 - last.end.0 <= gap_bytes => last.end = span.end,
            _ => joined.push(*span),
        }
    }
    joined
}

/// The parts of `sorted` that are inside of `span`.
fn within(sorted: &[Span], span: Span) -> Vec<Span> {
    let first = sorted.partition_point(|one| one.end <= span.start);
    let inside = sorted[first..]
        .iter()
        .take_while(|one| one.start < span.end);
    inside.map(|one| one.intersect(span)).collect()
}

#[cfg(test)]
mod tests {
    use abi::Addr;

    use super::*;

    #[test]
    fn near_spans_are_joined() {
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let spans = [span(0, 10), span(12, 20), span(30, 31), span(31, 40)];
        assert_eq!(joined(&spans, 2), [span(0, 20), span(30, 40)]);
        assert_eq!(joined(&spans, 10), [span(0, 40)]);
        assert_eq!(within(&spans, span(5, 13)), [span(5, 10), span(12, 13)]);
        assert_eq!(within(&spans, span(20, 30)), []);
    }
}
