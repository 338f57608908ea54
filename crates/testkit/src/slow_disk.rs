//! A file on a file system of FUSE whose answers take their time, as those of a disk do.
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, FileAttr, FileType, Filesystem, MountOption, ReplyAttr, ReplyData,
    ReplyEntry, Request,
};
use rustix::io::Errno;
use tempfile::TempDir;

/// Bytes of a page, which consists of its number in the file, counted from 1.
pub const PAGE_BYTES: u64 = 4096;
/// How many pages the file has.
pub const PAGES: u64 = 1 << 16;
/// How long a read takes.
const DELAY: Duration = Duration::from_millis(5);
const NAME: &str = "slow";
const FOLDER: u64 = 1;
const FILE: u64 = 2;
const VALID: Duration = Duration::from_secs(3600);

/// The file system; it is unmounted when this goes.
pub struct SlowDisk {
    _session: BackgroundSession,
    folder: TempDir,
}

impl SlowDisk {
    /// Mounts it.
    ///
    /// # Errors
    /// Where there is no FUSE.
    pub fn mount() -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let session = fuser::spawn_mount2(FuseFile, folder.path(), &[MountOption::RO])?;
        Ok(Self {
            _session: session,
            folder,
        })
    }

    /// The path of the file.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        Path::join(self.folder.path(), NAME)
    }
}

struct FuseFile;

impl Filesystem for FuseFile {
    fn lookup(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        match parent == FOLDER && name == NAME {
            true => reply.entry(&VALID, &facts(FILE), 0),
            false => reply.error(Errno::NOENT.raw_os_error()),
        }
    }

    fn getattr(&mut self, _: &Request<'_>, number: u64, _: Option<u64>, reply: ReplyAttr) {
        reply.attr(&VALID, &facts(number));
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        _: u64,
        _: u64,
        at: i64,
        len: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyData,
    ) {
        // Reads wait side by side.
        thread::spawn(move || {
            thread::sleep(DELAY);
            let first = at.cast_unsigned() / PAGE_BYTES;
            let pages = first..(first + u64::from(len) / PAGE_BYTES).min(PAGES);
            let words = pages.flat_map(|page| [page + 1; PAGE_BYTES as usize / 8]);
            reply.data(&words.flat_map(u64::to_ne_bytes).collect::<Vec<_>>());
        });
    }
}

fn facts(number: u64) -> FileAttr {
    let (kind, perm, size) = match number {
        FOLDER => (FileType::Directory, 0o755, 0),
        _ => (FileType::RegularFile, 0o444, PAGES * PAGE_BYTES),
    };
    FileAttr {
        ino: number,
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: PAGE_BYTES as u32,
        flags: 0,
    }
}
