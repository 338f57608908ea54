//! Where an image of a volume is, and what it is over.

use std::sync::Arc;

use image::{Compression, Granule, Link, NewSpace, PAGE_BYTES, Reader, SpaceId, SpaceKind, Writer};
use store::Images;

use crate::ext4::FileSystem;
use crate::read_at::InImage;
use crate::records::State;
use crate::{Error, Result};

/// The space of a volume.
pub const VOLUME: SpaceId = SpaceId(1);

/// What that is called in the image.
const NAME: &str = "volume";

/// An image of a volume that is open.
pub struct Opened {
    /// The image.
    pub reader: Arc<Reader>,
    /// What it says of the volume.
    pub state: State,
}

impl Opened {
    /// Opens the image in `images`, which must be one of a volume.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Image`], [`Error::Unfit`], [`Error::Corrupt`].
    pub fn open(images: &Images) -> Result<Self> {
        let store = images.open().map_err(Error::Store)?;
        let reader = Reader::open(&*store)?;
        if let Some(by) = reader.freed_by() {
            let id = reader.id();
            return Err(image::Error::Freed { id, by }.into());
        }
        let [space] = reader.spaces() else {
            return Err(other(images));
        };
        if (space.id, space.kind) != (VOLUME, SpaceKind::Volume) {
            return Err(other(images));
        }
        let state = State::of(&reader)?;
        if state.len_bytes.div_ceil(PAGE_BYTES as u64) != space.len_pages {
            let what = format!("{} bytes in {} pages", state.len_bytes, space.len_pages);
            return Err(Error::Corrupt(what));
        }
        let reader = Arc::new(reader);
        Ok(Self { reader, state })
    }

    /// The file system in the image.
    ///
    /// # Errors
    /// Those of [`FileSystem::open`].
    pub fn file_system(&self) -> Result<FileSystem<InImage>> {
        let reader = Arc::clone(&self.reader);
        FileSystem::open(InImage::new(reader, VOLUME, self.state.len_bytes))
    }
}

fn other(images: &Images) -> Error {
    Error::Unfit(format!("the image in {images} is not one of a volume"))
}

/// Starts an image in `images` of a volume of so many bytes, over `parent` where there is one.
///
/// # Errors
/// [`Error::Store`], [`Error::Image`]; [`Error::Unfit`] where the parent is of another length.
pub fn writer(
    images: &Images,
    parent: Option<(&Images, &Opened)>,
    len_bytes: u64,
    compression: Option<Compression>,
) -> Result<Writer> {
    let store = images.create().map_err(Error::Store)?;
    let mut writer = if let Some((parents, parent)) = parent {
        if len_bytes != parent.state.len_bytes {
            return Err(Error::Unfit(format!(
                "a volume of {len_bytes} bytes cannot be a difference from one of {}, which the \
                 image in {parents} has",
                parent.state.len_bytes
            )));
        }
        let place = parents.open().map_err(Error::Store)?;
        let link = Link::between(&*store, &*place).map_err(Error::Store)?;
        Writer::create_layer(store, Arc::clone(&parent.reader), link)?
    } else {
        Writer::create(store)?
    };
    writer.compress(compression);
    writer.space(NewSpace {
        id: VOLUME,
        kind: SpaceKind::Volume,
        name: NAME.to_owned(),
        len_pages: len_bytes.div_ceil(PAGE_BYTES as u64),
        granule: Granule::Small,
    });
    Ok(writer)
}
