//! Writes an image: pages as they come, then, in one piece, everything else.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use prost::Message;
use store::{Claim, NewObject, Store};
use xxhash_rust::xxh3::xxh3_64;

use crate::header::{self, MANIFEST_MAX_BYTES};
use crate::index::{self, Bounds};
use crate::manifest::{self, MESSAGE_MAX_BYTES, Manifest, RECORDS_MAX};
use crate::run::{self, DATA_RUN_MAX_PAGES, PAGE_BYTES};
use crate::{Error, Facts, ImageId, MANIFEST_NAME, NewRun, Record, Result, Run, RunKind};

/// An image under construction; several threads may add to it. Dropped before [`Writer::seal`], it
/// leaves nothing, and an image that was in the store before stays as it was.
pub struct Writer {
    store: Arc<dyn Store>,
    id: ImageId,
    /// Made with the first page.
    pages: OnceLock<Box<dyn NewObject>>,
    making_pages: Mutex<()>,
    /// Where the next run goes.
    pages_bytes: AtomicU64,
    runs: Mutex<Vec<Run>>,
    records: Mutex<Vec<Record>>,
    /// Set where a write failed: there is a hole in the pages.
    incomplete: AtomicBool,
    /// The pages of the image that this one replaces, and others that nothing names.
    old_pages: Vec<String>,
    /// Keeps other writers out; dropped last.
    _claim: Claim,
}

/// How an image is finished.
#[derive(Clone, Debug, Default)]
pub struct Seal {
    /// Whether the image must be on stable storage before [`Writer::seal`] returns.
    pub durable: bool,
    /// What to say about its creation.
    pub facts: Facts,
}

