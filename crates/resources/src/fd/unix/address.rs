//! Names of unix sockets: which file belongs to one, and how it is bound to the same name again.
//!
//! A name is what bind(2) was told: it may be relative to a working directory that nobody has any
//! more, absolute below another root, or of a file that is gone. Whoever needs only the name and
//! not the file (an accepted connection, a deleted socket) is bound inside a *scratch* file system
//! that nobody else sees and that vanishes with its last user. There each deleted socket has a root
//! directory of its own, since several may have the same name.

use std::ffi::OsStr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Stat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use super::deferred::Deferred;
use super::names::{self, NAME_MAX_BYTES, leads_to};
use crate::fd::Open;
use crate::{Error, Result};

/// `AF_UNIX` in front of a name makes it an address.
const FAMILY: [u8; 2] = 1u16.to_ne_bytes();
/// How many `..` a relative name may climb.
const DEPTH_MAX: usize = 32;
/// The mode of directories in the scratch file system.
const ANYONE: Mode = Mode::RWXU.union(Mode::RWXG).union(Mode::RWXO);
/// The scratch root directory of names that nobody has to find again; others have the number of
/// their socket's inode.
pub const NOBODYS: u32 = 0;

/// A name, and the file that belongs to it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Address {
    /// `sun_path`: a path (and its NUL), a NUL and an abstract name, or nothing.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// The file, where other processes reach the socket through it.
    #[prost(message, optional, tag = "2")]
    pub file: Option<BoundFile>,
}

/// The file of a bound socket.
#[derive(Clone, PartialEq, prost::Message)]
pub struct BoundFile {
    /// The directory from which the name leads to the file: the root for absolute names, the
    /// working directory for others; empty for this host's root.
    #[prost(bytes = "vec", tag = "1")]
    pub base: Vec<u8>,
    /// Permissions.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    /// Owner.
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    /// Group.
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    /// Where the file is, if it was renamed after the socket was bound; the name is absolute then.
    #[prost(bytes = "vec", tag = "5")]
    pub moved_to: Vec<u8>,
    /// Its other names, each an absolute path of this host (link(2)).
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub links: Vec<Vec<u8>>,
}

impl BoundFile {
    fn moved_to(&self) -> Option<&Path> {
        (!self.moved_to.is_empty()).then(|| Path::new(OsStr::from_bytes(&self.moved_to)))
    }

    /// The file of `stat` with its other names than `main`, which are in the same folder.
    fn new(open: &Open<'_>, stat: &Stat, main: &Path) -> Result<Self> {
        let mut links = Vec::new();
        if stat.st_nlink > 1 {
            links = names::in_folder(main, stat);
            let found = links.len();
            if found as u64 != stat.st_nlink {
                let (links, folder) = (stat.st_nlink, main.parent().unwrap_or(main).display());
                let why = format!("its file has {links} names, of which {folder} has {found}");
                return Err(open.unsupported(&why, None));
            }
            links.retain(|link| link != main);
            let mut long = links
                .iter()
                .filter(|link| link.as_os_str().len() >= NAME_MAX_BYTES);
            if let Some(long) = long.next() {
                let name = long.display();
                let why = format!("its file's name {name} is longer than an address");
                return Err(open.unsupported(&why, None));
            }
        }
        let links = links
            .into_iter()
            .map(|link| link.into_os_string().into_encoded_bytes());
        Ok(Self {
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            links: links.collect(),
            ..Self::default()
        })
    }

    /// The file's other names.
    fn links(&self) -> impl Iterator<Item = &Path> {
        let links = self.links.iter();
        links.map(|link| Path::new(OsStr::from_bytes(link)))
    }

    /// Gives the file at `path`, of a socket of type `kind`, its other names.
    fn link(&self, kind: i32, path: &Path) -> Result<()> {
        for link in self.links() {
            clear_the_way(link, &address_of(link), kind)?;
            rustix::fs::link(path, link).map_err(|error| failed("link", link, error))?;
        }
        Ok(())
    }
}

