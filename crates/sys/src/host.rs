//! Files of the host, from whichever mount namespace this process is in.
//!
//! A process that works in the mount namespace of a tree finds the tree's files under their paths.
//! Images, sockets of helpers, hierarchies of control groups and facts about the kernel are the
//! host's: their paths go through [`path`], and lead there still.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::mountinfo::Mount;
use crate::{mountinfo, procfs};

/// The directories and mounts of a process before it left its mount namespace.
#[derive(Debug)]
struct Host {
    root: OwnedFd,
    directory: OwnedFd,
    mounts: Vec<Mount>,
}

static HOST: OnceLock<Host> = OnceLock::new();

/// Keeps the way to the host's files, before this process leaves their mount namespace.
///
/// # Errors
/// As open(2), and read(2) of the list of mounts.
pub fn keep() -> io::Result<()> {
    let folder = |path| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(CWD, path, flags, Mode::empty())
    };
    let host = Host {
        root: folder("/")?,
        directory: folder(".")?,
        mounts: mountinfo::read()?,
    };
    // Whoever kept it before has found the same.
    let _ = HOST.set(host);
    Ok(())
}

/// The path under which this process finds a file of the host.
#[must_use]
pub fn path(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    let Some(host) = HOST.get() else {
        return path.to_owned();
    };
    let (folder, rest) = match path.strip_prefix("/") {
        Ok(rest) => (&host.root, rest),
        Err(_) => (&host.directory, path),
    };
    let folder = procfs::path(format_args!("self/fd/{}", folder.as_raw_fd()));
    PathBuf::from(folder).join(rest)
}

/// The descriptors by which this process finds the host's files.
pub(crate) fn numbers() -> Vec<RawFd> {
    let all = HOST.get().map(|host| [&host.root, &host.directory]);
    let all = all.into_iter().flatten();
    all.map(AsRawFd::as_raw_fd).collect()
}

/// The path of a file of the host without symbolic links, as the host has it.
///
/// # Errors
/// As realpath(3).
pub fn real(file: &Path) -> io::Result<PathBuf> {
    if HOST.get().is_none() {
        return file.canonicalize();
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let open = openat(CWD, path(file), flags, Mode::empty())?;
    std::fs::read_link(procfs::link(&open))
}

/// The mounts of the host, where this process has left them.
#[must_use]
pub fn mounts_left() -> Option<&'static [Mount]> {
    HOST.get().map(|host| &*host.mounts)
}

/// The mounts of the host.
///
/// # Errors
/// As read(2) of the list.
pub fn mounts() -> io::Result<Vec<Mount>> {
    match mounts_left() {
        Some(mounts) => Ok(mounts.to_vec()),
        None => mountinfo::read(),
    }
}
