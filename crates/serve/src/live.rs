//! What the target has changed, at one instant, copied while it runs on.
//!
//! At the instant ([`Session::diff_live`]) all pages that the layer is to have are protected, or
//! saved at once where that cannot be. Who writes to one of them afterwards waits until it is saved
//! ([`PendingPages::save`]); while pages are being given up, all are saved before it is heard which
//! ([`Session::may_read`]). [`LiveDiff::finish`] copies them.
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use abi::spans::{Spans, subtract};
use abi::{PAGE_BYTES, Span};
use image::{Reader, Writer};
use pages::{Drain, Extent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sys::uffd::Modes;

use crate::ability::register;
use crate::bits::{self, Bits};
use crate::diff::{DiffSpans, count, extents, inherit_rest, wait_for_change};
use crate::ledger::EVENTS_MAX;
use crate::pending::{Part, PendingPages, extent};
use crate::region::PageStates;
use crate::session::lock;
use crate::{Ability, Difference, Error, Region, Result, Session};

/// Bytes copied together: a thread for each processor would leave the target none.
const TOGETHER_BYTES: u64 = 4 << 20;

/// How far a live difference is, in bytes.
#[derive(Debug, Default)]
pub struct CopyProgress {
    /// To be copied, or compared with what was before, in all.
    pub wanted_bytes: AtomicU64,
    /// Of which so many are done.
    pub copied_bytes: AtomicU64,
    /// And so many were saved before they changed.
    pub saved_bytes: AtomicU64,
}

/// A difference of one instant that is not copied yet. Dropping it lets everybody write.
pub struct LiveDiff<'a> {
    session: &'a Session,
    writer: &'a Writer,
    parent: Arc<Reader>,
    pending: Arc<PendingPages>,
    copied: Arc<CopyProgress>,
    /// Which pages of each region have to be compared with what was before.
    doubtful: Vec<Bits>,
    stored: Vec<Extent>,
    zero: Vec<Extent>,
    /// Memory left to the kernel whose writes are told meanwhile.
    registered: Vec<Span>,
    difference: Difference,
}

impl Session {
    /// Does what [`Session::diff`] does, but the target may run on when this returns: the image is
    /// its memory at that instant, once [`LiveDiff::finish`] has copied it. The session must be
    /// served meanwhile. There must be no other difference before that is over.
    ///
    /// Where writes are found and not told ([`Ability::Found`]), everything is read before this
    /// returns.
    ///
    /// # Errors
    /// Those of [`Session::diff`]; [`Error::Unable`] where we do not hear of what is given up.
    pub fn diff_live<'a>(
        &'a self,
        writer: &'a Writer,
        copied: &Arc<CopyProgress>,
    ) -> Result<LiveDiff<'a>> {
        let parent = self.parent_of(writer)?;
        if !self.hears_removals {
            let what = "the userfaultfd does not tell what the machine gives up, which would be \
                        lost before it is copied: its monitor has to ask for EVENT_REMOVE";
            return Err(Error::Unable(what.to_owned()));
        }
        let doubtful = self.regions.iter();
        let doubtful = doubtful.map(|(region, _)| bits::none(region.len()));
        let mut live = LiveDiff {
            session: self,
            writer,
            parent,
            pending: Arc::new(PendingPages::new(
                &self.regions,
                &self.process,
                copied.clone(),
            )),
            copied: copied.clone(),
            doubtful: doubtful.collect(),
            stored: Vec::new(),
            zero: Vec::new(),
            registered: Vec::new(),
            difference: Difference::default(),
        };
        let uncertain = live.begin()?;
        for part in uncertain {
            live.read_now(part)?;
        }
        Ok(live)
    }

    /// Pages that a live difference has not copied yet.
    pub(crate) fn pending(&self) -> Option<Arc<PendingPages>> {
        lock(&self.pending).clone()
    }

    /// How many events may be read now, so that nothing is given up that is not saved: as soon as
    /// that is read, it may be gone. When `all_saved`, any.
    pub(crate) fn may_read(&self, pending: &PendingPages, all_saved: &mut bool) -> Result<usize> {
        let Some(page) = pending.first_open() else {
            *all_saved = true;
            return Ok(EVENTS_MAX);
        };
        let mut told = [PollFd::new(&self.uffd, PollFlags::IN)];
        match poll(&mut told, Some(&Timespec::default())) {
            Ok(0) => return Ok(0),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::Descriptor(errno.into())),
        }
        // It is protected already. While something is given up, the kernel refuses that; and if
        // nothing is, there is a fault, which is read before what comes now.
        match self.uffd.write_protect(page, true) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
                pending.save_all();
                *all_saved = true;
                Ok(EVENTS_MAX)
            }
            _ => Ok(1),
        }
    }
}

