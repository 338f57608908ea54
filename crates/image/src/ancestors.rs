//! The images that a layer has pages from: opened when the first of their pages is read.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use store::{Object, Store};

use crate::header::{self, PRELUDE_BYTES};
use crate::manifest::AncestorRecord;
use crate::parts::{ANCESTORS_MAX, PARTS_MAX};
use crate::{Error, ImageId, MANIFEST_NAME, Result};

/// The longest path of an ancestor.
const PATH_MAX_BYTES: usize = 4096;

/// An image that another has pages from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Its identity.
    pub id: ImageId,
    /// Its path, relative to the image that names it.
    pub path: String,
    /// The lengths of its pages objects, by number.
    pub(crate) parts_bytes: Vec<u64>,
}

impl Ancestor {
    /// Checks what a manifest says of an ancestor of image `own`.
    fn check(listed: AncestorRecord, own: ImageId) -> std::result::Result<Self, String> {
        let id = listed.id.as_slice().try_into().map(ImageId);
        let id = id.map_err(|_| "an ancestor has no id".to_owned())?;
        let path = &listed.path;
        let wrong = match () {
            () if id == own => "is the image itself",
            () if path.is_empty() || path.len() > PATH_MAX_BYTES => "has no path",
            () if path.starts_with('/') || path.contains('\0') => "has a wrong path",
            () if listed.parts_bytes.len() > PARTS_MAX => "has too many pages objects",
            () => {
                return Ok(Self {
                    id,
                    path: listed.path,
                    parts_bytes: listed.parts_bytes,
                });
            }
        };
        Err(format!("ancestor {id} {wrong}"))
    }

    /// Checks the ancestors of image `own`.
    pub(crate) fn check_all(
        listed: Vec<AncestorRecord>,
        own: ImageId,
    ) -> std::result::Result<Vec<Self>, String> {
        if listed.len() > ANCESTORS_MAX {
            return Err(format!("{} ancestors", listed.len()));
        }
        let mut all = Vec::with_capacity(listed.len());
        let mut seen = std::collections::HashSet::new();
        for listed in listed {
            let ancestor = Self::check(listed, own)?;
            if !seen.insert(ancestor.id) {
                return Err(format!("ancestor {} is there twice", ancestor.id));
            }
            all.push(ancestor);
        }
        Ok(all)
    }
}

/// The ancestors of an image.
pub(crate) struct Ancestors {
    /// Directory that their paths are relative to.
    home: Option<Arc<dyn Store>>,
    all: Vec<Ancestor>,
    opened: Vec<AncestorStore>,
}

#[derive(Default)]
struct AncestorStore {
    opening: Mutex<()>,
    store: OnceLock<Arc<dyn Store>>,
    parts: [OnceLock<Box<dyn Object>>; PARTS_MAX],
}

impl Ancestors {
    pub fn new(store: &dyn Store, all: Vec<Ancestor>) -> Self {
        Self {
            home: (!all.is_empty()).then(|| store.handle()),
            opened: all.iter().map(|_| AncestorStore::default()).collect(),
            all,
        }
    }

    pub fn all(&self) -> &[Ancestor] {
        &self.all
    }

    /// Returns pages object `part` of ancestor number `ancestor`, opened at the first call.
    ///
    /// # Errors
    /// [`Error::Ancestor`] where it is not what the image says, [`Error::Store`].
    pub fn object(&self, ancestor: usize, part: usize) -> Result<&dyn Object> {
        let opened = &self.opened[ancestor];
        if let Some(object) = opened.parts[part].get() {
            return Ok(&**object);
        }
        let _opening = opened
            .opening
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(object) = opened.parts[part].get() {
            return Ok(&**object);
        }
        let known = &self.all[ancestor];
        let gone = |what: String, source: Option<store::Error>| Error::Ancestor {
            id: known.id,
            path: known.path.clone(),
            what,
            source: source.map(Box::new),
        };
        let store = self
            .place(ancestor)
            .map_err(|source| gone("cannot be opened".into(), Some(source)))?;
        let name = known.id.pages_part_name(part);
        let object = store.open(&name).map_err(|error| match error {
            store::Error::Missing { .. } => gone(missing(&**store, known.id, &name), None),
            source => gone(format!("has {name} that cannot be opened"), Some(source)),
        })?;
        let (len, expected) = (object.len_bytes(), known.parts_bytes.get(part));
        if Some(&len) != expected {
            let expected = expected.copied().unwrap_or(0);
            return Err(gone(
                format!("is damaged: {name} has {len} bytes, {expected} are needed"),
                None,
            ));
        }
        Ok(&**opened.parts[part].get_or_init(|| object))
    }

