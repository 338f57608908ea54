//! `stillframe vm save`: a running machine becomes an image.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use vm::qemu::{SaveKind, SaveOptions, Saved};

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::output;
use crate::session::{CompressArgs, LogArgs};

/// Save a virtual machine that runs under QEMU
#[derive(Debug, Args)]
pub struct Save {
    /// The socket of QEMU's monitor, as in -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "PATH")]
    qmp: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// Have the guest go on; otherwise QEMU ends when the image is whole
    #[arg(short = 'R', long)]
    leave_running: bool,

    /// Have the guest go on at once, and save its memory as it was at that moment
    #[arg(long, requires = "leave_running")]
    live: bool,

    /// The image of an earlier save, relative to the image's directory; pages that it has are not
    /// stored
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

impl Save {
    /// Saves the machine.
    ///
    /// # Errors
    /// Whatever the engine tells; the guest runs on then.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        if self.log.work_dir(&self.images_dir) == self.images_dir {
            crate::session::make_dir(&self.images_dir)?;
        }
        self.log.open(&self.images_dir, "vm-save", started)?;
        let parent = self.prev_images_dir.map(|path| self.images_dir.join(path));
        let options = SaveOptions {
            socket: self.qmp,
            images: self.images_dir.into(),
            parent: parent.map(Into::into),
            kind: match (self.live, self.leave_running) {
                (true, _) => SaveKind::Live,
                (false, true) => SaveKind::Stopped,
                (false, false) => SaveKind::Ending,
            },
            compress: self.compress.compress,
            sync: !self.no_sync,
        };
        let bar = Bar::default();
        let saved = vm::qemu::save(&options, process::facts(), &|done, total| {
            bar.show(done, total);
        });
        drop(bar);
        let saved = saved.map_err(Failure::machine("vm save"))?;
        let text = if self.json {
            format!("{}\n", to_json("vm_save", &saved))
        } else {
            to_text(&saved)
        };
        output::say(&text);
        Ok(Status::Done)
    }
}

/// What was saved, under the name of the command.
pub fn to_json(command: &str, saved: &Saved) -> serde_json::Value {
    json!({command: {
        "image": saved.image.to_string(),
        "pid": saved.pid,
        "pages": saved.pages,
        "stored_pages": saved.stored_pages,
        "zero_pages": saved.zero_pages,
        "parent_pages": saved.parent_pages,
        "state_bytes": saved.state_bytes,
        "stopped_us": saved.stopped.as_micros() as u64,
    }})
}

/// What was saved, in words.
pub fn to_text(saved: &Saved) -> String {
    format!(
        "image {} has {} pages: {} stored, {} zero, {} as in the parent image; {} bytes of \
         devices; stopped for {:.1} ms\n",
        saved.image,
        saved.pages,
        saved.stored_pages,
        saved.zero_pages,
        saved.parent_pages,
        saved.state_bytes,
        saved.stopped.as_secs_f64() * 1e3,
    )
}
