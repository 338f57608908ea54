//! A volume that comes back with what uses it: written to a device, and mounted where it was.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use guard::{Mount, UndoList};
use rustix::fs::{CWD, makedev};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use sys::mountinfo;

use crate::device::is_mount_point;
use crate::dump::Progress;
use crate::mount::{id_of, watch};
use crate::place::OpenImage;
use crate::restore::{RestoreOptions, RestoreSummary, restore};
use crate::{Error, Result};

/// Options of a mount, by their names in /proc/self/mountinfo.
const ATTRIBUTES: [(&str, MountAttrFlags); 8] = [
    ("ro", MountAttrFlags::MOUNT_ATTR_RDONLY),
    ("nosuid", MountAttrFlags::MOUNT_ATTR_NOSUID),
    ("nodev", MountAttrFlags::MOUNT_ATTR_NODEV),
    ("noexec", MountAttrFlags::MOUNT_ATTR_NOEXEC),
    ("noatime", MountAttrFlags::MOUNT_ATTR_NOATIME),
    ("nodiratime", MountAttrFlags::MOUNT_ATTR_NODIRATIME),
    ("nosymfollow", MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW),
    // The usual one, which is none of the others.
    ("relatime", MountAttrFlags::MOUNT_ATTR_RELATIME),
];

/// A volume that was written and mounted; unmounted when this is dropped, and when the process
/// dies, unless it is to stay.
#[derive(Debug)]
pub struct AttachedVolume {
    mount: Mount,
    /// Unmounts it if we die.
    undo: Option<UndoList>,
    stays: bool,
    /// Summary of the restore.
    pub restored: RestoreSummary,
    /// The numbers of the device that it was mounted from before, and of the one that it is on
    /// now, where those are others.
    pub moved: Option<[u64; 2]>,
}

/// Writes the volume of an image to a device, and mounts that where the volume was mounted.
///
/// # Errors
/// [`Error::Unfit`] where that directory is not there or something is mounted on it, and those of
/// [`restore()`]. Nothing is mounted then; the device may have been written to.
pub fn attach(options: &RestoreOptions, progress: Progress<'_>) -> Result<AttachedVolume> {
    let opened = OpenImage::open(&options.images)?;
    let target = &options.target;
    let Some(at) = &opened.state.mount else {
        let what = "the image does not tell where its volume was mounted; restore it with volume \
                    restore, mount it, and then restore what uses it";
        return Err(Error::Unfit(what.into()));
    };
    let point = at.point.display();
    let facts = std::fs::metadata(&at.point).map_err(Error::file("look at", &at.point))?;
    if !facts.is_dir() {
        return Err(Error::Unfit(format!("{point} is not a directory")));
    }
    if is_mount_point(&at.point)? {
        let what = format!("something is mounted on {point}, where the volume of the image was");
        return Err(Error::Unfit(what));
    }
    if !crate::restore::is_device(target) {
        return Err(Error::Unfit(format!(
            "{} is not a block device, which can be mounted on {point}",
            target.display()
        )));
    }
    let restored = restore(options, progress)?;
    let mount = mounted(target, at)?;
    let failed = || Error::file("mount on", &at.point);
    let id = id_of(&mount).map_err(failed())?;
    let place = Mount {
        point: at.point.clone(),
        id,
    };
    let undo = watch(&place)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&mount, "", CWD, &at.point, flags).map_err(failed())?;
    log::info!("{} is mounted on {point}", target.display());
    Ok(AttachedVolume {
        mount: place,
        undo: Some(undo),
        stays: false,
        restored,
        moved: moved(at, target)?,
    })
}

impl AttachedVolume {
    /// Where it is mounted.
    #[must_use]
    pub const fn mount(&self) -> &Mount {
        &self.mount
    }

    /// From now on it stays mounted if the process dies: somebody else may use it.
    pub fn outlive(&mut self) {
        // Where the helper was killed, nothing is undone either.
        self.undo.take().map(UndoList::dismiss);
    }

    /// Leaves it mounted; gives where that is.
    #[must_use]
    pub fn keep(mut self) -> PathBuf {
        self.outlive();
        self.stays = true;
        self.mount.point.clone()
    }
}

impl Drop for AttachedVolume {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        if let Err(error) = self.mount.unmount() {
            let point = self.mount.point.display();
            log::warn!("{point} is unmounted lazily: {error}");
        }
    }
}

/// The numbers of the device of before and of this one, unless they are the same or not known.
fn moved(at: &mountinfo::Mount, device: &Path) -> Result<Option<[u64; 2]>> {
    let now = std::fs::metadata(device).map_err(Error::file("look at", device))?;
    let (before, now) = (makedev(at.device.0, at.device.1), now.rdev());
    Ok((before != 0 && before != now).then_some([before, now]))
}

/// Mounts the file system on a device as it was, nowhere yet.
fn mounted(device: &Path, at: &mountinfo::Mount) -> Result<OwnedFd> {
    let make = || {
        let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(fs.as_fd(), "source", device)?;
        for option in at.fs_options.split(',').filter(|option| *option != "rw") {
            match option.split_once('=') {
                Some((key, value)) => fsconfig_set_string(fs.as_fd(), key, value)?,
                None => fsconfig_set_flag(fs.as_fd(), option)?,
            }
        }
        fsconfig_create(fs.as_fd())?;
        fsmount(
            fs.as_fd(),
            FsMountFlags::FSMOUNT_CLOEXEC,
            attributes(&at.options),
        )
    };
    make().map_err(Error::file::<Errno>("mount", device))
}

fn attributes(options: &str) -> MountAttrFlags {
    let known = ATTRIBUTES.iter();
    let given = known.filter(|(name, _)| options.split(',').any(|option| option == *name));
    let given = given.map(|(_, flag)| *flag).collect::<MountAttrFlags>();
    let tells = |name: &str| options.split(',').any(|option| option == name);
    // Where none is named, every access changes the time.
    match tells("relatime") || tells("noatime") {
        true => given,
        false => given | MountAttrFlags::MOUNT_ATTR_STRICTATIME,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_mount_are_attributes() {
        let of = |options| attributes(options);
        assert_eq!(of("rw,relatime"), MountAttrFlags::MOUNT_ATTR_RELATIME);
        assert_eq!(
            of("ro,nosuid,noatime"),
            MountAttrFlags::MOUNT_ATTR_RDONLY
                | MountAttrFlags::MOUNT_ATTR_NOSUID
                | MountAttrFlags::MOUNT_ATTR_NOATIME
        );
        assert_eq!(of("rw"), MountAttrFlags::MOUNT_ATTR_STRICTATIME);
    }
}
