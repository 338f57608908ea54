//! Where an image of a machine is, and what it is over.

use std::path::Path;
use std::sync::Arc;

use image::{Compression, Granule, Link, NewSpace, Reader, SpaceId, SpaceKind, Writer};
use store::{Directory, Store};

use crate::{Error, Result};

/// The space of a machine's memory.
pub(crate) const MEMORY: SpaceId = SpaceId(1);

/// What that is called in the image.
const MEMORY_NAME: &str = "memory";

/// Opens the image in `dir`, which must be one of a machine's memory; gives its length in pages.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`], [`Error::Unfit`].
pub(crate) fn open(dir: &Path) -> Result<(Reader, u64)> {
    let store = Directory::open(dir).map_err(Error::Store)?;
    let reader = Reader::open(&store)?;
    if let Some(by) = reader.freed_by() {
        let id = reader.id();
        return Err(image::Error::Freed { id, by }.into());
    }
    let [space] = reader.spaces() else {
        return Err(other(dir));
    };
    if (space.id, space.kind) != (MEMORY, SpaceKind::Block) {
        return Err(other(dir));
    }
    let pages = space.len_pages;
    let described = reader.described(MEMORY, 0, pages);
    if pages == 0 || !described.is_just(&(0..pages)) {
        return Err(Error::Unfit(format!(
            "the image in {} does not have all of its {pages} pages",
            dir.display()
        )));
    }
    Ok((reader, pages))
}

fn other(dir: &Path) -> Error {
    let dir = dir.display();
    Error::Unfit(format!(
        "the image in {dir} is not one of a virtual machine's memory"
    ))
}

/// Starts an image in `dir` of a memory of so many pages, over the one in `parent` where there is
/// one.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`]; [`Error::Unfit`] where the parent is of another length.
pub(crate) fn writer(
    dir: &Path,
    parent: Option<&Path>,
    pages: u64,
    compression: Option<Compression>,
) -> Result<Writer> {
    let store: Arc<dyn Store> = Arc::new(Directory::create(dir).map_err(Error::Store)?);
    let mut writer = if let Some(parent_dir) = parent {
        let (parent, parents_pages) = open(parent_dir)?;
        if pages != parents_pages {
            return Err(Error::Unfit(format!(
                "a memory of {pages} pages cannot be a difference from one of {parents_pages}, \
                 which the image in {} has",
                parent_dir.display()
            )));
        }
        let way = |from, to| store::way(from, to).map_err(Error::Store);
        let link = Link {
            to_parent: way(dir, parent_dir)?,
            to_child: way(parent_dir, dir)?,
        };
        Writer::create_over(store, Arc::new(parent), link)?
    } else {
        Writer::create(store)?
    };
    writer.compress(compression);
    writer.space(NewSpace {
        id: MEMORY,
        kind: SpaceKind::Block,
        name: MEMORY_NAME.to_owned(),
        len_pages: pages,
        granule: Granule::Small,
    });
    Ok(writer)
}
