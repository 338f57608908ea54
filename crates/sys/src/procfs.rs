//! The procfs in which this process finds itself and its targets, from whichever mount namespace a
//! thread is in.
//!
//! That is /proc, as long as the thread is in the mount namespace that its process began in. In
//! another one ([`world`](crate::world)), /proc is somebody else's, of other processes under the
//! same numbers; the thread's working directory is the procfs then, and a path begins there.

use std::cell::Cell;
use std::fmt::Display;
use std::os::fd::{AsFd, AsRawFd};
use std::{fs, io};

use rustix::fs::Stat;

thread_local! {
    /// True while this thread's working directory is the procfs.
    static IS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// The path of a file of the procfs: "self/maps", "4711/task".
#[must_use]
pub fn path(name: impl Display) -> String {
    match IS_HERE.get() {
        true => name.to_string(),
        false => format!("/proc/{name}"),
    }
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
