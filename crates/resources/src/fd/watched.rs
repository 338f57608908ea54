//! Files that groups of inotify(7) and fanotify(7) watch, and where they are: the kernel tells of
//! a watch the inode and mostly a handle of the file.
//!
//! All files that a tree watches are looked for at once, in this order: where a walk has found
//! them; by their handles, where the file system opens those; among the files that the tree uses,
//! and the directories above them. A walk looks for all that is missing, below the directories that
//! the caller names and on the file system itself, while the tree runs ([`Watched::walk`]); when it
//! is stopped again, that the files are still there is checked.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use sys::mountinfo::{self, Mount};
use walkdir::WalkDir;

use super::{Info, Open};
use crate::{Allow, Error, Result};

/// How many files are compared at a time: so many watches one instance has meanwhile.
const BATCH: usize = 1024;

/// The identity of a watched file in the kernel: the inode's number, and the file system's.
pub(super) type Key = (u64, u32);

/// A watched file, as fdinfo shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub(super) number: u64,
    /// The file system's device number as the kernel writes it: 20 bits of minor number.
    pub(super) device: u32,
    /// The type of the handle, and the handle.
    pub(super) handle: Option<(i32, Vec<u8>)>,
}

/// The fields of a line of fdinfo: "ino:2 sdev:fe00000 mask:…", in hexadecimal digits.
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

    pub(super) fn key(&self) -> Key {
        (self.number, self.device)
    }
}

/// Major and minor number of a device as the kernel writes it.
pub(super) fn device_numbers(device: u32) -> (u32, u32) {
    (device >> 20, device & 0xf_ffff)
}

/// The files that a description watches, as its link and its fdinfo say.
#[must_use]
pub fn inodes(link: &[u8], info: &Info) -> Vec<Inode> {
    if ![super::inotify::LINK, super::fanotify::LINK].contains(&link) {
        return Vec::new();
    }
    let of_inotify = info.lines("inotify wd");
    let of_fanotify = info.rest.lines().filter(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("fanotify") && words.any(|word| word.starts_with("ino:"))
    });
    let lines = of_inotify.chain(of_fanotify);
    let inodes = lines.map(|line| Inode::parse(&Fields::of(line.split_whitespace())));
    inodes.flatten().collect()
}

/// Where watched files are.
#[derive(Debug, Default)]
pub struct Watched {
    /// As far as it is known while the tree is stopped.
    paths: HashMap<Key, PathBuf>,
    /// Paths that a walk has found, which may have changed since.
    walked: HashMap<Key, PathBuf>,
    /// Files that a walk is to look for.
    wanted: Vec<Key>,
    /// Files that walks have looked for.
    sought: HashSet<Key>,
    /// Instances whose end waits for the kernel: they are kept until the tree runs.
    used: Vec<OwnedFd>,
}

impl Watched {
    /// Begins anew: the tree has run.
    pub fn begin(&mut self) {
        self.paths.clear();
    }

    /// Where a file is, after [`Watched::find`].
    pub(super) fn path(&self, inode: &Inode) -> Option<&Path> {
        self.paths.get(&inode.key()).map(PathBuf::as_path)
    }

    /// Finds these files in all ways that take no walk; `known` are paths that the tree uses. Gives
    /// whether a walk may find more.
    ///
    /// # Errors
    /// When what is mounted cannot be listed.
    pub fn find(
        &mut self,
        inodes: &[Inode],
        allow: &Allow,
        known: impl FnOnce() -> Vec<PathBuf>,
    ) -> Result<bool> {
        let mut missing = self.missing(inodes);
        if missing.is_empty() {
            return Ok(false);
        }
        if !self.walked.is_empty() {
            let walked = missing.iter().filter_map(|one| self.walked.get(&one.key()));
            let walked = walked.cloned().collect::<Vec<_>>();
            self.look_at(walked, &mut keys(&missing));
            missing = self.missing(inodes);
        }
        if !allow.force_irmap && !missing.is_empty() {
            let found = by_handle(&missing, &mounts()?);
            self.paths.extend(found);
            missing = self.missing(inodes);
        }
        if !missing.is_empty() {
            let mut seen = HashSet::new();
            let known = known();
            let all = known.iter().flat_map(|path| path.ancestors());
            let all = all.filter(|path| seen.insert(*path)).map(Path::to_owned);
            self.look_at(all, &mut keys(&missing));
            missing = self.missing(inodes);
        }
        let new = missing.iter().map(Inode::key);
        self.wanted = new.filter(|key| !self.sought.contains(key)).collect();
        Ok(!self.wanted.is_empty())
    }

