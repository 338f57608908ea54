//! The memory of a machine at one instant, read while its guest runs on.
//!
//! The guest is stopped for the instant. All of its memory is write-protected then, in QEMU's own
//! mapping, and read afterwards in *windows*. A thread of ours hears of each write to a page that
//! is still protected: it saves the *block* around it, lifts the protection, and so lets the writer
//! go on. Who reads a page reads the file first, and then takes what was saved of it instead: as
//! long as nothing was saved, the page was protected, and is as it was at the instant. When all of
//! a window is in the image, it is done, and its protection is lifted.
//!
//! Windows that were written to are read first. What was saved takes [`SAVED_MAX_BYTES`] at most:
//! then writers wait until their window is done.
//!
//! Memory that QEMU gives up meanwhile, for a balloon, is gone before anybody is told; then the
//! snapshot is [lost](Snapshot::is_lost).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use abi::spans::{Ranges, Spans};
use abi::{Addr, PAGE_BYTES, Span};
use pages::source::Object;
use pages::{Extent, Source};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use sys::mutex::{Guard, Mutex};
use sys::realtime::Realtime;
use sys::uffd::{Event, Features, Modes, Uffd};

use super::block::Block;
use crate::{Error, Result};

/// Features that the userfaultfd must have.
pub(crate) const FEATURES: Features = Features::WP
    .union(Features::WP_HUGETLBFS_SHMEM)
    .union(Features::EVENT_REMOVE);

/// Bytes saved at once for a writer, where pages are smaller.
const BLOCK_BYTES: u64 = 64 << 10;

/// What is read, stored and let go together; a multiple of the size of any block.
pub(crate) const WINDOW_BYTES: u64 = 16 << 20;

/// The most memory that holds blocks which are not in the image yet.
const SAVED_MAX_BYTES: u64 = 128 << 20;

/// How long somebody waits for mappings that are changing before he tries again.
const RETRY: Duration = Duration::from_micros(200);

/// A block of the guest's memory, as QEMU has it mapped.
#[derive(Debug)]
struct Region {
    object: Object,
    /// The file of it, for the holes.
    offset_bytes: u64,
    span: Span,
    block_bytes: u64,
}

/// A place in the memory: the number of a region, and of a block or window in it.
type Place = (usize, u64);

/// The memory of a machine, protected.
#[derive(Debug)]
pub(crate) struct Snapshot {
    uffd: Uffd,
    regions: Vec<Region>,
    book: Mutex<SnapshotState>,
    /// From here on the memory is that of the instant.
    is_set: AtomicBool,
    is_lost: AtomicBool,
    is_over: AtomicBool,
    wake: OwnedFd,
}

/// State of the windows and blocks.
#[derive(Debug, Default)]
struct SnapshotState {
    /// Blocks whose protection was lifted before the instant.
    lifted: BTreeSet<Place>,
    /// Windows that are not done, or none as long as that is not known.
    open: Option<BTreeSet<Place>>,
    saved: BTreeMap<Place, Vec<u8>>,
    saved_bytes: u64,
    /// Windows that were written to, in the order of time.
    hot: VecDeque<Place>,
    /// Addresses of threads that could not be woken, because the mappings were changing.
    deferred: Vec<Addr>,
    longest_wait: Duration,
}

