//! `stillframe pre-dump`: saves the memory of a process tree that runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use process::options::DEFAULT_TRACK_TIME;
use process::{PreDumpOptions, PreDumpReport};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::session::Common;
use crate::watch::Watch;
use crate::{output, values};

/// Save the memory of a running process tree, so that a dump has little left to do
#[derive(Debug, Args)]
pub struct PreDump {
    /// The root of the tree
    #[arg(short = 't', long, value_name = "PID", value_parser = values::pid)]
    tree: Pid,

    /// The directory of the last round's image, relative to --images-dir: only what was written
    /// since is saved
    #[arg(long, value_name = "DIR")]
    prev_images_dir: Option<PathBuf>,

    /// How memory is read: both are the same here, from outside while the tree runs
    #[arg(long, value_name = "MODE")]
    pre_dump_mode: Option<String>,

    /// Give up after this many seconds of stopping tasks; 0 never does
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,

    /// Stop tracking after this many seconds without another round
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_TRACK_TIME.as_secs())]
    track_time: u64,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    #[command(flatten)]
    pub common: Common,
}

impl PreDump {
    /// Saves the memory.
    ///
    /// # Errors
    /// Whatever the engine tells; the tree runs on.
    pub fn run(self, idle: &[&str], started: Instant) -> Result<Status, Failure> {
        let mut session = self.common.start("pre-dump", true, idle, started)?;
        let options = self.options(&session.images_dir);
        let mut watch = Watch::new(&session);
        let report = process::predump(&options, &mut watch).map_err(|source| Failure::Engine {
            doing: "pre-dump",
            source: Box::new(source),
        })?;
        watch.done();
        session.ready();
        log::info!("{} us frozen, {} in all", report.frozen_us, report.total_us);
        if self.common.json {
            output::say(&format!("{}\n", to_json(&report)));
        } else if self.common.display_stats {
            output::say(&to_text(&report));
        }
        Ok(Status::Done)
    }

    fn options(&self, images_dir: &Path) -> PreDumpOptions {
        if let Some(mode) = &self.pre_dump_mode {
            log::debug!("--pre-dump-mode {mode}: memory is read from outside while the tree runs");
        }
        PreDumpOptions {
            tree: self.tree,
            images_dir: images_dir.to_owned(),
            prev_images_dir: self
                .prev_images_dir
                .as_ref()
                .map(|dir| images_dir.join(dir)),
            timeout: (self.timeout > 0).then(|| Duration::from_secs(self.timeout)),
            track_time: Duration::from_secs(self.track_time),
            sync: !self.no_sync,
        }
    }
}

fn to_json(report: &PreDumpReport) -> Value {
    json!({"pre-dump": {
        "image": report.image,
        "tasks": report.tasks,
        "scanned_pages": report.scanned_pages,
        "stored_pages": report.stored_pages,
        "zero_pages": report.zero_pages,
        "parent_pages": report.parent_pages,
        "lost_pages": report.lost_pages,
        "image_bytes": report.image_bytes,
        "frozen_us": report.frozen_us,
        "collect_us": report.collect_us,
        "memory_us": report.memory_us,
        "total_us": report.total_us,
    }})
}

fn to_text(report: &PreDumpReport) -> String {
    format!(
        "image         {}\n\
         tasks         {}\n\
         pages scanned {}\n\
         pages stored  {}\n\
         pages zero    {}\n\
         pages parent  {}\n\
         pages lost    {}\n\
         image bytes   {}\n\
         frozen        {} us\n\
         collecting    {} us\n\
         memory        {} us\n\
         whole round   {} us\n",
        report.image,
        report.tasks,
        report.scanned_pages,
        report.stored_pages,
        report.zero_pages,
        report.parent_pages,
        report.lost_pages,
        report.image_bytes,
        report.frozen_us,
        report.collect_us,
        report.memory_us,
        report.total_us,
    )
}
