//! Watches of files and directories: inotify(7).
//!
//! The kernel tells of a watch the number, the inode, the events and mostly a handle of the file.
//! The path that the file has at the dump is where it is watched again ([`super::watched`]).
//!
//! - Kept: each watch with its number and its events, at the path that the file has now.
//! - Refused: unread events (see there); "its watch …, of inode …, leads to no path"
//!   (`--irmap-scan-path`); "it has watches that are not understood".
//! - At a restore: "… is to be watched as number … and is watched as …" (two watches that are one
//!   file now).
//! - CRIU 4.2: kept, at the path or by the file's handle; unread events are dropped with a warning.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use prost::Message;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};

use super::watched::{Fields, Inode, link};
use super::{DumpContext, Kind, Open, RestoreContext, Stage, status, tags, unread};
use crate::{Allow, Error, Result};

/// See the file.
pub struct Inotify;

/// An inotify instance without unread events.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Access mode and status flags.
    #[prost(uint32, tag = "1")]
    flags: u32,
    /// What it watches, by number.
    #[prost(message, repeated, tag = "2")]
    watches: Vec<Watch>,
}

/// A watch.
#[derive(Clone, PartialEq, Message)]
struct Watch {
    /// Its number.
    #[prost(int32, tag = "1")]
    number: i32,
    /// The events and how they are reported, as given to inotify_add_watch(2).
    #[prost(uint32, tag = "2")]
    mask: u32,
    /// Where the file is.
    #[prost(bytes = "vec", tag = "3")]
    path: Vec<u8>,
}

/// What a program can ask for; the kernel shows some bits of its own besides.
const ASKED: WatchFlags = WatchFlags::ALL_EVENTS
    .union(WatchFlags::EXCL_UNLINK)
    .union(WatchFlags::ONESHOT);

/// What fdinfo says of a watch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) number: i32,
    mask: u32,
    pub(super) inode: Inode,
}

/// The target of an instance's link in /proc/PID/fd.
pub(super) const LINK: &[u8] = b"anon_inode:inotify";

impl Shown {
    /// Reads what stands behind "inotify wd:".
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let number = i32::from_str_radix(words.next()?, 16).ok()?;
        let fields = Fields::of(words);
        Some(Self {
            number,
            mask: fields.small("mask")?,
            inode: Inode::parse(&fields)?,
        })
    }
}

/// How many bytes of events wait to be read.
fn waiting(own: BorrowedFd<'_>) -> Result<u64> {
    rustix::io::ioctl_fionread(own)
        .map_err(|error| Error::kernel("ask an inotify instance for its events", error))
}

/// The instance's record.
fn read(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
    // Of others that was seen when the tree was stopped.
    if open.in_flight {
        unread::check_open(open, cx.allow(), "events", waiting(open.own()?)?)?;
    }
    let lines = open.info.lines("inotify wd").map(Shown::parse);
    let shown = lines.collect::<Option<Vec<_>>>();
    let shown =
        shown.ok_or_else(|| open.unsupported("it has watches that are not understood", None))?;
    let inodes = shown.iter().map(|shown| shown.inode.clone());
    cx.find_watched(&inodes.collect::<Vec<_>>())?;
    let watch = |shown: Shown| {
        let path = cx.watched().path(&shown.inode);
        let path = path.ok_or_else(|| {
            let (number, inode) = (shown.number, shown.inode.number);
            let why = format!("its watch {number}, of inode {inode}, leads to no path");
            open.unsupported(&why, Some("--irmap-scan-path"))
        })?;
        Ok(Watch {
            number: shown.number,
            mask: shown.mask & ASKED.bits(),
            path: path.as_os_str().as_bytes().to_vec(),
        })
    };
    let watches = shown.into_iter().map(watch).collect::<Result<_>>();
    let mut record = Record {
        flags: open.info.flags,
        watches: watches?,
    };
    record.watches.sort_by_key(|watch| watch.number);
    Ok(record)
}

/// Watches a file again.
fn add(own: BorrowedFd<'_>, watch: &Watch) -> Result<()> {
    let path = Path::new(OsStr::from_bytes(&watch.path));
    let failed = |error| Error::kernel(format!("watch {}", path.display()), error);
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let next = sys::inotify::set_next_watch(own, watch.number);
    next.map_err(|error| Error::kernel("choose the number of an inotify watch", error))?;
    let mask = WatchFlags::from_bits_retain(watch.mask);
    let number = inotify::add_watch(own, link(file.as_fd()), mask).map_err(failed)?;
    if number == watch.number {
        return Ok(());
    }
    let what = format!(
        "{} is to be watched as number {} and is watched as {number}",
        path.display(),
        watch.number
    );
    Err(Error::Mismatch { what })
}

impl Kind for Inotify {
    type Record = Record;
    const TAG: u16 = tags::INOTIFY;
    const NAME: &'static str = "inotify";

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        read(open, cx)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let mut last = 0;
        for watch in &record.watches {
            let asked = watch.mask & !ASKED.bits() == 0 && watch.mask != 0;
            let path = watch.path.starts_with(b"/") && !watch.path.contains(&0);
            if watch.number <= last || !asked || !path {
                return Err(Error::corrupt(Self::NAME, "a watch that makes no sense"));
            }
            last = watch.number;
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let watches = record.watches.iter().map(|watch| {
            let path = String::from_utf8_lossy(&watch.path);
            format!("{}:{path}", watch.number)
        });
        format!("watches=[{}]", watches.collect::<Vec<_>>().join(" "))
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let mut how = CreateFlags::CLOEXEC;
        how.set(CreateFlags::NONBLOCK, flags.contains(OFlags::NONBLOCK));
        let own =
            inotify::init(how).map_err(|error| Error::kernel("make an inotify instance", error))?;
        status::set_rest(&own, flags)?;
        Ok(own)
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.watches.iter().try_for_each(|watch| add(own, watch))
    }

