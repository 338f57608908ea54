//! The pages objects of an image: one, or several that were written side by side.

use crate::ImageId;

/// The most pages objects of an image.
pub const PARTS_MAX: usize = 16;

/// A position is an offset in a pages object and, in the bits from here on, the object's number.
const NUMBER_SHIFT: u32 = 56;

/// Returns the position of `offset_bytes` in pages object `part`.
pub(crate) fn position(part: usize, offset_bytes: u64) -> u64 {
    (part as u64) << NUMBER_SHIFT | offset_bytes
}

/// Returns the number of the pages object that a position is in, and the offset there.
pub(crate) fn split(position: u64) -> (usize, u64) {
    let offset_bytes = position & ((1 << NUMBER_SHIFT) - 1);
    ((position >> NUMBER_SHIFT) as usize, offset_bytes)
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
    fn positions_name_object_and_offset() {
        for (part, offset_bytes) in [(0, 0), (0, (1 << 56) - 1), (1, 0), (15, 4096)] {
            assert_eq!(split(position(part, offset_bytes)), (part, offset_bytes));
        }
        assert_eq!(split(u64::MAX).0, 255);
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
