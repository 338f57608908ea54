//! Trees of processes stopped as they are, and what of ours is in them or beside them.
//!
//! - [`freeze`](fn@freeze): target → [`Frozen`], whose [`Task`]s go on when it is dropped, with
//!   their waits as they were ([`Wait`]);
//! - [`returned`]: what a killed dump has left in a process, found and removed;
//! - [`uffd`]: a userfaultfd for the memory of a stopped task; [`userfaultfd_of`] of a process that
//!   is no target;
//! - [`tracker`] and [`watchdog`]: processes beside a tree, which keep what tracks its memory, and
//!   undo or finish what this one has begun.
//!
//! ```no_run
//! let frozen = freeze::freeze(4711, Some(freeze::DEFAULT_TIMEOUT))?;
//! for task in &frozen.tasks {
//!     println!("{}: {} mappings", task.pid(), task.maps()?.len());
//! }
//! # Ok::<(), freeze::Error>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod foreign;
mod mappings;
mod proc;
mod refetch;
pub mod returned;
mod runtime;
mod target;
pub mod tracker;
mod tree;
pub mod uffd;
mod waits;
pub mod watchdog;

pub use error::{Error, Result};
pub use foreign::userfaultfd_of;
pub use mappings::parse;
pub use proc::{read_at, read_proc};
pub use target::explain_mapping;
pub use tree::{Body, DEFAULT_TIMEOUT, Frozen, Guard, Limit, Task, freeze, start_ticks, stat_of};
pub use waits::Wait;