    /// Tells whether ancestors are in files, as far as that can be known without opening one.
    pub fn are_files(&self) -> bool {
        let home = self.home.as_ref();
        home.is_none_or(|home| home.directory().is_some())
    }

    pub fn place(&self, ancestor: usize) -> store::Result<&Arc<dyn Store>> {
        let place = &self.opened[ancestor].store;
        if let Some(store) = place.get() {
            return Ok(store);
        }
        let home = self.home.as_ref().expect("there are ancestors");
        let store = home.beside(&self.all[ancestor].path)?;
        Ok(place.get_or_init(|| store))
    }

    /// Names pages object `part` of ancestor number `ancestor`.
    pub fn name(&self, ancestor: usize, part: usize) -> String {
        let known = &self.all[ancestor];
        format!("{}/{}", known.path, known.id.pages_part_name(part))
    }
}

/// Says what is in the place of an image whose pages object is not there.
fn missing(store: &dyn Store, id: ImageId, name: &str) -> String {
    match current(store) {
        Some(other) if other != id => format!("is not there: image {other} is"),
        Some(_) => format!("is damaged: {name} is missing"),
        None => "is not there: there is no image".into(),
    }
}

/// Returns the identity of the image in the store, where there is one that says.
#[must_use]
pub fn current(store: &dyn Store) -> Option<ImageId> {
    let manifest = store.open(MANIFEST_NAME).ok()?;
    let mut prelude = [0; PRELUDE_BYTES];
    manifest.read_at(&mut prelude, 0).ok()?;
    header::decode_id(&prelude).ok()
}

/// Returns where `path`, which is relative to `base`, is from where `base` is relative to. Both are
/// ways without symbolic links.
///
/// ```
/// assert_eq!(image::join("../2", "../1"), "../1");
/// ```
#[must_use]
pub fn join(base: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if parts.is_empty() {
        return ".".into();
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_joined() {
        for (base, path, joined) in [
            ("../2", "../1", "../1"),
            ("../2", "../../b/1", "../../b/1"),
            ("../2", "1", "../2/1"),
            ("..", "..", "../.."),
            ("1", "..", "."),
            ("./1/", "../2", "2"),
        ] {
            assert_eq!(join(base, path), joined);
        }
    }

    #[test]
    fn claims_are_checked() {
        let own = ImageId([1; 16]);
        let listed = |id: u8, path: &str| AncestorRecord {
            id: vec![id; 16],
            path: path.into(),
            parts_bytes: vec![4096],
        };
        let refused = |listed: Vec<AncestorRecord>, what: &str| {
            let error = Ancestor::check_all(listed, own).unwrap_err();
            assert!(error.contains(what), "{error}");
        };
        assert!(Ancestor::check_all(vec![listed(2, "../2"), listed(3, "../2")], own).is_ok());
        refused(vec![listed(1, "../1")], "the image itself");
        refused(vec![listed(2, "../2"), listed(2, "../3")], "twice");
        refused(vec![listed(2, "/2")], "wrong path");
        refused(vec![listed(2, "")], "no path");
        refused(vec![listed(2, &"x".repeat(4097))], "no path");
        refused(
            vec![AncestorRecord {
                id: vec![1],
                ..listed(2, "x")
            }],
            "no id",
        );
        refused(
            vec![AncestorRecord {
                parts_bytes: vec![0; 17],
                ..listed(2, "x")
            }],
            "pages objects",
        );
        let many = (0..4096_u32).map(|number| AncestorRecord {
            id: [number.to_le_bytes(); 4].concat(),
            ..listed(2, "x")
        });
        refused(many.collect(), "4096 ancestors");
    }
}
