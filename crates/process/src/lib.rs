//! Process trees: freeze, collect, drain; plan, build, inject, run.
#![forbid(unsafe_code)]

pub mod options;
pub mod report;

pub use options::{Afterwards, Allowed, DumpOptions, InheritFd, Inherited, RestoreOptions};
pub use report::{Blame, Description, DumpReport, Observer, Restored, Stage, Veto};

/// Why a process tree could not be saved, shown or brought back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine does not do this yet.
    #[error("{0} of process trees is not supported yet")]
    Unsupported(&'static str),
    /// The caller's observer stopped the work.
    #[error("stopped at the caller's wish")]
    Vetoed(#[source] Veto),
}

impl Error {
    /// Tells whose fault it is.
    pub fn blame(&self) -> Blame {
        match self {
            Error::Unsupported(_) => Blame::Unsupported,
            Error::Vetoed(_) => Blame::Kernel,
        }
    }

    /// Tells what to do about it, where something can be done.
    pub fn advice(&self) -> Option<String> {
        None
    }
}

/// Saves the tree under `options.tree` into `options.images_dir`.
///
/// # Errors
/// Every failure leaves the tree running as before and no image behind.
pub fn dump(options: &DumpOptions, observer: &mut dyn Observer) -> Result<DumpReport, Error> {
    observer
        .stage(Stage::PreDump, Some(options.tree))
        .map_err(Error::Vetoed)?;
    Err(Error::Unsupported("dump"))
}

/// Brings back the tree that `options.images_dir` holds.
///
/// # Errors
/// Every failure leaves no task behind.
pub fn restore(options: &RestoreOptions, observer: &mut dyn Observer) -> Result<Restored, Error> {
    let _ = options;
    observer
        .stage(Stage::PreRestore, None)
        .map_err(Error::Vetoed)?;
    Err(Error::Unsupported("restore"))
}

/// Returns the scripts that a restore would run, one line a call, without running anything.
///
/// # Errors
/// Those of [`restore`] that show without touching the kernel.
pub fn plan(options: &RestoreOptions) -> Result<String, Error> {
    let _ = options;
    Err(Error::Unsupported("plan"))
}

/// Tells what the image in `images_dir` holds.
///
/// # Errors
/// A missing or damaged image.
pub fn describe(images_dir: &std::path::Path) -> Result<Description, Error> {
    let _ = images_dir;
    Err(Error::Unsupported("description"))
}
