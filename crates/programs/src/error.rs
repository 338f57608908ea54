//! What can go wrong when a program is tried.
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

/// What was tried, on which object, and why it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program could not be started.
    #[error("start {program}")]
    Start { program: String, source: io::Error },
    /// A program ended with something other than success.
    #[error("{program}: {status}")]
    Status { program: String, status: ExitStatus },
    /// A file or folder could not be used.
    #[error("{doing} {path}", path = path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// A program that was tried did something that it should not do.
    #[error("{what}")]
    Program { what: String },
    /// Programs did not go on; each was printed.
    #[error("{failed} programs did not go on as they should")]
    Programs { failed: usize },
    /// A client's connection failed.
    #[error("{doing} a client's connection")]
    Connection {
        doing: &'static str,
        source: io::Error,
    },
}

/// A result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What a program should not have done.
pub fn failure(what: impl Into<String>) -> Error {
    Error::Program { what: what.into() }
}

/// Returns an error about a file or folder, to be given to `map_err`.
pub fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File {
        doing,
        path,
        source,
    }
}

/// Returns an error about a command that could not be started.
pub fn start_error(command: &Command, source: io::Error) -> Error {
    let program = command.get_program().to_string_lossy().into_owned();
    Error::Start { program, source }
}

/// Runs a command to its end.
///
/// # Errors
/// When it cannot be started or does not end with success.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status();
    let status = status.map_err(|source| start_error(command, source))?;
    if status.success() {
        return Ok(());
    }
    let program = command.get_program().to_string_lossy().into_owned();
    Err(Error::Status { program, status })
}
