//! Helper processes: one way to start them, to talk to them, and to see that the other side is
//! gone.
//!
//! A helper finishes or undoes a step when the process that began it is killed, or keeps
//! descriptors for a later one. [`Helper`] starts it: as a child whose end is waited for, or as
//! an orphan that outlives its maker. [`Channel`] is the connection: a protobuf message a packet
//! of a unix socket, with descriptors, and a list that is too long for one packet in several
//! ([`ListMessage`]). The end of a process closes its side of the channel, which the other side
//! reads as the end of the messages. [`UndoList`] is the commonest helper: it undoes in the
//! reverse order, unless it is dismissed.
//!
//! Two helpers stand in `sys` (`watchdog`, `freeze`): any thread may start them at any moment, for
//! they make nothing but system calls.
//!
//! ```
//! # use guard::{Channel, Helper};
//! let folder = std::env::temp_dir().join(format!("guard-{}", std::process::id()));
//! std::fs::create_dir(&folder)?;
//! let watched = folder.clone();
//! // An orphan, as a documentation test has several threads.
//! let channel = Helper::new(c"doc").leave(move |channel: Channel| {
//!     // Nothing is ever sent: this returns when the maker has ended.
//!     let _ = channel.receive::<()>();
//!     let _ = std::fs::remove_dir(&watched);
//! })?;
//! drop(channel);
//! while folder.exists() {}
//! # Ok::<_, std::io::Error>(())
//! ```
#![forbid(unsafe_code)]

mod channel;
#[cfg(any(test, feature = "harness"))]
mod failpoint;
#[cfg(any(test, feature = "harness"))]
pub mod harness;
mod list;
mod process;
mod undo;

pub use channel::{Channel, PATIENCE, Packet, invalid, wait, wait_all, wait_for_end};
pub use list::{List, ListMessage};
pub use process::{Child, Helper, standard_streams};
pub use undo::{Mount, UndoList};
