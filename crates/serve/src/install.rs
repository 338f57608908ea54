//! Bringing pages in.
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use abi::{PAGE_BYTES, Span};
use image::Granule;
use pages::Buffer;
use rustix::io::Errno;

use crate::events::WaitingThread;
use crate::metrics::Fault;
use crate::prefetch::Piece;
use crate::region::PageStates;
use crate::{Ability, Error, Region, Result, Session};

/// Most bytes of one fetch: a huge page. A fault waits for no more than that.
pub(crate) const MOST_BYTES: u64 = 2 << 20;
/// What is brought in around a small page that is wanted: a chunk of the image. It takes twice as
/// long as the page alone.
const AROUND_PAGES: u64 = 16;

/// How long it is tried to get a huge page for who waits for it, and how often.
pub(crate) const STARVED_MOST: Duration = Duration::from_secs(3);
pub(crate) const STARVED_AGAIN: Duration = Duration::from_millis(10);

/// The number of no page: nobody waits for one.
pub(crate) const NOBODY: u64 = u64::MAX;

/// Outcome of filling pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// They are there.
    Done(&'static str),
    /// Somebody else is bringing them in.
    Claimed,
    /// The target's mappings are changing: events have to be read first.
    Again,
    /// The host has no huge page for it.
    Starved,
}

/// A thread that brings pages in.
pub(crate) struct Installer<'a> {
    session: &'a Session,
    buffer: Buffer,
    zeros: Buffer,
}

impl<'a> Installer<'a> {
    pub fn new(session: &'a Session) -> Self {
        Self {
            session,
            buffer: Buffer::new(MOST_BYTES as usize),
            zeros: Buffer::new(MOST_BYTES as usize),
        }
    }

    /// Answers faults; those that cannot be answered before events are read stay in `waiting`.
    ///
    /// # Errors
    /// See [`Session::serve`].
    pub fn answer(&mut self, waiting: &mut Vec<WaitingThread>) -> Result<()> {
        let mut later = Vec::new();
        let now = Instant::now();
        for fault in std::mem::take(waiting) {
            if fault.is_resting(now) {
                later.push(fault);
                continue;
            }
            let number = self.session.region_at(fault.addr);
            let pid = self.session.pid();
            let number = number.ok_or(Error::Stray {
                pid,
                addr: fault.addr,
            })?;
            let outcome = match fault.protected {
                true => self.let_write(number, &fault)?,
                false => self.resolve_or_poison(number, &fault)?,
            };
            let outcome = match outcome {
                Outcome::Done(outcome) => outcome,
                Outcome::Claimed => {
                    later.push(WaitingThread {
                        claimed: true,
                        ..fault
                    });
                    continue;
                }
                Outcome::Again => {
                    later.push(fault);
                    "deferred"
                }
                Outcome::Starved => {
                    later.push(WaitingThread {
                        starved: fault.starved.or(Some(now)),
                        again: Some(now + STARVED_AGAIN),
                        ..fault
                    });
                    continue;
                }
            };
            let kind = match fault.protected {
                true => "write-protect",
                false => "missing",
            };
            let (region, known) = &self.session.regions[number];
            let page_size = region.granule_bytes();
            if outcome == "there" && known.early.contains(region.number_of(fault.addr)) {
                self.session.metrics.prefetch_hits.inc();
            }
            let fault_of = Fault {
                kind,
                page_size,
                outcome,
            };
            self.session.metrics.fault(&fault_of, fault.since.elapsed());
        }
        *waiting = later;
        Ok(())
    }

    /// Brings a page in that a thread waits for, or poisons it where that cannot be.
    fn resolve_or_poison(&mut self, number: usize, fault: &WaitingThread) -> Result<Outcome> {
        let region = &self.session.regions[number].0;
        let page = region.number_of(fault.addr);
        let resolved = match self.resolve_fault(number, fault) {
            Ok(Outcome::Starved) if has_starved(fault.starved) => {
                let span = region.span_of(&(page..page + 1));
                Err(self.session.no_room(span))
            }
            resolved => resolved,
        };
        resolved.or_else(|error| self.poison(number, page, error))
    }

