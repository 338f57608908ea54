//! The ways to save a volume.

use std::path::Path;
use std::process::Command;

use image::{PAGE_BYTES, Reader, SpaceId};
use store::Directory;

use super::place::{Device, MountedDevice};
use super::raw::Ranges;
use super::{Setting, kernel_error};
use crate::error::{Result, image_error};
use crate::tool::timed;

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The blocks in use are read, and nothing is done with them.
    Raw,
    Shared,
    Separate,
    /// dump(8) with so many KiB a record.
    Dump(u32),
    /// The same, and nothing is written.
    DumpToNothing,
    E2image,
    Partclone,
    Tar,
    Restic,
}

impl Method {
    /// In the order of their turns.
    pub const ALL: [Self; 10] = [
        Self::Raw,
        Self::Shared,
        Self::Separate,
        Self::Dump(1000),
        Self::DumpToNothing,
        Self::Dump(10),
        Self::E2image,
        Self::Partclone,
        Self::Tar,
        Self::Restic,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw device, blocks in use",
            Self::Shared => "stillframe",
            Self::Separate => "stillframe --io-context separate",
            Self::Dump(1000) => "dump -b 1000",
            Self::Dump(_) => "dump -b 10",
            Self::DumpToNothing => "dump -b 1000 to /dev/null",
            Self::E2image => "e2image -ra",
            Self::Partclone => "partclone",
            Self::Tar => "tar",
            Self::Restic => "restic",
        }
    }

    /// Tells whether it takes so little that it is measured in each place.
    pub const fn is_fast(self) -> bool {
        !matches!(
            self,
            Self::Dump(10) | Self::E2image | Self::Partclone | Self::Tar | Self::Restic
        )
    }

    /// Tells whether it reads files instead of the device.
    pub const fn needs_mount(self) -> bool {
        matches!(self, Self::Tar | Self::Restic)
    }

    /// The command, which makes what it makes in the folder `made`; none for what the bench does by
    /// itself.
    ///
    /// # Errors
    /// When what it needs cannot be made.
    pub fn command(
        self,
        setting: &Setting,
        device: &Device,
        mounted: Option<&MountedDevice>,
        made: &Path,
    ) -> Result<Option<Command>> {
        let start = |program: &str, words: &[&str]| {
            let mut command = Command::new(program);
            command.args(words);
            command
        };
        let ours = |context: &str| {
            let mut command = Command::new(&setting.stillframe);
            command.args(["volume", "dump", "--no-sync", "--io-context", context, "-D"]);
            command.arg(made.join("image")).arg(device.path());
            command
        };
        let files = mounted.map_or(Path::new(""), MountedDevice::path);
        let mut command = match self {
            Self::Raw => return Ok(None),
            Self::Shared => ours("shared"),
            Self::Separate => ours("separate"),
            Self::Dump(kib) => {
                let mut command = start("dump", &["-0", "-q", "-b", &kib.to_string(), "-f"]);
                command.arg(made.join("dump")).arg(device.path());
                command
            }
            Self::DumpToNothing => {
                let mut command = start("dump", &["-0", "-q", "-b", "1000", "-f", "/dev/null"]);
                command.arg(device.path());
                command
            }
            Self::E2image => {
                let mut command = start("e2image", &["-ra"]);
                command.arg(device.path()).arg(made.join("e2image"));
                command
            }
            Self::Partclone => {
                let mut command = start("partclone.ext4", &["-c", "-q", "-s"]);
                command
                    .arg(device.path())
                    .arg("-o")
                    .arg(made.join("partclone"));
                command
                    .arg("-L")
                    .arg(setting.disk.path().join("partclone.log"));
                command
            }
            Self::Tar => {
                let mut command = start("tar", &["-c", "-f"]);
                command.arg(made.join("tar")).arg("-C").arg(files).arg(".");
                command
            }
            Self::Restic => {
                let mut init = restic(made);
                timed(init.arg("init"), &setting.said())?;
                let mut command = restic(made);
                command.arg("backup").arg(files);
                command
            }
        };
        command.current_dir("/");
        Ok(Some(command))
    }
}

/// restic with a repository in a folder.
pub fn restic(made: &Path) -> Command {
    let mut command = Command::new("restic");
    command
        .args(["--no-cache", "-q", "-r"])
        .arg(made.join("restic"));
    command.env("RESTIC_PASSWORD", "bench");
    command
}

/// The bytes of the volume that are in use and not zero, as an image of it has them.
///
/// # Errors
/// When it cannot be made or read.
pub fn used(setting: &Setting, file: &Path) -> Result<Ranges> {
    let made = setting.fresh()?;
    let device = Device::attach(file)?;
    let dump = Method::Shared.command(setting, &device, None, &made)?;
    timed(&mut dump.expect("it has one"), &setting.said())?;
    let store = Directory::open(made.join("image")).map_err(image_error("open the image"))?;
    let reader = Reader::open(&store).map_err(image_error("open the image"))?;
    let space = SpaceId(1);
    let pages = device.len_bytes()?.div_ceil(PAGE_BYTES as u64);
    let mut ranges = Ranges::new();
    for known in reader.described(space, 0, pages) {
        let mut page = known.start;
        while page < known.end {
            let located = reader.locate(space, page, known.end - page);
            let located = located.map_err(image_error("look into the image"))?;
            let next = page + u64::from(located.pages);
            let bytes = page * PAGE_BYTES as u64..next * PAGE_BYTES as u64;
            match ranges.last_mut() {
                _ if located.part.is_none() => {}
                Some(last) if last.end == bytes.start => last.end = bytes.end,
                _ => ranges.push(bytes),
            }
            page = next;
        }
    }
    std::fs::remove_dir_all(&made).map_err(kernel_error("remove an image"))?;
    Ok(ranges)
}
