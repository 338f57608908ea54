//! Reads an image: everything but pages is checked when it is opened, pages when they are read.

use std::ops::Range;

use prost::Message;
use store::{Object, Store};

use crate::ancestors::{Ancestor, Ancestors};
use crate::checksum;
pub use crate::index::Space;
use crate::index::{Bounds, Fault, Index, Walk};
use crate::manifest::{self, MESSAGE_MAX_BYTES, Manifest};
use crate::origins;
use crate::parts::{self, PARTS_MAX};
use crate::raw::{Raw, corrupt_manifest};
use crate::run::{ENTRY_BYTES, Located, PAGE_BYTES};
use crate::{Error, Facts, ImageId, MANIFEST_NAME, Record, Result, Run, RunKind, SpaceId};

/// An opened image.
///
/// Of a layer, the pages of older images are read where those are, which are opened when they are
/// needed.
pub struct Reader {
    pub(crate) id: ImageId,
    /// Tells this manifest from others of the same image.
    pub(crate) stamp: u64,
    /// The image for which some of this one's pages were freed.
    pub(crate) freed_by: Option<ImageId>,
    pub(crate) parent: Option<(ImageId, String)>,
    pub(crate) features: Vec<String>,
    pub(crate) facts: Facts,
    pub(crate) records: Vec<Record>,
    pub(crate) index: Index,
    /// The stored runs that `parent` and `equal` runs are parts of.
    pub(crate) origins: Vec<Run>,
    /// The image's own pages objects by number.
    pub(crate) pages: Vec<Option<Box<dyn Object>>>,
    pub(crate) ancestors: Ancestors,
}

impl Reader {
    /// Opens the image in `store` and checks all of it but the contents of its pages: so every run
    /// that the reader returns lies inside its space and inside the pages object, overlaps no
    /// other, and refers to pages that exist.
    ///
    /// # Errors
    /// [`Error::NoImage`], [`Error::Corrupt`], [`Error::Unsupported`], [`Error::Store`].
    pub fn open(store: &dyn Store) -> Result<Self> {
        let raw = Raw::read(store)?;
        let (id, stamp, bytes) = (raw.id, raw.stamp(), raw.bytes);
        let [index, manifest, records, origins] = raw.sections;
        if manifest.len() > MESSAGE_MAX_BYTES {
            return Err(corrupt_manifest(
                manifest.start,
                format!("{} bytes", manifest.len()),
            ));
        }
        let decoded = Manifest::decode(&bytes[manifest.clone()])
            .map_err(|error| corrupt_manifest(manifest.start, error.to_string()))?;
        decoded.check_features()?;
        let start = records.start;
        let records = manifest::decode_records(&bytes[records], decoded.records)
            .map_err(|(at, what)| corrupt_manifest(start + at, what))?;
        if !index.len().is_multiple_of(ENTRY_BYTES) {
            return Err(corrupt_manifest(
                index.end,
                "the last index entry is cut".into(),
            ));
        }
        let parts_bytes = decoded.parts_bytes();
        if parts_bytes.len() > PARTS_MAX {
            let what = format!("{} pages objects", parts_bytes.len());
            return Err(corrupt_manifest(manifest.start, what));
        }
        let wrong = |what| corrupt_manifest(manifest.start, what);
        let parent = decoded.check_parent().map_err(wrong)?;
        let freed_by = decoded.check_freed().map_err(wrong)?;
        let ancestors = Ancestor::check_all(decoded.ancestors, id).map_err(wrong)?;
        let start = origins.start;
        let object_bytes = |object| object_bytes(&parts_bytes, &ancestors, object);
        let origins = origins::decode(&bytes[origins], &object_bytes)
            .map_err(|(at, what)| corrupt_manifest(start + at, what))?;
        let bounds = Bounds {
            parts_bytes: &parts_bytes,
            unused_bytes: decoded.unused_bytes,
            origins: &origins,
        };
        let start = index.start;
        let index = Index::new(bytes, index, bounds).map_err(|fault| bad_index(start, fault))?;
        let open = |(part, &bytes)| open_pages(store, id, part, bytes, &index);
        let pages = parts_bytes
            .iter()
            .enumerate()
            .map(open)
            .collect::<Result<_>>()?;
        Ok(Self {
            id,
            stamp,
            freed_by,
            parent,
            features: decoded.features,
            facts: decoded.facts.unwrap_or_default(),
            records,
            index,
            origins,
            pages,
            ancestors: Ancestors::new(store, ancestors),
        })
    }

