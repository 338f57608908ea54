//! What is dumped: a device, a file, or where one is mounted.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, major, minor};
use rustix::io::Errno;

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
    /// Where it is mounted, and that directory.
    pub mounted: Option<(MountInfo, File)>,
    /// The directory of it that is seen there, where that is not all of it.
    pub part: Option<PathBuf>,
}

/// Where and how a file system is mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountInfo {
    /// The directory.
    pub point: PathBuf,
    /// The numbers of its device, by which programs know its files (`st_dev`); 0 and 0 where that
    /// is not known.
    pub device: (u32, u32),
    /// Options of the mount, as /proc/self/mountinfo has them: `rw,noatime`.
    pub options: String,
    /// Those of the file system: `rw,data=journal`.
    pub fs_options: String,
}

/// A line of /proc/self/mountinfo.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    root: Vec<u8>,
    at: MountInfo,
    kind: String,
}

impl Mount {
    fn check_kind(&self) -> Result<()> {
        if ["ext2", "ext3", "ext4"].contains(&self.kind.as_str()) {
            return Ok(());
        }
        let (point, kind) = (self.at.point.display(), &self.kind);
        Err(Error::Unfit(format!(
            "{point} is of the type {kind}, not ext4"
        )))
    }
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
            let here = |mount: &&Mount| mount.at.device == device && mount.root == b"/";
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
        let mount = mounts.iter().rfind(|mount| mount.at.point == point);
        let mount = mount
            .ok_or_else(|| Error::Unfit(format!("nothing is mounted on {}", point.display())))?;
        // Others may have no device.
        mount.check_kind()?;
        let (major, minor) = mount.at.device;
        let link = format!("/sys/dev/block/{major}:{minor}/uevent");
        let facts = std::fs::read_to_string(&link).map_err(Error::file("look at", link))?;
        let name = facts.lines().find_map(|line| line.strip_prefix("DEVNAME="));
        let name = name.ok_or_else(|| Error::Unfit("the device has no name".into()))?;
        Self::of_mount(Path::new("/dev").join(name), mount)
    }

    fn of_mount(path: PathBuf, mount: &Mount) -> Result<Self> {
        mount.check_kind()?;
        let at = &mount.at;
        let point = File::open(&at.point).map_err(Error::file("open", &at.point))?;
        let cached = File::open(&path).map_err(Error::file("open", &path))?;
        let part = (mount.root != b"/").then(|| OsString::from_vec(mount.root.clone()).into());
        Ok(Self {
            part,
            ..Self::new(path, cached, Some((at.clone(), point)))?
        })
    }

    fn new(path: PathBuf, mut cached: File, mounted: Option<(MountInfo, File)>) -> Result<Self> {
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

/// Whether something is mounted on the directory `point`.
pub fn is_mount_point(point: &Path) -> Result<bool> {
    Ok(mounts()?.iter().any(|mount| mount.at.point == point))
}

/// Whether this device is mounted somewhere here.
pub(crate) fn is_mounted(device: &Path) -> bool {
    let Ok(facts) = std::fs::metadata(device) else {
        return false;
    };
    let numbers = (major(facts.rdev()), minor(facts.rdev()));
    mounts().is_ok_and(|all| all.iter().any(|mount| mount.at.device == numbers))
}

/// What is mounted in this mount namespace.
fn mounts() -> Result<Vec<Mount>> {
    let path = "/proc/self/mountinfo";
    let text = std::fs::read(path).map_err(Error::file("read", path))?;
    Ok(text
        .split(|byte| *byte == b'\n')
        .filter_map(parse)
        .collect())
}

fn parse(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let root = unescape(words.next()?);
    let point = PathBuf::from(OsString::from_vec(unescape(words.next()?)));
    let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
    let options = text(words.next()?);
    let mut words = words.skip_while(|word| *word != b"-");
    let kind = text(words.nth(1)?);
    let fs_options = text(words.nth(1)?);
    Some(Mount {
        root,
        at: MountInfo {
            point,
            device: (major.parse().ok()?, minor.parse().ok()?),
            options,
            fs_options,
        },
        kind,
    })
}

/// Takes `\040` and the like for what they stand for.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let digits = after
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (first, escaped) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read() {
        let line = b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext4 /dev/root rw,errors=c";
        let mount = parse(line).unwrap();
        assert_eq!(
            mount,
            Mount {
                root: b"/mnt1".to_vec(),
                at: MountInfo {
                    point: PathBuf::from("/mnt 2"),
                    device: (98, 0),
                    options: "rw,noatime".to_owned(),
                    fs_options: "rw,errors=c".to_owned(),
                },
                kind: "ext4".to_owned(),
            }
        );
        assert_eq!(parse(b""), None);
        assert!(!mounts().unwrap().is_empty());
    }
}
