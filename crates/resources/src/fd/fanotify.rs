//! Groups that are told of files, directories, mounts and file systems: fanotify(7).
//!
//! The kernel tells of each mark what it is on, as of an inotify watch. Groups that decide on what
//! others may do are refused: whoever waits for their answer would get it of nobody.
//!
//! - Kept: the flags of the group and of its events; marks on files, mounts and file systems, with
//!   what they ignore.
//! - Refused: "it is asked before others use files, who would wait for it"; unread events (see
//!   there); "its mark on inode … leads to no path" (`--irmap-scan-path`); "its mark on a mount or
//!   file system leads to no path"; "it has marks that are not understood"; "its
//!   flags … are not known".
//! - CRIU 4.2: keeps marks of files and of mounts; unread events are dropped with a warning.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use sys::fanotify;
use sys::mountinfo::{self, Mount};

use super::watched::{Fields, Inode, device_numbers, link, mounts};
use super::{DumpContext, Info, Kind, Open, RestoreContext, Stage, status, tags, unread};
use crate::ledger::fdinfo;
use crate::{Allow, Error, Result};

/// See the file.
pub struct Fanotify;

/// A group without unread events.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Access mode and status flags.
    #[prost(uint32, tag = "1")]
    flags: u32,
    /// The flags of fanotify_init(2).
    #[prost(uint32, tag = "2")]
    init: u32,
    /// The flags of the descriptors that come with events.
    #[prost(uint32, tag = "3")]
    event_flags: u32,
    /// What it is told of.
    #[prost(message, repeated, tag = "4")]
    marks: Vec<Mark>,
}

/// A mark.
#[derive(Clone, PartialEq, Message)]
struct Mark {
    /// What it is on: `FAN_MARK_INODE` (0), `FAN_MARK_MOUNT`, `FAN_MARK_FILESYSTEM`.
    #[prost(uint32, tag = "1")]
    on: u32,
    /// Where that is.
    #[prost(bytes = "vec", tag = "2")]
    path: Vec<u8>,
    /// The events, as given to fanotify_mark(2).
    #[prost(uint64, tag = "3")]
    mask: u64,
    /// Those that it is not told of.
    #[prost(uint64, tag = "4")]
    ignored: u64,
    /// `FAN_MARK_IGNORED_SURV_MODIFY`, `FAN_MARK_EVICTABLE`, `FAN_MARK_IGNORE`.
    #[prost(uint32, tag = "5")]
    flags: u32,
}

const INODE: u32 = 0;
const MOUNT: u32 = 0x10;
const FILE_SYSTEM: u32 = 0x100;
/// `FAN_MARK_IGNORED_MASK`, and with `FAN_MARK_IGNORE` the newer way to say so.
const IGNORED_MASK: u32 = libc::FAN_MARK_IGNORED_MASK;
const SURVIVES: u32 = 0x40;
const EVICTABLE: u32 = 0x200;
const IGNORE: u32 = 0x400;
/// The classes of groups that are asked.
const ASKED: u32 = 0xc;
/// What the link of a group in /proc/PID/fd says.
pub(super) const LINK: &[u8] = b"anon_inode:[fanotify]";
/// Why a group that is asked is not saved.
pub(super) const IS_ASKED: &str = "it is asked before others use files, who would wait for it";
/// Every flag of fanotify_init(2) that is kept.
const INIT_KNOWN: u32 = fdinfo::GROUP_FLAGS.bits() as u32;
/// Every event that such a group can be told of, and the two flags among them.
const EVENTS: u64 = 0x5800_9fff;
/// What descriptors of events can be opened with: as open(2).
const EVENT_FLAGS: u32 = 0o7_177_777;

/// What fdinfo says of a mark.
struct Shown {
    target: Target,
    mask: u64,
    ignored: u64,
    flags: u32,
}

enum Target {
    Inode(Inode),
    /// By its number in mountinfo.
    Mount(u64),
    /// By its device number, as of [`Inode`].
    FileSystem(u32),
}

impl Shown {
    /// Reads what stands behind "fanotify " of a mark.
    fn parse(line: &str) -> Option<Self> {
        let fields = Fields::of(line.split_whitespace());
        let target = match (fields.number("ino"), fields.number("mnt_id")) {
            (Some(_), _) => Target::Inode(Inode::parse(&fields)?),
            (None, Some(mount)) => Target::Mount(mount),
            (None, None) => Target::FileSystem(fields.small("sdev")?),
        };
        Some(Self {
            target,
            mask: fields.number("mask")?,
            ignored: fields.number("ignored_mask")?,
            flags: fields.small("mflags")?,
        })
    }
}