impl LiveDiff<'_> {
    /// Makes this the instant; gives the pages that may change all the same.
    fn begin(&mut self) -> Result<Vec<Part>> {
        let began = Instant::now();
        loop {
            let (alone, sorted) = self.session.sort_all()?;
            match self.protect_all(&sorted) {
                Ok(uncertain) => {
                    let wanted_bytes = self.enter(&sorted, &uncertain);
                    self.copied.wanted_bytes.store(wanted_bytes, Relaxed);
                    *lock(&self.session.pending) = Some(self.pending.clone());
                    return Ok(self.session.parts(&uncertain));
                }
                Err(error) => {
                    drop(alone);
                    wait_for_change(began, error)?;
                }
            }
        }
    }

    /// Has all pages protected that are to be looked at; gives those of each region that may change
    /// without anybody being told.
    fn protect_all(&mut self, sorted: &[DiffSpans]) -> Result<Vec<Spans>> {
        let session = self.session;
        let regions = session.regions.iter().zip(sorted);
        let uncertain = regions.map(|((region, known), sorted)| {
            let targets = sorted.data.and(&sorted.doubtful);
            if session.ability != Ability::Told {
                return Ok(targets);
            }
            // One that is swapped out may be a mark alone, and what was given up not be gone yet.
            let there = session.there(&targets, false)?;
            let there = subtract(&there, &spans(region, &known.late));
            self.protect(region, known, &there)?;
            Ok(subtract(&targets, &there))
        });
        uncertain.collect()
    }

    /// Protects pages that are there, those also that were left to the kernel.
    fn protect(&mut self, region: &Region, known: &PageStates, there: &Spans) -> Result<()> {
        let session = self.session;
        // Those that we brought in are protected.
        let others = subtract(there, &spans(region, &known.installed));
        for native in &spans(region, &known.native) {
            if others.meets(native) && !self.registered.contains(native) {
                register(&session.uffd, *native, Modes::WP, session.pid())?;
                self.registered.push(*native);
            }
        }
        for span in &others {
            let protected = session.uffd.write_protect(*span, true);
            protected.map_err(|e| Error::call("write-protect", *span, session.pid(), e))?;
        }
        Ok(())
    }

    /// Notes what is to become of pages; gives how many bytes have to be looked at.
    fn enter(&mut self, sorted: &[DiffSpans], uncertain: &[Spans]) -> u64 {
        let regions = self.session.regions.iter().zip(sorted).zip(uncertain);
        let mut wanted_bytes = 0;
        for (number, (((region, _), sorted), uncertain)) in regions.enumerate() {
            for span in &sorted.doubtful {
                self.doubtful[number].insert(region.numbers_of(*span).0);
            }
            let targets = sorted.data.and(&sorted.doubtful);
            for span in &subtract(&targets, uncertain) {
                self.pending.want((number, region.numbers_of(*span).0));
            }
            wanted_bytes += targets.bytes();
            self.zero.extend(extents(region, &sorted.zero));
            self.difference.parent_pages += region.bytes / PAGE_BYTES;
        }
        self.difference.written_pages = wanted_bytes / PAGE_BYTES;
        wanted_bytes
    }

    /// Reads pages that may change, and makes room for them where there is none.
    fn read_now(&mut self, part: Part) -> Result<()> {
        let (number, pages) = part;
        let page_bytes = self.session.regions[number].0.granule_bytes();
        let most = (TOGETHER_BYTES / page_bytes).max(1);
        let mut at = pages.start;
        while at < pages.end {
            let end = (at + most).min(pages.end);
            while !self.pending.has_room((end - at) * page_bytes) {
                self.copy_some()?;
            }
            self.pending.want_saved((number, at..end))?;
            at = end;
        }
        Ok(())
    }
}

