//! A volume that is in use becomes an image of one instant.
//!
//! The file system is frozen twice, as short as that can be: first to learn what is in use while
//! all of it is on the device, then, when the pages of that were read beside its users, to learn
//! what has changed and to read that. What is left to the first reading is positively known: blocks
//! of an inode that says the same at both times, and whose last change is older than the first
//! instant by more than the step of the kernel's clock.
//!
//! That holds because a freeze waits for writers, also for direct ones under way, writes all that
//! is dirty and write-protects mapped pages: whoever writes after it, in whatever way, first
//! changes his inode's time. Metadata, and whatever cannot be assigned to such an inode, is read
//! while the file system is frozen.
//!
//! What the kernel itself takes for a freeze is longer than what there is to read, where little has
//! changed, and is little for a second freeze in a row. So users are let go in between.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use abi::bits::Bits;
use image::{Facts, PAGE_BYTES, Run, SpaceId, Writer};
use pages::{Drain, DrainSummary};
use sys::freeze::Frozen;

use crate::bad_pages::{self, BadBlock, BadPages};
use crate::device::Volume;
use crate::dump::{
    DumpOptions, DumpSummary, PageSelection, Parent, Progress, Stops, compare, extents, finish,
    inherit, now, open, start,
};
use crate::ext4::Superblock;
use crate::inside::refuse_inside;
use crate::pace::RateLimit;
use crate::page_sums::PageSums;
use crate::place::VOLUME;
use crate::records::State;
use crate::source::Blocks;
use crate::survey::{Survey, unchanged_pages};
use crate::tables::Pieces;
use crate::{Error, Result};

/// How often what has changed is read beside the users, until so little is left that it can be read
/// while they wait.
const ROUNDS_MAX: u32 = 8;
/// In the first of these rounds, they do not wait longer than this for what is to be read: it is
/// read beside them, and less is left the next time.
const SHORT_ROUNDS: u32 = 4;
const SHORT: Duration = Duration::from_millis(50);
/// How much is read at a time while they wait.
const STEP_PAGES: u64 = 8 << 20 >> 12;

/// A dump of a mounted volume under way.
pub struct LiveDump<'a> {
    options: &'a DumpOptions,
    volume: &'a Volume,
    parent: Option<&'a Parent>,
    mount: &'a File,
    sb: Superblock,
    /// The survey of the last freeze.
    survey: Survey,
    pub state: State,
    stops: Stops,
    /// Pages that were read and are stored, or are the parent's.
    kept: ValidPages,
    drained: Vec<DrainSummary>,
    /// How many pages were read.
    read_pages: u64,
    silent: Bits,
    /// How fast pages are read at most beside users.
    pace: RateLimit,
    /// Those that cannot be read.
    bad: BadPages,
    /// Checksums of the file system's own blocks.
    seen: PageSums,
    /// How fast they were read.
    pages_per_s: f64,
}

/// Pages that were read and are still valid.
#[derive(Default)]
struct ValidPages {
    /// Stored, or zero.
    runs: Vec<Run>,
    stored: Bits,
    /// As the parent has them.
    parents: Bits,
}

/// The image that pages go to, and the space that they are of there.
#[derive(Clone, Copy)]
pub struct Draft<'a> {
    pub writer: &'a Writer,
    pub space: SpaceId,
}

/// Makes an image of a mounted volume.
///
/// # Errors
/// Those of [`crate::dump()`]; the file system is not frozen then.
pub fn dump(
    options: &DumpOptions,
    volume: &Volume,
    parent: Option<&Parent>,
    facts: Facts,
    progress: Progress<'_>,
) -> Result<DumpSummary> {
    let mut live = LiveDump::begin(options, volume, parent)?;
    let (writer, space) = start(options, parent, &live.state)?;
    let draft = Draft {
        writer: &writer,
        space,
    };
    live.read_first(draft, progress)?;
    for round in 1.. {
        let known = live.prepare()?;
        let frozen = freeze_twice(options, live.mount, &mut live.stops)?;
        let most = match round < SHORT_ROUNDS {
            true => SHORT.min(options.max_frozen),
            false => options.max_frozen,
        };
        if live.try_instant(&known, draft, frozen, most)? {
            break;
        }
        if round >= ROUNDS_MAX {
            return Err(too_long(options));
        }
        progress(0, 1);
        live.read_missing(draft, progress)?;
    }
    let (dumped, state) = live.put(draft)?;
    finish(options, writer, &state, facts)?;
    Ok(dumped)
}