/// What fdinfo says of a group and then of each of its marks.
fn lines(info: &Info) -> impl Iterator<Item = &str> {
    let lines = info.rest.lines();
    lines.filter_map(|line| line.strip_prefix("fanotify "))
}

/// Whether others wait for what a group says.
pub(super) fn is_asked(info: &Info) -> bool {
    let group = lines(info).next().and_then(group);
    group.is_some_and(|(init, _)| init & ASKED != 0)
}

/// The flags of the group and of its events: "flags:1 event-flags:8000".
fn group(line: &str) -> Option<(u32, u32)> {
    let fields = Fields::of(line.split_whitespace());
    Some((fields.small("flags")?, fields.small("event-flags")?))
}

/// Where the mount with this number is, if nothing is mounted over it.
fn mount_point(number: u64) -> Option<PathBuf> {
    let mut mounts = mountinfo::read().ok()?.into_iter();
    let point = mounts.find(|mount| mount.id == number)?.point;
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let seen = rustix::fs::statx(CWD, &point, flags, StatxFlags::MNT_ID).ok()?;
    (seen.stx_mnt_id == number).then_some(point)
}

/// A place on the file system with this device number.
fn place_on(device: u32, mounts: &[Mount]) -> Option<PathBuf> {
    let numbers = device_numbers(device);
    let there = mounts.iter().filter(|mount| mount.device == numbers);
    let mut points = there.map(|mount| &mount.point);
    let number = rustix::fs::makedev(numbers.0, numbers.1);
    let is_on = |point: &&PathBuf| {
        // Another one may be mounted over it.
        rustix::fs::lstat(point.as_path()).is_ok_and(|stat| stat.st_dev == number)
    };
    points.find(is_on).cloned()
}

/// How many bytes of events wait to be read, without what the kernel tells of names.
fn waiting(own: BorrowedFd<'_>) -> Result<u64> {
    rustix::io::ioctl_fionread(own)
        .map_err(|error| Error::kernel("ask a fanotify group for its events", error))
}

/// The group's record.
fn read(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
    let unknown = || open.unsupported("it has marks that are not understood", None);
    let mut lines = lines(&open.info);
    let (init, event_flags) = lines.next().and_then(group).ok_or_else(unknown)?;
    if init & ASKED != 0 {
        return Err(open.unsupported(IS_ASKED, None));
    }
    // Of others that was seen when the tree was stopped.
    if open.in_flight {
        unread::check_open(open, cx.allow(), "events", waiting(open.own()?)?)?;
    }
    let unknown_flags = init & !INIT_KNOWN;
    if unknown_flags != 0 {
        let why = format!("its flags {unknown_flags:#x} are not known");
        return Err(open.unsupported(&why, None));
    }
    let shown = lines.map(Shown::parse).collect::<Option<Vec<_>>>();
    let shown = shown.ok_or_else(unknown)?;
    let inodes = shown.iter().filter_map(|shown| match &shown.target {
        Target::Inode(inode) => Some(inode.clone()),
        _ => None,
    });
    cx.find_watched(&inodes.collect::<Vec<_>>())?;
    let mounts = mounts()?;
    let mark = |shown: Shown| {
        let (on, path) = match &shown.target {
            Target::Inode(inode) => (INODE, cx.watched().path(inode).map(Path::to_owned)),
            Target::Mount(number) => (MOUNT, mount_point(*number)),
            Target::FileSystem(device) => (FILE_SYSTEM, place_on(*device, &mounts)),
        };
        let path = path.ok_or_else(|| match &shown.target {
            Target::Inode(inode) => {
                let why = format!("its mark on inode {} leads to no path", inode.number);
                open.unsupported(&why, Some("--irmap-scan-path"))
            }
            _ => open.unsupported("its mark on a mount or file system leads to no path", None),
        })?;
        let mark = Mark {
            on,
            path: path.into_os_string().into_encoded_bytes(),
            mask: shown.mask,
            ignored: shown.ignored,
            flags: shown.flags,
        };
        mark.nonsense().map_or(Ok(mark), |_| Err(unknown()))
    };
    let record = Record {
        flags: open.info.flags,
        init,
        event_flags,
        marks: shown.into_iter().map(mark).collect::<Result<_>>()?,
    };
    // The kernel lists them latest first.
    let marks = record.marks.iter().rev().cloned().collect();
    let record = Record { marks, ..record };
    record.nonsense().map_or(Ok(record), |_| Err(unknown()))
}

