//! The image that a new one is a layer over.

use image::{Base, Granule, NewSpace, Reader, SpaceId, SpaceKind, Writer};
use resources::map::vdso::{self, Vdso};
use store::Images;

use crate::{ImageKind, Result};

/// Opens the image of a tree that a new one is to be a layer over.
///
/// # Errors
/// [`Error::Image`](crate::Error::Image), also where pages of it were freed;
/// [`Error::Unfit`](crate::Error::Unfit) where it is not of a tree.
pub(crate) fn open(images: &Images) -> Result<Base> {
    let base = Base::open(images)?;
    ImageKind::check_parent(&base.reader)?;
    Ok(base)
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