impl<'a> LiveDump<'a> {
    /// Learns what is in use, and what of it the parent does not have.
    ///
    /// # Errors
    /// [`Error::Unfit`] where the image is to be in it, too.
    pub fn begin(
        options: &'a DumpOptions,
        volume: &'a Volume,
        parent: Option<&'a Parent>,
    ) -> Result<Self> {
        let (at, mount) = volume.mounted.as_ref().expect("the caller has looked");
        if let Some(folder) = options.images.directory() {
            refuse_inside(&options.volume, volume, mount, folder)?;
        }
        let known = prepare(options, volume, mount, &Pieces::default())?;
        let mut stops = Stops::default();
        let frozen = freeze_twice(options, mount, &mut stops)?;
        let surveyed = open(volume).and_then(|fs| {
            let earlier = Vec::from_iter(parent.map(|parent| &parent.survey));
            let survey = Survey::new(&fs, now(), &earlier, &known)?;
            Ok((fs.superblock().clone(), survey))
        });
        let (sb, survey) = match thaw(options, &mut stops, frozen)? {
            true => surveyed?,
            false => return Err(too_long(options)),
        };
        let state = State {
            len_bytes: sb.len_bytes(),
            uuid: sb.uuid,
            instant: survey.instant,
            was_mounted: true,
            mount: Some(at.clone()),
            bad_pages: Vec::new(),
        };
        Ok(Self {
            options,
            volume,
            parent,
            mount,
            sb,
            survey,
            state,
            stops,
            kept: ValidPages::default(),
            drained: Vec::new(),
            read_pages: 0,
            silent: Bits::default(),
            pace: RateLimit::new(options.rate_bytes_per_s),
            bad: BadPages::new(options.skip_bad),
            seen: PageSums::default(),
            pages_per_s: 0.0,
        })
    }

    /// Freezes the file system for as long as it takes to learn what is in use, and forgets what
    /// does not hold any more.
    pub fn survey_again(&mut self) -> Result<()> {
        let known = self.prepare()?;
        let frozen = freeze_twice(self.options, self.mount, &mut self.stops)?;
        let surveyed = self.survey_frozen(&known);
        match thaw(self.options, &mut self.stops, frozen)? {
            true => surveyed,
            false => Err(too_long(self.options)),
        }
    }

    /// What [`Self::try_instant`] has less to do with, if it comes soon.
    pub fn prepare(&self) -> Result<Pieces> {
        prepare(self.options, self.volume, self.mount, &self.survey.pieces)
    }

    /// Reads for the first time what is in use, beside its users.
    pub fn read_first(&mut self, draft: Draft<'_>, progress: Progress<'_>) -> Result<()> {
        let doubt = self.options.verify_unchanged;
        let wanted = self.wanted(doubt);
        self.read(&wanted.read, draft, progress, None)?;
        if doubt {
            self.silent = wanted.doubted(&self.kept.parents);
        }
        Ok(())
    }

    /// Reads what was found missing when it was frozen last, beside its users.
    pub fn read_missing(&mut self, draft: Draft<'_>, progress: Progress<'_>) -> Result<()> {
        let missing = self.missing(&self.wanted(false));
        self.read(&missing, draft, progress, None)?;
        Ok(())
    }

    fn wanted(&self, doubt: bool) -> PageSelection {
        PageSelection::new(&self.survey, self.parent, doubt, self.sb.block_bytes)
    }

    /// Returns the wanted pages that are not read, or not any more.
    fn missing(&self, wanted: &PageSelection) -> Bits {
        let mut missing = wanted.read.clone();
        missing.subtract(&self.kept.stored);
        missing.subtract(&self.kept.parents);
        missing
    }

