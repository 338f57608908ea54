//! A remote store: a bucket, and room on this machine for objects under
//! construction.
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crate::retry::{Patience, retry};
use crate::{
    Bucket, Claim, ClaimGuard, Contents, Error, NewObject, Object, Result, Store, Version,
    check_name, check_range,
};

/// A [`Bucket`] as a store; clones share it.
///
/// Objects under construction are in a *stage*, a store on this machine, and are put into the
/// bucket when they are committed: so everything but mapping is possible. What the bucket cannot do
/// at the moment is tried again.
#[derive(Clone)]
pub struct Remote {
    bucket: Arc<dyn Bucket>,
    stage: Arc<dyn Store>,
    patience: Patience,
    /// True if somebody in this process has a claim. Others are not kept out: buckets have no
    /// locks.
    claimed: Arc<AtomicBool>,
}

impl Remote {
    /// The store that is `bucket`; what is under construction is in `stage`, which is this store's
    /// alone.
    pub fn new(bucket: Arc<dyn Bucket>, stage: Arc<dyn Store>, patience: Patience) -> Self {
        Self {
            bucket,
            stage,
            patience,
            claimed: Arc::default(),
        }
    }
}

impl Store for Remote {
    fn claim(&self) -> Result<Claim> {
        if self.claimed.swap(true, Ordering::Acquire) {
            let store = self.place();
            return Err(Error::Busy { store });
        }
        let guard = ClaimGuard(Arc::clone(&self.claimed));
        Ok(Claim {
            names: self.list()?,
            exclusive: false,
            _guard: Box::new(guard),
        })
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(StagedObject {
            name: name.to_owned(),
            object: self.stage.create(name)?,
            len_bytes: AtomicU64::new(0),
            bucket: Arc::clone(&self.bucket),
            patience: self.patience,
        }))
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>> {
        check_name(name)?;
        let version = retry(self.patience, || self.bucket.head(name))?;
        Ok(Box::new(RemoteObject {
            name: name.to_owned(),
            version,
            bucket: Arc::clone(&self.bucket),
            patience: self.patience,
        }))
    }

    fn list(&self) -> Result<Vec<String>> {
        let mut names = retry(self.patience, || self.bucket.list())?;
        names.retain(|name| check_name(name).is_ok());
        names.sort_unstable();
        Ok(names)
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        // Whether it was there cannot be told by a call that may be the second one.
        retry(self.patience, || self.bucket.head(name))?;
        retry(self.patience, || match self.bucket.delete(name) {
            Err(Error::Missing { .. }) => Ok(()),
            done => done,
        })
    }

    fn beside(&self, path: &str) -> Result<Arc<dyn Store>> {
        let bucket = retry(self.patience, || self.bucket.beside(path))?;
        let stage = Arc::clone(&self.stage);
        Ok(Arc::new(Self::new(bucket, stage, self.patience)))
    }

    fn way_to(&self, other: &dyn Store) -> Result<String> {
        let place = other.place();
        retry(self.patience, || self.bucket.way_to(&place))
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn place(&self) -> String {
        self.bucket.place()
    }
}

/// An object under construction.
struct StagedObject {
    name: String,
    object: Box<dyn NewObject>,
    /// End of the last written byte.
    len_bytes: AtomicU64,
    bucket: Arc<dyn Bucket>,
    patience: Patience,
}

impl Contents for StagedObject {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Relaxed)
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.object.read_at(bytes, offset_bytes)
    }
}

impl NewObject for StagedObject {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        self.object.write_at(bytes, offset_bytes)?;
        if !bytes.is_empty() {
            let end_bytes = offset_bytes.saturating_add(bytes.len() as u64);
            self.len_bytes.fetch_max(end_bytes, Relaxed);
        }
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.object.read_at(bytes, offset_bytes)
    }

    fn reserve(&self, len_bytes: u64) -> Result<()> {
        self.object.reserve(len_bytes)
    }

    fn free(&self, parts_bytes: &[std::ops::Range<u64>]) -> Result<()> {
        self.object.free(parts_bytes)
    }

    fn cut(&self, len_bytes: u64) -> Result<()> {
        self.object.cut(len_bytes)?;
        self.len_bytes.store(len_bytes, Relaxed);
        Ok(())
    }

    fn commit(self: Box<Self>, _durable: bool) -> Result<()> {
        retry(self.patience, || self.bucket.put(&self.name, &*self))
    }
}

/// An opened object.
struct RemoteObject {
    name: String,
    version: Version,
    bucket: Arc<dyn Bucket>,
    patience: Patience,
}

impl Object for RemoteObject {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> u64 {
        self.version.len_bytes
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        check_range(self, bytes, offset_bytes)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (name, version) = (&self.name, &self.version);
        retry(self.patience, || {
            self.bucket.get(name, version, bytes, offset_bytes)
        })
    }

    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        let threads = self.bucket.requests_at_once().min(ranges.len());
        let ranges: Vec<_> = ranges.iter_mut().map(Mutex::new).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(range) = ranges.get(next.fetch_add(1, Relaxed)) {
                let mut range = range.lock().unwrap_or_else(PoisonError::into_inner);
                let (offset_bytes, bytes) = &mut **range;
                self.read_at(bytes, *offset_bytes)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let others = (1..threads).map(|_| scope.spawn(work));
            let others = others.collect::<Vec<_>>();
            let mut done = work();
            for other in others {
                let other = other.join();
                done = done.and(other.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            done
        })
    }
}
