//! A volume becomes an image.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use abi::Addr;
use abi::bits::Bits;
use image::{Compression, Facts, ImageId, PAGE_BYTES, Seal, SpaceId, Writer};
use pages::{Drain, DrainSummary, Extent};
use store::Images;

use crate::bad_pages::{self, BadBlock, BadPages};
use crate::device::Volume;
use crate::ext4::{FileSystem, ReplayedSource, Time};
use crate::pace::RateLimit;
use crate::place::{self, VOLUME};
use crate::read_at::OpenFile;
use crate::records::State;
use crate::source::{Blocks, IoContext};
use crate::survey::{Survey, pages_of, unchanged_pages};
use crate::tables::Pieces;
use crate::{Error, Result};

/// Options of a dump.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    /// Directory of the new image.
    pub images: Images,
    /// The device, the file, or where it is mounted.
    pub volume: PathBuf,
    /// The image that this one is to be a difference from.
    pub parent: Option<Images>,
    /// True if what seems to be unchanged is read as well, and compared.
    pub verify_unchanged: bool,
    /// For how long a mounted file system may be frozen at a time.
    pub max_frozen: Duration,
    /// In which I/O contexts it is read.
    pub context: IoContext,
    /// How many bytes of it are read in a second at most, beside its users.
    pub rate_bytes_per_s: Option<u64>,
    /// True if pages that cannot be read are taken for zeros.
    pub skip_bad: bool,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// True to wait until the image is on the disk.
    pub sync: bool,
}

/// Summary of a dump.
#[derive(Clone, Debug)]
pub struct DumpSummary {
    /// The image.
    pub image: ImageId,
    /// The instant of which it is.
    pub instant: Time,
    /// Pages of the volume.
    pub pages: u64,
    /// Pages that were read of it.
    pub read_pages: u64,
    /// Those that are stored.
    pub stored_pages: u64,
    /// Those that are zero, or mean nothing.
    pub zero_pages: u64,
    /// Those that are the parent's.
    pub parent_pages: u64,
    /// Those that differ from the parent's although their file seemed unchanged; only looked for
    /// where that was asked for.
    pub silent_pages: u64,
    /// Blocks of files that the file system's bitmaps say are free.
    pub marked_free_blocks: u64,
    /// Blocks that were taken from the journal, which was to be replayed.
    pub replayed_blocks: u64,
    /// Blocks that could not be read, and are zero in the image.
    pub bad: Vec<BadBlock>,
    /// How a mounted file system was stopped.
    pub stops: Option<Stops>,
}

/// How a mounted file system was stopped.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stops {
    /// How often.
    pub count: u32,
    /// The longest, from the first writer that had to wait on.
    pub longest: Duration,
    /// All together.
    pub all: Duration,
}

impl Stops {
    /// Notes one more.
    pub(crate) fn add(&mut self, frozen: Duration) {
        self.count += 1;
        self.longest = self.longest.max(frozen);
        self.all += frozen;
    }
}

/// Observer of the bytes that are done and to be done.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// The image that a dump is over, and what its volume was.
pub(crate) struct Parent {
    pub place: Images,
    pub opened: place::OpenImage,
    pub survey: Survey,
}

impl Parent {
    pub fn open(images: &Images) -> Result<Self> {
        let opened = place::OpenImage::open(images)?;
        let fs = opened.file_system()?;
        let survey = Survey::new(&fs, opened.state.instant, &[], &Pieces::default())?;
        Ok(Self {
            place: images.clone(),
            opened,
            survey,
        })
    }

    /// Refuses one of another volume.
    pub fn check(&self, state: &State) -> Result<()> {
        let (own, place) = (&self.opened.state, &self.place);
        if own.uuid != state.uuid {
            let what = format!("the image in {place} is one of another volume");
            return Err(Error::Unfit(what));
        }
        if own.len_bytes != state.len_bytes {
            return Err(Error::Unfit(format!(
                "a volume of {} bytes cannot be a difference from one of {}, which the image in \
                 {place} has",
                state.len_bytes, own.len_bytes
            )));
        }
        Ok(())
    }
}

/// Makes an image of a volume: of all pages with blocks in use, in the order in which they are on
/// the device.
///
/// # Errors
/// Nothing is left in the image's directory then, an image that was there stays, and a file system
/// that was mounted is not frozen.
pub fn dump(options: &DumpOptions, facts: Facts, progress: Progress<'_>) -> Result<DumpSummary> {
    let volume = Volume::open(&options.volume)?;
    if let Some(part) = &volume.part {
        log::warn!(
            "{} shows only {} of the volume: the image has all of {}",
            options.volume.display(),
            part.display(),
            volume.path.display()
        );
    }
    if options.parent.is_some() {
        // The way to the parent may lead through it.
        options.images.create().map_err(image::Error::Place)?;
    }
    // What is damaged is told by who needs it. It comes while the parent is looked at.
    let _ = open(&volume).map(|fs| fs.read_ahead());
    let parent = options.parent.as_ref().map(Parent::open).transpose()?;
    let parent = parent.as_ref();
    let dumped = match volume.mounted {
        Some(_) => crate::mounted::dump(options, &volume, parent, facts, progress),
        None => dump_unmounted(options, &volume, parent, facts, progress),
    };
    dumped.map_err(|error| bad_pages::named(error, || open(&volume)))
}

