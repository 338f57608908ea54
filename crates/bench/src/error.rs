//! What can go wrong while measuring.
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// What was tried, on which object, and why it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program could not be started.
    #[error("start {program}")]
    Start { program: String, source: io::Error },
    /// A program ended with something other than success.
    #[error("{command}: {status}\n{said}")]
    Status {
        command: String,
        status: ExitStatus,
        said: String,
    },
    /// A program did not end.
    #[error("{command} did not end within {seconds} s")]
    Late { command: String, seconds: u64 },
    /// A file or folder could not be used.
    #[error("{doing} {path}", path = path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// A call of the kernel failed.
    #[error("{doing}")]
    Kernel {
        doing: &'static str,
        source: io::Error,
    },
    /// A subject is not what it was.
    #[error("{tool}: subject {pid}: {what}")]
    Lost {
        tool: String,
        pid: i32,
        what: String,
    },
    /// Kept numbers cannot be read or written.
    #[error("{path} holds no numbers of this suite", path = path.display())]
    Numbers {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// A machine's monitor does not do what it is told.
    #[error("ask QEMU")]
    Monitor { source: Box<::vm::Error> },
    /// Nothing would be measured.
    #[error("{what}")]
    Nothing { what: String },
}

/// A result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about a monitor, to be given to `map_err`.
    pub fn monitor(source: ::vm::Error) -> Self {
        let source = Box::new(source);
        Self::Monitor { source }
    }
}

/// Returns an error about a file or folder, to be given to `map_err`.
pub fn file_error<E: Into<io::Error>>(doing: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File {
        doing,
        path,
        source: source.into(),
    }
}

/// Returns an error about a call of the kernel, to be given to `map_err`.
pub fn kernel_error<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Kernel {
        doing,
        source: source.into(),
    }
}

/// Returns an error about an image, to be given to `map_err`.
pub fn image_error<E: std::error::Error + Send + Sync + 'static>(
    doing: &'static str,
) -> impl Fn(E) -> Error {
    move |error| Error::Kernel {
        doing,
        source: std::io::Error::other(error),
    }
}
