//! `stillframe volume mount`: an image as a directory.

use std::path::PathBuf;

use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use serde_json::json;

use crate::exit::{Failure, Status};
use crate::output;

/// Show the files of an image in a directory, until interrupted or unmounted
#[derive(Debug, Args)]
pub struct Mount {
    /// The directory that the image is mounted on
    #[arg(value_name = "MOUNTPOINT")]
    point: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    pub images_dir: PathBuf,

    /// Show the file system as a file, volume.img, also where this kernel mounts it
    #[arg(long)]
    as_file: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Mount {
    /// Mounts, and waits.
    ///
    /// # Errors
    /// Whatever the engine tells; nothing is mounted then.
    pub fn run(self) -> Result<Status, Failure> {
        let bit = |signal: Signal| 1 << (signal.as_raw() - 1);
        let failed = |source| Failure::File {
            action: "wait at",
            path: self.point.clone(),
            source,
        };
        let ending = bit(Signal::TERM) | bit(Signal::INT) | bit(Signal::HUP);
        let told = sys::signalfd::instead_of_ending(ending).map_err(failed)?;
        let mounts = std::fs::File::open("/proc/self/mountinfo").map_err(failed)?;
        let mounted = volume::mount(&self.images_dir.into(), &self.point, self.as_file);
        let mounted = mounted.map_err(Failure::volume("volume mount"))?;
        let what = if mounted.has_files {
            "files"
        } else {
            "volume.img"
        };
        let point = self.point.display();
        output::say(&match self.json {
            true => format!("{}\n", json!({"volume_mount": {"shows": what}})),
            false => {
                format!("{what} of the image on {point}; ends with an interrupt or umount(8)\n")
            }
        });
        loop {
            let mut both = [
                PollFd::new(&told, PollFlags::IN),
                PollFd::new(&mounts, PollFlags::PRI),
            ];
            let waited = poll(&mut both, None);
            let is_told = both[0].revents().contains(PollFlags::IN);
            match waited {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
                Ok(_) if is_told || !mounted.is_there() => return Ok(Status::Done),
                Ok(_) => {}
            }
        }
    }
}
