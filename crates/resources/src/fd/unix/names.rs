//! The names that a bound socket's file has in its folder (link(2), rename(2)).
//!
//! The kernel tells of the one name under which the socket was bound, even when that is gone:
//! `supervisord` binds a name of its own, links the file to the name that clients know, and
//! unlinks the first. The others are found in the folder by the inode's number.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

use rustix::fs::Stat;

/// The longest name in bytes that bind(2) and connect(2) take (`sun_path`), with its NUL.
pub const NAME_MAX_BYTES: usize = 108;

/// How the kernel marks a name that is gone.
const DELETED: &[u8] = b" (deleted)";

/// The path at which the kernel shows a file, `shown`, without the mark that its name is gone.
pub fn unmarked(shown: &[u8], stat: &Stat) -> PathBuf {
    let path = |bytes| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
    match shown.strip_suffix(DELETED) {
        Some(name) if !leads_to(&path(shown), stat) => path(name),
        _ => path(shown),
    }
}

/// The file of `stat` is at `path`.
pub fn leads_to(path: &Path, stat: &Stat) -> bool {
    rustix::fs::lstat(path)
        .is_ok_and(|found| (found.st_dev, found.st_ino) == (stat.st_dev, stat.st_ino))
}

/// The names of the file of `stat` in the folder of `path`, in order.
pub fn in_folder(path: &Path, stat: &Stat) -> Vec<PathBuf> {
    let entries = path
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok());
    let entries = entries.into_iter().flatten().flatten();
    let same = entries.filter(|entry| entry.ino() == stat.st_ino);
    let paths = same.map(|entry| entry.path());
    let mut paths: Vec<_> = paths.filter(|path| leads_to(path, stat)).collect();
    paths.sort();
    paths
}
