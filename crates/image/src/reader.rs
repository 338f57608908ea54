//! Reads an image: everything but pages is checked when it is opened, pages when they are read.

use std::os::fd::BorrowedFd;

use abi::spans::Ranges;
use store::{Object, Store};

use crate::ancestors::{Ancestor, Ancestors};
use crate::chunk::{self, Chunk};
pub use crate::index::Space;
use crate::index::{Bounds, Fault, Index, Walk};
use crate::manifest::{self, MESSAGE_MAX_BYTES, Manifest};
use crate::parts::{self, PARTS_MAX};
use crate::places::Places;
use crate::raw::{RawManifest, corrupt_manifest};
use crate::run::{ENTRY_BYTES, Location, Part};
use crate::{
    Error, Facts, ImageId, MANIFEST_NAME, Record, Result, Run, RunKind, SpaceId, spaces, strict,
};

/// An opened image.
///
/// Of a layer, the pages of older images are read where those are, which are opened when they are
/// needed. How pages are read stands in `resolver.rs`; any number of threads may do so.
pub struct Reader {
    pub(crate) id: ImageId,
    /// Tells this manifest from others of the same image.
    pub(crate) stamp: u64,
    pub(crate) parent: Option<(ImageId, String)>,
    pub(crate) features: Vec<String>,
    pub(crate) facts: Facts,
    pub(crate) records: Vec<Record>,
    pub(crate) index: Index,
    pub(crate) places: Places,
}

/// The part of a manifest that is checked before its runs.
struct ManifestHead {
    message: Manifest,
    parent: Option<(ImageId, String)>,
    freed_by: Option<ImageId>,
    ancestors: Vec<Ancestor>,
}

impl ManifestHead {
    /// Decodes and checks the message at `start` of the manifest of image `id`.
    fn new(bytes: &[u8], start: usize, id: ImageId) -> Result<Self> {
        let wrong = |what| corrupt_manifest(start, what);
        if bytes.len() > MESSAGE_MAX_BYTES {
            return Err(wrong(format!("{} bytes", bytes.len())));
        }
        let mut message: Manifest = strict::decode(bytes).map_err(wrong)?;
        message.check_features()?;
        let own = message.parts_bytes().len();
        if own > PARTS_MAX {
            return Err(wrong(format!("{own} pages objects")));
        }
        let listed = std::mem::take(&mut message.ancestors);
        Ok(Self {
            parent: message.check_parent(!listed.is_empty()).map_err(wrong)?,
            freed_by: message.check_freed().map_err(wrong)?,
            ancestors: Ancestor::check_all(listed, id).map_err(wrong)?,
            message,
        })
    }

    /// Decodes and checks the table of chunks at `start` of the manifest.
    fn chunks(&self, bytes: &[u8], start: usize) -> Result<Vec<Chunk>> {
        let own_bytes = self.message.parts_bytes();
        let bounds = chunk::Bounds {
            object_bytes: &|object| object_bytes(&own_bytes, &self.ancestors, object),
            own_bytes: &own_bytes,
            unused_bytes: self.message.unused_bytes,
        };
        chunk::decode(bytes, &bounds).map_err(|fault| {
            let chunk::Fault {
                entry,
                what,
                is_unknown,
            } = fault;
            if is_unknown {
                return Error::Unsupported { feature: what };
            }
            let at = start + entry * chunk::ENTRY_BYTES;
            corrupt_manifest(at, format!("chunk {entry}: {what}"))
        })
    }
}

