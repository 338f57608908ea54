//! `stillframe dedup`: frees what newer images of a chain have replaced.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use process::DedupOptions;
use serde_json::json;

use crate::exit::{Failure, Status};
use crate::session::Everywhere;
use crate::{logfile, output};

/// Free in older images what an image does not need of them; they cannot be restored any more then
#[derive(Debug, Args)]
pub struct Dedup {
    /// The directory of the newest image of the chain
    #[arg(value_name = "DIR", required_unless_present = "images_dir")]
    image: Option<PathBuf>,

    /// The same, as dump and restore name it
    #[arg(short = 'D', long, value_name = "DIR", conflicts_with = "image")]
    images_dir: Option<PathBuf>,

    /// The log file, relative to the work directory; `-` is stdout [default: dedup.log]
    #[arg(short = 'o', long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// The directory of the log file; that of the image unless given
    #[arg(short = 'W', long, value_name = "DIR")]
    work_dir: Option<PathBuf>,

    /// Say more in the log: -v or -v3 informs, -vv or -v4 tells details; 0 is silence
    #[arg(short = 'v', long, value_name = "LEVEL", default_value_t = logfile::DEFAULT_VERBOSITY)]
    verbosity: u32,

    /// Do not wait until the images are on the disk before anything is freed
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Dedup {
    /// Frees it.
    ///
    /// # Errors
    /// Whatever the engine tells; the newest image then is whole.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        let images_dir = self.image.or(self.images_dir).unwrap_or_default();
        let work_dir = self.work_dir.as_ref().unwrap_or(&images_dir);
        let everywhere = Everywhere {
            log_file: self.log_file,
            verbosity: self.verbosity,
            ..Everywhere::default()
        };
        everywhere.open_log(work_dir, Some("dedup"), started)?;
        let options = DedupOptions {
            images: images_dir.into(),
            sync: !self.no_sync,
        };
        let report = process::dedup(&options).map_err(|source| Failure::Engine {
            doing: "dedup",
            source: Box::new(source),
        })?;
        let (bytes, images) = (report.freed_bytes, report.images);
        log::info!("{bytes} bytes were freed in {images} older images");
        let text = if self.json {
            let told = json!({"dedup": {"freed_bytes": bytes, "images": images}});
            format!("{told}\n")
        } else {
            format!("{bytes} bytes were freed in {images} older images\n")
        };
        output::say(&text);
        Ok(Status::Done)
    }
}