    /// Notes that a page is written, and lets the writer go on.
    fn let_write(&self, number: usize, fault: &WaitingThread) -> Result<Outcome> {
        let (region, known) = &self.session.regions[number];
        let page = region.number_of(fault.addr);
        let span = region.span_of(&(page..page + 1));
        let _order = self.session.order.read();
        let pending = self.session.pending();
        if pending.is_some_and(|pending| !pending.save(number, page)) {
            return Ok(Outcome::Claimed);
        }
        known.written.insert(page..page + 1);
        match self.session.uffd.write_protect(span, false) {
            Ok(()) => Ok(Outcome::Done("written")),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => Ok(Outcome::Again),
                // It was taken out meanwhile, which woke who waited.
                Some(Errno::NOENT) => Ok(Outcome::Done("there")),
                _ => Err(Error::call("let go", span, self.session.pid(), error)),
            },
        }
    }

    /// Brings the page in that a thread waits for, and others around it.
    fn resolve_fault(&mut self, number: usize, fault: &WaitingThread) -> Result<Outcome> {
        let (region, known) = &self.session.regions[number];
        let page = region.number_of(fault.addr);
        if fault.claimed {
            if known.claimed.contains(page) {
                return Ok(Outcome::Claimed);
            }
            // Where it is not there after all, who waits for it asks again.
            self.session.wake(region.span_of(&(page..page + 1)))?;
            return Ok(Outcome::Done("there"));
        }
        let around = self.around(number, page);
        // What belongs together: the page, and those beside it that are wanted as it is.
        let removed = known.removed.contains(page);
        let wanted = |one: u64| {
            !known.installed.contains(one)
                && !known.native.contains(one)
                && known.removed.contains(one) == removed
        };
        let start = (around.start..page).rev().take_while(|one| wanted(*one));
        let start = page - start.count() as u64;
        let end = (page + 1..around.end).take_while(|one| wanted(*one));
        let end = page + 1 + end.count() as u64;
        let claim = known.claim(page..end);
        let noted = page..claim.as_ref().map_or(page + 1, |claim| claim.range.end);
        self.session.note_fault(number, noted);
        let Some(mut claim) = claim else {
            return Ok(Outcome::Claimed);
        };
        claim.extend_back(start);
        self.install(number, claim.range.clone(), removed, page, "image")
    }

    /// Has who touches a page that cannot be brought in get `SIGBUS`, where that is wanted.
    fn poison(&self, number: usize, page: u64, error: Error) -> Result<Outcome> {
        let poisons = matches!(
            error,
            Error::Image(_) | Error::Pages(_) | Error::NoRoom { .. }
        );
        if !self.session.options.poison || !poisons {
            return Err(error);
        }
        let (region, known) = &self.session.regions[number];
        let span = region.span_of(&(page..page + 1));
        let _order = self.session.order.read();
        if known.removed.contains(page) {
            return Ok(Outcome::Again);
        }
        log::error!(
            "{span} of process {} is poisoned: {error}",
            self.session.pid()
        );
        match self.session.uffd.poison(span, true) {
            Ok(_) => Ok(Outcome::Done("poisoned")),
            Err(refused) => match Errno::from_io_error(&refused) {
                Some(Errno::AGAIN) => Ok(Outcome::Again),
                Some(Errno::EXIST) => self.poison_protected(span, error),
                _ => Err(Error::call("poison", span, self.session.pid(), refused)),
            },
        }
    }

    /// The same where the kernel says that something is there: a page, or the mark of one that was
    /// protected before it came, which is to be lifted first. Otherwise `error` is told.
    fn poison_protected(&self, span: Span, error: Error) -> Result<Outcome> {
        if !self.session.there(&[span], false)?.is_empty() {
            self.session.wake(span)?;
            return Ok(Outcome::Done("there"));
        }
        let lifted = self.session.uffd.write_protect(span, false);
        match lifted.and_then(|()| self.session.uffd.poison(span, true)) {
            Ok(_) => Ok(Outcome::Done("poisoned")),
            Err(refused) => match Errno::from_io_error(&refused) {
                Some(Errno::AGAIN) => Ok(Outcome::Again),
                _ => Err(error),
            },
        }
    }

    /// Brings in pages that nobody waits for, as far as there is nothing wrong with them; others
    /// are poisoned one by one, where that is wanted.
    pub fn install_early(&mut self, number: usize, range: Range<u64>) -> Result<Outcome> {
        let together = self.install(number, range.clone(), false, NOBODY, "prefetch");
        if !matches!(together, Err(Error::Image(_) | Error::Pages(_))) {
            return together;
        }
        for page in range {
            let outcome = match self.install(number, page..page + 1, false, NOBODY, "prefetch") {
                Err(error) => self.poison(number, page, error)?,
                Ok(outcome) => outcome,
            };
            if matches!(outcome, Outcome::Again | Outcome::Starved) {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Done("poisoned"))
    }

    /// Returns the pages worth fetching together with a page.
    fn around(&self, number: usize, page: u64) -> Range<u64> {
        let region = &self.session.regions[number].0;
        if region.granule != Granule::Small {
            return page..page + 1;
        }
        // Chunks are aligned in the image.
        let skew = region.first_page % AROUND_PAGES;
        let start = ((page + skew) / AROUND_PAGES * AROUND_PAGES).saturating_sub(skew);
        start..(start + AROUND_PAGES).min(region.len())
    }

    /// Brings in what is missing of a piece that somebody will want. What cannot be brought in now
    /// is left to the faults that ask for it.
    pub fn install_ahead(&mut self, (number, range): Piece) {
        let known = &self.session.regions[number].1;
        let mut at = range.start;
        while at < range.end {
            let missing = known.missing(at..range.end);
            at = missing.end.max(at + 1);
            let Some(claim) = known.claim(missing) else {
                continue;
            };
            at = claim.range.end;
            match self.install(number, claim.range.clone(), false, NOBODY, "ahead") {
                Ok(Outcome::Starved) => return,
                Ok(_) => {}
                Err(error) => {
                    log::debug!("nothing is brought in ahead: {error}");
                    return;
                }
            }
        }
    }

    /// Brings pages in: those of the image, or zeros where they were given up. `wanted` is the one
    /// that somebody waits for, who is woken also where it is there already.
    pub fn install(
        &mut self,
        number: usize,
        range: Range<u64>,
        removed: bool,
        wanted: u64,
        source: &'static str,
    ) -> Result<Outcome> {
        let session = self.session;
        let (region, known) = &session.regions[number];
        let span = region.span_of(&range);
        let len = span.bytes() as usize;
        let pages = region.image_pages(&range);
        let located = session
            .image
            .locate(region.space, pages.start, pages.end - pages.start)?;
        let is_zero = removed
            || (located.part.is_none() && u64::from(located.pages) * PAGE_BYTES == span.bytes());
        let share = session.share.as_deref().filter(|_| !removed);
        if let Some(share) = share {
            let count = pages.end - pages.start;
            share.fill(&session.image, pages.start, count, self.buffer.bytes())?;
        } else if !is_zero {
            let bytes = &mut self.buffer.bytes()[..len];
            session.image.read_pages(region.space, pages.start, bytes)?;
        }
        let _order = session.order.read();
        if (range.clone()).any(|page| known.removed.contains(page) != removed) {
            return Ok(Outcome::Again);
        }
        if !is_zero {
            // Not before: what is given up now waits until these are there.
            punch(region, known, &range, &mut self.buffer.bytes()[..len]);
        }
        let bytes = match (share, is_zero) {
            (Some(_), _) => None,
            (None, true) => Some(&self.zeros.bytes()[..len]),
            (None, false) => Some(&self.buffer.bytes()[..len]),
        };
        let outcome = match place(session, number, span, bytes, wanted)? {
            Placement::Again => return Ok(Outcome::Again),
            Placement::Starved => return Ok(Outcome::Starved),
            outcome => outcome,
        };
        if matches!(source, "prefetch" | "ahead") {
            known.early.insert(range);
        }
        let source = if is_zero { "zero" } else { source };
        let from = if share.is_some() { "shared" } else { source };
        session.metrics.installed(from, span.bytes());
        if !removed && source != "prefetch" {
            session.note_wanted(region.space, pages);
        }
        Ok(Outcome::Done(match (outcome, removed, is_zero) {
            (Placement::There, ..) => "there",
            (_, true, _) => "removed",
            (_, _, true) => "zero",
            _ => "data",
        }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    Done,
    /// The page that was wanted was there already.
    There,
    Again,
    /// The host has no huge page for it.
    Starved,
}

/// Puts `bytes` to `span`, or without them what the target shares, page by page where some are
/// there or are not in one mapping.
fn place(
    session: &Session,
    number: usize,
    span: Span,
    bytes: Option<&[u8]>,
    wanted: u64,
) -> Result<Placement> {
    let (region, known) = &session.regions[number];
    let size = region.granule_bytes();
    let protect = session.ability > Ability::Missing;
    let (mut done, mut most_bytes) = (0, span.bytes());
    let mut outcome = Placement::Done;
    while done < span.bytes() {
        let at = span.start.plus(done);
        let page = region.number_of(at);
        // A live difference has pages told of that were taken out: it would be let in to those,
        // too.
        let ours = (known.native.next(page, true) - page) * size;
        let rest = Span::new(at, ours.min(span.bytes() - done).min(most_bytes));
        let copied = match bytes {
            _ if rest.is_empty() => Err(Errno::NOENT.into()),
            Some(bytes) => {
                let bytes = &bytes[done as usize..][..rest.bytes() as usize];
                let copied = session.uffd.copy_as(at, bytes, true, protect);
                copied.map(|bytes| bytes as u64)
            }
            None => session.uffd.map_cached(rest, protect),
        };
        match copied {
            Ok(copied) => {
                let pages = copied / size;
                if pages == 0 {
                    return Ok(Placement::Again);
                }
                known.installed.insert(page..page + pages);
                done += pages * size;
            }
            // Pages of several mappings are refused together.
            Err(error) if is(&error, Errno::NOENT) && rest.bytes() > size => most_bytes = size,
            Err(error) => match why(session, number, rest, &error)? {
                Refusal::Again => return Ok(Placement::Again),
                Refusal::Starved => return Ok(Placement::Starved),
                Refusal::There => {
                    if page == wanted {
                        outcome = Placement::There;
                    }
                    session.wake(Span::new(at, size))?;
                    done += size;
                }
            },
        }
    }
    Ok(outcome)
}

/// The reason why the first page of several is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// It is there, or is none of ours any more.
    There,
    /// The target's mappings are changing.
    Again,
    /// The host has no huge page for it.
    Starved,
}

fn is(error: &std::io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}

/// Why the first page of `rest` is refused. That a page is there is noted.
fn why(session: &Session, number: usize, rest: Span, error: &std::io::Error) -> Result<Refusal> {
    let (region, known) = &session.regions[number];
    let (page, size) = (region.number_of(rest.start), region.granule_bytes());
    let first = Span::new(rest.start, size);
    let is_huge = region.granule != Granule::Small;
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => Ok(Refusal::There),
        Some(Errno::AGAIN) => Ok(Refusal::Again),
        Some(Errno::EXIST | Errno::NOMEM) if is_huge => {
            let protect = session.ability > Ability::Missing;
            if !session.has_huge_page(first, protect)? {
                return Ok(Refusal::Starved);
            }
            known.installed.insert(page..page + 1);
            Ok(Refusal::There)
        }
        Some(Errno::EXIST) => {
            known.installed.insert(page..page + 1);
            Ok(Refusal::There)
        }
        _ => {
            let source = std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(0));
            Err(Error::call("fill", rest, session.pid(), source))
        }
    }
}

