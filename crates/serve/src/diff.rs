//! What the target has changed, as a layer over the image that it came from.
use std::ops::Range;
use std::slice;
use std::sync::{Arc, PoisonError, RwLockWriteGuard};
use std::time::{Duration, Instant};

use abi::spans::{Ranges, Spans, intersect, subtract};
use abi::{PAGE_BYTES, Span};
use image::{Granule, NewSpace, Reader, Writer};
use memory::TaskMemory;
use pages::Extent;
use rustix::io::Errno;
use sys::pagemap::{Action, Category, Query};

use crate::ledger::Word;
use crate::region::PageStates;
use crate::{Ability, Error, Region, Result, Session};

/// How long to wait before written pages are looked for again where the target's mappings were
/// changing, and for how long at the most.
const CHANGING: Duration = Duration::from_micros(200);
const CHANGING_MOST: Duration = Duration::from_secs(10);

/// How long after it was heard that pages were given up they are still looked at.
const LATE_MOST: Duration = Duration::from_secs(60);

/// Counts of a difference, in pages of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Those that were looked at because the target may have changed them.
    pub written_pages: u64,
    /// Those that are stored.
    pub stored_pages: u64,
    /// Those that are zero now.
    pub zero_pages: u64,
    /// Those that are as before.
    pub parent_pages: u64,
}

/// Plan for the pages of a region, as spans of the target's addresses.
pub(crate) struct DiffSpans {
    /// To be stored, as they are.
    pub data: Spans,
    /// To be compared with what was before, and stored where they differ.
    pub doubtful: Spans,
    pub zero: Spans,
}

impl Session {
    /// Puts what was changed since the beginning, or the last difference that was kept, into
    /// `writer`, an image over the last one, and leaves everything else to that. The target must
    /// not run, and goes on being tracked. When the image is whole, [`Session::kept`] has to be
    /// called.
    ///
    /// # Errors
    /// [`Error::Unable`] where writes are not tracked; those of reading and writing. The next
    /// difference has what this one was to have, too.
    pub fn diff(&self, writer: &Writer) -> Result<Difference> {
        let parent = self.parent_of(writer)?;
        let memory = TaskMemory::new(&self.process);
        let mut difference = Difference::default();
        let (mut stored, mut zero) = (Vec::new(), Vec::new());
        // Faults are answered from here on: what is given up all the same comes for who reads it,
        // and is the next difference's.
        let (alone, sorted) = self.sort_all()?;
        drop(alone);
        for ((region, _), sorted) in self.regions.iter().zip(sorted) {
            let data = extents(region, &sorted.data);
            let doubtful = extents(region, &sorted.doubtful);
            difference.written_pages += count(&data) + count(&doubtful);
            stored.extend(data);
            stored.extend(pages::changed(&memory, &doubtful, &parent, &|_| ())?);
            zero.extend(extents(region, &sorted.zero));
            difference.parent_pages += region.bytes / PAGE_BYTES;
        }
        stored.sort_by_key(|extent| (extent.space, extent.first_page));
        zero.iter()
            .for_each(|extent| writer.mark_zero(extent.space, extent.numbers()));
        difference.zero_pages = count(&zero);
        inherit_rest(writer, &parent, &[&stored[..], &zero].concat())?;
        let drained = pages::drain(&memory, &stored, writer, &|_| ())?;
        let not_parents = count(&stored) + difference.zero_pages;
        difference.stored_pages = drained.stored_pages;
        difference.zero_pages += drained.zero_pages;
        difference.parent_pages = difference.parent_pages.saturating_sub(not_parents);
        self.metrics.diff(difference.stored_pages);
        Ok(difference)
    }

    /// The image that a difference is over.
    ///
    /// # Errors
    /// [`Error::Unable`] where there can be none.
    pub(crate) fn parent_of(&self, writer: &Writer) -> Result<Arc<Reader>> {
        if self.ability == Ability::Missing {
            let what = "the userfaultfd tells missing pages only, so what the machine writes is \
                        not known: its monitor has to ask for write protection";
            return Err(Error::Unable(what.to_owned()));
        }
        let without = || Error::Unable("a difference needs a parent".to_owned());
        writer.parent().cloned().ok_or_else(without)
    }

    /// Forgets what the last difference has: it is an image.
    pub fn kept(&self) {
        let _alone = self.order.write();
        for (region, known) in &self.regions {
            let all = 0..region.len();
            known.unsaved.remove(all.clone());
            known.unsaved_removed.remove(all.clone());
            known.unsaved_suspects.remove(all);
        }
    }

    /// Tells which pages of each region may have changed, at one moment, and has them tracked anew;
    /// as long as the guard is held, nothing is brought in, and nobody writes who was told of.
    pub(crate) fn sort_all(&self) -> Result<(RwLockWriteGuard<'_, ()>, Vec<DiffSpans>)> {
        let began = Instant::now();
        let alone = loop {
            let alone = self.order.write().unwrap_or_else(PoisonError::into_inner);
            let found = self.regions.iter().try_for_each(|(region, known)| {
                // Nothing is forgotten where a later region fails.
                self.find_written(region, known)
            });
            match found {
                Ok(()) => break alone,
                Err(error) => {
                    drop(alone);
                    wait_for_change(began, error)?;
                }
            }
        };
        for (region, known) in &self.regions {
            self.find_removed(region, known)?;
        }
        let sorted = self.regions.iter();
        let sorted = sorted.map(|(region, known)| self.sort(region, known));
        Ok((alone, sorted.collect::<Result<_>>()?))
    }

