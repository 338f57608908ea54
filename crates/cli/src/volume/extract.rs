//! `stillframe volume extract` and `diff`: files of an image into a directory, and beside those of
//! another image.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use volume::{Difference, ExtractSummary, Fate, Files};

use super::files::{omissions_to_json, printable};
use crate::exit::{Failure, Status};
use crate::output;

/// Write files of an image to a directory, with owners, modes, times and attributes
#[derive(Debug, Args)]
pub struct Extract {
    /// Paths from the root of the file system; everything without any
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,

    /// The directory that the files go to, under their paths; nothing that is there is replaced
    #[arg(long, value_name = "FOLDER")]
    into: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Tell which files of an image differ from those of an older one
#[derive(Debug, Args)]
pub struct Diff {
    /// A path from the root of the file system
    #[arg(value_name = "PATH", default_value = "/")]
    path: OsString,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,

    /// The directory of the older image, relative to that of the image
    #[arg(long, value_name = "DIR")]
    prev_images_dir: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Extract {
    /// Extracts.
    ///
    /// # Errors
    /// Whatever the engine tells; what was extracted before stays.
    pub fn run(self) -> Result<Status, Failure> {
        let mut paths = self.paths.into_iter().map(OsString::into_vec);
        let mut paths = paths.by_ref().collect::<Vec<_>>();
        if paths.is_empty() {
            paths.push(b"/".to_vec());
        }
        let files = Files::open(&self.images_dir.into());
        let extracted = files.and_then(|files| volume::extract(&files, &paths, &self.into));
        let extracted = extracted.map_err(Failure::volume("volume extract"))?;
        output::tell(
            self.json,
            || extracted_to_json(&extracted),
            || extracted_to_text(&extracted),
        );
        Ok(Status::Done)
    }
}

fn extracted_to_json(extracted: &ExtractSummary) -> Value {
    json!({"volume_extract": {
        "files": extracted.files,
        "bytes": extracted.bytes,
        "left_out": omissions_to_json(&extracted.left_out),
    }})
}

fn extracted_to_text(extracted: &ExtractSummary) -> String {
    let mut text = format!("{} files, {} bytes\n", extracted.files, extracted.bytes);
    for one in &extracted.left_out {
        let path = printable(one.path.as_os_str().as_bytes());
        text += &format!("left out: {path}: {}\n", one.what);
    }
    text
}

impl Diff {
    /// The directories of the images that it reads.
    pub fn read_images(&self) -> Vec<PathBuf> {
        let old = self.images_dir.join(&self.prev_images_dir);
        vec![self.images_dir.clone(), old]
    }

    pub fn run(self) -> Result<Status, Failure> {
        let old = Files::open(&self.images_dir.join(&self.prev_images_dir).into());
        let old = old.map_err(Failure::volume("volume diff"))?;
        let new = Files::open(&self.images_dir.into()).map_err(Failure::volume("volume diff"))?;
        let mut all = Vec::new();
        let told = volume::diff(&old, &new, self.path.as_bytes(), &mut |one| {
            match self.json {
                true => all.push(to_json(&one)),
                false => output::say(&to_line(&one)),
            }
            Ok(())
        });
        told.map_err(Failure::volume("volume diff"))?;
        if self.json {
            output::say(&format!("{}\n", json!({ "volume_diff": all })));
        }
        Ok(Status::Done)
    }
}

/// Returns a file's fate, and its changed fields.
fn words(fate: &Fate) -> (&'static str, Vec<&'static str>) {
    match fate {
        Fate::Added => ("added", Vec::new()),
        Fate::Removed => ("removed", Vec::new()),
        Fate::Changed(what) => ("changed", what.clone()),
    }
}

fn to_line(one: &Difference) -> String {
    let (fate, what) = words(&one.fate);
    let what = match what.is_empty() {
        true => String::new(),
        false => format!(": {}", what.join(", ")),
    };
    format!("{fate:7} /{}{what}\n", printable(&one.path))
}

fn to_json(one: &Difference) -> Value {
    let (fate, what) = words(&one.fate);
    json!({"path": printable(&one.path), "fate": fate, "what": what})
}
