//! `stillframe merge`: squashes a chain of images.

use std::path::PathBuf;

use clap::Args;
use process::{MergeOptions, MergeReport};
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::output;
use crate::session::CompressArgs;

/// Squash a chain: make an image need no other one, or only older ones
#[derive(Debug, Args)]
pub struct Merge {
    /// The directory of the newest image of the chain
    #[arg(value_name = "DIR")]
    image: PathBuf,

    /// Keep the image in this directory, and those that it is over, as they are
    #[arg(long, value_name = "DIR")]
    until: Option<PathBuf>,

    /// Write the new image here instead of in place of the old one
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the new image is on the disk before the old one goes
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Merge {
    /// Writes the new image.
    ///
    /// # Errors
    /// Whatever the engine tells; the old image then is as it was.
    pub fn run(self) -> Result<Status, Failure> {
        let options = MergeOptions {
            images: self.image.into(),
            until: self.until.map(Into::into),
            output: self.output.map(Into::into),
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let report = process::merge(&options).map_err(Failure::engine("merge"))?;
        output::tell(self.json, || to_json(&report), || to_text(&report));
        Ok(Status::Done)
    }
}

fn to_json(report: &MergeReport) -> Value {
    json!({"merge": {
        "image": report.image,
        "ancestors_before": report.ancestors_before,
        "ancestors": report.ancestors,
        "stored_pages": report.stored_pages,
        "parent_pages": report.parent_pages,
    }})
}

fn to_text(report: &MergeReport) -> String {
    format!(
        "image {} has {} pages of its own and {} of {} other images, instead of {}\n",
        report.image,
        report.stored_pages,
        report.parent_pages,
        report.ancestors,
        report.ancestors_before,
    )
}
