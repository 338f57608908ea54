//! The image that a new one is a layer over.

use std::sync::Arc;

use image::{Compression, Granule, Link, NewSpace, Reader, SpaceId, SpaceKind, Writer};
use resources::map::vdso::{self, Vdso};
use store::{Images, Store};

use crate::{Error, ImageKind, Result};

/// The image that a new one is a layer over, and where it is.
#[derive(Clone)]
pub(crate) struct Parent {
    pub store: Arc<dyn Store>,
    pub image: Arc<Reader>,
}

impl Parent {
    /// Opens the image that is there, of which pages are to be used.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Image`], also where pages of it were freed; [`Error::Unfit`]
    /// where it is not of a tree.
    pub fn open(images: &Images) -> Result<Self> {
        let store = images.open().map_err(Error::Store)?;
        let reader = Reader::open(&*store)?;
        ImageKind::check_parent(&reader)?;
        match reader.freed_by() {
            Some(by) => Err(image::Error::Freed {
                id: reader.id(),
                by,
            }
            .into()),
            None => Ok(Self {
                store,
                image: Arc::new(reader),
            }),
        }
    }

    /// The ways between this image and one in `store`.
    ///
    /// # Errors
    /// [`Error::Store`] where there are none.
    pub fn link(&self, store: &dyn Store) -> Result<Link> {
        Link::between(store, &*self.store).map_err(Error::Store)
    }
}

/// Starts an image in `store`, over `parent` where there is one, whose chunks are compressed.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`].
pub(crate) fn writer(
    store: Arc<dyn Store>,
    parent: Option<&Parent>,
    compression: Option<Compression>,
) -> Result<Writer> {
    let mut writer = if let Some(parent) = parent {
        let link = parent.link(&*store)?;
        Writer::create_layer(store, parent.image.clone(), link)?
    } else {
        Writer::create(store)?
    };
    writer.compress(compression);
    Ok(writer)
}

/// The vDSOs whose code is pages of an image.
///
/// # Errors
/// [`resources::Error::Corrupt`].
pub(crate) fn vdsos(image: &Reader) -> Result<Vec<Vdso>> {
    let records = image.records().iter();
    let records = records.filter(|record| record.tag == vdso::TAG);
    let mut all = Vec::new();
    for record in records {
        let vdso = vdso::read(&record.payload)?;
        let pages = u64::from(vdso.len_bytes).div_ceil(abi::PAGE_BYTES);
        let described = |space: u32| {
            let runs = image.runs(SpaceId(space));
            runs.map(|run| u64::from(run.pages)).sum::<u64>() == pages
        };
        if vdso.space.is_some_and(described) {
            all.push(vdso);
        }
    }
    Ok(all)
}

/// Has an image of memory alone hand down what its parent has of vDSOs.
///
/// # Errors
/// [`resources::Error::Corrupt`], [`Error::Image`].
pub(crate) fn inherit_vdsos(writer: &Writer, parent: &Reader) -> Result<()> {
    for (id, vdso) in (0..).zip(vdsos(parent)?) {
        let space = SpaceId(vdso.space.expect("those that have one"));
        let pages = u64::from(vdso.len_bytes).div_ceil(abi::PAGE_BYTES);
        writer.inherit(space, 0, pages)?;
        writer.space(named(space, SpaceKind::Vdso, pages));
        writer.record(image::Record {
            tag: vdso::TAG,
            version: 1,
            id,
            payload: prost::Message::encode_to_vec(&vdso),
        });
    }
    Ok(())
}

/// A space of so many pages that is no task's memory.
pub(crate) fn named(id: SpaceId, kind: SpaceKind, len_pages: u64) -> NewSpace {
    NewSpace {
        id,
        kind,
        name: String::new(),
        len_pages,
        granule: Granule::Small,
    }
}
