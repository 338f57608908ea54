//! Where the restorer finds a file again: at its path, as a deleted file that is made again
//! ("ghost"), or at a temporary hard link.
//!
//! - What: paths of files
//! - Kept: files at their path; deleted ones (see there); a deleted name of a file that has others,
//!   by a hard link beside it, with `--link-remap`. At the restore the file must be there with its
//!   size and, if it is an ELF file, its build ID.
//! - Refused: "this path leads to another file or to none here" (a mount hides it); "it is deleted,
//!   and its file system is not mounted here"; "this name is deleted, but the file has other hard
//!   links" (`--link-remap`); "it is secret memory (memfd_secret), which nobody else can read"; "no
//!   free name for a hard link"; "it was the kernel's own, of a
//!   process or a device that is gone".
//! - At a restore: "is missing"; "is a …, was a …"; "size is … bytes, was …", but for one that has
//!   grown and is only appended to.
//! - CRIU 4.2: the same, with `--link-remap`; refuses files below a mount that hides them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use super::carried::{self, Carried};
use super::ghost::Ghost;
use super::{DumpContext, Open, RestoreContext, memfd, status};
use crate::{Error, Result};

/// What the kernel appends to the path of a name that was deleted.
const DELETED: &[u8] = b" (deleted)";

/// How a file of the image is found again.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Place {
    /// The absolute path that the file has, or had.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Type and permissions, as in `st_mode`.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    /// Set when the file has no name any more.
    #[prost(message, optional, tag = "3")]
    pub ghost: Option<Ghost>,
    /// Set when this name is deleted but the file has others: a hard link that the dump made, to
    /// be removed by the restore.
    #[prost(bytes = "vec", optional, tag = "4")]
    pub remap: Option<Vec<u8>>,
    /// Set where it is saved with the tree although it has this name.
    #[prost(message, optional, tag = "5")]
    pub carried: Option<Carried>,
}

impl Place {
    /// Finds out how the file behind `open` can be found again; one `stat` for a file that still
    /// is at its path.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a file that is hidden (by a mount, in another mount namespace)
    /// or deleted and too large, or with other hard links without `--link-remap`.
    pub fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Self> {
        let mut place = Self {
            path: open.link.clone(),
            mode: open.stat.st_mode,
            ghost: None,
            remap: None,
            carried: None,
        };
        if open.at_path || leads_to(&open.link, &open.stat) {
            return Ok(place);
        }
        let Some(path) = open.link.strip_suffix(DELETED) else {
            return Err(open.unsupported("this path leads to another file or to none here", None));
        };
        place.path = path.to_vec();
        if leads_to(path, &open.stat) {
            return Ok(place);
        }
        if open.link == memfd::SECRET_LINK && memfd::is_secret(open.stat.st_dev) {
            const WHY: &str = "it is secret memory (memfd_secret), which nobody else can read";
            return Err(open.unsupported(WHY, None));
        }
        let inode = (open.stat.st_dev, open.stat.st_ino);
        if let Some(name) = carried::semaphore(path, inode) {
            place.path = name;
            return Ok(place);
        }
        const GONE: &str = "it was the kernel's own, of a process or a device that is gone";
        let own = match open.own() {
            Err(Error::Kernel { source, .. })
                if Errno::from_io_error(&source) == Some(Errno::SRCH) =>
            {
                return Err(open.unsupported(GONE, None));
            }
            own => own?,
        };
        if is_kernels(own) {
            return Err(open.unsupported(GONE, None));
        }
        if !on_same_mount(own, path) {
            return Err(open.unsupported(
                "it is deleted, and its file system is not mounted here",
                None,
            ));
        }
        if open.stat.st_nlink > 0 && place.kind() != FileType::Directory {
            place.remap = Some(remap(open, path, cx)?);
        } else {
            place.ghost = Some(Ghost::dump(open, path, cx)?);
        }
        Ok(place)
    }

