//! Which pages a task has for itself.
use std::io;

use abi::{PAGE_BYTES, Span};
use rustix::io::Errno;
use sys::pagemap::{Action, Category, Entry, Pagemap, Query, Region};
use sys::process::Process;

use crate::{Error, PageMaps, Result};
use abi::spans::Spans;

/// Regions that one call of the kernel answers; more take more calls.
pub(crate) const REGIONS: usize = 1024;

/// A buffer for what one call finds in `span`: the kernel, too, takes memory for as many regions.
pub(crate) fn region_buffer(span: Span) -> Vec<Region> {
    vec![Region::EMPTY; (span.pages() as usize).clamp(1, REGIONS)]
}

/// Entries read at once where the kernel cannot search: 128 MiB of memory.
pub(crate) const ENTRIES: usize = 32 << 10;

/// From this size on, anonymous memory is looked at by itself: asking for each page whether it
/// belongs to a file takes five times as long.
pub const LARGE_BYTES: u64 = 4 << 20;

/// A private mapping, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Its addresses.
    pub span: Span,
    /// True if a file is mapped, of which the task has copied some pages.
    pub file: bool,
    /// True if [`LARGE_BYTES`] or more are mapped between the area before it and this one.
    pub apart: bool,
}

/// Pages found in one range of addresses, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanResult {
    /// Pages that the task has for itself, in memory or swapped out.
    pub private: Spans,
    /// Guard pages (`MADV_GUARD_INSTALL`): they have no contents, and touching one is a fault.
    pub guards: Spans,
}

impl ScanResult {
    /// How many pages the task has for itself.
    #[must_use]
    pub fn private_pages(&self) -> u64 {
        self.private.pages()
    }

    fn add(&mut self, span: Span, guard: bool) {
        let kind = if guard {
            &mut self.guards
        } else {
            &mut self.private
        };
        kind.push(span);
    }
}

/// Finds the pages of `process` that belong to nobody else, in each of `areas`, which are in
/// ascending order and do not overlap.
///
/// Those are the written pages of anonymous memory and the copied ones of private file mappings,
/// but neither pages of files and shared objects nor the kernel's page of zeros. The caller must be
/// allowed to trace the task. A few system calls for most tasks once its page map is open among
/// `maps`, two more for each large area.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn scan(process: &Process, areas: &[Area], maps: &mut PageMaps) -> Result<Vec<ScanResult>> {
    let mut found = vec![ScanResult::default(); areas.len()];
    let Some(first) = areas.first() else {
        return Ok(found);
    };
    let pid = process.pid();
    let map = maps.of(process);
    let map = map.map_err(|source| Error::scan(pid, first.span.start, source))?;
    let is_large = |area: &Area| !area.file && area.span.bytes() >= LARGE_BYTES;
    // What is mapped between two areas is searched with them.
    let together = |one: &Area, other: &Area| !is_large(one) && !is_large(other) && !other.apart;
    let mut done = 0;
    for areas in areas.chunk_by(together) {
        let found = &mut found[done..done + areas.len()];
        scan_together(&map, areas, !is_large(&areas[0]), found)
            .map_err(|source| Error::scan(pid, areas[0].span.start, source))?;
        done += areas.len();
    }
    Ok(found)
}

/// Scans from the start of the first area to the end of the last, of which `files` says whether
/// they may be of files.
pub(crate) fn scan_together(
    map: &Pagemap,
    areas: &[Area],
    files: bool,
    found: &mut [ScanResult],
) -> io::Result<()> {
    let unwanted = if files {
        Category::FILE | Category::ZERO
    } else {
        Category::ZERO
    };
    let searched = match search(map, areas, found, unwanted, Category::GUARD) {
        // The kernel does not know guard pages.
        Err(error) if is(&error, Errno::INVAL) => {
            found.fill(ScanResult::default());
            search(map, areas, found, unwanted, Category::empty())
        }
        searched => searched,
    };
    match searched {
        Err(error) if is(&error, Errno::NOTTY) => list(map, areas, found),
        searched => searched,
    }
}

