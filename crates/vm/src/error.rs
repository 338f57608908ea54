//! Why the memory of a machine could not be saved or brought back.

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
    /// A machine's memory could not be served.
    #[error(transparent)]
    Serve(#[from] serve::Error),
    #[error("cannot reach into QEMU")]
    Process(#[source] Box<freeze::Error>),
    #[error("cannot reach into QEMU")]
    Memory(#[source] memory::Error),
    /// A system call of this process failed.
    #[error("{doing}")]
    Kernel {
        doing: &'static str,
        source: io::Error,
    },
    /// The file or the image is none that this is for.
    #[error("{0}")]
    Unfit(String),
    /// Something that the work needs has ended.
    #[error("{0}")]
    Gone(String),
    #[error("the monitor {place} cannot be used: {what}")]
    Monitor { place: String, what: String },
    #[error("QEMU refuses {command}: {what}")]
    Refused { command: &'static str, what: String },
    #[error("the volume cannot be saved with the machine")]
    Companion {
        blame: Blame,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the image's record of {record}: {what}")]
    Corrupt { record: &'static str, what: String },
}

impl From<freeze::Error> for Error {
    fn from(error: freeze::Error) -> Self {
        match error {
            freeze::Error::Gone { pid } => Self::Gone(format!("QEMU, process {pid}, has ended")),
            error => Self::Process(Box::new(error)),
        }
    }
}

impl Error {
    /// Returns the side that caused the error.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Image(error)
            | Self::Serve(serve::Error::Image(error))
            | Self::Serve(serve::Error::Pages(pages::Error::Image { source: error, .. }))
            | Self::Pages(pages::Error::Image { source: error, .. }) => error.blame(),
            Self::Corrupt { .. } => Blame::Corrupt,
            Self::Process(error) => error.blame(),
            Self::Companion { blame, .. } => *blame,
            Self::Unfit(_) | Self::Serve(serve::Error::Unable(_)) => Blame::Unsupported,
            Self::Serve(serve::Error::Gone { .. }) | Self::Gone(_) => Blame::Gone,
            Self::File { .. } | Self::Pages(pages::Error::Object { .. }) => Blame::Store,
            Self::Pages(_)
            | Self::Memory(_)
            | Self::Serve(_)
            | Self::Monitor { .. }
            | Self::Refused { .. }
            | Self::Kernel { .. } => Blame::Kernel,
        }
    }

    /// Says what was tried.
    pub(crate) fn kernel<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Kernel {
            doing,
            source: source.into(),
        }
    }

    /// Says that a watchdog could not be told something: it is gone.
    pub(crate) fn untold(source: io::Error) -> Self {
        Self::kernel("cannot tell the watchdog")(source)
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
}
