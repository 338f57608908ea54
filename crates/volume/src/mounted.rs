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

use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use image::{Facts, PAGE_BYTES, Run, Writer};
use pages::{Drain, Drained};
use sys::freeze::Frozen;

use crate::bad::{self, BadPages};
use crate::bits::Bits;
use crate::device::Volume;
use crate::dump::{
    DumpOptions, Dumped, Parent, Progress, Stops, Wanted, compare, extents, finish, inherit, now,
    open, refuse_inside, start,
};
use crate::ext4::{FileSystem, Superblock};
use crate::pace::Pace;
use crate::read_at::Opened;
use crate::records::State;
use crate::source::Blocks;
use crate::survey::{Survey, unchanged_pages};
use crate::tables::Pieces;
use crate::{Error, Result};

/// How often what has changed is read beside the users, until so little is left that it can be read
/// while they wait.
const ROUNDS_MAX: u32 = 8;
/// How much is read at a time while they wait.
const STEP_PAGES: u64 = 8 << 20 >> 12;

/// A dump of a mounted volume under way.
struct Live<'a> {
    options: &'a DumpOptions,
    volume: &'a Volume,
    parent: Option<&'a Parent>,
    mount: &'a File,
    stops: Stops,
    /// Pages that were read and are stored, or are the parent's.
    kept: Kept,
    drained: Vec<Drained>,
    silent: Bits,
    /// How fast pages are read at most beside users.
    pace: Pace,
    /// Those that cannot be read.
    bad: BadPages,
    /// How fast they were read.
    pages_per_s: f64,
}

/// What was read so far and still holds.
#[derive(Default)]
struct Kept {
    /// Stored, or zero.
    runs: Vec<Run>,
    stored: Bits,
    /// As the parent has them.
    parents: Bits,
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
) -> Result<Dumped> {
    let (_, mount) = volume.mounted.as_ref().expect("the caller has looked");
    refuse_inside(options, mount)?;
    let mut live = Live {
        options,
        volume,
        parent,
        mount,
        stops: Stops::default(),
        kept: Kept::default(),
        drained: Vec::new(),
        silent: Bits::default(),
        pace: Pace::new(options.rate_bytes_per_s),
        bad: BadPages::new(options.skip_bad),
        pages_per_s: 0.0,
    };
    let (fs, mut survey) = live.first_survey()?;
    let sb = fs.superblock().clone();
    let mut state = State {
        len_bytes: sb.len_bytes(),
        uuid: sb.uuid,
        instant: survey.instant,
        was_mounted: true,
        bad_pages: Vec::new(),
    };
    let writer = start(options, parent, &state)?;
    let doubt = options.verify_unchanged;
    for round in 1.. {
        let wanted = Wanted::new(&survey, parent, doubt && round == 1, sb.block_bytes);
        let mut missing = wanted.read.clone();
        missing.subtract(&live.kept.stored);
        missing.subtract(&live.kept.parents);
        live.read(&missing, &survey, &sb, &writer, progress, None)?;
        if doubt && round == 1 {
            live.silent = wanted.doubted(&live.kept.parents);
        }
        if let Some((wanted, instant)) = live.last_survey(&mut survey, &sb, &writer, round)? {
            state.instant = instant;
            // Of those that were read again since, some may be well.
            state.bad_pages = live.bad.pages().ranges();
            return live.seal(writer, wanted, &state, facts);
        }
        progress(0, 1);
    }
    unreachable!("the last round ends or fails")
}

/// Freezes the file system, all that can be written before having been written, and its metadata
/// having been read into the kernel's cache. What its inodes said just before is given as well.
fn freeze<'a>(
    options: &DumpOptions,
    volume: &Volume,
    mount: &'a File,
    known: &Pieces,
) -> Result<(Frozen<'a>, Pieces)> {
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
    let known = ahead.unwrap_or_else(|_| known.clone());
    sync()?;
    let frozen = Frozen::freeze(mount.as_fd(), options.max_frozen);
    Ok((
        frozen.map_err(Error::file("freeze", &options.volume))?,
        known,
    ))
}

