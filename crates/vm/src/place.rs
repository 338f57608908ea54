//! Where an image of a machine is, and what it is over.

use image::{Base, Compression, Granule, NewSpace, SpaceId, SpaceKind, Writer};
use store::Images;

use crate::{Error, Result};

/// The space of a machine's memory.
pub(crate) const MEMORY: SpaceId = SpaceId(1);

/// Its name in the image.
const MEMORY_NAME: &str = "memory";

/// Opens the image in `images`, which must be one of a machine's memory; gives its length in pages.
pub(crate) fn open(images: &Images) -> Result<(Base, u64)> {
    let base = Base::open(images)?;
    let [space] = base.reader.spaces() else {
        return Err(other(images));
    };
    if (space.id, space.kind) != (MEMORY, SpaceKind::Block) {
        return Err(other(images));
    }
    let pages = space.len_pages;
    let described = base.reader.described(MEMORY, 0, pages);
    if pages == 0 || !described.is_just(&(0..pages)) {
        return Err(Error::Unfit(format!(
            "the image in {images} does not have all of its {pages} pages"
        )));
    }
    Ok((base, pages))
}

fn other(images: &Images) -> Error {
    Error::Unfit(format!(
        "the image in {images} is not one of a virtual machine's memory"
    ))
}

/// Starts an image in `images` of a memory of so many pages, over the one in `parent` where there
/// is one.
///
/// # Errors
/// [`Error::Image`]; [`Error::Unfit`] where the parent is of another length.
pub(crate) fn writer(
    images: &Images,
    parent: Option<&Images>,
    pages: u64,
    compression: Option<Compression>,
) -> Result<Writer> {
    let parent = match parent {
        None => None,
        Some(parents) => {
            let (parent, parents_pages) = open(parents)?;
            if pages != parents_pages {
                return Err(Error::Unfit(format!(
                    "a memory of {pages} pages cannot be a difference from one of \
                     {parents_pages}, which the image in {parents} has"
                )));
            }
            Some(parent)
        }
    };
    let writer = begin(images, parent.as_ref(), compression)?;
    writer.space(NewSpace {
        id: MEMORY,
        kind: SpaceKind::Block,
        name: MEMORY_NAME.to_owned(),
        len_pages: pages,
        granule: Granule::Small,
    });
    Ok(writer)
}

/// Starts an image in `images`, over an opened one where there is one.
pub(crate) fn begin(
    images: &Images,
    parent: Option<&Base>,
    compression: Option<Compression>,
) -> Result<Writer> {
    let store = images.create().map_err(image::Error::Place)?;
    Ok(Writer::begin(store, parent, compression)?)
}
