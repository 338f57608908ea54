//! `stillframe volume restore`: an image becomes a volume again.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use volume::RestoreOptions;

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;

/// Write a volume of an image to a device or a sparse file
#[derive(Debug, Args)]
pub struct Restore {
    /// The device, which is overwritten, or the file, which is replaced by a new one
    #[arg(value_name = "DEVICE|FILE")]
    target: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// Read again what was written, and compare it with the image
    #[arg(long)]
    verify: bool,

    /// Do not wait until it is on the disk
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Restore {
    /// Writes the volume.
    ///
    /// # Errors
    /// Whatever the engine tells; a file that was there is as it was.
    pub fn run(self) -> Result<Status, Failure> {
        let options = RestoreOptions {
            images: self.images_dir.into(),
            target: self.target,
            verify: self.verify,
            sync: !self.no_sync,
        };
        let bar = Bar::default();
        let restored = volume::restore(&options, &|done, total| bar.show(done, total));
        drop(bar);
        let restored = restored.map_err(Failure::volume("volume restore"))?;
        let (len_bytes, written) = (restored.len_bytes, restored.written_pages);
        let verified = restored.verified_pages;
        let text = if self.json {
            let told = json!({"volume_restore": {
                "len_bytes": len_bytes,
                "written_pages": written,
                "verified_pages": verified,
            }});
            format!("{told}\n")
        } else {
            let checked = match self.verify {
                true => format!("; {verified} pages were read again"),
                false => String::new(),
            };
            format!("a volume of {len_bytes} bytes, {written} pages of them written{checked}\n")
        };
        output::say(&text);
        Ok(Status::Done)
    }
}