    /// Looks for what [`Watched::find`] has not found, until `deadline`: below the paths that the
    /// caller names, then everywhere on the file systems. The tree runs meanwhile.
    ///
    /// # Errors
    /// As [`Watched::find`].
    pub fn walk(&mut self, allow: &Allow, deadline: Option<Instant>) -> Result<()> {
        self.walk_below(allow, &mounts()?, deadline);
        // Instances are closed while nobody waits for that.
        self.used.clear();
        Ok(())
    }

    /// Finds files of which nothing was known before the tree was stopped, as those that are
    /// watched through a descriptor in a socket's queue. The file systems are not walked for them.
    ///
    /// # Errors
    /// As [`Watched::find`].
    pub(super) fn find_late(
        &mut self,
        inodes: &[Inode],
        allow: &Allow,
        known: &[Open<'_>],
    ) -> Result<()> {
        if self.find(inodes, allow, || open_paths(known))? && !allow.irmap_scan_paths.is_empty() {
            self.walk_below(allow, &[], None);
            self.find(inodes, allow, Vec::new)?;
        }
        Ok(())
    }

    fn walk_below(&mut self, allow: &Allow, mounts: &[Mount], deadline: Option<Instant>) {
        let wanted = std::mem::take(&mut self.wanted);
        self.sought.extend(&wanted);
        let mut keys = wanted.into_iter().collect::<HashSet<_>>();
        if keys.is_empty() {
            return;
        }
        log::info!("{} watched files are looked for by their paths", keys.len());
        let named = allow.irmap_scan_paths.iter().map(WalkDir::new);
        let devices = keys.iter().map(|key| device_numbers(key.1));
        let devices = devices.collect::<HashSet<_>>();
        let mounts = mounts.iter().filter(|one| devices.contains(&one.device));
        let whole = mounts.map(|mount| WalkDir::new(&mount.point).same_file_system(true));
        let in_time = || deadline.is_none_or(|deadline| Instant::now() < deadline);
        let files = named.chain(whole).flatten().flatten();
        let files = files.map(walkdir::DirEntry::into_path);
        let found = self.compare(files.take_while(|_| in_time()), &mut keys);
        self.walked.extend(found);
    }

    /// Those of these files that are not found yet.
    fn missing(&self, inodes: &[Inode]) -> Vec<Inode> {
        let mut seen = HashSet::new();
        let missing = inodes
            .iter()
            .filter(|one| !self.paths.contains_key(&one.key()));
        missing
            .filter(|one| seen.insert(one.key()))
            .cloned()
            .collect()
    }

    fn look_at(&mut self, places: impl IntoIterator<Item = PathBuf>, keys: &mut HashSet<Key>) {
        let found = self.compare(places.into_iter(), keys);
        self.paths.extend(found);
    }

    /// Which of these places are the files that are looked for, in `keys`, which keeps those that
    /// are not among them.
    fn compare(
        &mut self,
        mut places: impl Iterator<Item = PathBuf>,
        keys: &mut HashSet<Key>,
    ) -> Vec<(Key, PathBuf)> {
        let mut found = Vec::new();
        while !keys.is_empty() {
            let Ok(own) = inotify::init(CreateFlags::CLOEXEC) else {
                break;
            };
            let (seen, is_last) = batch(own.as_fd(), &mut places);
            self.used.push(own);
            found.extend(seen.into_iter().filter(|(key, _)| keys.remove(key)));
            if is_last {
                break;
            }
        }
        found
    }
}

fn keys(inodes: &[Inode]) -> HashSet<Key> {
    inodes.iter().map(Inode::key).collect()
}

/// The identities of the next of these files, and if they are the last ones. The kernel shows them
/// for a watched file, and they are not always those of stat(2): `own` is an instance without
/// watches.
fn batch(
    own: BorrowedFd<'_>,
    places: &mut impl Iterator<Item = PathBuf>,
) -> (Vec<(Key, PathBuf)>, bool) {
    let mask = WatchFlags::DELETE_SELF | WatchFlags::DONT_FOLLOW;
    let mut watches = HashMap::new();
    let mut is_last = true;
    for place in places.by_ref() {
        match inotify::add_watch(own, &place, mask) {
            // One file has one watch, whatever its names are.
            Ok(number) => drop(watches.entry(number).or_insert(place)),
            Err(Errno::NOSPC) if !watches.is_empty() => {
                is_last = false;
                break;
            }
            // It is gone, or may not be looked at.
            Err(_) => {}
        }
        if watches.len() == BATCH {
            is_last = false;
            break;
        }
    }
    if watches.is_empty() {
        return (Vec::new(), true);
    }
    let info = sys::procfs::read_text(format_args!("thread-self/fdinfo/{}", own.as_raw_fd()));
    let info = info.ok().and_then(|text| Info::parse(&text));
    let Some((info, _)) = info else {
        return (Vec::new(), is_last);
    };
    let shown = info
        .lines("inotify wd")
        .filter_map(super::inotify::Shown::parse);
    let seen = shown.filter_map(|shown| {
        let place = watches.remove(&shown.number)?;
        Some((shown.inode.key(), place))
    });
    (seen.collect(), is_last)
}

/// Where the files are whose handles can be opened: for that, any file of their file system must
/// be open.
fn by_handle(inodes: &[Inode], mounts: &[Mount]) -> Vec<(Key, PathBuf)> {
    let mut found = Vec::new();
    let left = inodes.iter().filter(|one| one.handle.is_some());
    let mut left = left.collect::<Vec<_>>();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for mount in mounts {
        let is_there = |inode: &&Inode| device_numbers(inode.device) == mount.device;
        if !left.iter().any(&is_there) {
            continue;
        }
        let Ok(any) = rustix::fs::open(&mount.point, flags, Mode::empty()) else {
            continue;
        };
        left.retain(|inode| {
            let path = is_there(inode).then(|| opened(&any, inode)).flatten();
            let is_found = path.is_some();
            found.extend(path.map(|path| (inode.key(), path)));
            !is_found
        });
    }
    found
}

/// The path of a file by its handle, seen through this mount.
fn opened(any: &OwnedFd, inode: &Inode) -> Option<PathBuf> {
    let (kind, handle) = inode.handle.as_ref()?;
    let file = sys::inotify::open_by_handle(any, *kind, handle).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    let path = rustix::fs::readlink(link(file.as_fd()), Vec::new()).ok()?;
    let path = PathBuf::from(OsStr::from_bytes(path.as_bytes()));
    leads_to(&path, &stat).then_some(path)
}

pub(super) fn link(file: BorrowedFd<'_>) -> String {
    sys::procfs::link(file)
}

fn leads_to(path: &Path, wanted: &Stat) -> bool {
    let stat = rustix::fs::lstat(path);
    stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (wanted.st_dev, wanted.st_ino))
}

