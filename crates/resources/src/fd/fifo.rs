//! FIFOs: pipes with a name in the file system.
//!
//! - What: FIFO
//! - Kept: path, both directions, the size of its buffer and the data in it; a deleted one is made
//!   again.
//! - Refused: a deleted one with an end outside of the tree, as a pipe.
//! - CRIU 4.2: kept.

use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, OFlags};

use super::ghost::first_of_inode;
use super::pipe::{Origin, refuse_end};
use super::place::Place;
use super::queue::Queue;
use super::{DumpContext, Kind, Open, Opens, RestoreContext, status, tags};
use crate::{Allow, Result};

/// See the file.
pub struct Fifo;

/// One end of a FIFO, or both.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where it is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The first description (by id) of this FIFO.
    #[prost(uint32, tag = "3")]
    first: u32,
    /// What is inside; on the first description only.
    #[prost(message, optional, tag = "4")]
    queue: Option<Queue>,
}

impl Kind for Fifo {
    type Record = Record;
    const TAG: u16 = tags::FIFO;
    const NAME: &'static str = "fifo";

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::Fifo)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let first = first_of_inode(open, cx);
        let mut record = Record {
            place: Place::dump(open, cx)?,
            flags: open.info.flags,
            first,
            queue: None,
        };
        if first == open.id.0 {
            record.queue = Some(Queue::dump(open, cx)?);
        }
        Ok(record)
    }

    /// One with a path is found there by both ends.
    fn check_among(open: &Open<'_>, all: &Opens<'_>, allow: &Allow) -> Result<()> {
        if !open.link.ends_with(b" (deleted)") {
            return Ok(());
        }
        match Origin::of(open, all, allow)? {
            Origin::New | Origin::Caller => Ok(()),
            Origin::Starter | Origin::Nowhere => Err(refuse_end(open)),
        }
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        record.place.check(Self::NAME, FileType::Fifo)
    }

    fn describe(record: &Record) -> String {
        let queue = record.queue.as_ref().map_or_else(String::new, |queue| {
            let queue = queue.describe();
            format!(" {queue}")
        });
        format!("{}{queue}", record.place.describe())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        // Both ends at once: opening one would wait for the other, and data in flight would go
        // with the last reader.
        let both = OFlags::RDWR | OFlags::NONBLOCK;
        let fresh = record.place.open(both, None, cx)?;
        let holder = match cx.shared().entry((tags::FIFO, u64::from(record.first))) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                if let Some(queue) = &record.queue {
                    queue.restore_unless_kept(fresh.as_fd(), &record.place.describe())?;
                }
                vacant.insert(vec![fresh])
            }
        };
        let wanted = flags.difference(OFlags::DIRECT) | OFlags::NONBLOCK;
        let own = status::reopen(holder[0].as_fd(), wanted)?;
        if wanted != flags {
            status::set(&own, flags)?;
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode};

    use super::super::testing::World;
    use super::*;

    fn fifo() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("fifo");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0).expect("mknod");
        (folder, path)
    }

    fn open(path: &std::path::Path, flags: OFlags) -> OwnedFd {
        rustix::fs::open(path, flags, Mode::empty()).expect("open")
    }

    fn text(end: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; 100];
        let len = rustix::io::read(end, &mut bytes[..]).expect("read");
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn ends_and_data_in_flight_survive() {
        for deleted in [false, true] {
            let (folder, path) = fifo();
            let reader = open(&path, OFlags::RDONLY | OFlags::NONBLOCK);
            let writer = open(&path, OFlags::WRONLY);
            rustix::io::write(&writer, b"in flight").expect("write");
            if deleted {
                std::fs::remove_file(&path).expect("remove");
            }
            let mut world = World::default();
            let (writer, reader) = (world.add(writer), world.add(reader));
            world.cycle();
            let (writer, reader) = (world.take(writer), world.take(reader));
            assert_eq!(text(&reader), b"in flight");
            rustix::io::write(&writer, b"more").expect("write");
            assert_eq!(text(&reader), b"more");
            drop(writer);
            assert_eq!(text(&reader), b"");
            let left = std::fs::read_dir(folder.path()).expect("list").count();
            assert_eq!(left, usize::from(!deleted));
        }
    }

    #[test]
    fn what_an_outsider_kept_is_not_doubled() {
        let (_folder, path) = fifo();
        let outside = open(&path, OFlags::RDWR);
        let reader = open(&path, OFlags::RDONLY | OFlags::NONBLOCK);
        rustix::io::write(&outside, b"kept").expect("write");
        let mut world = World::default();
        let at = world.add(reader);
        world.cycle();
        let reader = world.take(at);
        assert_eq!(text(&reader), b"kept");

        let mut world = World::default();
        world.add(reader);
        world.dump().expect("dump");
        rustix::io::write(&outside, b"another's").expect("write");
        let error = world.restore().expect_err("it has other data");
        assert!(error.is_in_use(), "{error}");
        assert!(
            error
                .to_string()
                .ends_with("which has somebody else's data, is in use"),
            "{error}"
        );
    }

    #[test]
    fn both_ends_in_one_survive() {
        let (_folder, path) = fifo();
        let both = open(&path, OFlags::RDWR);
        rustix::io::write(&both, b"to myself").expect("write");
        let mut world = World::default();
        let at = world.add(both);
        world.cycle();
        assert_eq!(text(&world.take(at)), b"to myself");
    }
}
