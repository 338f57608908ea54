//! Which pages a task has written since they were write-protected last.
//!
//! A mapping that is registered with an asynchronously write-protecting userfaultfd
//! (`UFFD_FEATURE_WP_ASYNC`) is *tracked*: a page of it is *written* unless it was protected by a
//! scan with a reset and has not been written since. Nobody is told of a mapping that moved or was
//! replaced, of pages given up or of a fork: their pages simply are not protected any more. So what
//! is found here is true whatever the task has done, and whatever it does meanwhile is found by the
//! next scan.
//!
//! Asking for written pages alone is many times faster than asking for anything else (0.4 ms
//! instead of 3 for a gigabyte), but it counts pages without contents as written where there is a
//! page table, and as unwritten where there is none. So it only finds candidates.
use std::io;

use abi::{Addr, PAGE_BYTES, Span};
use rustix::io::Errno;
use sys::pagemap::{Action, Category, Entry, Pagemap, Query, Region};
use sys::process::Process;

use crate::scan::{Area, LARGE_BYTES, ScanResult, is, look_at, region_buffer, scan_together};
use crate::{Error, Result};
use abi::spans::{Spans, subtract};

/// Bytes that one page table covers.
const BLOCK_BYTES: u64 = 2 << 20;
/// Candidates that are closer to each other than this are looked at together: asking for as many
/// pages costs what a system call costs (2.6 us, and 11 ns a page).
const NEAR_BYTES: u64 = 256 * PAGE_BYTES;

/// Pages found in one range of addresses, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackResult {
    /// Pages that the task has for itself and that may have changed since the last reset, or that
    /// are not tracked: to be read.
    pub written: Spans,
    /// Pages that the task has for itself and that are as they were at the last reset.
    pub unwritten: Spans,
    /// Guard pages; not told by a scan with a reset.
    pub guards: Spans,
    /// True if the area is tracked.
    pub is_tracked: bool,
}

/// Finds the pages of `process` that belong to nobody else, as [`scan()`](crate::scan()) does, and
/// tells which of them are as they were at the last reset, in each of `areas`, which are in
/// ascending order, do not overlap, and lie in one mapping each.
///
/// With `reset`, the written pages are protected in the same moment in which they are found: what
/// is written from then on is found by the next scan. The caller must be allowed to trace the task.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn tracked(process: &Process, areas: &[Area], reset: bool) -> Result<Vec<TrackResult>> {
    let look = |map: &Pagemap, area: &Area| scan_area(map, *area, reset);
    look_at(process, areas, |area| area.span, look)
}

/// Tells which mappings of `process`, of which `spans` are parts, are tracked.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn are_tracked(process: &Process, spans: &[Span]) -> Result<Vec<bool>> {
    look_at(
        process,
        spans,
        |span| *span,
        |map, span| is_tracked(map, *span),
    )
}

/// Finds the pages of `spans` that are marked as protected, whether they are tracked or not.
///
/// In a mapping that was just registered there should be none. But where the kernel joins a
/// mapping that moves with one beside it, it takes both out of the tracking and leaves the marks in
/// the page table; older kernels leave them on pages that move. Such a page may be written without
/// anybody noticing: the marks must be taken away before what [`tracked`] says after a reset is
/// believed.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn marked(process: &Process, spans: &[Span]) -> Result<Vec<Span>> {
    let look = |map: &Pagemap, span: &Span| {
        protected(map, *span, &candidates(map, *span, Action::empty())?)
    };
    let marked = look_at(process, spans, |span| *span, look)?;
    Ok(marked.into_iter().flatten().collect())
}

/// Protects the pages of `spans` that have contents: what is written to them from now on is found
/// by the next scan. They were found by [`tracked`] without a reset, and the task is stopped.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn protect(process: &Process, spans: &[Span]) -> Result<()> {
    let Some(first) = spans.first() else {
        return Ok(());
    };
    let pid = process.pid();
    let failed = |source| Error::scan(pid, first.start, source);
    let map = Pagemap::open(process).map_err(failed)?;
    for span in spans {
        let area = Area {
            span: *span,
            file: false,
            apart: false,
        };
        exact(
            &map,
            area,
            *span,
            PageFilter::Written,
            Action::PROTECT,
            &mut TrackResult::default(),
        )
        .map_err(failed)?;
    }
    Ok(())
}

