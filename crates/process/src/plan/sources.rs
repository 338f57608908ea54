//! Where the pages of a process come from.

use image::{Part, Reader, RunKind, SpaceId, SpaceKind};
use resources::map::layout::{Pages, Place, Stored};

use crate::Result;
use crate::records::Node;

/// No task has more: 56 bits are the most that processors of this kind address.
const ADDRESSES_PAGES: u64 = 1 << 44;

/// The pages of a process: those stored, those inherited from the space `parent` if it may inherit,
/// and zeros.
pub(super) fn pages_of(reader: &Reader, node: &Node, parent: Option<SpaceId>) -> Result<Pages> {
    let (space, pid) = (node.space(), node.pid);
    let kind = reader.space(space).map(|space| space.kind);
    if let Some(kind) = kind.filter(|kind| *kind != SpaceKind::Memory) {
        let what = format!("space {space} is of another kind: {kind:?}");
        return Err(resources::Error::corrupt(format!("memory of {pid}"), what).into());
    }
    let mut pages = Pages::default();
    for run in reader.runs(space) {
        if run.end_page() > ADDRESSES_PAGES {
            let what = format!("page {:#x} is outside of every task", run.end_page() - 1);
            return Err(resources::Error::corrupt(format!("memory of {pid}"), what).into());
        }
        let start = abi::Addr(run.first_page * abi::PAGE_BYTES);
        let span = abi::Span::new(start, run.len_bytes());
        match run.kind {
            RunKind::Part(part) => pages.store(stored(reader, span, part)),
            RunKind::Same { space } if Some(space) == parent => {
                pages.inherited.push(span);
            }
            RunKind::Zero => pages.zero.push(span),
            RunKind::Same { .. } => resolve(reader, space, span, &mut pages)?,
        }
    }
    Ok(pages)
}

/// Pages of a chunk, as a task gets them.
fn stored(reader: &Reader, span: abi::Span, part: Part) -> Stored {
    let at = reader.straight(part).map(|at| Place {
        file: at.file,
        offset_bytes: at.offset_bytes,
    });
    Stored { span, at }
}

/// Pages that are another space's are read from there.
pub(super) fn resolve(
    reader: &Reader,
    space: SpaceId,
    span: abi::Span,
    pages: &mut Pages,
) -> Result<()> {
    let mut page = span.start.page();
    while page < span.end.page() {
        let located = reader.locate(space, page, span.end.page() - page)?;
        let count = u64::from(located.pages);
        let span = abi::Span::new(abi::Addr::of_page(page), count * abi::PAGE_BYTES);
        match located.part {
            Some(part) => pages.store(stored(reader, span, part)),
            None => pages.zero.push(span),
        }
        page += count;
    }
    Ok(())
}