    /// What was opened and made since for the tree itself is none of its events.
    fn stages(_record: &Record, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    fn act(record: &Record, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        let failed = |error| Error::kernel("empty an inotify instance", error);
        while let bytes @ 1.. = waiting(own)? {
            let mut events = vec![0; usize::try_from(bytes).unwrap_or(1 << 16)];
            rustix::io::read(own, &mut events[..]).map_err(failed)?;
        }
        let once = |watch: &&Watch| watch.mask & WatchFlags::ONESHOT.bits() != 0;
        let mut watches = record.watches.iter().filter(once);
        watches.try_for_each(|watch| add(own, watch))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::mem::MaybeUninit;

    use super::super::testing::World;
    use super::super::watched::device_numbers;
    use super::*;

    fn instance() -> OwnedFd {
        inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).expect("inotify")
    }

    /// The numbers of the watches that have events, and the names in those.
    fn events(own: &OwnedFd) -> Vec<(i32, String)> {
        let mut room = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(own, &mut room);
        let mut found = Vec::new();
        while let Ok(event) = reader.next() {
            let name = event.file_name().unwrap_or_default();
            found.push((event.wd(), name.to_string_lossy().into_owned()));
        }
        found
    }

    #[test]
    fn watches_and_their_numbers_survive() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let (file, sub) = (folder.path().join("file"), folder.path().join("a b"));
        fs::write(&file, "").expect("write");
        fs::create_dir(&sub).expect("make a folder");
        let own = instance();
        let add = |path: &Path, mask| inotify::add_watch(&own, path, mask).expect("watch");
        let gone = add(folder.path(), WatchFlags::CREATE);
        inotify::remove_watch(&own, gone).expect("remove");
        add(&sub, WatchFlags::CREATE | WatchFlags::EXCL_UNLINK);
        add(&file, WatchFlags::MODIFY | WatchFlags::ONESHOT);
        assert_eq!(events(&own).len(), 1, "that the first was removed");
        let mut world = World::default();
        let at = world.add(own);
        for round in 0..2 {
            world.cycle();
            let own = world.get(at);
            assert_eq!(events(own), []);
            fs::write(sub.join(format!("new {round}")), "").expect("write");
            assert_eq!(events(own), [(2, format!("new {round}"))]);
        }
        fs::write(&file, "more").expect("write");
        let once = events(world.get(at));
        assert_eq!(
            once,
            [(3, String::new()), (3, String::new())],
            "modified, removed"
        );
        let told = world.describe(at);
        assert!(told.contains("2:/") && told.contains("a b 3:/"), "{told}");
    }

    #[test]
    fn what_cannot_be_watched_again_is_refused_by_name() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("file");
        let held = fs::File::create(&path).expect("create");
        let own = instance();
        inotify::add_watch(&own, &path, WatchFlags::MODIFY).expect("watch");
        let mut world = World::default();
        let at = world.add(own);
        fs::write(&path, "an event").expect("write");
        let error = world.dump().expect_err("unread").to_string();
        assert!(error.contains("unread events"), "{error}");
        world.allow.drop_events = true;
        world.dump().expect("they are dropped");
        assert_eq!(events(world.get(at)).len(), 1, "of the image alone");
        fs::remove_file(&path).expect("remove");
        let error = world.dump().expect_err("deleted").to_string();
        assert!(error.contains("its watch 1, of inode"), "{error}");
        drop(held);
    }

    #[test]
    fn files_are_found_below_the_paths_that_are_named() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let deep = folder.path().join("one/two");
        fs::create_dir_all(&deep).expect("make folders");
        fs::write(deep.join("file"), "").expect("write");
        let own = instance();
        inotify::add_watch(&own, deep.join("file"), WatchFlags::MODIFY).expect("watch");
        let mut world = World::default();
        let at = world.add(own);
        world.allow.force_irmap = true;
        let error = world.dump().expect_err("it is not looked for there");
        assert!(error.to_string().contains("leads to no path"), "{error}");
        world.allow.irmap_scan_paths = vec!["/nothing".into(), folder.path().into()];
        world.cycle();
        assert!(world.describe(at).contains("one/two/file"));
    }

    #[test]
    fn a_file_that_is_gone_at_the_restore_is_named() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("make a folder");
        let own = instance();
        inotify::add_watch(&own, folder.path(), WatchFlags::CREATE).expect("watch");
        let mut world = World::default();
        world.add(own);
        world.dump().expect("dump");
        let name = folder.path().display().to_string();
        drop(folder);
        let error = world.restore().expect_err("it is gone").to_string();
        assert!(error.contains(&name), "{error}");
    }

    #[test]
    fn lines_of_fdinfo_are_read() {
        let line = "1a ino:2c08 sdev:800013 mask:800afce ignored_mask:0 fhandle-bytes:8 \
                    fhandle-type:1 f_handle:082c0000a1";
        let shown = Shown::parse(line).expect("well formed");
        assert_eq!((shown.number, shown.inode.number), (26, 0x2c08));
        assert_eq!(device_numbers(shown.inode.device), (8, 0x13));
        assert_eq!(shown.inode.handle, Some((1, vec![8, 0x2c, 0, 0, 0xa1])));
        let short = Shown::parse("1 ino:2 sdev:3 mask:4").expect("well formed");
        assert_eq!(short.inode.handle, None);
        assert_eq!(Shown::parse("x ino:2 sdev:3 mask:4"), None);
    }
}