    /// Returns the image's identity.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// Returns the image that this one is a difference from, and where it is, relative to this one.
    pub fn parent(&self) -> Option<(ImageId, &str)> {
        let parent = self.parent.as_ref();
        parent.map(|(id, path)| (*id, path.as_str()))
    }

    /// Returns the images that hold pages of this one. Each must be where it is said to be, or
    /// those pages cannot be read.
    pub fn ancestors(&self) -> &[Ancestor] {
        self.ancestors.all()
    }

    /// Returns how many files of other images may have to be open to read all of this one.
    pub fn far_files(&self) -> u64 {
        let files = |one: &Ancestor| one.parts_bytes.iter().filter(|bytes| **bytes > 0).count();
        self.ancestors().iter().map(files).sum::<usize>() as u64
    }

    /// Returns the image for which pages of this one were freed, or of those that it is over:
    /// nothing can be read of it any more.
    pub fn freed_by(&self) -> Option<ImageId> {
        self.freed_by
    }

    /// Refuses an image of which pages were freed.
    pub(crate) fn check_freed(&self) -> Result<()> {
        let freed = self.freed_by.map(|by| Error::Freed { id: self.id, by });
        freed.map_or(Ok(()), Err)
    }

    /// Opens the files of all ancestors, which otherwise happens when they are needed.
    ///
    /// # Errors
    /// [`Error::Ancestor`] for the first that is not what it was, [`Error::Freed`].
    pub fn open_ancestors(&self) -> Result<()> {
        self.check_freed()?;
        for (number, ancestor) in self.ancestors().iter().enumerate() {
            let parts = ancestor.parts_bytes.iter().enumerate();
            for (part, _) in parts.filter(|(_, bytes)| **bytes > 0) {
                self.ancestors.object(number, part)?;
            }
        }
        Ok(())
    }

    /// Returns the ancestor that holds the pages of a `parent` run, and the stored run of which
    /// they are a part; none for other runs.
    pub fn origin(&self, run: &Run) -> Option<(&Ancestor, Run)> {
        let RunKind::Parent(part) = run.kind else {
            return None;
        };
        let origin = self.origins[part.origin as usize];
        let (ancestor, _) = parts::owner(parts::split(data_offset(&origin)).0);
        Some((&self.ancestors()[ancestor?], origin))
    }

