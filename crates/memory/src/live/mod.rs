//! The memory of running tasks as it is at one instant, copied while they go on.
//!
//! Each task's anonymous memory is registered with a userfaultfd of its own for write protection
//! ([`FEATURES`]), and divided into *blocks* of 16 pages. A block's contents are in the image
//! ([`LiveMemory::copy`] brings them there), or stale. A thread of ours ([`LiveMemory::new`] starts
//! it) hears of every write to a protected page, before it happens.
//!
//! 1. Before the instant there are rounds: [`LiveMemory::protect`] protects what is not protected,
//!    [`LiveMemory::copy`] copies what is stale; a write meanwhile lifts the protection of its
//!    block and goes on. What is not protected is found by the next round: those blocks are stale
//!    again.
//! 2. At the instant all tasks are stopped: [`LiveMemory::begin_instant`] protects what is not
//!    protected. That is little, when [`LiveMemory::protect_ahead`] has just done the same, and
//!    found without a look at all page tables: where all pages were there and protected, one can be
//!    open only if we lifted its protection or the program discarded it, and events tell both.
//! 3. Afterwards [`LiveMemory::finish`] looks whether that was true, and copies the stale blocks. A
//!    write to one waits until the thread of ours has copied the block: 64 KiB, into memory of at
//!    most 64 MiB in all.
//!
//! Pages that a task discards before they were copied (munmap(2), madvise(2)) are lost: then there
//! must be another instant. What was copied and not written since stays valid.
//!
//! The bookkeeping takes about 100 bytes a block: 0.2 % of the memory that is copied.

mod blocks;
mod copy;
mod cow_pair;
mod events;
mod protect;
mod slices;
mod state;
mod task;
mod unprotected;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use abi::Span;
use image::{Run, SpaceId, Writer};
use pages::workers;
use rustix::event::{EventfdFlags, eventfd};
use sys::process::Process;
use sys::uffd::{Features, Uffd};

use crate::{Error, Result};
use abi::spans::Spans;
use copy::{NewChunks, Worker};
use cow_pair::CowPair;
use slices::slices;
use state::SharedState;
use task::Task;
pub use task::{Areas, Pages};

/// Features that the userfaultfds must have.
pub const FEATURES: Features = Features::WP
    .union(Features::EVENT_REMAP)
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP);

