//! Where an image is.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Directory, Result, Store};

/// Place of an image: a store, or the directory that is one.
#[derive(Clone)]
pub enum Images {
    /// A directory, which is opened when it is needed.
    Directory(PathBuf),
    /// A directory of which nothing is read that another user may have written.
    Own(PathBuf),
    /// A store that is open.
    Store(Arc<dyn Store>),
}

impl Images {
    /// The directory at `path`; unless `trusted`, nothing is read of it that another user may have
    /// written.
    #[must_use]
    pub fn at(path: &Path, trusted: bool) -> Self {
        match trusted {
            true => Self::Directory(path.to_owned()),
            false => Self::Own(path.to_owned()),
        }
    }

    /// Opens the store, which is there.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn open(&self) -> Result<Arc<dyn Store>> {
        match self {
            Self::Directory(path) => Ok(Arc::new(Directory::open(path)?)),
            Self::Own(path) => Ok(Arc::new(Directory::open_own(path)?)),
            Self::Store(store) => Ok(store.handle()),
        }
    }

    /// Opens the store; a directory that is missing is made.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn create(&self) -> Result<Arc<dyn Store>> {
        match self {
            Self::Directory(path) | Self::Own(path) => Ok(Arc::new(Directory::create(path)?)),
            Self::Store(store) => Ok(store.handle()),
        }
    }

    /// The directory that it is, if it is one.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) | Self::Own(path) => Some(path),
            Self::Store(store) => store.directory(),
        }
    }
}

impl fmt::Display for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::Own(path) => path.display().fmt(f),
            Self::Store(store) => store.place().fmt(f),
        }
    }
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_string().fmt(f)
    }
}

/// Two are the same if they are called the same.
impl PartialEq for Images {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Images {}

impl From<PathBuf> for Images {
    fn from(path: PathBuf) -> Self {
        Self::Directory(path)
    }
}

impl From<&Path> for Images {
    fn from(path: &Path) -> Self {
        Self::Directory(path.to_owned())
    }
}

impl From<Arc<dyn Store>> for Images {
    fn from(store: Arc<dyn Store>) -> Self {
        Self::Store(store)
    }
}
