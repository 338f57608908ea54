//! A file that has no name before it is whole, so that who is to remove it can know of it first.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

/// A file on its way to a name.
#[derive(Debug)]
pub(crate) struct NewFile {
    /// Open for reading and writing.
    pub file: File,
    /// The name that it gets, or has.
    path: PathBuf,
    is_named: bool,
}

impl NewFile {
    /// Makes one that is to be at `path`, with the permissions `mode`.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn nameless(path: &Path, mode: u32) -> io::Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(folder, flags, Mode::from_raw_mode(mode))?;
        Ok(Self {
            file: file.into(),
            path: path.to_owned(),
            is_named: false,
        })
    }

    /// The same, with its name from the beginning where the file system has no files without one.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn create(path: &Path, mode: u32) -> io::Result<Self> {
        let made = Self::nameless(path, mode);
        // Some say that they have none by opening the folder.
        let lacks = |error: &io::Error| {
            let errno = Errno::from_io_error(error);
            matches!(errno, Some(Errno::OPNOTSUPP | Errno::ISDIR))
        };
        if !made.as_ref().is_err_and(lacks) {
            return made;
        }
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(mode);
        Ok(Self {
            file: options.open(path)?,
            path: path.to_owned(),
            is_named: true,
        })
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// Those of link(2), as [`io::ErrorKind::AlreadyExists`].
    pub fn name(&mut self) -> io::Result<()> {
        if !self.is_named {
            let nameless = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, nameless, CWD, &self.path, AtFlags::SYMLINK_FOLLOW)?;
            self.is_named = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_file_has_its_name_when_it_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let mut new = NewFile::create(&path, 0o600).expect("made");
        new.file.write_all(b"whole").expect("written");
        assert!(!path.exists());
        new.name().expect("named");
        assert_eq!(fs::read(&path).expect("read"), b"whole");
        let mut other = NewFile::create(&path, 0o600).expect("made");
        let error = other.name().expect_err("it is taken");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).expect("read"), b"whole");
    }
}
