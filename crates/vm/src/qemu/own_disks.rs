//! Disks of machines that are started of an image that has them.
//!
//! The image's files become files in a folder, once for all machines and later restores; each
//! machine has an overlay of its own over them, to which it writes.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use abi::{Addr, PAGE_BYTES};
use guard::UndoList;
use image::{Reader, SpaceId};
use pages::{Extent, sink};
use rustix::fs::{Timespec, Timestamps};
use sys::launch::User;
use sys::new_file::NewFile;

use super::disk_words::AssignedDisk;
use super::disks::written_ns;
use super::qcow2::{self, BackingFile};
use super::record::{QemuDisk, QemuDiskFile, QemuMachine};
use super::user;
use crate::{Error, Result};

/// The disks of an image, in a folder in which machines have their own.
#[derive(Debug)]
pub(crate) struct OwnDisks {
    folder: PathBuf,
    all: Vec<OwnDisk>,
    /// Their owner, where that is not this process's user.
    user: Option<User>,
}

#[derive(Debug)]
struct OwnDisk {
    name: String,
    /// The file that has what the image has.
    base: PathBuf,
    format: String,
    virtual_bytes: u64,
    is_written: bool,
    /// Files of the saved machine.
    formers: Vec<PathBuf>,
}

/// The disks of one machine; dropped, those that were made for it are removed.
#[derive(Debug, Default)]
pub(crate) struct MachineDisks {
    /// Disks that the machine gets.
    pub given: Vec<AssignedDisk>,
    /// Files that were made for them.
    pub made: Vec<PathBuf>,
}

impl Drop for MachineDisks {
    fn drop(&mut self) {
        for path in &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

impl OwnDisks {
    /// Sees to it that a folder has the image's disks.
    ///
    /// # Errors
    /// [`Error::Unfit`] for an image without disks, or a file in the folder that was written to;
    /// those of [`pages::fill`]; [`Error::File`].
    pub fn prepare(
        folder: &Path,
        reader: &Reader,
        machine: &QemuMachine,
        user: Option<&User>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self> {
        if !machine.has_disks() {
            return Err(Error::Unfit(
                "the image has no disks (vm save --with-disks)".to_owned(),
            ));
        }
        let mut all = Vec::new();
        for disk in machine.disks.iter().filter(|disk| !disk.files.is_empty()) {
            // What a file is over is there before it.
            for (at, file) in disk.files.iter().enumerate().rev() {
                let below = disk.files.get(at + 1);
                let below = below.map(|below| (name_of(reader, below), below.format.as_str()));
                let path = prepare(folder, reader, file, below, progress)?;
                let made = File::open(&path).map_err(Error::file("open", &path))?;
                user::give(&made, &path, user)?;
            }
            all.push(own_disk(folder, reader, disk));
        }
        Ok(Self {
            folder: folder.to_owned(),
            all,
            user: user.cloned(),
        })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes the disks of a machine of this name, which go if this
    /// process dies.
    ///
    /// # Errors
    /// [`Error::Unfit`] where there is such a disk already; [`Error::File`].
    pub fn make(&self, name: &str, undo: &UndoList) -> Result<MachineDisks> {
        let mut own = MachineDisks::default();
        for (disk, number) in self.all.iter().zip(1..) {
            if !disk.is_written {
                own.given.push(disk.given(disk.base.clone(), &disk.format));
                continue;
            }
            let path = self.folder.join(format!("{name}-{number}.qcow2"));
            let mut new = NewFile::create(&path, 0o600).map_err(taken(&path))?;
            let backing = BackingFile {
                path: &disk.base,
                format: &disk.format,
            };
            let written = qcow2::write_overlay(&new.file, disk.virtual_bytes, backing);
            written.map_err(Error::file("write", &path))?;
            user::give(&new.file, &path, self.user.as_ref())?;
            undo.add_file(new.file.as_fd(), &path)
                .map_err(Error::untold)?;
            new.name().map_err(taken(&path))?;
            own.made.push(path.clone());
            own.given.push(disk.given(path, "qcow2"));
        }
        Ok(own)
    }
}

impl OwnDisk {
    fn given(&self, path: PathBuf, format: &str) -> AssignedDisk {
        AssignedDisk {
            disk: self.name.clone(),
            path,
            format: format.to_owned(),
            formers: self.formers.clone(),
        }
    }
}

fn own_disk(folder: &Path, reader: &Reader, disk: &QemuDisk) -> OwnDisk {
    OwnDisk {
        name: disk.name.clone(),
        base: folder.join(name_of(reader, &disk.files[0])),
        format: disk.files[0].format.clone(),
        virtual_bytes: disk.virtual_bytes,
        is_written: disk.is_written,
        formers: disk.files.iter().map(|file| (&file.path).into()).collect(),
    }
}

/// Why a disk cannot be made at a place.
fn taken(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    move |error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Error::Unfit(format!(
            "{} is there: the disk of an earlier machine of this name is not written over; remove \
             it, or give --name",
            path.display()
        )),
        _ => Error::file("create", path)(error),
    }
}

/// Returns the name of an image's file in a folder.
fn name_of(reader: &Reader, file: &QemuDiskFile) -> String {
    format!("{}-{}.{}", reader.id(), file.space, file.format)
}

/// Makes a file as the image has it, unless it is there; gives where it is. `below`: what the file
/// is to be over, and its format.
fn prepare(
    folder: &Path,
    reader: &Reader,
    file: &QemuDiskFile,
    below: Option<(String, &str)>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PathBuf> {
    let path = folder.join(name_of(reader, file));
    match fs::metadata(&path) {
        Ok(facts) if (facts.len(), written_ns(&facts)) == (file.bytes, file.written_ns) => {
            return Ok(path);
        }
        Ok(_) => {
            return Err(Error::Unfit(format!(
                "{} was written to since it was made of the image: remove it, and the disks of \
                 machines over it",
                path.display()
            )));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::file("look at", &path)(error)),
    }
    let failed = |source: std::io::Error| Error::file("make the disk", &path)(source);
    // One that has its name is whole, whatever happens.
    let mut new = NewFile::nameless(&path, 0o400).map_err(failed)?;
    let made = &new.file;
    fill(reader, file, made, progress)?;
    if let Some((below, format)) = below {
        let backing = BackingFile {
            path: Path::new(&below),
            format,
        };
        qcow2::set_backing(made, backing).map_err(failed)?;
    }
    // As the image has it, which the last page does not tell.
    made.set_len(file.bytes).map_err(failed)?;
    let time = Timespec {
        tv_sec: file.written_ns.div_euclid(1_000_000_000),
        tv_nsec: file.written_ns.rem_euclid(1_000_000_000),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::futimens(made, &times).map_err(|errno| failed(errno.into()))?;
    made.sync_all().map_err(failed)?;
    match new.name() {
        // Somebody else has made it meanwhile.
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => Ok(path),
    }
}

fn fill(
    reader: &Reader,
    file: &QemuDiskFile,
    made: &File,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<()> {
    let space = SpaceId(file.space);
    let whole = Extent {
        space,
        first_page: 0,
        at: Addr(0),
        pages: reader.space(space).expect("it was checked").len_pages,
    };
    let placed = pages::place(reader, &[whole])?;
    let pages = placed.iter().map(|piece| u64::from(piece.pages));
    let total = pages.sum::<u64>() * PAGE_BYTES;
    let again = made
        .try_clone()
        .map_err(Error::kernel("cannot duplicate a descriptor"))?;
    let sink = sink::Object::new(again.into());
    pages::fill(reader, &placed, &sink, &|done| progress(done, total))?;
    Ok(())
}