impl Reader {
    /// Opens the image in `store` and checks all of it but the contents of its pages: so every run
    /// that the reader returns lies inside its space and inside a chunk, overlaps no other, and
    /// refers to pages that exist.
    ///
    /// # Errors
    /// [`Error::NoImage`], [`Error::Corrupt`], [`Error::Unsupported`], [`Error::Version`],
    /// [`Error::Store`].
    pub fn open(store: &dyn Store) -> Result<Self> {
        let raw = RawManifest::read(store)?;
        let (id, stamp, bytes) = (raw.id, raw.stamp(), raw.bytes);
        let [spaces, index, chunks, message, records] = raw.sections;
        let checked = ManifestHead::new(&bytes[message.clone()], message.start, id)?;
        let start = records.start;
        let records = manifest::decode_records(&bytes[records], checked.message.records)
            .map_err(|(at, what)| corrupt_manifest(start + at, what))?;
        let start = spaces.start;
        let spaces = spaces::decode(&bytes[spaces]);
        let spaces = spaces.map_err(|what| corrupt_manifest(start, what))?;
        let chunks = checked.chunks(&bytes[chunks.clone()], chunks.start)?;
        if !index.len().is_multiple_of(ENTRY_BYTES) {
            let what = "the last index entry is cut".into();
            return Err(corrupt_manifest(index.end, what));
        }
        let bounds = Bounds {
            chunks: &chunks,
            spaces: &spaces,
        };
        let start = index.start;
        let index = Index::new(bytes, index, bounds).map_err(|fault| bad_index(start, fault))?;
        let ManifestHead {
            message,
            parent,
            freed_by,
            ancestors,
        } = checked;
        let own_bytes = message.parts_bytes().into_iter().enumerate();
        let open = |(part, bytes)| open_pages(store, id, part, bytes, &chunks, &index);
        let own = own_bytes.map(open).collect::<Result<_>>()?;
        Ok(Self {
            id,
            stamp,
            parent,
            features: message.features,
            facts: message.facts.unwrap_or_default(),
            records,
            index,
            places: Places::new(freed_by, chunks, own, Ancestors::new(store, ancestors)),
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
        self.places.ancestors.all()
    }

    /// Returns how many files of other images may have to be open to read all of this one.
    pub fn ancestor_files(&self) -> u64 {
        let files = |one: &Ancestor| one.parts_bytes.iter().filter(|bytes| **bytes > 0).count();
        self.ancestors().iter().map(files).sum::<usize>() as u64
    }

    /// Returns the image for which pages of this one were freed, or of those that it is over:
    /// nothing can be read of it any more.
    pub fn freed_by(&self) -> Option<ImageId> {
        self.places.freed_by
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
                self.places.ancestors.object(number, part)?;
            }
        }
        Ok(())
    }

    /// Returns the descriptors of all files with pages, [`Reader::open_ancestors`] having been
    /// called; none where pages are in no file. A process that was forked and has them can go on
    /// reading.
    pub fn descriptors(&self) -> Option<Vec<BorrowedFd<'_>>> {
        let mut all = Vec::new();
        for object in self.places.own.iter().flatten() {
            all.push(object.as_fd()?);
        }
        for (number, ancestor) in self.ancestors().iter().enumerate() {
            let parts = ancestor.parts_bytes.iter().enumerate();
            for (part, _) in parts.filter(|(_, bytes)| **bytes > 0) {
                let object = self.places.ancestors.object(number, part).ok()?;
                all.push(object.as_fd()?);
            }
        }
        Some(all)
    }

    /// Returns the ancestor that holds the pages of a run; none for pages of this image.
    pub fn ancestor_of(&self, run: &Run) -> Option<&Ancestor> {
        let object = self.chunk(run.part()?.chunk).object as usize;
        Some(&self.ancestors()[parts::owner(object).0?])
    }

    /// Returns which of `pages` pages from `first_page` of `space` on the image describes, as
    /// ranges in ascending order that do not touch.
    pub fn described(&self, space: SpaceId, first_page: u64, pages: u64) -> Ranges<u64> {
        let mut described = Ranges::new();
        let (mut page, end) = (first_page, first_page.saturating_add(pages));
        let mut walk = self.walk(space);
        while page < end {
            let Some(run) = walk.find_from(page) else {
                break;
            };
            let range = run.first_page.max(page)..run.end_page().min(end);
            if range.is_empty() {
                break;
            }
            page = range.end;
            described.push(range);
        }
        described
    }

    /// Looks up runs of `space` one after the other.
    pub(crate) fn walk(&self, space: SpaceId) -> Walk<'_> {
        self.index.walk(space)
    }

    /// The chunks that runs are parts of.
    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.places.chunks
    }

    /// The lengths of the image's own pages objects.
    pub(crate) fn parts_bytes(&self) -> Vec<u64> {
        let bytes = |part: &Option<Box<dyn Object>>| part.as_ref().map_or(0, |one| one.len_bytes());
        self.places.own.iter().map(bytes).collect()
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

    /// Returns all spaces, by number.
    pub fn spaces(&self) -> &[Space] {
        self.index.spaces()
    }

    /// Returns the space with this number.
    pub fn space(&self, space: SpaceId) -> Option<&Space> {
        self.index.space(space)
    }

    /// Returns the runs of `space` by page; none where there is no such space.
    pub fn runs(&self, space: SpaceId) -> impl ExactSizeIterator<Item = Run> + '_ {
        self.index.runs_of(space)
    }

    /// Returns the run that `page` of `space` is in.
    pub fn find(&self, space: SpaceId, page: u64) -> Option<Run> {
        self.index.find(space, page)
    }

    /// Finds where `page` of `space` really is, following copy-on-write sharing, and for how many
    /// of the following pages, at most `pages`, that is the same: zeros, or pages of a chunk.
    ///
    /// # Errors
    /// [`Error::NoPage`].
    pub fn locate(&self, mut space: SpaceId, page: u64, mut pages: u64) -> Result<Location> {
        loop {
            let run = self
                .find(space, page)
                .ok_or(Error::NoPage { space, page })?;
            match locate_in(&run, page, pages) {
                Ok(located) => return Ok(located),
                Err(other) => (space, pages) = (other, pages.min(run.end_page() - page)),
            }
        }
    }
}

