//! A store that is a directory: one file for each object.

mod file;

use std::fs::DirBuilder;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, RawDir, SeekFrom, Stat};
use rustix::io::Errno;
use sys::host;

use self::file::{File, NewFile};
use crate::{Claim, Error, NewObject, Object, Result, Store, check_name};

/// A directory of mode 0700 whose files, of mode 0600, are the objects; clones share the
/// descriptor.
///
/// An object under construction has no name at all (`O_TMPFILE`) where the file system can do that,
/// so nothing stays behind even of a process that is killed; elsewhere it has a name starting with
/// a dot.
#[derive(Clone)]
pub struct Directory {
    inner: Arc<Location>,
}

struct Location {
    path: PathBuf,
    fd: OwnedFd,
    /// The directories that got a new entry when this one was made; a durable commit writes them
    /// out.
    ancestors: Vec<PathBuf>,
    /// True if nothing is read that another user may have written.
    own_only: bool,
    /// True if the file system makes files without a name, as far as we know.
    nameless: AtomicBool,
    /// True if somebody in this process has a claim through this descriptor: flock(2) tells only
    /// descriptors apart.
    claimed: AtomicBool,
    /// True if the descriptor was read from, so that it must be rewound.
    listed: Mutex<bool>,
}

/// How temporary names start: no object's name starts with a dot.
const TEMPORARY: &str = ".stillframe-new-";

/// Name of the directory itself in messages.
const THE_DIRECTORY: &str = "the directory";

const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
const DIRECTORY_MODE: u32 = 0o700;

/// Numbers the temporary names of this process.
static SERIAL: AtomicU64 = AtomicU64::new(0);

fn temporary(name: &str) -> String {
    let serial = SERIAL.fetch_add(1, Relaxed);
    format!("{TEMPORARY}{}-{serial}-{name}", std::process::id())
}

impl Directory {
    /// Opens the directory at `path`, which must exist.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let fd = open_directory(path).map_err(|errno| failed_path("open", path, errno))?;
        Ok(Self::new(path, fd, Vec::new()))
    }

    /// Opens the directory at `path`, which must exist. A file or directory that another user but
    /// root owns, or may write to, is not read: neither in this directory nor in those beside it.
    ///
    /// # Errors
    /// [`Error::Untrusted`], [`Error::System`].
    pub fn open_own(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let fd = open_directory(path).map_err(|errno| failed_path("open", path, errno))?;
        Self::own(path, fd)
    }

    /// One of which nothing is read that another user may have written.
    fn own(path: &Path, fd: OwnedFd) -> Result<Self> {
        let directory = Self::with(path, fd, Vec::new(), true);
        let inner = &directory.inner;
        let stat = rustix::fs::fstat(&inner.fd);
        let stat = stat.map_err(|errno| failed_path("inspect", path, errno))?;
        inner.trust(THE_DIRECTORY, &stat)?;
        Ok(directory)
    }

    /// Opens the directory at `path`; makes it, and those above it, with mode 0700 where it is
    /// missing.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match open_directory(path) {
            Ok(fd) => return Ok(Self::new(path, fd, Vec::new())),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed_path("open", path, errno)),
        }
        let ancestors = missing_parents(path);
        DirBuilder::new()
            .recursive(true)
            .mode(DIRECTORY_MODE)
            .create(host::path(path))
            .map_err(|source| {
                let store = path.display().to_string();
                Error::System {
                    action: "make",
                    name: THE_DIRECTORY.into(),
                    store,
                    source,
                }
            })?;
        let fd = open_directory(path).map_err(|errno| failed_path("open", path, errno))?;
        Ok(Self::new(path, fd, ancestors))
    }

    fn new(path: &Path, fd: OwnedFd, ancestors: Vec<PathBuf>) -> Self {
        Self::with(path, fd, ancestors, false)
    }

    fn with(path: &Path, fd: OwnedFd, ancestors: Vec<PathBuf>, own_only: bool) -> Self {
        Self {
            inner: Arc::new(Location {
                path: path.into(),
                fd,
                ancestors,
                own_only,
                nameless: AtomicBool::new(true),
                claimed: AtomicBool::new(false),
                listed: Mutex::new(false),
            }),
        }
    }
}

