//! Batches of pages, read and given to who works on them: one thread keeps many reads under way,
//! where the source can do that.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, scope};

use crate::buffer::Buffer;
use crate::source::Queue;
use crate::{Error, Extent, Result, Source, workers};

/// Batches that are read or wait for a worker, beyond those under way.
const SPARE: usize = 4;

/// Batches of one source that can be read ahead.
pub struct Readahead<'a> {
    pub source: &'a dyn Source,
    pub queue: Box<dyn Queue + Send + 'a>,
    pub batch_bytes: usize,
}

/// A batch that was read.
pub struct Batch {
    pub number: usize,
    pub buffer: Buffer,
}

/// State that the reading thread and the workers share.
#[derive(Default)]
struct State {
    /// Batches that nobody has taken yet.
    ready: VecDeque<(Batch, bool)>,
    /// Buffers that nobody uses.
    free: Vec<Buffer>,
    /// No more batches come; why, until somebody has heard of it.
    is_broken: bool,
    failure: Option<Error>,
    /// The workers are done.
    is_over: bool,
}

struct QueueState {
    state: Mutex<State>,
    changed: Condvar,
}

impl QueueState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn fail(&self, error: Error) {
        self.change(|state| (state.is_broken, state.failure) = (true, Some(error)));
    }

    /// Waits for a batch; whether all of it was read is told. None where another worker has heard
    /// why there are no more.
    fn take(&self) -> Result<Option<(Batch, bool)>> {
        let mut state = self.lock();
        loop {
            if let Some(batch) = state.ready.pop_front() {
                return Ok(Some(batch));
            }
            if state.is_broken {
                return state.failure.take().map_or(Ok(None), Err);
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Gives a free buffer; waits for one where nothing is under way that could be waited for
    /// instead. None where there is nothing more to do.
    fn buffer(&self, is_idle: bool) -> Option<Option<Buffer>> {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return None;
            }
            let free = state.free.pop();
            if free.is_some() || !is_idle {
                return Some(free);
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Readahead<'_> {
    /// Reads `count` batches, and has workers on `threads` threads do `work` with each, in whatever
    /// order they come; `pieces` are those of a batch.
    ///
    /// # Errors
    /// The source's, and those of `work`.
    pub fn each<S>(
        mut self,
        count: usize,
        threads: usize,
        pieces: &(dyn Fn(usize) -> Vec<Extent> + Sync),
        state: impl Fn(usize) -> S + Sync,
        work: impl Fn(&mut S, &mut Batch) -> Result<()> + Sync,
    ) -> Result<()> {
        let depth = self.queue.depth();
        let buffers = (depth + SPARE).min(count);
        let free = (0..buffers).map(|_| Buffer::new(self.batch_bytes));
        let shared = QueueState {
            state: Mutex::new(State {
                free: free.collect(),
                ..State::default()
            }),
            changed: Condvar::new(),
        };
        let (shared, source) = (&shared, self.source);
        scope(|scope| {
            // One thread uses the queue: its I/O context is the only one.
            let queue = &mut self.queue;
            let read = move || {
                let read = read_all(&mut **queue, count, pieces, shared);
                if let Err(error) = read {
                    shared.fail(error);
                }
            };
            let reader = Builder::new().spawn_scoped(scope, read);
            if let Err(error) = reader {
                shared.fail(Error::Other(Box::new(error)));
            }
            let done = workers::work(threads, count, state, |state, _| {
                let Some((mut batch, is_whole)) = shared.take()? else {
                    return Ok(());
                };
                if !is_whole {
                    // Read one after the other it says what fails.
                    let pieces = pieces(batch.number);
                    let len = pieces.iter().map(Extent::bytes).sum::<u64>() as usize;
                    source.read(&pieces, &mut batch.buffer.bytes()[..len])?;
                }
                work(state, &mut batch)?;
                shared.change(|state| state.free.push(batch.buffer));
                Ok(())
            });
            shared.change(|state| state.is_over = true);
            done
        })
    }
}

/// Keeps as many reads under way as the queue takes.
fn read_all(
    queue: &mut dyn Queue,
    count: usize,
    pieces: &dyn Fn(usize) -> Vec<Extent>,
    shared: &QueueState,
) -> Result<()> {
    let (mut next, mut under_way) = (0, 0);
    loop {
        while next < count && under_way < queue.depth() {
            match shared.buffer(under_way == 0) {
                None => return Ok(()),
                Some(None) => break,
                Some(Some(buffer)) => {
                    queue.start(next, &pieces(next), buffer)?;
                    (next, under_way) = (next + 1, under_way + 1);
                }
            }
        }
        if under_way == 0 {
            return Ok(());
        }
        let (number, buffer, is_whole) = queue.finish()?;
        under_way -= 1;
        let batch = Batch { number, buffer };
        shared.change(|state| state.ready.push_back((batch, is_whole)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use abi::Addr;
    use image::{PAGE_BYTES, SpaceId};

    use super::*;

    /// Pages with their own numbers; of a queue, some batches come late and some not at all.
    struct Numbers {
        bad_page: Option<u64>,
        alone: AtomicU64,
    }

    fn fill(extents: &[Extent], buffer: &mut [u8]) {
        let numbers = extents.iter().flat_map(Extent::numbers);
        for (page, number) in buffer.chunks_exact_mut(PAGE_BYTES).zip(numbers) {
            page[..8].copy_from_slice(&number.to_le_bytes());
        }
    }

    impl Source for Numbers {
        fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> Result<()> {
            self.alone.fetch_add(1, Relaxed);
            let is_bad = |page| extents.iter().any(|one| one.numbers().contains(&page));
            if self.bad_page.is_some_and(is_bad) {
                return Err(Error::Other("a bad page".into()));
            }
            fill(extents, buffer);
            Ok(())
        }
    }

    #[derive(Default)]
    struct LateQueue(Vec<(usize, Buffer, bool)>);

    impl Queue for LateQueue {
        fn depth(&self) -> usize {
            3
        }

        fn start(&mut self, number: usize, extents: &[Extent], mut buffer: Buffer) -> Result<()> {
            assert!(self.0.len() < self.depth());
            fill(extents, buffer.bytes());
            self.0.push((number, buffer, !number.is_multiple_of(7)));
            Ok(())
        }

        fn finish(&mut self) -> Result<(usize, Buffer, bool)> {
            let at = self.0.len() / 2;
            Ok(self.0.remove(at))
        }
    }

    fn pieces(number: usize) -> Vec<Extent> {
        let piece = |first_page, pages| Extent {
            space: SpaceId(1),
            first_page,
            at: Addr::of_page(first_page),
            pages,
        };
        let first = number as u64 * 10;
        vec![piece(first, 2), piece(first + 5, 1)]
    }

    fn each(source: &Numbers, fail_at: Option<usize>) -> Result<Vec<usize>> {
        let seen = Mutex::new(Vec::new());
        let ahead = Readahead {
            source,
            queue: Box::<LateQueue>::default(),
            batch_bytes: 3 * PAGE_BYTES,
        };
        ahead.each(
            100,
            2,
            &pieces,
            |_| (),
            |(), batch| {
                if fail_at == Some(batch.number) {
                    return Err(Error::Other("no more".into()));
                }
                let mut expected = vec![0; 3 * PAGE_BYTES];
                fill(&pieces(batch.number), &mut expected);
                assert!(batch.buffer.bytes() == expected);
                batch.buffer.bytes().fill(0);
                seen.lock().expect("no holder panics").push(batch.number);
                Ok(())
            },
        )?;
        let mut seen = seen.into_inner().expect("no holder panics");
        seen.sort_unstable();
        Ok(seen)
    }

    fn numbers(bad_page: Option<u64>) -> Numbers {
        Numbers {
            bad_page,
            alone: AtomicU64::new(0),
        }
    }

    #[test]
    fn every_batch_is_worked_on_once() {
        let source = numbers(None);
        let seen = each(&source, None).expect("all are read");
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        // Those that failed under way.
        assert_eq!(source.alone.into_inner(), 15);
    }

    #[test]
    fn failures_end_it() {
        let error = |source: Numbers, fail_at| each(&source, fail_at).expect_err("it fails");
        assert_eq!(error(numbers(None), Some(50)).to_string(), "no more");
        // What fails under way and by itself.
        assert_eq!(error(numbers(Some(425)), None).to_string(), "a bad page");
        assert!(each(&numbers(Some(435)), None).is_ok());
    }
}
