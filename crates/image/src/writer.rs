//! Writes an image: pages as they come, then, in one piece, everything else.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use abi::spans::Ranges;
use store::{Claim, NewObject, Store};

use crate::ancestors::current;
use crate::clear;
use crate::draft::{self, Draft};
use crate::manifest::{EQUAL_FEATURE, Manifest, PARENT_FEATURE, PARTS_FEATURE, UNUSED_FEATURE};
use crate::marks;
use crate::order;
use crate::parent::{self, Lineage, Link, ParentImage};
use crate::parts::PARTS_MAX;
use crate::table::{ChunkUsage, Table};
use crate::unused::{self, ObjectUsage};
use crate::{
    Compression, Error, Facts, Granule, ImageId, MANIFEST_NAME, NewSpace, Reader, Record, Result,
    Run, RunKind, SpaceId, SpaceKind,
};

/// An image under construction; several threads may add to it. Dropped before [`Writer::seal`], it
/// leaves nothing, and an image that was in the store before stays as it was.
pub struct Writer {
    store: Arc<dyn Store>,
    id: ImageId,
    /// The image that this one is a layer over.
    parent: Option<ParentImage>,
    pub(crate) table: Mutex<Table>,
    /// The pages objects by number, each made with its first page.
    pub(crate) parts: [OnceLock<Part>; PARTS_MAX],
    making_parts: Mutex<()>,
    pub(crate) runs: Mutex<Vec<Run>>,
    /// How its chunks are compressed.
    pub(crate) compression: Option<Compression>,
    /// Spaces, as they were described.
    spaces: Mutex<BTreeMap<SpaceId, NewSpace>>,
    records: Mutex<Vec<Record>>,
    /// Set where a write failed: there is a hole in the pages.
    pub(crate) incomplete: AtomicBool,
    /// The pages of the image that this one replaces, and others that nothing names.
    old_pages: Vec<String>,
    /// True if there is an image that this one replaces.
    replaces: bool,
    /// Keeps other writers out; dropped last.
    _claim: Claim,
}

/// A pages object under construction.
pub(crate) struct Part {
    pub object: Box<dyn NewObject>,
    /// Offset of the next chunk.
    pub bytes: AtomicU64,
}

impl Part {
    /// Gives up what is not used.
    fn keep(self, used: &ObjectUsage) -> store::Result<Box<dyn NewObject>> {
        if self.bytes.into_inner() > used.len_bytes {
            self.object.cut(used.len_bytes)?;
        }
        if !used.holes.is_empty() {
            self.object.free(&used.holes)?;
        }
        Ok(self.object)
    }
}

/// How an image is finished.
#[derive(Clone, Debug, Default)]
pub struct Seal {
    /// True if the image must be on stable storage before [`Writer::seal`] returns.
    pub durable: bool,
    /// Facts about its creation.
    pub facts: Facts,
}

