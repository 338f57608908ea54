//! One task of a live dump.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use abi::{Addr, Span};
use image::{Run, RunKind, SpaceId, Writer};
use rustix::io::Errno;
use sys::mutex::{Guard, Mutex};
use sys::pagemap::Pagemap;
use sys::process::Process;
use sys::uffd::{Modes, Uffd};

use super::blocks::{Block, Blocks, State, block_of, span_of, spans_of};
use super::unprotected::UnprotectedPages;

use crate::{Error, Result, TaskMemory};
use abi::spans::Spans;

/// Anonymous private mappings of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Areas {
    /// Their addresses, sorted.
    pub spans: Vec<Span>,
    /// Those in which pages may be shared by copy-on-write, to be read so that they stay so.
    pub shared: Vec<Span>,
}

/// Pages of a task in the image, by their fate, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Stored.
    pub stored: u64,
    /// All zero.
    pub zero: u64,
    /// Those of another task.
    pub shared: u64,
}

/// How many blocks are gone through at once: meanwhile the book is closed to others, and the thread
/// for which they wait is one of them.
const AT_ONCE: usize = 512;

pub struct Task {
    pub process: Process,
    pub space: SpaceId,
    pub uffd: Uffd,
    pub pagemap: Pagemap,
    pub memory: TaskMemory,
    pub quiet: TaskMemory,
    state: Mutex<TrackingState>,
    lost: AtomicBool,
}

/// A thread is about to write to a protected page.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub addr: Addr,
    /// When it was heard of.
    pub since: Instant,
}

/// Tracking state of a task's memory.
#[derive(Debug, Default)]
pub struct TrackingState {
    pub blocks: Blocks,
    pub registered: Spans,
    /// Areas that may share pages.
    pub shared: Vec<Span>,
    /// Ranges whose pages may have vanished without a trace, until the next instant.
    pub suspects: Vec<Span>,
    /// Ranges whose pages are all present and were protected by a pass, until that is lifted.
    pub known: Spans,
    /// Pages whose protection was lifted since, for a writer.
    pub lifted: UnprotectedPages,
    /// Pages known at the instant without a scan.
    pub trusted: Spans,
    /// True if there were pages without protection that should have had it.
    pub surprised: bool,
    /// Faults whose block is to be copied first.
    pub waiting: Vec<Fault>,
    /// Faults whose protection could not be lifted, because the mappings are changing.
    pub deferred: Vec<Fault>,
    /// Blocks that a thread waits for and that there was no room to save.
    pub urgent: Vec<u64>,
    /// Blocks saved, and their contents.
    pub saved: Vec<(u64, Vec<u8>)>,
}

