//! `stillframe volume`: ext4 volumes become images, and images volumes.

mod dump;
mod export;
mod extract;
mod files;
mod import;
mod mount;
mod read_args;
mod restore;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;

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
    pub fn run(self) -> Result<Status, Failure> {
        let read = self.action.read_images();
        let done = match self.action {
            Action::Dump(dump) => dump.run(),
            Action::Restore(restore) => restore.run(),
            Action::Ls(ls) => ls.run(),
            Action::Cat(cat) => cat.run(),
            Action::Extract(extract) => extract.run(),
            Action::Diff(diff) => diff.run(),
            Action::Mount(mount) => mount.run(),
            Action::Export(export) => export.run(),
            Action::Import(import) => import.run(),
        };
        let explain = |failure, dir: &PathBuf| ExpectedKind::Volume.explain(dir, failure);
        done.map_err(|failure| read.iter().fold(failure, explain))
    }
}

impl Action {
    /// The directories of the images that it reads.
    fn read_images(&self) -> Vec<PathBuf> {
        match self {
            Self::Dump(dump) => dump.read_images(),
            Self::Restore(restore::Restore { images_dir, .. })
            | Self::Ls(files::Ls { images_dir, .. })
            | Self::Cat(files::Cat { images_dir, .. })
            | Self::Extract(extract::Extract { images_dir, .. })
            | Self::Mount(mount::Mount { images_dir, .. }) => vec![images_dir.clone()],
            Self::Diff(diff) => diff.read_images(),
            Self::Export(export) => export.read_images(),
            Self::Import(_) => Vec::new(),
        }
    }
}
