//! The procfs in which this process finds itself and its targets, from whichever mount namespace a
//! thread is in.
//!
//! That is /proc, as long as the thread is in the mount namespace that its process began in. In
//! another one ([`world`](crate::world)), /proc is somebody else's, of other processes under the
//! same numbers, or nothing at all; the thread's working directory is the procfs then, and a path
//! begins there. A process that goes to another mount namespace as a whole has a procfs of its own
//! before ([`mount`]).

use std::cell::Cell;
use std::fmt::Display;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, io};

use rustix::fs::Stat;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// True once the working directory of this process is the procfs.
static IS_DIRECTORY: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// True while this thread's working directory is the procfs.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// The path of a file of the procfs: "self/maps", "4711/task".
#[must_use]
pub fn path(name: impl Display) -> String {
    match IS_HERE.get() || is_directory() {
        true => name.to_string(),
        false => format!("/proc/{name}"),
    }
}

/// A procfs of the pid namespace that this process is in, mounted nowhere: all of it, whatever
/// mounts hide in /proc.
///
/// # Errors
/// As fsopen(2) and fsmount(2): `EPERM` without `CAP_SYS_ADMIN`.
pub fn mount() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

/// Makes `procfs` the working directory of this process, which has one thread, and its procfs from
/// now on, wherever it goes. setns(2) and unshare(2) with `CLONE_NEWNS` change the working
/// directory, so they go before.
///
/// # Errors
/// As fchdir(2).
pub fn stay_in(procfs: impl AsFd) -> io::Result<()> {
    rustix::process::fchdir(procfs)?;
    IS_DIRECTORY.store(true, Ordering::Relaxed);
    Ok(())
}

/// The path of the link to a file of this process, by which calls take a descriptor for a path
/// (proc_pid_fd(5)).
#[must_use]
pub fn link(file: impl AsFd) -> String {
    path(format_args!("thread-self/fd/{}", file.as_fd().as_raw_fd()))
}

/// The text of a file of the procfs.
///
/// # Errors
/// As open(2) and read(2).
pub fn read(name: impl Display) -> io::Result<Vec<u8>> {
    crate::proc::read(&path(name))
}

/// The text of a file of the procfs, as UTF-8.
///
/// # Errors
/// As [`read`]; `InvalidData` for other bytes.
pub fn read_text(name: impl Display) -> io::Result<String> {
    String::from_utf8(read(name)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Writes to a file of the procfs.
///
/// # Errors
/// As open(2) and write(2).
pub fn write(name: impl Display, text: impl AsRef<[u8]>) -> io::Result<()> {
    fs::write(path(name), text)
}

/// Tells whether the procfs has a file of this name.
#[must_use]
pub fn has(name: impl Display) -> bool {
    stat(name).is_ok()
}

/// stat(2) of a file of the procfs.
///
/// # Errors
/// As stat(2).
pub fn stat(name: impl Display) -> rustix::io::Result<Stat> {
    rustix::fs::stat(path(name))
}

/// The numbers of all processes.
pub fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(path(".")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Tells whether this process's working directory is the procfs.
pub(crate) fn is_directory() -> bool {
    IS_DIRECTORY.load(Ordering::Relaxed)
}

/// Tells whether this thread's working directory is the procfs.
pub(crate) fn is_here() -> bool {
    IS_HERE.get()
}

/// Says whether this thread's working directory is the procfs from now on.
pub(crate) fn set_here(is_here: bool) {
    IS_HERE.set(is_here);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_paths() {
        assert_eq!(path("self/maps"), "/proc/self/maps");
        assert!(has("self/maps") && !has("self/none"));
        let own = fs::File::open("/dev/null").unwrap();
        assert_eq!(
            fs::read_link(link(&own)).unwrap().to_str(),
            Some("/dev/null")
        );
        let me = std::process::id().cast_signed();
        assert!(processes().any(|pid| pid == me));
    }
}