/// True if a thread has waited for long enough while the host had no page for it.
pub(crate) fn has_starved(since: Option<Instant>) -> bool {
    since.is_some_and(|since| since.elapsed() > STARVED_MOST)
}

/// Clears in `bytes`, the pages `range` of a region, what was given up of parts of pages.
fn punch(region: &Region, known: &PageStates, range: &Range<u64>, bytes: &mut [u8]) {
    if region.granule == Granule::Small {
        return;
    }
    let size = region.granule.pages();
    let (first, end) = (range.start * size, range.end * size);
    let mut at = known.punched.next(first, true);
    while at < end {
        let until = known.punched.next(at, false).min(end);
        let byte = |page: u64| ((page - first) * PAGE_BYTES) as usize;
        bytes[byte(at)..byte(until)].fill(0);
        at = known.punched.next(until, true);
    }
}

impl Session {
    /// Lets threads that wait for pages look again.
    fn wake(&self, span: Span) -> Result<()> {
        let woken = self.uffd.wake(span);
        woken.map_err(|error| Error::call("wake who waits for", span, self.pid(), error))
    }

    /// Notes for which pages a thread has waited.
    fn note_fault(&self, number: usize, pages: Range<u64>) {
        // Whoever brings everything in needs no help.
        if self.fetching.load(Relaxed) == 0 {
            let len = self.regions[number].0.len();
            self.ahead.note(number, pages, len, self);
        }
    }
}