    /// Reads pages, and compares them with the parent's; not for longer than until `deadline`.
    /// Tells whether all were read.
    fn read(
        &mut self,
        pages: &Bits,
        draft: Draft<'_>,
        progress: Progress<'_>,
        deadline: Option<Instant>,
    ) -> Result<bool> {
        self.seen.watch(&self.survey, self.sb.block_bytes);
        // While users wait, it is read as fast as that can be.
        let pace = match deadline {
            None => &self.pace,
            Some(_) => &RateLimit::new(None),
        };
        let source = Blocks {
            space: draft.space,
            file: &self.volume.direct,
            live: &self.survey.live,
            block_bytes: self.sb.block_bytes,
            // A freeze empties the journal.
            replayed: None,
            context: self.options.context,
            pace,
            bad: &self.bad,
            seen: Some(&self.seen),
        };
        let begun = Instant::now();
        for step in steps(pages, deadline.is_some()) {
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Ok(false);
            }
            let differing = compare(&step, &source, draft.writer, progress)?;
            self.read_pages += step.count();
            let total = differing.count() * PAGE_BYTES as u64;
            let how = Drain {
                progress: &|done| progress(done, total),
                ..Drain::default()
            };
            let all = extents(&differing, draft.space);
            let (drained, runs) = pages::drain_to_runs(&[(&source, &all)], draft.writer, how)?;
            self.kept.runs.extend(runs);
            self.kept.stored.add(&differing);
            let mut same = step;
            same.subtract(&differing);
            self.kept.parents.add(&same);
            self.drained.push(drained);
        }
        let rate = pages.count() as f64 / begun.elapsed().as_secs_f64().max(1e-6);
        // A limit of the rate says nothing of how fast it can be.
        if pages.count() > STEP_PAGES / 8 && pace.is_unlimited() {
            self.pages_per_s = rate;
        }
        Ok(true)
    }

    /// Freezes the file system, forgets what does not hold any more, and reads what is missing, if
    /// there is time for that. Tells whether that is done, and [`Self::put`] may follow; otherwise
    /// what is missing is to be read beside the users. `known` is of [`Self::prepare`].
    ///
    /// # Errors
    /// Also where it was thawed before this was done.
    pub fn freeze_and_try(&mut self, known: &Pieces, draft: Draft<'_>) -> Result<bool> {
        let frozen = freeze(self.options, self.mount)?;
        self.try_instant(known, draft, frozen, self.options.max_frozen)
    }

    /// The same, of a file system that is frozen; reading what is missing may take no longer than
    /// `most`.
    fn try_instant(
        &mut self,
        known: &Pieces,
        draft: Draft<'_>,
        frozen: Frozen<'_>,
        most: Duration,
    ) -> Result<bool> {
        // Some of the time is for the thaw.
        let left = self.options.max_frozen.mul_f64(0.8);
        let deadline = Instant::now() + left.saturating_sub(frozen.elapsed());
        let read = self
            .survey_frozen(known)
            .and_then(|()| self.read_frozen(draft, deadline, most));
        match thaw(self.options, &mut self.stops, frozen)? {
            true => read,
            false => Err(too_long(self.options)),
        }
    }

    /// Learns what is in use, and forgets what does not hold any more, while the file system is
    /// frozen.
    fn survey_frozen(&mut self, known: &Pieces) -> Result<()> {
        let fs = open(self.volume)?;
        if fs.superblock().len_bytes() != self.sb.len_bytes() {
            let what = "the file system was resized while it was read";
            return Err(Error::Unfit(what.into()));
        }
        let mut earlier = Vec::from_iter(self.parent.map(|parent| &parent.survey));
        earlier.push(&self.survey);
        let last = earlier.len() - 1;
        let new = Survey::new(&fs, now(), &earlier, known)?;
        let mut still = unchanged_pages(&new, &self.survey, last, self.sb.block_bytes);
        still.add(&self.still_own(&still, &new));
        self.kept.keep(&still);
        self.state.instant = new.instant;
        self.survey = new;
        Ok(())
    }

    /// Reads what is missing while the file system is frozen, if there is time for that.
    fn read_frozen(&mut self, draft: Draft<'_>, deadline: Instant, most: Duration) -> Result<bool> {
        let missing = self.missing(&self.wanted(false));
        let needed_s = missing.count() as f64 / self.pages_per_s.max(20_000.0);
        let needed = Duration::from_secs_f64(needed_s);
        if needed > most || Instant::now() + needed > deadline {
            log::info!("{} pages have changed: another round", missing.count());
            return Ok(false);
        }
        self.read(&missing, draft, &|_, _| (), Some(deadline))
    }

    /// Pages of the file system's own that were read and are what they were, beside those that are
    /// known to be.
    fn still_own(&self, known: &Bits, survey: &Survey) -> Bits {
        let mut doubted = self.kept.stored.clone();
        doubted.add(&self.kept.parents);
        doubted.subtract(known);
        let cached = Blocks {
            // Nothing is stored of them.
            space: VOLUME,
            file: &self.volume.cached,
            live: &survey.live,
            block_bytes: self.sb.block_bytes,
            replayed: None,
            context: self.options.context,
            pace: &RateLimit::new(None),
            bad: &BadPages::new(false),
            seen: None,
        };
        self.seen.still(&doubted, survey, &cached)
    }

    /// Blocks that could not be read, and whose they are as far as that can be found out.
    fn bad_blocks(&self) -> Vec<BadBlock> {
        let pages = self.bad.pages();
        match pages.count() {
            0 => Vec::new(),
            _ => open(self.volume).map_or_else(|_| Vec::new(), |fs| bad_pages::owners(&fs, &pages)),
        }
    }

    /// Puts into the image what was read at the instant, and the record of it.
    pub fn put(mut self, draft: Draft<'_>) -> Result<(DumpSummary, State)> {
        let writer = draft.writer;
        let wanted = self.wanted(false);
        let mut inherited = wanted.all.clone();
        inherited.subtract(&self.kept.stored);
        inherit(writer, draft.space, &inherited)?;
        let mut own = wanted.all.clone();
        own.intersect(&self.kept.stored);
        let runs = only(&self.kept.runs, &own);
        let stored_pages = runs.iter().filter(|run| run.part().is_some());
        let stored_pages = stored_pages.map(|run| u64::from(run.pages)).sum::<u64>();
        writer.describe(runs);
        wanted.mark_zeros(writer, draft.space);
        let mut silent = self.silent.clone();
        silent.intersect(&own);
        // Whose file says now that it was written is not silent, whenever that was.
        silent.intersect(self.wanted(true).doubted_pages());
        // Of those that could not be read at first, some may have been well later.
        self.state.bad_pages = self.bad.pages().ranges();
        writer.record(self.state.record());
        let dumped = DumpSummary {
            silent_pages: silent.count(),
            read_pages: self.read_pages,
            marked_free_blocks: self.survey.marked_free,
            parent_pages: inherited.count(),
            zero_pages: wanted.zeros.count() + own.count() - stored_pages,
            stored_pages,
            stops: Some(self.stops),
            bad: self.bad_blocks(),
            ..DumpSummary::of(writer, &self.state, &wanted, &self.drained)
        };
        Ok((dumped, self.state))
    }
}

