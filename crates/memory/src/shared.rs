//! Which pages a child still shares with its parent since the fork.
use std::collections::HashMap;
use std::rc::Rc;

use abi::{Addr, PAGE_BYTES, Span};
use pages::{Buffer, Extent, Source};
use sys::pagemap::Entry;
use sys::process::Process;

use crate::scan::{ENTRIES, each_entry, look_at};
use crate::{Error, PageMaps, Result, TaskMemory};
use abi::spans::Spans;

/// Pages compared at once by contents.
const COMPARED_PAGES: u64 = 128;

/// Of how many pages the addresses are multiples at which reading begins and ends.
const ROUND_PAGES: u64 = 64;
/// The first page that no task can have with page tables of four levels.
const TOP_PAGE: u64 = 0x7_ffff_ffff;

/// Entries of pages between two spans that are read rather than asking once more.
const GAP_PAGES: u64 = 512;

/// Pages that a child shares with its parent, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedPages {
    /// Pages that both have at the same addresses: the very same physical pages, by copy-on-write.
    pub common: Spans,
    /// Pages that only the child has, and no other process.
    pub alone: Spans,
}

/// The stopped tasks of a tree, whose page maps are read once for all that are related.
#[derive(Default)]
pub struct CowSharing {
    /// Entries of a task from a page on.
    read: HashMap<(i32, u64, usize), Rc<[Entry]>>,
    kept: usize,
}

impl CowSharing {
    /// How many entries are kept for the next relation.
    const KEPT: usize = 512 << 10;

    /// Finds the pages of `spans` that process `child` has in common with `parent`.
    ///
    /// Without `CAP_SYS_ADMIN` the kernel does not tell which those are; then pages with the same
    /// contents are found, which is no difference to the tasks. Swapped pages are not found.
    /// `spans` are in ascending order, and of private mappings of both tasks.
    ///
    /// # Errors
    /// [`Error::Scan`], [`Error::Gone`], and [`Error::Read`] where contents are compared.
    pub fn shared_with(
        &mut self,
        parent: &Process,
        child: &Process,
        spans: &[Span],
        maps: &mut PageMaps,
    ) -> Result<SharedPages> {
        let mut shared = SharedPages::default();
        let mut unknown = Spans::new();
        for (stretch, around) in pieces(spans) {
            let theirs = self.entries(child, around, maps)?;
            let ours = self.entries(parent, around, maps)?;
            for span in stretch.iter().map(|span| span.intersect(around)) {
                for page in span.start.page()..span.end.page() {
                    let at = (page - around.start.page()) as usize;
                    let (ours, theirs) = (ours[at], theirs[at]);
                    let span = Span::new(Addr::of_page(page), PAGE_BYTES);
                    match same(ours, theirs) {
                        Some(true) => shared.common.push(span),
                        Some(false) => {}
                        None => unknown.push(span),
                    }
                    if theirs.is_present() && theirs.is_exclusive() {
                        shared.alone.push(span);
                    }
                }
            }
        }
        if !unknown.is_empty() {
            shared.common = shared.common.and(&compare(parent, child, &unknown)?);
        }
        Ok(shared)
    }

    fn entries(
        &mut self,
        process: &Process,
        around: Span,
        maps: &mut PageMaps,
    ) -> Result<Rc<[Entry]>> {
        let count = around.pages() as usize;
        let key = (process.pid(), around.start.page(), count);
        if let Some(read) = self.read.get(&key) {
            return Ok(read.clone());
        }
        let mut entries = vec![Entry::default(); count];
        read(process, maps, around.start, &mut entries)?;
        let entries = Rc::<[Entry]>::from(entries);
        if self.kept + count > Self::KEPT {
            self.read.clear();
            self.kept = 0;
        }
        self.kept += count;
        self.read.insert(key, entries.clone());
        Ok(entries)
    }
}

