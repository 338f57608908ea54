//! `stillframe vm pre-save`: the memory of a machine while its guest runs.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use vm::qemu::{SaveKind, SaveOptions};

use super::save::{to_json, to_text};
use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;
use crate::session::{CompressArgs, LogArgs};

/// Save the memory of a virtual machine that runs, so that a save over it has little left to do
#[derive(Debug, Args)]
pub struct PreSave {
    /// The socket of QEMU's monitor, as in -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "PATH")]
    qmp: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The image of an earlier round or save, relative to the image's directory; pages that were
    /// not written since are not stored
    #[arg(long, value_name = "DIR")]
    prev_images_dir: Option<PathBuf>,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    #[command(flatten)]
    log: LogArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl PreSave {
    /// Saves the memory.
    ///
    /// # Errors
    /// Whatever the engine tells; the guest runs on.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        if self.log.work_dir(&self.images_dir) == self.images_dir {
            crate::session::make_dir(&self.images_dir)?;
        }
        self.log.open(&self.images_dir, "vm-pre-save", started)?;
        let parent = self.prev_images_dir.map(|path| self.images_dir.join(path));
        let options = SaveOptions {
            socket: self.qmp,
            images: self.images_dir.into(),
            parent: parent.map(Into::into),
            kind: SaveKind::Round,
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let bar = Bar::default();
        let saved = vm::qemu::save(&options, process::facts(), &|done, total| {
            bar.show(done, total);
        });
        drop(bar);
        let saved = saved.map_err(Failure::machine("vm pre-save"))?;
        let text = if self.json {
            format!("{}\n", to_json("vm_pre_save", &saved))
        } else {
            to_text(&saved)
        };
        output::say(&text);
        Ok(Status::Done)
    }
}
