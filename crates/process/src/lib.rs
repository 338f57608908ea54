//! Process trees: freeze, collect, drain; plan, build, inject, run.
//!
//! - dump: target → [`freeze`] → frozen → collect → inventory → drain → image,
//! - restore: image → [`plan`](mod@plan) → plan → build → inject → run → running.
#![forbid(unsafe_code)]

mod build;
mod collect;
mod dump;
mod error;
mod freeze;
pub mod options;
mod plan;
mod records;
pub mod report;
mod restore;
mod sentinel;

pub use dump::dump;
pub use error::{Error, Result};
pub use options::{Afterwards, Allowed, DumpOptions, InheritFd, Inherited, RestoreOptions};
pub use report::{Blame, Description, DumpReport, Observer, Restored, Stage, Veto};
pub use restore::{plan, restore};

/// Tells what the image in `images_dir` holds.
///
/// # Errors
/// A missing or damaged image.
pub fn describe(images_dir: &std::path::Path) -> Result<Description> {
    let _ = images_dir;
    Err(Error::Unfit("show is not there yet".into()))
}
