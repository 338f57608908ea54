//! Manifests that are changed and whose checksums are right again: for tests of what reads images.

use store::Store;

use crate::header;
use crate::raw::RawManifest;
use crate::{ImageId, Result};

/// The sections of a manifest: spaces, runs, chunks, message and records.
#[derive(Clone, Debug)]
pub struct Sections {
    /// Identity of the image.
    pub id: ImageId,
    /// Their bytes, in order.
    pub bytes: [Vec<u8>; 5],
}

impl Sections {
    /// Reads those of the image in `store`.
    ///
    /// # Errors
    /// Those of an image that is not right.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let raw = RawManifest::read(store)?;
        Ok(Self {
            id: raw.id,
            bytes: [0, 1, 2, 3, 4].map(|number| raw.section(number).to_vec()),
        })
    }

    /// The manifest that they make, with right checksums.
    #[must_use]
    pub fn manifest(&self) -> Vec<u8> {
        let sections = self.bytes.each_ref().map(|section| &section[..]);
        [&header::encode(self.id, sections), &sections.concat()[..]].concat()
    }
}