/// Returns the way from directory `from` to directory `to`, both of which exist: a relative path
/// without symbolic links, so that it leads there however the two are reached.
///
/// # Errors
/// [`Error::System`]; also for names that are not UTF-8.
pub fn way(from: &Path, to: &Path) -> Result<String> {
    let real = |path: &Path| {
        let real = host::real(path);
        real.map_err(|source| Error::System {
            action: "find",
            name: THE_DIRECTORY.into(),
            store: path.display().to_string(),
            source,
        })
    };
    let (from, to) = (real(from)?, real(to)?);
    let pairs = from.components().zip(to.components());
    let common = pairs.take_while(|(one, other)| one == other).count();
    let up = from.components().skip(common).map(|_| Path::new(".."));
    let way: PathBuf = up
        .map(Path::as_os_str)
        .chain(to.components().skip(common).map(|part| part.as_os_str()))
        .collect();
    match way.to_str() {
        Some("") => Ok(".".into()),
        Some(way) => Ok(way.into()),
        None => Err(failed_path("name", &to, Errno::ILSEQ)),
    }
}

/// Lists, innermost first, the directories that get a new entry when `path` is made with all above
/// it.
fn missing_parents(path: &Path) -> Vec<PathBuf> {
    let mut parents = Vec::new();
    for parent in path.ancestors().skip(1) {
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        parents.push(parent.to_path_buf());
        if host::path(parent).is_dir() {
            break;
        }
    }
    parents
}

/// Why user `own` cannot know who has written a file, if so. In a directory with the sticky bit
/// others can only add names.
fn distrusted(stat: &Stat, own: u32) -> Option<String> {
    let writable = Mode::WGRP.union(Mode::WOTH);
    let mode = Mode::from_raw_mode(stat.st_mode);
    let is_sticky =
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory && mode.contains(Mode::SVTX);
    match stat.st_uid {
        uid if uid != own && uid != 0 => Some(format!("it is user {uid}'s")),
        _ if mode.intersects(writable) && !is_sticky => {
            Some(format!("others may write to it (mode {:04o})", mode.bits()))
        }
        _ => None,
    }
}

fn open_directory(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(host::path(path), flags, Mode::empty())
}

fn failed_path(action: &'static str, path: &Path, errno: Errno) -> Error {
    let store = path.display().to_string();
    Error::System {
        action,
        name: THE_DIRECTORY.into(),
        store,
        source: errno.into(),
    }
}

impl Location {
    fn failed(&self, action: &'static str, name: &str, source: impl Into<io::Error>) -> Error {
        let store = self.path.display().to_string();
        Error::System {
            action,
            name: name.into(),
            store,
            source: source.into(),
        }
    }

    /// Like [`Location::failed`], with [`Error::Missing`] for a name that is not there.
    fn failed_name(&self, action: &'static str, name: &str, errno: Errno) -> Error {
        if errno == Errno::NOENT {
            return Error::Missing {
                name: name.into(),
                store: self.path.display().to_string(),
            };
        }
        self.failed(action, name, errno)
    }

    /// Checks that nobody but this user and root can have written what is looked at.
    fn trust(&self, name: &str, stat: &Stat) -> Result<()> {
        let own = rustix::process::geteuid().as_raw();
        match distrusted(stat, own).filter(|_| self.own_only) {
            None => Ok(()),
            Some(why) => Err(Error::Untrusted {
                name: name.into(),
                store: self.path.display().to_string(),
                why,
            }),
        }
    }