impl Live<'_> {
    /// Thaws it, and tells whether it was frozen until now.
    fn thaw(&mut self, frozen: Frozen<'_>) -> Result<bool> {
        let thawed = frozen.thaw();
        let thawed = thawed.map_err(Error::file("thaw", &self.options.volume))?;
        self.stops.count += 1;
        self.stops.longest = self.stops.longest.max(thawed.frozen);
        self.stops.all += thawed.frozen;
        Ok(thawed.held)
    }

    fn first_survey(&mut self) -> Result<(FileSystem<Opened>, Survey)> {
        let nothing = Pieces::default();
        let (frozen, known) = freeze(self.options, self.volume, self.mount, &nothing)?;
        let surveyed = open(self.volume).and_then(|fs| {
            let earlier = self.parent.map(|parent| &parent.survey);
            let survey = Survey::new(&fs, now(), &Vec::from_iter(earlier), &known)?;
            Ok((fs, survey))
        });
        match (self.thaw(frozen)?, surveyed) {
            (true, surveyed) => surveyed,
            (false, _) => Err(self.too_long()),
        }
    }

    fn too_long(&self) -> Error {
        Error::Unfit(format!(
            "what has changed of {} cannot be read in the {} ms for which it may be frozen; allow \
             more with --max-frozen, or dump it when less is written to it",
            self.options.volume.display(),
            self.options.max_frozen.as_millis()
        ))
    }

    /// Reads pages, and compares them with the parent's; not for longer than until `deadline`.
    /// Tells whether all were read.
    fn read(
        &mut self,
        pages: &Bits,
        survey: &Survey,
        sb: &Superblock,
        writer: &Writer,
        progress: Progress<'_>,
        deadline: Option<Instant>,
    ) -> Result<bool> {
        let volume = self.volume;
        // While users wait, it is read as fast as that can be.
        let pace = match deadline {
            None => &self.pace,
            Some(_) => &Pace::new(None),
        };
        let source = Blocks {
            file: &volume.direct,
            live: &survey.live,
            block_bytes: sb.block_bytes,
            // A freeze empties the journal.
            replayed: None,
            context: self.options.context,
            pace,
            bad: &self.bad,
        };
        let begun = Instant::now();
        for step in steps(pages, deadline.is_some()) {
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Ok(false);
            }
            let differing = compare(&step, &source, writer, progress)?;
            let total = differing.count() * PAGE_BYTES as u64;
            let how = Drain {
                progress: &|done| progress(done, total),
                ..Drain::default()
            };
            let all = extents(&differing);
            let (drained, runs) = pages::drain_to_runs(&[(&source, &all)], writer, how)?;
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
    /// there is time for that. Gives what the image is to have; none where another round is needed.
    fn last_survey(
        &mut self,
        survey: &mut Survey,
        sb: &Superblock,
        writer: &Writer,
        round: u32,
    ) -> Result<Option<(Wanted, crate::ext4::Time)>> {
        let pieces = &survey.pieces;
        let (frozen, known) = freeze(self.options, self.volume, self.mount, pieces)?;
        // Some of the time is for the thaw.
        let deadline = Instant::now()
            + self
                .options
                .max_frozen
                .mul_f64(0.8)
                .saturating_sub(frozen.elapsed());
        let read = self.read_frozen(survey, &known, sb, writer, deadline);
        if !self.thaw(frozen)? {
            return Err(self.too_long());
        }
        match read? {
            Some(done) => Ok(Some(done)),
            None if round >= ROUNDS_MAX => Err(self.too_long()),
            None => Ok(None),
        }
    }

    /// Does what is to be done while the file system is frozen.
    fn read_frozen(
        &mut self,
        survey: &mut Survey,
        known: &Pieces,
        sb: &Superblock,
        writer: &Writer,
        deadline: Instant,
    ) -> Result<Option<(Wanted, crate::ext4::Time)>> {
        let fs = open(self.volume)?;
        if fs.superblock().len_bytes() != sb.len_bytes() {
            let what = "the file system was resized while it was read";
            return Err(Error::Unfit(what.into()));
        }
        let mut earlier = Vec::from_iter(self.parent.map(|parent| &parent.survey));
        earlier.push(survey);
        let last = earlier.len() - 1;
        let new = Survey::new(&fs, now(), &earlier, known)?;
        let still = unchanged_pages(&new, survey, last, sb.block_bytes);
        self.kept.keep(&still);
        let wanted = Wanted::new(&new, self.parent, false, sb.block_bytes);
        let mut missing = wanted.read.clone();
        missing.subtract(&self.kept.stored);
        missing.subtract(&self.kept.parents);
        let instant = new.instant;
        *survey = new;
        let needed_s = missing.count() as f64 / self.pages_per_s.max(20_000.0);
        if Instant::now() + Duration::from_secs_f64(needed_s) > deadline {
            log::info!("{} pages have changed: another round", missing.count());
            return Ok(None);
        }
        let survey = &*survey;
        let done = self.read(&missing, survey, sb, writer, &|_, _| (), Some(deadline))?;
        Ok(done.then_some((wanted, instant)))
    }

    fn seal(self, writer: Writer, wanted: Wanted, state: &State, facts: Facts) -> Result<Dumped> {
        let mut inherited = wanted.all.clone();
        inherited.subtract(&self.kept.stored);
        inherit(&writer, &inherited)?;
        let mut own = wanted.all.clone();
        own.intersect(&self.kept.stored);
        let runs = only(&self.kept.runs, &own);
        let stored_pages = runs.iter().filter(|run| run.part().is_some());
        let stored_pages = stored_pages.map(|run| u64::from(run.pages)).sum::<u64>();
        writer.describe(runs);
        wanted.mark_zeros(&writer);
        let mut silent = self.silent.clone();
        silent.intersect(&own);
        let dumped = Dumped {
            silent_pages: silent.count(),
            parent_pages: inherited.count(),
            zero_pages: wanted.zeros.count() + own.count() - stored_pages,
            stored_pages,
            stops: Some(self.stops),
            bad: open(self.volume)
                .map_or_else(|_| Vec::new(), |fs| bad::owners(&fs, &self.bad.pages())),
            ..Dumped::of(&writer, state, &wanted, &self.drained)
        };
        finish(self.options, writer, state, facts)?;
        Ok(dumped)
    }
}

impl Kept {
    /// Forgets all but `pages`.
    fn keep(&mut self, pages: &Bits) {
        self.stored.intersect(pages);
        self.parents.intersect(pages);
        self.runs = only(&self.runs, &self.stored);
    }
}

/// What of `runs` is of `pages`.
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
