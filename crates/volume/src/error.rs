//! Why a volume could not be saved, brought back or read.

use std::io;
use std::path::PathBuf;

use image::Blame;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Moving pages.
    #[error(transparent)]
    Pages(#[from] pages::Error),
    #[error("cannot {action} {}", .path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cannot read {len} bytes at offset {at_bytes} of the volume")]
    Read {
        at_bytes: u64,
        len: usize,
        source: io::Error,
    },
    #[error("cannot read block {block} of the volume, which is {owner}")]
    Unreadable {
        block: u64,
        owner: String,
        source: io::Error,
    },
    #[error("cannot have several reads of the volume under way")]
    Queue { source: io::Error },
    /// The volume, the target or the image is none that this is for.
    #[error("{0}")]
    Unfit(String),
    #[error("the file system is damaged: block {block}, {field}: {what}")]
    Damaged {
        block: u64,
        field: String,
        what: String,
    },
    /// No file has this path.
    #[error("{path}: {what}")]
    NoFile { path: String, what: &'static str },
    /// A program that this needs has failed.
    #[error("{program}: {said}")]
    Program { program: &'static str, said: String },
    #[error("the image's record of the volume: {0}")]
    Corrupt(String),
    #[error("{}, record {record}: {what}", .path.display())]
    Stream {
        path: PathBuf,
        record: u64,
        what: String,
    },
    #[error("page {page:#x} of {} is not what was written to it", .path.display())]
    Differs { path: PathBuf, page: u64 },
}

impl Error {
    /// Returns the side that caused the error.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            // What our own sources and sinks say has come through the pipe.
            Self::Pages(pages::Error::Other(inner)) if inner.is::<Self>() => {
                let inner = inner.downcast_ref::<Self>().expect("it is one");
                inner.blame()
            }
            Self::Image(error) | Self::Pages(pages::Error::Image { source: error, .. }) => {
                error.blame()
            }
            Self::Damaged { .. }
            | Self::Corrupt(_)
            | Self::Stream { .. }
            | Self::Differs { .. } => Blame::Corrupt,
            Self::Unfit(_) => Blame::Unsupported,
            Self::NoFile { .. } => Blame::Gone,
            Self::File { .. } | Self::Read { .. } | Self::Unreadable { .. } => Blame::Store,
            Self::Queue { .. } | Self::Pages(_) | Self::Program { .. } => Blame::Kernel,
        }
    }

    /// Says what was tried with a file.
    pub(crate) fn file<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::File {
            action,
            path,
            source: source.into(),
        }
    }

    /// Says what of a file system's metadata cannot be true.
    pub(crate) fn damaged(block: u64, field: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Damaged {
            block,
            field: field.into(),
            what: what.into(),
        }
    }
}
