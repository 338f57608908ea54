//! Trees of mounts that are made one by one, each before it has its place: open_tree(2),
//! mount_setattr(2), move_mount(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

/// The attributes of a mount, by the words of /proc/PID/mountinfo. Without a word about access
/// times, all are written (`strictatime`).
pub const ATTRIBUTES: [(&str, u64); 8] = [
    ("ro", libc::MOUNT_ATTR_RDONLY),
    ("nosuid", libc::MOUNT_ATTR_NOSUID),
    ("nodev", libc::MOUNT_ATTR_NODEV),
    ("noexec", libc::MOUNT_ATTR_NOEXEC),
    ("noatime", libc::MOUNT_ATTR_NOATIME),
    ("nodiratime", libc::MOUNT_ATTR_NODIRATIME),
    ("relatime", libc::MOUNT_ATTR_RELATIME),
    ("nosymfollow", libc::MOUNT_ATTR_NOSYMFOLLOW),
];

/// How mounts spread from and to a mount: mount_namespaces(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// To no other, and from none.
    Private,
    /// To its peers, and from them.
    Shared,
    /// From its master.
    Slave,
    /// As [`Propagation::Private`], and it cannot be mounted elsewhere.
    Unbindable,
}

impl Propagation {
    fn number(self) -> u64 {
        match self {
            Self::Private => libc::MS_PRIVATE,
            Self::Shared => libc::MS_SHARED,
            Self::Slave => libc::MS_SLAVE,
            Self::Unbindable => libc::MS_UNBINDABLE,
        }
    }
}

/// A copy of the mount at a path, without what is mounted below, of the directory or file there.
///
/// # Errors
/// As open_tree(2): `EINVAL` for what cannot be mounted elsewhere.
pub fn copy(folder: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_NO_AUTOMOUNT
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    Ok(open_tree(folder, path, flags)?)
}

/// The same, of a path from this process's directories.
///
/// # Errors
/// Those of [`copy`].
pub fn copy_at(path: &Path) -> io::Result<OwnedFd> {
    copy(CWD, path)
}

/// Opens what is mounted at `path`.
///
/// # Errors
/// As open(2).
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Opens the file at `path` of a mount by its root, whatever is mounted over it or on the way.
///
/// # Errors
/// As openat2(2): `EXDEV` where the way leads through a link out of the mount.
pub fn find(mount: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let way = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    Ok(openat2(mount, path, flags, Mode::empty(), way)?)
}

/// Mounts `mount` on the file or directory `on`, above all that is mounted there.
///
/// # Errors
/// As move_mount(2): `ENOTDIR` for a file on a directory, and the reverse.
pub fn attach(mount: impl AsFd, on: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", on, "", flags)?)
}

/// Makes `mount` a peer of `of`, or gives it the same master: both are of one file system.
///
/// # Errors
/// As move_mount(2) with `MOVE_MOUNT_SET_GROUP`: `EINVAL` where `mount` has peers or a master, or a
/// directory that is not below that of `of`.
pub fn join_group(mount: impl AsFd, of: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_SET_GROUP;
    Ok(move_mount(of, "", mount, "", flags)?)
}

/// Gives a mount these attributes alone.
///
/// # Errors
/// As mount_setattr(2).
pub fn set_attributes(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    const TIMES: u64 = libc::MOUNT_ATTR__ATIME;
    let all = ATTRIBUTES.iter().fold(TIMES, |all, (_, one)| all | one);
    change(mount, 0, &attr(attributes, all, 0))
}

/// Has mounts spread from and to a mount in this way.
///
/// # Errors
/// As mount_setattr(2).
pub fn set_propagation(mount: BorrowedFd<'_>, propagation: Propagation) -> io::Result<()> {
    change(mount, 0, &attr(0, 0, propagation.number()))
}

/// The same, for all mounts of this process's mount namespace.
///
/// # Errors
/// As mount_setattr(2).
pub fn set_propagation_of_all(propagation: Propagation) -> io::Result<()> {
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let all = attr(0, 0, propagation.number());
    change(root.as_fd(), libc::AT_RECURSIVE, &all)
}

fn attr(set: u64, clear: u64, propagation: u64) -> libc::mount_attr {
    libc::mount_attr {
        attr_set: set,
        attr_clr: clear,
        propagation,
        userns_fd: 0,
    }
}

fn change(mount: BorrowedFd<'_>, flags: libc::c_int, to: &libc::mount_attr) -> io::Result<()> {
    let flags = flags | libc::AT_EMPTY_PATH;
    let bytes = size_of::<libc::mount_attr>();
    let (mount, empty) = (mount.as_raw_fd(), c"".as_ptr());
    // SAFETY: the kernel reads the path and the structure, which live through the call.
    let done = unsafe { libc::syscall(libc::SYS_mount_setattr, mount, empty, flags, to, bytes) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes the mount at `path`, and all that is mounted below, away from this process's mount
/// namespace.
///
/// # Errors
/// As umount2(2).
pub fn take_away(path: &Path) -> io::Result<()> {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    Ok(unmount(path, flags)?)
}

/// Makes a mount, which is attached in this process's mount namespace, the root of the namespace,
/// and detaches the old one with all that is mounted below. The working directory stays.
///
/// # Errors
/// As pivot_root(2).
pub fn make_root(mount: impl AsFd) -> io::Result<()> {
    let folder = rustix::fs::open(".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    rustix::process::fchdir(mount)?;
    rustix::process::pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::fchdir(folder)?;
    Ok(())
}

/// The number of the mount that the file at `path` is in.
///
/// # Errors
/// As statx(2).
pub fn mount_at(path: &Path) -> io::Result<u64> {
    let flags = AtFlags::NO_AUTOMOUNT | AtFlags::SYMLINK_NOFOLLOW;
    Ok(statx(CWD, path, flags, StatxFlags::MNT_ID)?.stx_mnt_id)
}