fn scan_area(map: &Pagemap, area: Area, reset: bool) -> io::Result<TrackResult> {
    match scan_tracked(map, area, reset) {
        // All of it must be tracked in the moment in which it is looked at: what is not may have
        // marks that are not kept.
        Err(error) if is(&error, Errno::PERM) || is(&error, Errno::NOTTY) => untracked(map, area),
        found => found,
    }
}

fn scan_tracked(map: &Pagemap, area: Area, reset: bool) -> io::Result<TrackResult> {
    let mut found = TrackResult {
        is_tracked: true,
        ..TrackResult::default()
    };
    let action = if reset {
        Action::CHECK_TRACKED | Action::PROTECT
    } else {
        Action::CHECK_TRACKED
    };
    if area.file || area.span.bytes() < LARGE_BYTES {
        exact(map, area, area.span, PageFilter::Any, action, &mut found)?;
        return Ok(found);
    }
    let candidates = candidates(map, area.span, Action::CHECK_TRACKED)?;
    for near in candidates.chunk_by(|one, next| next.start.0 - one.end.0 < NEAR_BYTES) {
        let span = Span {
            start: near[0].start,
            end: near[near.len() - 1].end,
        };
        exact(map, area, span, PageFilter::Written, action, &mut found)?;
    }
    let protected = protected(map, area.span, &candidates)?;
    // Of pages between candidates, some may have been written while these were looked at: they
    // were found, and protected, with them.
    found.unwritten = subtract(&protected, &found.written);
    Ok(found)
}

