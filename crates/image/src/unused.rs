//! Room in pages objects that no chunk uses: it goes before the image is whole.
//!
//! Pages that are copied several times while they change, and those that turn out to be equal to
//! others, leave such room. At the end of an object it is cut off; before, where no other chunks
//! have moved there, it is given back to the store, which keeps the object's length.

use std::ops::Range;

use crate::chunk::Chunk;

/// Usage of a pages object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ObjectUsage {
    /// End of the last chunk.
    pub len_bytes: u64,
    /// Ranges before the end that no chunk uses.
    pub holes: Vec<Range<u64>>,
}

impl ObjectUsage {
    /// How many bytes the holes have.
    pub fn unused_bytes(&self) -> u64 {
        self.holes.iter().map(|hole| hole.end - hole.start).sum()
    }
}

/// Finds out what `chunks`, in order, use of the pages objects of the image itself; others do not
/// count. The last object has pages, unless it is the only one.
pub(crate) fn used<'a>(chunks: impl Iterator<Item = &'a Chunk>) -> Vec<ObjectUsage> {
    let mut objects = vec![ObjectUsage::default()];
    for chunk in chunks.take_while(|chunk| !chunk.is_inherited()) {
        let number = chunk.object as usize;
        objects.resize_with(objects.len().max(number + 1), ObjectUsage::default);
        let object = &mut objects[number];
        if chunk.offset_bytes > object.len_bytes {
            object.holes.push(object.len_bytes..chunk.offset_bytes);
        }
        object.len_bytes = chunk.offset_bytes + u64::from(chunk.stored_bytes);
    }
    objects
}

#[cfg(test)]
mod tests {
    use crate::PAGE_BYTES;
    use crate::chunk::testing::plain;

    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn holes_are_what_no_chunk_uses() {
        assert_eq!(used([].iter()), [ObjectUsage::default()]);
        let chunks = [
            plain(0, 1, 2),
            plain(0, 4, 1),
            plain(2, 3, 4),
            plain(2, 7, 2),
            plain(16, 0, 9),
        ];
        let found = used(chunks.iter());
        let holes = [&[(0, 1), (3, 4)][..], &[], &[(0, 3)]].map(|holes| {
            let bytes = holes.iter().map(|(from, to)| from * PAGE..to * PAGE);
            bytes.collect()
        });
        let lengths = [5, 0, 9].map(|pages| pages * PAGE);
        let unused = found.iter().map(ObjectUsage::unused_bytes);
        assert_eq!(unused.collect::<Vec<_>>(), [2 * PAGE, 0, 3 * PAGE]);
        for (used, (holes, len_bytes)) in found.into_iter().zip(holes.into_iter().zip(lengths)) {
            assert_eq!(used, ObjectUsage { len_bytes, holes });
        }
    }
}