impl Task {
    pub fn new(process: Process, space: SpaceId, uffd: Uffd) -> Result<Self> {
        let pagemap = Pagemap::open(&process)
            .map_err(|source| Error::scan(process.pid(), Addr(0), source))?;
        Ok(Self {
            space,
            uffd,
            pagemap,
            memory: TaskMemory::new(&process),
            quiet: TaskMemory::quiet(&process),
            process,
            state: Mutex::default(),
            lost: AtomicBool::new(false),
        })
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// The book. Whoever has it open makes no call that could wait for the task's threads.
    pub fn book(&self) -> Guard<'_, TrackingState> {
        self.state.lock()
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Says that pages were discarded before they were copied.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    pub fn stale_bytes(&self) -> u64 {
        self.book().blocks.stale_bytes()
    }

    /// Takes the blocks that somebody waits for, if there are any.
    pub fn take_urgent(&self) -> Option<(&Self, Vec<u64>)> {
        let mut urgent = std::mem::take(&mut self.book().urgent);
        urgent.sort_unstable();
        urgent.dedup();
        (!urgent.is_empty()).then_some((self, urgent))
    }

    pub fn lifted_bytes(&self) -> u64 {
        self.book().lifted.bytes()
    }

    /// Registers the areas of a stopped task that are not yet. Those of a running one may be others
    /// by now, and would be cut in pieces that it could not move any more. Unless `all` are wanted,
    /// those that cannot be registered are left out.
    pub fn adopt(&self, areas: &Areas, all: bool) -> Result<()> {
        let mut book = self.book();
        book.shared.clone_from(&areas.shared);
        for area in &areas.spans {
            if book.registered.covers(area) {
                continue;
            }
            match self.register(*area) {
                Ok(()) => book.registered.insert(*area),
                Err(Error::Register { .. }) if !all => {}
                Err(error) => return Err(error),
            }
        }
        self.lost.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Notes where pages of a running task may be shared.
    pub fn note(&self, areas: &Areas) {
        self.book().shared.clone_from(&areas.shared);
    }

    pub fn register(&self, area: Span) -> Result<()> {
        let pid = self.pid();
        let registered = self.uffd.register(area, Modes::WP);
        registered.map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::SRCH) => Error::Gone { pid },
            // The kernel says so, too, when the memory is gone.
            Some(Errno::NOMEM) if self.is_gone(area) => Error::Gone { pid },
            _ => Error::Register {
                pid,
                span: area,
                source,
            },
        })
    }

    /// Tells whether the memory that the userfaultfd is of is no more: its task has ended or runs
    /// another program.
    fn is_gone(&self, area: Span) -> bool {
        let page = Span::new(area.start, abi::PAGE_BYTES);
        let lifted = self.uffd.write_protect(page, false);
        lifted.is_err_and(|error| Errno::from_io_error(&error) == Some(Errno::SRCH))
    }

    /// Protects, or lifts the protection, and tries again while the mappings are changing.
    pub fn protect(&self, span: Span) -> std::io::Result<()> {
        loop {
            match self.uffd.write_protect(span, true) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
                    let_change();
                }
                other => return other,
            }
        }
    }

    /// Lets who waits at `addr` write: lifts the protection of its block, as far as it is one area.
    /// Returns what was lifted, nothing where that is to be tried again.
    pub fn unprotect(&self, registered: &[Span], addr: Addr) -> Option<Span> {
        let page = Span::new(addr.page_start(), abi::PAGE_BYTES);
        let after = registered.partition_point(|area| area.end <= addr);
        let area = registered.get(after).filter(|area| area.contains(addr));
        let whole = area.map_or(page, |area| area.intersect(span_of(block_of(addr))));
        for span in [whole, page] {
            match self.uffd.write_protect(span, false) {
                Ok(()) => return Some(span),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => return None,
                Err(_) => {}
            }
        }
        // What is not mapped any more, or not registered, is not protected: the thread sees that.
        let _ = self.uffd.wake(page);
        Some(page)
    }

    /// Lifts all protection and gives the memory up, piece by piece. The kernel does the same when
    /// the userfaultfd is closed, but in one piece, for which page faults of the task wait: 30 ms a
    /// GiB, and 7 where nothing is protected any more.
    pub fn lift(&self) {
        const PIECE_BYTES: u64 = 2 << 20;
        /// The task waits for half a millisecond, and its mapping is in two parts meanwhile.
        const REGISTERED_BYTES: u64 = 32 << 20;
        let pieces = |bytes: u64| {
            let book = self.book();
            let registered = book.registered.iter();
            let pieces = registered.flat_map(|span| book.blocks.pieces(*span, bytes));
            pieces.collect::<Vec<_>>()
        };
        // What is in the way is left to the end of the userfaultfd.
        for (piece, _) in pieces(PIECE_BYTES) {
            let _ = self.uffd.write_protect(piece, false);
        }
        for (piece, _) in pieces(REGISTERED_BYTES) {
            let _ = self.uffd.unregister(piece);
        }
    }

    /// Describes the pages in the image that are not stored, and adds the runs of the others to
    /// `stored`. The task may run and write.
    pub fn describe(&self, writer: &Writer, stored: &mut Vec<Run>, pages: &mut Pages) {
        let mut next = 0;
        loop {
            let book = self.book();
            let mut some = book.blocks.from(next).take(AT_ONCE).peekable();
            if some.peek().is_none() {
                return;
            }
            for (number, block) in some {
                self.describe_block(writer, number, block, stored, pages);
                next = number + 1;
            }
        }
    }

    fn describe_block(
        &self,
        writer: &Writer,
        number: u64,
        block: &Block,
        stored: &mut Vec<Run>,
        pages: &mut Pages,
    ) {
        let runs = match &block.state {
            State::Done(runs) => runs,
            State::Common(space) => {
                let kind = RunKind::Same { space: *space };
                self.mark(writer, number, block.mask, kind);
                pages.shared += u64::from(block.mask.count_ones());
                return;
            }
            _ => panic!("block {number:#x} is not copied"),
        };
        let bits = runs.iter().map(|run| {
            let start = Addr::of_page(run.first_page);
            super::blocks::bits_of(number, Span::new(start, run.len_bytes()))
        });
        let data = bits.fold(0, |all, bits| all | bits);
        stored.extend(runs);
        self.mark(writer, number, block.mask & !data, RunKind::Zero);
        pages.stored += u64::from(data.count_ones());
        pages.zero += u64::from((block.mask & !data).count_ones());
    }

    fn mark(&self, writer: &Writer, number: u64, mask: u16, kind: RunKind) {
        for span in spans_of(number, mask) {
            writer.mark(Run {
                space: self.space,
                first_page: span.start.page(),
                pages: u32::try_from(span.pages()).expect("at most 16"),
                kind,
            });
        }
    }
}

impl TrackingState {
    /// Notes that every page of `part` is protected. A page that is not there may come without a
    /// word, so where one is missing, nothing is known.
    pub fn learn(&mut self, part: Span) {
        /// What is known or not, as a whole: as fast looked through as a page.
        const PIECE_BYTES: u64 = 2 << 20;
        let mut full = Spans::new();
        for (piece, has_pages) in self.blocks.pieces(part, PIECE_BYTES) {
            if has_pages && self.blocks.has_all(piece) {
                full.push(piece);
            }
        }
        for span in full {
            self.known.insert(span);
        }
    }
}

/// Waits a moment for mappings that are changing. That ends when a thread of the task has run,
/// which nobody tells. (To give up the processor over and over, sched_yield(2), would keep the
/// thread from running for seconds where there is but one.)
pub fn let_change() {
    std::thread::sleep(Duration::from_micros(50));
}
