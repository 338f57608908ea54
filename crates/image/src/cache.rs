//! Chunks that were read and may be wanted again, for any number of readers.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ImageId;

/// Identity of a chunk among those of all images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The image that holds it.
    pub image: ImageId,
    /// Its offset there.
    pub position: u64,
    /// How long it is: some are cut.
    pub stored_bytes: u32,
}

/// Pages of chunks, verified and decoded, up to some number of bytes. Several readers, also of
/// different images, may have one together: what two layers have of the same image is there once.
pub struct Cache {
    limit_bytes: usize,
    kept: Mutex<CacheState>,
}

#[derive(Default)]
struct CacheState {
    slots: HashMap<Key, Arc<Slot>>,
    /// All of them, in the order in which they came; those that were used since get another turn.
    order: VecDeque<(Key, usize)>,
    bytes: usize,
}

/// One chunk. Who finds it empty fills it; others wait for that.
#[derive(Default)]
struct Slot {
    pages: Mutex<Option<Arc<[u8]>>>,
    was_used: AtomicBool,
}

/// Takes the lock; each holder leaves the value whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    /// A cache that keeps at most `limit_bytes` of pages.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            kept: Mutex::default(),
        }
    }

    /// Returns the pages of a chunk: what is kept, or else what `load` gives. Of several who want
    /// it at once, one loads it.
    pub(crate) fn get_or_load<E>(
        &self,
        key: Key,
        load: impl FnOnce() -> Result<Arc<[u8]>, E>,
    ) -> Result<Arc<[u8]>, E> {
        let slot = lock(&self.kept).slots.entry(key).or_default().clone();
        let mut pages = lock(&slot.pages);
        if let Some(pages) = &*pages {
            slot.was_used.store(true, Relaxed);
            return Ok(pages.clone());
        }
        match load() {
            Ok(loaded) => {
                *pages = Some(loaded.clone());
                drop(pages);
                self.note(key, loaded.len());
                Ok(loaded)
            }
            Err(error) => {
                drop(pages);
                self.forget(key);
                Err(error)
            }
        }
    }

    /// Keeps pages that nobody has asked for yet.
    pub(crate) fn put(&self, key: Key, loaded: Arc<[u8]>) {
        let slot = lock(&self.kept).slots.entry(key).or_default().clone();
        // Whoever holds it is loading the same.
        let Ok(mut pages) = slot.pages.try_lock() else {
            return;
        };
        if pages.is_none() {
            let bytes = loaded.len();
            *pages = Some(loaded);
            drop(pages);
            self.note(key, bytes);
        }
    }

    /// Forgets a chunk that could not be loaded.
    fn forget(&self, key: Key) {
        let mut kept = lock(&self.kept);
        let is_empty = |slot: &Arc<Slot>| slot.pages.try_lock().is_ok_and(|pages| pages.is_none());
        if kept.slots.get(&key).is_some_and(is_empty) {
            kept.slots.remove(&key);
        }
    }

    /// Counts a chunk that is kept now, and gives up others.
    fn note(&self, key: Key, bytes: usize) {
        let mut kept = lock(&self.kept);
        kept.order.push_back((key, bytes));
        kept.bytes += bytes;
        while kept.bytes > self.limit_bytes
            && let Some((oldest, bytes)) = kept.order.pop_front()
        {
            let slot = kept.slots.get(&oldest);
            if slot.is_some_and(|slot| slot.was_used.swap(false, Relaxed)) {
                kept.order.push_back((oldest, bytes));
                continue;
            }
            kept.slots.remove(&oldest);
            kept.bytes -= bytes;
        }
    }

    /// How many bytes of pages are kept.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        lock(&self.kept).bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn key(position: u64) -> Key {
        Key {
            image: ImageId([1; 16]),
            position,
            stored_bytes: 4096,
        }
    }

    fn get(cache: &Cache, position: u64, loads: &AtomicUsize) -> Arc<[u8]> {
        let load = || {
            loads.fetch_add(1, Relaxed);
            Ok::<_, ()>(vec![position as u8; 4096].into())
        };
        cache.get_or_load(key(position), load).expect("loaded")
    }

    #[test]
    fn it_keeps_what_is_used_and_no_more_than_it_may() {
        let cache = Cache::new(4 * 4096);
        let loads = AtomicUsize::new(0);
        for round in 0..100 {
            assert_eq!(get(&cache, 7, &loads)[0], 7);
            assert_eq!(get(&cache, 1000 + round, &loads).len(), 4096);
            assert!(cache.kept_bytes() <= 4 * 4096);
        }
        assert_eq!(loads.load(Relaxed), 101);
        let kept = lock(&cache.kept);
        assert_eq!((kept.slots.len(), kept.order.len()), (4, 4));
    }

    #[test]
    fn one_loads_for_all_who_wait() {
        let cache = Cache::new(1 << 20);
        let loads = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..50).for_each(|at| drop(get(&cache, at, &loads))));
            }
        });
        assert_eq!(loads.load(Relaxed), 50);
    }

    #[test]
    fn what_fails_is_tried_again() {
        let cache = Cache::new(1 << 20);
        assert_eq!(cache.get_or_load(key(1), || Err(5)), Err(5));
        assert_eq!(cache.kept_bytes(), 0);
        assert!(lock(&cache.kept).slots.is_empty());
        let loads = AtomicUsize::new(0);
        get(&cache, 1, &loads);
        cache.put(key(2), vec![0; 4096].into());
        cache.put(key(2), vec![0; 4096].into());
        get(&cache, 2, &loads);
        assert_eq!((loads.load(Relaxed), cache.kept_bytes()), (1, 2 * 4096));
    }
}
