//! Pipes that stillframe was started with as well, by the same shell or supervisor as the tree: a
//! restore from there can hand them on without being told.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};

use super::Info;
use crate::{Error, Result};

/// True if this process was started with the pipe of this inode number.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn is_given(inode: u64) -> Result<bool> {
    Ok(given()?.iter().any(|pipe| pipe.inode == inode))
}

/// A descriptor of the pipe with this number (`O_PATH`), if this process was started with it.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn find(inode: u64) -> Result<Option<OwnedFd>> {
    let given = given()?;
    let Some(pipe) = given.iter().find(|pipe| pipe.inode == inode) else {
        return Ok(None);
    };
    let path = sys::procfs::path(format_args!("self/fd/{}", pipe.number));
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let own = openat(CWD, &path, flags, Mode::empty()).map_err(failed)?;
    // The number may have been given up since it was looked at.
    let is_it = fstat(&own).map_err(failed)?.st_ino == inode;
    Ok(is_it.then_some(own))
}

/// A descriptor of a pipe that this process was started with.
#[derive(Clone, Copy, Debug)]
struct Given {
    inode: u64,
    number: i32,
}

/// Those of this process, looked for once.
#[cfg(not(test))]
fn given() -> Result<&'static [Given]> {
    use std::sync::OnceLock;
    static GIVEN: OnceLock<Vec<Given>> = OnceLock::new();
    if let Some(given) = GIVEN.get() {
        return Ok(given);
    }
    let given = look()?;
    Ok(GIVEN.get_or_init(|| given))
}

/// Those of this process, whose tests make new ones.
#[cfg(test)]
fn given() -> Result<Vec<Given>> {
    look()
}

/// Looks through the descriptors of this process: those that it opens itself close on exec, those
/// that it was started with do not.
fn look() -> Result<Vec<Given>> {
    let mut given = Vec::new();
    for number in sys::numbers::of_own_files().map_err(failed)? {
        let path = sys::procfs::path(format_args!("self/fd/{number}"));
        let Ok(stat) = rustix::fs::stat(&path) else {
            continue;
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo || closes(number) {
            continue;
        }
        let inode = stat.st_ino;
        let link = rustix::fs::readlink(&path, Vec::new()).map_err(failed)?;
        if link.to_bytes() == format!("pipe:[{inode}]").as_bytes() {
            given.push(Given { inode, number });
        }
    }
    Ok(given)
}

fn failed(error: rustix::io::Errno) -> Error {
    Error::kernel("look at /proc/self/fd", error)
}

/// True if a descriptor of this process closes on exec.
fn closes(number: i32) -> bool {
    let text = sys::procfs::read_text(format_args!("self/fdinfo/{number}"));
    let info = text.ok().and_then(|text| Info::parse(&text));
    info.is_none_or(|(_, closes)| closes)
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn pipes_that_were_given_are_found() {
        let (given, _writer) = pipe_with(PipeFlags::empty()).expect("a pipe");
        let (opened, _other) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let inode = |end: &OwnedFd| fstat(end).expect("it is open").st_ino;
        let found = find(inode(&given)).expect("looked").expect("found");
        assert_eq!(inode(&found), inode(&given));
        // Its other end is given as well; of the other pipe, both are this process's own.
        assert!(find(inode(&opened)).expect("looked").is_none());
    }
}
