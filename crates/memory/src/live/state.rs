//! What all tasks of a live dump have in common.
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// The most memory that holds pages which were saved before a write and are not in the image yet.
pub const SAVED_MAX_BYTES: usize = 64 << 20;

/// State that all tasks of a live dump share.
#[derive(Default)]
pub struct SharedState {
    /// True if the instant was: writes wait until the block is copied.
    pub saving: AtomicBool,
    /// True if the thread is to end.
    pub over: AtomicBool,
    /// How much memory holds saved pages, in bytes.
    pub saved_bytes: AtomicUsize,
    /// The longest that a thread was known to wait before it could write, in microseconds.
    pub longest_wait_us: AtomicU64,
}

impl SharedState {
    /// Notes that a thread can write of which it was heard at `since`.
    pub fn note_wait(&self, since: Instant) {
        let waited_us = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.longest_wait_us.fetch_max(waited_us, Ordering::Relaxed);
    }
}
