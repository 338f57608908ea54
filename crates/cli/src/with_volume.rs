//! `--with-volume`: a tree or a machine and a volume that it uses, saved and brought back together.

use std::path::{Path, PathBuf};
use std::time::Duration;

use image::{Companion, CompanionError};
use process::{Observer, Stage, Veto};
use rustix::fs::{major, minor};
use rustix::process::Pid;
use serde_json::{Value, json};
use volume::{AttachedVolume, CompanionDump, CompanionVolume, DumpSummary, IoContext};

use crate::bar::Bar;
use crate::exit::Failure;
use crate::options::Options;
use crate::session::Session;
use crate::watch::Watch;

/// A volume that is to be in the image of something else.
pub struct VolumeRequest<'a> {
    /// Its device, or where it is mounted.
    pub volume: &'a Path,
    /// Directory of the new image.
    pub images_dir: &'a Path,
    /// The image that it is over.
    pub parent: Option<PathBuf>,
    /// For how long it may be frozen at a time.
    pub max_frozen: Duration,
    /// How pages are compressed.
    pub compress: Option<image::Compression>,
    /// True to wait until the image is on the disk.
    pub sync: bool,
    /// Other files that are written to meanwhile.
    pub written: Vec<PathBuf>,
}

/// Opens the volume that is to be in the image of a dump, if there is one.
pub fn open(options: &Options, session: &Session) -> Result<Option<CompanionVolume>, Failure> {
    let Some(volume) = &options.with_volume else {
        return Ok(None);
    };
    let parent = options.prev_images_dir.as_ref();
    let log = options.log_file.as_ref();
    let log = log.filter(|log| log.as_os_str() != "-");
    let log = log.map(|log| session.work_dir.join(log));
    let wanted = VolumeRequest {
        volume,
        images_dir: &session.images_dir,
        parent: parent.map(|dir| session.images_dir.join(dir)),
        max_frozen: options.max_frozen,
        compress: options.dump.compress,
        sync: options.dump.sync,
        written: [session.work_dir.clone()].into_iter().chain(log).collect(),
    };
    wanted.open("dump").map(Some)
}

impl VolumeRequest<'_> {
    /// Opens it for the command `doing`.
    ///
    /// # Errors
    /// Also where what the command writes to meanwhile is in it.
    pub fn open(self, doing: &'static str) -> Result<CompanionVolume, Failure> {
        let options = volume::DumpOptions {
            images: self.images_dir.into(),
            volume: self.volume.to_owned(),
            parent: self.parent.map(Into::into),
            verify_unchanged: false,
            max_frozen: self.max_frozen,
            context: IoContext::default(),
            rate_bytes_per_s: None,
            skip_bad: false,
            compress: self.compress,
            sync: self.sync,
        };
        let beside = CompanionVolume::open(options).map_err(Failure::volume(doing))?;
        let written = self.written.iter().map(PathBuf::as_path);
        for path in written.chain([self.images_dir]) {
            let refused = beside.refuse_inside(path);
            refused.map_err(Failure::volume(doing))?;
        }
        Ok(beside)
    }
}

/// A volume that is being saved with something else.
pub struct CompanionSave<'a> {
    beside: &'a CompanionVolume,
    under_way: Option<CompanionDump<'a>>,
    bar: Bar,
    dumped: Option<DumpSummary>,
}

impl<'a> CompanionSave<'a> {
    /// Nothing of it is read yet.
    pub fn new(beside: &'a CompanionVolume) -> Self {
        Self {
            beside,
            under_way: None,
            bar: Bar::default(),
            dumped: None,
        }
    }

    /// Summary of a save.
    pub fn dumped(self) -> Option<DumpSummary> {
        self.dumped
    }
}

/// Watches a dump, and saves a volume with the tree.
pub struct DumpObserver<'a> {
    watch: Watch<'a>,
    volume: Option<CompanionSave<'a>>,
}

