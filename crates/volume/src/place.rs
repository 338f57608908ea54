//! Where an image of a volume is, and what it is over.

use std::sync::Arc;

use image::{Base, Compression, Granule, NewSpace, PAGE_BYTES, Reader, SpaceId, SpaceKind, Writer};
use store::Images;

use crate::ext4::FileSystem;
use crate::read_at::ImageSpace;
use crate::records::State;
use crate::{Error, Result};

/// The space of a volume that an image is of.
pub const VOLUME: SpaceId = SpaceId(1);
/// The space of a volume in an image that is of something else as well: above the numbers of tasks
/// and of a machine's blocks, and below those of objects.
pub const BESIDE: SpaceId = SpaceId(1 << 30);

/// Its name in the image.
const NAME: &str = "volume";

/// An image of a volume that is open.
pub struct OpenImage {
    /// The image, and where it is.
    pub base: Base,
    /// Space of the volume.
    pub space: SpaceId,
    /// State of the volume.
    pub state: State,
}

impl OpenImage {
    /// Opens the image in `images`, which must be one of a volume.
    pub fn open(images: &Images) -> Result<Self> {
        let base = Base::open(images)?;
        let spaces = volumes(&base.reader).collect::<Vec<_>>();
        let [space] = spaces[..] else {
            return Err(other(images));
        };
        let state = State::of(&base.reader)?;
        if state.len_bytes.div_ceil(PAGE_BYTES as u64) != space.len_pages {
            let what = format!("{} bytes in {} pages", state.len_bytes, space.len_pages);
            return Err(Error::Corrupt(what));
        }
        let space = space.id;
        Ok(Self { base, space, state })
    }

    /// The file system in the image.
    pub fn file_system(&self) -> Result<FileSystem<ImageSpace>> {
        let reader = Arc::clone(&self.base.reader);
        FileSystem::open(ImageSpace::new(reader, self.space, self.state.len_bytes))
    }
}

/// Tells whether the image in `images` has a volume.
///
/// # Errors
/// [`Error::Image`].
pub fn has_volume(images: &Images) -> Result<bool> {
    let store = images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    Ok(volumes(&reader).next().is_some())
}

fn volumes(reader: &Reader) -> impl Iterator<Item = &image::Space> {
    let spaces = reader.spaces().iter();
    // The files of a machine's disks are of that kind, too, and called by their paths.
    spaces.filter(|space| space.kind == SpaceKind::Volume && space.name == NAME)
}

fn other(images: &Images) -> Error {
    Error::Unfit(format!("the image in {images} has no volume"))
}

/// Starts an image in `images`, over `parent` where there is one.
pub fn writer(
    images: &Images,
    parent: Option<&OpenImage>,
    compression: Option<Compression>,
) -> Result<Writer> {
    let store = images.create().map_err(image::Error::Place)?;
    let base = parent.map(|parent| &parent.base);
    Ok(Writer::begin(store, base, compression)?)
}

/// Has a new image have a volume of so many bytes; gives the space, which is that of the parent's.
pub fn add_space(writer: &Writer, parent: Option<&OpenImage>, usual: SpaceId, len: u64) -> SpaceId {
    let id = parent.map_or(usual, |parent| parent.space);
    writer.space(NewSpace {
        id,
        kind: SpaceKind::Volume,
        name: NAME.to_owned(),
        len_pages: len.div_ceil(PAGE_BYTES as u64),
        granule: Granule::Small,
    });
    id
}