/// Reads the entries of `process` from `start` on. Where its address space ends before, as that of
/// a 32-bit program does, there is nothing above.
fn read(process: &Process, maps: &mut PageMaps, start: Addr, entries: &mut [Entry]) -> Result<()> {
    let pid = process.pid();
    let failed = |source| Error::scan(pid, start, source);
    let map = maps.of(process).map_err(failed)?;
    match map.entries(start, entries).map_err(failed)? {
        read if read == entries.len() => Ok(()),
        _ => match map
            .entries(Addr(0), &mut [Entry::default()])
            .map_err(failed)?
        {
            0 => Err(Error::Gone { pid }),
            _ => Ok(()),
        },
    }
}

/// Groups spans that are near each other, and cuts the groups into what is read at once. What is
/// read begins and ends at round addresses: so it is the same for relatives that differ a little.
fn pieces(spans: &[Span]) -> impl Iterator<Item = (&[Span], Span)> {
    stretches(spans).flat_map(|stretch| {
        let (start, end) = (stretch[0].start, stretch[stretch.len() - 1].end);
        let first = start.page() / ROUND_PAGES * ROUND_PAGES;
        let round = end.page().next_multiple_of(ROUND_PAGES);
        // The kernel tells nothing of what is above all tasks.
        let last = if round < TOP_PAGE { round } else { end.page() };
        let starts = (first..last).step_by(ENTRIES);
        starts.map(move |page| {
            let pages = (last - page).min(ENTRIES as u64);
            let around = Span::new(Addr::of_page(page), pages * PAGE_BYTES);
            (stretch, around)
        })
    })
}

/// Groups spans that are near each other.
fn stretches(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    spans.chunk_by(|one, next| next.start.page() - one.end.page() <= GAP_PAGES)
}

/// Tells the pages of `spans` that only `process` has from those that others may have as well, by
/// copy-on-write: the second ones must be read quietly (see [`TaskMemory::quiet`]).
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn exclusive(process: &Process, spans: &[Span]) -> Result<[Spans; 2]> {
    let mut kinds = [Spans::new(), Spans::new()];
    let mut look = |page: Span, entry: Entry| {
        let shared = entry.is_present() && !entry.is_exclusive();
        kinds[usize::from(shared)].push(page);
    };
    let looked = look_at(
        process,
        spans,
        |span| *span,
        |map, span| each_entry(map, *span, &mut look),
    );
    looked.map(|_| kinds)
}

/// Tells whether two entries are of one page; none where the kernel hides that.
fn same(one: Entry, other: Entry) -> Option<bool> {
    if !one.is_present() || !other.is_present() || one.is_file() || other.is_file() {
        return Some(false);
    }
    // A page that only one mapping has is certainly not shared, and that is never hidden.
    if one.is_exclusive() || other.is_exclusive() {
        return Some(false);
    }
    Some(one.frame()? == other.frame()?)
}

/// Finds the pages of `spans` that have the same contents in both tasks.
fn compare(parent: &Process, child: &Process, spans: &[Span]) -> Result<Spans> {
    let mut shared = Spans::new();
    let [of_parent, of_child] = [parent, child].map(TaskMemory::new);
    let mut buffers = [(); 2].map(|()| Buffer::new((COMPARED_PAGES * PAGE_BYTES) as usize));
    let [one, other] = &mut buffers;
    for span in spans {
        let mut rest = *span;
        while !rest.is_empty() {
            let pages = rest.pages().min(COMPARED_PAGES);
            let first_page = rest.start.page();
            let span = Span::new(rest.start, pages * PAGE_BYTES);
            let extent = Extent::of(image::SpaceId(0), span);
            let len = extent.bytes() as usize;
            let (one, other) = (&mut one.bytes()[..len], &mut other.bytes()[..len]);
            of_parent.read(&[extent], one)?;
            of_child.read(&[extent], other)?;
            let pairs = one
                .chunks(PAGE_BYTES as usize)
                .zip(other.chunks(PAGE_BYTES as usize));
            for (page, (one, other)) in (first_page..).zip(pairs) {
                if one == other {
                    shared.push(Span::new(Addr::of_page(page), PAGE_BYTES));
                }
            }
            rest.start = rest.start.plus(extent.bytes());
        }
    }
    Ok(shared)
}
