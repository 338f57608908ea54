//! `stillframe dedup`: frees what newer images of a chain have replaced.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use process::DedupOptions;
use serde_json::json;

use crate::exit::{Failure, Status};
use crate::output;
use crate::session::{GeneralArgs, LogArgs};

/// Free in older images what an image does not need of them; they cannot be restored any more then
#[derive(Debug, Args)]
pub struct Dedup {
    /// The directory of the newest image of the chain
    #[arg(value_name = "DIR", required_unless_present = "images_dir")]
    image: Option<PathBuf>,

    /// The same, as dump and restore name it
    #[arg(short = 'D', long, value_name = "DIR", conflicts_with = "image")]
    images_dir: Option<PathBuf>,

    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    general: GeneralArgs,

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
        self.general.begin()?;
        let images_dir = self.image.or(self.images_dir).unwrap_or_default();
        self.log.open(&images_dir, "dedup", started)?;
        self.general.tell();
        let options = DedupOptions {
            images: images_dir.into(),
            sync: !self.no_sync,
        };
        let report = process::dedup(&options).map_err(Failure::engine("dedup"))?;
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
