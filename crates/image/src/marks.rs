//! Marks: what an image leaves in its parent's place, so that the parent is not replaced while it
//! is needed.
//!
//! A mark is an object whose name tells the child's identity and whose contents tell the way to it.
//! It appears before the child does and is stale when that image is not, or no longer, there.

use store::{Claim, Store};

use crate::ancestors::current;
use crate::parent::ParentImage;
use crate::{Error, ImageId, Result};

/// The longest way to a child.
const WAY_MAX_BYTES: u64 = 4096;

fn name(child: ImageId) -> String {
    format!("child-{child}.img")
}

/// Returns the identity in a name that [`name`] made.
fn owner(name: &str) -> Option<ImageId> {
    let hex = name.strip_prefix("child-")?.strip_suffix(".img")?;
    let mut id = [0; 16];
    if hex.len() != 2 * id.len() {
        return None;
    }
    for (byte, digits) in id.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(ImageId(id)).filter(|id| self::name(*id) == name)
}

/// Tells the parent of image `child` that it is needed.
pub(crate) fn add(parent: &ParentImage, child: ImageId, durable: bool) -> Result<()> {
    let failed = Error::store("leave a mark in the parent of");
    let object = parent.store.create(&name(child)).map_err(&failed)?;
    object
        .write_at(parent.link.to_child.as_bytes(), 0)
        .map_err(&failed)?;
    object.commit(durable).map_err(&failed)
}

/// Takes back the mark of a child that did not come to be. What fails, the parent's next writer
/// does.
pub(crate) fn remove(parent: &ParentImage, child: ImageId) {
    let _ = parent.store.remove(&name(child));
}

/// Refuses to replace image `id` in `store` where another has pages from it. Stale marks are
/// removed if nobody else may write there.
pub(crate) fn refuse_if_needed(
    store: &dyn Store,
    claim: &Claim,
    id: Option<ImageId>,
) -> Result<()> {
    for mark in &claim.names {
        let Some(child) = owner(mark) else {
            continue;
        };
        match (id, way_if_there(store, mark, child)) {
            (Some(id), Some(path)) => return Err(Error::Needed { id, child, path }),
            _ if claim.exclusive => {
                // Somebody else may have done so.
                let _ = store.remove(mark);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the images that have a valid mark in `store`, and the ways to them.
///
/// # Errors
/// [`Error::Store`].
pub fn children(store: &dyn Store) -> Result<Vec<(ImageId, String)>> {
    let names = store.list().map_err(Error::store("list the objects of"))?;
    let valid = |mark: &String| {
        let child = owner(mark)?;
        Some((child, way_if_there(store, mark, child)?))
    };
    Ok(names.iter().filter_map(valid).collect())
}

/// Returns the way to `child` that its mark tells, unless the child is certainly not there.
fn way_if_there(store: &dyn Store, mark: &str, child: ImageId) -> Option<String> {
    let object = store.open(mark).ok()?;
    let len = object.len_bytes().min(WAY_MAX_BYTES);
    let mut way = vec![0; len as usize];
    object.read_at(&mut way, 0).ok()?;
    let way = String::from_utf8(way).ok()?;
    match store.beside(&way) {
        Ok(place) => (current(&*place) == Some(child)).then_some(way),
        Err(store::Error::System { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound
                || source.kind() == std::io::ErrorKind::NotADirectory =>
        {
            None
        }
        // It may be there.
        Err(_) => Some(way),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_name_their_image() {
        let id = ImageId(*b"0123456789abcdef");
        assert_eq!(owner(&name(id)), Some(id));
        let upper = name(ImageId([0xab; 16])).replace("ab", "AB");
        for strange in ["child-.img", "child-12.img", "pages-12.img", &upper] {
            assert_eq!(owner(strange), None, "{strange}");
        }
    }
}
