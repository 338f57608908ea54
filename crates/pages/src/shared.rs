//! Which pages a child still shares with its parent since the fork.
use abi::{PAGE_BYTES, Span};
use sys::pagemap::{Entry, Pagemap};

use crate::buffer::Buffer;
use crate::scan::{ENTRIES, push};
use crate::{Error, Extent, Result, Source, TaskMemory};

/// Pages compared at once by contents.
const COMPARED_PAGES: u64 = 128;

/// Finds the pages of `spans` that task `child` has in common with task `parent` at the same
/// addresses: the very same physical pages, by copy-on-write.
///
/// Without `CAP_SYS_ADMIN` the kernel does not tell which those are; then pages with the same
/// contents are found, which is no difference to the tasks. Swapped pages are not found. `spans`
/// are in ascending order, and of private mappings of both tasks.
///
/// # Errors
/// [`Error::Look`], [`Error::Gone`], and [`Error::Read`] where contents are compared.
pub fn shared_with(parent: i32, child: i32, spans: &[Span]) -> Result<Vec<Span>> {
    let open = |pid, span: &Span| {
        Pagemap::open(pid).map_err(|source| Error::look(pid, span.start, source))
    };
    let Some(first) = spans.first() else {
        return Ok(Vec::new());
    };
    let maps = [(parent, open(parent, first)?), (child, open(child, first)?)];
    let longest = spans
        .iter()
        .map(|span| span.pages() as usize)
        .max()
        .unwrap_or_default();
    let mut entries = [(); 2].map(|()| vec![Entry::default(); ENTRIES.min(longest)]);
    let mut shared = Vec::new();
    let mut unknown = Vec::new();
    for span in spans {
        let mut rest = *span;
        while !rest.is_empty() {
            let count = entries[0].len().min(rest.pages() as usize);
            for ((pid, map), entries) in maps.iter().zip(&mut entries) {
                let read = map.entries(rest.start, &mut entries[..count]);
                match read.map_err(|source| Error::look(*pid, rest.start, source))? {
                    read if read == count => {}
                    _ => return Err(Error::Gone { pid: *pid }),
                }
            }
            let pairs = entries[0].iter().zip(&entries[1]).take(count);
            for (page, (of_parent, of_child)) in (rest.start.page()..).zip(pairs) {
                let page = Span::new(abi::Addr::of_page(page), PAGE_BYTES);
                match same(*of_parent, *of_child) {
                    Some(true) => push(&mut shared, page),
                    Some(false) => {}
                    None => push(&mut unknown, page),
                }
            }
            rest.start = rest.start.plus(count as u64 * PAGE_BYTES);
        }
    }
    if !unknown.is_empty() {
        let mut all = compare(parent, child, &unknown)?;
        all.append(&mut shared);
        all.sort();
        all.into_iter().for_each(|span| push(&mut shared, span));
    }
    Ok(shared)
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
