//! What an image knows of where its pages are.
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use abi::bits::{AtomicBits, words_of};
use store::Object;

use crate::ImageId;
use crate::ancestors::Ancestors;
use crate::cache::Cache;
use crate::chunk::{Chunk, ChunkId};

/// How many chunks are fetched ahead of somebody who reads one after the other, at most.
const AHEAD_CHUNKS: u32 = 16;

/// Bytes of chunks that a reader of one image caches, if it is not given a cache.
const OWN_CACHE_BYTES: usize = 16 << 20;

/// Places of an image's pages.
pub(crate) struct Places {
    /// The image for which some of this one's pages were freed.
    pub freed_by: Option<ImageId>,
    pub chunks: Vec<Chunk>,
    /// The image's own pages objects by number.
    pub own: Vec<Option<Box<dyn Object>>>,
    pub ancestors: Ancestors,
    /// The chunks that were verified.
    pub verified: AtomicBits<Vec<AtomicU64>>,
    pub cache: OnceLock<Arc<Cache>>,
    /// The chunk after the last that was missed, and how many are fetched ahead when it is wanted.
    pub next: AtomicU32,
    pub ahead: AtomicU32,
}

impl Places {
    pub fn new(
        freed_by: Option<ImageId>,
        chunks: Vec<Chunk>,
        own: Vec<Option<Box<dyn Object>>>,
        ancestors: Ancestors,
    ) -> Self {
        let all = chunks.len() as u64;
        let words = (0..words_of(all)).map(|_| AtomicU64::new(0)).collect();
        Self {
            freed_by,
            chunks,
            own,
            ancestors,
            verified: AtomicBits::new(words, 0, all),
            cache: OnceLock::new(),
            next: AtomicU32::new(u32::MAX),
            ahead: AtomicU32::new(0),
        }
    }

    pub fn cache(&self) -> &Arc<Cache> {
        let new = || Arc::new(Cache::new(OWN_CACHE_BYTES));
        self.cache.get_or_init(new)
    }

    /// How many chunks to fetch behind a chunk that was missed.
    pub fn ahead_of(&self, chunk: ChunkId) -> u32 {
        if self.next.load(Relaxed) != chunk.0 {
            self.ahead.store(0, Relaxed);
            return 0;
        }
        let more = 2 * self.ahead.load(Relaxed) + 1;
        let more = more.min(AHEAD_CHUNKS - 1);
        self.ahead.store(more, Relaxed);
        more
    }
}
