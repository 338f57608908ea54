//! Regular files, open or mapped; deleted ones as well.
//!
//! - What: regular file
//! - Kept: path, offset, access mode and status flags; mapped ones too. Its contents stay in the
//!   file.
//! - CRIU 4.2: the same.

use std::os::fd::{AsFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, OFlags, SeekFrom};

use super::place::Place;
use super::pressure::Trigger;
use super::{DumpContext, Kind, Open, RestoreContext, build_id, locks, status, tags};
use crate::{Error, FileValidation, Result};

/// See the file.
pub struct Regular;

/// A regular file.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where it is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The offset in bytes.
    #[prost(uint64, tag = "3")]
    pos: u64,
    /// The size in bytes: a file that has grown or shrunk since is not what the task knows.
    #[prost(uint64, tag = "4")]
    size_bytes: u64,
    /// The build ID of an ELF file that has one.
    #[prost(bytes = "vec", tag = "5")]
    build_id: Vec<u8>,
    /// The trigger that was written to a file of pressure.
    #[prost(message, optional, tag = "6")]
    trigger: Option<Trigger>,
}

impl Kind for Regular {
    type Record = Record;
    const TAG: u16 = tags::REGULAR;
    const NAME: &'static str = "regular";

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::RegularFile)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let place = Place::dump(open, cx)?.carry(open, cx)?;
        let size_bytes = open.stat.st_size.cast_unsigned();
        let build_id = match cx.allow().file_validation {
            // Opening it would break a lease.
            FileValidation::BuildId if !locks::has_lease(&open.info) => {
                build_id::dump(&place, size_bytes)
            }
            FileValidation::BuildId | FileValidation::FileSize => Vec::new(),
        };
        Ok(Record {
            place,
            flags: open.info.flags,
            pos: open.info.pos,
            size_bytes,
            build_id,
            trigger: Trigger::of(open)?,
        })
    }

    fn check(record: &Record) -> Result<()> {
        check(
            Self::NAME,
            &record.place,
            (record.flags, FileType::RegularFile),
        )
    }

    fn describe(record: &Record) -> String {
        let (place, pos) = (record.place.describe(), record.pos);
        let flags = record.flags;
        format!("{place} pos={pos} flags={flags:#o}")
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place.describe())
    }

    fn prepare(record: &Record, cx: &mut dyn RestoreContext) -> Result<()> {
        record.place.prepare(cx)
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let size = Some(record.size_bytes);
        let at = (record.flags, record.pos);
        let file = reopen(&record.place, at, size, cx)?;
        let inherited = inherited(&record.place, cx);
        if !inherited && cx.allow().file_validation == FileValidation::BuildId {
            build_id::check(&record.place, &record.build_id, file.as_fd())?;
        }
        if let Some(trigger) = record.trigger {
            trigger.set(file.as_fd(), &record.place.describe())?;
            // In a control group's file, what is written moves the offset.
            let failed = |error| Error::kernel(format!("seek {}", record.place.describe()), error);
            rustix::fs::seek(&file, SeekFrom::Start(record.pos)).map_err(failed)?;
        }
        Ok(file)
    }
}

/// Whether another file takes its place (`--inherit-fd`).
pub(super) fn inherited(place: &Place, cx: &dyn RestoreContext) -> bool {
    cx.inherited(place.name()).is_some()
}

/// Checks how a file of this type is opened again.
pub(super) fn check(name: &str, place: &Place, (flags, kind): (u32, FileType)) -> Result<()> {
    status::check(name, flags)?;
    if OFlags::from_bits_retain(flags).contains(OFlags::PATH) {
        return Err(Error::corrupt(name, "is a file of another type"));
    }
    place.check(name, kind)
}

