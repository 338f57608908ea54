//! The pages objects of an image: one, or several that were written side by side.

use crate::ImageId;

/// The most pages objects of an image.
pub const PARTS_MAX: usize = 16;

/// The first pages object for chunks that are encoded; each is that of the threads that store other
/// chunks in the object so many numbers before. They have no place among pages that begin at whole
/// pages.
pub(crate) const ENCODED_PARTS: usize = PARTS_MAX / 2;

/// The most ancestors of an image: with its own, their pages objects have numbers of 16 bits.
pub const ANCESTORS_MAX: usize = (1 << (64 - NUMBER_SHIFT)) / PARTS_MAX - 1;

/// A position is an offset in a pages object and, in the bits from here on, the object's number.
const NUMBER_SHIFT: u32 = 48;

/// The most bytes of a pages object.
pub(crate) const PART_MAX_BYTES: u64 = 1 << NUMBER_SHIFT;

/// Returns the position of `offset_bytes` in pages object `object`: what sorts places.
pub(crate) fn position(object: usize, offset_bytes: u64) -> u64 {
    (object as u64) << NUMBER_SHIFT | offset_bytes
}

/// Returns the number of pages object `part` of ancestor number `ancestor`: those of the image
/// itself come before them.
pub(crate) fn of_ancestor(ancestor: usize, part: usize) -> usize {
    (ancestor + 1) * PARTS_MAX + part
}

/// Returns which ancestor a pages object belongs to, none for the image's own, and its number
/// there.
pub(crate) fn owner(object: usize) -> (Option<usize>, usize) {
    ((object / PARTS_MAX).checked_sub(1), object % PARTS_MAX)
}

impl ImageId {
    /// Returns the name of the first object that holds this image's pages; of most images the only
    /// one.
    pub fn pages_name(self) -> String {
        self.pages_part_name(0)
    }

    /// Returns the name of pages object `part`, below [`PARTS_MAX`].
    pub fn pages_part_name(self, part: usize) -> String {
        match part {
            0 => format!("pages-{self}.img"),
            part => format!("pages-{self}.{part}.img"),
        }
    }

    /// Tells whether an object was named by [`ImageId::pages_part_name`] for this image.
    pub(crate) fn owns(self, name: &str) -> bool {
        pages_owner(name).is_some_and(|owner| owner == self.to_string())
    }
}

/// Returns the image identity in a name that [`ImageId::pages_part_name`] may have made.
pub(crate) fn pages_owner(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("pages-")?.strip_suffix(".img")?;
    let (id, part) = rest.split_once('.').unwrap_or((rest, "1"));
    let is_part = part
        .parse()
        .is_ok_and(|part| (1..PARTS_MAX).contains(&part));
    let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_id && is_part).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_belong_to_an_ancestor() {
        assert_eq!(owner(15), (None, 15));
        let last = of_ancestor(ANCESTORS_MAX - 1, PARTS_MAX - 1);
        assert_eq!((last, owner(last).0), (65_535, Some(ANCESTORS_MAX - 1)));
        assert_eq!(owner(of_ancestor(7, 3)), (Some(7), 3));
    }

    #[test]
    fn names_are_recognized() {
        let id = ImageId([0xa7; 16]);
        assert!((0..PARTS_MAX).all(|part| id.owns(&id.pages_part_name(part))));
        assert!(!ImageId([0; 16]).owns(&id.pages_name()));
        for strange in ["pages-1.img", "manifest.img", "pages-.img"] {
            assert_eq!(pages_owner(strange), None);
        }
        for part in ["0", "16", "x", ""] {
            assert_eq!(pages_owner(&format!("pages-{id}.{part}.img")), None);
        }
    }
}