/// Takes the lock; each holder changes the value by one push, so a panic leaves it whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writer {
    /// Starts an image in `store`, which it will have to itself: at most one image is in a store.
    /// Removes pages that a killed writer left there.
    ///
    /// # Errors
    /// [`Error::Random`]; [`Error::Needed`] where another image has pages from the one that is in
    /// `store`; [`Error::Store`], also where another writer is at work.
    pub fn create(store: Arc<dyn Store>) -> Result<Self> {
        Self::start(store, None)
    }

    /// Like [`Writer::create`], for a layer: an image that may have pages of `parent`, which is in
    /// another place, from [`Writer::inherit`].
    ///
    /// # Errors
    /// Like [`Writer::create`]; [`Error::Ancestor`] where `link` does not lead to `parent`.
    pub fn create_layer(store: Arc<dyn Store>, parent: Arc<Reader>, link: Link) -> Result<Self> {
        let (id, path) = (parent.id(), link.to_parent.clone());
        let wrong = |what: String, source: Option<store::Error>| Error::Ancestor {
            id,
            path: path.clone(),
            what,
            source: source.map(Box::new),
        };
        let place = store
            .beside(&path)
            .map_err(|source| wrong("cannot be opened".into(), Some(source)))?;
        if current(&*place) != Some(id) {
            return Err(wrong("is not there".into(), None));
        }
        if current(&*store) == Some(id) {
            return Err(wrong("is in the very place of this one".into(), None));
        }
        let parent = ParentImage {
            reader: parent,
            link,
            store: place,
        };
        Self::start(store, Some(parent))
    }

    fn start(store: Arc<dyn Store>, parent: Option<ParentImage>) -> Result<Self> {
        let mut id = [0; 16];
        let drawn = rustix::rand::getrandom(&mut id[..], rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::Random(errno.into()))?;
        assert_eq!(
            drawn,
            id.len(),
            "getrandom(2) never returns less of so little"
        );
        let claim = store.claim().map_err(Error::store("claim the place of"))?;
        let replaces = claim.names.iter().any(|name| name == MANIFEST_NAME);
        let earlier = replaces.then(|| current(&*store)).flatten();
        marks::refuse_if_needed(&*store, &claim, earlier)?;
        let old_pages = clear::leftovers(&*store, &claim);
        Ok(Self {
            store,
            id: ImageId(id),
            parent,
            table: Mutex::default(),
            parts: Default::default(),
            making_parts: Mutex::default(),
            runs: Mutex::default(),
            compression: None,
            spaces: Mutex::default(),
            records: Mutex::default(),
            incomplete: AtomicBool::new(false),
            old_pages,
            replaces,
            _claim: claim,
        })
    }

    /// Has chunks that are stored from now on compressed, where that pays.
    pub fn compress(&mut self, compression: Option<Compression>) {
        self.compression = compression;
    }

    /// Returns the image's identity.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// Tells the store that about `pages_bytes` of pages will be appended.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn reserve(&self, pages_bytes: u64) -> Result<()> {
        if pages_bytes == 0 {
            return Ok(());
        }
        self.part(0)?
            .object
            .reserve(pages_bytes)
            .map_err(Error::store("reserve space for"))
    }

    /// Describes pages in the image that [`Writer::store`] has stored, or zero pages.
    pub fn describe(&self, stored: impl IntoIterator<Item = Run>) {
        lock(&self.runs).extend(stored);
    }

    /// Notes the fate of pages that are not stored: zero, or the same as in another space. Whether
    /// the run fits to the others is checked by [`Writer::seal`].
    ///
    /// # Panics
    /// For pages of chunks: those come from [`Writer::append`] and [`Writer::inherit`] alone.
    pub fn mark(&self, run: Run) {
        assert!(
            run.part().is_none(),
            "pages are appended or inherited, not marked"
        );
        lock(&self.runs).push(run);
    }

    /// Notes that pages of a space are zero, however many they are.
    pub fn mark_zero(&self, space: SpaceId, pages: Range<u64>) {
        let mut first_page = pages.start;
        while first_page < pages.end {
            let pages = (pages.end - first_page).min(u64::from(u32::MAX)) as u32;
            self.mark(Run {
                space,
                first_page,
                pages,
                kind: RunKind::Zero,
            });
            first_page += u64::from(pages);
        }
    }

    /// Says what a space is. One of which nothing is said is the memory of a task, and as long as
    /// its last run makes it.
    pub fn space(&self, space: NewSpace) {
        lock(&self.spaces).insert(space.id, space);
    }

    /// Notes that pages are unchanged since the parent, which must describe all of them.
    ///
    /// # Errors
    /// [`Error::BadRun`] for a page that the parent does not describe, or where there is no parent.
    pub fn inherit(&self, space: SpaceId, first_page: u64, pages: u64) -> Result<()> {
        let wanted = first_page..first_page.saturating_add(pages);
        let (runs, described) = self.parents(space, std::slice::from_ref(&wanted))?;
        if described.iter().eq([&wanted]) {
            lock(&self.runs).extend(runs);
            return Ok(());
        }
        let known = described.iter().find(|known| known.start == first_page);
        let page = known.map_or(first_page, |known| known.end);
        let what = "the parent does not describe it".into();
        Err(Error::BadRun { space, page, what })
    }

    /// Notes that of the pages of `ranges`, which are in ascending order and do not overlap, those
    /// that the parent describes are unchanged since; returns which those are. It takes one pass
    /// over the parent's runs.
    ///
    /// # Errors
    /// [`Error::BadRun`] where there is no parent, [`Error::Freed`], [`Error::TooLarge`].
    pub fn inherit_described(&self, space: SpaceId, ranges: &[Range<u64>]) -> Result<Ranges<u64>> {
        let (runs, described) = self.parents(space, ranges)?;
        lock(&self.runs).extend(runs);
        Ok(described)
    }

    /// Returns the runs for what the parent describes of `ranges`, and which pages those are.
    fn parents(&self, space: SpaceId, ranges: &[Range<u64>]) -> Result<(Vec<Run>, Ranges<u64>)> {
        let Some(parent) = &self.parent else {
            let what = "there is no parent to have it from".into();
            let page = ranges.first().map_or(0, |range| range.start);
            return Err(Error::BadRun { space, page, what });
        };
        parent.inherit(&self.table, space, ranges)
    }

    pub(crate) fn parent_image(&self) -> Option<&ParentImage> {
        self.parent.as_ref()
    }

    /// Returns the image that this one is a layer over.
    pub fn parent(&self) -> Option<&Arc<Reader>> {
        self.parent.as_ref().map(|parent| &parent.reader)
    }

    /// Adds a record; records are read in the order in which they were added.
    ///
    /// # Panics
    /// Where the tag is 0, which stands for no record.
    pub fn record(&self, record: Record) {
        assert_ne!(record.tag, 0, "a record has a tag");
        lock(&self.records).push(record);
    }

    /// Finishes the image: it is whole, or the store is as it was before. An image that was in the
    /// store is replaced at the last moment, and its pages removed afterwards.
    ///
    /// # Errors
    /// [`Error::BadRun`] where runs overlap or refer to pages that are not there,
    /// [`Error::Incomplete`] after a failed write, [`Error::TooLarge`], [`Error::Store`].
    pub fn seal(self, seal: Seal) -> Result<ImageId> {
        self.seal_after(seal, |_| Ok(Vec::new()))
    }

    /// As [`Writer::seal`], once `check` has looked at the image as readers are going to see it;
    /// only its own pages cannot be read yet. The image has the records that `check` returns, too.
    ///
    /// # Errors
    /// Those of [`Writer::seal`], and those of `check`; the store is as it was before.
    pub fn seal_after<E: From<Error>>(
        mut self,
        seal: Seal,
        check: impl FnOnce(&Reader) -> std::result::Result<Vec<Record>, E>,
    ) -> std::result::Result<ImageId, E> {
        let draft = self.draft(seal.facts)?;
        let more = check(draft.reader())?;
        Ok(self.publish(draft, more, seal.durable)?)
    }

    /// Has `check` look at the image as [`Writer::seal_after`] does, and gives it up.
    ///
    /// # Errors
    /// Those of [`Writer::seal`], and those of `check`.
    pub fn check<T, E: From<Error>>(
        mut self,
        check: impl FnOnce(&Reader) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        check(self.draft(Facts::default())?.reader())
    }

    /// Gives the image its names.
    fn publish(mut self, draft: Draft, more: Vec<Record>, durable: bool) -> Result<ImageId> {
        let inherits = draft.reader().parent().is_some();
        let (manifest, used) = draft.encode(more)?;
        let parent = self.parent.take().filter(|_| inherits);
        let mut names = Vec::new();
        let parts = std::mem::take(&mut self.parts).into_iter().enumerate();
        for (number, part) in parts.filter_map(|(number, part)| Some((number, part.into_inner()?)))
        {
            // One without pages has no name, and goes.
            let Some(used) = used.get(number).filter(|used| used.len_bytes > 0) else {
                continue;
            };
            let committed = part.keep(used).and_then(|object| object.commit(durable));
            if let Err(error) = committed.map_err(Error::store("finish the pages of")) {
                self.remove(&names);
                return Err(error);
            }
            names.push(self.id.pages_part_name(number));
        }
        let marked = parent
            .as_ref()
            .map_or(Ok(()), |parent| marks::add(parent, self.id, durable));
        // Before and after: who changes the parent looks for its children afterwards.
        let same = || parent.as_ref().map_or(Ok(()), ParentImage::check_same);
        let published = marked
            .and_then(|()| same())
            .and_then(|()| self.write_manifest(&manifest, durable));
        let published = published.and_then(|()| {
            same().inspect_err(|_| {
                // The next writer tries again.
                let _ = self.store.remove(MANIFEST_NAME);
            })
        });
        if let Err(error) = published {
            // It may have failed after the manifest got its name: then the pages belong to it.
            if current(&*self.store) != Some(self.id) {
                self.remove(&names);
                if let Some(parent) = &parent {
                    marks::remove(parent, self.id);
                }
            }
            return Err(error);
        }
        if parent.is_some() || self.replaces {
            let path = parent.as_ref().map(|parent| parent.link.to_parent.as_str());
            // As criu(8) does; no reader needs it.
            let _ = self.store.point("parent", path);
        }
        for name in &self.old_pages {
            // The new image is whole without this; the next writer tries again.
            let _ = self.store.remove(name);
        }
        Ok(self.id)
    }

    /// Returns pages object `number`, made at the first call.
    pub(crate) fn part(&self, number: usize) -> Result<&Part> {
        let part = &self.parts[number];
        let _making = part.get().is_none().then(|| lock(&self.making_parts));
        if let Some(part) = part.get() {
            return Ok(part);
        }
        let object = self
            .store
            .create(&self.id.pages_part_name(number))
            .map_err(Error::store("create the pages of"))?;
        let bytes = AtomicU64::new(0);
        Ok(part.get_or_init(|| Part { object, bytes }))
    }

    /// Removes objects of an image that did not come to be; what fails, the next writer does.
    fn remove(&self, names: &[String]) {
        for name in names {
            let _ = self.store.remove(name);
        }
    }

    /// Puts together everything but the contents of the pages.
    fn draft(&mut self, facts: Facts) -> Result<Draft> {
        if self.incomplete.load(Relaxed) {
            return Err(Error::Incomplete { id: self.id });
        }
        let records = std::mem::take(&mut *lock(&self.records));
        let mut runs = std::mem::take(&mut *lock(&self.runs));
        let mut table = std::mem::take(&mut *lock(&self.table));
        let uses = ChunkUsage::new(&table, &runs);
        self.shrink(&mut table, &uses, &mut runs)?;
        self.compact(&mut table, &uses)?;
        let Lineage {
            parent,
            ancestors,
            chunks,
        } = parent::lineage(self.parent.as_ref(), table, &uses, &mut runs)?;
        let runs = order::in_order(runs);
        let spaces = spaces(std::mem::take(&mut *lock(&self.spaces)), &runs);
        let used = unused::used(chunks.iter());
        let parts_bytes = used.iter().map(|part| part.len_bytes).collect::<Vec<_>>();
        let unused_bytes = used.iter().map(ObjectUsage::unused_bytes).sum();
        let features = [
            (parts_bytes.len() > 1, PARTS_FEATURE),
            (parent.is_some(), PARENT_FEATURE),
            (uses.is_shared, EQUAL_FEATURE),
            (unused_bytes > 0, UNUSED_FEATURE),
        ];
        let features = features.into_iter().filter(|(used, _)| *used);
        let mut features = features.map(|(_, name)| name).collect::<Vec<_>>();
        for name in chunks.iter().filter_map(|chunk| chunk.codec.feature()) {
            if !features.contains(&name) {
                features.push(name);
            }
        }
        let manifest = Manifest {
            features: features.into_iter().map(str::to_owned).collect(),
            parent,
            ancestors,
            facts: Some(facts),
            pages_bytes: parts_bytes[0],
            more_pages_bytes: parts_bytes[1..].to_vec(),
            records: 0,
            unused_bytes,
            freed_by: Vec::new(),
        };
        let parts = draft::Parts {
            manifest,
            records,
            spaces,
            runs,
            chunks,
            used,
        };
        Draft::new(&*self.store, self.id, parts)
    }

    fn write_manifest(&self, manifest: &[u8], durable: bool) -> Result<()> {
        let object = self.store.create(MANIFEST_NAME);
        let object = object.map_err(Error::store("create the manifest of"))?;
        object
            .write_at(manifest, 0)
            .map_err(Error::store("write the manifest of"))?;
        object
            .commit(durable)
            .map_err(Error::store("finish the manifest of"))
    }
}