impl Address {
    /// The address of the socket `open`, with its file if `reachable` and it is still there.
    ///
    /// # Errors
    /// When the file cannot be found by the name any more, or a system call fails.
    pub fn read(open: &Open<'_>, reachable: bool) -> Result<Self> {
        let own = open.own()?;
        let name = name_of(own)?;
        let mut address = Self { name, file: None };
        if address.path().is_none() || !reachable {
            return Ok(address);
        }
        let Some((stat, mut path)) = file_of(own)? else {
            return Ok(address);
        };
        let base = address.base(&stat, &path);
        if base.is_none() && !leads_to(&path, &stat) {
            path = names::in_folder(&path, &stat)
                .into_iter()
                .next()
                .unwrap_or(path);
        }
        let mut file = BoundFile::new(open, &stat, &path)?;
        match base {
            Some(base) => file.base = base,
            None if address.is_renamed(&stat, &path) => {
                file.moved_to = path.into_os_string().into_encoded_bytes();
            }
            None => {
                let (name, path) = (address.print(), path.display());
                let why = format!("it is bound as {name}, which does not lead to {path}");
                return Err(open.unsupported(&why, None));
            }
        }
        address.file = Some(file);
        Ok(address)
    }

    /// A name without a file.
    #[must_use]
    pub fn of_name(name: Vec<u8>) -> Self {
        Self { name, file: None }
    }

    /// Whether the socket has no name at all.
    #[must_use]
    pub fn is_unnamed(&self) -> bool {
        self.name.is_empty()
    }

    /// Whether the name is an abstract one.
    #[must_use]
    pub fn is_abstract(&self) -> bool {
        self.name.first() == Some(&0)
    }