/// Has all written that can be written before a freeze, and metadata read into the kernel's cache.
/// Gives what the inodes say now, for a survey that comes soon.
fn prepare(options: &DumpOptions, volume: &Volume, mount: &File, known: &Pieces) -> Result<Pieces> {
    let sync = || {
        let synced = sys::freeze::sync(mount.as_fd());
        synced.map_err(Error::file("flush", &options.volume))
    };
    sync()?;
    // What changes meanwhile is looked at again, and may be nonsense now.
    let ahead = open(volume).and_then(|fs| {
        let _ = fs.layout();
        Pieces::ahead(&fs, known)
    });
    sync()?;
    Ok(ahead.unwrap_or_else(|_| known.clone()))
}

fn freeze<'a>(options: &DumpOptions, mount: &'a File) -> Result<Frozen<'a>> {
    let frozen = Frozen::freeze(mount.as_fd(), options.max_frozen);
    frozen.map_err(Error::file("freeze", &options.volume))
}

/// Freezes it once for what the kernel has to do for that, and then for us.
fn freeze_twice<'a>(
    options: &DumpOptions,
    mount: &'a File,
    stops: &mut Stops,
) -> Result<Frozen<'a>> {
    let (frozen, before) = freeze(options, mount)?
        .again()
        .map_err(Error::file("freeze", &options.volume))?;
    stops.add(before);
    Ok(frozen)
}

