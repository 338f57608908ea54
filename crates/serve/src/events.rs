//! What the target's userfaultfd tells.
use std::time::Instant;

use abi::{Addr, PAGE_BYTES, Span};
use sys::uffd::{EVENT_WORDS, Event};

use crate::ledger::{EVENTS_MAX, Word};
use crate::{Ability, Error, Result, Session};

/// A thread of the target that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingThread {
    /// For what.
    pub addr: Addr,
    /// It may read the page, but not write to it.
    pub protected: bool,
    /// Somebody else was bringing the page in when it was looked at.
    pub claimed: bool,
    /// Since when we know of it.
    pub since: Instant,
    /// When it was first found that the host has no page for it.
    pub starved: Option<Instant>,
    /// When it is tried again, where that is so.
    pub again: Option<Instant>,
}

impl WaitingThread {
    /// One that waits for a missing page.
    pub const fn new(addr: Addr, since: Instant) -> Self {
        Self {
            addr,
            protected: false,
            claimed: false,
            since,
            starved: None,
            again: None,
        }
    }

    /// True if it is too early to try again.
    pub fn is_resting(&self, now: Instant) -> bool {
        self.again.is_some_and(|again| again > now)
    }
}

impl Session {
    /// Reads all events. Memory that was given up is noted first; faults are appended to `waiting`.
    pub(crate) fn read_events(&self, waiting: &mut Vec<WaitingThread>) -> Result<()> {
        let _alone = self.order.write();
        self.read_events_alone(waiting)
    }

    /// The same for who holds the order alone.
    pub(crate) fn read_events_alone(&self, waiting: &mut Vec<WaitingThread>) -> Result<()> {
        let (mut events, mut given_up) = (Vec::new(), Vec::new());
        let pending = self.pending();
        let mut all_saved = pending.is_none();
        loop {
            let most = match &pending {
                Some(pending) if !all_saved => self.may_read(pending, &mut all_saved)?,
                _ => EVENTS_MAX,
            };
            if most == 0 {
                break;
            }
            // Who is killed here leaves what was read to who comes next.
            self.ledger.set(Word::Reading, 1);
            let room = &self.ledger.events()[..most * EVENT_WORDS];
            let read = self.uffd.events_in(room, &mut events);
            let more = read.map_err(Error::Descriptor)?;
            let since = Instant::now();
            for event in events.drain(..) {
                self.note(event, since, waiting, &mut given_up);
            }
            self.ledger.forget_events();
            if !more {
                break;
            }
        }
        for span in given_up {
            self.release_removed(span)?;
        }
        Ok(())
    }

    fn note(
        &self,
        event: Event,
        since: Instant,
        waiting: &mut Vec<WaitingThread>,
        given_up: &mut Vec<Span>,
    ) {
        match event {
            Event::Fault {
                addr, protected, ..
            } => waiting.push(WaitingThread {
                protected,
                ..WaitingThread::new(addr.page_start(), since)
            }),
            Event::Remove(span) | Event::Unmap(span) => {
                self.note_removed(span);
                given_up.push(span);
            }
            // The child's memory is its own affair.
            Event::Fork(_) => log::warn!("process {} forked", self.pid()),
            Event::Remap { from, to, .. } => {
                log::warn!(
                    "process {} moved its memory from {from} to {to}",
                    self.pid()
                );
            }
            Event::Unknown(number) => log::warn!("a userfaultfd told {number}"),
        }
    }

    /// Notes that what is in `span` reads as zeros.
    pub(crate) fn note_removed(&self, span: Span) {
        self.ledger.note_removal();
        if let Some(pending) = self.pending() {
            pending.note_removed(span);
        }
        for (region, known) in &self.regions {
            let (whole, cut) = region.numbers_of(span);
            known.removed.insert(whole.clone());
            known.removed_since.insert(whole.clone());
            known.installed.remove(whole.clone());
            known.early.remove(whole.clone());
            known.written.remove(whole.clone());
            known.unsaved.remove(whole.clone());
            if self.ability == Ability::Told {
                known.suspects.insert(whole);
            }
            // The kernel clears a part of a page that is there, without telling that as a write.
            for page in cut {
                known.suspects.insert(page..page + 1);
                if !known.installed.contains(page) {
                    let part = span.intersect(region.span_of(&(page..page + 1)));
                    let from = (part.start.0 - region.at.0) / PAGE_BYTES;
                    let pages = part.bytes() / PAGE_BYTES;
                    known.punched.insert(from..from + pages);
                }
            }
        }
    }
}