/// All spaces of `runs`, which are in order, and those of which something was said.
fn spaces(mut said: BTreeMap<SpaceId, NewSpace>, runs: &[Run]) -> Vec<NewSpace> {
    for of_one in runs.chunk_by(|one, next| one.space == next.space) {
        let last = of_one[of_one.len() - 1];
        said.entry(last.space).or_insert_with(|| NewSpace {
            id: last.space,
            kind: SpaceKind::Memory,
            name: String::new(),
            len_pages: last.end_page(),
            granule: Granule::Small,
        });
    }
    said.into_values().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use store::{Memory, Object};

    use super::*;
    use crate::{NewRun, PAGE_BYTES, Reader, RunKind, SpaceId, remove};

    const SPACE: SpaceId = SpaceId(1);

    fn zero(first_page: u64, pages: u32) -> Run {
        Run {
            space: SPACE,
            first_page,
            pages,
            kind: RunKind::Zero,
        }
    }

    fn new_run(first_page: u64, pages: u32) -> NewRun {
        NewRun {
            space: SPACE,
            first_page,
            pages,
        }
    }

    #[test]
    fn what_is_checked_is_what_is_sealed() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer
            .append(&[1; 2 * PAGE_BYTES], &[new_run(5, 2)])
            .unwrap();
        writer.mark(zero(7, 3));
        let record = |tag| Record {
            tag,
            version: 1,
            id: 2,
            payload: vec![3],
        };
        writer.record(record(1));
        let mut seen = None;
        let check = |draft: &Reader| {
            let runs = draft.runs(SPACE).collect::<Vec<_>>();
            seen = Some((draft.id(), runs, draft.records().to_vec()));
            Ok::<_, Error>(vec![record(4)])
        };
        let id = writer.seal_after(Seal::default(), check).unwrap();
        let reader = Reader::open(&*store).unwrap();
        let (seen_id, runs, records) = seen.unwrap();
        assert_eq!((seen_id, reader.id()), (id, id));
        assert_eq!(runs, reader.runs(SPACE).collect::<Vec<_>>());
        assert_eq!(records, [record(1)]);
        assert_eq!(reader.records(), [record(1), record(4)]);
    }

    #[test]
    fn what_fails_its_check_was_never_there() {
        let store = Arc::new(Memory::default());
        let first = Writer::create(store.clone()).unwrap();
        first.append(&[1; PAGE_BYTES], &[new_run(5, 1)]).unwrap();
        let id = first.seal(Seal::default()).unwrap();
        let names = || {
            let mut names = store.list().unwrap();
            names.sort();
            names
        };
        let before = names();
        let writer = Writer::create(store.clone()).unwrap();
        writer.append(&[2; PAGE_BYTES], &[new_run(5, 1)]).unwrap();
        let check = |_: &Reader| {
            Err(Error::TooLarge {
                of: "tests",
                limit: 0,
            })
        };
        let error = writer.seal_after(Seal::default(), check).unwrap_err();
        assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        assert_eq!(names(), before);
        assert_eq!(Reader::open(&*store).unwrap().id(), id);
    }

    #[test]
    fn an_image_without_pages_is_one_object() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer.append(&[], &[]).unwrap();
        writer.reserve(0).unwrap();
        writer.mark(zero(0, 5));
        writer.seal(Seal::default()).unwrap();
        assert_eq!(store.list().unwrap(), [MANIFEST_NAME]);
    }

    #[test]
    fn a_new_image_takes_the_place_of_the_old_one() {
        let store = Arc::new(Memory::default());
        for _ in 0..3 {
            let writer = Writer::create(store.clone()).unwrap();
            writer.append(&[3; PAGE_BYTES], &[new_run(0, 1)]).unwrap();
            let id = writer.seal(Seal::default()).unwrap();
            assert_eq!(
                store.list().unwrap(),
                [MANIFEST_NAME.to_owned(), id.pages_name()]
            );
        }
    }

    #[test]
    fn an_image_is_removed_with_its_pages_and_no_other() {
        let store = Arc::new(Memory::default());
        let [first, second] = [1, 2].map(|page| {
            let writer = Writer::create(store.clone()).unwrap();
            writer
                .append(&[page; PAGE_BYTES], &[new_run(0, 1)])
                .unwrap();
            writer.seal(Seal::default()).unwrap()
        });
        remove(&*store, first).unwrap();
        assert_eq!(Reader::open(&*store).unwrap().id(), second);
        remove(&*store, second).unwrap();
        assert_eq!(store.list().unwrap(), Vec::<String>::new());
        remove(&*store, second).unwrap();
    }

    #[test]
    fn what_killed_writers_left_is_removed_and_nothing_else() {
        let store = Arc::new(Memory::default());
        let put = |name: &str, bytes: &[u8]| {
            let object = store.create(name).unwrap();
            object.write_at(bytes, 0).unwrap();
            object.commit(false).unwrap();
        };
        let stray = ImageId([7; 16]).pages_name();
        put("dump.log", b"");
        put("pages-1.img", b"of another program");
        put(&stray, b"");
        let writer = Writer::create(store.clone()).unwrap();
        assert_eq!(store.list().unwrap(), ["dump.log", "pages-1.img"]);
        writer.append(&[3; PAGE_BYTES], &[new_run(0, 1)]).unwrap();
        let id = writer.seal(Seal::default()).unwrap();
        put(&stray, b"");
        drop(Writer::create(store.clone()).unwrap());
        let mut whole = ["dump.log", MANIFEST_NAME, "pages-1.img", &id.pages_name()];
        whole.sort_unstable();
        assert_eq!(store.list().unwrap(), whole);
        // Pages beside a manifest that cannot be read stay until another image takes their place.
        put(MANIFEST_NAME, b"torn");
        drop(Writer::create(store.clone()).unwrap());
        assert_eq!(store.list().unwrap(), whole);
        let writer = Writer::create(store.clone()).unwrap();
        writer.seal(Seal::default()).unwrap();
        assert_eq!(
            store.list().unwrap(),
            ["dump.log", MANIFEST_NAME, "pages-1.img"]
        );
    }

    #[test]
    fn pages_are_stored_again_until_they_are_described() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let page = |byte: u8| [byte; PAGE_BYTES];
        let bytes: Vec<u8> = [1, 2, 3, 4].iter().flat_map(|byte| page(*byte)).collect();
        let stored = writer.store(2, &bytes, &[new_run(0, 1), new_run(16, 2), new_run(32, 1)]);
        let [first, second, last] = stored.unwrap()[..] else {
            panic!("three runs")
        };
        // Half of the room is used again, the first run's not at all.
        let chunk = second.part().unwrap().chunk;
        let again = writer.store_again(chunk, &page(7), &[new_run(6, 1)]);
        writer.describe(again.unwrap());
        writer.describe([last]);
        writer.append(&page(8), &[new_run(0, 1)]).unwrap();
        writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(2).unwrap();
        for (number, byte) in [(0, 8), (6, 7), (32, 4)] {
            let mut bytes = page(0);
            reader.read_pages(SPACE, number, &mut bytes).unwrap();
            assert_eq!(bytes, page(byte));
        }
        assert_eq!(first.pages, 1);
        let mut bytes = page(0);
        assert!(reader.read_pages(SPACE, 5, &mut bytes).is_err());
    }

    #[test]
    fn threads_write_side_by_side() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer.reserve(4096).unwrap();
        std::thread::scope(|scope| {
            for part in [1, 3] {
                let writer = &writer;
                scope.spawn(move || {
                    for page in 0..50 {
                        let page = page * 4 + part as u64;
                        let bytes = [page as u8; PAGE_BYTES];
                        writer.append_to(part, &bytes, &[new_run(page, 1)]).unwrap();
                    }
                });
            }
        });
        let id = writer.seal(Seal::default()).unwrap();
        let names = [1, 3].map(|part| id.pages_part_name(part));
        assert_eq!(store.list().unwrap()[1..], names);
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(2).unwrap();
        for page in (0..50).flat_map(|page| [page * 4 + 1, page * 4 + 3]) {
            let mut bytes = [0; PAGE_BYTES];
            reader.read_pages(SPACE, page, &mut bytes).unwrap();
            assert_eq!(bytes, [page as u8; PAGE_BYTES]);
        }
        // A part that is gone is missed by name, and the next image takes all of them away.
        let writer = Writer::create(store.clone()).unwrap();
        store.remove(&names[1]).unwrap();
        let error = Reader::open(&*store).err().unwrap();
        assert!(error.to_string().contains(&names[1]), "{error}");
        writer.seal(Seal::default()).unwrap();
        assert_eq!(store.list().unwrap(), [MANIFEST_NAME]);
    }

    #[test]
    fn one_writer_at_a_time() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let Err(Error::Store { source, .. }) = Writer::create(store.clone()) else {
            panic!("two writers")
        };
        assert!(matches!(source, store::Error::Busy { .. }), "{source}");
        writer.seal(Seal::default()).unwrap();
        drop(Writer::create(store).unwrap());
    }

    #[test]
    fn a_dropped_writer_leaves_the_old_image() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer.append(&[3; PAGE_BYTES], &[new_run(0, 1)]).unwrap();
        let id = writer.seal(Seal::default()).unwrap();
        let writer = Writer::create(store.clone()).unwrap();
        writer.append(&[4; PAGE_BYTES], &[new_run(0, 1)]).unwrap();
        drop(writer);
        assert_eq!(store.list().unwrap().len(), 2);
        let reader = Reader::open(&*store).unwrap();
        assert_eq!(reader.id(), id);
        reader.verify_all(1).unwrap();
    }

    #[test]
    fn long_runs_are_split_and_marks_are_joined() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let bytes: Vec<u8> = (0..600 * PAGE_BYTES).map(|at| (at / 999) as u8).collect();
        writer
            .append(&bytes, &[new_run(0, 1), new_run(10, 599)])
            .unwrap();
        for page in [1, 3, 2] {
            writer.mark(zero(page, 1));
        }
        writer.mark(zero(5, u32::MAX - 4));
        writer.mark(zero(1 << 40, u32::MAX));
        writer.mark(zero((1 << 40) + u64::from(u32::MAX), 1));
        let error = writer.seal(Seal::default()).unwrap_err();
        assert!(matches!(error, Error::BadRun { page: 10, .. }), "{error}");

        let writer = Writer::create(store.clone()).unwrap();
        writer
            .append(&bytes, &[new_run(0, 1), new_run(10, 599)])
            .unwrap();
        for page in [1, 3, 2] {
            writer.mark(zero(page, 1));
        }
        writer.mark(zero(1 << 40, u32::MAX));
        writer.mark(zero((1 << 40) + u64::from(u32::MAX), 1));
        writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        let runs: Vec<_> = reader
            .runs(SPACE)
            .map(|run| (run.first_page, run.pages))
            .collect();
        let far = (1 << 40, u32::MAX);
        let last = ((1 << 40) + u64::from(u32::MAX), 1);
        let long = (16..608).step_by(16).map(|page| (page, 16));
        let expected = [(0, 1), (1, 3), (10, 6)].into_iter().chain(long);
        let expected = expected.chain([(608, 1), far, last]);
        assert_eq!(runs, expected.collect::<Vec<_>>());
        let mut read = vec![0; 599 * PAGE_BYTES];
        reader.read_pages(SPACE, 10, &mut read).unwrap();
        assert_eq!(read, bytes[PAGE_BYTES..]);
    }

    #[test]
    fn runs_that_overlap_are_refused_and_leave_nothing() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        writer.append(&[3; PAGE_BYTES], &[new_run(4, 1)]).unwrap();
        writer.mark(zero(3, 2));
        let error = writer.seal(Seal::default()).unwrap_err();
        assert!(
            matches!(
                error,
                Error::BadRun {
                    space: SPACE,
                    page: 4,
                    ..
                }
            ),
            "{error}"
        );
        assert!(store.list().unwrap().is_empty());
    }

    #[test]
    fn threads_append_to_one_image() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_u8 {
                let writer = &writer;
                scope.spawn(move || {
                    for part in 0..20 {
                        let first_page = u64::from(thread) * 100 + part * 3;
                        writer
                            .append(&[thread; 2 * PAGE_BYTES], &[new_run(first_page, 2)])
                            .unwrap();
                    }
                });
            }
        });
        writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(3).unwrap();
        let pages = reader.runs(SPACE).map(|run| run.pages);
        assert_eq!(pages.sum::<u32>(), 320);
        for run in reader.runs(SPACE) {
            let mut bytes = vec![0; run.len_bytes() as usize];
            let read = reader.read_pages(SPACE, run.first_page, &mut bytes);
            read.unwrap();
            assert!(
                bytes
                    .iter()
                    .all(|&byte| u64::from(byte) == run.first_page / 100)
            );
        }
    }

    /// A memory store whose operations that can fail do so from the `fail_at`-th on.
    struct FailingStore {
        store: Memory,
        count: Arc<AtomicUsize>,
        fail_at: usize,
    }

    struct FailingObject {
        object: Box<dyn NewObject>,
        count: Arc<AtomicUsize>,
        fail_at: usize,
    }

    fn step(count: &AtomicUsize, fail_at: usize) -> store::Result<()> {
        if count.fetch_add(1, Relaxed) < fail_at {
            return Ok(());
        }
        let source = std::io::ErrorKind::StorageFull.into();
        Err(store::Error::System {
            action: "try",
            name: "it".into(),
            store: "here".into(),
            source,
        })
    }

    impl Store for FailingStore {
        fn claim(&self) -> store::Result<Claim> {
            self.store.claim()
        }
        fn create(&self, name: &str) -> store::Result<Box<dyn NewObject>> {
            step(&self.count, self.fail_at)?;
            let object = self.store.create(name)?;
            Ok(Box::new(FailingObject {
                object,
                count: Arc::clone(&self.count),
                fail_at: self.fail_at,
            }))
        }
        fn open(&self, name: &str) -> store::Result<Box<dyn Object>> {
            self.store.open(name)
        }
        fn list(&self) -> store::Result<Vec<String>> {
            self.store.list()
        }
        fn beside(&self, path: &str) -> store::Result<Arc<dyn Store>> {
            self.store.beside(path)
        }
        fn handle(&self) -> Arc<dyn Store> {
            self.store.handle()
        }
        fn remove(&self, name: &str) -> store::Result<()> {
            self.store.remove(name)
        }
        fn place(&self) -> String {
            self.store.place()
        }
    }

    impl NewObject for FailingObject {
        fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.write_at(bytes, offset_bytes)
        }
        fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.read_at(bytes, offset_bytes)
        }
        fn reserve(&self, len_bytes: u64) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.reserve(len_bytes)
        }
        fn free(&self, parts_bytes: &[Range<u64>]) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.free(parts_bytes)
        }
        fn cut(&self, len_bytes: u64) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.cut(len_bytes)
        }
        fn commit(self: Box<Self>, durable: bool) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.commit(durable)
        }
    }

    #[test]
    fn any_failure_leaves_the_old_image() {
        let memory = Memory::default();
        let write = |fail_at| -> Result<ImageId> {
            let count = Arc::default();
            let writer = Writer::create(Arc::new(FailingStore {
                store: memory.clone(),
                count,
                fail_at,
            }))?;
            let _ = writer.reserve(8192);
            // A dump that goes on after a failed append must not get an image with a hole.
            let _ = writer.append(&[fail_at as u8; PAGE_BYTES], &[new_run(0, 1)]);
            let _ = writer.append(&[5; PAGE_BYTES], &[new_run(1, 1)]);
            // Room that is not used, between pages and at the end.
            let _ = writer.store(0, &[6; 2 * PAGE_BYTES], &[new_run(2, 2)]);
            let _ = writer.append(&[7; 3 * PAGE_BYTES], &[new_run(4, 3)]);
            let _ = writer.append(&[8; PAGE_BYTES], &[new_run(7, 1)]);
            let _ = writer.store(0, &[9; PAGE_BYTES], &[new_run(8, 1)]);
            writer.seal(Seal {
                durable: true,
                ..Seal::default()
            })
        };
        let mut id = write(usize::MAX).unwrap();
        let mut failures = 0;
        for fail_at in 0.. {
            let result = write(fail_at);
            let reader = Reader::open(&memory).unwrap();
            reader.verify_all(1).unwrap();
            assert_eq!(
                memory.list().unwrap(),
                [MANIFEST_NAME.to_owned(), reader.id().pages_name()]
            );
            if let Ok(new) = result {
                id = new;
            }
            assert_eq!(reader.id(), id);
            if result.is_ok() {
                break;
            }
            failures += 1;
        }
        assert_eq!(
            failures, 16,
            "create, reserve, six writes, read, write, cut, free, commit; create, write, commit"
        );
    }
}
