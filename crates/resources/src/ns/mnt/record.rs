//! The mounts of a namespace, as an image has them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::file_system::FileSystem;
use crate::cgroup::GroupPlace;

/// The contents of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The file systems that mounts are of.
    #[prost(message, repeated, tag = "1")]
    pub(super) file_systems: Vec<FileSystem>,
    /// The mounts: the root first, and each behind the one that it is on.
    #[prost(message, repeated, tag = "2")]
    pub(super) mounts: Vec<Mount>,
}

/// A mount.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    /// The number of the mount that it is on; the root's is its own.
    #[prost(uint32, tag = "1")]
    pub(super) parent: u32,
    /// The directory or file on which it is mounted, from the tree's root.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) point: Vec<u8>,
    /// The number of its file system.
    #[prost(uint32, tag = "3")]
    pub(super) file_system: u32,
    /// The directory or file of the file system that is mounted.
    #[prost(bytes = "vec", tag = "4")]
    pub(super) root: Vec<u8>,
    /// The same, by its path on the host, where the host has mounted it.
    #[prost(bytes = "vec", optional, tag = "5")]
    pub(super) host: Option<Vec<u8>>,
    /// The name of what is mounted from elsewhere.
    #[prost(string, optional, tag = "6")]
    pub(super) external: Option<String>,
    /// Its attributes (`MOUNT_ATTR_*` of mount_setattr(2)).
    #[prost(uint64, tag = "7")]
    pub(super) attributes: u64,
    /// The number of its group of peers; 0 for none.
    #[prost(uint32, tag = "8")]
    pub(super) peers: u32,
    /// The number of the group whose mounts it gets; 0 for none.
    #[prost(uint32, tag = "9")]
    pub(super) master: u32,
    /// Whether it gets what is mounted on the host.
    #[prost(bool, tag = "10")]
    pub(super) follows_host: bool,
    /// Whether it cannot be mounted elsewhere.
    #[prost(bool, tag = "11")]
    pub(super) is_unbindable: bool,
    /// The control group that it shows.
    #[prost(message, optional, tag = "13")]
    pub(super) group: Option<GroupPlace>,
    /// How many mounts of the host lie above the one with `host`, on the same directory.
    #[prost(uint32, tag = "12")]
    pub(super) host_layers: u32,
}

/// Tells whether a path of an image is one from a root, without ways back.
fn is_plain(path: &[u8]) -> bool {
    let is_name = |name: &[u8]| name != b".." && name != b"." && !name.contains(&0);
    path.first() == Some(&b'/') && path.split(|byte| *byte == b'/').all(is_name)
}

impl Mount {
    pub(super) fn is_sound(&self) -> bool {
        let known = sys::mount_tree::ATTRIBUTES.iter();
        let known = known.fold(libc::MOUNT_ATTR_STRICTATIME, |all, (_, one)| all | one);
        let is_path = |path: &Option<Vec<u8>>| path.as_ref().is_none_or(|path| is_plain(path));
        is_plain(&self.point)
            && is_plain(&self.root)
            && is_path(&self.host)
            && self.attributes & !known == 0
            && self.group.as_ref().is_none_or(GroupPlace::is_sound)
    }

    /// Tells whether its place is in another mount.
    pub(super) fn is_on(&self, parent: &Self) -> bool {
        let [own, parent] = [self, parent].map(|mount| Path::new(OsStr::from_bytes(&mount.point)));
        own.starts_with(parent)
    }

    /// The place where it is mounted, for messages.
    pub(super) fn place(&self) -> String {
        self.point.escape_ascii().to_string()
    }
}
