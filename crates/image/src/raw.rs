//! The manifest as bytes and sections, and how it is replaced by another of the same image.

use std::ops::Range;

use store::Store;
use xxhash_rust::xxh3::xxh3_64;

use crate::header::{self, HEADER_MAX_BYTES, Header, MANIFEST_MAX_BYTES, Refusal, SECTIONS};
use crate::{Error, ImageId, MANIFEST_NAME, Result};

/// Manifests up to this size are read with one call; of larger ones the header first.
const ONE_READ_BYTES: u64 = 1 << 18;

/// The sections by number.
pub(crate) const SPACES: usize = 0;
pub(crate) const INDEX: usize = 1;
pub(crate) const CHUNKS: usize = 2;
pub(crate) const MESSAGE: usize = 3;
pub(crate) const RECORDS: usize = 4;

/// A whole manifest, whose checksums were right.
pub(crate) struct RawManifest {
    pub id: ImageId,
    pub bytes: Vec<u8>,
    pub sections: [Range<usize>; SECTIONS.len()],
}

impl RawManifest {
    /// Reads the manifest in `store`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let bytes = read_manifest(store)?;
        let header = header::decode(&bytes, bytes.len() as u64).map_err(as_error)?;
        let sections = sections(&header, &bytes)?;
        let id = header.id;
        Ok(Self {
            id,
            bytes,
            sections,
        })
    }

    /// What tells this manifest from others of the same image: the header has the checksums of all
    /// of it.
    pub fn stamp(&self) -> u64 {
        xxh3_64(&self.bytes[..self.sections[0].start])
    }

    /// A section's bytes.
    pub fn section(&self, number: usize) -> &[u8] {
        &self.bytes[self.sections[number].clone()]
    }
}

/// Returns [`RawManifest::stamp`] of the manifest in `store`, where there is a right one.
pub(crate) fn stamp(store: &dyn Store) -> Option<u64> {
    let object = store.open(MANIFEST_NAME).ok()?;
    let file_bytes = object.len_bytes();
    let mut start = vec![0; file_bytes.min(HEADER_MAX_BYTES as u64) as usize];
    object.read_at(&mut start, 0).ok()?;
    let header = header::decode(&start, file_bytes).ok()?;
    let header = start.get(..header.sections[0].offset_bytes as usize)?;
    Some(xxh3_64(header))
}

/// Puts a manifest of these sections in the place of the one in `store`.
///
/// # Errors
/// [`Error::TooLarge`], [`Error::Store`]; then the old one may be there or the new one.
pub(crate) fn replace(
    store: &dyn Store,
    id: ImageId,
    sections: [&[u8]; SECTIONS.len()],
    durable: bool,
) -> Result<()> {
    let mut bytes = header::encode(id, sections);
    sections
        .iter()
        .for_each(|section| bytes.extend_from_slice(section));
    if bytes.len() as u64 > MANIFEST_MAX_BYTES {
        return Err(Error::TooLarge {
            of: "bytes of manifest",
            limit: MANIFEST_MAX_BYTES,
        });
    }
    let object = store.create(MANIFEST_NAME);
    let object = object.map_err(Error::store("create the manifest of"))?;
    object
        .write_at(&bytes, 0)
        .map_err(Error::store("write the manifest of"))?;
    object
        .commit(durable)
        .map_err(Error::store("finish the manifest of"))
}

pub(crate) fn corrupt_manifest(offset: usize, what: String) -> Error {
    let offset_bytes = offset as u64;
    Error::Corrupt {
        file: MANIFEST_NAME.into(),
        what,
        space: None,
        offset_bytes,
    }
}

/// Reads the whole manifest; what is too large is refused before memory is taken for it, and a
/// large one only after its header was found to be right.
fn read_manifest(store: &dyn Store) -> Result<Vec<u8>> {
    let object = store.open(MANIFEST_NAME).map_err(|error| match error {
        store::Error::Missing { store, .. } => Error::NoImage { store },
        source => Error::Store {
            action: "open the manifest of",
            source,
        },
    })?;
    let read = |bytes: &mut [u8], offset| match object.read_at(bytes, offset) {
        Err(store::Error::Short { len_bytes, .. }) => Err(corrupt_manifest(
            len_bytes as usize,
            "it became shorter".into(),
        )),
        result => result.map_err(Error::store("read the manifest of")),
    };
    let file_bytes = object.len_bytes();
    if file_bytes > ONE_READ_BYTES {
        let mut start = [0; HEADER_MAX_BYTES];
        read(&mut start, 0)?;
        header::decode(&start, file_bytes).map_err(as_error)?;
        if file_bytes > MANIFEST_MAX_BYTES {
            let what = format!("it has {file_bytes} bytes");
            return Err(corrupt_manifest(MANIFEST_MAX_BYTES as usize, what));
        }
    }
    let mut bytes = vec![0; file_bytes as usize];
    read(&mut bytes, 0)?;
    Ok(bytes)
}

fn as_error(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Corrupt(offset, what) => corrupt_manifest(offset as usize, what),
        Refusal::Version(version) => Error::Version { version },
        Refusal::Section(name) => Error::Unsupported {
            feature: format!("section {name}"),
        },
    }
}

/// Checks each section's checksum and returns where they are in `bytes`.
fn sections(header: &Header, bytes: &[u8]) -> Result<[Range<usize>; SECTIONS.len()]> {
    let ranges = header.sections.map(|section| {
        let start = section.offset_bytes as usize;
        start..start + section.len_bytes as usize
    });
    for ((name, section), range) in SECTIONS.iter().zip(header.sections).zip(&ranges) {
        if xxh3_64(&bytes[range.clone()]) != section.checksum {
            let what = format!("the checksum of section {name} does not match");
            return Err(corrupt_manifest(range.start, what));
        }
    }
    Ok(ranges)
}
