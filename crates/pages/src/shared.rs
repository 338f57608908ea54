//! Which pages a child still shares with its parent since the fork.
use abi::{PAGE_BYTES, Span};
use sys::pagemap::{Entry, Pagemap};

use crate::buffer::Buffer;
use crate::scan::{ENTRIES, push};
use crate::{Error, Extent, Result, Source, TaskMemory};

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

/// Finds the pages of `spans` that task `child` has in common with task `parent`.
///
/// Without `CAP_SYS_ADMIN` the kernel does not tell which those are; then pages with the same
/// contents are found, which is no difference to the tasks. Swapped pages are not found. `spans`
/// are in ascending order, and of private mappings of both tasks.
///
/// # Errors
/// [`Error::Look`], [`Error::Gone`], and [`Error::Read`] where contents are compared.
pub fn shared_with(parent: i32, child: i32, spans: &[Span]) -> Result<Shared> {
    let mut shared = Shared::default();
    let Some(first) = spans.first() else {
        return Ok(shared);
    };
    let open = |pid| Pagemap::open(pid).map_err(|source| Error::look(pid, first.start, source));
    let maps = [(parent, open(parent)?), (child, open(child)?)];
    let mut entries = [(); 2].map(|()| Vec::new());
    let mut unknown = Vec::new();
    for stretch in stretches(spans) {
        let whole = Span {
            start: stretch[0].start,
            end: stretch[stretch.len() - 1].end,
        };
        let mut rest = whole;
        while !rest.is_empty() {
            let count = ENTRIES.min(rest.pages() as usize);
            for ((pid, map), entries) in maps.iter().zip(&mut entries) {
                entries.resize(count, Entry::default());
                let read = map.entries(rest.start, entries);
                match read.map_err(|source| Error::look(*pid, rest.start, source))? {
                    read if read == count => {}
                    _ => return Err(Error::Gone { pid: *pid }),
                }
            }
            let window = Span::new(rest.start, count as u64 * PAGE_BYTES);
            for span in stretch.iter().map(|span| span.intersect(window)) {
                for page in span.start.page()..span.end.page() {
                    let at = (page - rest.start.page()) as usize;
                    let span = Span::new(abi::Addr::of_page(page), PAGE_BYTES);
                    match same(entries[0][at], entries[1][at]) {
                        Some(true) => push(&mut shared.common, span),
                        Some(false) => {}
                        None => push(&mut unknown, span),
                    }
                    if entries[1][at].is_present() && entries[1][at].is_exclusive() {
                        push(&mut shared.alone, span);
                    }
                }
            }
            rest.start = window.end;
        }
    }
    if !unknown.is_empty() {
        let mut all = compare(parent, child, &unknown)?;
        all.append(&mut shared.common);
        all.sort();
        all.into_iter()
            .for_each(|span| push(&mut shared.common, span));
    }
    Ok(shared)
}

/// Groups spans that are near each other.
fn stretches(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    spans.chunk_by(|one, next| next.start.page() - one.end.page() <= GAP_PAGES)
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
                    push(&mut shared, Span::new(abi::Addr::of_page(page), PAGE_BYTES));
                }
            }
            rest.start = rest.start.plus(extent.bytes());
        }
    }
    Ok(shared)
}