    /// Returns which of `pages` pages from `first_page` of `space` on the image describes, as
    /// ranges in ascending order that do not touch.
    pub fn described(&self, space: SpaceId, first_page: u64, pages: u64) -> Vec<Range<u64>> {
        let mut described: Vec<Range<u64>> = Vec::new();
        let (mut page, end) = (first_page, first_page.saturating_add(pages));
        while page < end {
            let Some(run) = self.index.find_from(space, page) else {
                break;
            };
            let range = run.first_page.max(page)..run.end_page().min(end);
            if range.is_empty() {
                break;
            }
            page = range.end;
            match described.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => described.push(range),
            }
        }
        described
    }

    /// Looks up runs of `space` one after the other.
    pub(crate) fn walk(&self, space: SpaceId) -> Walk<'_> {
        self.index.walk(space)
    }

    /// The stored runs that `parent` and `equal` runs are parts of.
    pub(crate) fn origins(&self) -> &[Run] {
        &self.origins
    }

    /// The lengths of the image's own pages objects.
    pub(crate) fn parts_bytes(&self) -> Vec<u64> {
        let bytes = |part: &Option<Box<dyn Object>>| part.as_ref().map_or(0, |one| one.len_bytes());
        self.pages.iter().map(bytes).collect()
    }

    /// Returns the features of the format that the image needs.
    pub fn features(&self) -> &[String] {
        &self.features
    }

    /// Returns what the image's creator said about its creation.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns all records in the order in which they were written.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns all spaces that have runs, by number.
    pub fn spaces(&self) -> &[Space] {
        self.index.spaces()
    }

    /// Returns the runs of `space` by page; none where there is no such space.
    pub fn runs(&self, space: SpaceId) -> impl ExactSizeIterator<Item = Run> + '_ {
        self.index.runs_of(space)
    }

    /// Returns the run that `page` of `space` is in.
    pub fn find(&self, space: SpaceId, page: u64) -> Option<Run> {
        self.index.find(space, page)
    }

    /// Returns all stored runs that the image has pages from, in the order of the pages objects:
    /// its own data runs, which fill its objects without gaps, and those of ancestors. It is what
    /// to read to read everything with few large reads.
    pub fn stored(&self) -> Vec<Run> {
        let is_data = |run: &Run| matches!(run.kind, RunKind::Data { .. });
        let mut runs: Vec<Run> = self.index.runs().filter(is_data).collect();
        runs.sort_by_key(data_offset);
        let far = self.origins.iter().filter(|run| {
            let (ancestor, _) = parts::owner(parts::split(data_offset(run)).0);
            ancestor.is_some()
        });
        runs.extend(far);
        runs
    }

    /// Returns the object that holds the pages of a stored run, and the offset at which they start
    /// there. Who reads or maps it by itself passes what it found to [`Reader::check`].
    ///
    /// # Errors
    /// Those of [`Reader::read_stored`].
    ///
    /// # Panics
    /// Where the run is not a stored one.
    pub fn pages_object(&self, run: &Run) -> Result<(&dyn Object, u64)> {
        let RunKind::Data { offset_bytes, .. } = run.kind else {
            panic!("{run:?} is not stored");
        };
        self.object(offset_bytes, run.space)
    }

    /// Returns the pages object with this number: the part of a position above its lowest 48 bits.
    ///
    /// # Errors
    /// Those of [`Reader::read_stored`].
    pub fn file(&self, number: u64) -> Result<&dyn Object> {
        let position = parts::position(number as usize, 0);
        Ok(self.object(position, SpaceId(0))?.0)
    }

    /// Names the pages object with this number, as errors do.
    pub fn file_name(&self, number: u64) -> String {
        match parts::owner(number as usize) {
            (Some(ancestor), part) => self.ancestors.name(ancestor, part),
            (None, part) => self.id.pages_part_name(part),
        }
    }

    /// Finds where `page` of `space` really is, following copy-on-write sharing, and for how many
    /// of the following pages, at most `pages`, that is the same run: a zero run, or a stored run,
    /// which may be of another space and of an ancestor.
    ///
    /// # Errors
    /// [`Error::NoPage`].
    pub fn locate(&self, mut space: SpaceId, page: u64, mut pages: u64) -> Result<Located> {
        loop {
            let run = self
                .find(space, page)
                .ok_or(Error::NoPage { space, page })?;
            match self.locate_in(&run, page, pages) {
                Ok(located) => return Ok(located),
                Err(other) => (space, pages) = (other, pages.min(run.end_page() - page)),
            }
        }
    }

    /// Does what [`Reader::locate`] does where the run is known that `page` is in.
    ///
    /// # Errors
    /// The space where to look for it, where it is in another one.
    pub(crate) fn locate_in(
        &self,
        run: &Run,
        page: u64,
        pages: u64,
    ) -> std::result::Result<Located, SpaceId> {
        let pages = pages.min(run.end_page() - page) as u32;
        let skip_pages = (page - run.first_page) as u32;
        let (run, skip_pages) = match run.kind {
            RunKind::Same { space } => return Err(space),
            RunKind::Parent(part) | RunKind::Equal(part) => (
                self.origins[part.origin as usize],
                skip_pages + part.skip_pages,
            ),
            RunKind::Data { .. } | RunKind::Zero => (*run, skip_pages),
        };
        Ok(Located {
            run,
            skip_pages,
            pages,
        })
    }

    /// Reads the pages of a stored run or a zero run into `bytes`, and verifies them.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Store`].
    ///
    /// # Panics
    /// Where `bytes` is not of the run's size, or the run of another kind: see [`Reader::locate`].
    pub fn read(&self, run: &Run, bytes: &mut [u8]) -> Result<()> {
        assert_eq!(
            bytes.len() as u64,
            run.len_bytes(),
            "the buffer is as large as the run"
        );
        match run.kind {
            RunKind::Data { offset_bytes, .. } => {
                self.read_stored(bytes, offset_bytes, run.space)?;
                self.check(run, bytes)
            }
            RunKind::Zero => {
                bytes.fill(0);
                Ok(())
            }
            _ => panic!("{run:?} has no bytes of its own"),
        }
    }

    /// Verifies `bytes` that the caller read or mapped as the pages of `run`.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    ///
    /// # Panics
    /// Like [`Reader::read`].
    pub fn check(&self, run: &Run, bytes: &[u8]) -> Result<()> {
        assert_eq!(
            bytes.len() as u64,
            run.len_bytes(),
            "the bytes are the whole run"
        );
        let (offset_bytes, what) = match run.kind {
            RunKind::Data {
                offset_bytes,
                checksum,
            } => {
                if checksum::of_pages(bytes) == checksum {
                    return Ok(());
                }
                self.check_hole(offset_bytes, bytes)?;
                (
                    offset_bytes,
                    format!("the checksum of {} pages does not match", run.pages),
                )
            }
            RunKind::Zero => {
                let Some(at) = bytes.iter().position(|&byte| byte != 0) else {
                    return Ok(());
                };
                (at as u64, "a byte of a zero page is not zero".into())
            }
            _ => panic!("{run:?} has no bytes of its own"),
        };
        let first_page = run.first_page;
        let what = format!("{what} (from page {first_page:#x} of the space on)");
        Err(self.corrupt_pages(offset_bytes, Some(run.space), what))
    }

    /// Reads the pages from `first_page` of `space` on until `bytes` is full, wherever they are,
    /// and verifies them.
    ///
    /// # Errors
    /// [`Error::NoPage`], [`Error::Corrupt`], [`Error::Store`].
    ///
    /// # Panics
    /// Where `bytes` is not a whole number of pages.
    pub fn read_pages(&self, space: SpaceId, first_page: u64, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len().is_multiple_of(PAGE_BYTES), "whole pages");
        let mut page = first_page;
        let mut rest = bytes;
        // A run of which several parts are wanted is read once.
        let mut whole: (Option<Run>, Vec<u8>) = (None, Vec::new());
        while !rest.is_empty() {
            let located = self.locate(space, page, (rest.len() / PAGE_BYTES) as u64)?;
            let Located {
                run,
                skip_pages,
                pages,
            } = located;
            let (part, more) = rest.split_at_mut(pages as usize * PAGE_BYTES);
            if run.kind == RunKind::Zero {
                part.fill(0);
            } else if pages == run.pages {
                self.read(&run, part)?;
            } else {
                if whole.0 != Some(run) {
                    whole.0 = None;
                    whole.1.resize(run.len_bytes() as usize, 0);
                    self.read(&run, &mut whole.1)?;
                    whole.0 = Some(run);
                }
                let start = skip_pages as usize * PAGE_BYTES;
                part.copy_from_slice(&whole.1[start..start + part.len()]);
            }
            page += u64::from(pages);
            rest = more;
        }
        Ok(())
    }

    /// Fills `bytes`, which belong to runs of `space`, from where a data run is on: neighbouring
    /// runs with one read. Verifies nothing; what was read goes to [`Reader::check`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] past the end, [`Error::Store`].
    pub fn read_stored(&self, bytes: &mut [u8], offset_bytes: u64, space: SpaceId) -> Result<()> {
        let (object, start_bytes) = self.object(offset_bytes, space)?;
        match object.read_at(bytes, start_bytes) {
            Err(store::Error::Short { len_bytes, .. }) => {
                let what = "it ends here, before its last page".into();
                let position = offset_bytes - start_bytes + len_bytes;
                Err(self.corrupt_pages(position, Some(space), what))
            }
            result => result.map_err(Error::store("read pages of")),
        }
    }

    /// Returns the pages object at a position, and the offset there.
    fn object(&self, position: u64, space: SpaceId) -> Result<(&dyn Object, u64)> {
        self.check_freed()?;
        let (object, offset_bytes) = parts::split(position);
        match parts::owner(object) {
            (Some(ancestor), part) => Ok((self.ancestors.object(ancestor, part)?, offset_bytes)),
            (None, part) => match self.pages.get(part) {
                Some(Some(pages)) => Ok((&**pages, offset_bytes)),
                _ => {
                    let what = "the image has no pages".into();
                    Err(self.corrupt_pages(position, Some(space), what))
                }
            },
        }
    }

    /// Refuses pages that are zero because they were freed in another image.
    fn check_hole(&self, position: u64, bytes: &[u8]) -> Result<()> {
        let mut pages = bytes.chunks(PAGE_BYTES);
        match parts::owner(parts::split(position).0) {
            (Some(ancestor), _) if pages.any(|page| page.iter().all(|byte| *byte == 0)) => {
                self.ancestors.check_freed(ancestor)
            }
            _ => Ok(()),
        }
    }

    fn corrupt_pages(&self, position: u64, space: Option<SpaceId>, what: String) -> Error {
        let (object, offset_bytes) = parts::split(position);
        Error::Corrupt {
            file: self.file_name(object as u64),
            what,
            space,
            offset_bytes,
        }
    }
}