/// Tells whether the mapping at `span` is tracked.
fn is_tracked(map: &Pagemap, span: Span) -> io::Result<bool> {
    let page = Span::new(span.start, PAGE_BYTES);
    match map.scan(page, &WRITTEN, Action::CHECK_TRACKED, &mut [Region::EMPTY]) {
        Ok(_) => Ok(true),
        Err(error) if is(&error, Errno::PERM) => Ok(false),
        // The kernel cannot track.
        Err(error) if is(&error, Errno::NOTTY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// All pages of an area that is not tracked count as written.
fn untracked(map: &Pagemap, area: Area) -> io::Result<TrackResult> {
    let mut found = [ScanResult::default()];
    let files = area.file || area.span.bytes() < LARGE_BYTES;
    scan_together(map, &[area], files, &mut found)?;
    let [found] = found;
    Ok(TrackResult {
        written: found.private,
        guards: found.guards,
        ..TrackResult::default()
    })
}

/// The query that the kernel answers fast.
const WRITTEN: Query = Query {
    inverted: Category::empty(),
    all: Category::WRITTEN,
    any: Category::empty(),
    told: Category::WRITTEN,
};

/// The pages that are written or have no contents; those without a page table are missing.
fn candidates(map: &Pagemap, span: Span, check: Action) -> io::Result<Spans> {
    let mut found = Spans::new();
    each_region(map, span, &WRITTEN, check, |region| {
        found.push(region.span());
    })?;
    Ok(found)
}

/// Which pages [`exact`] looks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageFilter {
    Any,
    Written,
}

/// Asks for each page what it is.
fn exact(
    map: &Pagemap,
    area: Area,
    span: Span,
    only: PageFilter,
    action: Action,
    found: &mut TrackResult,
) -> io::Result<()> {
    let (guards, written) = (found.guards.len(), found.written.len());
    let unwritten = found.unwritten.len();
    match exact_with(map, area, span, only, action, Category::GUARD, found) {
        // The kernel does not know guard pages.
        Err(error) if is(&error, Errno::INVAL) => {
            found.guards.truncate(guards);
            found.written.truncate(written);
            found.unwritten.truncate(unwritten);
            exact_with(map, area, span, only, action, Category::empty(), found)
        }
        done => done,
    }
}

fn exact_with(
    map: &Pagemap,
    area: Area,
    span: Span,
    only: PageFilter,
    action: Action,
    guard: Category,
    found: &mut TrackResult,
) -> io::Result<()> {
    let mut unwanted = Category::ZERO;
    let mut told = Category::WRITTEN | Category::SWAPPED;
    if area.file {
        unwanted |= Category::FILE;
    }
    // A guard is not to be protected.
    if action.contains(Action::PROTECT) {
        unwanted |= guard;
    } else {
        told |= guard;
    }
    let query = Query {
        inverted: unwanted,
        all: match only {
            PageFilter::Any => unwanted,
            PageFilter::Written => unwanted | Category::WRITTEN,
        },
        any: Category::PRESENT | Category::SWAPPED,
        told,
    };
    each_region(map, span, &query, action, |region| {
        let is = region.categories();
        // Of a file's mapping, what looks like a swapped page may be what is left of one that was
        // given up.
        let doubtful = area.file && is.contains(Category::SWAPPED);
        let pages = if is.contains(Category::GUARD) {
            &mut found.guards
        } else if is.contains(Category::WRITTEN) || doubtful {
            &mut found.written
        } else {
            &mut found.unwritten
        };
        pages.push(region.span());
    })
}

/// The pages of `span` that are protected: those that are no candidates and have a page table.
fn protected(map: &Pagemap, span: Span, candidates: &[Span]) -> io::Result<Spans> {
    let mut found = Spans::new();
    let mut at = span.start;
    let mut blocks = Blocks {
        map,
        known: None,
        candidates,
    };
    for candidate in candidates.iter().copied().chain([Span {
        start: span.end,
        end: span.end,
    }]) {
        while at < candidate.start {
            let end = Addr((at.0 + 1).next_multiple_of(BLOCK_BYTES)).min(candidate.start);
            if blocks.has_table(at)? {
                found.push(Span { start: at, end });
            }
            at = end;
        }
        at = candidate.end;
    }
    Ok(found)
}

/// Knows where there are page tables.
struct Blocks<'a> {
    map: &'a Pagemap,
    /// The last block asked for, and its answer.
    known: Option<(u64, bool)>,
    /// In ascending order; those before the last block asked for are taken off.
    candidates: &'a [Span],
}

impl Blocks<'_> {
    /// Tells whether the page at `at`, which is no candidate, has a page table; addresses only
    /// grow.
    fn has_table(&mut self, at: Addr) -> io::Result<bool> {
        let block = at.0 / BLOCK_BYTES;
        if let Some((known, answer)) = self.known
            && known == block
        {
            return Ok(answer);
        }
        let start = Addr(block * BLOCK_BYTES);
        let before = self.candidates.partition_point(|one| one.end <= start);
        self.candidates = &self.candidates[before..];
        let end = start.plus(BLOCK_BYTES);
        // Candidates are only found in page tables; otherwise a page that is no candidate tells.
        let mut answer = self.candidates.first().is_some_and(|one| one.start < end);
        if !answer {
            let mut entry = [Entry::default()];
            let read = self.map.entries(at, &mut entry)?;
            answer = read == 1 && (entry[0].is_present() || entry[0].is_swapped());
        }
        self.known = Some((block, answer));
        Ok(answer)
    }
}

/// Calls `look` with every region of `span` that `query` finds.
fn each_region(
    map: &Pagemap,
    span: Span,
    query: &Query,
    action: Action,
    mut look: impl FnMut(&Region),
) -> io::Result<()> {
    let mut regions = region_buffer(span);
    let mut rest = span;
    while !rest.is_empty() {
        let (count, end) = map.scan(rest, query, action, &mut regions)?;
        regions[..count].iter().for_each(&mut look);
        if end <= rest.start {
            return Err(Errno::IO.into());
        }
        rest.start = end;
    }
    Ok(())
}
