//! A file that gets its name when it is whole; until then it has none, so that nothing is left
//! of it however this ends.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open, rename, unlink};
use rustix::io::Errno;
use tempfile::{Builder, NamedTempFile};

use crate::{Error, Result};

/// A volume has secrets.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// A new file.
#[derive(Debug)]
pub struct New {
    /// To be written.
    pub file: File,
    path: PathBuf,
    /// The name that it has meanwhile, where the file system makes none without.
    named: Option<NamedTempFile>,
}

impl New {
    /// A new file in the folder of `path`.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn beside(path: &Path) -> Result<Self> {
        let failed = || Error::file("make a file for", path);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, named) = match open(folder_of(path), flags, MODE) {
            Ok(fd) => (File::from(fd), None),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let mut builder = Builder::new();
                let named = builder.prefix(".stillframe-").tempfile_in(folder_of(path));
                let named = named.map_err(failed())?;
                (named.as_file().try_clone().map_err(failed())?, Some(named))
            }
            Err(error) => return Err(failed()(error.into())),
        };
        Ok(Self {
            file,
            path: path.to_owned(),
            named,
        })
    }

    /// Gives it its name, in place of another file of that name.
    ///
    /// # Errors
    /// [`Error::File`]; a file of that name is as it was.
    pub fn publish(self) -> Result<()> {
        let path = &self.path;
        let failed = || Error::file::<std::io::Error>("make", path);
        if let Some(named) = self.named {
            let named = named.persist(path);
            return named.map(drop).map_err(|error| failed()(error.error));
        }
        let fd = OwnedFd::from(self.file);
        match link(&fd, path) {
            Err(Errno::EXIST) => {}
            other => return other.map_err(|error| failed()(error.into())),
        }
        // A name that nobody has, for a moment.
        let mut builder = Builder::new();
        let moment = builder.prefix(".stillframe-");
        let moment = moment.make_in(folder_of(path), |name| Ok(link(&fd, name)?));
        let moment = moment.map_err(failed())?.into_temp_path();
        let moment = moment.keep().map_err(|error| failed()(error.error))?;
        rename(&moment, path).map_err(|error| {
            let _ = unlink(&moment);
            failed()(error.into())
        })
    }
}

fn link(fd: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    let own = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    linkat(CWD, own, CWD, path, AtFlags::SYMLINK_FOLLOW)
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    folder.unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_has_its_name_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        for contents in [b"first", b"other"] {
            let mut new = New::beside(&path).unwrap();
            new.file.write_all(contents).unwrap();
            new.publish().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), contents);
            assert_eq!(names(), 1);
        }
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(New::beside(&path).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        assert_eq!(names(), 1);
        let error = New::beside(&folder.path().join("none/file")).unwrap_err();
        assert!(error.to_string().contains("none/file"), "{error}");
        // A directory cannot be replaced, and nothing is left.
        std::fs::create_dir(folder.path().join("folder")).unwrap();
        let new = New::beside(&folder.path().join("folder")).unwrap();
        new.publish().unwrap_err();
        assert_eq!(names(), 2);
    }
}