/// Opens a regular file (whose size is known) or a directory again and sets its offset.
pub(super) fn reopen(
    place: &Place,
    (flags, pos): (u32, u64),
    size_bytes: Option<u64>,
    cx: &mut dyn RestoreContext,
) -> Result<OwnedFd> {
    let made = status::is_nameless(flags) && !inherited(place, cx);
    let is_async = status::ASYNC.intersection(OFlags::from_bits_retain(flags));
    // A file that signals nobody gets the flag by open(2) alone.
    let flags = status::opening(flags) | is_async;
    let file = match &place.ghost {
        Some(ghost) if made && ghost.made_with != 0 => ghost.maker(place, cx)?,
        _ => place.open(flags, size_bytes, cx)?,
    };
    if pos != 0 && !inherited(place, cx) {
        rustix::fs::seek(&file, SeekFrom::Start(pos))
            .map_err(|error| Error::kernel(format!("seek {} to {pos}", place.describe()), error))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::{Read, Seek, Write};
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};

    use super::super::testing::World;
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("make a folder")
    }

    #[test]
    fn offset_and_flags_survive() {
        let folder = folder();
        let path = folder.path().join("log");
        fs::write(&path, "0123456789").expect("write");
        let flags = OFlags::APPEND | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::DSYNC;
        let flags = (flags | status::ASYNC).bits();
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .custom_flags(flags.cast_signed())
            .open(&path)
            .expect("open");
        file.seek(std::io::SeekFrom::Start(4)).expect("seek");
        let mut world = World::default();
        let at = world.add(file);
        world.cycle();
        let mut text = String::new();
        let mut file = File::from(world.take(at));
        file.read_to_string(&mut text).expect("read");
        assert_eq!(text, "456789");
        file.write_all(b"end").expect("write");
        assert_eq!(fs::read(&path).expect("read"), b"0123456789end");
    }

    #[test]
    fn inherited_file_takes_its_place() {
        let folder = folder();
        let path = folder.path().join("old");
        fs::write(&path, "0123456789").expect("write");
        let mut file = File::open(&path).expect("open");
        file.seek(std::io::SeekFrom::Start(4)).expect("seek");
        let other = folder.path().join("new");
        fs::write(&other, "new").expect("write");
        let mut world = World::default();
        let at = world.add(file);
        world.dump().expect("dump");
        fs::remove_file(&path).expect("remove");
        let name = path.to_str().expect("text")[1..]
            .to_owned()
            .leak()
            .as_bytes();
        world.inherited = Some((name, File::open(&other).expect("open").into()));
        world.restore().expect("restore");
        let mut text = String::new();
        File::from(world.take(at))
            .read_to_string(&mut text)
            .expect("read");
        assert_eq!(text, "new");
    }

    #[test]
    fn changed_size_is_refused() {
        let folder = folder();
        let path = folder.path().join("data");
        fs::write(&path, "0123").expect("write");
        let mut world = World::default();
        world.add(File::open(&path).expect("open"));
        world.dump().expect("dump");
        fs::write(&path, "01234").expect("write");
        let error = world.restore().expect_err("the file has grown").to_string();
        assert!(error.ends_with("data: size is 5 bytes, was 4"), "{error}");
        fs::remove_file(&path).expect("remove");
        let error = world.restore().expect_err("no file").to_string();
        assert!(error.ends_with("data: is missing"), "{error}");
    }

    #[test]
    fn deleted_file_is_shared_again() {
        let folder = folder();
        for size in [0, 100, 10_000] {
            let path = folder.path().join("gone/deeper/file");
            fs::create_dir_all(path.parent().expect("parent")).expect("make folders");
            let mut writer = File::create(&path).expect("create");
            writer.write_all(&vec![7; size]).expect("write");
            let reader = File::open(&path).expect("open");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4640)).expect("chmod");
            fs::remove_dir_all(folder.path().join("gone")).expect("remove");
            let before = reader.metadata().expect("stat");
            let mut world = World::default();
            let (writer, reader) = (world.add(writer), world.add(reader));
            world.cycle();
            let (writer, reader) = (world.take(writer), world.take(reader));
            let mut reader = File::from(reader);
            let after = reader.metadata().expect("stat");
            assert_eq!((after.mode(), after.nlink()), (before.mode(), 0));
            assert_eq!(after.modified().ok(), before.modified().ok());
            File::from(writer).write_all(b"more").expect("write");
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).expect("read");
            assert_eq!(bytes[..size], vec![7; size]);
            assert_eq!(&bytes[size..], b"more");
            let left = fs::read_dir(folder.path()).expect("list").count();
            assert_eq!(left, 0);
        }
    }

    #[test]
    fn deleted_file_keeps_its_lease_for_writing() {
        use std::os::fd::AsFd as _;
        let folder = folder();
        let path = folder.path().join("leased");
        fs::write(&path, "leased").expect("write");
        let file = File::open(&path).expect("open");
        fs::remove_file(&path).expect("remove");
        if let Err(error) = sys::fcntl::lease(file.as_fd(), true) {
            testkit::skip!("no leases here: {error}");
        }
        let mut world = World::default();
        let at = world.add(file);
        let refused = world.dump().expect_err("it is refused").to_string();
        assert!(
            refused.contains("would break its lease for writing"),
            "{refused}"
        );
        let kind = testkit::calls::leased(world.get(at).as_fd()).expect("asked");
        assert_eq!(kind, 1, "F_WRLCK");
    }

    #[test]
    fn deleted_file_whose_name_is_taken_leaves_the_other_alone() {
        let folder = folder();
        let path = folder.path().join("file");
        fs::write(&path, "old").expect("write");
        let file = File::open(&path).expect("open");
        fs::remove_file(&path).expect("remove");
        fs::write(&path, "new").expect("write");
        let mut world = World::default();
        let at = world.add(file);
        world.dump().expect("dump");
        world.restore().expect("restore");
        let mut text = String::new();
        File::from(world.take(at))
            .read_to_string(&mut text)
            .expect("read");
        assert_eq!(text, "old");
        assert_eq!(fs::read(&path).expect("read"), b"new");
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
    }

    #[test]
    fn who_made_a_file_without_a_name_still_shows_it() {
        let folder = folder();
        for access in [OFlags::RDWR, OFlags::WRONLY | OFlags::APPEND] {
            for bytes in [0usize, 7, 10_000] {
                let flags = OFlags::TMPFILE | access;
                let mode = rustix::fs::Mode::from_raw_mode(0o640);
                let made = rustix::fs::open(folder.path(), flags, mode).expect("O_TMPFILE");
                rustix::io::write(&made, &vec![b'x'; bytes]).expect("it is made to be written");
                let again = status::reopen(made.as_fd(), OFlags::RDONLY).expect("reopen");
                let wanted = rustix::fs::fcntl_getfl(&made).expect("flags");
                assert!(wanted.contains(OFlags::TMPFILE), "{wanted:?}");
                // The other one first: it has no part in how the file is made.
                let mut world = World::default();
                let (other, maker) = (world.add(again), world.add(made));
                for _ in 0..2 {
                    world.cycle();
                    let now = rustix::fs::fcntl_getfl(world.get(maker)).expect("flags");
                    assert_eq!(now, wanted);
                }
                let mut text = String::new();
                let mut other = File::from(world.take(other));
                other.read_to_string(&mut text).expect("read");
                assert_eq!(text, "x".repeat(bytes));
                rustix::io::write(world.get(maker), b"y").expect("it can be written still");
                other.read_to_string(&mut text).expect("read");
                assert_eq!(text, "x".repeat(bytes) + "y");
            }
        }
    }

    #[test]
    fn nameless_file_can_be_linked_afterwards() {
        let folder = folder();
        let flags = OFlags::TMPFILE | OFlags::RDWR;
        let mode = rustix::fs::Mode::RUSR;
        let file = rustix::fs::open(folder.path(), flags, mode).expect("O_TMPFILE");
        rustix::io::write(&file, b"text").expect("write");
        let mut world = World::default();
        let at = world.add(file);
        world.dump().expect("dump");
        world.restore().expect("restore");
        let path = folder.path().join("name");
        let source = format!("/proc/self/fd/{}", world.number(at));
        let follow = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(rustix::fs::CWD, source, rustix::fs::CWD, &path, follow).expect("link");
        assert_eq!(fs::read(&path).expect("read"), b"text");
    }

    #[test]
    fn deleted_file_over_the_limit_names_the_option() {
        let folder = folder();
        let path = folder.path().join("file");
        fs::write(&path, vec![1; 9000]).expect("write");
        let file = File::open(&path).expect("open");
        fs::remove_file(&path).expect("remove");
        let mut world = World::default();
        world.allow.ghost_limit_bytes = 8192;
        world.add(file);
        let error = world.dump().expect_err("too large").to_string();
        assert!(error.contains("--ghost-limit"), "{error}");
    }

    #[test]
    fn deleted_name_of_a_linked_file_needs_link_remap() {
        let folder = folder();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        fs::write(&path, "text").expect("write");
        fs::hard_link(&path, &other).expect("link");
        let file = File::open(&path).expect("open");
        fs::remove_file(&path).expect("remove");
        let mut world = World::default();
        let at = world.add(file);
        let error = world.dump().expect_err("not allowed").to_string();
        assert!(error.contains("--link-remap"), "{error}");

        world.allow.link_remap = true;
        world.dump().expect("dump");
        world.undo();
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);

        world.dump().expect("dump");
        world.restore().expect("restore");
        let mut text = String::new();
        let mut file = File::from(world.take(at));
        file.read_to_string(&mut text).expect("read");
        assert_eq!(text, "text");
        let (there, here) = (
            other.metadata().expect("stat"),
            file.metadata().expect("stat"),
        );
        assert_eq!(there.ino(), here.ino());
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
    }

    #[test]
    fn secret_memory_is_refused_by_name() {
        let secret = sys::memfd::secret();
        let Ok(secret) = secret else {
            testkit::skip!("no memfd_secret here");
        };
        let mut world = World::default();
        world.add(secret);
        let error = world.dump().expect_err("nobody can read it").to_string();
        assert!(
            error.contains("it is secret memory (memfd_secret)"),
            "{error}"
        );
    }

    #[test]
    fn files_of_the_system_in_proc_are_opened_again() {
        for path in ["/proc", "/proc/sys", "/proc/uptime"] {
            let mut world = World::default();
            world.add(File::open(path).expect("open"));
            world.dump().expect(path);
        }
    }
}