/// The length of pages object `object` as the manifest tells it.
fn object_bytes(own: &[u64], ancestors: &[Ancestor], object: usize) -> u64 {
    let parts_bytes = match parts::owner(object) {
        (None, _) => Some(own),
        (Some(number), _) => ancestors.get(number).map(|one| one.parts_bytes.as_slice()),
    };
    let part = parts::owner(object).1;
    parts_bytes
        .and_then(|bytes| bytes.get(part))
        .copied()
        .unwrap_or(0)
}

pub(crate) fn data_offset(run: &Run) -> u64 {
    run.stored_at().unwrap_or(u64::MAX)
}

fn bad_index(start: usize, fault: Fault) -> Error {
    let offset_bytes = (start + fault.entry * ENTRY_BYTES) as u64;
    let what = format!("{} (run at page {:#x})", fault.what, fault.first_page);
    Error::Corrupt {
        file: MANIFEST_NAME.into(),
        what,
        space: Some(fault.space),
        offset_bytes,
    }
}

/// Opens pages object `part` of image `id`, which must have `pages_bytes`.
fn open_pages(
    store: &dyn Store,
    id: ImageId,
    part: usize,
    pages_bytes: u64,
    index: &Index,
) -> Result<Option<Box<dyn Object>>> {
    if pages_bytes == 0 {
        return Ok(None);
    }
    let file = id.pages_part_name(part);
    let corrupt = |len_bytes: u64, what: String| {
        let hit = |run: &Run| {
            let start = data_offset(run);
            let position = parts::position(part, len_bytes);
            (start..start.saturating_add(run.len_bytes())).contains(&position)
        };
        let space = index.runs().find(hit).map(|run| run.space);
        Error::Corrupt {
            file: file.clone(),
            what,
            space,
            offset_bytes: len_bytes.min(pages_bytes),
        }
    };
    let pages = store.open(&file).map_err(|error| match error {
        store::Error::Missing { .. } => corrupt(0, "it is missing".into()),
        source => Error::Store {
            action: "open the pages of",
            source,
        },
    })?;
    match pages.len_bytes() {
        len if len == pages_bytes => Ok(Some(pages)),
        len => Err(corrupt(
            len,
            format!("it has {len} bytes, the manifest says {pages_bytes}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use proptest::prelude::*;
    use store::{Claim, Memory, NewObject};

    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::header::{self, HEADER_MAX_BYTES};
    use crate::manifest::RECORDS_MAX;
    use crate::run::{self, Part};

    const ID: ImageId = ImageId([0xa5; 16]);

    fn put(store: &dyn Store, name: &str, bytes: &[u8]) {
        let object = store.create(name).unwrap();
        object.write_at(bytes, 0).unwrap();
        object.commit(false).unwrap();
    }

    /// Puts a manifest of these sections, with right checksums, into a store beside `pages`.
    fn forge(index: &[u8], manifest: &[u8], records: &[u8], pages: &[u8]) -> Memory {
        let store = Memory::default();
        let header = header::encode(ID, [index, manifest, records, &[]]);
        put(
            &store,
            MANIFEST_NAME,
            &[&header, index, manifest, records].concat(),
        );
        put(&store, &ID.pages_name(), pages);
        store
    }

    fn manifest(pages_bytes: u64, records: u64) -> Vec<u8> {
        Manifest {
            pages_bytes,
            records,
            ..Default::default()
        }
        .encode_to_vec()
    }

    fn data(first_page: u64, pages: u32, offset_bytes: u64) -> Run {
        let kind = RunKind::Data {
            offset_bytes,
            checksum: 0,
        };
        Run {
            space: SpaceId(3),
            first_page,
            pages,
            kind,
        }
    }

    #[track_caller]
    fn corrupt(store: &dyn Store, what: &str) {
        match Reader::open(store).err() {
            Some(error @ Error::Corrupt { .. }) => {
                assert!(error.to_string().contains(what), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn forged_manifests_are_refused() {
        let page = PAGE_BYTES as u64;
        let index = |runs: &[Run]| -> Vec<u8> { runs.iter().flat_map(run::encode).collect() };
        let pages = [0; PAGE_BYTES];
        let one = index(&[data(0, 1, 0)]);
        assert!(Reader::open(&forge(&one, &manifest(page, 0), &[], &pages)).is_ok());

        let past = index(&[data(0, 1, page)]);
        corrupt(
            &forge(&past, &manifest(page, 0), &[], &pages),
            "(space 3): its data",
        );
        corrupt(
            &forge(&past, &manifest(2 * page, 0), &[], &pages),
            "comes next",
        );
        let huge = manifest(u64::MAX, 0);
        corrupt(&forge(&one, &huge, &[], &pages), "runs describe 4096 bytes");
        let twice = index(&[data(0, 1, 0), data(1, 1, 0)]);
        corrupt(
            &forge(&twice, &manifest(page, 0), &[], &pages),
            "comes next",
        );
        let overlap = index(&[data(0, 1, 0), data(0, 1, page)]);
        corrupt(
            &forge(&overlap, &manifest(2 * page, 0), &[], &pages),
            "overlaps",
        );
        let circle = [Run {
            kind: RunKind::Same { space: SpaceId(3) },
            ..data(0, 1, 0)
        }];
        corrupt(
            &forge(&index(&circle), &manifest(0, 0), &[], &pages),
            "itself",
        );

        corrupt(
            &forge(&one[..31], &manifest(page, 0), &[], &pages),
            "entry is cut",
        );
        corrupt(&forge(&one, &[0xff; 20], &[], &pages), "byte 176");
        corrupt(
            &forge(&one, &manifest(page, 1), &[], &pages),
            "1 records cannot be",
        );
        corrupt(
            &forge(&one, &manifest(page, u64::MAX), &[0; 99], &pages),
            "records cannot be",
        );
        corrupt(
            &forge(&one, &manifest(page, 0), &[0], &pages),
            "after the last record",
        );
        let many = vec![0; 2 * RECORDS_MAX + 2];
        let count = RECORDS_MAX as u64 + 1;
        corrupt(
            &forge(&one, &manifest(page, count), &many, &pages),
            "records cannot be",
        );
        let long = vec![0; MESSAGE_MAX_BYTES + 1];
        corrupt(&forge(&one, &long, &[], &pages), "1048577 bytes");
    }

    #[test]
    fn what_was_freed_is_said_twice() {
        let forged = |feature: bool, freed_by: &[u8]| {
            let features = feature.then(|| "freed".to_owned());
            let message = Manifest {
                features: features.into_iter().collect(),
                freed_by: freed_by.into(),
                ..Default::default()
            };
            forge(&[], &message.encode_to_vec(), &[], &[])
        };
        let by = ImageId([7; 16]);
        let reader = Reader::open(&forged(true, &by.0)).unwrap();
        assert_eq!(reader.freed_by(), Some(by));
        corrupt(&forged(true, &[]), "for no image");
        corrupt(&forged(false, &by.0), "no image");
        corrupt(&forged(true, &[7; 15]), "no image");
    }

    #[test]
    fn what_is_not_known_is_named() {
        let features = vec!["teleport".to_owned()];
        let message = Manifest {
            features,
            ..Default::default()
        }
        .encode_to_vec();
        let error = Reader::open(&forge(&[], &message, &[], &[]))
            .err()
            .expect("refused");
        assert!(matches!(&error, Error::Unsupported { feature } if feature == "teleport"));
    }

    /// A store of one object that says it is very large, and counts what is read of it.
    struct Huge {
        start: Vec<u8>,
        len_bytes: u64,
        read_bytes: Arc<AtomicUsize>,
    }

    impl Store for Huge {
        fn claim(&self) -> store::Result<Claim> {
            unreachable!("only read")
        }
        fn create(&self, _: &str) -> store::Result<Box<dyn NewObject>> {
            unreachable!("only read")
        }
        fn open(&self, _: &str) -> store::Result<Box<dyn Object>> {
            let (start, read_bytes) = (self.start.clone(), Arc::clone(&self.read_bytes));
            Ok(Box::new(Huge {
                start,
                len_bytes: self.len_bytes,
                read_bytes,
            }))
        }
        fn list(&self) -> store::Result<Vec<String>> {
            unreachable!("opened by name")
        }
        fn beside(&self, _: &str) -> store::Result<Arc<dyn Store>> {
            unreachable!("it has no parent")
        }
        fn handle(&self) -> Arc<dyn Store> {
            unreachable!("it has no parent")
        }
        fn remove(&self, _: &str) -> store::Result<()> {
            unreachable!("only read")
        }
        fn place(&self) -> String {
            "a test".into()
        }
    }

    impl Object for Huge {
        fn name(&self) -> &str {
            MANIFEST_NAME
        }
        fn len_bytes(&self) -> u64 {
            self.len_bytes
        }
        fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> store::Result<()> {
            self.read_bytes.fetch_add(bytes.len(), Relaxed);
            let from = self.start.get(offset_bytes as usize..).unwrap_or_default();
            let len = from.len().min(bytes.len());
            bytes[..len].copy_from_slice(&from[..len]);
            bytes[len..].fill(0);
            Ok(())
        }
        fn as_fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    #[test]
    fn a_huge_manifest_is_refused_before_it_is_read() {
        let mut fitting = header::encode(ID, [&[], &[], &[], &[]]);
        let len_bytes = 1_u64 << 60;
        let header_bytes = fitting.len();
        let last = len_bytes - header_bytes as u64;
        fitting[120..128].copy_from_slice(&last.to_le_bytes());
        let table = xxh3_64(&fitting[header::PRELUDE_BYTES..header_bytes - 8]);
        fitting[header_bytes - 8..].copy_from_slice(&table.to_le_bytes());
        for (start, what) in [(fitting, "bytes"), (vec![], "not a manifest")] {
            let read_bytes = Arc::default();
            let store = Huge {
                start,
                len_bytes,
                read_bytes: Arc::clone(&read_bytes),
            };
            corrupt(&store, what);
            assert!(read_bytes.load(Relaxed) <= HEADER_MAX_BYTES, "{what}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 2000, failure_persistence: None, ..Default::default()
        })]

        /// Whoever can make checksums right still gets nothing but an image or an error: no panic,
        /// no endless loop, no read outside.
        #[test]
        fn forged_bytes_are_read_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let zero = |space, first_page, pages| Run {
                space: SpaceId(space), first_page, pages, kind: RunKind::Zero,
            };
            let same = |space, first_page, pages, other| Run {
                kind: RunKind::Same { space: SpaceId(other) }, ..zero(space, first_page, pages)
            };
            let runs = [
                zero(1, 0, 4), zero(1, 4, 1), same(1, 8, 2, 3), same(2, 1, 2, 1),
                same(2, 8, 2, 1), data(8, 2, 0), data(10, 1, 2 * PAGE_BYTES as u64),
            ];
            let index: Vec<u8> = runs.iter().flat_map(run::encode).collect();
            let records = manifest::encode_records(vec![
                Record { tag: 1, version: 1, id: 1, payload: vec![1; 10] }; 3
            ]);
            let message = manifest(3 * PAGE_BYTES as u64, 3);
            let mut all = [&index[..], &message, &records].concat();
            for (at, byte) in changes {
                let at = at.index(all.len());
                all[at] = byte;
            }
            let (index, rest) = all.split_at(index.len());
            let (message, records) = rest.split_at(message.len());
            let store = forge(index, message, records, &[0; 3 * PAGE_BYTES]);
            if let Ok(reader) = Reader::open(&store) {
                let _ = reader.verify_all(1);
                for space in reader.spaces() {
                    for run in reader.runs(space.id) {
                        let last = run.end_page() - 1;
                        for page in [run.first_page, last] {
                            prop_assert!(reader.locate(space.id, page, 1).is_ok());
                            let _ = reader.read_pages(space.id, page, &mut [0; PAGE_BYTES]);
                        }
                    }
                }
            }
        }

        /// The same of a layer: its ancestors are where they are said to be, and are others.
        #[test]
        fn forged_layers_are_read_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let part = |origin, skip_pages| Part { origin, skip_pages };
            let run = |first_page, pages, kind| Run { kind, ..data(first_page, pages, 0) };
            let runs = [
                data(0, 1, 0),
                run(1, 2, RunKind::Parent(part(1, 1))),
                run(3, 1, RunKind::Parent(part(2, 0))),
                run(4, 1, RunKind::Equal(part(0, 0))),
            ];
            let page = PAGE_BYTES as u64;
            let far = |ancestor, pages| data(1, pages, parts::position(
                parts::of_ancestor(ancestor, 0), page,
            ));
            let origins = origins::encode(&[data(0, 1, 0), far(0, 3), far(1, 1)]);
            let listed = |id: u8| manifest::Listed {
                id: vec![id; 16], path: "../1".into(), parts_bytes: vec![4 * page],
            };
            let message = Manifest {
                features: vec!["parent".into(), "equal".into()],
                parent: Some(manifest::Parent { id: vec![1; 16], path: "../1".into() }),
                pages_bytes: page,
                ancestors: vec![listed(1), listed(2)],
                ..Default::default()
            }
            .encode_to_vec();
            let index: Vec<u8> = runs.iter().flat_map(run::encode).collect();
            let mut all = [&index[..], &message, &origins].concat();
            for (at, byte) in changes {
                let at = at.index(all.len());
                all[at] = byte;
            }
            let (index, rest) = all.split_at(index.len());
            let (message, origins) = rest.split_at(message.len());
            let store = forge(index, message, &[], &[0; PAGE_BYTES]);
            let header = header::encode(ID, [index, message, &[], origins]);
            put(&store, MANIFEST_NAME, &[&header, index, message, origins].concat());
            let other = Memory::default();
            put(&other, &ImageId([1; 16]).pages_name(), &[0; 4 * PAGE_BYTES]);
            store.put_beside("../1", &other);
            if let Ok(reader) = Reader::open(&store) {
                let _ = reader.verify_all(1);
                for space in reader.spaces() {
                    let described = reader.described(space.id, 0, u64::MAX);
                    let pages: u64 = described.iter().map(|range| range.end - range.start).sum();
                    prop_assert_eq!(pages, space.pages);
                    for run in reader.runs(space.id) {
                        for page in [run.first_page, run.end_page() - 1] {
                            prop_assert!(reader.locate(space.id, page, 1).is_ok());
                            let _ = reader.read_pages(space.id, page, &mut [0; PAGE_BYTES]);
                        }
                        let _ = reader.origin(&run);
                    }
                }
            }
        }
    }
}
