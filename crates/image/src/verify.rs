//! Reads and verifies everything.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::chunk::ChunkId;
use crate::{Error, Reader, Result};

/// How many bytes of pages are read at once.
const VERIFY_BYTES: usize = 4 << 20;

impl Reader {
    /// Reads, verifies and decodes every chunk that the image has pages of, on `threads` threads.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for the first damage in the pages objects; those of [`Reader::load`].
    pub fn verify_all(&self, threads: usize) -> Result<()> {
        self.verify_those(threads, &|_| true)
    }

    /// Does what [`Reader::verify_all`] does for the chunks that nobody has read since the image
    /// was opened, other than by himself as [`Reader::straight`] tells.
    ///
    /// # Errors
    /// Those of [`Reader::verify_all`].
    pub fn verify_rest(&self, threads: usize) -> Result<()> {
        self.verify_those(threads, &|id| !self.is_verified(id))
    }

    /// The same, without the chunks of `lazy`, which is sorted: whoever reads those has them
    /// verified then.
    ///
    /// # Errors
    /// Those of [`Reader::verify_all`].
    pub fn verify_rest_but(&self, threads: usize, lazy: &[ChunkId]) -> Result<()> {
        let waits = |id| lazy.binary_search(&id).is_ok();
        self.verify_those(threads, &|id| !self.is_verified(id) && !waits(id))
    }

    fn verify_those(&self, threads: usize, wanted: &dyn Fn(ChunkId) -> bool) -> Result<()> {
        // There are at most as many as have numbers.
        let all = (0..self.chunks().len() as u32).map(ChunkId);
        let chunks = all.filter(|id| wanted(*id)).collect::<Vec<_>>();
        let batches = self.batches(&chunks);
        let next = AtomicUsize::new(0);
        let verify = || -> std::result::Result<(), (usize, Error)> {
            let mut buffer = Vec::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                let Some(batch) = batches.get(number) else {
                    return Ok(());
                };
                let batch = &chunks[batch.clone()];
                self.load_all(batch, &mut buffer)
                    .map_err(|error| (number, error))?;
            }
        };
        let threads = threads.clamp(1, batches.len().max(1));
        let results: Vec<_> = std::thread::scope(|scope| {
            // Where the system makes no more threads, those that there are do all of it.
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, verify).ok();
            let others: Vec<_> = (1..threads).map_while(start).collect();
            let own = verify();
            let join = |other: std::thread::ScopedJoinHandle<'_, _>| {
                other
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            others.into_iter().map(join).chain([own]).collect()
        });
        let first = results
            .into_iter()
            .filter_map(|result| result.err())
            .min_by_key(|error| error.0);
        first.map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Loads chunks to the start of `buffer`, one behind the other.
    fn load_all(&self, chunks: &[ChunkId], buffer: &mut Vec<u8>) -> Result<()> {
        let mut len = 0;
        let place = |id: &ChunkId| {
            let at = len;
            len += self.chunk(*id).len_bytes();
            (*id, at)
        };
        let wanted = chunks.iter().map(place).collect::<Vec<_>>();
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        self.load(&wanted, buffer)
    }

    /// Groups chunks of one pages object up to [`VERIFY_BYTES`].
    fn batches(&self, chunks: &[ChunkId]) -> Vec<Range<usize>> {
        let mut batches: Vec<Range<usize>> = Vec::new();
        let mut len = 0;
        for (number, id) in chunks.iter().enumerate() {
            let chunk = self.chunk(*id);
            match batches.last_mut() {
                Some(batch)
                    if len + chunk.len_bytes() <= VERIFY_BYTES
                        && self.chunk(chunks[batch.start]).object == chunk.object =>
                {
                    batch.end = number + 1;
                }
                _ => {
                    batches.push(number..number + 1);
                    len = 0;
                }
            }
            len += chunk.len_bytes();
        }
        batches
    }
}
