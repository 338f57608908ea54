//! `stillframe volume restore`: an image becomes a volume again.

use std::os::unix::fs::FileTypeExt as _;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use volume::RestoreOptions;

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;
use crate::values::size;

/// Write a volume of an image to a device or a sparse file
#[derive(Debug, Args)]
pub struct Restore {
    /// The device, which is overwritten, or the file, which is replaced by a new one
    #[arg(value_name = "DEVICE|FILE")]
    target: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,

    /// Read again what was written, and compare it with the image
    #[arg(long)]
    verify: bool,

    /// Have the file system use all of a device that is larger, or of a file made so large
    /// (e2fsck(8) and resize2fs(8) do that)
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, value_parser = size)]
    grow: Option<Option<u64>>,

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
        let is_device =
            std::fs::metadata(&self.target).is_ok_and(|facts| facts.file_type().is_block_device());
        let wrong = match (self.grow, is_device) {
            (Some(None), false) => "--grow needs a size where the target is a file: --grow=SIZE",
            (Some(Some(_)), true) => "a device has its size: use --grow without one",
            _ => "",
        };
        if !wrong.is_empty() {
            return Err(Failure::Usage(wrong.to_owned()));
        }
        let options = RestoreOptions {
            images: self.images_dir.into(),
            target: self.target,
            verify: self.verify,
            sync: !self.no_sync,
        };
        let restored = Bar::during(|show| volume::restore(&options, show));
        let restored = restored.map_err(Failure::volume("volume restore"))?;
        let target = &options.target;
        let grown = self.grow.map(|size| volume::grow(target, size));
        let grown = grown
            .transpose()
            .map_err(Failure::volume("volume restore"))?;
        let (len_bytes, written) = (restored.len_bytes, restored.written_pages);
        let verified = restored.verified_pages;
        let text = if self.json {
            let mut told = json!({"volume_restore": {
                "len_bytes": len_bytes,
                "written_pages": written,
                "verified_pages": verified,
            }});
            if let Some(grown) = grown {
                told["volume_restore"]["grown_bytes"] = grown.into();
            }
            format!("{told}\n")
        } else {
            let checked = match self.verify {
                true => format!("; {verified} pages were read again"),
                false => String::new(),
            };
            let grown = grown.map(|bytes| format!("; resize2fs(8) made it {bytes} bytes large"));
            let grown = grown.unwrap_or_default();
            format!(
                "a volume of {len_bytes} bytes, {written} pages of them written{checked}{grown}\n"
            )
        };
        output::say(&text);
        Ok(Status::Done)
    }
}