impl LiveDiff<'_> {
    /// Copies what is not copied yet; the image can be sealed, and [`Session::kept`] called.
    ///
    /// # Errors
    /// [`Error::Lost`]; those of reading and writing. The next difference has what this one was to
    /// have, too.
    pub fn finish(mut self) -> Result<Difference> {
        while self.copy_some()? {}
        self.zero
            .iter()
            .for_each(|extent| self.writer.mark_zero(extent.space, extent.numbers()));
        self.difference.zero_pages += count(&self.zero);
        self.stored
            .sort_by_key(|extent| (extent.space, extent.first_page));
        inherit_rest(
            self.writer,
            &self.parent,
            &[&self.stored[..], &self.zero].concat(),
        )?;
        let own = count(&self.stored) + count(&self.zero);
        let difference = &mut self.difference;
        difference.parent_pages = difference.parent_pages.saturating_sub(own);
        self.session.metrics.diff(difference.stored_pages);
        Ok(self.difference)
    }

    /// Copies some pages; whether there were any.
    fn copy_some(&mut self) -> Result<bool> {
        let parts = self.pending.next(TOGETHER_BYTES);
        let (mut stored, doubtful) = self.extents(&parts);
        let pending = &*self.pending;
        stored.extend(pages::changed(pending, &doubtful, &self.parent, &|_| ())?);
        let how = Drain {
            beside: true,
            ..Drain::default()
        };
        let drained = pages::drain_all(&[(pending, &stored)], self.writer, how)?;
        self.difference.stored_pages += drained.stored_pages;
        self.difference.zero_pages += drained.zero_pages;
        self.stored.extend(stored);
        pending.done(&parts);
        match pending.is_lost() {
            true => Err(Error::Lost {
                pid: self.session.pid(),
            }),
            false => Ok(!parts.is_empty()),
        }
    }

    /// Those of `parts` that are to be stored, and those that are to be compared before.
    fn extents(&self, parts: &[Part]) -> (Vec<Extent>, Vec<Extent>) {
        let (mut data, mut doubtful) = (Vec::new(), Vec::new());
        for (number, pages) in parts {
            let region = &self.session.regions[*number].0;
            let compared = &self.doubtful[*number];
            let mut at = pages.start;
            while at < pages.end {
                let is_doubtful = compared.contains(at);
                let end = compared.next(at, !is_doubtful).min(pages.end);
                let extents = if is_doubtful {
                    &mut doubtful
                } else {
                    &mut data
                };
                extents.push(extent(region, &(at..end)));
                at = end;
            }
        }
        (data, doubtful)
    }
}

impl Drop for LiveDiff<'_> {
    fn drop(&mut self) {
        let session = self.session;
        *lock(&session.pending) = None;
        for span in &self.registered {
            // Who waits there for us looks again; where the target is gone, nobody does.
            let _ = session.uffd.unregister(*span);
            let _ = session.uffd.wake(*span);
        }
        session.metrics.saved(self.copied.saved_bytes.load(Relaxed));
    }
}

impl Session {
    /// The pages of the target in `spans`, which are those of each region.
    fn parts(&self, spans: &[Spans]) -> Vec<Part> {
        let all = self.regions.iter().zip(spans).enumerate();
        let parts = all.flat_map(|(number, ((region, _), spans))| {
            let parts = spans.iter().map(|span| region.numbers_of(*span).0);
            parts.map(move |pages| (number, pages)).collect::<Vec<_>>()
        });
        parts.collect()
    }
}

fn spans(region: &Region, pages: &Bits) -> Spans {
    let ranges = pages.ranges();
    ranges.iter().map(|range| region.span_of(range)).collect()
}
