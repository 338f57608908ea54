//! Reads and verifies everything.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::parts;
use crate::reader::data_offset;
use crate::{Error, Reader, Result, Run};

/// How much is read at once.
const VERIFY_BYTES: u64 = 4 << 20;

impl Reader {
    /// Reads and verifies every stored run that the image has pages from, on `threads` threads.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for the first damage in the pages object; [`Error::Store`].
    pub fn verify_all(&self, threads: usize) -> Result<()> {
        let runs = self.stored();
        let batches = batches(&runs);
        let next = AtomicUsize::new(0);
        let verify = || -> std::result::Result<(), (usize, Error)> {
            let mut buffer = Vec::new();
            loop {
                let number = next.fetch_add(1, Relaxed);
                let Some(batch) = batches.get(number) else {
                    return Ok(());
                };
                self.verify(&runs[batch.clone()], &mut buffer)
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

    /// Verifies runs that follow each other in the pages object with one read.
    fn verify(&self, runs: &[Run], buffer: &mut Vec<u8>) -> Result<()> {
        let len_bytes: u64 = runs.iter().map(Run::len_bytes).sum();
        buffer.resize(len_bytes as usize, 0);
        self.read_stored(buffer, data_offset(&runs[0]), runs[0].space)?;
        let mut rest = &buffer[..];
        for run in runs {
            let (own, more) = rest.split_at(run.len_bytes() as usize);
            self.check(run, own)?;
            rest = more;
        }
        Ok(())
    }
}

/// Groups runs that follow each other in the pages object into reads of up to [`VERIFY_BYTES`].
fn batches(runs: &[Run]) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut len_bytes = 0;
    for (number, run) in runs.iter().enumerate() {
        match batches.last_mut() {
            Some(batch)
                if len_bytes + run.len_bytes() <= VERIFY_BYTES
                    && parts::split(data_offset(&runs[batch.start])).0
                        == parts::split(data_offset(run)).0
                    && data_offset(&runs[batch.start]) + len_bytes == data_offset(run) =>
            {
                batch.end = number + 1;
            }
            _ => {
                batches.push(number..number + 1);
                len_bytes = 0;
            }
        }
        len_bytes += run.len_bytes();
    }
    batches
}
