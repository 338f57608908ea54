//! Pipes that stillframe was started with as well, by the same shell or supervisor as the tree: a
//! restore from there can hand them on without being told.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, openat};

use super::Info;
use crate::{Error, Result};

/// The boot in which a pipe has its number; none where the kernel does not tell.
pub(super) fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}

/// The pipe with this number that this process was started with, if there is one. Whatever it opens
/// itself closes on exec; what it was given does not.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn find(inode: u64) -> Result<Option<OwnedFd>> {
    let failed = |error: rustix::io::Errno| Error::kernel("look at /proc/self/fd", error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, "/proc/self/fd", flags, Mode::empty()).map_err(failed)?;
    let is_it = |stat: &Stat| {
        let is_pipe = FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
        is_pipe && stat.st_ino == inode
    };
    for number in sys::numbers::of(&folder).map_err(failed)? {
        let path = format!("/proc/self/fd/{number}");
        if !rustix::fs::stat(&path).is_ok_and(|stat| is_it(&stat)) || closes(number) {
            continue;
        }
        let link = rustix::fs::readlink(&path, Vec::new()).map_err(failed)?;
        if link.to_bytes() == format!("pipe:[{inode}]").as_bytes() {
            let place = OFlags::PATH | OFlags::CLOEXEC;
            return openat(CWD, &path, place, Mode::empty())
                .map(Some)
                .map_err(failed);
        }
    }
    Ok(None)
}

/// Whether a descriptor of this process closes on exec.
fn closes(number: i32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    let info = text.ok().and_then(|text| Info::parse(&text));
    info.is_none_or(|(_, closes)| closes)
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;
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
