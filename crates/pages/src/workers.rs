//! Threads that share numbered pieces of work.
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::{Builder, scope};

use rustix::thread::sched_getaffinity;

/// Below this, starting a second thread costs more than it saves.
const ALONE_BYTES: u64 = 4 << 20;
/// More threads than this only wait for memory.
const MAX_THREADS: usize = 8;

/// Returns how many threads should move `bytes`: the processors that may be used, at most 8, and
/// one for a few megabytes.
pub fn threads(bytes: u64) -> usize {
    if bytes <= ALONE_BYTES {
        return 1;
    }
    let allowed = sched_getaffinity(None).map_or(1, |processors| processors.count());
    (allowed as usize).clamp(1, MAX_THREADS)
}

/// Returns how many threads should move `bytes` beside tasks that run: one processor is theirs.
pub fn threads_beside(bytes: u64) -> usize {
    threads(bytes).saturating_sub(1).max(1)
}

/// Does the work `0..count` on `threads` threads, of which the caller's is one. Each thread makes
/// a state for itself; numbers are given out in ascending order, and none any more after a failure.
/// Where the system makes no more threads, those that there are do all of it.
///
/// # Errors
/// The failure with the lowest number of those that happened.
pub fn work<S, E: Send>(
    threads: usize,
    count: usize,
    state: impl Fn(usize) -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let run = |thread| {
        let mut state = state(thread);
        loop {
            let number = next.fetch_add(1, Relaxed);
            if number >= count {
                return;
            }
            if let Err(error) = work(&mut state, number) {
                next.store(count, Relaxed);
                let mut first = failure.lock().expect("no holder panics");
                if first.as_ref().is_none_or(|(earlier, _)| number < *earlier) {
                    *first = Some((number, error));
                }
                return;
            }
        }
    };
    scope(|scope| {
        let run = &run;
        let start = |thread| Builder::new().spawn_scoped(scope, move || run(thread));
        let others = (1..threads.min(count)).map_while(|thread| match start(thread) {
            Ok(other) => Some(other),
            Err(error) => {
                log::debug!("{thread} threads must do: {error}");
                None
            }
        });
        let others = others.collect::<Vec<_>>();
        run(0);
        others
            .into_iter()
            .for_each(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
    });
    let failure = failure.into_inner().expect("no holder panics");
    failure.map_or(Ok(()), |(_, error)| Err(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_done_once() {
        for threads in [1, 2, 5] {
            let done: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            work(
                threads,
                done.len(),
                |_| (),
                |(), number| {
                    done[number].fetch_add(1, Relaxed);
                    Ok::<_, ()>(())
                },
            )
            .expect("nothing fails");
            assert!(done.iter().all(|times| times.load(Relaxed) == 1));
        }
    }

    #[test]
    fn a_failure_ends_the_work() {
        let done = AtomicUsize::new(0);
        let outcome = work(
            1,
            1000,
            |_| (),
            |(), number| {
                done.fetch_add(1, Relaxed);
                if number >= 10 { Err(number) } else { Ok(()) }
            },
        );
        assert_eq!(outcome, Err(10));
        assert_eq!(done.load(Relaxed), 11);
    }

    #[test]
    fn little_work_is_done_alone() {
        assert_eq!(threads(300 << 10), 1);
        let many = threads(1 << 30);
        assert!((1..=8).contains(&many));
        assert_eq!(
            threads_beside(1 << 30),
            if many == 1 { 1 } else { many - 1 }
        );
        assert_eq!(threads_beside(0), 1);
    }
}
