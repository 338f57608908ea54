//! An image that is about to be sealed, as readers are going to see it.

use store::Store;

use crate::ancestors::{Ancestor, Ancestors};
use crate::chunk::{self, Chunk};
use crate::header::{self, MANIFEST_MAX_BYTES};
use crate::index::{Bounds, Index};
use crate::manifest::{self, MESSAGE_MAX_BYTES, Manifest, RECORDS_MAX};
use crate::places::Places;
use crate::raw::corrupt_manifest;
use crate::run::{self, ENTRY_BYTES};
use crate::unused::ObjectUsage;
use crate::{Error, ImageId, NewSpace, Reader, Record, Result, Run, spaces};

use prost::Message;

/// Everything of an image but the contents of its pages.
pub(crate) struct Draft {
    id: ImageId,
    manifest: Manifest,
    spaces: Vec<NewSpace>,
    reader: Reader,
    /// Usage of the pages objects, up to the last that has pages.
    pub used: Vec<ObjectUsage>,
}

/// Parts of a draft.
pub(crate) struct Parts {
    /// Without the number of records.
    pub manifest: Manifest,
    pub records: Vec<Record>,
    /// In order, as are the others.
    pub spaces: Vec<NewSpace>,
    pub runs: Vec<Run>,
    pub chunks: Vec<Chunk>,
    pub used: Vec<ObjectUsage>,
}

impl Draft {
    /// Checks what an image in `store` is to be.
    ///
    /// # Errors
    /// [`Error::BadRun`] where runs overlap or refer to pages that are not there.
    pub fn new(store: &dyn Store, id: ImageId, parts: Parts) -> Result<Self> {
        let Parts {
            manifest,
            records,
            spaces,
            runs,
            chunks,
            used,
        } = parts;
        let mut index = Vec::with_capacity(runs.len() * ENTRY_BYTES);
        for run in &runs {
            index.extend_from_slice(&run::encode(run));
        }
        let bounds = Bounds {
            chunks: &chunks,
            spaces: &spaces,
        };
        let whole = 0..index.len();
        let index = Index::new(index, whole, bounds).map_err(|fault| Error::BadRun {
            space: fault.space,
            page: fault.first_page,
            what: fault.what,
        })?;
        let wrong = |what| corrupt_manifest(0, what);
        let ancestors = Ancestor::check_all(manifest.ancestors.clone(), id).map_err(wrong)?;
        let has_ancestors = !ancestors.is_empty();
        let ancestors = Ancestors::new(store, ancestors);
        let reader = Reader {
            id,
            stamp: 0,
            parent: manifest.check_parent(has_ancestors).map_err(wrong)?,
            features: manifest.features.clone(),
            facts: manifest.facts.clone().unwrap_or_default(),
            records,
            index,
            places: Places::new(None, chunks, Vec::new(), ancestors),
        };
        Ok(Self {
            id,
            manifest,
            spaces,
            reader,
            used,
        })
    }

    /// The image as it is going to be read, but for its own pages, which cannot be read yet.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Encodes the whole manifest, with `more` records: header and sections.
    pub fn encode(mut self, more: Vec<Record>) -> Result<(Vec<u8>, Vec<ObjectUsage>)> {
        let mut records = std::mem::take(&mut self.reader.records);
        records.extend(more);
        check_len("records", records.len() as u64, RECORDS_MAX as u64)?;
        self.manifest.records = records.len() as u64;
        let manifest = self.manifest.encode_to_vec();
        check_len(
            "bytes of facts",
            manifest.len() as u64,
            MESSAGE_MAX_BYTES as u64,
        )?;
        let records = manifest::encode_records(records);
        let spaces = spaces::encode(self.spaces.iter());
        let chunks = chunk::encode(self.reader.chunks());
        let index = self.reader.index.bytes();
        let sections = [&spaces, index, &chunks, &manifest, &records];
        let mut bytes = header::encode(self.id, sections);
        let len = bytes.len() + sections.iter().map(|section| section.len()).sum::<usize>();
        check_len("bytes of manifest", len as u64, MANIFEST_MAX_BYTES)?;
        bytes.reserve_exact(len - bytes.len());
        sections
            .iter()
            .for_each(|section| bytes.extend_from_slice(section));
        Ok((bytes, self.used))
    }
}

pub(crate) fn check_len(of: &'static str, len: u64, limit: u64) -> Result<()> {
    if len > limit {
        return Err(Error::TooLarge { of, limit });
    }
    Ok(())
}
