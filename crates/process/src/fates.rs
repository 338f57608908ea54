//! What became of each page of an image, as `show` counts them.

use std::collections::HashMap;

use image::{CHUNK_MAX_PAGES, ChunkId, Reader, Run, RunKind};

use crate::report::PageCounts;

/// What became of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is stored in this image, and this is the first that has it.
    Stored,
    /// It is stored for another page before it.
    Equal,
    /// It is stored in an older image.
    Parent,
    /// It is zero.
    Zero,
    /// It is another space's.
    Shared,
}

/// A bit for each page of a chunk.
type Seen = [u64; CHUNK_MAX_PAGES as usize / 64];

/// The runs of an image in order, cut where the fates of their pages differ.
pub(crate) fn fates(reader: &Reader) -> Vec<(Run, Fate)> {
    let mut seen: HashMap<ChunkId, Seen> = HashMap::new();
    let mut fates = Vec::new();
    let spaces = reader.spaces().iter();
    for run in spaces.flat_map(|space| reader.runs(space.id)) {
        let fate = match run.kind {
            RunKind::Zero => Fate::Zero,
            RunKind::Same { .. } => Fate::Shared,
            RunKind::Part(_) if reader.ancestor_of(&run).is_some() => Fate::Parent,
            RunKind::Part(part) => {
                let seen = seen.entry(part.chunk).or_default();
                own(&run, part.skip_pages as usize, seen, &mut fates);
                continue;
            }
        };
        fates.push((run, fate));
    }
    fates
}

/// Adds the pages of one of the image's own chunks.
fn own(run: &Run, skip_pages: usize, seen: &mut Seen, fates: &mut Vec<(Run, Fate)>) {
    let mut first = 0;
    let mut last = None;
    for page in 0..=run.pages {
        let fate = (page < run.pages).then(|| {
            let at = skip_pages + page as usize;
            let is_seen = seen[at / 64] >> (at % 64) & 1 == 1;
            seen[at / 64] |= 1 << (at % 64);
            if is_seen { Fate::Equal } else { Fate::Stored }
        });
        if let Some(known) = last.filter(|_| last != fate) {
            fates.push((run.cut(first, page - first), known));
            first = page;
        }
        last = fate;
    }
}

/// Counts the pages of an image by their fates.
pub(crate) fn count_all(reader: &Reader) -> PageCounts {
    let mut counts = PageCounts::default();
    for (run, fate) in fates(reader) {
        count(&mut counts, fate, run.pages.into());
    }
    counts
}

/// Adds pages of one fate.
pub(crate) fn count(counts: &mut PageCounts, fate: Fate, pages: u64) {
    let counted = match fate {
        Fate::Stored => &mut counts.stored,
        Fate::Zero => &mut counts.zero,
        Fate::Shared => &mut counts.shared,
        Fate::Equal => &mut counts.equal,
        Fate::Parent => &mut counts.parent,
    };
    *counted = counted.saturating_add(pages);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use image::{NewRun, PAGE_BYTES, Seal, SpaceId, Writer};

    use super::*;

    #[test]
    fn a_page_is_stored_once_and_equal_after_that() {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).expect("memory takes an image");
        let run = NewRun {
            space: SpaceId(2),
            first_page: 0,
            pages: 4,
        };
        let stored = writer.store(0, &[1; 4 * PAGE_BYTES], &[run]);
        let stored = stored.expect("memory takes pages")[0];
        let first = stored.equal(SpaceId(1), 9, 2, 1);
        let zero = Run {
            space: SpaceId(1),
            first_page: 20,
            pages: 7,
            kind: RunKind::Zero,
        };
        writer.mark(zero);
        writer.describe([stored, first]);
        writer.seal(Seal::default()).expect("the image is right");
        let reader = Reader::open(&*store).expect("a right image");
        let told = fates(&reader);
        let told = told
            .iter()
            .map(|(run, fate)| (run.space.0, run.first_page, run.pages, *fate));
        let expected = [
            (1, 9, 2, Fate::Stored),
            (1, 20, 7, Fate::Zero),
            (2, 0, 1, Fate::Stored),
            (2, 1, 2, Fate::Equal),
            (2, 3, 1, Fate::Stored),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }
}
