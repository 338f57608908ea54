//! Small files that are saved with a tree although they have a name: others sweep them away when
//! the tree is gone (a Java machine those of other ones, a batch system a job's session).
//!
//! - What: small files beside the tree
//! - Kept: contents, owner, permissions, times, and the directories above, of POSIX semaphores
//!   (`/dev/shm/sem.*`), of Java's counters (`/tmp/hsperfdata_*`), of sessions of Open MPI
//!   (`/tmp/ompi.*`) and of what `--save-files` names, open, mapped or a working directory. Where
//!   such a file is missing at the restore, it is made again; one that is there stays as it is.
//! - Refused: "it is to be saved with the tree, and … bytes are more than …" (`--ghost-limit`; of
//!   those that no option names, larger ones are left to the host); "it is to be saved with the
//!   tree, and to read it would break its lease for writing".
//! - CRIU 4.2: not known: such a file must be there.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::ghost::Contents;
use super::place::Place;
use super::{DumpContext, Open, RestoreContext, locks};
use crate::{Error, Result};

/// How many directories above a file are made again, at most.
const FOLDERS_MAX: usize = 16;
/// Patterns of files that are saved though no option names them.
const KNOWN: [&[u8]; 4] = [
    b"/dev/shm/sem.*",
    b"/tmp/hsperfdata_*/*",
    b"/tmp/ompi.*",
    b"/tmp/ompi.*/**",
];

/// The record of a file or directory that is saved although it has a name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Carried {
    /// Its owner and permissions.
    #[prost(message, required, tag = "1")]
    pub owner: Owner,
    /// The time of last access, in seconds and nanoseconds.
    #[prost(sint64, tag = "2")]
    pub accessed_s: i64,
    /// See `accessed_s`.
    #[prost(uint32, tag = "3")]
    pub accessed_ns: u32,
    /// The time of the last change of the contents, in seconds and nanoseconds.
    #[prost(sint64, tag = "4")]
    pub modified_s: i64,
    /// See `modified_s`.
    #[prost(uint32, tag = "5")]
    pub modified_ns: u32,
    /// The size in bytes.
    #[prost(uint64, tag = "6")]
    pub size_bytes: u64,
    /// The contents that fit into the record.
    #[prost(bytes = "vec", tag = "7")]
    pub inline: Vec<u8>,
    /// The space with larger contents.
    #[prost(uint32, optional, tag = "8")]
    pub space: Option<u32>,
    /// The directories above it, the nearest first.
    #[prost(message, repeated, tag = "9")]
    pub folders: Vec<Owner>,
}

/// Whose a file or directory is.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Owner {
    /// Permissions.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
    /// The owner.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
}

impl Owner {
    fn give(self, path: &Path) -> rustix::io::Result<()> {
        let owner = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::fs::chownat(
            CWD,
            path,
            Some(owner.0),
            Some(owner.1),
            AtFlags::SYMLINK_NOFOLLOW,
        )?;
        rustix::fs::chmod(path, Mode::from_raw_mode(self.mode & 0o7777))
    }
}

/// True if a name matches a pattern: `*` stands for any part of a name, `?` for a character, `**`
/// for anything.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern, name) {
        ([], _) => name.is_empty(),
        ([b'*', b'*', rest @ ..], _) => (0..=name.len()).any(|at| matches(rest, &name[at..])),
        ([b'*', rest @ ..], _) => {
            let end = name.iter().position(|byte| *byte == b'/');
            let end = end.unwrap_or(name.len());
            (0..=end).any(|at| matches(rest, &name[at..]))
        }
        ([b'?', rest @ ..], [first, name @ ..]) => *first != b'/' && matches(rest, name),
        ([one, rest @ ..], [first, name @ ..]) => one == first && matches(rest, name),
        (_, []) => false,
    }
}

