//! Room in pages objects that no page uses: it goes before the image is whole.
//!
//! Pages that are copied several times while they change, and those that turn out to be equal to
//! others, leave such room. At the end of an object it is cut off; before, where no other pages
//! have moved there, it is given back to the store, which keeps the object's length.

use std::ops::Range;

use crate::Run;
use crate::parts::{self, PARTS_MAX};

/// What of a pages object is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Used {
    /// Where the last run ends.
    pub len_bytes: u64,
    /// What no run uses before.
    pub holes: Vec<Range<u64>>,
}

impl Used {
    /// How many bytes the holes have.
    pub fn unused_bytes(&self) -> u64 {
        self.holes.iter().map(|hole| hole.end - hole.start).sum()
    }
}

/// Finds out what `stored`, data runs in any order and some of them several times, use of the pages
/// objects of the image itself; other runs do not count. The last object has pages, unless it is
/// the only one.
pub(crate) fn used<'a>(stored: impl Iterator<Item = &'a Run>) -> Vec<Used> {
    let places = stored.filter_map(|run| Some((run.stored_at()?, run.len_bytes())));
    let own = |(position, _): &(u64, u64)| parts::split(*position).0 < PARTS_MAX;
    let mut places = places.filter(own).collect::<Vec<_>>();
    // Mostly sorted already; the stable sort knows how to use that.
    places.sort();
    let mut objects = vec![Used::default()];
    for (position, bytes) in places {
        let (object, start_bytes) = parts::split(position);
        objects.resize_with(objects.len().max(object + 1), Used::default);
        let object = &mut objects[object];
        if start_bytes > object.len_bytes {
            object.holes.push(object.len_bytes..start_bytes);
        }
        object.len_bytes = object.len_bytes.max(start_bytes + bytes);
    }
    objects
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::{PAGE_BYTES, Run, RunKind, SpaceId, parts};

    /// A stored run.
    pub fn data(object: usize, page: u64, pages: u32) -> Run {
        let kind = RunKind::Data {
            offset_bytes: parts::position(object, page * PAGE_BYTES as u64),
            checksum: 1,
        };
        Run {
            space: SpaceId(1),
            first_page: 0,
            pages,
            kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{PAGE_BYTES, RunKind};

    use super::testing::data;
    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn holes_are_what_no_run_uses() {
        let zero = Run {
            kind: RunKind::Zero,
            ..data(0, 0, 9)
        };
        assert_eq!(used([zero].iter()), [Used::default()]);
        let runs = [
            data(2, 7, 2),
            data(0, 1, 2),
            zero,
            data(2, 3, 4),
            data(16, 0, 9),
            data(0, 4, 1),
            data(0, 1, 2),
        ];
        let found = used(runs.iter());
        let holes = [&[(0, 1), (3, 4)][..], &[], &[(0, 3)]];
        let holes = holes.map(|holes| {
            let bytes = holes.iter().map(|(from, to)| from * PAGE..to * PAGE);
            bytes.collect()
        });
        let lengths = [5, 0, 9].map(|pages| pages * PAGE);
        let unused = found.iter().map(Used::unused_bytes);
        assert_eq!(unused.collect::<Vec<_>>(), [2 * PAGE, 0, 3 * PAGE]);
        for (used, (holes, len_bytes)) in found.into_iter().zip(holes.into_iter().zip(lengths)) {
            assert_eq!(used, Used { len_bytes, holes });
        }
    }
}