impl Record {
    /// What is wrong with it, if something is.
    fn nonsense(&self) -> Option<&'static str> {
        if self.init & !INIT_KNOWN != 0 || self.init & ASKED != 0 {
            return Some("flags that make no sense");
        }
        if self.event_flags & !EVENT_FLAGS != 0 {
            return Some("flags of events that make no sense");
        }
        self.marks.iter().find_map(Mark::nonsense)
    }
}

impl Mark {
    fn nonsense(&self) -> Option<&'static str> {
        let on = [INODE, MOUNT, FILE_SYSTEM].contains(&self.on);
        let flags = self.flags & !(SURVIVES | EVICTABLE | IGNORE) == 0;
        let events = (self.mask | self.ignored) & !EVENTS == 0 && self.mask | self.ignored != 0;
        let path = self.path.starts_with(b"/") && !self.path.contains(&0);
        (!(on && flags && events && path)).then_some("a mark that makes no sense")
    }

    /// Marks it again.
    fn add(&self, own: BorrowedFd<'_>) -> Result<()> {
        let path = Path::new(OsStr::from_bytes(&self.path));
        let doing = || format!("mark {} again", path.display());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty());
        let file = file.map_err(|errno| Error::kernel(doing(), errno))?;
        let place = CString::new(link(file.as_fd())).unwrap_or_default();
        let add = |flags: u32, mask: u64| {
            let flags = fanotify::ADD | self.on | self.flags & EVICTABLE | flags;
            fanotify::mark(own, flags, mask, &place).map_err(|error| Error::kernel(doing(), error))
        };
        if self.mask != 0 {
            add(0, self.mask)?;
        }
        if self.ignored != 0 {
            let how = match self.flags & IGNORE {
                0 => IGNORED_MASK,
                newer => newer,
            };
            add(how | self.flags & SURVIVES, self.ignored)?;
        }
        Ok(())
    }
}

