//! What a machine has written since an image: by asynchronous write protection of QEMU's own
//! mapping, which a tracker keeps between rounds (`freeze::tracker`).
//!
//! QEMU makes the userfaultfd for it in one call from outside, and is asked nothing else. A page is
//! unwritten only if it is protected: what QEMU has given up or not mapped is read, or is a hole of
//! its file. What the kernel writes to pages that were handed to it before is not noticed, as a
//! disk's answer to a request. So writes are told and forgotten while the guest is stopped, when
//! there are no requests.

use abi::spans::Ranges;
use abi::{PAGE_BYTES, Span};
use freeze::tracker::{Client, DEFAULT_TRACK_TIME, Means, TrackedTask};
use image::ImageId;
use memory::scan::Area;
use memory::track;
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

use super::block::Block;
use crate::{Error, Result};

/// Features that the userfaultfd must have.
const FEATURES: Features = Features::WP_ASYNC.union(Features::WP_HUGETLBFS_SHMEM);

/// The tracked memory of a machine.
#[derive(Debug)]
pub(crate) struct TrackedMemory {
    tracker: Client,
    task: TrackedTask,
    /// The blocks, in their order.
    spans: Vec<Span>,
    /// True if nothing is known of the time before.
    is_new: bool,
}

impl TrackedMemory {
    /// Has the memory of QEMU, process `pid`, tracked from now on; a tracker is left behind where
    /// there is none. From a process that has one thread.
    ///
    /// # Errors
    /// Those of [`freeze::userfaultfd_of`]; [`Error::Kernel`].
    pub fn start(pid: i32, blocks: &[Block]) -> Result<Self> {
        let tracker = Client::find_or_start(pid)?;
        if let Some(tracking) = Self::of(tracker, pid, blocks)? {
            return Ok(tracking);
        }
        let uffd = freeze::userfaultfd_of(pid, true, FEATURES)?;
        let spans = blocks.iter().map(Block::span).collect::<Vec<_>>();
        for span in &spans {
            uffd.register(*span, Modes::WP).map_err(cannot)?;
        }
        let tracker = Client::find_or_start(pid)?;
        Ok(Self {
            tracker,
            task: TrackedTask::new(pid, uffd)?,
            spans,
            is_new: true,
        })
    }

    /// Finds memory of QEMU that is tracked already.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn find(pid: i32, blocks: &[Block]) -> Result<Option<Self>> {
        match Client::find(pid)? {
            Some(tracker) => Self::of(tracker, pid, blocks),
            None => Ok(None),
        }
    }

    fn of(mut tracker: Client, pid: i32, blocks: &[Block]) -> Result<Option<Self>> {
        let spans = blocks.iter().map(Block::span).collect::<Vec<_>>();
        let held = std::mem::take(&mut tracker.tasks).into_iter();
        let is_it = |task: &TrackedTask| {
            let is_of_all = |uffd: &Uffd| {
                spans
                    .iter()
                    .all(|span| uffd.register(*span, Modes::WP).is_ok())
            };
            task.pid == pid && task.by.uffd().is_some_and(is_of_all)
        };
        let Some(task) = held.into_iter().find(is_it) else {
            return Ok(None);
        };
        let are_tracked = track::are_tracked(&Process::new(pid), &spans).map_err(Error::Memory)?;
        let is_new = tracker.image.is_none() || are_tracked.contains(&false);
        Ok(Some(Self {
            tracker,
            task,
            spans,
            is_new,
        }))
    }

    /// The image that has all that was written before its round.
    pub fn image(&self) -> Option<ImageId> {
        self.tracker.image.filter(|_| !self.is_new)
    }

    /// Protects everything where nothing is known, so that [`TrackedMemory::take`] has little to
    /// do. The guest may run. Until [`TrackedMemory::end`] no image has what was written.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn begin(&self) -> Result<()> {
        self.tracker.hold(std::slice::from_ref(&self.task))?;
        self.tracker.begin()?;
        if self.is_new {
            let uffd = self.uffd();
            for span in &self.spans {
                uffd.write_protect(*span, true).map_err(cannot)?;
            }
        }
        Ok(())
    }

    /// Tells which pages of each block were not written since the last time, and has the kernel
    /// forget the others. The guest is stopped.
    ///
    /// # Errors
    /// Those of the scan.
    pub fn take(&self) -> Result<Vec<Ranges<u64>>> {
        let areas = self.spans.iter().map(|span| Area {
            span: *span,
            file: false,
            apart: false,
        });
        let areas = areas.collect::<Vec<_>>();
        let found =
            track::tracked(&Process::new(self.task.pid), &areas, true).map_err(Error::Memory)?;
        let unwritten = found.iter().zip(&self.spans).map(|(found, block)| {
            let number = |at: abi::Addr| (at.0 - block.start.0) / PAGE_BYTES;
            let spans = found.unwritten.iter().filter(|_| found.is_tracked);
            spans
                .map(|span| number(span.start)..number(span.end))
                .collect()
        });
        Ok(unwritten.collect())
    }

    /// Notes that an image has all that was written before [`TrackedMemory::take`].
    pub fn end(self, image: ImageId) {
        // Without a tracker the next round reads everything.
        if let Err(error) = self.tracker.end(image, DEFAULT_TRACK_TIME) {
            log::warn!("{error}");
        }
    }

    /// Gives the tracking up, before this returns.
    pub fn quit(self) {
        for span in &self.spans {
            if let Err(error) = self.uffd().unregister(*span) {
                log::debug!("{span} is not tracked any more: {error}");
            }
        }
        self.tracker.quit();
    }

    fn uffd(&self) -> &Uffd {
        match &self.task.by {
            Means::Protection(uffd) => uffd,
            Means::Bits(_) => unreachable!("only userfaultfds are taken"),
        }
    }
}

fn cannot(source: std::io::Error) -> Error {
    Error::kernel("cannot write-protect the memory of QEMU")(source)
}
