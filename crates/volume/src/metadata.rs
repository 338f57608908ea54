//! What files that are made have beside their contents.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags, chmodat, chownat, lsetxattr,
    utimensat,
};

use crate::ext4::{Attribute, Inode, Kind, Time};
use crate::{Error, Result};

/// Owner, mode, attributes and times.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Permissions; none of a symbolic link.
    pub permissions: Option<u32>,
    /// Extended attributes.
    pub attributes: Vec<Attribute>,
    /// When it was last read.
    pub accessed: Time,
    /// When its contents were last changed.
    pub modified: Time,
}

impl Metadata {
    pub fn of(inode: &Inode, attributes: Vec<Attribute>) -> Self {
        Self {
            uid: inode.uid(),
            gid: inode.gid(),
            permissions: (inode.kind() != Kind::Link).then(|| inode.permissions()),
            attributes,
            accessed: inode.accessed(),
            modified: inode.modified(),
        }
    }

    /// Gives it to a file, which errors call `path`: owners as root alone. Tells of attributes
    /// that it does not take. In this order: each of the former may change the latter.
    pub fn give(
        &self,
        folder: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
        is_privileged: bool,
    ) -> Result<Vec<String>> {
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        if is_privileged {
            let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
            let owned = chownat(folder, name, Some(uid), Some(gid), nofollow);
            owned.map_err(Error::file("set the owner of", path))?;
        }
        if let Some(permissions) = self.permissions {
            let mode = Mode::from_raw_mode(permissions);
            let set = chmodat(folder, name, mode, AtFlags::empty());
            set.map_err(Error::file("set the mode of", path))?;
        }
        let by_folder = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
        let mut left_out = Vec::new();
        for attribute in &self.attributes {
            let name = OsStr::from_bytes(&attribute.name);
            let set = lsetxattr(&by_folder, name, &attribute.value, XattrFlags::empty());
            if let Err(error) = set {
                left_out.push(format!("attribute {}: {error}", name.display()));
            }
        }
        let time = |time: Time| Timespec {
            tv_sec: time.s,
            tv_nsec: time.ns.into(),
        };
        let times = Timestamps {
            last_access: time(self.accessed),
            last_modification: time(self.modified),
        };
        let set = utimensat(folder, name, &times, nofollow);
        set.map_err(Error::file("set the times of", path))?;
        Ok(left_out)
    }
}
