//! Why a volume could not be saved, brought back or read.

use std::io;
use std::path::PathBuf;

use image::Blame;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Moving pages.
    #[error(transparent)]
    Pages(#[from] pages::Error),
    /// A file or a device outside of the image.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The volume could not be read.
    #[error("cannot read {len} bytes at offset {at_bytes} of the volume")]
    Read {
        /// Where.
        at_bytes: u64,
        /// How much.
        len: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A block of the volume could not be read.
    #[error("cannot read block {block} of the volume, which is {owner}")]
    Unreadable {
        /// Its number.
        block: u64,
        /// Whose it is.
        owner: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Reads under way could not be managed.
    #[error("cannot have several reads of the volume under way")]
    Queue {
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The volume, the target or the image is none that this is for.
    #[error("{0}")]
    Unfit(String),
    /// Metadata of the file system cannot be true.
    #[error("the file system is damaged: block {block}, {field}: {what}")]
    Damaged {
        /// The block that says so.
        block: u64,
        /// What in it.
        field: String,
        /// What is wrong.
        what: String,
    },
    /// No file has this path.
    #[error("{path}: {what}")]
    NoFile {
        /// The path.
        path: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A program that this needs has failed.
    #[error("{program}: {said}")]
    Program {
        /// Its name.
        program: &'static str,
        /// What it said.
        said: String,
    },
    /// A record of the image is damaged.
    #[error("the image's record of the volume: {0}")]
    Corrupt(String),
    /// A stream of dump(8) cannot be true.
    #[error("{}, record {record}: {what}", .path.display())]
    Stream {
        /// Where it was read from.
        path: PathBuf,
        /// The record, of 1 KiB, from 0 on.
        record: u64,
        /// What is wrong.
        what: String,
    },
    /// What was written does not read back.
    #[error("page {page:#x} of {} is not what was written to it", .path.display())]
    Differs {
        /// The target.
        path: PathBuf,
        /// The first such page.
        page: u64,
    },
}

impl Error {
    /// What is to blame.
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