/// Takes the lock; each holder changes the value by one push, so a panic leaves it whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writer {
    /// Starts an image in `store`, which it will have to itself: at most one image is in a store.
    /// Removes pages that a killed writer left there.
    ///
    /// # Errors
    /// [`Error::Random`]; [`Error::Store`], also where another writer is at work.
    pub fn create(store: Arc<dyn Store>) -> Result<Self> {
        let mut id = [0; 16];
        let drawn = rustix::rand::getrandom(&mut id[..], rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::Random(errno.into()))?;
        assert_eq!(
            drawn,
            id.len(),
            "getrandom(2) never returns less of so little"
        );
        let claim = store.claim().map_err(Error::store("claim the place of"))?;
        let old_pages = sweep(&*store, &claim);
        Ok(Self {
            store,
            id: ImageId(id),
            pages: OnceLock::new(),
            making_pages: Mutex::default(),
            pages_bytes: AtomicU64::new(0),
            runs: Mutex::default(),
            records: Mutex::default(),
            incomplete: AtomicBool::new(false),
            old_pages,
            _claim: claim,
        })
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
        self.pages()?
            .reserve(pages_bytes)
            .map_err(Error::store("reserve space for"))
    }

    /// Stores `bytes`, the pages of `runs` back to back, with one write. Runs longer than
    /// [`DATA_RUN_MAX_PAGES`] are stored as several.
    ///
    /// # Errors
    /// [`Error::Store`]; then the image cannot be sealed any more.
    ///
    /// # Panics
    /// Where `bytes` are not as many as the runs' pages.
    pub fn append(&self, bytes: &[u8], runs: &[NewRun]) -> Result<()> {
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        assert_eq!(
            pages * PAGE_BYTES as u64,
            bytes.len() as u64,
            "each page has its bytes"
        );
        if bytes.is_empty() {
            return Ok(());
        }
        let start_bytes = self.pages_bytes.fetch_add(bytes.len() as u64, Relaxed);
        let written = self.pages().and_then(|pages| {
            pages
                .write_at(bytes, start_bytes)
                .map_err(Error::store("write pages of"))
        });
        if written.is_err() {
            self.incomplete.store(true, Relaxed);
            return written;
        }
        let stored = data_runs(bytes, runs, start_bytes);
        lock(&self.runs).extend(stored);
        Ok(())
    }

    /// Notes the fate of pages that are not stored: zero, or the same as in another space. Whether
    /// the run fits to the others is checked by [`Writer::seal`].
    ///
    /// # Panics
    /// For a data run: those come from [`Writer::append`] alone.
    pub fn mark(&self, run: Run) {
        assert!(
            !matches!(run.kind, RunKind::Data { .. }),
            "data is appended, not marked"
        );
        lock(&self.runs).push(run);
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
    pub fn seal(mut self, seal: Seal) -> Result<ImageId> {
        if self.incomplete.load(Relaxed) {
            return Err(Error::Incomplete { id: self.id });
        }
        let manifest = self.encode(seal.facts)?;
        let pages = self.pages.take();
        let has_pages = pages.is_some();
        if let Some(pages) = pages {
            pages
                .commit(seal.durable)
                .map_err(Error::store("finish the pages of"))?;
        }
        if let Err(error) = self.publish(&manifest, seal.durable) {
            // It may have failed after the manifest got its name: then the pages belong to it.
            if has_pages && current(&*self.store) != Some(self.id) {
                let _ = self.store.remove(&self.id.pages_name());
            }
            return Err(error);
        }
        for name in &self.old_pages {
            // The new image is whole without this; the next writer tries again.
            let _ = self.store.remove(name);
        }
        Ok(self.id)
    }

    /// Returns the object for pages, made at the first call.
    fn pages(&self) -> Result<&dyn NewObject> {
        let _making = self.pages.get().is_none().then(|| lock(&self.making_pages));
        if let Some(pages) = self.pages.get() {
            return Ok(&**pages);
        }
        let pages = self
            .store
            .create(&self.id.pages_name())
            .map_err(Error::store("create the pages of"))?;
        Ok(&**self.pages.get_or_init(|| pages))
    }

    /// Encodes the whole manifest: header, index, manifest, records.
    fn encode(&mut self, facts: Facts) -> Result<Vec<u8>> {
        let records = std::mem::take(&mut *lock(&self.records));
        if records.len() > RECORDS_MAX {
            return Err(Error::TooLarge {
                of: "records",
                limit: RECORDS_MAX as u64,
            });
        }
        let pages_bytes = *self.pages_bytes.get_mut();
        let runs = in_order(std::mem::take(&mut *lock(&self.runs)));
        let index: Vec<u8> = runs.iter().flat_map(run::encode).collect();
        let bounds = Bounds {
            pages_bytes,
            parent: false,
        };
        index::check(index::entries(&index), bounds).map_err(|fault| Error::BadRun {
            space: fault.space,
            page: fault.first_page,
            what: fault.what,
        })?;
        let manifest = Manifest {
            features: Vec::new(),
            parent: None,
            facts: Some(facts),
            pages_bytes,
            records: records.len() as u64,
        };
        let manifest = manifest.encode_to_vec();
        if manifest.len() > MESSAGE_MAX_BYTES {
            return Err(Error::TooLarge {
                of: "bytes of facts",
                limit: MESSAGE_MAX_BYTES as u64,
            });
        }
        let records = manifest::encode_records(records);
        let sections = [&index[..], &manifest, &records];
        let mut bytes = header::encode(self.id, sections);
        let len = bytes.len() + sections.iter().map(|section| section.len()).sum::<usize>();
        if len as u64 > MANIFEST_MAX_BYTES {
            return Err(Error::TooLarge {
                of: "bytes of manifest",
                limit: MANIFEST_MAX_BYTES,
            });
        }
        bytes.reserve_exact(len - bytes.len());
        sections
            .iter()
            .for_each(|section| bytes.extend_from_slice(section));
        Ok(bytes)
    }

    fn publish(&self, manifest: &[u8], durable: bool) -> Result<()> {
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

/// Returns the identity of the image in the store, where there is one that says.
fn current(store: &dyn Store) -> Option<ImageId> {
    let manifest = store.open(MANIFEST_NAME).ok()?;
    let mut prelude = [0; header::PRELUDE_BYTES];
    manifest.read_at(&mut prelude, 0).ok()?;
    header::decode_prelude(&prelude).ok()
}

/// Removes pages that belong to no image; returns the names of those that stay and that a new image
/// makes useless.
fn sweep(store: &dyn Store, claim: &Claim) -> Vec<String> {
    let has_image = claim.names.iter().any(|name| name == MANIFEST_NAME);
    let named = has_image
        .then(|| current(store))
        .flatten()
        .map(ImageId::pages_name);
    let mut old: Vec<String> = claim
        .names
        .iter()
        .filter(|name| is_pages_name(name))
        .cloned()
        .collect();
    // Without a lock, pages that nothing names may be those of another writer; beside a manifest
    // that cannot be read, its own.
    if claim.exclusive && (named.is_some() || !has_image) {
        for name in old.extract_if(.., |name| Some(&*name) != named.as_ref()) {
            // The next writer tries again.
            let _ = store.remove(&name);
        }
    } else if !claim.exclusive {
        old.retain(|name| Some(name) == named.as_ref());
    }
    old
}

/// Tells whether an object was named by [`ImageId::pages_name`].
fn is_pages_name(name: &str) -> bool {
    let id = name
        .strip_prefix("pages-")
        .and_then(|name| name.strip_suffix(".img"));
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Splits `runs`, whose pages are `bytes` stored at `start_bytes`, into data runs.
fn data_runs(bytes: &[u8], runs: &[NewRun], start_bytes: u64) -> Vec<Run> {
    let mut stored = Vec::with_capacity(runs.len());
    let mut at = 0;
    for run in runs {
        let mut done = 0;
        while done < run.pages {
            let pages = (run.pages - done).min(DATA_RUN_MAX_PAGES);
            let part = &bytes[at..at + pages as usize * PAGE_BYTES];
            let offset_bytes = start_bytes + at as u64;
            let kind = RunKind::Data {
                offset_bytes,
                checksum: xxh3_64(part),
            };
            let first_page = run.first_page.saturating_add(u64::from(done));
            stored.push(Run {
                space: run.space,
                first_page,
                pages,
                kind,
            });
            at += part.len();
            done += pages;
        }
    }
    stored
}

/// Sorts runs, and joins neighbours that need not be apart.
fn in_order(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_by_key(|run| (run.space, run.first_page));
    runs.dedup_by(|run, last| {
        let joins = (run.space, run.first_page, run.kind)
            == (last.space, last.end_page(), last.kind)
            && !matches!(run.kind, RunKind::Data { .. });
        match last.pages.checked_add(run.pages) {
            Some(pages) if joins => {
                last.pages = pages;
                true
            }
            _ => false,
        }
    });
    runs
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use store::{Memory, Object};

    use super::*;
    use crate::{Reader, SpaceId};

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
        let whole = ["dump.log", MANIFEST_NAME, "pages-1.img", &id.pages_name()];
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
        assert_eq!(
            runs,
            [(0, 1), (1, 3), (10, 256), (266, 256), (522, 87), far, last]
        );
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
        assert_eq!(reader.runs(SPACE).len(), 160);
        for run in reader.runs(SPACE) {
            let mut bytes = [0; 2 * PAGE_BYTES];
            reader.read(&run, &mut bytes).unwrap();
            assert!(
                bytes
                    .iter()
                    .all(|&byte| u64::from(byte) == run.first_page / 100)
            );
        }
    }

    /// A memory store whose operations that can fail do so from the `fail_at`-th on.
    struct Failing {
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

    impl Store for Failing {
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
        fn reserve(&self, len_bytes: u64) -> store::Result<()> {
            step(&self.count, self.fail_at)?;
            self.object.reserve(len_bytes)
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
            let writer = Writer::create(Arc::new(Failing {
                store: memory.clone(),
                count,
                fail_at,
            }))?;
            let _ = writer.reserve(8192);
            // A dump that goes on after a failed append must not get an image with a hole.
            let _ = writer.append(&[fail_at as u8; PAGE_BYTES], &[new_run(0, 1)]);
            let _ = writer.append(&[5; PAGE_BYTES], &[new_run(1, 1)]);
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
            failures, 8,
            "create, reserve, two writes, commit; create, write, commit"
        );
    }
}