impl Snapshot {
    /// Registers the blocks of a machine. Nothing is protected yet.
    ///
    /// # Errors
    /// [`Error::Kernel`]; [`Error::Unfit`] where a block has pages larger than a window.
    pub fn new(uffd: Uffd, blocks: &[Block]) -> Result<Self> {
        let mut regions = Vec::new();
        for block in blocks {
            let page_bytes = block.page_bytes()?;
            if page_bytes > WINDOW_BYTES {
                let what = format!("{} has pages of {} MiB", block.name, page_bytes >> 20);
                return Err(Error::Unfit(format!(
                    "the guest's memory {what}: it can be saved while the guest is stopped"
                )));
            }
            let file = block
                .file
                .try_clone()
                .map_err(Error::kernel("cannot duplicate a descriptor"))?;
            regions.push(Region {
                object: Object::new(file),
                offset_bytes: block.offset_bytes,
                span: block.span(),
                block_bytes: page_bytes.max(BLOCK_BYTES),
            });
            let registered = uffd.register(block.span(), Modes::WP);
            registered.map_err(Error::kernel("cannot watch the memory of QEMU"))?;
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(Error::kernel("cannot make an eventfd"))?;
        Ok(Self {
            uffd,
            regions,
            book: Mutex::default(),
            is_set: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            wake,
        })
    }

    /// Protects everything while the guest runs, so that little is left for the instant. From here
    /// on [`Snapshot::serve`] must be under way.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn protect_ahead(&self) -> Result<()> {
        let spans = self.regions.iter().map(|region| region.span);
        self.protect(&spans.collect::<Vec<_>>())
    }

