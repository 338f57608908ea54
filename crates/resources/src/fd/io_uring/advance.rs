//! A new ring whose counters come to where those of an old one stood.
//!
//! How many entries it has taken and how many completions it has posted, the kernel counts by
//! itself, from 0. A program has values of its own that go on from there. So as many entries that
//! do nothing are submitted, before the ring's memory gets its contents.

use std::sync::atomic::Ordering;

use sys::ring::{Places, RingMemory};

use super::message;
use super::seen::flag;
use crate::{Error, Result};

/// Who has entries submitted.
pub(super) trait Submit {
    /// Has as many submitted, and tells how many were.
    ///
    /// # Errors
    /// When it cannot.
    fn submit(&mut self, count: u32) -> Result<u32>;

    /// Has entries submitted until a word of the ring is what it is to be; false where it knows no
    /// better way than one call after the other. `now` reads the word.
    ///
    /// # Errors
    /// When it cannot.
    fn submit_all(&mut self, _work: Work, _now: &dyn Fn() -> u32) -> Result<bool> {
        Ok(false)
    }

    /// Sends as many messages to the ring: each is a completion there, now or with the next
    /// [`Submit::receive`].
    ///
    /// # Errors
    /// When it cannot.
    fn send(&mut self, count: u32) -> Result<()>;

    /// Has messages posted that were sent.
    ///
    /// # Errors
    /// When it cannot.
    fn receive(&mut self) -> Result<()>;
}

/// Entries to submit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// How many a call is to take.
    pub count: u32,
    /// The word of the queues that says how far it is, in bytes from their start.
    pub watched: usize,
    /// What that is to be.
    pub until: u32,
    /// The word that is to say the same, up to a limit.
    pub head: Option<(usize, u32)>,
}

/// Where the counters of a ring are to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counters {
    pub flags: u32,
    pub sq_entries: u32,
    pub cq_entries: u32,
    /// Entries that the kernel has taken.
    pub sq_head: u32,
    /// Completions that it has posted.
    pub cq_tail: u32,
    /// Completions that the program has seen.
    pub cq_head: u32,
    /// Whether there were entries without completions that said so.
    pub has_skipped: bool,
    /// How many of the entries are of requests that wait. They are submitted again afterwards.
    pub waiting: u32,
}

