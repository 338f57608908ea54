//! `stillframe import`: a monitor's snapshot becomes an image.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vm::{ImportOptions, ImportSummary};

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::output;
use crate::session::CompressArgs;

/// Make an image of a virtual machine's snapshot
#[derive(Debug, Args)]
pub struct Import {
    /// The snapshot is Firecracker's
    #[arg(long, required = true)]
    firecracker: bool,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The snapshot's memory file; with --parent, its holes are what has not changed
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,

    /// The snapshot's state file
    #[arg(long, value_name = "FILE")]
    vmstate: Option<PathBuf>,

    /// The image that the snapshot is a difference from; pages that it has are not stored
    #[arg(long, value_name = "DIR")]
    parent: Option<PathBuf>,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Import {
    /// Makes the image.
    ///
    /// # Errors
    /// Whatever the engine tells; nothing is left then.
    pub fn run(self) -> Result<Status, Failure> {
        debug_assert!(self.firecracker, "the parser asks for it");
        let options = ImportOptions {
            images: self.images_dir.into(),
            memory: self.memory,
            vmstate: self.vmstate,
            parent: self.parent.as_deref().map(Into::into),
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let imported = Bar::during(|show| vm::import(&options, process::facts(), show));
        let imported = imported.map_err(Failure::machine("import"));
        let imported = imported.map_err(|failure| match &self.parent {
            Some(dir) => ExpectedKind::Machine.explain(dir, failure),
            None => failure,
        })?;
        output::tell(self.json, || to_json(&imported), || to_text(&imported));
        Ok(Status::Done)
    }
}

fn to_json(imported: &ImportSummary) -> serde_json::Value {
    json!({"import": {
        "image": imported.image.to_string(),
        "pages": imported.pages,
        "stored_pages": imported.stored_pages,
        "zero_pages": imported.zero_pages,
        "parent_pages": imported.parent_pages,
    }})
}

fn to_text(imported: &ImportSummary) -> String {
    format!(
        "image {} has {} pages: {} stored, {} zero, {} as in the parent image\n",
        imported.image,
        imported.pages,
        imported.stored_pages,
        imported.zero_pages,
        imported.parent_pages,
    )
}