/// Lets the kernel search, from the start of the first area to the end of the last.
fn search(
    map: &Pagemap,
    areas: &[Area],
    found: &mut [ScanResult],
    unwanted: Category,
    told: Category,
) -> io::Result<()> {
    let query = Query {
        inverted: unwanted,
        all: unwanted,
        any: Category::PRESENT | Category::SWAPPED,
        told,
    };
    let whole = Span {
        start: areas[0].span.start,
        end: areas[areas.len() - 1].span.end,
    };
    let mut number = 0;
    each_found(map, whole, &query, |region| {
        let guard = region.categories().contains(Category::GUARD);
        let pages = region.span();
        number += areas[number..].partition_point(|area| area.span.end <= pages.start);
        let hit = areas[number..].iter().zip(&mut found[number..]);
        for (area, found) in hit.take_while(|(area, _)| area.span.start < pages.end) {
            found.add(pages.intersect(area.span), guard);
        }
    })
}

/// Calls `look` with every region of `span` that `query` finds, and changes nothing.
pub(crate) fn each_found(
    map: &Pagemap,
    span: Span,
    query: &Query,
    mut look: impl FnMut(&Region),
) -> io::Result<()> {
    let mut rest = span;
    let mut regions = region_buffer(span);
    while !rest.is_empty() {
        let (count, end) = map.scan(rest, query, Action::empty(), &mut regions)?;
        regions[..count].iter().for_each(&mut look);
        if end <= rest.start {
            return Err(Errno::IO.into());
        }
        // Where the answer was not too long, all was looked at, whatever the kernel says: it may
        // name a place in the middle.
        rest.start = if count < regions.len() { rest.end } else { end };
    }
    Ok(())
}

/// Looks at each page where the kernel cannot search (before 6.7). The page of zeros cannot be
/// told there; who reads it finds that it is zero.
fn list(map: &Pagemap, areas: &[Area], found: &mut [ScanResult]) -> io::Result<()> {
    for (area, found) in areas.iter().zip(found) {
        each_entry(map, area.span, |page, entry| {
            if (entry.is_present() || entry.is_swapped()) && !entry.is_file() {
                found.add(page, entry.is_guard());
            }
        })?;
    }
    Ok(())
}

/// Looks at each of `all`, whose addresses are those of `span`, in the page map of `process`.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub(crate) fn look_at<A, T>(
    process: &Process,
    all: &[A],
    span: impl Fn(&A) -> Span,
    mut look: impl FnMut(&Pagemap, &A) -> io::Result<T>,
) -> Result<Vec<T>> {
    let Some(first) = all.first() else {
        return Ok(Vec::new());
    };
    let pid = process.pid();
    let map =
        Pagemap::open(process).map_err(|source| Error::scan(pid, span(first).start, source))?;
    let mut look =
        |one: &A| look(&map, one).map_err(|source| Error::scan(pid, span(one).start, source));
    all.iter().map(&mut look).collect()
}

/// Calls `look` with every page of `span` and its entry.
pub(crate) fn each_entry(
    map: &Pagemap,
    span: Span,
    mut look: impl FnMut(Span, Entry),
) -> io::Result<()> {
    let mut entries = vec![Entry::default(); ENTRIES.min(span.pages() as usize)];
    let mut page = span.start;
    while page < span.end {
        let rest = Span {
            start: page,
            end: span.end,
        }
        .pages() as usize;
        let wanted = rest.min(entries.len());
        let read = map.entries(page, &mut entries[..wanted])?;
        if read == 0 {
            // So the file answers once the task's memory is gone.
            return Err(Errno::SRCH.into());
        }
        for entry in &entries[..read] {
            look(Span::new(page, PAGE_BYTES), *entry);
            page = page.plus(PAGE_BYTES);
        }
    }
    Ok(())
}

pub(crate) fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

#[cfg(test)]
mod tests {
    use abi::Addr;

    use super::*;

    #[test]
    fn looking_at_each_page_finds_the_same() {
        let bytes = vec![1_u8; 20 * PAGE_BYTES as usize];
        let start = Addr(bytes.as_ptr().addr() as u64 + PAGE_BYTES - 1).page_start();
        let span = Span::new(start, 15 * PAGE_BYTES);
        let area = Area {
            span,
            file: false,
            apart: false,
        };
        let searched = scan(&Process::own(), &[area], &mut PageMaps::default()).expect("a search");
        assert_eq!(searched[0].private, [span]);
        let mut listed = [ScanResult::default()];
        let map = Pagemap::open(&Process::own()).expect("the own page map");
        list(&map, &[area], &mut listed).expect("a list");
        assert_eq!(listed[0], searched[0]);
    }
}
