//! `stillframe volume ls` and `cat`: files straight out of an image.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufWriter, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};
use volume::ext4::Kind;
use volume::{FileEntry, Files, Omission};

use crate::exit::{Failure, Status};
use crate::output;

/// List a directory of an image
#[derive(Debug, Args)]
pub struct Ls {
    /// A path from the root of the file system
    #[arg(value_name = "PATH", default_value = "/")]
    path: OsString,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Write the contents of a file of an image to the standard output
#[derive(Debug, Args)]
pub struct Cat {
    /// A path from the root of the file system
    #[arg(value_name = "PATH")]
    path: OsString,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,
}

impl Ls {
    /// Lists.
    pub fn run(self) -> Result<Status, Failure> {
        let files = Files::open(&self.images_dir.into());
        let listed = files.and_then(|files| files.list(self.path.as_bytes()));
        let listed = listed.map_err(Failure::volume("volume ls"))?;
        output::tell(
            self.json,
            || json!({"volume_ls": listed.iter().map(to_json).collect::<Vec<_>>()}),
            || listed.iter().map(to_line).collect(),
        );
        Ok(Status::Done)
    }
}

impl Cat {
    /// Writes the contents.
    ///
    /// # Errors
    /// Whatever the engine tells; what was written before stays.
    pub fn run(self) -> Result<Status, Failure> {
        let mut to = BufWriter::new(std::io::stdout().lock());
        let files = Files::open(&self.images_dir.into());
        let copied = files.and_then(|files| files.copy(self.path.as_bytes(), &mut to));
        copied.map_err(Failure::volume("volume cat"))?;
        to.flush().map_err(|source| Failure::File {
            action: "write to",
            path: "the standard output".into(),
            source,
        })?;
        Ok(Status::Done)
    }
}

fn letter(kind: Kind) -> char {
    match kind {
        Kind::Regular => '-',
        Kind::Directory => 'd',
        Kind::Link => 'l',
        Kind::Character => 'c',
        Kind::Block => 'b',
        Kind::Fifo => 'p',
        Kind::Socket => 's',
        Kind::Unknown => '?',
    }
}

/// A name as a line can have it.
pub fn printable(name: &[u8]) -> String {
    let text = OsString::from_vec(name.to_vec());
    text.to_string_lossy().escape_debug().to_string()
}

/// Files that an image or a stream could not take, with the reasons.
pub fn omissions_to_json(left_out: &[Omission]) -> Vec<Value> {
    let omission = |one: &Omission| {
        let path = printable(one.path.as_os_str().as_bytes());
        json!({"path": path, "what": one.what})
    };
    left_out.iter().map(omission).collect()
}

fn to_line(listed: &FileEntry) -> String {
    let inode = &listed.inode;
    let time = inode.modified();
    let mut line = format!(
        "{}{:04o} {:4} {:6} {:6} {:12} {:10}.{:09} {}",
        letter(inode.kind()),
        inode.permissions(),
        inode.links(),
        inode.uid(),
        inode.gid(),
        inode.size_bytes(),
        time.s,
        time.ns,
        printable(&listed.name),
    );
    if let Some(target) = &listed.target {
        // Writing to a string cannot fail.
        let _ = write!(line, " -> {}", printable(target));
    }
    line.push('\n');
    line
}

fn to_json(listed: &FileEntry) -> Value {
    let inode = &listed.inode;
    json!({
        "name": printable(&listed.name),
        "inode": inode.number,
        "mode": inode.mode(),
        "links": inode.links(),
        "uid": inode.uid(),
        "gid": inode.gid(),
        "size_bytes": inode.size_bytes(),
        "modified_s": inode.modified().s,
        "modified_ns": inode.modified().ns,
        "target": listed.target.as_deref().map(printable),
    })
}
