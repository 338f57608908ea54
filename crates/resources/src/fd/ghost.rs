//! Deleted files: stored whole and made again without a name, once for all who have them open or
//! mapped.
//!
//! - What: deleted files
//! - Kept: contents with their holes, owner, permissions, times; directories, FIFOs and device
//!   nodes as well. All who had one file have one again. Extended attributes are not kept.
//! - Refused: "it is deleted, and … bytes are more than …" (`--ghost-limit`); "it is deleted,
//!   and to read it would break its lease for writing"; "it is a deleted …" (a socket, a symbolic
//!   link, a block device).
//! - CRIU 4.2: contents up to the same `--ghost-limit`; symbolic links and block devices are made
//!   again as well.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use sys::watchdog::apart_with_file;

use super::place::{Place, folder_above};
use super::{DumpContext, Open, RestoreContext, locks, status};
use crate::{Error, Result};

/// The number under which the file made again is shared; no record has it.
const SHARED: u16 = 149;
/// Descriptions that made a file are held under keys of their own.
const MAKERS: u64 = 1 << 40;
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Contents up to this size stand in the record itself.
const INLINE_BYTES: u64 = 4096;

/// A file that has no name any more.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ghost {
    /// The first description (by id) of this file: those with the same number share it.
    #[prost(uint32, tag = "1")]
    pub first: u32,
    /// The owner.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
    /// The device number of a device node.
    #[prost(uint64, tag = "4")]
    pub rdev: u64,
    /// The time of last access, in seconds and nanoseconds.
    #[prost(sint64, tag = "5")]
    pub accessed_s: i64,
    /// See `accessed_s`.
    #[prost(uint32, tag = "6")]
    pub accessed_ns: u32,
    /// The time of the last change of the contents, in seconds and nanoseconds.
    #[prost(sint64, tag = "7")]
    pub modified_s: i64,
    /// See `modified_s`.
    #[prost(uint32, tag = "8")]
    pub modified_ns: u32,
    /// Whether it never had a name (`O_TMPFILE`).
    #[prost(bool, tag = "9")]
    pub nameless: bool,
    /// The size of a regular file in bytes.
    #[prost(uint64, tag = "10")]
    pub size_bytes: u64,
    /// The contents of a regular file that fit into the record; on the first description only.
    #[prost(bytes = "vec", tag = "11")]
    pub inline: Vec<u8>,
    /// The space with the contents of a larger one; on the first description only.
    #[prost(uint32, optional, tag = "12")]
    pub space: Option<u32>,
    /// The flags of the description that made a file without a name, which shows `O_TMPFILE` among
    /// them; 0 where the tree has it not.
    #[prost(uint32, tag = "13")]
    pub made_with: u32,
}

/// The contents of a regular file in an image.
pub(super) enum Contents {
    /// In the record.
    Inline(Vec<u8>),
    /// In the space of this number.
    Space(u32),
}

impl Contents {
    /// Reads the file behind `open`, or has it read later.
    pub(super) fn read(open: &Open<'_>, size_bytes: u64, cx: &mut dyn DumpContext) -> Result<Self> {
        if size_bytes == 0 {
            return Ok(Self::Inline(Vec::new()));
        }
        let file = status::reopen(open.own()?, OFlags::RDONLY)?;
        if size_bytes > INLINE_BYTES {
            return cx.store(file, size_bytes).map(Self::Space);
        }
        let mut bytes = vec![0; usize::try_from(size_bytes).expect("at most a page")];
        let read = File::from(file).read_exact_at(&mut bytes, 0);
        read.map_err(|error| Error::kernel(format!("read {}", open.place()), error))?;
        Ok(Self::Inline(bytes))
    }
}

/// The first description of the same inode as `open`.
pub(super) fn first_of_inode(open: &Open<'_>, cx: &dyn DumpContext) -> u32 {
    let all = cx.all().of_inode(open).map(|other| other.id.0);
    all.chain([open.id.0]).min().expect("at least itself")
}

/// The flags of the description that made the inode of `open` as one without a name.
fn maker_of_inode(open: &Open<'_>, cx: &dyn DumpContext) -> u32 {
    let mut all = cx.all().of_inode(open).chain([open]);
    let maker = all.find(|other| status::is_nameless(other.info.flags));
    maker.map_or(0, |maker| maker.info.flags)
}