impl<'a> DumpObserver<'a> {
    /// Watches with `watch`; saves the volume if there is one.
    pub fn new(watch: Watch<'a>, beside: Option<&'a CompanionVolume>) -> Self {
        let volume = beside.map(CompanionSave::new);
        Self { watch, volume }
    }

    /// Ends the watch over work that succeeded; gives what was saved of a volume.
    pub fn done(self) -> Option<DumpSummary> {
        self.watch.done();
        self.volume.and_then(CompanionSave::dumped)
    }
}

impl Observer for DumpObserver<'_> {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        self.watch.stage(stage, root)
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.watch.progress(done_bytes, total_bytes);
    }

    fn companion(&mut self) -> Option<&mut dyn Companion> {
        let volume = self.volume.as_mut();
        volume.map(|volume| volume as &mut dyn Companion)
    }
}

impl Companion for CompanionSave<'_> {
    fn begin(&mut self, image: &image::Writer) -> Result<(), CompanionError> {
        // What was read for an image that did not come to be is of no use.
        self.under_way = None;
        let show = |done, total| self.bar.show(done, total);
        self.under_way = Some(self.beside.begin(image, &show).map_err(failed)?);
        Ok(())
    }

    fn instant(&mut self, image: &image::Writer) -> Result<(), CompanionError> {
        let under_way = self.under_way.as_mut().expect("it was begun");
        under_way.instant(image).map_err(failed)
    }

    fn put(&mut self, image: &image::Writer) -> Result<(), CompanionError> {
        let under_way = self.under_way.take().expect("it was begun");
        self.dumped = Some(under_way.put(image).map_err(failed)?);
        Ok(())
    }
}

fn failed(error: volume::Error) -> CompanionError {
    CompanionError {
        blame: error.blame(),
        source: Box::new(error),
    }
}

/// Returns the summary of the volume's dump as JSON.
pub fn saved_to_json(dumped: &DumpSummary) -> Value {
    let us = |time: Duration| time.as_micros() as u64;
    let stops = dumped.stops.unwrap_or_default();
    json!({
        "stored_pages": dumped.stored_pages,
        "zero_pages": dumped.zero_pages,
        "parent_pages": dumped.parent_pages,
        "stops": stops.count,
        "frozen_us": us(stops.all),
        "longest_frozen_us": us(stops.longest),
    })
}

/// The same for people.
pub fn saved_to_text(dumped: &DumpSummary) -> String {
    let longest_us = dumped.stops.unwrap_or_default().longest.as_micros();
    format!(
        "pages of the volume {:>13}\nvolume frozen at one time {longest_us:>7} us\n",
        dumped.stored_pages
    )
}

/// Writes the volume of the image in `images_dir` to a device, and mounts it where it was.
///
/// # Errors
/// Nothing is mounted then.
pub fn attach(images_dir: &Path, target: PathBuf) -> Result<AttachedVolume, Failure> {
    let wanted = volume::RestoreOptions {
        images: images_dir.into(),
        target,
        verify: false,
        sync: true,
    };
    let bar = Bar::default();
    let attached = volume::attach(&wanted, &|done, total| bar.show(done, total));
    attached.map_err(Failure::volume("restore"))
}

/// Warns of a volume that is on a device with other numbers than before.
pub fn moved(before: u64, now: u64) -> String {
    format!(
        "the volume was on device {}:{} and is on {}:{} now: programs that know their files by \
         device and inode take them for others (SQLite, for a data base that it opens again)",
        major(before),
        minor(before),
        major(now),
        minor(now)
    )
}

/// Watches a restore; its volume, if it has one, stays from the moment on in which tasks may run.
pub struct RestoreObserver<'a> {
    pub watch: Watch<'a>,
    pub attached: Option<AttachedVolume>,
}

impl Observer for RestoreObserver<'_> {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        self.watch.stage(stage, root)?;
        if let (Stage::PreResume, Some(attached)) = (stage, &mut self.attached) {
            attached.outlive();
        }
        Ok(())
    }

    fn fork(&mut self) {
        self.watch.fork();
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.watch.progress(done_bytes, total_bytes);
    }
}