    /// The path, of a name that is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        let name = self.name.strip_suffix(b"\0").unwrap_or(&self.name);
        let is_path = name.first().is_some_and(|first| *first != 0);
        is_path.then(|| Path::new(OsStr::from_bytes(name)))
    }

    /// The name for messages: a path, `@abstract`, or `unnamed`.
    #[must_use]
    pub fn print(&self) -> String {
        match self.path() {
            Some(path) => path.display().to_string(),
            None if self.is_unnamed() => "unnamed".to_owned(),
            None => format!("@{}", self.name[1..].escape_ascii()),
        }
    }

    /// The bytes that bind(2) takes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        [&FAMILY, self.name.as_slice()].concat()
    }

    /// The bytes that connect(2) and sendmsg(2) take.
    #[must_use]
    pub fn reached_by(&self) -> Vec<u8> {
        match self.file.as_ref().and_then(BoundFile::moved_to) {
            None => self.bytes(),
            Some(path) => address_of(path),
        }
    }

    /// Refuses names that no socket can have.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn check(&self) -> Result<()> {
        let inner_nul = |path: &Path| path.as_os_str().as_bytes().contains(&0);
        let file_without_path = self.file.is_some() && self.path().is_none();
        let file = self.file.iter();
        let mut elsewhere = file.flat_map(|file| file.moved_to().into_iter().chain(file.links()));
        let no_place = |path: &Path| {
            inner_nul(path) || !path.is_absolute() || path.as_os_str().len() >= NAME_MAX_BYTES
        };
        if self.name.len() > NAME_MAX_BYTES + 1
            || self.path().is_some_and(inner_nul)
            || file_without_path
            || elsewhere.any(no_place)
        {
            return Err(Error::corrupt("unix socket", "its name is none"));
        }
        Ok(())
    }

    /// From where the name leads to the file that is at `path` now.
    fn base(&self, stat: &Stat, path: &Path) -> Option<Vec<u8>> {
        let name = self.path()?;
        let same = |candidate: &Path| {
            rustix::fs::stat(candidate)
                .is_ok_and(|found| (found.st_dev, found.st_ino) == (stat.st_dev, stat.st_ino))
        };
        if name.is_absolute() && same(name) {
            return Some(Vec::new());
        }
        let relative = name.strip_prefix("/").unwrap_or(name);
        let mut base = PathBuf::from(path);
        for component in relative.components().rev() {
            let Component::Normal(part) = component else {
                return None;
            };
            if base.file_name() != Some(part) || !base.pop() {
                return None;
            }
        }
        same(&base.join(relative)).then(|| base.into_os_string().into_encoded_bytes())
    }

    /// Whether the file was given another name than the one that the socket was bound to, as
    /// programs do that replace a socket without a gap. Both are names below this host's root.
    fn is_renamed(&self, stat: &Stat, path: &Path) -> bool {
        let absolute = self.path().is_some_and(Path::is_absolute) && path.is_absolute();
        absolute && leads_to(path, stat) && path.as_os_str().len() < NAME_MAX_BYTES
    }

    /// Binds `own`, whose inode number was `inode`, to the name; the file, if there is one,
    /// replaces a dead socket's.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when something else is in the way, or a system call's errno.
    pub fn bind(
        &self,
        own: BorrowedFd<'_>,
        (kind, inode): (i32, u32),
        deferred: &mut Deferred,
    ) -> Result<()> {
        let failed =
            |error| Error::kernel(format!("bind a unix socket to {}", self.print()), error);
        match (&self.file, self.path()) {
            _ if self.is_unnamed() => Ok(()),
            (None, None) => sys::socket::bind(own, &self.bytes()).map_err(failed),
            (None, Some(path)) => {
                let route = self.route(inode, deferred)?;
                let result = route.run(|| {
                    make_parents(path)?;
                    let _ = rustix::fs::unlink(path);
                    sys::socket::bind(own, &self.bytes())
                });
                result?.map_err(failed)?;
                if inode != NOBODYS {
                    deferred.delete(route, path.to_owned());
                }
                Ok(())
            }
            (Some(file), Some(path)) => {
                let route = self.route(inode, deferred)?;
                route.run(|| self.bind_file(own, kind, file, path))??;
                file.link(kind, file.moved_to().unwrap_or(&route.leads(path)))
            }
            (Some(_), None) => unreachable!("checked when decoded"),
        }
    }

    fn bind_file(
        &self,
        own: BorrowedFd<'_>,
        kind: i32,
        file: &BoundFile,
        path: &Path,
    ) -> Result<()> {
        clear_the_way(path, &self.bytes(), kind)?;
        sys::socket::bind(own, &self.bytes()).map_err(|error| {
            Error::kernel(format!("bind a unix socket to {}", self.print()), error)
        })?;
        let mut path = path;
        if let Some(moved_to) = file.moved_to() {
            let renamed = clear_the_way(moved_to, &self.reached_by(), kind).and_then(|()| {
                rustix::fs::rename(path, moved_to).map_err(|error| failed("rename", path, error))
            });
            if renamed.is_err() {
                let _ = rustix::fs::unlink(path);
            }
            renamed?;
            path = moved_to;
        }
        let stat = rustix::fs::lstat(path).map_err(|error| failed("look at", path, error))?;
        if (stat.st_uid, stat.st_gid) != (file.uid, file.gid) {
            let owner = rustix::fs::Uid::from_raw(file.uid);
            let group = rustix::fs::Gid::from_raw(file.gid);
            let nofollow = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(CWD, path, Some(owner), Some(group), nofollow)
                .map_err(|error| failed("give away", path, error))?;
        }
        let mode = Mode::from_raw_mode(file.mode & 0o7777);
        rustix::fs::chmodat(CWD, path, mode, AtFlags::empty())
            .map_err(|error| failed("change the mode of", path, error))
    }

    /// From where the name leads to the socket that had this inode number: to its file, or to its
    /// place in the scratch file system. For bind(2), connect(2) and sendmsg(2).
    ///
    /// # Errors
    /// When there can be no scratch file system.
    pub fn route(&self, inode: u32, deferred: &mut Deferred) -> Result<Route> {
        let Some(path) = self.path() else {
            return Ok(Route::Here);
        };
        let Some(file) = &self.file else {
            return Route::in_scratch(deferred.scratch()?, inode, path);
        };
        if file.base.is_empty() {
            return Ok(Route::Here);
        }
        let base = PathBuf::from(OsStr::from_bytes(&file.base));
        Ok(if path.is_absolute() {
            Route::Below(base)
        } else {
            Route::From(base)
        })
    }
}

