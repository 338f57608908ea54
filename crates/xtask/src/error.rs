//! What can go wrong in a developer's task.
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// What was tried, on which object, and why it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program could not be started.
    #[error("start {program}")]
    Start { program: String, source: io::Error },
    /// A program ended with something other than success.
    #[error("{command}: {status}")]
    Status { command: String, status: ExitStatus },
    /// A file or folder could not be used.
    #[error("{doing} {path}", path = path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Rules of the source tree are broken; each was printed.
    #[error("{count} rules of the source tree are broken")]
    Tidy { count: usize },
    /// Tests failed; each was printed.
    #[error("{failed} tests failed")]
    Tests { failed: usize },
    /// The demonstration did not show what it has to show.
    #[error("{what}")]
    Demo { what: String },
    /// The client's connection to the demonstration's server failed.
    #[error("{doing}")]
    Connection { doing: String, source: io::Error },
    /// A program that has to be static is not.
    #[error("{path} needs an interpreter", path = path.display())]
    Dynamic { path: PathBuf },
    /// A kernel package is not as expected.
    #[error("Debian {suite} has no {what}")]
    Kernel { what: &'static str, suite: String },
    /// A package is not what was asked for.
    #[error("apt-get download {name} brings no file of that name")]
    Package { name: String },
    /// Needs root.
    #[error("{task} needs root")]
    Root { task: &'static str },
}

/// A result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;
