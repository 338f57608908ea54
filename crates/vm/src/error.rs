//! Why the memory of a machine could not be saved or brought back.

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
    /// A file outside of the image.
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
    /// A machine's memory could not be served.
    #[error(transparent)]
    Serve(#[from] serve::Error),
    /// QEMU's process could not be reached into.
    #[error("cannot reach into QEMU")]
    Process(#[source] Box<freeze::Error>),
    /// What QEMU's memory is could not be found out.
    #[error("cannot reach into QEMU")]
    Memory(#[source] memory::Error),
    /// A system call of this process failed.
    #[error("{doing}")]
    Kernel {
        /// What was tried.
        doing: &'static str,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// The file or the image is none that this is for.
    #[error("{0}")]
    Unfit(String),
    /// Something that the work needs has ended.
    #[error("{0}")]
    Gone(String),
    /// A monitor says what no monitor says, or nothing.
    #[error("the monitor {place} cannot be used: {what}")]
    Monitor {
        /// Where it is.
        place: String,
        /// What it does.
        what: String,
    },
    /// QEMU does not do what it is told.
    #[error("QEMU refuses {command}: {what}")]
    Refused {
        /// The command of QMP.
        command: &'static str,
        /// What it says.
        what: String,
    },
    /// What was to be saved with the machine cannot be.
    #[error("the volume cannot be saved with the machine")]
    Companion {
        /// Whose fault it is.
        blame: Blame,
        /// What has failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A record of the image is damaged.
    #[error("the image's record of {record}: {what}")]
    Corrupt {
        /// Which.
        record: &'static str,
        /// What is wrong.
        what: String,
    },
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
    /// What is to blame.
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
