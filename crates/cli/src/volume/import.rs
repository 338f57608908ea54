//! `stillframe volume import`: what dump(8) has written becomes an image.

use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use volume::{ImportOptions, ImportSummary};

use super::export::Format;
use super::files::{omissions_to_json, printable};
use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;
use crate::session::CompressArgs;
use crate::values::size;

/// Make an image of what another program has saved
#[derive(Debug, Args)]
pub struct Import {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The format: that of dump(8)
    #[arg(long, value_name = "dump")]
    format: Format,

    /// A file with a dump, or - for the standard input; given again, a dump of what has changed
    /// since the one before
    #[arg(short = 'f', long = "file", value_name = "FILE|-", required = true)]
    files: Vec<PathBuf>,

    /// How large the new file system is (K, M or G: 1024 of the one before); by the length of the
    /// files unless given
    #[arg(long, value_name = "BYTES", value_parser = size)]
    size: Option<u64>,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Import {
    /// Makes the image.
    ///
    /// # Errors
    /// Whatever the engine tells; nothing is left then.
    pub fn run(self) -> Result<Status, Failure> {
        let Format::Dump = self.format;
        let options = ImportOptions {
            images: self.images_dir.into(),
            streams: self.files,
            size_bytes: self.size,
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let imported = Bar::during(|show| volume::import(&options, process::facts(), show));
        let imported = imported.map_err(Failure::volume("volume import"))?;
        for one in &imported.left_out {
            let path = printable(one.path.as_os_str().as_bytes());
            output::complain(&format!("stillframe: warning: {path}: {}\n", one.what));
        }
        output::tell(
            self.json,
            || to_json(&imported),
            || {
                format!(
                    "image {} has {} directories and {} other files, in a volume of {} bytes\n",
                    imported.image, imported.folders, imported.files, imported.len_bytes
                )
            },
        );
        Ok(Status::Done)
    }
}

fn to_json(imported: &ImportSummary) -> serde_json::Value {
    json!({"volume_import": {
        "image": imported.image.to_string(),
        "len_bytes": imported.len_bytes,
        "folders": imported.folders,
        "files": imported.files,
        "left_out": omissions_to_json(&imported.left_out),
    }})
}
