//! Why a tree could not be stopped, or looked at while it is.

use std::io;

use image::Blame;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The target is or uses something that is not supported.
    #[error(transparent)]
    Resource(#[from] resources::Error),
    /// A stopped thread did not do as it should.
    #[error(transparent)]
    Tracee(#[from] tracee::Error),
    /// A system call of this process failed.
    #[error("{doing}")]
    Kernel {
        /// The attempt and its object.
        doing: String,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// There is no such process, or it ended.
    #[error("pid {pid}: there is no such process, or it has ended")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// Memory of a killed dump is in a process, with no thread in it.
    #[error("pid {pid}: memory of a killed dump is still there")]
    LeftArea {
        /// The process.
        pid: i32,
    },
    /// A thread is still on its way back from a dump that was cut short.
    #[error("pid {pid}: it has not come back yet from a dump that was cut short")]
    Returning {
        /// The process.
        pid: i32,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failed system call of this process.
    pub(crate) fn kernel(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Kernel {
            doing: doing.into(),
            source: source.into(),
        }
    }

    /// Tells whose fault it is.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Resource(error) => error.blame(),
            Self::Tracee(tracee::Error::Gone { .. }) | Self::Gone { .. } => Blame::Gone,
            _ => Blame::Kernel,
        }
    }
}