    /// Saves it with the tree, where that is to be.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for one that is too large.
    pub(super) fn carry(mut self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Self> {
        if self.ghost.is_none() && self.remap.is_none() {
            self.carried = Carried::dump(open, &self.path, cx)?;
        }
        Ok(self)
    }

    /// Makes it again where it was saved with the tree and is missing.
    ///
    /// # Errors
    /// [`Error::Kernel`], [`Error::Corrupt`].
    pub(super) fn prepare(&self, cx: &mut dyn RestoreContext) -> Result<()> {
        match &self.carried {
            Some(carried) if cx.inherited(self.name()).is_none() => carried.make(self, cx),
            _ => Ok(()),
        }
    }

    /// Refuses a place that no dump writes: `record` is of the kind that it names.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub(super) fn check(&self, record: &str, kind: FileType) -> Result<()> {
        let path = Path::new(OsStr::from_bytes(&self.path));
        let is_made = self.ghost.is_some() || self.carried.is_some();
        let contents = |inline: &[u8], size_bytes: u64| inline.len() as u64 <= size_bytes;
        let fits = |ghost: &Ghost| contents(&ghost.inline, ghost.size_bytes);
        let carries = |carried: &Carried| contents(&carried.inline, carried.size_bytes);
        if self.kind() != kind {
            return Err(Error::corrupt(record, "is a file of another type"));
        }
        if !path.is_absolute() || is_made && path.file_name().is_none() {
            return Err(Error::corrupt(record, format!("path {path:?}")));
        }
        if !self.ghost.as_ref().is_none_or(fits) || !self.carried.as_ref().is_none_or(carries) {
            return Err(Error::corrupt(record, "more contents than its size"));
        }
        let maker = self.ghost.as_ref().map_or(0, |ghost| ghost.made_with);
        status::check(record, maker)
    }

    /// What `--inherit-fd` calls it: the path without its first slash.
    pub(super) fn name(&self) -> &[u8] {
        self.path.strip_prefix(b"/").unwrap_or_default()
    }

    /// The type of the file.
    #[must_use]
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// Opens the file with `flags` (see [`status::opening`]), or gives what takes its place.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when it is missing, of another type, or not `size_bytes` long (checked
    /// where that is known).
    pub(crate) fn open(
        &self,
        flags: OFlags,
        size_bytes: Option<u64>,
        cx: &mut dyn RestoreContext,
    ) -> Result<OwnedFd> {
        if let Some(own) = cx.inherited(self.name()) {
            return status::dup(own);
        }
        if let Some(ghost) = &self.ghost {
            let holder = ghost.holder(self, cx)?;
            return status::reopen(holder.as_fd(), flags);
        }
        let path = self.remap.as_ref().unwrap_or(&self.path);
        let path = Path::new(OsStr::from_bytes(path));
        self.compare(path, (flags, size_bytes), cx.seen())?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| Error::kernel(format!("open {}", path.display()), error))?;
        if self.remap.is_some() {
            let path = path.to_owned();
            cx.on_success(Box::new(move || {
                // Whoever removed it before did what was to be done.
                let _ = fs::remove_file(path);
            }));
        }
        Ok(file)
    }

    /// Compares the file at `path` with the one of the dump.
    fn compare(
        &self,
        path: &Path,
        (flags, size_bytes): (OFlags, Option<u64>),
        seen: &mut HashMap<Vec<u8>, FileType>,
    ) -> Result<()> {
        let name = path.as_os_str().as_bytes();
        if size_bytes.is_none() && seen.get(name) == Some(&self.kind()) {
            return Ok(());
        }
        let differs = |what: String| Error::Mismatch {
            what: format!("{}: {what}", path.display()),
        };
        let stat = match rustix::fs::lstat(path) {
            Ok(stat) => stat,
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(differs("is missing".into())),
            Err(error) => return Err(Error::kernel(format!("stat {}", path.display()), error)),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        seen.insert(name.to_owned(), kind);
        if kind != self.kind() {
            return Err(differs(format!("is a {kind:?}, was a {:?}", self.kind())));
        }
        let now = stat.st_size.cast_unsigned();
        match size_bytes {
            // Who only appends goes on behind what others have written, as if it had been stopped.
            Some(size) if now > size && appends(flags) => {
                log::info!("{} has grown from {size} to {now} bytes", path.display());
                Ok(())
            }
            Some(size) if size != now => Err(Error::Changed {
                path: path.to_owned(),
                what: format!("size is {now} bytes, was {size}"),
                log: now > size && flags & OFlags::RWMODE == OFlags::WRONLY,
            }),
            _ => Ok(()),
        }
    }

    /// The path for people, with what is special about the place.
    #[must_use]
    pub fn describe(&self) -> String {
        let path = String::from_utf8_lossy(&self.path);
        match (&self.ghost, &self.remap) {
            (Some(_), _) => format!("{path} (deleted)"),
            (None, Some(link)) => format!("{path} (at {})", String::from_utf8_lossy(link)),
            (None, None) => path.into_owned(),
        }
    }
}

