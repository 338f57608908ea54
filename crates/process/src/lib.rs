//! Process trees: freeze, collect, drain; plan, build, inject, run.
//!
//! - dump: target → [`freeze`] → frozen → collect → inventory → drain → image,
//! - restore: image → [`plan`](mod@plan) → plan → build → inject → run → running.
#![forbid(unsafe_code)]

mod collect;
mod dump;
mod error;
mod freeze;
pub mod options;
mod plan;
mod records;
pub mod report;

pub use dump::dump;
pub use error::{Error, Result};
pub use options::{Afterwards, Allowed, DumpOptions, InheritFd, Inherited, RestoreOptions};
pub use report::{Blame, Description, DumpReport, Observer, Restored, Stage, Veto};

/// Brings back the tree that `options.images_dir` holds.
///
/// # Errors
/// Every failure leaves no task behind.
pub fn restore(options: &RestoreOptions, observer: &mut dyn Observer) -> Result<Restored> {
    let _ = (options, observer);
    Err(Error::Unfit("restore is not there yet".into()))
}

/// Returns the scripts that a restore would run, one line a call, without running anything.
///
/// # Errors
/// Those of [`restore`] that show without touching the kernel.
pub fn plan(options: &RestoreOptions) -> Result<String> {
    let _ = options;
    Err(Error::Unfit("restore is not there yet".into()))
}

/// Tells what the image in `images_dir` holds.
///
/// # Errors
/// A missing or damaged image.
pub fn describe(images_dir: &std::path::Path) -> Result<Description> {
    let _ = images_dir;
    Err(Error::Unfit("show is not there yet".into()))
}