/// From where a name leads to its socket.
#[derive(Debug)]
pub enum Route {
    /// From this process's own root and working directory.
    Here,
    /// With this as the root directory.
    Below(PathBuf),
    /// With this as the working directory.
    From(PathBuf),
    /// In a root directory of the scratch file system, so deep that the name leads nowhere else.
    Scratch {
        /// The file system.
        mount: OwnedFd,
        /// The root directory in it.
        root: String,
        /// How many directories the name climbs.
        climbs: usize,
    },
}

impl Route {
    fn in_scratch(mount: OwnedFd, inode: u32, path: &Path) -> Result<Self> {
        let climbs = path
            .components()
            .filter(|part| *part == Component::ParentDir)
            .count();
        if climbs > DEPTH_MAX {
            let what = "its name climbs too many directories";
            return Err(Error::corrupt("unix socket", what));
        }
        let root = inode.to_string();
        Ok(Self::Scratch {
            mount,
            root,
            climbs,
        })
    }

    /// Runs `f` there.
    ///
    /// # Errors
    /// When one cannot get there.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        if let Self::Here = self {
            return Ok(f());
        }
        let failed =
            |error: std::io::Error| Error::kernel(format!("enter {}", self.print()), error);
        let result = sys::socket::in_own_fs(|| {
            self.enter()?;
            Ok::<_, Errno>(f())
        });
        result
            .map_err(failed)?
            .map_err(|error| failed(error.into()))
    }

    /// The path on this host of what has the name `path` there; its own in a scratch file system.
    fn leads(&self, path: &Path) -> PathBuf {
        match self {
            Self::Below(base) | Self::From(base) => {
                base.join(path.strip_prefix("/").unwrap_or(path))
            }
            Self::Here | Self::Scratch { .. } => path.to_owned(),
        }
    }

    fn print(&self) -> String {
        match self {
            Self::Below(base) | Self::From(base) => base.display().to_string(),
            Self::Here => "/".to_owned(),
            Self::Scratch { .. } => "the scratch file system".to_owned(),
        }
    }

    fn enter(&self) -> rustix::io::Result<()> {
        match self {
            Self::Here => Ok(()),
            Self::Below(base) => rustix::process::chroot(base),
            Self::From(base) => rustix::process::chdir(base),
            Self::Scratch {
                mount,
                root,
                climbs,
            } => {
                rustix::process::fchdir(mount)?;
                // Whoever connects in somebody else's name may be anyone.
                rustix::process::umask(Mode::empty());
                make_directory(root.as_str())?;
                rustix::process::chroot(root.as_str())?;
                rustix::process::chdir("/")?;
                for _ in 0..=*climbs {
                    make_directory("cwd")?;
                    rustix::process::chdir("cwd")?;
                }
                Ok(())
            }
        }
    }
}

/// Makes a directory for anyone, if it is not there.
fn make_directory(path: impl rustix::path::Arg) -> rustix::io::Result<()> {
    match rustix::fs::mkdir(path, ANYONE) {
        Err(Errno::EXIST) => Ok(()),
        other => other,
    }
}

