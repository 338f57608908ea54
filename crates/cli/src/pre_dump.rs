//! `stillframe pre-dump`: saves the memory of a process tree that runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use process::options::{Compression, DEFAULT_TRACK_TIME};
use process::{DumpKind, DumpOptions, DumpReport};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::session::Common;
use crate::watch::Watch;
use crate::{statistics, values};

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

    /// Free in older images what this one replaces; they cannot be restored any more then
    #[arg(long)]
    auto_dedup: bool,

    /// Compress pages where that pays, with lz4 or zstd
    #[arg(long, value_name = "lz4|zstd[:LEVEL]", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "lz4")]
    compress: Option<Compression>,

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
        let report = process::dump(&options, &mut watch).map_err(|source| Failure::Engine {
            doing: "pre-dump",
            source: Box::new(source),
        })?;
        watch.done();
        session.ready();
        let frozen_us = report.statistics.frozen_us;
        log::info!("{frozen_us} us frozen, {} in all", report.total_us);
        self.common.tell(|| to_json(&report), || to_text(&report));
        Ok(Status::Done)
    }

    fn options(&self, images_dir: &Path) -> DumpOptions {
        if let Some(mode) = &self.pre_dump_mode {
            log::debug!("--pre-dump-mode {mode}: memory is read from outside while the tree runs");
        }
        DumpOptions {
            kind: DumpKind::PreDump,
            parent: self
                .prev_images_dir
                .as_ref()
                .map(|dir| images_dir.join(dir).into()),
            auto_dedup: self.auto_dedup,
            compress: self.compress,
            timeout: (self.timeout > 0).then(|| Duration::from_secs(self.timeout)),
            track: Some(Duration::from_secs(self.track_time)),
            sync: !self.no_sync,
            ..DumpOptions::new(self.tree, images_dir)
        }
    }
}

fn to_json(report: &DumpReport) -> Value {
    let known = &report.statistics;
    json!({"pre-dump": {
        "image": report.image,
        "tasks": known.tasks,
        "scanned_pages": known.scanned_pages,
        "stored_pages": known.stored_pages,
        "zero_pages": known.zero_pages,
        "parent_pages": known.parent_pages,
        "lost_pages": known.lost_pages,
        "image_bytes": report.image_bytes,
        "frozen_us": known.frozen_us,
        "collect_us": known.collect_us,
        "memory_us": known.memory_us,
        "freed_bytes": report.freed_bytes,
        "total_us": report.total_us,
        "statistics": statistics::to_json(known),
    }})
}

fn to_text(report: &DumpReport) -> String {
    format!(
        "image {}\n{}whole round {:>21} us\nimage bytes {:>21}\nfreed bytes {:>21}\n",
        report.image,
        statistics::to_text(&report.statistics, ""),
        report.total_us,
        report.image_bytes,
        report.freed_bytes,
    )
}
