//! `stillframe pre-dump`: saves the memory of a process tree that runs.

use std::time::Instant;

use process::{DumpKind, DumpReport};
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::joined::{Worker, join};
use crate::options::Options;
use crate::statistics;
use crate::watch::Watch;

/// Saves the memory.
///
/// # Errors
/// Whatever the engine tells; the tree runs on.
pub fn run(options: &Options, idle: &[&str], started: Instant) -> Result<Status, Failure> {
    let mut session = options.start("pre-dump", true, idle, started)?;
    options.refuse_frozen("pre-dump")?;
    let mut wanted = options.to_dump(DumpKind::PreDump, &session.images_dir);
    let mut watch = Watch::new(&session);
    let mut inside = match join(&mut wanted, "pre-dump", &mut watch)? {
        Worker::Here => None,
        Worker::Inside(inside) => Some(inside),
        Worker::Other(status) => {
            watch.done();
            session.ready();
            return Ok(status);
        }
    };
    let report = match &mut inside {
        None => process::dump(&wanted, &mut watch),
        Some(inside) => process::dump(&wanted, inside),
    };
    let report = report.map_err(Failure::engine("pre-dump"))?;
    if let Some(listener) = &options.listener {
        listener.note_dump(&report.statistics);
    }
    watch.done();
    if inside.is_none() {
        session.ready();
    }
    let frozen_us = report.statistics.frozen_us;
    log::info!("{frozen_us} us frozen, {} in all", report.total_us);
    options.tell(|| to_json(&report), || to_text(&report));
    Ok(Status::Done)
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
