//! `stillframe volume`: ext4 volumes become images, and images volumes.

mod dump;
mod export;
mod extract;
mod files;
mod import;
mod mount;
mod reading;
mod restore;

use clap::{Args, Subcommand};

use crate::exit::{Failure, Status};

/// Save ext4 volumes, also mounted ones, bring them back, and read files of them
#[derive(Debug, Args)]
pub struct Volume {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Dump(dump::Dump),
    Restore(restore::Restore),
    Ls(files::Ls),
    Cat(files::Cat),
    Extract(extract::Extract),
    Diff(extract::Diff),
    Mount(mount::Mount),
    Export(export::Export),
    Import(import::Import),
}

impl Volume {
    /// Does it.
    ///
    /// # Errors
    /// Whatever the engine tells.
    pub fn run(self) -> Result<Status, Failure> {
        match self.action {
            Action::Dump(dump) => dump.run(),
            Action::Restore(restore) => restore.run(),
            Action::Ls(ls) => ls.run(),
            Action::Cat(cat) => cat.run(),
            Action::Extract(extract) => extract.run(),
            Action::Diff(diff) => diff.run(),
            Action::Mount(mount) => mount.run(),
            Action::Export(export) => export.run(),
            Action::Import(import) => import.run(),
        }
    }
}
