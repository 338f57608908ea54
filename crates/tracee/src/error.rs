//! What can go wrong with a tracee.

use std::io;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The thread ended.
    #[error("thread {tid}: it ended ({doing})")]
    Gone {
        /// The thread.
        tid: i32,
        /// What was being done.
        doing: &'static str,
    },
    /// A system call on the thread failed.
    #[error("thread {tid}: {doing}")]
    Kernel {
        /// The thread.
        tid: i32,
        /// What was tried.
        doing: &'static str,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// The thread did not stop in time: it waits in the kernel for something that does not end.
    #[error("thread {tid}: it did not stop within {waited_ms} ms")]
    Stuck {
        /// The thread.
        tid: i32,
        /// How long was waited in milliseconds.
        waited_ms: u128,
    },
    /// There is no place in the process from which a call could be made.
    #[error("pid {pid}: no executable mapping ends with room for {bytes} bytes of code")]
    NoPadding {
        /// The process.
        pid: i32,
        /// How much room is needed, in bytes.
        bytes: usize,
    },
    /// The process did something else than what it was told.
    #[error("thread {tid}: {what}")]
    Astray {
        /// The thread.
        tid: i32,
        /// What it did.
        what: String,
    },
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Tells a dead thread (`ESRCH`) from a failed call.
    pub(crate) fn of(tid: i32, doing: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(3) => Self::Gone { tid, doing },
            _ => Self::Kernel { tid, doing, source },
        }
    }
}
