//! `O_PATH` descriptions: places in the file system, of any type of file.
//!
//! - What: O_PATH descriptor
//! - Kept: the place, of a file of any type.
//! - CRIU 4.2: of regular files, directories, symbolic links and character devices; refuses those
//!   of FIFOs, sockets and block devices.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::OFlags;

use super::place::Place;
use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::Result;

/// See the file.
pub struct Path;

/// A place in the file system.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where it is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// The flags besides `O_PATH`.
    #[prost(uint32, tag = "2")]
    flags: u32,
}

impl Kind for Path {
    type Record = Record;
    const TAG: u16 = tags::PATH;
    const NAME: &'static str = "path";

    fn claims(open: &Open<'_>) -> bool {
        open.link.starts_with(b"/") && open.info.oflags().contains(OFlags::PATH)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        Ok(Record {
            place: Place::dump(open, cx)?,
            flags: open.info.oflags().difference(OFlags::PATH).bits(),
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        record.place.check(Self::NAME, record.place.kind())
    }

    fn describe(record: &Record) -> String {
        record.place.describe()
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags) | OFlags::PATH;
        record.place.open(flags, None, cx)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::Mode;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn files_directories_symlinks_and_sockets_survive() {
        let folder = tempfile::tempdir().expect("make a folder");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "text").expect("write");
        symlink("nowhere", &link).expect("symlink");
        let mut world = World::default();
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let open = |path: &std::path::Path, flags| {
            rustix::fs::open(path, flags, Mode::empty()).expect("open")
        };
        world.add(open(&file, OFlags::PATH));
        world.add(open(folder.path(), OFlags::PATH | OFlags::DIRECTORY));
        let at = world.add(open(&link, flags));
        let socket = folder.path().join("socket");
        std::os::unix::net::UnixListener::bind(&socket).expect("bind");
        let place = world.add(open(&socket, OFlags::PATH));
        world.cycle();
        rustix::fs::fstat(world.take(place)).expect("it is there");
        let target = rustix::fs::readlinkat(world.take(at), "", Vec::new()).expect("readlink");
        assert_eq!(target.as_bytes(), b"nowhere");
    }
}