/// Does what [`Reader::locate`] does where the run is known that `page` is in.
///
/// # Errors
/// The space where to look for it, where it is in another one.
pub(crate) fn locate_in(
    run: &Run,
    page: u64,
    pages: u64,
) -> std::result::Result<Location, SpaceId> {
    let pages = pages.min(run.end_page() - page) as u32;
    let skip_pages = (page - run.first_page) as u32;
    let part = match run.kind {
        RunKind::Same { space } => return Err(space),
        RunKind::Zero => None,
        RunKind::Part(part) => Some(part.after(skip_pages)),
    };
    Ok(Location { part, pages })
}

/// The length of pages object `object` as the manifest tells it.
fn object_bytes(own: &[u64], ancestors: &[Ancestor], object: usize) -> u64 {
    let (owner, part) = parts::owner(object);
    let parts_bytes = match owner {
        None => Some(own),
        Some(number) => ancestors.get(number).map(|one| one.parts_bytes.as_slice()),
    };
    let bytes = parts_bytes.and_then(|bytes| bytes.get(part));
    bytes.copied().unwrap_or(0)
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
    chunks: &[Chunk],
    index: &Index,
) -> Result<Option<Box<dyn Object>>> {
    if pages_bytes == 0 {
        return Ok(None);
    }
    let file = id.pages_part_name(part);
    let corrupt = |len_bytes: u64, what: String| {
        let position = parts::position(part, len_bytes);
        let hit = chunks.partition_point(|chunk| chunk.end() <= position);
        let is_hit = |at: Part| at.chunk.0 as usize == hit;
        let space = index.runs().find(|run| run.part().is_some_and(is_hit));
        Error::Corrupt {
            file: file.clone(),
            what,
            space: space.map(|run| run.space),
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
        len => {
            let what = format!("it has {len} bytes, the manifest says {pages_bytes}");
            Err(corrupt(len, what))
        }
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
    use prost::Message;
    use store::conformance::put;

    use crate::chunk::testing::plain;
    use crate::forge::Sections;
    use crate::header::{self, HEADER_MAX_BYTES};
    use crate::manifest::RECORDS_MAX;
    use crate::run::{self, PAGE_BYTES};
    use crate::{ChunkId, Granule, NewSpace, SPACE_MAX_PAGES, SpaceKind};

    const ID: ImageId = ImageId([0xa5; 16]);

    /// Puts a manifest of these sections, with right checksums, into a store beside `pages`.
    fn forge(sections: [&[u8]; 5], pages: &[u8]) -> Memory {
        let store = Memory::default();
        let (id, bytes) = (ID, sections.map(<[u8]>::to_vec));
        put(&store, MANIFEST_NAME, &Sections { id, bytes }.manifest());
        put(&store, &ID.pages_name(), pages);
        store
    }

    fn spaces(ids: &[u32]) -> Vec<u8> {
        let space = |id: &u32| NewSpace {
            id: SpaceId(*id),
            kind: SpaceKind::Memory,
            name: String::new(),
            len_pages: SPACE_MAX_PAGES,
            granule: Granule::Small,
        };
        let spaces = ids.iter().map(space).collect::<Vec<_>>();
        crate::spaces::encode(spaces.iter())
    }

    fn index(runs: &[Run]) -> Vec<u8> {
        runs.iter().flat_map(run::encode).collect()
    }

    fn manifest(pages_bytes: u64, records: u64) -> Vec<u8> {
        Manifest {
            pages_bytes,
            records,
            ..Default::default()
        }
        .encode_to_vec()
    }

    fn part(first_page: u64, pages: u32, chunk: u32, skip_pages: u32) -> Run {
        let chunk = ChunkId(chunk);
        Run {
            space: SpaceId(3),
            first_page,
            pages,
            kind: RunKind::Part(Part { chunk, skip_pages }),
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
        let pages = [0; PAGE_BYTES];
        let table = |chunks: &[Chunk]| chunk::encode(chunks);
        let (one, first, spaces) = (
            index(&[part(0, 1, 0, 0)]),
            table(&[plain(0, 0, 1)]),
            spaces(&[3]),
        );
        let good = manifest(page, 0);
        assert!(Reader::open(&forge([&spaces, &one, &first, &good, &[]], &pages)).is_ok());
        let wrong = |index: &[u8], chunks: &[Chunk], message: &[u8], what: &str| {
            corrupt(
                &forge([&spaces, index, &table(chunks), message, &[]], &pages),
                what,
            );
        };
        wrong(
            &one,
            &[plain(0, 1, 1)],
            &good,
            "chunk 0: its 4096 bytes at 4096",
        );
        wrong(
            &one,
            &[plain(0, 1, 1)],
            &manifest(2 * page, 0),
            "comes next",
        );
        wrong(
            &one,
            &[plain(0, 0, 1)],
            &manifest(u64::MAX, 0),
            "chunks have 4096 bytes",
        );
        wrong(&one, &[plain(0, 0, 1); 2], &good, "before the last ends");
        wrong(
            &one,
            &[],
            &manifest(0, 0),
            "(space 3): it is in chunk 0, and there is none",
        );
        let chunks = [plain(0, 0, 1)];
        let overlap = index(&[part(0, 1, 0, 0), part(0, 1, 0, 0)]);
        wrong(&overlap, &chunks, &good, "overlaps");
        let circle = index(&[Run {
            kind: RunKind::Same { space: SpaceId(3) },
            ..part(0, 1, 0, 0)
        }]);
        wrong(&circle, &[], &manifest(0, 0), "itself");
        wrong(&one[..23], &chunks, &good, "entry is cut");
        wrong(&one, &chunks, &[0xff; 20], "varint");
        wrong(
            &one,
            &chunks,
            &[&good[..], &[0x78, 1]].concat(),
            "field 15 is not known",
        );
        wrong(&one, &chunks, &manifest(page, 1), "1 records cannot be");
        wrong(
            &one,
            &chunks,
            &vec![0; MESSAGE_MAX_BYTES + 1],
            "1048577 bytes",
        );
        let records = |records: &[u8], count, what: &str| {
            let message = manifest(page, count);
            corrupt(
                &forge([&spaces, &one, &first, &message, records], &pages),
                what,
            );
        };
        records(&[0; 99], u64::MAX, "records cannot be");
        records(&[0], 0, "after the last record");
        records(
            &vec![0; 2 * RECORDS_MAX + 2],
            RECORDS_MAX as u64 + 1,
            "records cannot be",
        );
        records(
            &[4, 8, 1, 40, 1],
            1,
            "record 0 has a field that is not known",
        );
        let of_others = forge([&[], &one, &first, &good, &[]], &pages);
        corrupt(&of_others, "its space is not there");
        let twice = [&spaces[..], &spaces].concat();
        corrupt(
            &forge([&twice, &one, &first, &good, &[]], &pages),
            "not in order",
        );
        let cut = forge([&spaces, &one, &first[..47], &good, &[]], &pages);
        corrupt(&cut, "chunk 0: it is cut");
    }

    #[test]
    fn unknown_codecs_and_keys_are_named() {
        for (at, what) in [(26, "codec 7"), (28, "encrypted with key 7")] {
            let mut chunks = chunk::encode(&[plain(0, 0, 1)]);
            chunks[at] = 7;
            let message = manifest(PAGE_BYTES as u64, 0);
            let store = forge([&[], &[], &chunks, &message, &[]], &[0; PAGE_BYTES]);
            let error = Reader::open(&store).err().expect("refused");
            let named = matches!(&error, Error::Unsupported { feature } if feature.contains(what));
            assert!(named, "{error}");
        }
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
            forge([&[], &[], &[], &message.encode_to_vec(), &[]], &[])
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
        let error = Reader::open(&forge([&[], &[], &[], &message, &[]], &[]))
            .err()
            .expect("refused");
        assert!(matches!(&error, Error::Unsupported { feature } if feature == "teleport"));
    }

    /// A store of one object that says it is very large, and counts what is read of it.
    struct HugeStore {
        start: Vec<u8>,
        len_bytes: u64,
        read_bytes: Arc<AtomicUsize>,
    }

    impl Store for HugeStore {
        fn claim(&self) -> store::Result<Claim> {
            unreachable!("only read")
        }
        fn create(&self, _: &str) -> store::Result<Box<dyn NewObject>> {
            unreachable!("only read")
        }
        fn open(&self, _: &str) -> store::Result<Box<dyn Object>> {
            let (start, read_bytes) = (self.start.clone(), Arc::clone(&self.read_bytes));
            Ok(Box::new(HugeStore {
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

    impl Object for HugeStore {
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
        let mut fitting = header::encode(ID, [&[]; 5]);
        let len_bytes = 1_u64 << 60;
        let header_bytes = fitting.len();
        let last = len_bytes - header_bytes as u64;
        fitting[184..192].copy_from_slice(&last.to_le_bytes());
        let table = xxh3_64(&fitting[header::PRELUDE_BYTES..header_bytes - 8]);
        fitting[header_bytes - 8..].copy_from_slice(&table.to_le_bytes());
        for (start, what) in [(fitting, "bytes"), (vec![], "not a manifest")] {
            let read_bytes = Arc::default();
            let store = HugeStore {
                start,
                len_bytes,
                read_bytes: Arc::clone(&read_bytes),
            };
            corrupt(&store, what);
            assert!(read_bytes.load(Relaxed) <= HEADER_MAX_BYTES, "{what}");
        }
    }

    /// Forges an image of sections in which some bytes are others.
    fn forge_changed(
        sections: &[Vec<u8>; 5],
        changes: &[(prop::sample::Index, u8)],
        pages: &[u8],
    ) -> Memory {
        let mut all = sections.concat();
        for (at, byte) in changes {
            let at = at.index(all.len());
            all[at] = *byte;
        }
        let mut rest = &all[..];
        let sections = sections.each_ref().map(|section| {
            let (own, after) = rest.split_at(section.len());
            rest = after;
            own
        });
        forge(sections, pages)
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
                same(2, 8, 2, 1), part(8, 2, 0, 0), part(10, 1, 1, 0),
            ];
            let records = manifest::encode_records(vec![
                Record { tag: 1, version: 1, id: 1, payload: vec![1; 10] }; 3
            ]);
            let sections = [
                spaces(&[1, 2, 3]), index(&runs),
                chunk::encode(&[plain(0, 0, 2), plain(0, 2, 1)]),
                manifest(3 * PAGE_BYTES as u64, 3), records,
            ];
            let store = forge_changed(&sections, &changes, &[0; 3 * PAGE_BYTES]);
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
            let runs = [part(0, 1, 0, 0), part(1, 2, 1, 1), part(3, 1, 2, 0), part(4, 1, 0, 0)];
            let page = PAGE_BYTES as u64;
            let theirs = |ancestor, pages| plain(parts::of_ancestor(ancestor, 0) as u32, 1, pages);
            let listed = |id: u8| manifest::AncestorRecord {
                id: vec![id; 16], path: "../1".into(), parts_bytes: vec![4 * page],
            };
            let message = Manifest {
                features: vec!["parent".into(), "equal".into()],
                parent: Some(manifest::Parent { id: vec![1; 16], path: "../1".into() }),
                pages_bytes: page,
                ancestors: vec![listed(1), listed(2)],
                ..Default::default()
            };
            let chunks = chunk::encode(&[plain(0, 0, 1), theirs(0, 3), theirs(1, 1)]);
            let sections = [
                spaces(&[3]), index(&runs), chunks, message.encode_to_vec(), Vec::new(),
            ];
            let store = forge_changed(&sections, &changes, &[0; PAGE_BYTES]);
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
                        let _ = reader.ancestor_of(&run);
                    }
                }
            }
        }
    }
}
