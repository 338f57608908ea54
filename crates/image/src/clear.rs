//! Removing images, and what is left of those that did not come to be.

use store::{Claim, Store};

use crate::ancestors::current;
use crate::{Error, ImageId, MANIFEST_NAME, Result, parts};

/// Removes the image called `id`; one that took its place stays.
///
/// # Errors
/// [`Error::Store`]; the image may be there then, but never in part: pages that no image names are
/// removed by the next writer.
pub fn remove(store: &dyn Store, id: ImageId) -> Result<()> {
    let claim = store.claim().map_err(Error::store("claim the place of"))?;
    if current(store) != Some(id) {
        return Ok(());
    }
    let removed = store.remove(MANIFEST_NAME);
    removed.map_err(Error::store("remove"))?;
    for name in claim.names.iter().filter(|name| id.owns(name)) {
        store
            .remove(name)
            .map_err(Error::store("remove pages of"))?;
    }
    Ok(())
}

/// Removes pages that belong to no image; returns the names of those that stay and that a new image
/// makes useless.
pub(crate) fn leftovers(store: &dyn Store, claim: &Claim) -> Vec<String> {
    let has_image = claim.names.iter().any(|name| name == MANIFEST_NAME);
    let current = has_image.then(|| current(store)).flatten();
    let named = |name: &String| current.is_some_and(|id| id.owns(name));
    let mut old: Vec<String> = claim
        .names
        .iter()
        .filter(|name| parts::pages_owner(name).is_some())
        .cloned()
        .collect();
    // Without a lock, pages that nothing names may be those of another writer; beside a manifest
    // that cannot be read, its own.
    if claim.exclusive && (current.is_some() || !has_image) {
        for name in old.extract_if(.., |name| !named(name)) {
            // The next writer tries again.
            let _ = store.remove(&name);
        }
    } else if !claim.exclusive {
        old.retain(named);
    }
    old
}