/// The paths that the tree has open.
pub(super) fn open_paths(known: &[Open<'_>]) -> Vec<PathBuf> {
    let paths = known.iter().filter(|open| open.link.starts_with(b"/"));
    let paths = paths.map(|open| PathBuf::from(OsStr::from_bytes(&open.link)));
    paths.collect()
}

/// Everything that is mounted here.
pub(super) fn mounts() -> Result<Vec<Mount>> {
    mountinfo::read().map_err(|error| Error::kernel("read /proc/self/mountinfo", error))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The files as the kernel calls them, without handles.
    fn named(paths: &[&Path]) -> Vec<Inode> {
        let own = inotify::init(CreateFlags::CLOEXEC).expect("inotify");
        let mut places = paths.iter().map(|path| path.to_path_buf());
        let (seen, is_last) = batch(own.as_fd(), &mut places);
        assert!(is_last);
        let key_of = |path: &&Path| {
            let found = seen.iter().find(|(_, place)| place == path);
            found.expect("it is there").0
        };
        let inode = |(number, device)| Inode {
            number,
            device,
            handle: None,
        };
        paths.iter().map(key_of).map(inode).collect()
    }

    #[test]
    fn files_without_handles_are_found_by_what_is_used() {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("file");
        fs::write(&path, "").expect("write");
        let places = [&*path, folder.path(), Path::new("/")];
        let inodes = named(&places);
        let mut watched = Watched::default();
        let allow = Allow::default();
        let known = || vec![path.clone()];
        assert!(!watched.find(&inodes, &allow, known).expect("found"));
        for (inode, place) in inodes.iter().zip(places) {
            assert_eq!(watched.path(inode), Some(place));
        }
        let other = Inode {
            number: 0,
            ..inodes[0].clone()
        };
        assert!(
            watched
                .find(std::slice::from_ref(&other), &allow, known)
                .expect("looked")
        );
        assert_eq!(watched.path(&other), None);
    }

    #[test]
    fn one_walk_finds_all_and_what_has_moved_since_is_not_believed() {
        let folder = tempfile::tempdir().expect("make a folder");
        let deep = folder.path().join("one/two");
        fs::create_dir_all(&deep).expect("make folders");
        // More than one instance watches at a time.
        let paths = (0..BATCH + 100).map(|number| deep.join(format!("file {number}")));
        let paths = paths.collect::<Vec<_>>();
        paths
            .iter()
            .for_each(|path| fs::write(path, "").expect("write"));
        let last = paths.last().expect("many");
        let places = [&*paths[0], &*paths[17], last, &*deep];
        let inodes = named(&places);
        let mut watched = Watched::default();
        let allow = Allow {
            irmap_scan_paths: vec!["/nothing".into(), folder.path().into()],
            ..Allow::default()
        };
        assert!(watched.find(&inodes, &allow, Vec::new).expect("looked"));
        watched.walk(&allow, None).expect("walked");
        fs::rename(last, folder.path().join("elsewhere")).expect("renamed");
        watched.begin();
        let more = watched.find(&inodes, &allow, Vec::new).expect("looked");
        assert!(!more, "it was looked for");
        for (inode, place) in inodes.iter().zip(places) {
            assert_eq!(
                watched.path(inode),
                Some(place).filter(|place| place != last)
            );
        }
    }

    #[test]
    fn a_walk_ends_in_time() {
        let folder = tempfile::tempdir().expect("make a folder");
        fs::write(folder.path().join("file"), "").expect("write");
        let inodes = named(&[&folder.path().join("file")]);
        let mut watched = Watched::default();
        let allow = Allow {
            irmap_scan_paths: vec![folder.path().into()],
            ..Allow::default()
        };
        assert!(watched.find(&inodes, &allow, Vec::new).expect("looked"));
        watched.walk(&allow, Some(Instant::now())).expect("walked");
        assert!(!watched.find(&inodes, &allow, Vec::new).expect("looked"));
        assert_eq!(watched.path(&inodes[0]), None);
    }

    #[test]
    fn what_groups_watch_is_read_of_fdinfo() {
        let text = "pos:\t0\nflags:\t02\nmnt_id:\t1\nino:\t2\n\
                    inotify wd:1 ino:2c08 sdev:800013 mask:800afce ignored_mask:0 \
                    fhandle-bytes:8 fhandle-type:1 f_handle:082c0000a1\n\
                    fanotify flags:1 event-flags:8000\n\
                    fanotify mnt_id:23 mflags:0 mask:38 ignored_mask:0\n\
                    fanotify ino:17 sdev:2 mflags:0 mask:38 ignored_mask:0\n";
        let (info, _) = Info::parse(text).expect("well formed");
        assert_eq!(inodes(b"/file", &info), []);
        let found = inodes(super::super::inotify::LINK, &info);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].key(), (0x2c08, 0x80_0013));
        assert_eq!(found[0].handle, Some((1, vec![8, 0x2c, 0, 0, 0xa1])));
        assert_eq!((found[1].key(), &found[1].handle), ((0x17, 2), &None));
    }
}
