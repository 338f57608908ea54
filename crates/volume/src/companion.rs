//! A volume that is saved beside what uses it, in the same image and of the same instant.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use image::{SpaceId, Writer};

use crate::bad_pages;
use crate::device::Volume;
use crate::dump::{DumpOptions, DumpSummary, Parent, Progress, open};
use crate::inside::refuse_inside;
use crate::mounted::{Draft, LiveDump, too_long};
use crate::place::{self, BESIDE};
use crate::tables::Pieces;
use crate::{Error, Result};

/// What is read in less time beside its users is little: the rest can wait for the instant.
const LITTLE: Duration = Duration::from_millis(250);
/// How often it is read beside its users before the instant, at most.
const ROUNDS_MAX: u32 = 4;

/// A mounted volume that is to be in an image of something else.
pub struct CompanionVolume {
    options: DumpOptions,
    volume: Volume,
    parent: Option<Parent>,
}

impl CompanionVolume {
    /// Opens the volume, and the image that the new one is over, where that has a volume.
    ///
    /// # Errors
    /// [`Error::Unfit`] where nobody has it mounted.
    pub fn open(options: DumpOptions) -> Result<Self> {
        let volume = Volume::open(&options.volume)?;
        if volume.mounted.is_none() {
            return Err(Error::Unfit(format!(
                "{} is not mounted: save it by itself, with volume dump",
                options.volume.display()
            )));
        }
        if let Some(part) = &volume.part {
            return Err(Error::Unfit(format!(
                "{} shows only {} of the volume {}, and a restore mounts all of it: name the \
                 device, or where all of it is mounted",
                options.volume.display(),
                part.display(),
                volume.path.display()
            )));
        }
        let mut parent = None;
        if let Some(images) = &options.parent {
            // The way to the parent may lead through it.
            options.images.create().map_err(image::Error::Place)?;
            if place::has_volume(images)? {
                parent = Some(Parent::open(images)?);
            }
        }
        Ok(Self {
            options,
            volume,
            parent,
        })
    }

    /// Refuses a file or folder that is written to while the volume is frozen, if it is in it.
    ///
    /// # Errors
    /// [`Error::Unfit`].
    pub fn refuse_inside(&self, path: &Path) -> Result<()> {
        refuse_inside(&self.options.volume, &self.volume, self.mount(), path)
    }

    fn mount(&self) -> &File {
        let mounted = self.volume.mounted.as_ref();
        &mounted.expect("looked at when it was opened").1
    }

    /// Reads what is in use into an image that is being made, while everybody goes on.
    ///
    /// # Errors
    /// Those of [`crate::dump()`].
    pub fn begin(&self, writer: &Writer, progress: Progress<'_>) -> Result<CompanionDump<'_>> {
        let begun = self.read_ahead(writer, progress);
        begun.map_err(|error| bad_pages::named(error, || open(&self.volume)))
    }

    fn read_ahead(&self, writer: &Writer, progress: Progress<'_>) -> Result<CompanionDump<'_>> {
        let mut live = LiveDump::begin(&self.options, &self.volume, self.parent.as_ref())?;
        if let Some(parent) = &self.parent {
            parent.check(&live.state)?;
        }
        let over = self.parent.as_ref().map(|parent| &parent.opened);
        let space = place::add_space(writer, over, BESIDE, live.state.len_bytes);
        let draft = Draft { writer, space };
        let mut reading = Instant::now();
        live.read_first(draft, progress)?;
        for _ in 1..ROUNDS_MAX {
            if reading.elapsed() < LITTLE {
                break;
            }
            live.survey_again()?;
            reading = Instant::now();
            live.read_missing(draft, progress)?;
        }
        let known = live.prepare()?;
        Ok(CompanionDump {
            beside: self,
            live,
            known,
            space,
        })
    }
}

/// A volume most of which was read.
pub struct CompanionDump<'a> {
    beside: &'a CompanionVolume,
    live: LiveDump<'a>,
    known: Pieces,
    space: SpaceId,
}

impl CompanionDump<'_> {
    /// Freezes the volume, reads what has changed and thaws it; this is the instant. It may be
    /// called again: then the last one is it. Who is saved with it must not run, and can
    /// therefore not wait for the volume.
    ///
    /// # Errors
    /// The volume is not frozen then.
    pub fn instant(&mut self, writer: &Writer) -> Result<()> {
        let space = self.space;
        let read = self
            .live
            .freeze_and_try(&self.known, Draft { writer, space });
        match read.map_err(|error| bad_pages::named(error, || open(&self.beside.volume)))? {
            true => Ok(()),
            false => Err(too_long(&self.beside.options)),
        }
    }

    /// Puts what it was at the instant into the image.
    ///
    /// # Errors
    /// [`Error::Image`].
    pub fn put(self, writer: &Writer) -> Result<DumpSummary> {
        let space = self.space;
        let (dumped, _) = self.live.put(Draft { writer, space })?;
        Ok(dumped)
    }
}
