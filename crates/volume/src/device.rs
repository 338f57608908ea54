//! What is dumped: a device, a file, or where one is mounted.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, major, minor};
use rustix::io::Errno;
use sys::mountinfo::{self, Mount};

use crate::{Error, Result};

/// A volume that is open for reading.
#[derive(Debug)]
pub struct Volume {
    /// The device or file.
    pub path: PathBuf,
    /// Open through the kernel's cache.
    pub cached: File,
    /// Open past the cache, where that is possible.
    pub direct: File,
    /// How long it is.
    pub len_bytes: u64,
    /// Its mount, and that directory.
    pub mounted: Option<(Mount, File)>,
    /// The directory of it that is seen there, where that is not all of it.
    pub part: Option<PathBuf>,
}

fn check_kind(mount: &Mount) -> Result<()> {
    if ["ext2", "ext3", "ext4"].contains(&mount.kind.as_str()) {
        return Ok(());
    }
    let (point, kind) = (mount.point.display(), &mount.kind);
    Err(Error::Unfit(format!(
        "{point} is of the type {kind}, not ext4"
    )))
}

impl Volume {
    /// Opens the volume that `path` is, or that is mounted there.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Unfit`] where it is in use in a way that it cannot be frozen in.
    pub fn open(path: &Path) -> Result<Self> {
        let facts = std::fs::metadata(path).map_err(Error::file("look at", path))?;
        if facts.is_dir() {
            return Self::open_mounted(path);
        }
        if facts.file_type().is_block_device() {
            let device = (major(facts.rdev()), minor(facts.rdev()));
            let mounts = mounts()?;
            let here = |mount: &&Mount| mount.device == device && mount.root == b"/";
            return match mounts.iter().find(here) {
                Some(mount) => Self::of_mount(path.to_owned(), mount),
                None => Self::open_alone(path, true),
            };
        }
        if !facts.is_file() {
            let name = path.display();
            return Err(Error::Unfit(format!(
                "{name} is no device, file or directory"
            )));
        }
        refuse_attached(path)?;
        Self::open_alone(path, false)
    }

    /// Opens one that nobody has mounted.
    fn open_alone(path: &Path, is_device: bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true);
        if is_device {
            // As long as it is open so, nobody can mount it.
            options.custom_flags(OFlags::EXCL.bits().cast_signed());
        }
        let cached = match options.open(path) {
            Err(error) if is_device && error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                return Err(Error::Unfit(format!(
                    "{} is in use: mounted elsewhere, or part of another device",
                    path.display()
                )));
            }
            other => other.map_err(Error::file("open", path))?,
        };
        Self::new(path.to_owned(), cached, None)
    }

    fn open_mounted(path: &Path) -> Result<Self> {
        let point = path.canonicalize().map_err(Error::file("look at", path))?;
        let mounts = mounts()?;
        // The last one covers those before.
        let mount = mounts.iter().rfind(|mount| mount.point == point);
        let mount = mount
            .ok_or_else(|| Error::Unfit(format!("nothing is mounted on {}", point.display())))?;
        // Others may have no device.
        check_kind(mount)?;
        let (major, minor) = mount.device;
        let link = format!("/sys/dev/block/{major}:{minor}/uevent");
        let facts = std::fs::read_to_string(&link).map_err(Error::file("look at", link))?;
        let name = facts.lines().find_map(|line| line.strip_prefix("DEVNAME="));
        let name = name.ok_or_else(|| Error::Unfit("the device has no name".into()))?;
        Self::of_mount(Path::new("/dev").join(name), mount)
    }

    fn of_mount(path: PathBuf, mount: &Mount) -> Result<Self> {
        check_kind(mount)?;
        let point = File::open(&mount.point).map_err(Error::file("open", &mount.point))?;
        let cached = File::open(&path).map_err(Error::file("open", &path))?;
        let part = (mount.root != b"/").then(|| OsString::from_vec(mount.root.clone()).into());
        Ok(Self {
            part,
            ..Self::new(path, cached, Some((mount.clone(), point)))?
        })
    }

    fn new(path: PathBuf, mut cached: File, mounted: Option<(Mount, File)>) -> Result<Self> {
        let len_bytes = cached.seek(SeekFrom::End(0));
        let len_bytes = len_bytes.map_err(Error::file("look at", &path))?;
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(OFlags::DIRECT.bits().cast_signed());
        let direct = match options.open(&path) {
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                cached.try_clone()
            }
            other => other,
        };
        let direct = direct.map_err(Error::file("open", &path))?;
        Ok(Self {
            path,
            cached,
            direct,
            len_bytes,
            mounted,
            part: None,
        })
    }
}

/// Refuses a file that a loop device has: what is in it may be on its way.
pub fn refuse_attached(path: &Path) -> Result<()> {
    let facts = std::fs::metadata(path).map_err(Error::file("look at", path))?;
    let Ok(devices) = std::fs::read_dir("/sys/block") else {
        return Ok(());
    };
    for device in devices.flatten() {
        let Ok(backing) = std::fs::read(device.path().join("loop/backing_file")) else {
            continue;
        };
        let backing = PathBuf::from(OsString::from_vec(backing.trim_ascii_end().to_vec()));
        let same = std::fs::metadata(backing);
        if same.is_ok_and(|same| (same.dev(), same.ino()) == (facts.dev(), facts.ino())) {
            return Err(Error::Unfit(format!(
                "{} is attached to /dev/{}: name that instead",
                path.display(),
                device.file_name().display()
            )));
        }
    }
    Ok(())
}

/// Tells whether something is mounted on the directory `point`.
pub fn is_mount_point(point: &Path) -> Result<bool> {
    Ok(mounts()?.iter().any(|mount| mount.point == point))
}

/// Tells whether this device is mounted somewhere here.
pub(crate) fn is_mounted(device: &Path) -> bool {
    let Ok(facts) = std::fs::metadata(device) else {
        return false;
    };
    let numbers = (major(facts.rdev()), minor(facts.rdev()));
    mounts().is_ok_and(|all| all.iter().any(|mount| mount.device == numbers))
}

/// Lists the mounts of this mount namespace.
fn mounts() -> Result<Vec<Mount>> {
    mountinfo::read().map_err(Error::file("read", mountinfo::PATH))
}
