//! Which chunks of an image only those need whose pages come later.

use abi::Span;
use image::{ChunkId, Part, Reader, Run, RunKind, SpaceKind};

use crate::Result;
use crate::plan::Outside;

/// The chunks, sorted, that nobody reads while the tree is made: all of their pages are of mappings
/// whose pages come when they are touched.
///
/// # Errors
/// [`crate::Error::Image`] for sharing that leads nowhere.
pub(super) fn find(reader: &Reader, outside: &[Outside]) -> Result<Vec<ChunkId>> {
    let mut lazy = Vec::new();
    let mut now = Vec::new();
    for space in reader.spaces() {
        let mappings = outside
            .iter()
            .find(|one| one.space == space.id && is_memory(space.kind));
        let mappings = mappings.map_or(&[][..], |one| &one.lazy);
        for run in reader.runs(space.id) {
            let waits = is_within(mappings, &run);
            match run.kind {
                RunKind::Part(Part { chunk, .. }) if waits => lazy.push(chunk),
                RunKind::Part(Part { chunk, .. }) => now.push(chunk),
                RunKind::Same { .. } if !waits => {
                    let located = reader.locate(space.id, run.first_page, run.pages.into())?;
                    now.extend(located.part.map(|part| part.chunk));
                }
                RunKind::Same { .. } | RunKind::Zero => {}
            }
        }
    }
    lazy.sort_unstable();
    now.sort_unstable();
    lazy.retain(|chunk| now.binary_search(chunk).is_err());
    Ok(lazy)
}

fn is_memory(kind: SpaceKind) -> bool {
    kind == SpaceKind::Memory
}

/// Whether all of a run lies in one of the mappings, which are sorted.
fn is_within(mappings: &[Span], run: &Run) -> bool {
    let (start, end) = (run.first_page, run.end_page());
    let at = mappings.partition_point(|map| map.end.page() <= start);
    let map = mappings.get(at);
    map.is_some_and(|map| map.start.page() <= start && end <= map.end.page())
}