/// Whether a file is on a file system in which only the kernel makes files.
fn is_kernels(file: BorrowedFd<'_>) -> bool {
    // PROC_SUPER_MAGIC, SYSFS_MAGIC, DEBUGFS_MAGIC, TRACEFS_MAGIC, SECURITYFS_MAGIC,
    // CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC; a directory of control groups can be made, but
    // those of its files cannot.
    const KERNELS: [u64; 7] = [
        0x9fa0,
        0x6265_6572,
        0x6462_6720,
        0x7472_6163,
        0x7363_6673,
        0x0027_e0eb,
        0x6367_7270,
    ];
    let kind = rustix::fs::fstatfs(file).map(|about| about.f_type.cast_unsigned());
    kind.is_ok_and(|kind| KERNELS.contains(&kind))
}

/// Whether a description with these flags writes at the end of the file and does not read it.
fn appends(flags: OFlags) -> bool {
    flags.contains(OFlags::APPEND) && flags & OFlags::RWMODE == OFlags::WRONLY
}

/// Whether `path` is the very file that `stat` describes.
fn leads_to(path: &[u8], stat: &Stat) -> bool {
    path.starts_with(b"/")
        && rustix::fs::lstat(OsStr::from_bytes(path))
            .is_ok_and(|there| (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino))
}

/// The nearest existing folder above `path`.
pub(super) fn folder_above(path: &Path) -> PathBuf {
    let mut above = path.ancestors().skip(1);
    above
        .find(|folder| folder.is_dir())
        .map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// Whether `file` was opened through the mount that `path` would lead through; not so for files on
/// mounts of the kernel's own (memfd, secret memory) and those of other mount namespaces.
fn on_same_mount(file: BorrowedFd<'_>, path: &[u8]) -> bool {
    let mount = |at: BorrowedFd<'_>, path: &Path| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let seen = rustix::fs::statx(at, path, flags, StatxFlags::MNT_ID).ok()?;
        (seen.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(seen.stx_mnt_id)
    };
    let folder = folder_above(Path::new(OsStr::from_bytes(path)));
    let there = mount(CWD, &folder);
    there.is_some() && there == mount(file, Path::new(""))
}

/// How the names of hard links start that a dump makes; a number follows.
const LINK_NAME: &str = "link_remap.";

/// Whether a hard link that a dump makes may have this name.
#[must_use]
pub fn is_link_name(name: &OsStr) -> bool {
    let number = name.as_bytes().strip_prefix(LINK_NAME.as_bytes());
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// Links the file again, beside its deleted name.
fn remap(open: &Open<'_>, path: &[u8], cx: &mut dyn DumpContext) -> Result<Vec<u8>> {
    if !cx.allow().link_remap {
        let why = "this name is deleted, but the file has other hard links";
        return Err(open.unsupported(why, Some("--link-remap")));
    }
    let own = open.own()?;
    let source = sys::procfs::link(own);
    let folder = folder_above(Path::new(OsStr::from_bytes(path)));
    for number in 1u32.. {
        let link = folder.join(format!("{LINK_NAME}{number}"));
        match rustix::fs::linkat(CWD, &source, CWD, &link, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => {
                let bytes = link.as_os_str().as_bytes().to_vec();
                cx.linked(&link);
                cx.on_failure(Box::new(move || {
                    let _ = fs::remove_file(link);
                }));
                return Ok(bytes);
            }
            Err(Errno::EXIST) => {}
            Err(error) => {
                return Err(Error::kernel(format!("link {} again", open.place()), error));
            }
        }
    }
    Err(open.unsupported("no free name for a hard link", None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_from_an_image_are_absolute() {
        for (path, ghost) in [
            ("Cargo.toml", None),
            ("", None),
            ("/", Some(Ghost::default())),
        ] {
            let place = Place {
                path: path.into(),
                mode: 0o100_644,
                ghost,
                remap: None,
                carried: None,
            };
            let error = place.check("file", place.kind()).expect_err("no path");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
