//! `stillframe volume export`: files of an image as restore(8) reads them.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::json;
use volume::{ExportOptions, ExportSummary};

use super::files::{omissions_to_json, printable};
use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;

/// Write the files of an image in the format of another program
#[derive(Debug, Args)]
pub struct Export {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The format: that of dump(8), which restore(8) reads
    #[arg(long, value_name = "dump")]
    format: Format,

    /// Where it goes: a file, which is replaced, a device, or - for the standard output
    #[arg(short = 'f', long, value_name = "FILE|-")]
    file: PathBuf,

    /// Write what has changed since the image in this directory, relative to that of the image
    #[arg(long, value_name = "DIR")]
    prev_images_dir: Option<PathBuf>,

    /// The level that it says it is of: 0 without an older image, and else 1 unless given
    #[arg(long, value_name = "LEVEL", requires = "prev_images_dir")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    level: Option<u32>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Formats of other programs.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Format {
    /// dump(8)'s.
    Dump,
}

impl Export {
    /// The directories of the images that it reads.
    pub fn read_images(&self) -> Vec<PathBuf> {
        let parent = self.prev_images_dir.iter();
        let parent = parent.map(|dir| self.images_dir.join(dir));
        parent.chain([self.images_dir.clone()]).collect()
    }

    /// Writes it.
    ///
    /// # Errors
    /// Whatever the engine tells; a file is as it was before then.
    pub fn run(self) -> Result<Status, Failure> {
        let Format::Dump = self.format;
        let parent = self.prev_images_dir.map(|dir| self.images_dir.join(dir));
        let level = match parent {
            None => 0,
            Some(_) => self.level.unwrap_or(1),
        };
        let options = ExportOptions {
            images: self.images_dir.into(),
            parent: parent.map(Into::into),
            level,
        };
        let bar = Bar::default();
        let progress = |done, total| bar.show(done, total);
        let is_standard = self.file == Path::new("-");
        let exported = match is_standard {
            true => {
                let mut stdout = std::io::stdout().lock();
                let name = Path::new("the standard output");
                volume::export(&options, &mut stdout, name, &progress)
            }
            false => volume::export_to_file(&options, &self.file, &progress),
        };
        drop(bar);
        let exported = exported.map_err(Failure::volume("volume export"))?;
        let text = match self.json {
            true => format!("{}\n", to_json(&exported)),
            false => to_text(&exported),
        };
        for one in &exported.left_out {
            let path = printable(one.path.as_os_str().as_bytes());
            output::complain(&format!("stillframe: warning: /{path}: {}\n", one.what));
        }
        match is_standard {
            true => output::complain(&text),
            false => output::say(&text),
        }
        Ok(Status::Done)
    }
}

fn to_json(exported: &ExportSummary) -> serde_json::Value {
    json!({"volume_export": {
        "folders": exported.folders,
        "files": exported.files,
        "bytes": exported.bytes,
        "cut_times": exported.cut_times,
        "left_out": omissions_to_json(&exported.left_out),
    }})
}

fn to_text(exported: &ExportSummary) -> String {
    let cut = match exported.cut_times {
        0 => String::new(),
        files => format!("; the times of {files} are cut to microseconds"),
    };
    format!(
        "{} directories and {} other files, {} bytes{cut}\n",
        exported.folders, exported.files, exported.bytes
    )
}