impl Carried {
    /// The record of the file or directory behind `open`, which is at `path`; `None` for one that
    /// is left to the host.
    pub(super) fn dump(
        open: &Open<'_>,
        path: &[u8],
        cx: &mut dyn DumpContext,
    ) -> Result<Option<Self>> {
        let named = cx.allow().save_files.iter();
        let named = named
            .into_iter()
            .any(|pattern| matches(pattern.as_bytes(), path));
        if !named && !KNOWN.iter().any(|pattern| matches(pattern, path)) {
            return Ok(None);
        }
        let stat = &open.stat;
        let nanoseconds = |ns: u64| u32::try_from(ns).unwrap_or(0);
        let mut carried = Self {
            owner: Owner {
                mode: stat.st_mode & 0o7777,
                uid: stat.st_uid,
                gid: stat.st_gid,
            },
            accessed_s: stat.st_atime,
            accessed_ns: nanoseconds(stat.st_atime_nsec),
            modified_s: stat.st_mtime,
            modified_ns: nanoseconds(stat.st_mtime_nsec),
            folders: folders(Path::new(OsStr::from_bytes(path))),
            ..Self::default()
        };
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            carried.size_bytes = stat.st_size.cast_unsigned();
            let limit_bytes = cx.allow().ghost_limit_bytes;
            let stored_bytes = stat.st_blocks.cast_unsigned() * 512;
            if stored_bytes.min(carried.size_bytes) > limit_bytes {
                if !named {
                    return Ok(None);
                }
                let why = format!(
                    "it is to be saved with the tree, and {stored_bytes} bytes are more than \
                     {limit_bytes}"
                );
                return Err(open.unsupported(&why, Some("--ghost-limit")));
            }
            carried.store(open, cx)?;
        }
        Ok(Some(carried))
    }

    fn store(&mut self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<()> {
        if locks::has_write_lease(&open.info) {
            let why = "it is to be saved with the tree, and to read it would break its lease for \
                       writing";
            return Err(open.unsupported(why, None));
        }
        (self.inline, self.space) = match Contents::read(open, self.size_bytes, cx)? {
            Contents::Inline(bytes) => (bytes, None),
            Contents::Space(space) => (Vec::new(), Some(space)),
        };
        Ok(())
    }

    /// Makes the file or directory again where it is missing, and the directories above it.
    pub(super) fn make(&self, place: &Place, cx: &mut dyn RestoreContext) -> Result<()> {
        let path = Path::new(OsStr::from_bytes(&place.path));
        let is_there = |path: &Path| match rustix::fs::lstat(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(error) => Err(Error::kernel(format!("stat {}", path.display()), error)),
            Ok(_) => Ok(true),
        };
        if is_there(path)? {
            return Ok(());
        }
        let kernel = |path: &Path| {
            let doing = format!("make {} again", path.display());
            move |error: Errno| Error::kernel(doing, error)
        };
        let above = path.ancestors().skip(1).zip(&self.folders);
        let above = above.collect::<Vec<_>>();
        for (folder, owner) in above.into_iter().rev() {
            if !is_there(folder)? && cx.make(folder, true)? {
                owner.give(folder).map_err(kernel(folder))?;
            }
        }
        let is_folder = place.kind() == FileType::Directory;
        if !cx.make(path, is_folder)? {
            return Ok(());
        }
        if !is_folder {
            self.fill(path, cx)?;
        }
        self.owner.give(path).map_err(kernel(path))?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(CWD, path, &self.times(), flags).map_err(kernel(path))?;
        log::info!("{} was missing, and is made again", path.display());
        Ok(())
    }

    fn fill(&self, path: &Path, cx: &mut dyn RestoreContext) -> Result<()> {
        let failed = |error: Errno| Error::kernel(format!("fill {}", path.display()), error);
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        rustix::fs::ftruncate(&file, self.size_bytes).map_err(failed)?;
        if let Some(space) = self.space {
            cx.load(space, file.as_fd())?;
            return rustix::fs::ftruncate(&file, self.size_bytes).map_err(failed);
        }
        let written = rustix::io::pwrite(&file, &self.inline, 0).map_err(failed)?;
        match written == self.inline.len() {
            true => Ok(()),
            false => Err(failed(Errno::NOSPC)),
        }
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
}

/// Whose the directories above a file are, the nearest first.
fn folders(path: &Path) -> Vec<Owner> {
    let above = path.ancestors().skip(1).take(FOLDERS_MAX);
    let owners = above.map_while(|folder| {
        let stat = std::fs::symlink_metadata(folder).ok()?;
        Some(Owner {
            mode: stat.mode() & 0o7777,
            uid: stat.uid(),
            gid: stat.gid(),
        })
    });
    owners.collect()
}

/// The name of a semaphore whose file glibc made under another name, which is `path` and gone: the
/// one in the same directory that is the same file.
pub(super) fn semaphore(path: &[u8], inode: (u64, u64)) -> Option<Vec<u8>> {
    let path = Path::new(OsStr::from_bytes(path));
    let is_name = |name: &OsStr| name.as_bytes().starts_with(b"sem.");
    if path.parent() != Some(Path::new("/dev/shm")) || !path.file_name().is_some_and(is_name) {
        return None;
    }
    let mut entries = std::fs::read_dir("/dev/shm").ok()?.flatten();
    let found = entries.find(|entry| {
        let stat = std::fs::symlink_metadata(entry.path());
        is_name(&entry.file_name()) && stat.is_ok_and(|stat| (stat.dev(), stat.ino()) == inode)
    });
    found.map(|entry| PathBuf::into_os_string(entry.path()).into_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn pattern_stands_for_names() {
        for (pattern, name, expected) in [
            ("/dev/shm/sem.*", "/dev/shm/sem.x", true),
            ("/dev/shm/sem.*", "/dev/shm/sem.x/y", false),
            ("/dev/shm/sem.*", "/dev/shm/semx", false),
            ("/tmp/hsperfdata_*/*", "/tmp/hsperfdata_root/12", true),
            ("/tmp/hsperfdata_*/*", "/tmp/hsperfdata_root", false),
            ("/tmp/ompi.*/**", "/tmp/ompi.host.0/pid.1/0/0/x", true),
            ("/a?c", "/abc", true),
            ("/a?c", "/a/c", false),
            ("", "", true),
            ("", "/", false),
        ] {
            let found = matches(pattern.as_bytes(), name.as_bytes());
            assert_eq!(found, expected, "{pattern} {name}");
        }
    }

    fn world(pattern: &Path) -> World {
        let mut world = World::default();
        world.allow.save_files = vec![pattern.as_os_str().to_owned()];
        world
    }

    #[test]
    fn saved_file_is_made_again_where_it_is_missing() {
        for size in [0, 100, 10_000] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("one/two/file");
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(&path, vec![7; size]).expect("write");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
            let above = folder.path().join("one");
            fs::set_permissions(&above, fs::Permissions::from_mode(0o710)).expect("chmod");
            let before = fs::metadata(&path).expect("stat");
            let mut world = world(&folder.path().join("**"));
            let at = world.add(File::open(&path).expect("open"));
            world.dump().expect("dump");
            fs::remove_dir_all(&above).expect("remove");
            world.restore().expect("restore");
            let own = File::from(world.take(at));
            let after = own.metadata().expect("stat");
            assert_eq!(fs::read(&path).expect("it is there"), vec![7; size]);
            assert_eq!(after.ino(), fs::metadata(&path).expect("stat").ino());
            assert_eq!((after.mode(), after.len()), (before.mode(), before.len()));
            assert_eq!(after.modified().ok(), before.modified().ok());
            let mode = fs::metadata(&above).expect("stat").mode();
            assert_eq!(mode & 0o7777, 0o710);
        }
    }

    #[test]
    fn file_that_is_there_stays_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "before").expect("write");
        let mut world = world(&path);
        world.add(File::open(&path).expect("open"));
        world.dump().expect("dump");
        fs::write(&path, "behind").expect("write");
        world.restore().expect("restore");
        assert_eq!(fs::read(&path).expect("read"), b"behind");
        fs::write(&path, "longer than before").expect("write");
        let error = world.restore().expect_err("another file").to_string();
        assert!(error.contains("size is 18 bytes, was 6"), "{error}");
    }

    #[test]
    fn file_that_is_too_large_is_refused_where_an_option_names_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, vec![1; 8192]).expect("write");
        let mut world = world(&path);
        world.allow.ghost_limit_bytes = 4096;
        world.add(File::open(&path).expect("open"));
        let error = world.dump().expect_err("too large").to_string();
        assert!(error.contains("8192 bytes are more than 4096"), "{error}");
    }

    #[test]
    fn semaphore_is_found_by_its_other_name() {
        let own = std::process::id();
        let [first, name] = ["first", "name"].map(|what| format!("/dev/shm/sem.{what}-{own}"));
        fs::write(&first, [0; 32]).expect("write");
        let file = File::options()
            .read(true)
            .write(true)
            .open(&first)
            .expect("open");
        fs::hard_link(&first, &name).expect("link");
        fs::remove_file(&first).expect("remove");
        let mut world = World::default();
        let at = world.add(file);
        world.dump().expect("dump");
        assert!(world.describe(at).contains(&name));
        fs::remove_file(&name).expect("remove");
        let restored = world.restore();
        let made = fs::read(&name);
        let _ = fs::remove_file(&name);
        restored.expect("restore");
        assert_eq!(made.expect("it is there"), [0; 32]);
    }
}