    /// Makes this the instant: the guest is stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn set(&self) -> Result<()> {
        let lifted = {
            let mut book = self.book.lock();
            // Whoever is heard of from here on waits until his block is saved.
            self.is_set.store(true, Ordering::SeqCst);
            std::mem::take(&mut book.lifted)
        };
        let spans = lifted.into_iter().map(|place| self.block_span(place));
        self.protect(&Spans::of(spans))
    }

    fn protect(&self, spans: &[Span]) -> Result<()> {
        for span in spans {
            let protected = self.retry(|| self.uffd.write_protect(*span, true));
            protected.map_err(Error::kernel("cannot write-protect the memory of QEMU"))?;
        }
        Ok(())
    }

    /// Says which pages of each region are to be read: all others may change from here on.
    pub fn plan(&self, pages: &[Ranges<u64>]) -> Plan {
        let mut windows = BTreeMap::new();
        for (number, ranges) in pages.iter().enumerate() {
            for range in ranges {
                for (window, part) in cut(range) {
                    let parts: &mut Vec<_> = windows.entry((number, window)).or_default();
                    parts.push(part);
                }
            }
        }
        let mut book = self.book.lock();
        book.open = Some(windows.keys().copied().collect());
        let SnapshotState {
            open,
            saved,
            saved_bytes,
            ..
        } = &mut *book;
        let open = open.as_ref().expect("it was just set");
        saved.retain(|place, bytes| {
            let is_open = open.contains(&self.window_of(*place));
            *saved_bytes -= if is_open { 0 } else { bytes.len() as u64 };
            is_open
        });
        drop(book);
        Plan { windows }
    }

    /// Says that all that is wanted of a window was read.
    pub fn done(&self, window: Place) {
        {
            let mut book = self.book.lock();
            if let Some(open) = &mut book.open {
                open.remove(&window);
            }
            let region = &self.regions[window.0];
            let per_window = WINDOW_BYTES / region.block_bytes;
            let first = window.1 * per_window;
            for block in first..first + per_window {
                if let Some(bytes) = book.saved.remove(&(window.0, block)) {
                    book.saved_bytes -= bytes.len() as u64;
                }
            }
        }
        let span = self.span_of(window);
        if let Err(error) = self.retry(|| self.uffd.write_protect(span, false)) {
            // It has ended, and nobody waits.
            log::debug!("the protection of {span} is not lifted: {error}");
        }
    }

    /// A window that was written to and is in the plan, the one of the longest ago first.
    fn next_hot(&self, plan: &Plan) -> Option<Place> {
        let mut book = self.book.lock();
        while let Some(window) = book.hot.pop_front() {
            if plan.windows.contains_key(&window) {
                return Some(window);
            }
        }
        None
    }

    /// Tells whether what is read may be of another moment than the instant.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    /// The longest that a writer waited from when it was heard of.
    pub fn longest_wait(&self) -> Duration {
        self.book.lock().longest_wait
    }

    /// Ends [`Snapshot::serve`].
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Lets writers go on until it is over. It touches nothing that could wait for the guest.
    pub fn serve(&self) {
        // Who writes to a protected page in a system call and is to stop does not sleep, but tries
        // again and again.
        let _realtime = Realtime::new();
        let retry = Timespec::try_from(RETRY).expect("it is short");
        while !self.is_over.load(Ordering::SeqCst) {
            let are_deferred = !self.book.lock().deferred.is_empty();
            let mut fds = [
                PollFd::from_borrowed_fd(self.uffd.as_fd(), PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            if poll(&mut fds, are_deferred.then_some(&retry)).is_ok() {
                self.hear();
            }
        }
    }

    /// Lets those go on that wait, and notes what was given up.
    fn hear(&self) {
        let since = std::time::Instant::now();
        let mut events = Vec::new();
        // From the reading of an event until it is entered.
        let mut book = self.book.lock();
        // Where QEMU has ended, there is nobody to let go.
        let _ = self.uffd.events(&mut events);
        let deferred = std::mem::take(&mut book.deferred);
        for event in events {
            match event {
                Event::Fault { addr, .. } => self.let_go(&mut book, addr),
                // What is given up is not protected any more.
                Event::Remove(span) if !self.is_set.load(Ordering::SeqCst) => {
                    book.lifted.extend(self.places_in(span));
                }
                _ => self.is_lost.store(true, Ordering::SeqCst),
            }
        }
        for addr in deferred {
            self.let_go(&mut book, addr);
        }
        book.longest_wait = book.longest_wait.max(since.elapsed());
    }

    /// Lets somebody write at an address, after what is there was saved if it must be.
    fn let_go(&self, book: &mut Guard<'_, SnapshotState>, addr: Addr) {
        let Some(place) = self.place_of(addr) else {
            let _ = self.uffd.wake(Span::new(addr.page_start(), PAGE_BYTES));
            return;
        };
        let window = self.window_of(place);
        let is_open = book.open.as_ref().is_none_or(|open| open.contains(&window));
        let is_set = self.is_set.load(Ordering::SeqCst);
        if !is_set {
            book.lifted.insert(place);
        }
        if is_set && is_open && !book.saved.contains_key(&place) {
            if book.hot.back() != Some(&window) {
                book.hot.push_back(window);
            }
            // Whose window is done can go on as well.
            if book.open.is_some() && book.saved_bytes >= SAVED_MAX_BYTES {
                return;
            }
            match self.read_block(place) {
                Ok(bytes) => {
                    book.saved_bytes += bytes.len() as u64;
                    book.saved.insert(place, bytes);
                }
                Err(error) => {
                    log::debug!("{error}");
                    self.is_lost.store(true, Ordering::SeqCst);
                }
            }
        }
        let span = self.block_span(place);
        match self.uffd.write_protect(span, false) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
                book.deferred.push(addr);
            }
            // Where it cannot be lifted, there is nobody.
            _ => {}
        }
    }

    fn read_block(&self, place: Place) -> pages::Result<Vec<u8>> {
        let region = &self.regions[place.0];
        let span = self.block_span(place);
        let mut bytes = vec![0; span.bytes() as usize];
        let at = region.offset_bytes + (span.start.0 - region.span.start.0);
        let extent = Extent {
            space: image::SpaceId(0),
            first_page: 0,
            at: Addr(at),
            pages: span.pages(),
        };
        region.object.read(&[extent], &mut bytes)?;
        Ok(bytes)
    }

    /// The block that holds an address.
    fn place_of(&self, addr: Addr) -> Option<Place> {
        let number = self
            .regions
            .iter()
            .position(|region| region.span.contains(addr))?;
        let region = &self.regions[number];
        Some((number, (addr.0 - region.span.start.0) / region.block_bytes))
    }

    /// The blocks that have a part of a span.
    fn places_in(&self, span: Span) -> impl Iterator<Item = Place> + '_ {
        let regions = self.regions.iter().enumerate();
        regions.flat_map(move |(number, region)| {
            let part = span.intersect(region.span);
            let block = |at: Addr| at.0.saturating_sub(region.span.start.0);
            let first = block(part.start) / region.block_bytes;
            let end = match part.is_empty() {
                true => first,
                false => block(part.end).div_ceil(region.block_bytes),
            };
            (first..end).map(move |block| (number, block))
        })
    }

    fn window_of(&self, (number, block): Place) -> Place {
        let per_window = WINDOW_BYTES / self.regions[number].block_bytes;
        (number, block / per_window)
    }

    fn block_span(&self, (number, block): Place) -> Span {
        let region = &self.regions[number];
        let start = region.span.start.plus(block * region.block_bytes);
        Span::new(start, region.block_bytes).intersect(region.span)
    }

    fn span_of(&self, (number, window): Place) -> Span {
        let region = &self.regions[number];
        let start = region.span.start.plus(window * WINDOW_BYTES);
        Span::new(start, WINDOW_BYTES).intersect(region.span)
    }

    /// Tries again while mappings are changing.
    fn retry(&self, call: impl Fn() -> std::io::Result<()>) -> std::io::Result<()> {
        loop {
            match call() {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
                    std::thread::sleep(RETRY);
                }
                other => return other,
            }
        }
    }

    /// One region as a source of pages.
    pub fn source(&self, region: usize) -> RegionSource<'_> {
        RegionSource {
            snapshot: self,
            region,
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        // The end of the userfaultfd does it all in one piece, for which the guest's faults wait.
        for region in &self.regions {
            let mut start = region.span.start;
            while start < region.span.end {
                let piece = Span::new(start, WINDOW_BYTES).intersect(region.span);
                let _ = self.uffd.write_protect(piece, false);
                start = piece.end;
            }
            let _ = self.uffd.unregister(region.span);
        }
    }
}

