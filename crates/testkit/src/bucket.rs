//! A bucket with the faults of a network: each answer takes its time, some calls fail for now, and
//! of some that were done the answer is lost.
//!
//! Its objects are the files of a folder, so that several processes have the same ones; but it
//! gives out no descriptors, and takes only whole objects.
use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use store::{Bucket, Contents, Error, Result, Version};

/// How much is taken from who puts an object, at a time.
const PART_BYTES: usize = 1 << 20;

thread_local! {
    /// How many calls this thread has made.
    static CALLS_OF_THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The bucket.
pub struct FaultyBucket {
    folder: PathBuf,
    latency: Duration,
    /// Of so many calls of a thread one fails before it is done, and one when it is; 0 for none.
    fails_every: u64,
    calls: Arc<AtomicU64>,
}

impl FaultyBucket {
    /// The bucket in `folder`, which exists. Every call takes `latency`; of `fails_every` calls of
    /// a thread one fails, and one is done without an answer. So nobody fails for ever, as one of
    /// many threads in step would if all calls were counted together.
    #[must_use]
    pub fn new(folder: &Path, latency: Duration, fails_every: u64) -> Self {
        Self {
            folder: folder.to_owned(),
            latency,
            fails_every,
            calls: Arc::default(),
        }
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Makes a call that may fail.
    fn call<T>(
        &self,
        action: &'static str,
        name: &str,
        call: impl FnOnce() -> io::Result<T>,
    ) -> Result<T> {
        std::thread::sleep(self.latency);
        self.calls.fetch_add(1, Relaxed);
        let number = CALLS_OF_THREAD.replace(CALLS_OF_THREAD.get() + 1) + 1;
        let fails = |at| self.fails_every > 0 && number % self.fails_every == at;
        let for_now = |source: ErrorKind| Error::Transient {
            action,
            name: name.to_owned(),
            store: self.place(),
            source: source.into(),
        };
        if fails(1) {
            return Err(for_now(ErrorKind::ConnectionRefused));
        }
        let done = call().map_err(|source| match source.kind() {
            ErrorKind::NotFound => Error::Missing {
                name: name.to_owned(),
                store: self.place(),
            },
            _ => Error::System {
                action,
                name: name.to_owned(),
                store: self.place(),
                source,
            },
        });
        match fails(self.fails_every / 2) {
            true => Err(for_now(ErrorKind::TimedOut)),
            false => done,
        }
    }

    /// Where an object is under construction, and where it is then.
    fn paths(&self, name: &str) -> [PathBuf; 2] {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Relaxed);
        let new = format!(".new-{}-{serial}", std::process::id());
        [self.folder.join(new), self.folder.join(name)]
    }

    fn version(&self, name: &str) -> io::Result<(File, Version)> {
        let file = File::open(self.folder.join(name))?;
        let len_bytes = file.metadata()?.len();
        let mut bytes = vec![0; len_bytes as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let tag = format!("{:x}", xxhash_rust::xxh3::xxh3_64(&bytes));
        Ok((file, Version { len_bytes, tag }))
    }
}

impl Bucket for FaultyBucket {
    fn put(&self, name: &str, contents: &dyn Contents) -> Result<()> {
        let [new, named] = self.paths(name);
        let mut parts = Vec::new();
        let mut at = 0;
        while at < contents.len_bytes() {
            let len = (contents.len_bytes() - at).min(PART_BYTES as u64);
            let mut part = vec![0; len as usize];
            contents.read_at(&mut part, at)?;
            parts.push(part);
            at += len;
        }
        self.call("put", name, || {
            let mut file = File::create(&new)?;
            parts.iter().try_for_each(|part| file.write_all(part))?;
            fs::rename(&new, &named)
        })
    }

    fn head(&self, name: &str) -> Result<Version> {
        self.call("look at", name, || Ok(self.version(name)?.1))
    }

    fn get(
        &self,
        name: &str,
        version: &Version,
        bytes: &mut [u8],
        offset_bytes: u64,
    ) -> Result<()> {
        self.call("get", name, || {
            let (file, found) = self.version(name)?;
            if found != *version {
                return Err(ErrorKind::NotFound.into());
            }
            file.read_exact_at(bytes, offset_bytes)
        })
    }

    fn list(&self) -> Result<Vec<String>> {
        self.call("list", "objects", || {
            let entries = fs::read_dir(&self.folder)?;
            let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            let names = names.collect::<io::Result<Vec<_>>>()?;
            let names = names.into_iter();
            let is_object =
                |name: &String| !name.starts_with('.') && self.folder.join(name).is_file();
            Ok(names.filter(is_object).collect())
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.call("remove", name, || fs::remove_file(self.folder.join(name)))
    }

    fn beside(&self, path: &str) -> Result<Arc<dyn Bucket>> {
        let folder = self.folder.join(path);
        self.call("open", path, || fs::read_dir(&folder).map(drop))?;
        Ok(Arc::new(Self {
            folder,
            calls: Arc::clone(&self.calls),
            ..*self
        }))
    }

    fn way_to(&self, place: &str) -> Result<String> {
        store::way(&self.folder, Path::new(place))
    }

    fn place(&self) -> String {
        self.folder.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use store::{Memory, Patience, Remote, Store};

    use super::*;

    #[test]
    fn a_store_that_fails_now_and_then_conforms() {
        let folders = tempfile::tempdir().unwrap();
        let next = AtomicU64::new(0);
        store::conformance::suite(&|| {
            let folder = folders.path().join(next.fetch_add(1, Relaxed).to_string());
            fs::create_dir(&folder).unwrap();
            let bucket = FaultyBucket::new(&folder, Duration::ZERO, 4);
            let patience = Patience {
                tries: 5,
                first: Duration::from_micros(1),
                longest: Duration::from_micros(10),
            };
            let stage = Arc::new(Memory::default());
            Box::new(Remote::new(Arc::new(bucket), stage, patience))
        });
    }

    #[test]
    fn who_does_not_try_again_sees_it_fail() {
        let folder = tempfile::tempdir().unwrap();
        let bucket = FaultyBucket::new(folder.path(), Duration::ZERO, 4);
        let patience = Patience {
            tries: 1,
            first: Duration::ZERO,
            longest: Duration::ZERO,
        };
        let remote = Remote::new(Arc::new(bucket), Arc::new(Memory::default()), patience);
        let failed = (0..8).filter(|_| remote.list().is_err()).count();
        assert_eq!(failed, 4);
    }
}