/// The memory of running tasks. Dropping it lifts all protection.
pub struct LiveMemory {
    tasks: Vec<Arc<Task>>,
    cow_pairs: Vec<CowPair>,
    shared: Arc<SharedState>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Ranges of a task that were protected to be copied.
#[derive(Debug, Default)]
pub struct Round {
    /// Slices of which each is one thread's.
    slices: Vec<Vec<Span>>,
    all_bytes: u64,
}

impl Round {
    fn each_slice<W>(
        &self,
        worker: impl Fn(usize) -> W + Sync,
        work: impl Fn(&mut W, &[Span]) -> Result<()> + Sync,
    ) -> Result<()> {
        let threads = workers::threads_beside(self.all_bytes);
        workers::work(threads, self.slices.len(), worker, |worker, number| {
            work(worker, &self.slices[number])
        })
    }
}

impl LiveMemory {
    /// Takes stopped tasks: process, space, the userfaultfd of its memory, with [`FEATURES`], and
    /// that memory, which is registered as far as it can be. One that has ended is left out.
    ///
    /// # Errors
    /// [`Error::Scan`], [`Error::Register`], [`Error::Thread`].
    pub fn new(tasks: Vec<(Process, SpaceId, Uffd, Areas)>) -> Result<Self> {
        let mut living = Vec::new();
        for (process, space, uffd, areas) in tasks {
            let task = Task::new(process, space, uffd);
            match task.and_then(|task| task.adopt(&areas, false).map(|()| task)) {
                Ok(task) => living.push(Arc::new(task)),
                Err(Error::Gone { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let tasks = living;
        let shared = Arc::new(SharedState::default());
        let failed = |errno: rustix::io::Errno| Error::Thread(errno.into());
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).map_err(failed)?);
        let thread = {
            let (tasks, shared, wake) = (tasks.clone(), shared.clone(), wake.clone());
            std::thread::Builder::new()
                .name("faults".to_owned())
                .spawn(move || events::serve(&tasks, &shared, &wake))
        };
        Ok(Self {
            tasks,
            cow_pairs: Vec::new(),
            shared,
            wake,
            thread: Some(thread.map_err(Error::Thread)?),
        })
    }

    /// Tells whether task `pid` is one of these.
    #[must_use]
    pub fn has(&self, pid: i32) -> bool {
        self.task(pid).is_some()
    }

    /// These tasks.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.tasks.iter().map(|task| &task.process)
    }

    fn task(&self, pid: i32) -> Option<&Task> {
        self.tasks
            .iter()
            .map(|task| &**task)
            .find(|task| task.pid() == pid)
    }

    /// Protects what is not protected in the anonymous mappings of a running task, with several
    /// threads where that is much: the first half of a round.
    ///
    /// # Errors
    /// [`Error::Gone`] when the task has ended or runs another program.
    pub fn protect(&self, pid: i32, areas: &Areas) -> Result<Round> {
        let Some(task) = self.task(pid) else {
            return Ok(Round::default());
        };
        task.note(areas);
        let round = Round {
            slices: slices(task.populated(&areas.spans)?),
            all_bytes: areas.spans.iter().map(|span| span.bytes()).sum(),
        };
        round.each_slice(|_| (), |(), slice| task.protect_areas(slice))?;
        Ok(round)
    }

    /// Copies what is stale of what was protected: the second half. I/O that was under way before
    /// is over: its data may come to pages that are protected. Returns how many bytes were copied.
    /// Calls `progress` with the number of bytes after each piece.
    ///
    /// Pages that vanish meanwhile are left alone.
    ///
    /// # Errors
    /// [`Error::Gone`] when the task has ended or runs another program; [`Error::Image`].
    pub fn copy(
        &self,
        pid: i32,
        round: &Round,
        writer: &Writer,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<u64> {
        let Some(task) = self.task(pid) else {
            return Ok(0);
        };
        let copied_bytes = AtomicU64::new(0);
        round.each_slice(Worker::new, |worker, slice| {
            let whole = Span {
                start: slice[0].start,
                end: slice[slice.len() - 1].end,
            };
            let bytes = copy::copy_stale(task, whole, &self.shared, writer, worker)?;
            copied_bytes.fetch_add(bytes, Ordering::Relaxed);
            progress(bytes);
            Ok(())
        })?;
        Ok(copied_bytes.into_inner())
    }

    /// Finds the pages of `areas` that running task `child` has of its `parent`, by copy-on-write:
    /// they need not be copied. Both have anonymous memory there. To be called before
    /// [`LiveMemory::copy`], once for each child.
    ///
    /// # Errors
    /// [`Error::Scan`]. One of them that has ended has nothing in common.
    pub fn find_common(&mut self, child: i32, parent: i32, areas: &[Span]) -> Result<()> {
        let find = |pid| self.tasks.iter().find(|task| task.pid() == pid).cloned();
        let (Some(child), Some(parent)) = (find(child), find(parent)) else {
            return Ok(());
        };
        match CowPair::find(child, parent, areas) {
            Ok(cow_pair) => self.cow_pairs.push(cow_pair),
            Err(Error::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Sees which pages are no longer those of the parent, where that is in `pids`: they must be
    /// copied. To be called for the instant, when all tasks are stopped and
    /// [`LiveMemory::begin_instant`] was called for each, and now and then before, so that little
    /// is left for afterwards.
    pub fn unshare(&self, pids: &[i32]) {
        for cow_pair in &self.cow_pairs {
            cow_pair.unshare(pids.contains(&cow_pair.parent.pid()));
        }
    }

    /// Protects what is not protected in running tasks until that takes but `short`, or some
    /// times.
    ///
    /// # Errors
    /// As [`LiveMemory::protect`].
    pub fn protect_ahead(&self, areas: &[(i32, Areas)], short: Duration) -> Result<()> {
        const TRIES: usize = 6;
        for _ in 0..TRIES {
            let begun = Instant::now();
            for (pid, areas) in areas {
                if let Some(task) = self.task(*pid) {
                    task.note(areas);
                    match task.protect_unknown(&areas.spans) {
                        // It ends, or runs another program: the instant is without it, or refused.
                        Ok(()) | Err(Error::Gone { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
            if begun.elapsed() <= short {
                break;
            }
        }
        Ok(())
    }

    /// Makes this the instant for a stopped task: all its pages are protected when this returns.
    /// Returns the guard regions of its areas. To be called for every task before any of them goes
    /// on, with all that it has.
    ///
    /// Who is `trusting` has only those pages looked at that may not be protected by all that was
    /// heard: that takes the same time however much memory there is. [`LiveMemory::finish`] looks
    /// at the others, and wants another instant if there was something not heard of.
    ///
    /// # Errors
    /// [`Error::Protect`]; [`Error::Gone`] when the task runs another program since.
    pub fn begin_instant(&self, pid: i32, areas: &Areas, trusting: bool) -> Result<Spans> {
        let Some(task) = self.task(pid) else {
            return Ok(Spans::new());
        };
        events::hear_out(task, &self.shared);
        task.adopt(areas, true)?;
        let guards = task.protect_stopped(&areas.spans, trusting)?;
        // A program of another kernel's vDSO has memory that is not saved as such.
        task.book().blocks.forget_outside(&areas.spans);
        self.shared.saving.store(true, Ordering::SeqCst);
        Ok(guards)
    }

    /// Copies what is stale since the instant in the tasks with these `pids`. Returns whether
    /// everything is there; otherwise pages were discarded or not protected, and there must be
    /// another instant.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Image`].
    pub fn finish(&self, pids: &[i32], writer: &Writer, progress: &dyn Fn(u64)) -> Result<bool> {
        let tasks = self.tasks.iter().map(|task| &**task);
        let tasks = tasks
            .filter(|task| pids.contains(&task.pid()))
            .collect::<Vec<_>>();
        let whole = self.copy_rest(&tasks, writer, progress);
        if !matches!(whole, Ok(true)) {
            self.shared.saving.store(false, Ordering::SeqCst);
        }
        for task in &self.tasks {
            let fresh = &mut NewChunks::new(0);
            copy::write_saved(task, usize::MAX, &self.shared, writer, fresh)?;
            copy::release(task, &self.shared);
        }
        whole
    }

    fn copy_rest(&self, tasks: &[&Task], writer: &Writer, progress: &dyn Fn(u64)) -> Result<bool> {
        for task in tasks {
            if !task.confirm(&self.shared)? {
                return Ok(false);
            }
        }
        let worker = &mut Worker::new(0);
        let copied = copy::copy_rest(tasks, &self.shared, writer, worker, progress)?;
        Ok(copied && !tasks.iter().any(|task| task.is_lost()))
    }

    /// The longest that a thread has waited before it could write to a page, from the time that it
    /// was heard of.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        Duration::from_micros(self.shared.longest_wait_us.load(Ordering::Relaxed))
    }

    /// About how many bytes were written since the last round.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.tasks.iter().map(|task| task.lifted_bytes()).sum()
    }

    /// How many bytes are stale.
    #[must_use]
    pub fn stale_bytes(&self) -> u64 {
        self.tasks.iter().map(|task| task.stale_bytes()).sum()
    }

    /// Describes the pages of the instant in the image, those of tasks in `pids`, but for those
    /// that are stored: their runs are returned, for [`find_equal()`](pages::find_equal()) and
    /// [`Writer::describe`].
    ///
    /// # Panics
    /// Unless [`LiveMemory::finish`] has found everything.
    #[must_use = "the image does not have the stored pages yet"]
    pub fn describe(&self, pids: &[i32], writer: &Writer) -> (Pages, Vec<Run>) {
        let (mut pages, mut stored) = (Pages::default(), Vec::new());
        for task in self.tasks.iter().filter(|task| pids.contains(&task.pid())) {
            task.describe(writer, &mut stored, &mut pages);
        }
        (pages, stored)
    }
}

impl Drop for LiveMemory {
    fn drop(&mut self) {
        self.tasks.iter().for_each(|task| task.lift());
        self.shared.over.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The userfaultfds are closed with the last of the tasks: that lifts all protection.
    }
}
