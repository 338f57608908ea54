//! Why memory cannot be served any more.
use std::io;

use abi::{Addr, Span};
use rustix::io::Errno;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why pages cannot be brought in, or a difference not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    #[error("process {pid} is gone")]
    Gone { pid: i32 },
    /// The image cannot be read, or is damaged.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Pages cannot be moved.
    #[error(transparent)]
    Pages(#[from] pages::Error),
    #[error("cannot {action} {span} of process {pid}")]
    Call {
        action: &'static str,
        span: Span,
        pid: i32,
        source: io::Error,
    },
    #[error(
        "{wanted} of process {pid} cannot be brought in: {pool}; give the host more \
         (vm.nr_hugepages), or end others that have them"
    )]
    NoRoom {
        pid: i32,
        wanted: String,
        pool: String,
    },
    #[error("process {pid} waits for a page at {addr}, which it did not hand over")]
    Stray { pid: i32, addr: Addr },
    #[error("the descriptor is no userfaultfd that can be used")]
    Descriptor(#[source] io::Error),
    #[error(
        "process {pid} gave pages up before they could be saved: the memory of that instant is lost"
    )]
    Lost { pid: i32 },
    #[error("what is known of its memory has no room")]
    Ledger(#[source] io::Error),
    #[error("what process {pid} gave up when its server was killed is not known")]
    Unsure { pid: i32 },
    /// The descriptor lacks an ability that the request needs.
    #[error("{0}")]
    Unable(String),
}

impl Error {
    /// A call on the userfaultfd of process `pid` that failed.
    pub(crate) fn call(action: &'static str, span: Span, pid: i32, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::SRCH) => Self::Gone { pid },
            _ => Self::Call {
                action,
                span,
                pid,
                source,
            },
        }
    }
}
