//! What can go wrong with the memory of tasks.
use std::io;

use abi::{Addr, Span};

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the memory of a task could not be looked at, read or filled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    #[error("task {pid} is gone")]
    Gone { pid: i32 },
    #[error("cannot read the memory of task {pid} at {addr}")]
    Read {
        pid: i32,
        addr: Addr,
        source: io::Error,
    },
    #[error("cannot fill the memory of task {pid} at {addr}")]
    Write {
        pid: i32,
        addr: Addr,
        source: io::Error,
    },
    #[error("cannot register {span} of task {pid} with its userfaultfd")]
    Register {
        pid: i32,
        span: Span,
        source: io::Error,
    },
    #[error("cannot write-protect {span} of task {pid}")]
    Protect {
        pid: i32,
        span: Span,
        source: io::Error,
    },
    #[error("cannot start a thread that hears of writes")]
    Thread(#[source] io::Error),
    #[error("cannot scan the pages of task {pid} at {addr}")]
    Scan {
        pid: i32,
        addr: Addr,
        source: io::Error,
    },
    /// Pages did not get through the pipe.
    #[error(transparent)]
    Pages(pages::Error),
}

/// Errors of this crate's sources and sinks pass the pipe unchanged.
impl From<pages::Error> for Error {
    fn from(error: pages::Error) -> Self {
        match error {
            pages::Error::Other(error) => match error.downcast::<Self>() {
                Ok(own) => *own,
                Err(error) => Self::Pages(pages::Error::Other(error)),
            },
            error => Self::Pages(error),
        }
    }
}

impl From<Error> for pages::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Pages(error) => error,
            error => Self::Other(Box::new(error)),
        }
    }
}

impl Error {
    /// Tells a task that died from memory that cannot be read.
    pub(crate) fn read(pid: i32, addr: Addr, source: io::Error) -> Self {
        if is_gone(&source) {
            Self::Gone { pid }
        } else {
            Self::Read { pid, addr, source }
        }
    }

    /// Tells a task that died from memory that cannot be written.
    pub(crate) fn write(pid: i32, addr: Addr, source: io::Error) -> Self {
        if is_gone(&source) {
            Self::Gone { pid }
        } else {
            Self::Write { pid, addr, source }
        }
    }

    /// Tells a task that died from one that cannot be looked at.
    pub(crate) fn scan(pid: i32, addr: Addr, source: io::Error) -> Self {
        if is_gone(&source) {
            Self::Gone { pid }
        } else {
            Self::Scan { pid, addr, source }
        }
    }
}

/// Tells whether the system says that there is no such task any more.
fn is_gone(error: &io::Error) -> bool {
    let srch = rustix::io::Errno::SRCH.raw_os_error();
    let noent = rustix::io::Errno::NOENT.raw_os_error();
    matches!(error.raw_os_error(), Some(errno) if errno == srch || errno == noent)
}