impl Kind for Fanotify {
    type Record = Record;
    const TAG: u16 = tags::FANOTIFY;
    const NAME: &'static str = "fanotify";

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        read(open, cx)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        match record.nonsense() {
            Some(what) => Err(Error::corrupt(Self::NAME, what)),
            None => Ok(()),
        }
    }

    fn describe(record: &Record) -> String {
        let marks = record.marks.iter().map(|mark| {
            let on = match mark.on {
                MOUNT => "mount:",
                FILE_SYSTEM => "fs:",
                _ => "",
            };
            format!("{on}{}", String::from_utf8_lossy(&mark.path))
        });
        let marks = marks.collect::<Vec<_>>().join(" ");
        format!("flags={:#x} marks=[{marks}]", record.init)
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let own = fanotify::init(record.init, record.event_flags)
            .map_err(|error| Error::kernel("make a fanotify group", error))?;
        status::set(&own, flags)?;
        Ok(own)
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.marks.iter().try_for_each(|mark| mark.add(own))
    }

    /// What was opened and made since for the tree itself is none of its events.
    fn stages(_record: &Record, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    fn act(_record: &Record, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        fanotify::forget_events(own).map_err(|error| Error::kernel("empty a fanotify group", error))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::testing::World;
    use super::*;

    const MODIFIED: u64 = 2;
    const OPENED: u64 = 0x20;
    const CREATED: u64 = 0x100;
    const ON_DIRECTORIES: u64 = 0x4000_0000;
    const ON_CHILDREN: u64 = 0x0800_0000;
    /// `FAN_REPORT_DFID_NAME`
    const WITH_NAMES: u32 = libc::FAN_REPORT_DFID_NAME;
    const NONBLOCK: u32 = 2;

    fn mark(own: &OwnedFd, flags: u32, mask: u64, path: &Path) {
        let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
        fanotify::mark(own, fanotify::ADD | flags, mask, &path).expect("marked");
    }

    /// Whether something came, which is gone then.
    fn is_told(own: &OwnedFd) -> bool {
        let told = waiting(own.as_fd()).expect("asked") > 0;
        fanotify::forget_events(own).expect("emptied");
        told
    }

    #[test]
    fn marks_and_what_they_ignore_survive() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let (file, sub) = (folder.path().join("file"), folder.path().join("sub"));
        fs::write(&file, "").expect("write");
        fs::create_dir(&sub).expect("make a folder");
        let group = |flags| fanotify::init(flags | NONBLOCK, 0o100_000).expect("a group");
        let named = group(WITH_NAMES | 1);
        mark(&named, 0, CREATED | ON_CHILDREN | ON_DIRECTORIES, &sub);
        mark(&named, EVICTABLE, MODIFIED, &file);
        let plain = group(0x30);
        mark(&plain, 0, MODIFIED | OPENED, &file);
        mark(&plain, IGNORED_MASK | SURVIVES, OPENED, &file);
        let newer = group(0);
        mark(&newer, 0, OPENED | ON_CHILDREN, folder.path());
        mark(
            &newer,
            IGNORE | SURVIVES,
            MODIFIED | ON_CHILDREN,
            folder.path(),
        );
        let mut world = World::default();
        let [named, plain, newer] = [named, plain, newer].map(|own| world.add(own));
        for _ in 0..2 {
            world.cycle();
            assert!(
                ![named, plain, newer]
                    .iter()
                    .any(|at| is_told(world.get(*at)))
            );
            drop(fs::File::open(&file).expect("open"));
            assert!(!is_told(world.get(plain)), "that it was opened is ignored");
            assert!(is_told(world.get(newer)));
            fs::write(&file, "more").expect("write");
            assert!(is_told(world.get(plain)) && is_told(world.get(named)));
            fs::create_dir(sub.join("new")).expect("make a folder");
            assert!(is_told(world.get(named)));
            assert!(!is_told(world.get(plain)));
            fs::remove_dir(sub.join("new")).expect("remove");
            is_told(world.get(newer));
        }
        let told = world.describe(named);
        assert!(told.starts_with("fanotify flags=0xc03 marks=[/"), "{told}");
    }

    #[test]
    fn mounts_and_file_systems_are_marked_again() {
        testkit::needs_root!();
        let whole = fanotify::init(WITH_NAMES | NONBLOCK, 0).expect("a group");
        mark(&whole, FILE_SYSTEM, 0x40, Path::new("/dev/shm"));
        let mounted = fanotify::init(NONBLOCK, 0).expect("a group");
        mark(&mounted, MOUNT, 0x8 | ON_DIRECTORIES, Path::new("/dev/shm"));
        let mut world = World::default();
        let [whole, mounted] = [whole, mounted].map(|own| world.add(own));
        world.cycle();
        assert!(world.describe(whole).contains("fs:/dev/shm"));
        assert!(world.describe(mounted).contains("mount:/dev/shm"));
        let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
        fs::write(file.path(), "written").expect("write");
        assert!(is_told(world.get(mounted)));
        drop(file);
    }

    #[test]
    fn who_is_asked_and_who_has_not_read_is_refused_by_name() {
        testkit::needs_root!();
        let mut world = World::default();
        world.add(fanotify::init(fanotify::CLASS_CONTENT, 0).expect("a group"));
        let error = world.dump().expect_err("it is asked").to_string();
        assert!(error.contains("asked before others use files"), "{error}");
        let file = tempfile::NamedTempFile::new().expect("a file");
        let own = fanotify::init(NONBLOCK, 0).expect("a group");
        mark(&own, 0, OPENED, file.path());
        let mut world = World::default();
        let at = world.add(own);
        drop(fs::File::open(file.path()).expect("open"));
        let error = world.dump().expect_err("an event waits").to_string();
        assert!(error.contains("unread events"), "{error}");
        assert!(is_told(world.get(at)));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mark = Mark {
            on: INODE,
            path: b"/x".to_vec(),
            mask: 1,
            ..Mark::default()
        };
        let record = |mark: &Mark| Record {
            marks: vec![mark.clone()],
            ..Record::default()
        };
        assert!(Fanotify::check(&record(&mark)).is_ok());
        let marks = [
            Mark {
                on: 1,
                ..mark.clone()
            },
            Mark {
                path: b"x".to_vec(),
                ..mark.clone()
            },
            Mark {
                path: b"/x\0".to_vec(),
                ..mark.clone()
            },
            Mark {
                mask: 0,
                ..mark.clone()
            },
            Mark {
                mask: fanotify::OPEN_ASKED,
                ..mark.clone()
            },
            Mark {
                flags: 0x80,
                ..mark.clone()
            },
        ];
        for mark in marks {
            assert!(Fanotify::check(&record(&mark)).is_err(), "{mark:?}");
        }
        let sound = record(&mark);
        for record in [
            Record {
                init: 4,
                ..sound.clone()
            },
            Record {
                init: 1 << 31,
                ..sound.clone()
            },
            Record {
                event_flags: 1 << 31,
                ..sound
            },
        ] {
            assert!(Fanotify::check(&record).is_err(), "{record:?}");
        }
    }
}
