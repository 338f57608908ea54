//! `stillframe volume dump`: a volume becomes an image.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use volume::{DumpOptions, DumpSummary, Images, Level};

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;
use crate::session::CompressArgs;
use crate::volume::read_args::ReadArgs;

/// Save what an ext4 volume has in use
#[derive(Debug, Args)]
pub struct Dump {
    /// A device, a file with a file system, or the directory where one is mounted
    #[arg(value_name = "DEVICE|FILE|MOUNTPOINT")]
    volume: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// Save what has changed since the image in this directory, relative to that of the new one
    #[arg(long, value_name = "DIR", group = "older")]
    prev_images_dir: Option<PathBuf>,

    /// Save what has changed since the last dump of a lower level that was noted, whose image is
    /// in a directory beside the new one; everything where none was
    #[arg(long, value_name = "LEVEL", group = "older")]
    level: Option<u32>,

    /// Note the dump, its level and date
    #[arg(short = 'u', long, requires = "level")]
    update: bool,

    /// Where dumps are noted
    #[arg(
        long,
        value_name = "FILE",
        requires = "level",
        default_value = "/etc/dumpdates"
    )]
    dumpdates: PathBuf,

    /// Read files also that seem unchanged, and tell of pages that differ
    #[arg(long, requires = "older")]
    verify_unchanged: bool,

    /// For how long a mounted file system may be frozen at a time; it is thawed then in any case
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=600_000))]
    max_frozen: u64,

    /// Take blocks that cannot be read for zeros, and tell which they are and whose
    #[arg(long)]
    skip_bad: bool,

    #[command(flatten)]
    reading: ReadArgs,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Dump {
    /// The directory of the image that it is over, where that is named.
    pub fn read_images(&self) -> Vec<PathBuf> {
        let parent = self.prev_images_dir.iter();
        parent.map(|dir| self.images_dir.join(dir)).collect()
    }

    /// Makes the image.
    ///
    /// # Errors
    /// Whatever the engine tells; nothing is left then.
    pub fn run(self) -> Result<Status, Failure> {
        let failed = || Failure::volume("volume dump");
        let level = self.level.map(|level| Level {
            level,
            dumpdates: self.dumpdates,
        });
        let images = Images::from(self.images_dir.clone());
        let parent = match (&level, self.prev_images_dir) {
            (Some(level), _) => level.parent(&self.volume, &images).map_err(failed())?,
            (None, dir) => dir.map(|dir| self.images_dir.join(dir).into()),
        };
        let (context, rate_bytes_per_s) = self.reading.apply()?;
        let options = DumpOptions {
            parent,
            images,
            volume: self.volume,
            verify_unchanged: self.verify_unchanged,
            max_frozen: Duration::from_millis(self.max_frozen),
            context,
            rate_bytes_per_s,
            skip_bad: self.skip_bad,
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let dumped = Bar::during(|show| volume::dump(&options, process::facts(), show));
        let dumped = dumped.map_err(failed())?;
        if let Some(level) = level.filter(|_| self.update) {
            let noted = level.note(&options.volume, dumped.instant);
            noted.map_err(failed())?;
        }
        output::tell(
            self.json,
            || to_json(&dumped, options.parent.as_ref()),
            || to_text(&dumped),
        );
        Ok(Status::Done)
    }
}

fn to_json(dumped: &DumpSummary, parent: Option<&Images>) -> serde_json::Value {
    let us = |time: Duration| time.as_micros() as u64;
    let mut told = json!({
        "image": dumped.image.to_string(),
        "pages": dumped.pages,
        "read_pages": dumped.read_pages,
        "stored_pages": dumped.stored_pages,
        "zero_pages": dumped.zero_pages,
        "parent_pages": dumped.parent_pages,
        "silent_pages": dumped.silent_pages,
        "replayed_blocks": dumped.replayed_blocks,
    });
    if let Some(parent) = parent {
        told["parent"] = parent.to_string().into();
    }
    if dumped.marked_free_blocks > 0 {
        told["marked_free_blocks"] = dumped.marked_free_blocks.into();
    }
    if !dumped.bad.is_empty() {
        let bad = dumped.bad.iter();
        let bad = bad.map(|bad| json!({"block": bad.block, "owner": bad.owner}));
        told["bad_blocks"] = bad.collect();
    }
    if let Some(stops) = dumped.stops {
        told["stops"] = stops.count.into();
        told["longest_frozen_us"] = us(stops.longest).into();
        told["frozen_us"] = us(stops.all).into();
    }
    json!({"volume_dump": told})
}

fn to_text(dumped: &DumpSummary) -> String {
    let mut text = format!(
        "image {} has {} pages: {} stored, {} zero, {} as in the parent image, the others free\n",
        dumped.image, dumped.pages, dumped.stored_pages, dumped.zero_pages, dumped.parent_pages,
    );
    if dumped.silent_pages > 0 {
        let silent = dumped.silent_pages;
        text += &format!("{silent} pages differ although their files seem unchanged\n");
    }
    for bad in &dumped.bad {
        text += &format!(
            "block {} is zero, as it cannot be read: {}\n",
            bad.block, bad.owner
        );
    }
    if dumped.marked_free_blocks > 0 {
        let blocks = dumped.marked_free_blocks;
        text += &format!(
            "{blocks} blocks of files are marked free, and are in the image all the same: \
             run e2fsck -f on the volume\n"
        );
    }
    if dumped.replayed_blocks > 0 {
        let blocks = dumped.replayed_blocks;
        text += &format!("the journal was replayed in the image: {blocks} blocks\n");
    }
    if let Some(stops) = dumped.stops {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        text += &format!(
            "frozen {} times, for {:.1} ms, at most {:.1} ms at a time\n",
            stops.count,
            ms(stops.all),
            ms(stops.longest)
        );
    }
    text
}
