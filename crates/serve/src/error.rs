//! Why memory cannot be served any more.
use std::io;

use abi::{Addr, Span};
use rustix::io::Errno;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why pages cannot be brought in, or a difference not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The target has ended.
    #[error("process {pid} is gone")]
    Gone {
        /// Its pid.
        pid: i32,
    },
    /// The image cannot be read, or is damaged.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Pages cannot be moved.
    #[error(transparent)]
    Pages(#[from] pages::Error),
    /// A call on the userfaultfd failed.
    #[error("cannot {action} {span} of process {pid}")]
    Call {
        /// What was tried, as a verb.
        action: &'static str,
        /// Where.
        span: Span,
        /// Whose memory.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// The host has no pages for what is to come.
    #[error(
        "{wanted} of process {pid} cannot be brought in: {pool}; give the host more \
         (vm.nr_hugepages), or end others that have them"
    )]
    NoRoom {
        /// Whose memory.
        pid: i32,
        /// The pages that are to be brought in.
        wanted: String,
        /// The huge pages that the host has.
        pool: String,
    },
    /// The target waits for a page that was not handed over.
    #[error("process {pid} waits for a page at {addr}, which it did not hand over")]
    Stray {
        /// Whose memory.
        pid: i32,
        /// Where.
        addr: Addr,
    },
    /// The descriptor is no userfaultfd, or one of a kernel that does not tell.
    #[error("the descriptor is no userfaultfd that can be used")]
    Descriptor(#[source] io::Error),
    /// Pages of an instant have changed before they were copied.
    #[error(
        "process {pid} gave pages up before they could be saved: the memory of that instant is lost"
    )]
    Lost {
        /// Whose memory.
        pid: i32,
    },
    /// There is no memory for what is to be known of a target.
    #[error("what is known of its memory has no room")]
    Ledger(#[source] io::Error),
    /// Whoever served a target before was killed, and what became of its pages is not known.
    #[error("what process {pid} gave up when its server was killed is not known")]
    Unsure {
        /// Whose memory.
        pid: i32,
    },
    /// What the descriptor can do is not enough for what was asked for.
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
