//! The image that a new one is a layer over.

use std::path::Path;
use std::sync::Arc;

use image::{Link, Reader, Writer};
use store::Store;

use crate::{Error, Result};

/// Opens the image in `dir`, of which pages are to be used.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`], also where pages of it were freed.
pub(crate) fn open(dir: &Path) -> Result<Arc<Reader>> {
    let store = store::Directory::open(dir).map_err(Error::Store)?;
    let reader = Reader::open(&store)?;
    match reader.freed_by() {
        Some(by) => Err(image::Error::Freed {
            id: reader.id(),
            by,
        }
        .into()),
        None => Ok(Arc::new(reader)),
    }
}

/// Starts an image in `store`, which is `dir`, over the one in `parent` where there is one.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`].
pub(crate) fn writer(
    store: Arc<dyn Store>,
    dir: &Path,
    parent: Option<(&Path, &Arc<Reader>)>,
) -> Result<Writer> {
    let Some((parent_dir, parent)) = parent else {
        return Ok(Writer::create(store)?);
    };
    let way = |from, to| store::way(from, to).map_err(Error::Store);
    let link = Link {
        to_parent: way(dir, parent_dir)?,
        to_child: way(parent_dir, dir)?,
    };
    Ok(Writer::create_over(store, parent.clone(), link)?)
}
