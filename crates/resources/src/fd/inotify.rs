//! Watches of files and directories: inotify(7).
//!
//! The kernel tells of a watch the number, the inode, the events and mostly a handle of the file.
//! The path that the file has at the dump is where it is watched again.
//!
//! - Kept: each watch with its number and its events, at the path that the file has now.
//! - Refused: "it has unread events, which cannot be put back: try again"; "its watch …, of inode
//!   …, leads to no path" (`--irmap-scan-path`); "it has watches that are not understood".
//! - At a restore: "… is to be watched as number … and is watched as …" (two watches that are one
//!   file now).
//! - CRIU 4.2: kept, at the path or by the file's handle; unread events are dropped with a warning.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags, Stat};
use walkdir::WalkDir;

use super::{DumpContext, Info, Kind, Open, RestoreContext, decode, status, tags};
use crate::{Allow, Error, Result};

/// See the file.
pub struct Inotify;

/// An inotify instance without unread events.
#[derive(Clone, PartialEq, Message)]
struct Payload {
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
struct Shown {
    number: i32,
    mask: u32,
    inode: Inode,
}

/// What fdinfo says of a file that is watched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Inode {
    pub(super) number: u64,
    /// The file system's device number as the kernel writes it: 20 bits of minor number.
    pub(super) device: u32,
    /// The type of the handle, and the handle.
    handle: Option<(i32, Vec<u8>)>,
}

/// What a line of fdinfo says: "ino:2 sdev:fe00000 mask:…", in hexadecimal digits.
#[derive(Debug)]
pub(super) struct Fields<'a>(HashMap<&'a str, &'a str>);

impl<'a> Fields<'a> {
    pub(super) fn of(words: impl Iterator<Item = &'a str>) -> Self {
        Self(words.filter_map(|word| word.split_once(':')).collect())
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.0.get(name)?, 16).ok()
    }

    pub(super) fn small(&self, name: &str) -> Option<u32> {
        u32::try_from(self.number(name)?).ok()
    }
}