impl Ghost {
    /// Describes the deleted file behind `open` that was at `path`, and stores its contents.
    pub(super) fn dump(open: &Open<'_>, path: &[u8], cx: &mut dyn DumpContext) -> Result<Self> {
        let stat = &open.stat;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if matches!(
            kind,
            FileType::Socket | FileType::Symlink | FileType::BlockDevice
        ) {
            return Err(open.unsupported(&format!("it is a deleted {kind:?}"), None));
        }
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let nanoseconds = |ns: u64| u32::try_from(ns).unwrap_or(0);
        let mut ghost = Self {
            first: first_of_inode(open, cx),
            uid: stat.st_uid,
            gid: stat.st_gid,
            rdev: stat.st_rdev,
            accessed_s: stat.st_atime,
            accessed_ns: nanoseconds(stat.st_atime_nsec),
            modified_s: stat.st_mtime,
            modified_ns: nanoseconds(stat.st_mtime_nsec),
            nameless: name == format!("#{}", stat.st_ino).as_bytes(),
            ..Self::default()
        };
        if kind == FileType::RegularFile {
            ghost.made_with = maker_of_inode(open, cx);
            ghost.size_bytes = stat.st_size.cast_unsigned();
            if ghost.first == open.id.0 {
                ghost.store(open, cx)?;
            }
        }
        Ok(ghost)
    }

