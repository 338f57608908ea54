//! Directories, open for reading their entries; deleted ones as well.
//!
//! - Kept: path, and how far its entries were read; a deleted one is made again.
//! - Refused: "it may signal its changes (F_NOTIFY)" (one that signals somebody, `F_SETOWN`, too).
//! - CRIU 4.2: kept, deleted ones too; that it signals changes is forgotten.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::FileType;

use super::place::Place;
use super::regular;
use super::{DumpContext, Kind, Open, RestoreContext, tags};
use crate::{Error, Result};

/// See the file.
pub struct Directory;

/// A directory.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where it is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// How far its entries were read: a cookie of its file system.
    #[prost(uint64, tag = "3")]
    pos: u64,
}

impl Kind for Directory {
    type Record = Record;
    const TAG: u16 = tags::DIRECTORY;
    const NAME: &'static str = "directory";

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::Directory)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        if has_owner(open)? {
            return Err(open.unsupported("it may signal its changes (F_NOTIFY)", None));
        }
        let place = Place::dump(open, cx)?.carry(open, cx)?;
        Ok(Record {
            place,
            flags: open.info.flags,
            pos: open.info.pos,
        })
    }

    fn check(record: &Record) -> Result<()> {
        let how = (record.flags, FileType::Directory);
        regular::check(Self::NAME, &record.place, how)
    }

    fn describe(record: &Record) -> String {
        let (place, pos) = (record.place.describe(), record.pos);
        format!("{place} pos={pos}")
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place.describe())
    }

    fn prepare(record: &Record, cx: &mut dyn RestoreContext) -> Result<()> {
        record.place.prepare(cx)
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let at = (record.flags, record.pos);
        regular::reopen(&record.place, at, None, cx)
    }
}

/// True if the directory signals an owner (`F_SETOWN`). A directory signals its changes alone, and
/// the kernel does not show for which changes.
fn has_owner(open: &Open<'_>) -> Result<bool> {
    if open.fd < 0 && !open.in_flight {
        return Ok(false);
    }
    let owner = sys::fcntl::owner(open.own()?);
    let failed = |error| Error::kernel(format!("get the owner of {}", open.place()), error);
    let owner = owner.map_err(failed)?;
    Ok(owner.pid != 0 || owner.kind != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;

    use rustix::fs::{Dir, Mode, OFlags, SeekFrom};

    use super::super::testing::World;
    use super::*;

    #[test]
    fn directory_that_signals_its_changes_is_refused() {
        let folder = tempfile::tempdir().expect("make a folder");
        let own = std::fs::File::open(folder.path()).expect("open");
        let pid = std::process::id().cast_signed();
        sys::fcntl::set_owner(own.as_fd(), sys::fcntl::Owner { kind: 1, pid }).expect("own");
        let mut world = World::default();
        world.add(own);
        let error = world.dump().expect_err("it is refused").to_string();
        assert!(
            error.ends_with("it may signal its changes (F_NOTIFY)"),
            "{error}"
        );
    }

    #[test]
    fn reading_entries_goes_on() {
        let folder = tempfile::tempdir().expect("make a folder");
        for number in 0..20 {
            fs::write(folder.path().join(format!("entry {number}")), "").expect("write");
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = rustix::fs::open(folder.path(), flags, Mode::empty()).expect("open");
        let names = |directory: &OwnedFd| {
            let entries = Dir::read_from(directory).expect("list");
            let entries = entries.map(|entry| entry.expect("entry"));
            entries
                .map(|entry| (entry.file_name().to_owned(), entry.offset()))
                .collect::<Vec<_>>()
        };
        // Dir::read_from opens the directory anew: what it lists here is everything.
        let all = names(&directory);
        let (_, middle) = &all[9];
        let pos = middle.cast_unsigned();
        rustix::fs::seek(&directory, SeekFrom::Start(pos)).expect("seek");
        let mut world = World::default();
        let at = world.add(directory);
        world.cycle();
        let directory = world.take(at);
        let mut buffer = Vec::with_capacity(4096);
        let mut rest = rustix::fs::RawDir::new(&directory, buffer.spare_capacity_mut());
        let mut left = Vec::new();
        while let Some(entry) = rest.next() {
            left.push(entry.expect("entry").file_name().to_owned());
        }
        let expected = all[10..].iter().map(|(name, _)| name.clone());
        assert_eq!(left, expected.collect::<Vec<_>>());
    }

    #[test]
    fn deleted_directory_is_made_again() {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("gone");
        fs::create_dir(&path).expect("make a folder");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = rustix::fs::open(&path, flags, Mode::empty()).expect("open");
        fs::remove_dir(&path).expect("remove");
        let mut world = World::default();
        let at = world.add(directory);
        world.cycle();
        let stat = rustix::fs::fstat(world.take(at)).expect("stat");
        assert_eq!(stat.st_nlink, 0);
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 0);
    }
}