/// The windows that are to be read.
#[derive(Debug)]
pub(crate) struct Plan {
    windows: BTreeMap<Place, Vec<Range<u64>>>,
}

impl Plan {
    /// The next window, with its pages: one that was written to, if there is one.
    pub fn next(&mut self, snapshot: &Snapshot) -> Option<(Place, Vec<Range<u64>>)> {
        let hot = snapshot.next_hot(self);
        let window = hot.or_else(|| self.windows.keys().next().copied())?;
        self.windows.remove_entry(&window)
    }
}

/// Cuts pages of a region where windows end.
fn cut(range: &Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
    const PAGES: u64 = WINDOW_BYTES / PAGE_BYTES;
    let (start, end) = (range.start, range.end);
    let windows = start / PAGES..end.div_ceil(PAGES);
    windows.map(move |window| {
        let first = (window * PAGES).max(start);
        (window, first..((window + 1) * PAGES).min(end))
    })
}

/// One region as it was at the instant; an extent's `at` is an offset into its file.
#[derive(Debug)]
pub(crate) struct RegionSource<'a> {
    snapshot: &'a Snapshot,
    region: usize,
}

impl Source for RegionSource<'_> {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> pages::Result<()> {
        let region = &self.snapshot.regions[self.region];
        region.object.read(extents, buffer)?;
        let book = self.snapshot.book.lock();
        let mut rest = buffer;
        for extent in extents {
            let (own, after) = rest.split_at_mut(extent.bytes() as usize);
            rest = after;
            let start_bytes = extent.at.0 - region.offset_bytes;
            let end_bytes = start_bytes + extent.bytes();
            let first = start_bytes / region.block_bytes;
            let blocks =
                (self.region, first)..(self.region, end_bytes.div_ceil(region.block_bytes));
            for ((_, block), bytes) in book.saved.range(blocks) {
                let at = block * region.block_bytes;
                let from = at.max(start_bytes);
                let to = (at + bytes.len() as u64).min(end_bytes);
                let own = &mut own[(from - start_bytes) as usize..(to - start_bytes) as usize];
                own.copy_from_slice(&bytes[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use super::*;

    #[test]
    fn pages_are_cut_where_windows_end() {
        let pages = |range: Range<u64>| cut(&range).collect::<Vec<_>>();
        assert_eq!(pages(0..4096), [(0, 0..4096)]);
        assert_eq!(pages(4095..4097), [(0, 4095..4096), (1, 4096..4097)]);
        assert_eq!(
            pages(5..9000),
            [(0, 5..4096), (1, 4096..8192), (2, 8192..9000)]
        );
    }
}