/// Makes an image of a volume that nobody has mounted.
fn dump_unmounted(
    options: &DumpOptions,
    volume: &Volume,
    parent: Option<&Parent>,
    facts: Facts,
    progress: Progress<'_>,
) -> Result<DumpSummary> {
    let now = now();
    let fs = replayed(volume)?;
    let earlier = parent.map(|parent| &parent.survey);
    let survey = Survey::new(&fs, now, &Vec::from_iter(earlier), &Pieces::default())?;
    let sb = fs.superblock();
    if sb.journal_inode == 0 && !sb.was_unmounted {
        log::warn!(
            "{} has no journal and was not unmounted: files that its bitmaps of inodes lack are \
             not looked for; e2fsck -f finds them",
            options.volume.display()
        );
    }
    let mut state = State {
        len_bytes: sb.len_bytes(),
        uuid: sb.uuid,
        instant: now,
        was_mounted: false,
        mount: None,
        bad_pages: Vec::new(),
    };
    let (writer, space) = start(options, parent, &state)?;
    let pace = RateLimit::new(options.rate_bytes_per_s);
    let bad = BadPages::new(options.skip_bad);
    let source = Blocks {
        space,
        file: &volume.direct,
        live: &survey.live,
        block_bytes: sb.block_bytes,
        replayed: Some(fs.source()),
        context: options.context,
        pace: &pace,
        bad: &bad,
        seen: None,
    };
    let wanted = PageSelection::new(&survey, parent, options.verify_unchanged, sb.block_bytes);
    let differing = wanted.compare(&source, &writer, progress)?;
    let how = Drain {
        progress: &|done| progress(done, differing.count() * PAGE_BYTES as u64),
        ..Drain::default()
    };
    writer.reserve(differing.count() * PAGE_BYTES as u64)?;
    let extents = extents(&differing, space);
    let drained = pages::drain_all(&[(&source, &extents)], &writer, how)?;
    let mut inherited = wanted.all.clone();
    inherited.subtract(&differing);
    inherit(&writer, space, &inherited)?;
    wanted.mark_zeros(&writer, space);
    let dumped = DumpSummary {
        silent_pages: wanted.silent(&differing),
        parent_pages: inherited.count(),
        read_pages: wanted.read.count(),
        marked_free_blocks: survey.marked_free,
        replayed_blocks: fs.source().count(),
        bad: bad_pages::owners(&fs, &bad.pages()),
        ..DumpSummary::of(&writer, &state, &wanted, &[drained])
    };
    state.bad_pages = bad.pages().ranges();
    writer.record(state.record());
    finish(options, writer, &state, facts)?;
    Ok(dumped)
}

pub(crate) fn now() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    Time {
        s: since.as_secs().cast_signed(),
        ns: since.subsec_nanos(),
    }
}

/// Opens the file system on a volume.
pub(crate) fn open(volume: &Volume) -> Result<FileSystem<OpenFile>> {
    let file = volume.cached.try_clone();
    let file = file.map_err(Error::file("open", &volume.path))?;
    FileSystem::open(OpenFile::new(file, volume.len_bytes))
}

/// Opens the file system on a volume that nobody has mounted, as it is after a replay of its
/// journal.
fn replayed(volume: &Volume) -> Result<FileSystem<ReplayedSource<OpenFile>>> {
    let patches = open(volume)?.patches()?;
    let file = volume.cached.try_clone();
    let file = file.map_err(Error::file("open", &volume.path))?;
    let source = OpenFile::new(file, volume.len_bytes);
    FileSystem::open(ReplayedSource::new(source, patches))
}

/// Starts the image; gives the volume's space as well.
pub(crate) fn start(
    options: &DumpOptions,
    parent: Option<&Parent>,
    state: &State,
) -> Result<(Writer, SpaceId)> {
    if let Some(parent) = parent {
        parent.check(state)?;
    }
    let over = parent.map(|parent| &parent.opened);
    let writer = place::writer(&options.images, over, options.compress)?;
    let space = place::add_space(&writer, over, VOLUME, state.len_bytes);
    Ok((writer, space))
}

/// Seals the image.
pub(crate) fn finish(
    options: &DumpOptions,
    writer: Writer,
    state: &State,
    facts: Facts,
) -> Result<()> {
    let durable = options.sync;
    let image = writer.seal(Seal { durable, facts })?;
    log::info!(
        "image {image} is whole: a volume of {} bytes",
        state.len_bytes
    );
    Ok(())
}