    /// Makes a file without a name; none where the file system cannot.
    fn create_nameless(&self) -> rustix::io::Result<Option<OwnedFd>> {
        if !self.nameless.load(Relaxed) {
            return Ok(None);
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.fd, ".", flags, FILE_MODE) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                self.nameless.store(false, Relaxed);
                Ok(None)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Makes a file with a temporary name that nobody has.
    fn create_named(&self, name: &str) -> rustix::io::Result<(OwnedFd, String)> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        loop {
            let temporary = temporary(name);
            match rustix::fs::openat(&self.fd, temporary.as_str(), flags, FILE_MODE) {
                Ok(fd) => return Ok((fd, temporary)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Gives the nameless file `fd` the name `name`, which must be free.
    fn link(&self, fd: BorrowedFd<'_>, name: &str) -> rustix::io::Result<()> {
        match rustix::fs::linkat(fd, "", &self.fd, name, AtFlags::EMPTY_PATH) {
            // Older kernels ask for CAP_DAC_READ_SEARCH here, and for nothing when it goes through
            // /proc.
            Err(Errno::NOENT | Errno::PERM) => {
                let path = sys::procfs::link(fd);
                rustix::fs::linkat(CWD, path, &self.fd, name, AtFlags::SYMLINK_FOLLOW)
            }
            result => result,
        }
    }

    /// Lists the names of objects, sorted; calls `temporary` with each temporary name.
    fn list(&self, temporary: &dyn Fn(&str)) -> rustix::io::Result<Vec<String>> {
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *listed, true) {
            rustix::fs::seek(&self.fd, SeekFrom::Start(0))?;
        }
        let mut names = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut entries = RawDir::new(&self.fd, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let file = matches!(entry.file_type(), FileType::RegularFile | FileType::Unknown);
            let (true, Ok(name)) = (file, entry.file_name().to_str()) else {
                continue;
            };
            if check_name(name).is_ok() {
                names.push(name.to_owned());
            } else if name.starts_with(TEMPORARY) {
                temporary(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Keeps other claims out; none where the file system has no locks.
    fn lock(&self) -> Result<bool> {
        match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Err(self.busy()),
            Err(Errno::BADF | Errno::OPNOTSUPP | Errno::NOLCK | Errno::NOSYS) => Ok(false),
            Err(errno) => Err(self.failed("lock", THE_DIRECTORY, errno)),
        }
    }

    fn busy(&self) -> Error {
        Error::Busy {
            store: self.path.display().to_string(),
        }
    }

    fn remove_temporary(&self, name: &str) {
        // Nobody is left to tell; the next claim tries again.
        let _ = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty());
    }

    fn sync_directories(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.fd)?;
        for path in &self.ancestors {
            rustix::fs::fsync(open_directory(path)?)?;
        }
        Ok(())
    }
}

/// Ends a claim.
struct Release {
    directory: Arc<Location>,
    locked: bool,
}

impl Drop for Release {
    fn drop(&mut self) {
        if self.locked {
            // Children of this process may have the descriptor too, so its end here is not enough.
            let _ = rustix::fs::flock(&self.directory.fd, FlockOperation::Unlock);
        }
        self.directory.claimed.store(false, Ordering::Release);
    }
}

impl Store for Directory {
    fn claim(&self) -> Result<Claim> {
        let inner = &self.inner;
        if inner.claimed.swap(true, Ordering::Acquire) {
            return Err(inner.busy());
        }
        let mut guard = Release {
            directory: Arc::clone(inner),
            locked: false,
        };
        guard.locked = inner.lock()?;
        let names = inner
            .list(&|name| {
                if guard.locked {
                    inner.remove_temporary(name);
                }
            })
            .map_err(|errno| inner.failed("list", THE_DIRECTORY, errno))?;
        Ok(Claim {
            names,
            exclusive: guard.locked,
            _guard: Box::new(guard),
        })
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>> {
        check_name(name)?;
        let inner = &self.inner;
        let failed = |errno| inner.failed("create", name, errno);
        let (fd, temporary) = match inner.create_nameless().map_err(failed)? {
            Some(fd) => (fd, None),
            None => {
                let (fd, temporary) = inner.create_named(name).map_err(failed)?;
                (fd, Some(temporary))
            }
        };
        Ok(Box::new(NewFile {
            fd,
            name: name.into(),
            temporary,
            reserved: AtomicBool::new(false),
            written_bytes: AtomicU64::new(0),
            directory: Arc::clone(inner),
        }))
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>> {
        check_name(name)?;
        // A fifo of this name must not block us, and a link must not lead elsewhere.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let inner = &self.inner;
        let fd = rustix::fs::openat(&inner.fd, name, flags, Mode::empty())
            .map_err(|errno| inner.failed_name("open", name, errno))?;
        let stat = rustix::fs::fstat(&fd).map_err(|errno| inner.failed("inspect", name, errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(inner.failed("open", name, source));
        }
        inner.trust(name, &stat)?;
        let len_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        Ok(Box::new(File {
            fd,
            name: name.into(),
            len_bytes,
            directory: Arc::clone(inner),
        }))
    }

    fn list(&self) -> Result<Vec<String>> {
        self.inner
            .list(&|_| {})
            .map_err(|errno| self.inner.failed("list", THE_DIRECTORY, errno))
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        rustix::fs::unlinkat(&self.inner.fd, name, AtFlags::empty())
            .map_err(|errno| self.inner.failed_name("remove", name, errno))
    }

    fn free(&self, name: &str, parts_bytes: &[Range<u64>]) -> Result<u64> {
        check_name(name)?;
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let inner = &self.inner;
        let fd = rustix::fs::openat(&inner.fd, name, flags, Mode::empty())
            .map_err(|errno| inner.failed_name("open", name, errno))?;
        let failed = |errno| inner.failed("free parts of", name, errno);
        let room_bytes = || {
            let stat = rustix::fs::fstat(&fd).map_err(failed)?;
            Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
        };
        let before: u64 = room_bytes()?;
        file::punch(&fd, parts_bytes).map_err(failed)?;
        Ok(before.saturating_sub(room_bytes()?))
    }

    fn way_to(&self, other: &dyn Store) -> Result<String> {
        match other.directory() {
            Some(other) => way(&self.inner.path, other),
            None => Err(self.inner.failed(
                "find the way to",
                &other.place(),
                io::ErrorKind::Unsupported,
            )),
        }
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.inner.path)
    }

    fn beside(&self, path: &str) -> Result<Arc<dyn Store>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let place = self.inner.path.join(path);
        let opened = rustix::fs::openat(&self.inner.fd, path, flags, Mode::empty());
        let fd = opened.map_err(|errno| failed_path("open", &place, errno))?;
        Ok(Arc::new(match self.inner.own_only {
            true => Self::own(&place, fd)?,
            false => Self::new(&place, fd, Vec::new()),
        }))
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn point(&self, name: &str, path: Option<&str>) -> Result<()> {
        check_name(name)?;
        let fd = &self.inner.fd;
        let failed = |errno| self.inner.failed("link", name, errno);
        match rustix::fs::readlinkat(fd, name, Vec::new()) {
            Ok(old) if path.is_some_and(|path| path.as_bytes() == old.as_bytes()) => return Ok(()),
            Ok(_) => rustix::fs::unlinkat(fd, name, AtFlags::empty()).map_err(failed)?,
            Err(Errno::NOENT) => {}
            // What is no link is not ours.
            Err(errno) => return Err(failed(errno)),
        }
        path.map_or(Ok(()), |path| rustix::fs::symlinkat(path, fd, name))
            .map_err(failed)
    }

    fn place(&self) -> String {
        self.inner.path.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_another_user_may_have_written_is_not_read() {
        let scratch = scratch();
        let below = scratch.path().join("image");
        let made = Directory::create(&below).expect("it can be made");
        for name in ["one", "two"] {
            let object = made.create(name).expect("it can be made");
            object.write_at(b"text", 0).expect("written");
            object.commit(false).expect("whole");
        }
        let mode = |name: &str, mode| {
            let all = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(below.join(name), all).expect("ours");
        };
        let why = |error: Error| match error {
            Error::Untrusted { name, why, .. } => format!("{name}: {why}"),
            other => panic!("{other}"),
        };
        mode("two", 0o622);
        let own = Directory::open_own(&below).expect("it is ours");
        own.open("one").map(drop).expect("it is ours");
        let refused = own.open("two").map(drop).expect_err("others write to it");
        assert_eq!(why(refused), "two: others may write to it (mode 0622)");
        made.open("two").map(drop).expect("that was not asked for");
        for (bits, fine) in [
            (0o755, true),
            (0o1777, true),
            (0o775, false),
            (0o757, false),
        ] {
            mode("", bits);
            let opened = Directory::open_own(&below).map(drop);
            assert_eq!(opened.is_ok(), fine, "{bits:o}");
            let beside = Directory::open_own(scratch.path()).expect("it is ours");
            let opened = beside.beside("image").map(drop);
            assert_eq!(opened.is_ok(), fine, "{bits:o}");
        }
        mode("", 0o755);
        let mut stat = rustix::fs::stat(&below).expect("it is there");
        for (uid, own, want) in [(7, 7, None), (0, 7, None), (8, 7, Some("it is user 8's"))] {
            stat.st_uid = uid;
            assert_eq!(distrusted(&stat, own).as_deref(), want);
        }
    }

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().expect("a scratch directory")
    }

    /// Returns a new directory each time; all go when the scratch directory goes.
    fn directories(nameless: bool, scratch: &Path) -> impl Fn() -> Box<dyn Store> {
        let base = scratch.to_path_buf();
        move || {
            let number = SERIAL.fetch_add(1, Relaxed);
            let store = Directory::create(base.join(number.to_string())).expect("a directory");
            store.inner.nameless.store(nameless, Relaxed);
            Box::new(store)
        }
    }

    #[test]
    fn conforms() {
        let scratch = scratch();
        crate::conformance::suite(&directories(true, scratch.path()));
    }

    #[test]
    fn conforms_where_files_need_names() {
        let scratch = scratch();
        crate::conformance::suite(&directories(false, scratch.path()));
    }

    #[test]
    fn modes_keep_others_out() {
        let scratch = scratch();
        let path = scratch.path().join("a/b");
        let store = Directory::create(&path).unwrap();
        assert_eq!(
            store.inner.ancestors,
            [scratch.path().join("a"), scratch.path().into()]
        );
        store.create("one").unwrap().commit(true).unwrap();
        let mode = |path: PathBuf| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(path.clone()), 0o700);
        assert_eq!(mode(scratch.path().join("a")), 0o700);
        assert_eq!(mode(path.join("one")), 0o600);
    }

    #[test]
    fn nothing_stays_of_a_dropped_object() {
        for nameless in [true, false] {
            let scratch = scratch();
            let store = Directory::create(scratch.path()).unwrap();
            store.inner.nameless.store(nameless, Relaxed);
            store.create("one").unwrap().commit(false).unwrap();
            let new = store.create("one").unwrap();
            new.write_at(&[1; 100], 0).unwrap();
            assert_eq!(
                scratch.path().read_dir().unwrap().count(),
                2 - usize::from(nameless)
            );
            drop(new);
            assert_eq!(scratch.path().read_dir().unwrap().count(), 1);
        }
    }

    #[test]
    fn replacing_leaves_no_temporary_name() {
        let scratch = scratch();
        let store = Directory::create(scratch.path()).unwrap();
        for _ in 0..3 {
            store.create("one").unwrap().commit(false).unwrap();
            assert_eq!(scratch.path().read_dir().unwrap().count(), 1);
        }
    }

    #[test]
    fn links_and_fifos_are_not_objects() {
        let scratch = scratch();
        let store = Directory::create(scratch.path()).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", scratch.path().join("link")).unwrap();
        let dir = &store.inner.fd;
        rustix::fs::mknodat(dir, "fifo", FileType::Fifo, FILE_MODE, 0).unwrap();
        assert!(matches!(store.open("link"), Err(Error::System { .. })));
        assert!(matches!(store.open("fifo"), Err(Error::System { .. })));
        assert!(store.list().unwrap().is_empty());
    }

    #[test]
    fn claims_keep_other_handles_out_and_clear_leftovers() {
        let scratch = scratch();
        let store = Directory::create(scratch.path()).unwrap();
        store.inner.nameless.store(false, Relaxed);
        let new = store.create("one").unwrap();
        // As if the process had been killed.
        std::mem::forget(new);
        std::fs::write(scratch.path().join(".profile"), "").unwrap();
        assert_eq!(scratch.path().read_dir().unwrap().count(), 2);
        let other = Directory::open(scratch.path()).unwrap();
        let claim = other.claim().unwrap();
        assert!(claim.names.is_empty());
        assert_eq!(
            scratch.path().read_dir().unwrap().count(),
            1,
            "only .profile"
        );
        assert!(matches!(store.claim(), Err(Error::Busy { .. })));
        drop(claim);
        drop(store.claim().unwrap());
    }

    #[test]
    fn long_directories_are_listed_whole() {
        let scratch = scratch();
        let store = Directory::create(scratch.path()).unwrap();
        let names: Vec<String> = (0..300)
            .map(|number| format!("object-{number:03}"))
            .collect();
        for name in &names {
            store.create(name).unwrap().commit(false).unwrap();
        }
        assert_eq!(store.list().unwrap(), names);
        assert_eq!(store.list().unwrap(), names);
    }

    #[test]
    fn reserved_space_is_given_back() {
        let scratch = scratch();
        let store = Directory::create(scratch.path()).unwrap();
        let new = store.create("one").unwrap();
        new.reserve(1 << 20).unwrap();
        new.write_at(b"abc", 0).unwrap();
        new.commit(false).unwrap();
        let stat = rustix::fs::stat(scratch.path().join("one")).unwrap();
        assert_eq!(stat.st_size, 3);
        assert!(stat.st_blocks * 512 < 1 << 20, "{} blocks", stat.st_blocks);
    }

    #[test]
    fn a_missing_directory_is_named() {
        let scratch = scratch();
        let Err(error) = Directory::open(scratch.path().join("no")) else {
            panic!("opened")
        };
        assert!(error.to_string().ends_with("/no"), "{error}");
    }
}
