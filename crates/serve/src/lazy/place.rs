//! Bringing pages in, to who waits for them and to who will.
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use abi::{Addr, PAGE_BYTES, Span};
use pages::Buffer;

use super::Server;
use super::owed::Piece;
use super::space::{AddressSpace, Placing};
use crate::Result;
use crate::events::Waiting;
use crate::metrics::Fault;
use crate::session::lock;

/// What is brought in together at the most, where nobody has asked for it.
const MOST_BYTES: u64 = 1 << 20;
/// What is brought in around a page that is wanted: a chunk of the image.
const AROUND_PAGES: u64 = 16;
/// How long who brings in what nobody has asked for waits while faults are being answered.
const GIVE_WAY: Duration = Duration::from_micros(50);

/// A thread that brings pages in.
pub(super) struct Installer<'a> {
    server: &'a Server,
    buffer: Buffer,
    /// Where the last pages around a fault end, by process, and how many those were: who asks for
    /// the next ones goes through memory in order.
    last: (u64, Addr, u64),
}

impl<'a> Installer<'a> {
    pub fn new(server: &'a Server) -> Self {
        Self {
            server,
            buffer: Buffer::new(MOST_BYTES as usize),
            last: (0, Addr(0), 0),
        }
    }

    /// Answers the threads of a process that wait; who cannot be answered before events are read
    /// goes on waiting.
    pub fn answer(&mut self, space: &AddressSpace) -> Result<()> {
        let waiting = std::mem::take(&mut *lock(&space.waiting));
        for fault in waiting {
            let owed = lock(&space.owed).find(fault.addr);
            let (outcome, what) = match owed {
                Some(piece) => (self.bring(space, piece, &fault)?, "data"),
                None => (space.zero(fault.addr)?, "zero"),
            };
            let what = match outcome {
                Placing::Done => what,
                Placing::Again => {
                    lock(&space.waiting).push(fault);
                    "deferred"
                }
            };
            let fault_of = Fault {
                kind: "missing",
                page_size: PAGE_BYTES,
                outcome: what,
            };
            self.server.metrics.fault(&fault_of, fault.since.elapsed());
        }
        Ok(())
    }

    /// Brings in the page that a thread waits for, and others of `piece` around it.
    fn bring(&mut self, space: &AddressSpace, piece: Piece, fault: &Waiting) -> Result<Placing> {
        let number = piece.first_page + (fault.addr.0 - piece.span.start.0) / PAGE_BYTES;
        let (last, end, count) = self.last;
        let pages = match (last, end) == (space.number, fault.addr) {
            true => (2 * count).min(MOST_BYTES / PAGE_BYTES),
            false => AROUND_PAGES,
        };
        // Chunks are aligned in the image.
        let from = (number / AROUND_PAGES * AROUND_PAGES).max(piece.first_page);
        let start = fault.addr.0 - (number - from) * PAGE_BYTES;
        let end = (start + pages * PAGE_BYTES).min(piece.span.end.0);
        let span = Span {
            start: Addr(start),
            end: Addr(end),
        };
        self.last = (space.number, span.end, pages);
        let first_page = from;
        self.install(space, Piece { span, first_page }, "image")
    }

    fn install(
        &mut self,
        space: &AddressSpace,
        piece: Piece,
        source: &'static str,
    ) -> Result<Placing> {
        let bytes = &mut self.buffer.bytes()[..piece.span.bytes() as usize];
        let image = &self.server.image;
        image.read_pages(space.space, piece.first_page, bytes)?;
        let placed = space.place(piece, bytes)?;
        if placed == Placing::Done {
            self.server.metrics.installed(source, piece.span.bytes());
        }
        Ok(placed)
    }

    /// Brings in the next pages that nobody has asked for.
    pub fn fetch(&mut self, space: &AddressSpace) -> Result<()> {
        if self.server.busy.load(Relaxed) {
            std::thread::sleep(GIVE_WAY);
        }
        let Some(piece) = next(space) else {
            return Ok(());
        };
        if self.install(space, piece, "prefetch")? == Placing::Again {
            // Whoever reads the events goes first.
            std::thread::sleep(GIVE_WAY);
        }
        Ok(())
    }
}

/// The next pages that are to come to a process: those around the addresses that come first, then
/// all others in order.
fn next(space: &AddressSpace) -> Option<Piece> {
    let owed = lock(&space.owed);
    while let Some(addr) = lock(&space.first).pop() {
        if let Some(piece) = owed.find(addr) {
            let skipped = (addr.0 - piece.span.start.0) / PAGE_BYTES;
            let from = piece.first_page + skipped / AROUND_PAGES * AROUND_PAGES;
            let start = piece
                .span
                .start
                .plus((from - piece.first_page) * PAGE_BYTES);
            return owed
                .from(start)
                .map(|piece| piece.limited(AROUND_PAGES * PAGE_BYTES));
        }
    }
    let reached = Addr(space.reached.load(Relaxed));
    // What could not be brought in before is tried again.
    let piece = owed.from(reached).or_else(|| owed.from(Addr(0)))?;
    let piece = piece.limited(MOST_BYTES);
    space.reached.store(piece.span.end.0, Relaxed);
    Some(piece)
}
