//! An image that is about to be sealed, as readers are going to see it.

use store::Store;

use crate::ancestors::{Ancestor, Ancestors};
use crate::header::{self, MANIFEST_MAX_BYTES};
use crate::index::{Bounds, Index};
use crate::manifest::{self, MESSAGE_MAX_BYTES, Manifest, RECORDS_MAX};
use crate::origins;
use crate::raw::corrupt_manifest;
use crate::run::{self, ENTRY_BYTES};
use crate::unused::Used;
use crate::writer::check_len;
use crate::{Error, ImageId, Reader, Record, Result, Run};

use prost::Message;

/// Everything of an image but the contents of its pages.
pub(crate) struct Draft {
    id: ImageId,
    manifest: Manifest,
    reader: Reader,
    /// What is used of the pages objects, up to the last that has pages.
    pub used: Vec<Used>,
}

/// What a draft is made of.
pub(crate) struct Parts {
    /// Without the number of records.
    pub manifest: Manifest,
    pub records: Vec<Record>,
    /// In order.
    pub runs: Vec<Run>,
    pub origins: Vec<Run>,
    pub used: Vec<Used>,
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
            runs,
            origins,
            used,
        } = parts;
        let mut index = Vec::with_capacity(runs.len() * ENTRY_BYTES);
        for run in &runs {
            index.extend_from_slice(&run::encode(run));
        }
        let parts_bytes = manifest.parts_bytes();
        let bounds = Bounds {
            parts_bytes: &parts_bytes,
            unused_bytes: manifest.unused_bytes,
            origins: &origins,
        };
        let whole = 0..index.len();
        let index = Index::new(index, whole, bounds).map_err(|fault| Error::BadRun {
            space: fault.space,
            page: fault.first_page,
            what: fault.what,
        })?;
        let wrong = |what| corrupt_manifest(0, what);
        let ancestors = Ancestor::check_all(manifest.ancestors.clone(), id).map_err(wrong)?;
        let reader = Reader {
            id,
            stamp: 0,
            freed_by: None,
            parent: manifest.check_parent().map_err(wrong)?,
            features: manifest.features.clone(),
            facts: manifest.facts.clone().unwrap_or_default(),
            records,
            index,
            origins,
            pages: Vec::new(),
            ancestors: Ancestors::new(store, ancestors),
        };
        Ok(Self {
            id,
            manifest,
            reader,
            used,
        })
    }

    /// The image as it is going to be read, but for its own pages, which cannot be read yet.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Encodes the whole manifest, with `more` records: header, index, manifest, records, origins.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn encode(mut self, more: Vec<Record>) -> Result<(Vec<u8>, Vec<Used>)> {
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
        let origins = origins::encode(&self.reader.origins);
        let sections = [self.reader.index.bytes(), &manifest, &records, &origins];
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