/// The bytes that connect(2) takes to reach a socket's file at `path`.
fn address_of(path: &Path) -> Vec<u8> {
    [&FAMILY, path.as_os_str().as_bytes(), b"\0"].concat()
}

fn failed(doing: &str, path: &Path, error: Errno) -> Error {
    Error::kernel(format!("{doing} {}", path.display()), error)
}

/// Removes a dead socket of `kind` from `path`, which `address` names.
fn clear_the_way(path: &Path, address: &[u8], kind: i32) -> Result<()> {
    match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(failed("look at", path, error)),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            let what = format!("{} is in the way: it is no socket", path.display());
            Err(Error::Mismatch { what })
        }
        Ok(_) if is_alive(address, kind) => {
            let what = format!("{} is in use by another process", path.display());
            Err(Error::InUse { what })
        }
        Ok(_) => rustix::fs::unlink(path).map_err(|error| failed("unlink", path, error)),
    }
}

/// Whether a socket of `kind` is bound to the file that `address` names: one of another type
/// cannot be connected to, which is what tells it from one that nobody has, without disturbing it.
fn is_alive(address: &[u8], kind: i32) -> bool {
    const STREAM: i32 = 1;
    const DGRAM: i32 = 2;
    let other = if kind == DGRAM { STREAM } else { DGRAM };
    let Ok(probe) = sys::socket::open(1, other, 0) else {
        return false;
    };
    let refused = sys::socket::connect(&probe, address).err();
    let errno = refused.as_ref().and_then(Errno::from_io_error);
    errno != Some(Errno::CONNREFUSED)
}

/// The name of a unix socket, without the family.
///
/// # Errors
/// The system call's errno.
pub fn name_of(own: BorrowedFd<'_>) -> Result<Vec<u8>> {
    let address = sys::socket::name(own)
        .map_err(|error| Error::kernel("ask a unix socket for its name", error))?;
    Ok(address.get(FAMILY.len()..).unwrap_or_default().to_vec())
}

/// The name of a unix socket's peer, without the family; nothing for a peer without one.
///
/// # Errors
/// The system call's errno.
pub fn peer_name_of(own: BorrowedFd<'_>) -> Result<Vec<u8>> {
    match sys::socket::peer_name(own) {
        Ok(address) => Ok(address.get(FAMILY.len()..).unwrap_or_default().to_vec()),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTCONN) => Ok(Vec::new()),
        Err(error) => Err(Error::kernel(
            "ask a unix socket for its peer's name",
            error,
        )),
    }
}

/// The file that the socket is bound to and where it is now; `None` when it was deleted.
fn file_of(own: BorrowedFd<'_>) -> Result<Option<(Stat, PathBuf)>> {
    let failed = |error| Error::kernel("ask a unix socket for its file", error);
    let file = match sys::socket::unix_file(own) {
        Ok(file) => file,
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let stat = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
    if stat.st_nlink == 0 {
        return Ok(None);
    }
    let link = sys::procfs::link(&file);
    let path = rustix::fs::readlink(link, Vec::new()).map_err(|error| failed(error.into()))?;
    let path = names::unmarked(path.as_bytes(), &stat);
    Ok(Some((stat, path)))
}

/// A scratch file system: a mount that is attached nowhere.
///
/// # Errors
/// The system calls' errno.
pub fn new_scratch() -> Result<OwnedFd> {
    let failed = |error| Error::kernel("make a scratch file system for names of sockets", error);
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
    rustix::mount::fsconfig_create(&context).map_err(failed)?;
    let (flags, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
    rustix::mount::fsmount(&context, flags, attributes).map_err(failed)
}

/// Makes the directories on the way to `path`.
fn make_parents(path: &Path) -> std::io::Result<()> {
    let mut at = PathBuf::new();
    for component in path.parent().unwrap_or(Path::new("")).components() {
        at.push(component);
        if let Component::Normal(_) = component {
            make_directory(&at)?;
        }
    }
    Ok(())
}
