//! Which pages a child still shares with its parent since the fork.
use std::collections::HashMap;

use abi::{Addr, PAGE_BYTES, Span};
use sys::pagemap::{Entry, Pagemap};

use crate::buffer::Buffer;
use crate::scan::{ENTRIES, each_entry, push};
use crate::{Error, Extent, PageMaps, Result, Source, TaskMemory};

/// Pages compared at once by contents.
const COMPARED_PAGES: u64 = 128;

/// Entries of pages between two spans that are read rather than asking once more.
const GAP_PAGES: u64 = 512;

/// What a child has in common with its parent, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// Pages that both have at the same addresses: the very same physical pages, by copy-on-write.
    pub common: Vec<Span>,
    /// Pages that only the child has, and no other process.
    pub alone: Vec<Span>,
}

/// A parent, whose page map is read once for all its children.
pub struct Parent {
    pid: i32,
    /// Its entries from a page on.
    read: HashMap<(u64, usize), Vec<Entry>>,
}

impl Parent {
    /// Stretches up to this length are kept for the other children.
    const KEPT_PAGES: usize = 4096;
    /// And as many of them.
    const KEPT: usize = 64;

    /// The stopped task `pid`.
    #[must_use]
    pub fn new(pid: i32) -> Self {
        let read = HashMap::new();
        Self { pid, read }
    }

    /// Finds the pages of `spans` that task `child` has in common with this one.
    ///
    /// Without `CAP_SYS_ADMIN` the kernel does not tell which those are; then pages with the same
    /// contents are found, which is no difference to the tasks. Swapped pages are not found.
    /// `spans` are in ascending order, and of private mappings of both tasks.
    ///
    /// # Errors
    /// [`Error::Look`], [`Error::Gone`], and [`Error::Read`] where contents are compared.
    pub fn shared_with(
        &mut self,
        child: i32,
        spans: &[Span],
        maps: &mut PageMaps,
    ) -> Result<Shared> {
        let mut shared = Shared::default();
        let mut unknown = Vec::new();
        let mut theirs = Vec::new();
        for (stretch, window) in windows(spans) {
            let count = window.pages() as usize;
            theirs.resize(count, Entry::default());
            read(child, maps, window.start, &mut theirs)?;
            let ours = self.entries(window.start, count, maps)?;
            for span in stretch.iter().map(|span| span.intersect(window)) {
                for page in span.start.page()..span.end.page() {
                    let at = (page - window.start.page()) as usize;
                    let (ours, theirs) = (ours[at], theirs[at]);
                    let span = Span::new(Addr::of_page(page), PAGE_BYTES);
                    match same(ours, theirs) {
                        Some(true) => push(&mut shared.common, span),
                        Some(false) => {}
                        None => push(&mut unknown, span),
                    }
                    if theirs.is_present() && theirs.is_exclusive() {
                        push(&mut shared.alone, span);
                    }
                }
            }
        }
        if !unknown.is_empty() {
            let mut all = compare(self.pid, child, &unknown)?;
            all.append(&mut shared.common);
            all.sort();
            all.into_iter()
                .for_each(|span| push(&mut shared.common, span));
        }
        Ok(shared)
    }

    fn entries(&mut self, start: Addr, count: usize, maps: &mut PageMaps) -> Result<&[Entry]> {
        let key = (start.page(), count);
        if !self.read.contains_key(&key) {
            let mut entries = vec![Entry::default(); count];
            read(self.pid, maps, start, &mut entries)?;
            if self.read.len() >= Self::KEPT || self.read.keys().any(|key| key.1 > Self::KEPT_PAGES)
            {
                self.read.clear();
            }
            self.read.insert(key, entries);
        }
        Ok(&self.read[&key])
    }
}

/// Reads the entries of task `pid` from `start` on.
fn read(pid: i32, maps: &mut PageMaps, start: Addr, entries: &mut [Entry]) -> Result<()> {
    let failed = |source| Error::look(pid, start, source);
    let map = maps.of(pid).map_err(failed)?;
    match map.entries(start, entries).map_err(failed)? {
        read if read == entries.len() => Ok(()),
        _ => Err(Error::Gone { pid }),
    }
}

/// Groups spans that are near each other, and cuts the groups into what is read at once.
fn windows(spans: &[Span]) -> impl Iterator<Item = (&[Span], Span)> {
    stretches(spans).flat_map(|stretch| {
        let (start, end) = (stretch[0].start, stretch[stretch.len() - 1].end);
        let starts = (start.page()..end.page())
            .step_by(ENTRIES)
            .map(Addr::of_page);
        starts.map(move |start| {
            let window = Span::new(start, ENTRIES as u64 * PAGE_BYTES);
            (stretch, window.intersect(Span { start, end }))
        })
    })
}

/// Groups spans that are near each other.
fn stretches(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    spans.chunk_by(|one, next| next.start.page() - one.end.page() <= GAP_PAGES)
}

/// Tells the pages of `spans` that only task `pid` has from those that others may have as well, by
/// copy-on-write: the second ones must be read quietly (see [`TaskMemory::quiet`]).
///
/// # Errors
/// [`Error::Look`], [`Error::Gone`].
pub fn exclusive(pid: i32, spans: &[Span]) -> Result<[Vec<Span>; 2]> {
    let mut kinds = [Vec::new(), Vec::new()];
    let Some(first) = spans.first() else {
        return Ok(kinds);
    };
    let map = Pagemap::open(pid).map_err(|source| Error::look(pid, first.start, source))?;
    for span in spans {
        let look = |page: Span, entry: Entry| {
            let shared = entry.is_present() && !entry.is_exclusive();
            push(&mut kinds[usize::from(shared)], page);
        };
        let looked = each_entry(&map, *span, look);
        looked.map_err(|source| Error::look(pid, span.start, source))?;
    }
    Ok(kinds)
}

/// Whether two entries are of one page; none where the kernel hides that.
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
fn compare(parent: i32, child: i32, spans: &[Span]) -> Result<Vec<Span>> {
    let mut shared = Vec::new();
    let [of_parent, of_child] = [parent, child].map(TaskMemory::new);
    let mut buffers = [(); 2].map(|()| Buffer::new((COMPARED_PAGES * PAGE_BYTES) as usize));
    let [one, other] = &mut buffers;
    for span in spans {
        let mut rest = *span;
        while !rest.is_empty() {
            let pages = rest.pages().min(COMPARED_PAGES);
            let (space, first_page) = (image::SpaceId(0), rest.start.page());
            let extent = Extent {
                space,
                first_page,
                at: rest.start,
                pages,
            };
            let len = extent.bytes() as usize;
            let (one, other) = (&mut one.bytes()[..len], &mut other.bytes()[..len]);
            of_parent.read(&[extent], one)?;
            of_child.read(&[extent], other)?;
            let pairs = one
                .chunks(PAGE_BYTES as usize)
                .zip(other.chunks(PAGE_BYTES as usize));
            for (page, (one, other)) in (first_page..).zip(pairs) {
                if one == other {
                    push(&mut shared, Span::new(Addr::of_page(page), PAGE_BYTES));
                }
            }
            rest.start = rest.start.plus(extent.bytes());
        }
    }
    Ok(shared)
}