    fn store(&mut self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<()> {
        let stored_bytes = open.stat.st_blocks.cast_unsigned() * 512;
        let limit_bytes = cx.allow().ghost_limit_bytes;
        if stored_bytes.min(self.size_bytes) > limit_bytes {
            let why =
                format!("it is deleted, and {stored_bytes} bytes are more than {limit_bytes}");
            return Err(open.unsupported(&why, Some("--ghost-limit")));
        }
        if self.size_bytes > 0 && locks::has_write_lease(&open.info) {
            let why = "it is deleted, and to read it would break its lease for writing";
            return Err(open.unsupported(why, None));
        }
        (self.inline, self.space) = match Contents::read(open, self.size_bytes, cx)? {
            Contents::Inline(bytes) => (bytes, None),
            Contents::Space(space) => (Vec::new(), Some(space)),
        };
        Ok(())
    }

    /// A descriptor of the file made again; made by the first who asks.
    pub(super) fn holder(&self, place: &Place, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let key = (SHARED, u64::from(self.first));
        if !cx.shared().contains_key(&key) {
            let holder = self.create(place, cx)?;
            cx.shared().insert(key, vec![holder]);
        }
        status::dup(cx.shared()[&key][0].as_fd())
    }

    /// The description that made a file without a name, made again.
    pub(super) fn maker(&self, place: &Place, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        drop(self.holder(place, cx)?);
        let key = (SHARED, u64::from(self.first) | MAKERS);
        let maker = cx.shared().remove(&key).and_then(|mut fds| fds.pop());
        maker.ok_or_else(|| Error::corrupt("deleted file", "made by several descriptions"))
    }

    /// Makes the file, without a name but with the old one in the kernel's memory where possible.
    fn create(&self, place: &Place, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let path = Path::new(OsStr::from_bytes(&place.path));
        let doing = |what: &str| format!("{what} deleted file {} again", path.display());
        let kernel = |what: &str| {
            let doing = doing(what);
            move |error: Errno| Error::kernel(doing, error)
        };
        let mut file = self.make(place.kind(), path).map_err(kernel("make"))?;
        // Nothing but what holds no right to write may stay open: a program may be started from it.
        let holder = status::reopen(file.as_fd(), OFlags::PATH)?;
        if self.made_with != 0 {
            let key = (SHARED, u64::from(self.first) | MAKERS);
            let plain = status::reopen(holder.as_fd(), OFlags::RDWR)?;
            cx.shared()
                .insert(key, vec![std::mem::replace(&mut file, plain)]);
        }
        if place.kind() == FileType::RegularFile {
            self.fill(&file, cx, &doing("fill"))?;
        }
        drop(file);
        let at = sys::procfs::link(&holder);
        let owner = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::fs::chownat(CWD, &at, Some(owner.0), Some(owner.1), AtFlags::empty())
            .map_err(kernel("own"))?;
        let mode = Mode::from_raw_mode(place.mode);
        rustix::fs::chmod(&at, mode).map_err(kernel("set permissions of"))?;
        rustix::fs::utimensat(CWD, &at, &self.times(), AtFlags::empty())
            .map_err(kernel("set times of"))?;
        Ok(holder)
    }

    fn times(&self) -> Timestamps {
        Timestamps {
            last_access: Timespec {
                tv_sec: self.accessed_s,
                tv_nsec: self.accessed_ns.into(),
            },
            last_modification: Timespec {
                tv_sec: self.modified_s,
                tv_nsec: self.modified_ns.into(),
            },
        }
    }

    fn fill(&self, file: &OwnedFd, cx: &mut dyn RestoreContext, doing: &str) -> Result<()> {
        let kernel = |error: Errno| Error::kernel(doing, error);
        rustix::fs::ftruncate(file, self.size_bytes).map_err(kernel)?;
        if let Some(space) = self.space {
            cx.load(space, file.as_fd())?;
            return rustix::fs::ftruncate(file, self.size_bytes).map_err(kernel);
        }
        let written = rustix::io::pwrite(file, &self.inline, 0).map_err(kernel)?;
        if written == self.inline.len() {
            Ok(())
        } else {
            Err(kernel(Errno::NOSPC))
        }
    }

    /// The new inode, open for writing if it is a regular file, already without a name.
    fn make(&self, kind: FileType, path: &Path) -> rustix::io::Result<OwnedFd> {
        if !self.nameless || kind != FileType::RegularFile {
            return self.make_apart(kind, path);
        }
        let flags = match self.made_with {
            0 => OFlags::RDWR | OFlags::CLOEXEC,
            flags => status::opening(flags),
        };
        let folder = folder_above(path);
        rustix::fs::open(folder, flags | OFlags::TMPFILE, PRIVATE)
    }

    /// Makes the inode in a process of its own, which takes its name away whoever is killed.
    fn make_apart(&self, kind: FileType, path: &Path) -> rustix::io::Result<OwnedFd> {
        apart_with_file(|| Ok(self.make_named(kind, path)?))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// Makes the inode under a name, and takes that away again.
    fn make_named(&self, kind: FileType, path: &Path) -> rustix::io::Result<OwnedFd> {
        let scaffold = Scaffold::build(path)?;
        let (path, result) = free_name(path, |path| match kind {
            FileType::RegularFile => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
                rustix::fs::open(path, flags, PRIVATE).map(Some)
            }
            FileType::Directory => rustix::fs::mkdir(path, Mode::RWXU).map(|()| None),
            other => rustix::fs::mknodat(CWD, path, other, PRIVATE, self.rdev).map(|()| None),
        });
        let opened = result.and_then(|file| match file {
            Some(file) => Ok(file),
            None => {
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::open(&path, flags, Mode::empty())
            }
        });
        if opened.is_ok() {
            let flag = match kind {
                FileType::Directory => AtFlags::REMOVEDIR,
                _ => AtFlags::empty(),
            };
            rustix::fs::unlinkat(CWD, &path, flag)?;
        }
        drop(scaffold);
        opened
    }
}

/// Calls `make` with `path`, and with other names beside it while they are taken.
fn free_name<T>(
    path: &Path,
    make: impl Fn(&Path) -> rustix::io::Result<T>,
) -> (PathBuf, rustix::io::Result<T>) {
    let mut name = path.to_owned();
    for number in 1u32.. {
        match make(&name) {
            Err(Errno::EXIST) => name = path.with_file_name(format!(".ghost.{number}")),
            result => return (name, result),
        }
    }
    (name, Err(Errno::EXIST))
}

/// Folders that were deleted with the file in them; they stand while it is made again.
struct Scaffold(Vec<PathBuf>);

impl Scaffold {
    fn build(path: &Path) -> rustix::io::Result<Self> {
        let mut missing = path.ancestors().skip(1).collect::<Vec<_>>();
        missing.retain(|folder| fs::symlink_metadata(folder).is_err());
        let mut scaffold = Self(Vec::new());
        for folder in missing.into_iter().rev() {
            rustix::fs::mkdir(folder, Mode::RWXU)?;
            scaffold.0.push(folder.to_owned());
        }
        Ok(scaffold)
    }
}

impl Drop for Scaffold {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            // Someone may have put something into it meanwhile.
            let _ = fs::remove_dir(folder);
        }
    }
}
