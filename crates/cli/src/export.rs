//! `stillframe export`: an image becomes a monitor's snapshot again.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vm::{ExportOptions, ExportSummary};

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::output;

/// Write the memory of a virtual machine's image to a file, as its monitor reads it
#[derive(Debug, Args)]
pub struct Export {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The memory file; pages of zeros are holes in it
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,

    /// The state file
    #[arg(long, value_name = "FILE")]
    vmstate: Option<PathBuf>,

    /// Do not wait until the files are on the disk
    #[arg(long)]
    no_sync: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Export {
    /// Writes the files.
    ///
    /// # Errors
    /// Whatever the engine tells; files that were there are as they were.
    pub fn run(self) -> Result<Status, Failure> {
        let options = ExportOptions {
            images: self.images_dir.as_path().into(),
            memory: self.memory,
            vmstate: self.vmstate,
            sync: !self.no_sync,
        };
        let exported = Bar::during(|show| vm::export(&options, show));
        let exported = exported.map_err(Failure::machine("export"));
        let exported =
            exported.map_err(|it| ExpectedKind::Machine.explain(&self.images_dir, it))?;
        output::tell(self.json, || to_json(&exported), || to_text(&exported));
        Ok(Status::Done)
    }
}

fn to_json(exported: &ExportSummary) -> serde_json::Value {
    json!({"export": {
        "pages": exported.pages,
        "written_pages": exported.written_pages,
        "state_bytes": exported.state_bytes,
    }})
}

fn to_text(exported: &ExportSummary) -> String {
    let (pages, written) = (exported.pages, exported.written_pages);
    let state = exported.state_bytes;
    let state = state.map_or(String::new(), |bytes| format!("; {bytes} bytes of state"));
    format!("{written} of {pages} pages were written, the others are zero{state}\n")
}
