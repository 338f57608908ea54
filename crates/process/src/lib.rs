//! Process trees: freeze, collect, drain; plan, build, inject, run.
//!
//! - dump: target → [`freeze`] → frozen → collect → inventory → drain → image,
//! - restore: image → [`plan`](mod@plan) → plan → build → inject → run → running.
#![forbid(unsafe_code)]

mod build;
mod collect;
mod describe;
mod dump;
mod error;
mod freeze;
mod host;
mod live;
mod merge;
pub mod options;
mod plan;
mod records;
pub mod report;
mod restore;
mod room;
#[cfg(test)]
mod sample;
mod sentinel;
mod target;
mod tracker;
mod uffd;

pub use describe::describe;
pub use dump::dump;
pub use error::{Error, Result};
pub use merge::merge;
pub use options::{
    Afterwards, Allowed, DumpOptions, InheritFd, Inherited, MergeOptions, RestoreOptions,
};
pub use report::{Blame, Description, DumpReport, MergeReport, Observer, Restored, Stage, Veto};
pub use resources::FileValidation;
pub use restore::{plan, restore};