/// Thaws it, and tells whether it was frozen until now.
fn thaw(options: &DumpOptions, stops: &mut Stops, frozen: Frozen<'_>) -> Result<bool> {
    let thawed = frozen.thaw();
    let thawed = thawed.map_err(Error::file("thaw", &options.volume))?;
    stops.add(thawed.frozen);
    Ok(thawed.held)
}

/// Why what is to be read while it is frozen was not.
pub fn too_long(options: &DumpOptions) -> Error {
    Error::Unfit(format!(
        "what has changed of {} cannot be read in the {} ms for which it may be frozen; allow \
         more with --max-frozen, or dump it when less is written to it",
        options.volume.display(),
        options.max_frozen.as_millis()
    ))
}

impl ValidPages {
    /// Forgets all but `pages`.
    fn keep(&mut self, pages: &Bits) {
        self.stored.intersect(pages);
        self.parents.intersect(pages);
        self.runs = only(&self.runs, &self.stored);
    }
}

/// Returns the parts of `runs` inside of `pages`.
fn only(runs: &[Run], pages: &Bits) -> Vec<Run> {
    let ranges = pages.ranges();
    let mut left = Vec::with_capacity(runs.len());
    for run in runs {
        let first = ranges.partition_point(|range| range.end <= run.first_page);
        for range in ranges[first..]
            .iter()
            .take_while(|range| range.start < run.end_page())
        {
            let start = range.start.max(run.first_page);
            let end = range.end.min(run.end_page());
            left.push(run.cut((start - run.first_page) as u32, (end - start) as u32));
        }
    }
    left
}

/// Pages in pieces that are read one after the other, so that a deadline is seen in time.
fn steps(pages: &Bits, are_small: bool) -> Vec<Bits> {
    if !are_small {
        return vec![pages.clone()];
    }
    let mut steps = Vec::new();
    let (mut step, mut count) = (Bits::default(), 0);
    for range in pages.ranges() {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + (STEP_PAGES - count));
            step.insert(at..end);
            count += end - at;
            at = end;
            if count == STEP_PAGES {
                steps.push(std::mem::take(&mut step));
                count = 0;
            }
        }
    }
    if count > 0 {
        steps.push(step);
    }
    steps
}

#[cfg(test)]
mod tests {
    use image::{RunKind, SpaceId};

    use super::*;

    #[test]
    fn runs_are_cut_to_pages() {
        let run = |first_page, pages| Run {
            space: SpaceId(1),
            first_page,
            pages,
            kind: RunKind::Zero,
        };
        let mut pages = Bits::default();
        pages.insert(3..5);
        pages.insert(8..20);
        let left = only(&[run(0, 4), run(4, 6), run(30, 1)], &pages);
        assert_eq!(left, [run(3, 1), run(4, 1), run(8, 2)]);
    }

    #[test]
    fn steps_are_bounded_and_lose_nothing() {
        let mut pages = Bits::default();
        pages.insert(0..STEP_PAGES / 2);
        pages.insert(STEP_PAGES..STEP_PAGES * 4);
        let steps = steps(&pages, true);
        assert!(steps.iter().all(|step| step.count() <= STEP_PAGES));
        let mut all = Bits::default();
        steps.iter().for_each(|step| all.add(step));
        assert_eq!(all, pages);
    }
}