/// Which pages an image is to have, and which of them are read for that.
pub(crate) struct PageSelection {
    /// Those with bytes.
    pub all: Bits,
    /// Those in use that read as zeros.
    pub zeros: Bits,
    /// Those of all that cannot be left to the parent unread.
    pub read: Bits,
    /// Those that are read only to see whether they are what the parent has.
    doubted: Bits,
}

impl PageSelection {
    /// What follows from a survey, the first of whose earlier ones is the parent's.
    pub fn new(survey: &Survey, parent: Option<&Parent>, doubt: bool, block_bytes: u32) -> Self {
        let all = pages_of(&survey.live, block_bytes);
        let mut zeros = pages_of(&survey.used, block_bytes);
        zeros.subtract(&all);
        let mut unchanged = match parent {
            Some(parent) => unchanged_pages(survey, &parent.survey, 0, block_bytes),
            None => Bits::default(),
        };
        // What the parent could not read may be read now.
        for range in parent
            .iter()
            .flat_map(|parent| &parent.opened.state.bad_pages)
        {
            unchanged.remove(range.clone());
        }
        unchanged.intersect(&all);
        let mut read = all.clone();
        if !doubt {
            read.subtract(&unchanged);
        }
        Self {
            all,
            zeros,
            read,
            doubted: if doubt { unchanged } else { Bits::default() },
        }
    }

    /// Of the pages that are to be read, those that the parent does not have as they are.
    pub fn compare(
        &self,
        source: &Blocks<'_>,
        writer: &Writer,
        progress: Progress<'_>,
    ) -> Result<Bits> {
        compare(&self.read, source, writer, progress)
    }

    /// Notes pages that are in use and zero.
    pub fn mark_zeros(&self, writer: &Writer, space: SpaceId) {
        for range in self.zeros.ranges() {
            writer.mark_zero(space, range);
        }
    }

    /// Which pages that should not differ are not among `same`.
    pub fn doubted(&self, same: &Bits) -> Bits {
        let mut silent = self.doubted.clone();
        silent.subtract(same);
        silent
    }

    /// The pages that are read only to see whether they are what the parent has.
    pub const fn doubted_pages(&self) -> &Bits {
        &self.doubted
    }

    /// How many pages differ that should not.
    pub fn silent(&self, differing: &Bits) -> u64 {
        let mut silent = self.doubted.clone();
        silent.intersect(differing);
        silent.count()
    }
}

/// Which of `pages` the parent does not have as they are: all, where there is none.
pub(crate) fn compare(
    pages: &Bits,
    source: &Blocks<'_>,
    writer: &Writer,
    progress: Progress<'_>,
) -> Result<Bits> {
    let Some(parent) = writer.parent() else {
        return Ok(pages.clone());
    };
    let all = extents(pages, source.space);
    let total = pages.count() * PAGE_BYTES as u64;
    let changed = pages::changed(source, &all, parent, &|done| progress(done, total))?;
    let mut differing = Bits::default();
    changed
        .iter()
        .for_each(|extent| differing.insert(extent.numbers()));
    Ok(differing)
}

/// Leaves pages to the parent, which has them.
pub(crate) fn inherit(writer: &Writer, space: SpaceId, pages: &Bits) -> Result<()> {
    let ranges = pages.ranges();
    if ranges.is_empty() {
        return Ok(());
    }
    let known = writer.inherit_described(space, &ranges)?;
    let known = known
        .iter()
        .map(|range| range.end - range.start)
        .sum::<u64>();
    if known != pages.count() {
        let what = "the parent image lacks pages of files that have not changed since";
        return Err(Error::Corrupt(what.into()));
    }
    Ok(())
}

/// Pages as the pipe takes them.
pub(crate) fn extents(pages: &Bits, space: SpaceId) -> Vec<Extent> {
    let extent = |range: std::ops::Range<u64>| Extent {
        space,
        first_page: range.start,
        at: Addr::of_page(range.start),
        pages: range.end - range.start,
    };
    pages.ranges().into_iter().map(extent).collect()
}

impl DumpSummary {
    pub(crate) fn of(
        writer: &Writer,
        state: &State,
        wanted: &PageSelection,
        drained: &[DrainSummary],
    ) -> Self {
        let sum = |what: fn(&DrainSummary) -> u64| drained.iter().map(what).sum::<u64>();
        Self {
            image: writer.id(),
            instant: state.instant,
            pages: state.len_bytes.div_ceil(PAGE_BYTES as u64),
            read_pages: sum(|one| one.read_pages),
            stored_pages: sum(|one| one.stored_pages),
            zero_pages: wanted.zeros.count() + sum(|one| one.zero_pages),
            parent_pages: 0,
            silent_pages: 0,
            marked_free_blocks: 0,
            replayed_blocks: 0,
            bad: Vec::new(),
            stops: None,
        }
    }
}