impl Counters {
    /// Why these counters cannot be come to, if so.
    pub fn hindrance(&self) -> Option<&'static str> {
        const MOST_MORE: u32 = 1 << 31;
        let has_array = self.flags & flag::NO_SQARRAY == 0;
        match () {
            () if self.unread() > self.cq_entries => {
                Some("the head of its completion queue makes no sense")
            }
            () if self.waiting > self.sq_head => {
                Some("its requests are more than the entries that it has taken")
            }
            () if self.cq_tail.saturating_sub(self.worked()) > MOST_MORE => {
                Some("it has posted more completions than it has taken entries")
            }
            () if self.cq_tail < self.worked() && !has_array && !self.has_skipped => {
                Some("it has posted fewer completions than it has taken entries")
            }
            () => None,
        }
    }

    /// Entries of requests that wait no more.
    pub fn worked(&self) -> u32 {
        self.sq_head.wrapping_sub(self.waiting)
    }

    /// Completions that wait to be seen.
    fn unread(&self) -> u32 {
        self.cq_tail.wrapping_sub(self.cq_head)
    }

    /// Brings a new ring there, whose memory is all zeros.
    ///
    /// The kernel looks up in advance where completions are free, by the head that it finds then.
    /// So the head never goes further than where it is to stay, or unread ones would be taken for
    /// free.
    ///
    /// # Errors
    /// [`Error::Kernel`] when the kernel does not do as is told; those of `submit`.
    pub fn reach(
        &self,
        places: &Places,
        (queues, entries): (&RingMemory, &RingMemory),
        by: &mut dyn Submit,
    ) -> Result<()> {
        const RELEASE: Ordering = Ordering::Release;
        let sq_tail = queues.word(places.sq_tail());
        let worked = self.worked();
        let own = self.cq_tail.min(worked);
        sq_tail.store(own, RELEASE);
        // Entries that are all zeros do nothing, and all places of the array lead to the first one.
        self.post(own, places, queues, by)?;
        self.post_more(own, places, queues, by)?;
        queues.word(places.cq_head()).store(self.cq_head, RELEASE);
        sq_tail.store(worked, RELEASE);
        let mut rest = worked - own;
        if self.has_skipped && rest > 0 {
            self.prepare_silent(entries);
            let work = Work {
                count: self.sq_entries,
                watched: places.sq_head(),
                until: worked,
                head: None,
            };
            let now = || queues.word(places.sq_head()).load(Ordering::Acquire);
            if by.submit_all(work, &now)? {
                rest = 0;
            }
            while rest > 0 {
                let count = self.sq_entries.min(rest);
                rest -= submitted(by.submit(count)?, count)?;
            }
        }
        // An index that leads nowhere is taken, and that is all; no more than one at a time.
        for at in 0..self.sq_entries as usize * usize::from(rest > 0) {
            queues
                .word(places.array() + 4 * at)
                .store(u32::MAX, RELEASE);
        }
        while rest > 0 {
            by.submit(1)?;
            rest -= 1;
        }
        let came = |at: usize| queues.word(at).load(Ordering::Acquire);
        let came = (came(places.sq_head()), came(places.cq_tail()));
        match came == (worked, self.cq_tail) {
            true => Ok(()),
            false => Err(strange(format!("came to {came:?}, not to {self:?}"))),
        }
    }

    /// Has as many completions posted, of as many entries.
    fn post(
        &self,
        own: u32,
        places: &Places,
        queues: &RingMemory,
        by: &mut dyn Submit,
    ) -> Result<()> {
        let cq_head = queues.word(places.cq_head());
        let is_wrapped = self.cq_head > self.cq_tail;
        if is_wrapped {
            cq_head.store(self.cq_head, Ordering::Release);
        }
        let head = (places.cq_head(), self.cq_head);
        // There is always room: what is posted is seen at once, or no more than there can be.
        let work = Work {
            count: self.sq_entries,
            watched: places.cq_tail(),
            until: own,
            head: (!is_wrapped).then_some(head),
        };
        let now = || queues.word(places.cq_tail()).load(Ordering::Acquire);
        if by.submit_all(work, &now)? {
            return Ok(());
        }
        let mut posted = 0;
        while posted < own {
            if !is_wrapped {
                cq_head.store(posted.min(self.cq_head), Ordering::Release);
            }
            let count = self.sq_entries.min(own - posted);
            posted += submitted(by.submit(count)?, count)?;
        }
        Ok(())
    }

    /// Has the completions posted for which there was no entry: one request may have many, and
    /// other rings send some.
    fn post_more(
        &self,
        mut posted: u32,
        places: &Places,
        queues: &RingMemory,
        by: &mut dyn Submit,
    ) -> Result<()> {
        const TRIES: u32 = 1000;
        let (cq_head, cq_tail) = (places.cq_head(), places.cq_tail());
        while posted < self.cq_tail {
            if self.cq_head <= self.cq_tail {
                let head = posted.min(self.cq_head);
                queues.word(cq_head).store(head, Ordering::Release);
            }
            let most = self.cq_entries.min(message::MOST);
            let count = most.min(self.cq_tail - posted);
            by.send(count)?;
            posted += count;
            let mut tries = 0;
            while queues.word(cq_tail).load(Ordering::Acquire) != posted {
                by.receive()?;
                tries += 1;
                if tries > TRIES {
                    return Err(strange(format!("has not come to {posted} completions")));
                }
            }
        }
        Ok(())
    }

    /// Has all entries do nothing and post no completion.
    fn prepare_silent(&self, entries: &RingMemory) {
        const FLAGS_AT: usize = 1;
        const CQE_SKIP_SUCCESS: u8 = 1 << 6;
        let entry_bytes = if self.flags & flag::SQE128 != 0 {
            128
        } else {
            64
        };
        for entry in 0..self.sq_entries as usize {
            let flags = entries.byte(entry * entry_bytes + FLAGS_AT);
            flags.store(CQE_SKIP_SUCCESS, Ordering::Release);
        }
    }
}

/// How many of `count` entries were taken.
fn submitted(taken: u32, count: u32) -> Result<u32> {
    match taken {
        taken if (1..=count).contains(&taken) => Ok(taken),
        taken => Err(strange(format!("took {taken} of {count} entries"))),
    }
}

/// The kernel has done with a ring what it does with none.
fn strange(what: String) -> Error {
    Error::kernel(
        "have an io_uring come to its counters",
        std::io::Error::other(what),
    )
}
