//! The devices that every system has and that keep no state: /dev/null and the like.
//!
//! - What: devices without a state
//! - Kept: /dev/null, zero, full, random, urandom, and kmsg to write to; at their path, or as a
//!   deleted node.
//! - Refused: "it reads the kernel's log".
//! - At a restore: "…: is another device".
//! - CRIU 4.2: the same devices, opened again by their path; a reader of the kernel's log begins
//!   again at the first message.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::{FileType, OFlags};

use super::place::Place;
use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::{Error, Result};

/// See the file.
pub struct Chardev;

/// A device node.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where the node is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The device's minor number; its major number is 1.
    #[prost(uint32, tag = "3")]
    minor: u32,
}

/// Minor numbers of major 1 (Documentation/admin-guide/devices.txt) that may be opened again.
const DEVICES: &[(u32, &str)] = &[
    (3, "null"),
    (5, "zero"),
    (7, "full"),
    (8, "random"),
    (9, "urandom"),
    (11, "kmsg"),
];
const KMSG: u32 = 11;

fn device(rdev: u64) -> Option<(u32, &'static str)> {
    let minor = rustix::fs::minor(rdev);
    let found = DEVICES.iter().find(|(number, _)| *number == minor);
    found.copied().filter(|_| rustix::fs::major(rdev) == 1)
}

impl Kind for Chardev {
    type Record = Record;
    const TAG: u16 = tags::CHARDEV;
    const NAME: &'static str = "chardev";

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::CharacterDevice) && device(open.stat.st_rdev).is_some()
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let minor = rustix::fs::minor(open.stat.st_rdev);
        let mode = open.info.oflags() & OFlags::RWMODE;
        if minor == KMSG && mode != OFlags::WRONLY {
            return Err(open.unsupported("it reads the kernel's log", None));
        }
        Ok(Record {
            place: Place::dump(open, cx)?,
            flags: open.info.flags,
            minor,
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        record.place.check(Self::NAME, FileType::CharacterDevice)
    }

    fn describe(record: &Record) -> String {
        record.place.describe()
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place.describe())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let file = record.place.open(flags, None, cx)?;
        let stat = rustix::fs::fstat(&file)
            .map_err(|error| Error::kernel(format!("stat {}", record.place.describe()), error))?;
        match device(stat.st_rdev) {
            Some((minor, _)) if minor == record.minor => Ok(file),
            _ => Err(Error::Mismatch {
                what: format!("{}: is another device", record.place.describe()),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileTypeExt;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn every_device_survives() {
        for (minor, name) in DEVICES.iter().filter(|(minor, _)| *minor != KMSG) {
            let mut world = World::default();
            let file = File::options()
                .read(true)
                .write(true)
                .open(format!("/dev/{name}"))
                .expect("open");
            let at = world.add(file);
            world.cycle();
            let stat = rustix::fs::fstat(world.take(at)).expect("stat");
            assert_eq!(stat.st_rdev, rustix::fs::makedev(1, *minor));
        }
    }

    #[test]
    fn deleted_node_is_made_again() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("null");
        let (mode, null) = (rustix::fs::Mode::RUSR, rustix::fs::makedev(1, 3));
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            FileType::CharacterDevice,
            mode,
            null,
        );
        let Ok(file) = made.and_then(|()| rustix::fs::open(&path, OFlags::RDONLY, mode)) else {
            testkit::skip!("no device nodes in {}", folder.path().display());
        };
        std::fs::remove_file(&path).expect("remove");
        let mut world = World::default();
        let at = world.add(file);
        world.cycle();
        let stat = rustix::fs::fstat(world.take(at)).expect("stat");
        assert_eq!((stat.st_rdev, stat.st_nlink), (null, 0));
        assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 0);
    }

    #[test]
    fn log_reader_is_refused() {
        let Ok(file) = File::open("/dev/kmsg") else {
            testkit::skip!("/dev/kmsg cannot be read");
        };
        assert!(file.metadata().expect("stat").file_type().is_char_device());
        let mut world = World::default();
        world.add(file);
        assert!(world.dump().is_err());
    }

    #[test]
    fn unknown_device_is_not_claimed() {
        assert_eq!(device(rustix::fs::makedev(1, 1)), None);
        assert_eq!(device(rustix::fs::makedev(10, 3)), None);
    }
}
