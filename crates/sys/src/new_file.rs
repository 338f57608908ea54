//! A file that has no name before it is whole, so that nothing is left of it however this ends, and
//! who is to remove it later can know of it first.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open, rename, unlink};
use rustix::io::Errno;
use tempfile::{Builder, TempPath};

/// How temporary names begin.
const PREFIX: &str = ".stillframe-";

/// A file on its way to a name.
#[derive(Debug)]
pub struct NewFile {
    /// Open for reading and writing.
    pub file: File,
    /// The name that it gets, or has.
    path: PathBuf,
    name: Name,
}

/// By which name a new file can be found.
#[derive(Debug)]
enum Name {
    /// By none.
    Nameless,
    /// By one that it has meanwhile, and that goes with it.
    Temporary(TempPath),
    /// By its own.
    Own,
}

impl NewFile {
    /// Makes one that is to be at `path`, with the permissions `mode`. See open(2), `O_TMPFILE`.
    ///
    /// # Errors
    /// Those of open(2), also where the file system has no files without a name.
    pub fn nameless(path: &Path, mode: u32) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = open(folder_of(path), flags, Mode::from_raw_mode(mode))?;
        Ok(Self {
            file: file.into(),
            path: path.to_owned(),
            name: Name::Nameless,
        })
    }

    /// The same, with its name from the beginning where the file system has no files without one:
    /// who is to remove it is told of that name.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn create(path: &Path, mode: u32) -> io::Result<Self> {
        let made = Self::nameless(path, mode);
        if !made.as_ref().is_err_and(lacks) {
            return made;
        }
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(mode);
        Ok(Self {
            file: options.open(path)?,
            path: path.to_owned(),
            name: Name::Own,
        })
    }

    /// The same, with a temporary name where the file system has no files without one.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn beside(path: &Path, mode: u32) -> io::Result<Self> {
        let made = Self::nameless(path, mode);
        if !made.as_ref().is_err_and(lacks) {
            return made;
        }
        let mut builder = Builder::new();
        let builder = builder
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(mode));
        let (file, temporary) = builder.tempfile_in(folder_of(path))?.into_parts();
        Ok(Self {
            file,
            path: path.to_owned(),
            name: Name::Temporary(temporary),
        })
    }

    /// Gives it its name, which must be free.
    ///
    /// # Errors
    /// Those of link(2), as [`io::ErrorKind::AlreadyExists`].
    pub fn name(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.name, Name::Own) {
            Name::Own => Ok(()),
            Name::Nameless => link(self.file.as_fd(), &self.path).map_err(|errno| {
                self.name = Name::Nameless;
                errno.into()
            }),
            Name::Temporary(path) => path.persist_noclobber(&self.path).map_err(|error| {
                self.name = Name::Temporary(error.path);
                error.error
            }),
        }
    }

    /// Gives it its name, in place of another file of that name.
    ///
    /// # Errors
    /// Those of link(2) and rename(2); a file of that name is as it was.
    pub fn publish(self) -> io::Result<()> {
        let path = &self.path;
        match self.name {
            Name::Own => return Ok(()),
            Name::Temporary(name) => return name.persist(path).map_err(|error| error.error),
            Name::Nameless => {}
        }
        match link(self.file.as_fd(), path) {
            Err(Errno::EXIST) => {}
            other => return Ok(other?),
        }
        // A name that nobody has, for a moment.
        let mut builder = Builder::new();
        let moment = builder.prefix(PREFIX);
        let fd = self.file.as_fd();
        let moment = moment.make_in(folder_of(path), |name| Ok(link(fd, name)?))?;
        let moment = moment.into_temp_path().keep();
        let moment = moment.map_err(|error| error.error)?;
        rename(&moment, path).map_err(|error| {
            let _ = unlink(&moment);
            error.into()
        })
    }
}

/// Whether a file system says that it has no files without a name; some do by opening the folder.
fn lacks(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL))
}

fn link(fd: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<()> {
    let own = crate::procfs::link(fd);
    linkat(CWD, own, CWD, path, AtFlags::SYMLINK_FOLLOW)
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    folder.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A new file beside `path` with a temporary name, as on a file system that has no others.
    fn named(path: &Path) -> NewFile {
        let folder = folder_of(path);
        let named = Builder::new().prefix(PREFIX).tempfile_in(folder).unwrap();
        let (file, temporary) = named.into_parts();
        NewFile {
            file,
            path: path.to_owned(),
            name: Name::Temporary(temporary),
        }
    }

    #[test]
    fn a_file_replaces_another_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let all = [
            (&b"first"[..], NewFile::beside(&path, 0o600).unwrap()),
            (b"other", NewFile::beside(&path, 0o600).unwrap()),
            (b"third", named(&path)),
        ];
        for (contents, mut new) in all {
            new.file.write_all(contents).unwrap();
            new.publish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), contents);
        }
        assert_eq!(names(), 1);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(NewFile::beside(&path, 0o600).unwrap());
        drop(named(&path));
        assert_eq!(std::fs::read(&path).unwrap(), b"third");
        assert_eq!(names(), 1);
        NewFile::beside(&folder.path().join("none/file"), 0o600).unwrap_err();
        // A directory cannot be replaced, and nothing is left.
        let taken = folder.path().join("folder");
        std::fs::create_dir(&taken).unwrap();
        let new = NewFile::beside(&taken, 0o600).unwrap();
        new.publish().unwrap_err();
        named(&taken).publish().unwrap_err();
        assert_eq!(names(), 2);
    }

    #[test]
    fn a_name_that_is_taken_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        let all = [NewFile::create(&one, 0o600).unwrap(), named(&other)];
        for (mut new, at) in all.into_iter().zip([one, other]) {
            new.file.write_all(b"whole").unwrap();
            assert!(!at.exists());
            new.name().unwrap();
            new.name().unwrap();
            assert_eq!(std::fs::read(&at).unwrap(), b"whole");
            for mut other in [NewFile::create(&at, 0o600).unwrap(), named(&at)] {
                let error = other.name().unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            }
            assert_eq!(std::fs::read(&at).unwrap(), b"whole");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
