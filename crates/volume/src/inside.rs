//! Files that are written to while a volume is frozen must not be in that volume: a writer would
//! wait for the end of the freeze, and an image would grow by its own pages.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, Timespec, Timestamps, futimens, major, makedev, minor};

use crate::device::Volume;
use crate::dump::open;
use crate::{Error, Result};

/// The most devices that a file system may have below it, one below the other.
const DEPTH_MAX: u32 = 16;
/// How large a file without contents is made, at the most: in bytes, less than a file of ext2 with
/// blocks of 1 KiB may have.
const SIZE_MAX_BYTES: u64 = 1 << 30;

/// Refuses a file or folder, which need not be there yet, in the very file system that is to be
/// frozen: by itself, on a device whose bytes are in it, or in an overlay whose upper directory is.
pub(crate) fn refuse_inside(name: &Path, volume: &Volume, mount: &File, path: &Path) -> Result<()> {
    let (existing, facts) = existing(path)?;
    let own = mount.metadata().map_err(Error::file("look at", name))?;
    let refused = |how: &str| {
        Err(Error::Unfit(format!(
            "{} is in the volume that is to be saved{how}, which is frozen meanwhile",
            path.display()
        )))
    };
    if facts.dev() == own.dev() {
        return refused("");
    }
    if stands_on(facts.dev(), own.dev(), DEPTH_MAX) {
        return refused(", by a device whose bytes are in a file there");
    }
    // Such a file system has no device of its own: another one may be below it.
    if major(facts.dev()) == 0 && is_written_through(volume, &existing) {
        return refused(", by a file system that is over it");
    }
    Ok(())
}

/// The folder that has `path`, or would have it.
fn existing(path: &Path) -> Result<(PathBuf, std::fs::Metadata)> {
    let mut existing = path;
    loop {
        match std::fs::metadata(existing) {
            Ok(facts) if facts.is_dir() => return Ok((existing.to_owned(), facts)),
            Ok(facts) => {
                let folder = existing
                    .parent()
                    .filter(|above| !above.as_os_str().is_empty());
                return Ok((folder.unwrap_or(".".as_ref()).to_owned(), facts));
            }
            Err(error) => match existing.parent() {
                Some(above) if above.as_os_str().is_empty() => existing = ".".as_ref(),
                Some(above) => existing = above,
                None => return Err(Error::file("look at", existing)(error)),
            },
        }
    }
}

/// True if the bytes of a device are on another one: in a file there that is attached as a loop
/// device, or as those of a device that is mapped to others.
fn stands_on(device: u64, other: u64, depth: u32) -> bool {
    if device == other || depth == 0 {
        return device == other;
    }
    let place = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let place = Path::new(&place);
    // A partition has what its disk has.
    let backing = ["loop/backing_file", "../loop/backing_file"];
    let mut below = backing
        .iter()
        .filter_map(|name| std::fs::read_to_string(place.join(name)).ok())
        .filter_map(|file| std::fs::metadata(file.trim_end_matches('\n')).ok())
        .map(|facts| facts.dev())
        .collect::<Vec<_>>();
    let slaves = std::fs::read_dir(place.join("slaves"));
    for slave in slaves.into_iter().flatten().flatten() {
        let told = std::fs::read_to_string(slave.path().join("dev"));
        below.extend(told.ok().and_then(|told| {
            let (major, minor) = told.trim().split_once(':')?;
            Some(makedev(major.parse().ok()?, minor.parse().ok()?))
        }));
    }
    { below }
        .into_iter()
        .any(|below| stands_on(below, other, depth - 1))
}

/// True if a file that is made in a folder is one of the volume: its inode there, by the number
/// that the folder's file system tells, has the size and time that the file was just given.
fn is_written_through(volume: &Volume, folder: &Path) -> bool {
    let Ok(probe) = Probe::new(folder) else {
        // Then nothing is written there either.
        return false;
    };
    let (random, Ok(fs)) = (RandomState::new().hash_one(folder), open(volume)) else {
        return false;
    };
    let size_bytes = 1 + random % SIZE_MAX_BYTES;
    let s = (random >> 32) as i64 & i64::from(u32::MAX >> 2);
    let time = Timespec {
        tv_sec: s,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    let give = || {
        probe.file.set_len(size_bytes)?;
        futimens(&probe.file, &times)?;
        // With the option `lazytime`, a time alone stays in memory.
        probe
            .file
            .set_permissions(PermissionsExt::from_mode(0o400))?;
        probe.file.metadata()
    };
    let Ok(facts) = give() else {
        return false;
    };
    let inode = u32::try_from(facts.ino()).ok();
    let inode = inode.and_then(|number| fs.inode(number, 0).ok());
    inode.is_some_and(|inode| inode.size_bytes() == size_bytes && inode.modified().s == s)
}

/// A file that is made to see where it is; removed when this is dropped.
struct Probe {
    file: File,
    path: Option<PathBuf>,
}

impl Probe {
    fn new(folder: &Path) -> std::io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).mode(0o600);
        let nameless = OFlags::TMPFILE.bits().cast_signed();
        if let Ok(file) = options.clone().custom_flags(nameless).open(folder) {
            return Ok(Self { file, path: None });
        }
        let path = folder.join(format!(".stillframe-{}", std::process::id()));
        let file = options.create_new(true).open(&path)?;
        Ok(Self {
            file,
            path: Some(path),
        })
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_stands_on_itself_and_not_on_one_that_is_not_there() {
        let device = |minor| makedev(4095, minor);
        assert!(stands_on(device(1), device(1), 0));
        assert!(!stands_on(device(1), device(2), DEPTH_MAX));
    }

    #[test]
    fn the_folder_of_a_file_or_of_what_is_not_there_is_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("log"), "").unwrap();
        for name in ["log", "none", "none/at/all"] {
            let found = existing(&folder.path().join(name)).unwrap().0;
            assert_eq!(found, folder.path(), "{name}");
        }
    }

    #[test]
    fn a_probe_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        drop(Probe::new(folder.path()).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
