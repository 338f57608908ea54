//! Streams of dump(8) become an image.
//!
//! The files are made by this kernel, in an ext4 that is mounted nowhere and whose file has no
//! name, so nothing is left of it however this ends. No name of a stream leads anywhere: all files
//! are made under their numbers in one folder, also those of increments, which replace the older
//! ones; when the last stream is read, they get their names, the innermost directories first.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use image::{Compression, Facts, ImageId};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};
use store::Images;
use sys::loop_device::{Access, attach_loop};

use super::stream::Stream;
use super::tree_builder::TreeBuilder;
use crate::dump::{DumpOptions, Progress};
use crate::extract::Omission;
use crate::source::IoContext;
use crate::{Error, Result};

/// Bytes besides contents and inodes: the journal, and room.
const ROOM_BYTES: u64 = 64 << 20;
/// Space of a file beyond the bytes of the stream: an inode, and the rest of its last block.
const FILE_BYTES: u64 = 256 + 4096;
/// Inodes of the file system itself, and the folder of numbers.
const OWN_INODES: u64 = 16;

/// Options of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Directory of the new image.
    pub images: Images,
    /// Files with streams, `-` for the standard input: of level 0, and what has changed since, and
    /// since that.
    pub streams: Vec<PathBuf>,
    /// How large the file system is to be; by the length of the streams where nothing is said.
    pub size_bytes: Option<u64>,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// True to wait until the image is on the disk.
    pub sync: bool,
}

/// Summary of an import.
#[derive(Debug)]
pub struct ImportSummary {
    /// The image.
    pub image: ImageId,
    /// How large its volume is.
    pub len_bytes: u64,
    /// Directories.
    pub folders: u64,
    /// Other files.
    pub files: u64,
    /// Files that differ from the streams, and why.
    pub left_out: Vec<Omission>,
}

/// Makes an image of what dump(8) has written, or [`super::export`].
///
/// # Errors
/// [`Error::Unfit`] without root, where streams do not follow each other, or are of sorts that are
/// not read; [`Error::Stream`] where they are damaged; [`Error::File`]. No image is made then.
pub fn import(
    options: &ImportOptions,
    facts: Facts,
    progress: Progress<'_>,
) -> Result<ImportSummary> {
    if !rustix::process::geteuid().is_root() {
        let what = "only root mounts the file system that the files of a dump are put into";
        return Err(Error::Unfit(what.into()));
    }
    let streams = options.streams.iter().map(|path| open(path));
    let streams = streams.collect::<Result<Vec<_>>>()?;
    check_order(&streams)?;
    let volume = Volume::make(options, &streams)?;
    let made = volume.fill(streams, progress)?;
    let dumped = crate::dump(
        &DumpOptions {
            images: options.images.clone(),
            volume: volume.path.clone(),
            parent: None,
            verify_unchanged: false,
            max_frozen: Duration::from_secs(1),
            context: IoContext::Shared,
            rate_bytes_per_s: None,
            skip_bad: false,
            compress: options.compress,
            sync: options.sync,
        },
        facts,
        progress,
    )?;
    Ok(ImportSummary {
        image: dumped.image,
        len_bytes: volume.len_bytes,
        folders: made.0,
        files: made.1,
        left_out: made.2,
    })
}

fn open(path: &Path) -> Result<Stream> {
    let from: Box<dyn Read> = match path == Path::new("-") {
        true => Box::new(std::io::stdin()),
        false => Box::new(File::open(path).map_err(Error::file("open", path))?),
    };
    Stream::open(
        Box::new(BufReader::with_capacity(1 << 20, from)),
        path.to_owned(),
    )
}

/// Each has what has changed since the one before.
fn check_order(streams: &[Stream]) -> Result<()> {
    let mut date_s = 0;
    for stream in streams {
        let about = &stream.about;
        if about.since_s != date_s {
            return Err(Error::Unfit(format!(
                "{} is of level {} and has what has changed since {}, which is not the date of \
                 the one before, {date_s} (seconds since 1970)",
                stream.path().display(),
                about.level,
                about.since_s,
            )));
        }
        date_s = about.date_s;
    }
    Ok(())
}

/// A file system in a file without a name.
struct Volume {
    file: File,
    /// By which it can be opened all the same.
    path: PathBuf,
    len_bytes: u64,
}

impl Volume {
    fn make(options: &ImportOptions, streams: &[Stream]) -> Result<Self> {
        let inodes = streams.iter().map(Stream::files).sum::<u64>() + OWN_INODES;
        let len_bytes = match options.size_bytes {
            Some(bytes) => bytes,
            None => len_of(&options.streams)? * 9 / 8 + inodes * FILE_BYTES + ROOM_BYTES,
        };
        let len_bytes = len_bytes.next_multiple_of(4096);
        let folder = options.images.directory().and_then(Path::parent);
        let folder = folder.map_or_else(std::env::temp_dir, |folder| match folder {
            none if none == Path::new("") => PathBuf::from("."),
            folder => folder.to_owned(),
        });
        let file = tempfile::tempfile_in(&folder);
        let file = file.map_err(Error::file("make a file in", &folder))?;
        let sized = file.set_len(len_bytes);
        sized.map_err(Error::file("make room in", &folder))?;
        let (pid, fd) = (std::process::id(), file.as_raw_fd());
        let path = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
        let program = "mkfs.ext4";
        let mut command = Command::new(program);
        command.args([
            "-q",
            "-F",
            "-b",
            "4096",
            "-E",
            "nodiscard",
            "-N",
            &inodes.to_string(),
        ]);
        let told = command.arg(&path).output();
        let told = told.map_err(Error::file("run", program))?;
        match told.status.success() {
            true => Ok(Self {
                file,
                path,
                len_bytes,
            }),
            false => Err(Error::Unfit(format!(
                "{program} makes no file system of {len_bytes} bytes: {}",
                String::from_utf8_lossy(&told.stderr).trim()
            ))),
        }
    }

    /// Puts the files of streams into it.
    fn fill(
        &self,
        streams: Vec<Stream>,
        progress: Progress<'_>,
    ) -> Result<(u64, u64, Vec<Omission>)> {
        let attached = attach_loop(self.file.as_fd(), Access::Write);
        let (_device, device) = attached.map_err(Error::file("attach", &self.path))?;
        let mount = || {
            let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_set_string(fs.as_fd(), "source", device.as_path())?;
            // Nobody has a use for it after a crash.
            fsconfig_set_flag(fs.as_fd(), "nobarrier")?;
            fsconfig_create(fs.as_fd())?;
            let nobody = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
            let quiet = MountAttrFlags::MOUNT_ATTR_NOATIME;
            fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, nobody | quiet)
        };
        let root = mount().map_err(Error::file::<rustix::io::Errno>("mount", &device))?;
        let mut made = TreeBuilder::new(root.as_fd())?;
        for stream in streams {
            made.add(stream, progress)?;
        }
        made.finish()
    }
}

/// How long files with streams are together.
fn len_of(streams: &[PathBuf]) -> Result<u64> {
    let lens = streams.iter().map(|path| {
        let facts = std::fs::metadata(path)
            .ok()
            .filter(std::fs::Metadata::is_file);
        let len = facts.map(|facts| facts.len());
        len.ok_or_else(|| {
            let name = path.display();
            Error::Unfit(format!("{name} is no file, and has no length: say --size"))
        })
    });
    lens.sum()
}