impl Shown {
    /// Reads what stands behind "inotify wd:".
    fn parse(line: &str) -> Option<Self> {
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

impl Inode {
    pub(super) fn parse(fields: &Fields<'_>) -> Option<Self> {
        let kind = fields.number("fhandle-type");
        let kind = kind.and_then(|kind| i32::try_from(kind).ok());
        let handle = fields.0.get("f_handle").and_then(|text| {
            let digits = text.as_bytes().chunks(2).map(std::str::from_utf8);
            let bytes = digits.map(|pair| u8::from_str_radix(pair.ok()?, 16).ok());
            bytes.collect::<Option<Vec<_>>>()
        });
        Some(Self {
            number: fields.number("ino")?,
            device: fields.small("sdev")?,
            handle: kind.zip(handle),
        })
    }

    /// Where it is now: by its handle, among the files that the tree has open, or below the
    /// folders that the caller names.
    pub(super) fn find(
        &self,
        mounts: &[(u32, u32, PathBuf)],
        cx: &dyn DumpContext,
    ) -> Option<PathBuf> {
        let allow = cx.allow();
        let by_handle = || self.by_handle(mounts).map(|(_, path)| path);
        let path = (!allow.force_irmap).then(by_handle).flatten();
        let path = path.or_else(|| self.among(cx.all()));
        path.or_else(|| self.below(&allow.irmap_scan_paths))
    }

    pub(super) fn device_numbers(&self) -> (u32, u32) {
        (self.device >> 20, self.device & 0xf_ffff)
    }

    /// The file, by its handle: for that, any file of its file system must be open.
    fn by_handle(&self, mounts: &[(u32, u32, PathBuf)]) -> Option<(Stat, PathBuf)> {
        let (kind, handle) = self.handle.as_ref()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let there = |mount: &&(u32, u32, PathBuf)| (mount.0, mount.1) == self.device_numbers();
        mounts.iter().filter(there).find_map(|(_, _, point)| {
            let mount = rustix::fs::open(point, flags, Mode::empty()).ok()?;
            let file = sys::inotify::open_by_handle(&mount, *kind, handle).ok()?;
            let stat = rustix::fs::fstat(&file).ok()?;
            let path = rustix::fs::readlink(link(file.as_fd()), Vec::new()).ok()?;
            let path = PathBuf::from(OsStr::from_bytes(path.as_bytes()));
            leads_to(&path, &stat).then_some((stat, path))
        })
    }

    /// The file among those that the tree has open, and the directories that they are in: for
    /// file systems whose handles cannot be opened.
    fn among(&self, known: &[Open<'_>]) -> Option<PathBuf> {
        let paths = known.iter().filter(|open| open.link.starts_with(b"/"));
        let paths = paths.map(|open| Path::new(OsStr::from_bytes(&open.link)));
        let mut seen = HashSet::new();
        let places = paths.flat_map(Path::ancestors);
        let places = places.filter(|path| seen.insert(*path));
        self.first_of(places.map(Path::to_owned))
    }

    /// The file among those below these, as far as they can be read.
    fn below(&self, roots: &[PathBuf]) -> Option<PathBuf> {
        let all = roots.iter().flat_map(WalkDir::new);
        self.first_of(all.flatten().map(walkdir::DirEntry::into_path))
    }

    fn first_of(&self, mut places: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
        let own = inotify::init(CreateFlags::CLOEXEC).ok()?;
        let wanted = Some((self.number, self.device));
        places.find(|path| Self::of(own.as_fd(), path) == wanted)
    }

    /// Inode and device of a file as the kernel shows them of a watch, which is not always what
    /// stat(2) says: `own` is an instance without watches.
    fn of(own: BorrowedFd<'_>, path: &Path) -> Option<(u64, u32)> {
        let mask = WatchFlags::DELETE_SELF | WatchFlags::DONT_FOLLOW;
        let number = inotify::add_watch(own, path, mask).ok()?;
        let info = format!("/proc/thread-self/fdinfo/{}", own.as_raw_fd());
        let info = std::fs::read_to_string(info);
        inotify::remove_watch(own, number).ok()?;
        let (info, _) = Info::parse(&info.ok()?)?;
        let inode = Shown::parse(info.field("inotify wd")?)?.inode;
        Some((inode.number, inode.device))
    }
}

pub(super) fn link(file: BorrowedFd<'_>) -> String {
    format!("/proc/thread-self/fd/{}", file.as_raw_fd())
}

fn leads_to(path: &Path, wanted: &Stat) -> bool {
    let stat = rustix::fs::lstat(path);
    stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (wanted.st_dev, wanted.st_ino))
}

/// Device numbers and mount points of everything that is mounted here.
pub(super) fn mounts() -> Result<Vec<(u32, u32, PathBuf)>> {
    let text = std::fs::read("/proc/self/mountinfo")
        .map_err(|error| Error::kernel("read /proc/self/mountinfo", error))?;
    Ok(text
        .split(|byte| *byte == b'\n')
        .filter_map(mount)
        .collect())
}

/// Reads a line of mountinfo (proc_pid_mountinfo(5)).
pub(super) fn mount(line: &[u8]) -> Option<(u32, u32, PathBuf)> {
    let mut words = line.split(|byte| *byte == b' ').skip(2);
    let (major, minor) = std::str::from_utf8(words.next()?).ok()?.split_once(':')?;
    let mut escaped = words.nth(1)?;
    let mut point = Vec::new();
    while let Some((first, rest)) = escaped.split_first() {
        let octal = rest.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        point.push(byte.unwrap_or(*first));
        escaped = if byte.is_some() { &rest[3..] } else { rest };
    }
    let point = PathBuf::from(OsStr::from_bytes(&point));
    Some((major.parse().ok()?, minor.parse().ok()?, point))
}

/// How many bytes of events wait to be read.
fn unread(own: BorrowedFd<'_>) -> Result<u64> {
    rustix::io::ioctl_fionread(own)
        .map_err(|error| Error::kernel("ask an inotify instance for its events", error))
}

/// The instance's payload.
fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Payload> {
    if unread(open.own()?)? != 0 {
        let why = "it has unread events, which cannot be put back: try again";
        return Err(open.unsupported(why, None));
    }
    let lines = open.info.lines("inotify wd").map(Shown::parse);
    let shown = lines.collect::<Option<Vec<_>>>();
    let shown =
        shown.ok_or_else(|| open.unsupported("it has watches that are not understood", None))?;
    let mounts = if shown.is_empty() {
        Vec::new()
    } else {
        mounts()?
    };
    let watch = |shown: Shown| {
        let path = shown.inode.find(&mounts, cx);
        let path = path.ok_or_else(|| {
            let (number, inode) = (shown.number, shown.inode.number);
            let why = format!("its watch {number}, of inode {inode}, leads to no path");
            open.unsupported(&why, Some("--irmap-scan-path"))
        })?;
        Ok(Watch {
            number: shown.number,
            mask: shown.mask & ASKED.bits(),
            path: path.into_os_string().into_encoded_bytes(),
        })
    };
    let watches = shown.into_iter().map(watch).collect::<Result<_>>();
    let mut payload = Payload {
        flags: open.info.flags,
        watches: watches?,
    };
    payload.watches.sort_by_key(|watch| watch.number);
    Ok(payload)
}

fn checked(payload: &[u8]) -> Result<Payload> {
    let payload: Payload = decode(&Inotify, payload)?;
    let mut last = 0;
    for watch in &payload.watches {
        let asked = watch.mask & !ASKED.bits() == 0 && watch.mask != 0;
        let path = watch.path.starts_with(b"/") && !watch.path.contains(&0);
        if watch.number <= last || !asked || !path {
            return Err(Error::corrupt("inotify", "a watch that makes no sense"));
        }
        last = watch.number;
    }
    Ok(payload)
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
    fn tag(&self) -> u16 {
        tags::INOTIFY
    }

    fn name(&self) -> &'static str {
        "inotify"
    }

    fn claims(&self, open: &Open<'_>) -> bool {
        open.link == b"anon_inode:inotify"
    }

    fn dump(&self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Vec<u8>> {
        Ok(read(open, cx)?.encode_to_vec())
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let payload = checked(payload)?;
        let watches = payload.watches.iter().map(|watch| {
            let path = String::from_utf8_lossy(&watch.path);
            format!("{}:{path}", watch.number)
        });
        Ok(format!(
            "watches=[{}]",
            watches.collect::<Vec<_>>().join(" ")
        ))
    }

    fn open(&self, payload: &[u8], _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let payload = checked(payload)?;
        let flags = status::checked(self.name(), payload.flags)?;
        let mut how = CreateFlags::CLOEXEC;
        how.set(CreateFlags::NONBLOCK, flags.contains(OFlags::NONBLOCK));
        let own =
            inotify::init(how).map_err(|error| Error::kernel("make an inotify instance", error))?;
        status::set_rest(&own, flags)?;
        Ok(own)
    }

    fn finish(
        &self,
        payload: &[u8],
        own: BorrowedFd<'_>,
        _cx: &mut dyn RestoreContext,
    ) -> Result<()> {
        let payload = checked(payload)?;
        payload.watches.iter().try_for_each(|watch| add(own, watch))
    }

    /// What was opened and made since for the tree itself is none of its events.
    fn resume(&self, payload: &[u8], own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        let payload = checked(payload)?;
        let failed = |error| Error::kernel("empty an inotify instance", error);
        while let waiting @ 1.. = unread(own)? {
            let mut events = vec![0; usize::try_from(waiting).unwrap_or(1 << 16)];
            rustix::io::read(own, &mut events[..]).map_err(failed)?;
        }
        let once = |watch: &&Watch| watch.mask & WatchFlags::ONESHOT.bits() != 0;
        let mut watches = payload.watches.iter().filter(once);
        watches.try_for_each(|watch| add(own, watch))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::mem::MaybeUninit;

    use super::super::testing::World;
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
        assert_eq!(events(world.get(at)).len(), 1);
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
    fn files_without_handles_are_found_by_what_is_open() {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("file");
        let file = OwnedFd::from(fs::File::create(&path).expect("create"));
        let link = path.as_os_str().as_encoded_bytes().to_vec();
        let stat = rustix::fs::fstat(&file).expect("stat");
        let fetch = || Err(Error::unsupported(1, "nothing is fetched"));
        let id = super::super::DescriptionId(0);
        let known = [Open::new(id, (1, 3), (link, stat, Info::default()), fetch)];
        let own = instance();
        for place in [&*path, folder.path(), Path::new("/")] {
            let (number, device) = Inode::of(own.as_fd(), place).expect("it is there");
            let shown = Inode {
                number,
                device,
                handle: None,
            };
            assert_eq!(shown.among(&known).as_deref(), Some(place));
            let other = Inode { number: 0, ..shown };
            assert_eq!(other.among(&known), None);
        }
    }

    #[test]
    fn lines_of_fdinfo_and_mountinfo_are_read() {
        let line = "1a ino:2c08 sdev:800013 mask:800afce ignored_mask:0 fhandle-bytes:8 \
                    fhandle-type:1 f_handle:082c0000a1";
        let shown = Shown::parse(line).expect("well formed");
        assert_eq!((shown.number, shown.inode.number), (26, 0x2c08));
        assert_eq!(shown.inode.device_numbers(), (8, 0x13));
        assert_eq!(shown.inode.handle, Some((1, vec![8, 0x2c, 0, 0, 0xa1])));
        let short = Shown::parse("1 ino:2 sdev:3 mask:4").expect("well formed");
        assert_eq!(short.inode.handle, None);
        assert_eq!(Shown::parse("x ino:2 sdev:3 mask:4"), None);
        let line = br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(mount(line), Some((98, 0, PathBuf::from("/mnt 2"))));
        assert_eq!(mount(b"36 35 98"), None);
    }
}
