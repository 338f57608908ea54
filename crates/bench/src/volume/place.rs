//! Where the volume is: a file that is filled, attached as a device, and mounted.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Setting, kernel_error};
use crate::error::{Error, Result, file_error};
use crate::tool::{name, timed};

/// Where the volume has its bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    Disk,
    Memory,
}

impl Medium {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Memory => "tmpfs",
        }
    }

    /// The volume's file there.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn copy(self, setting: &Setting, file: &Path) -> Result<PathBuf> {
        if self == Self::Disk {
            return Ok(file.to_owned());
        }
        let copy = setting.memory.path().join("volume");
        let mut command = Command::new("cp");
        command.arg("--sparse=always").arg(file).arg(&copy);
        timed(&mut command, &setting.said())?;
        Ok(copy)
    }

    /// Removes what [`Medium::copy`] made.
    pub fn remove(self, copy: &Path) {
        if self == Self::Memory {
            let _ = fs::remove_file(copy);
        }
    }
}

/// Makes the volume and fills it with so much of /usr; gives how many files it has.
///
/// # Errors
/// When that fails.
pub fn fill(setting: &Setting, file: &Path, mib: u64) -> Result<u64> {
    make_sparse_of(file, (mib * 2) << 20)?;
    let mut make = Command::new("mkfs.ext4");
    timed(
        make.args(["-q", "-F", "-b", "4096"]).arg(file),
        &setting.said(),
    )?;
    let device = Device::attach(file)?;
    let mounted = device.mount(setting, "noatime")?;
    let (mut files, mut left) = (0, mib << 20);
    copy_tree(Path::new("/usr"), mounted.path(), &mut files, &mut left)?;
    Ok(files)
}

/// Copies directories, links and files until there is enough.
fn copy_tree(from: &Path, to: &Path, files: &mut u64, left: &mut u64) -> Result<()> {
    let mut entries = fs::read_dir(from)
        .map_err(file_error("list", from))?
        .filter_map(std::result::Result::ok)
        .collect::<Vec<_>>();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, new) = (entry.path(), to.join(entry.file_name()));
        let facts = entry.metadata().map_err(file_error("look at", &path))?;
        if *left == 0 {
            return Ok(());
        }
        if facts.is_dir() {
            fs::create_dir(&new).map_err(file_error("make", &new))?;
            copy_tree(&path, &new, files, left)?;
        } else if facts.is_symlink() {
            let target = fs::read_link(&path).map_err(file_error("read", &path))?;
            let linked = std::os::unix::fs::symlink(target, &new);
            linked.map_err(file_error("make", &new))?;
        } else if facts.is_file() && facts.len() <= *left {
            fs::copy(&path, &new).map_err(file_error("copy", &path))?;
            *left -= facts.len().next_multiple_of(4096).min(*left);
            *files += 1;
        }
    }
    Ok(())
}

/// A file as long as another one, without a byte in it.
///
/// # Errors
/// When it cannot be made.
pub fn make_sparse(path: &Path, like: &Path) -> Result<()> {
    let facts = fs::metadata(like).map_err(file_error("look at", like))?;
    make_sparse_of(path, facts.len())
}

fn make_sparse_of(path: &Path, len_bytes: u64) -> Result<()> {
    let file = File::create(path).map_err(file_error("make", path))?;
    file.set_len(len_bytes).map_err(file_error("make", path))
}

/// Has the kernel forget what it has read.
///
/// # Errors
/// When it does not.
pub fn forget() -> Result<()> {
    rustix::fs::sync();
    let path = Path::new("/proc/sys/vm/drop_caches");
    fs::write(path, "3").map_err(file_error("write to", path))
}

/// How much the files in a folder take.
///
/// # Errors
/// When they cannot be listed.
pub fn bytes_in(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(file_error("list", folder))? {
        let path = entry.map_err(file_error("list", folder))?.path();
        let facts = fs::symlink_metadata(&path).map_err(file_error("look at", &path))?;
        bytes += match facts.is_dir() {
            true => bytes_in(&path)?,
            false => facts.blocks() * 512,
        };
    }
    Ok(bytes)
}

/// A file as a loop device with direct I/O, until this is dropped.
pub struct Device(PathBuf);

impl Device {
    /// # Errors
    /// When there is none.
    pub fn attach(file: &Path) -> Result<Self> {
        let mut command = Command::new("losetup");
        command
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file);
        let output = command.output().map_err(kernel_error("attach a device"))?;
        if !output.status.success() {
            return Err(Error::Status {
                command: name(&command),
                status: output.status,
                said: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(Self(PathBuf::from(said.trim())))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// # Errors
    /// When it cannot be opened.
    pub fn len_bytes(&self) -> Result<u64> {
        let mut file = File::open(&self.0).map_err(file_error("open", &self.0))?;
        file.seek(SeekFrom::End(0))
            .map_err(file_error("look at", &self.0))
    }

    /// Sets the scheduler of the device.
    ///
    /// # Errors
    /// When this kernel does not have it.
    pub fn schedule(&self, scheduler: &str) -> Result<()> {
        self.set("scheduler", scheduler)
    }

    /// Sets something of the device's queue.
    ///
    /// # Errors
    /// When this kernel does not have it.
    pub fn set(&self, what: &str, value: &str) -> Result<()> {
        let device = self.0.file_name().unwrap_or_default();
        let path = Path::new("/sys/block")
            .join(device)
            .join("queue")
            .join(what);
        fs::write(&path, value).map_err(file_error("write to", &path))
    }

    /// # Errors
    /// When it cannot be mounted.
    pub fn mount(&self, setting: &Setting, options: &str) -> Result<MountedDevice> {
        let point = setting.disk.path().join("mounted");
        fs::create_dir_all(&point).map_err(file_error("make", &point))?;
        let mut command = Command::new("mount");
        command.args(["-o", options]).arg(&self.0).arg(&point);
        timed(&mut command, &setting.said())?;
        Ok(MountedDevice(point))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A mounted device, until this is dropped.
pub struct MountedDevice(PathBuf);

impl MountedDevice {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for MountedDevice {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