    /// Adds what was written to what is not saved, and has it tracked anew.
    fn find_written(&self, region: &Region, known: &PageStates) -> Result<()> {
        if self.ability == Ability::Told {
            known.written.move_to(&known.unsaved);
            for range in known.installed.ranges() {
                let span = region.span_of(&range);
                let protected = self.uffd.write_protect(span, true);
                protected.map_err(|e| Error::call("write-protect", span, self.pid(), e))?;
            }
            return Ok(());
        }
        known.suspects.move_to(&known.unsaved_suspects);
        let query = Query {
            inverted: Category::empty(),
            all: Category::WRITTEN,
            any: Category::PRESENT | Category::SWAPPED,
            told: Category::empty(),
        };
        self.ledger.set(Word::Scanning, 1);
        let found = self.scan(&[region.span()], &query, Action::PROTECT);
        match &found {
            Ok(found) => {
                let pages = found.iter().map(|span| region.numbers_of(*span).0);
                pages.for_each(|pages| known.unsaved.insert(pages));
            }
            // What was found, and is protected again, is not known: it is told by its contents.
            Err(_) => known.unsaved_suspects.insert(0..region.len()),
        }
        self.ledger.set(Word::Scanning, 0);
        found.map(drop)
    }

    /// Adds what was given up to what is not saved. We hear of it before it is done: what is there
    /// all the same, written again or not gone yet, is looked at by later differences, too.
    fn find_removed(&self, region: &Region, known: &PageStates) -> Result<()> {
        for range in known.late.ranges() {
            known.unsaved_removed.insert(range.clone());
            known.unsaved_suspects.insert(range);
        }
        // A thread that was about to give them up has done so by now.
        if self
            .ledger
            .since_removal()
            .is_none_or(|since| since > LATE_MOST)
        {
            known.late.remove(0..region.len());
        }
        let removed = known.removed_since.ranges();
        let spans = removed.iter().map(|range| region.span_of(range));
        let there = self.there(&spans.collect::<Spans>(), region.granule == Granule::Small)?;
        for span in there {
            known.late.insert(region.numbers_of(span).0);
        }
        // What comes from here on is the next difference's.
        known.removed_since.move_to(&known.unsaved_removed);
        Ok(())
    }

    /// Tells which pages may have changed, and how.
    fn sort(&self, region: &Region, known: &PageStates) -> Result<DiffSpans> {
        let spans = |ranges: Vec<Range<u64>>| {
            let spans = ranges.iter().map(|range| region.span_of(range));
            spans.collect::<Spans>()
        };
        let swapped = region.granule == Granule::Small;
        let mut written = spans(known.unsaved.ranges());
        let mut removed = spans(known.unsaved_removed.ranges());
        if self.ability == Ability::Told {
            // A page may be given up while its writer waits: to read it would wait for ourselves.
            written = self.there(&written, swapped)?;
            // Nothing is told of what was taken out, not even that it was given up again.
            removed = removed.and(&spans(known.native.ranges()));
        }
        // What was given up and written to again, and what is known by its contents alone.
        let suspects = spans(known.suspects.ranges());
        let unsure = suspects.and(&spans(known.unsaved_suspects.ranges()));
        let there = self.there(&unsure.and(&removed), swapped)?;
        let there = subtract(&there, &written);
        let zero = subtract(&subtract(&removed, &written), &there);
        // Of a huge page that was written, most is as it was.
        let (data, doubtful) = match region.granule {
            Granule::Small => (written, there),
            Granule::Large | Granule::Huge => (Spans::new(), written.and(&there)),
        };
        Ok(DiffSpans {
            data: intersect(&data, &[region.span()]),
            doubtful,
            zero,
        })
    }
}

/// Waits where a call failed as pages are being given up: whoever reads that goes first.
///
/// # Errors
/// Other failures, and this one when it lasts long.
pub(crate) fn wait_for_change(began: Instant, error: Error) -> Result<()> {
    match &error {
        Error::Call { source, .. }
            if Errno::from_io_error(source) == Some(Errno::AGAIN)
                && began.elapsed() < CHANGING_MOST =>
        {
            std::thread::sleep(CHANGING);
            Ok(())
        }
        _ => Err(error),
    }
}

/// Leaves to the parent all pages but `own`.
pub(crate) fn inherit_rest(writer: &Writer, parent: &Reader, own: &[Extent]) -> Result<()> {
    for space in parent.spaces() {
        let own = own.iter().filter(|extent| extent.space == space.id);
        let own = Ranges::of(own.map(Extent::numbers));
        let kept = subtract(slice::from_ref(&(0..space.len_pages)), &own);
        writer.inherit_described(space.id, &kept)?;
        writer.space(NewSpace {
            id: space.id,
            kind: space.kind,
            name: space.name.clone(),
            len_pages: space.len_pages,
            granule: space.granule,
        });
    }
    Ok(())
}

pub(crate) fn extents(region: &Region, spans: &[Span]) -> Vec<Extent> {
    let extent = |span: &Span| Extent {
        space: region.space,
        first_page: region.first_page + (span.start.0 - region.at.0) / PAGE_BYTES,
        at: span.start,
        pages: span.pages(),
    };
    spans.iter().map(extent).collect()
}

pub(crate) fn count(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| extent.pages).sum()
}
