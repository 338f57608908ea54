//! Bringing pages in, to who waits for them and to who will.
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use abi::{Addr, PAGE_BYTES, Span};
use pages::Buffer;

use super::Server;
use super::missing::Piece;
use super::space::{AddressSpace, Placement};
use crate::Result;
use crate::events::WaitingThread;
use crate::metrics::Fault;
use crate::session::lock;

/// Most bytes of one fetch, where no thread waits for them.
const MOST_BYTES: u64 = 512 << 10;
/// Pages fetched with a page that is wanted: a chunk of the image.
const AROUND_PAGES: u64 = 16;
/// How long who brings in what nobody has asked for waits while faults are being answered.
pub(super) const GIVE_WAY: Duration = Duration::from_micros(50);

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
                Some(_) if space.is_coming(fault.addr) => (Placement::Again, ""),
                Some(piece) => {
                    self.server.busy.store(true, Relaxed);
                    let installed = self.resolve_fault(space, piece, &fault);
                    self.server.busy.store(false, Relaxed);
                    (installed?, "data")
                }
                None => (space.zero(fault.addr)?, "zero"),
            };
            let what = match outcome {
                Placement::Done => what,
                Placement::Again => {
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
    fn resolve_fault(
        &mut self,
        space: &AddressSpace,
        piece: Piece,
        fault: &WaitingThread,
    ) -> Result<Placement> {
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
        let whole = Piece {
            span,
            first_page: from,
        };
        let piece = whole.at(space.free_around(span, fault.addr));
        self.last = (space.number, piece.span.end, pages);
        // What comes without being asked for goes on from here.
        space.reached.store(piece.span.end.0, Relaxed);
        self.install(space, piece, "image")
    }

    fn install(
        &mut self,
        space: &AddressSpace,
        piece: Piece,
        source: &'static str,
    ) -> Result<Placement> {
        let bytes = &mut self.buffer.bytes()[..piece.span.bytes() as usize];
        let image = &self.server.image;
        image.read_pages(space.space, piece.first_page, bytes)?;
        let placed = space.place(piece, bytes)?;
        if placed == Placement::Done {
            self.server.metrics.installed(source, piece.span.bytes());
        }
        Ok(placed)
    }

    /// Brings in the next pages that nobody has asked for; whether there were some that nobody else
    /// brings in.
    pub fn fetch(&mut self, space: &AddressSpace) -> Result<bool> {
        if self.server.busy.load(Relaxed) {
            std::thread::sleep(GIVE_WAY);
        }
        let Some(piece) = claim(space) else {
            return Ok(false);
        };
        let placed = self.install(space, piece, "prefetch");
        lock(&space.coming).retain(|one| *one != piece.span);
        if placed? == Placement::Again {
            // Whoever reads the events goes first.
            std::thread::sleep(GIVE_WAY);
        }
        Ok(true)
    }
}

/// The next pages that are to come to a process and that nobody brings in yet: those around the
/// addresses that come first, then all others in order. They count as coming from now on.
fn claim(space: &AddressSpace) -> Option<Piece> {
    let owed = lock(&space.owed);
    let mut coming = lock(&space.coming);
    let free = |from: Addr, bytes: u64| {
        let mut at = from;
        loop {
            let piece = owed.from(at)?.limited(bytes);
            match coming.iter().find(|one| one.contains(piece.span.start)) {
                Some(taken) => at = taken.end,
                None => {
                    let next = coming.iter().map(|one| one.start);
                    let next = next.filter(|start| *start > piece.span.start).min();
                    let free_bytes = next.map_or(u64::MAX, |next| next.0 - piece.span.start.0);
                    return Some(piece.limited(free_bytes));
                }
            }
        }
    };
    let first = std::mem::take(&mut *lock(&space.first));
    let mut first = first.into_iter();
    let near = first.by_ref().find_map(|addr| {
        owed.find(addr)?;
        free(addr.page_start(), AROUND_PAGES * PAGE_BYTES)
    });
    lock(&space.first).extend(first);
    let reached = Addr(space.reached.load(Relaxed));
    let piece = match near {
        Some(piece) => piece,
        None => {
            // What could not be brought in before is tried again.
            let piece = free(reached, MOST_BYTES).or_else(|| free(Addr(0), MOST_BYTES))?;
            space.reached.store(piece.span.end.0, Relaxed);
            piece
        }
    };
    coming.push(piece.span);
    Some(piece)
}
