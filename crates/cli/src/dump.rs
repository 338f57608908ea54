//! `stillframe dump`: saves a process tree.

use std::time::Instant;

use process::report::Unobserved;
use process::{Afterwards, DumpKind, DumpReport};
use serde_json::{Value, json};
use volume::DumpSummary;

use crate::exit::{Failure, Status};
use crate::joined::{Worker, join};
use crate::options::Options;
use crate::watch::Watch;
use crate::with_volume::{self, DumpObserver};
use crate::{output, statistics};

/// Saves the tree.
///
/// # Errors
/// Whatever the engine tells; the tree then runs as before.
pub fn run(options: &Options, idle: &[&str], started: Instant) -> Result<Status, Failure> {
    let kind = options.dump.kind;
    let layered = options.track_mem || options.prev_images_dir.is_some();
    let refused = match (kind, options.dump.afterwards) {
        (DumpKind::Live, Afterwards::Stop) => Some("--live and --leave-stopped exclude each other"),
        (DumpKind::Live, _) if layered => {
            Some("--live goes with neither --track-mem nor --prev-images-dir")
        }
        _ => None,
    };
    if let Some(what) = refused {
        return Err(Failure::Usage(what.to_owned()));
    }
    if options.dry_run {
        return try_out(options, started);
    }
    let mut session = options.start("dump", true, idle, started)?;
    options.refuse_frozen("dump")?;
    let mut wanted = options.to_dump(kind, &session.images_dir);
    let beside = with_volume::open(options, &session)?;
    let mut saving = DumpObserver::new(Watch::new(&session), beside.as_ref());
    let mut inside = match join(&mut wanted, "dump", &mut saving)? {
        Worker::Here => None,
        Worker::Inside(_) if beside.is_some() => {
            return Err(Failure::engine("dump")(process::Error::Unfit(
                "--with-volume goes with no tree in namespaces of its own".to_owned(),
            )));
        }
        Worker::Inside(inside) => Some(inside),
        Worker::Other(status) => {
            saving.done();
            session.ready();
            return Ok(status);
        }
    };
    let report = match &mut inside {
        None => process::dump(&wanted, &mut saving),
        Some(inside) => process::dump(&wanted, inside),
    };
    let report = report.map_err(Failure::engine("dump"))?;
    if let Some(listener) = &options.listener {
        listener.note_dump(&report.statistics);
    }
    let volume = saving.done();
    if inside.is_none() {
        session.ready();
    }
    log::info!(
        "dumped {} tasks in {} us",
        report.statistics.tasks,
        report.total_us
    );
    if wanted.afterwards != Afterwards::Kill {
        for link in &report.links {
            let link = process::report::printable(&link.display().to_string());
            let what = format!("the image needs the hard link {link}: it stays as long");
            log::warn!("{what}");
            output::complain(&format!("stillframe: {what}\n"));
        }
    }
    options.tell(
        || to_json(&report, volume.as_ref()),
        || to_text(&report, volume.as_ref()),
    );
    Ok(Status::Done)
}

/// Says what is in the way of a dump; nothing is saved, and no file made but the log where one
/// is asked for.
fn try_out(options: &Options, started: Instant) -> Result<Status, Failure> {
    if options.with_volume.is_some() {
        let what = "--dry-run and --with-volume exclude each other";
        return Err(Failure::Usage(what.to_owned()));
    }
    options.start_without_images(started)?;
    options.refuse_frozen("dump")?;
    let mut wanted = options.to_dump(options.dump.kind, &options.images_dir);
    if let Worker::Other(status) = join(&mut wanted, "dump", &mut Unobserved)? {
        return Ok(status);
    }
    let report = process::dry_run(&wanted).map_err(Failure::engine("dump"))?;
    let json = json!({"dump": {
        "dry_run": true,
        "obstacles": [],
        "tasks": report.tasks,
        "threads": report.threads,
        "frozen_us": report.frozen_us,
        "plan_us": report.plan_us,
        "total_us": report.total_us,
    }});
    let text = format!(
        "nothing is in the way of a dump (tasks: {}, threads: {}, stopped for {} us)\n",
        report.tasks, report.threads, report.frozen_us
    );
    output::say(&if options.json {
        format!("{json}\n")
    } else {
        text
    });
    Ok(Status::Done)
}
fn to_json(report: &DumpReport, volume: Option<&DumpSummary>) -> Value {
    let known = &report.statistics;
    let mut told = json!({"dump": {
        "image": report.image,
        "tasks": known.tasks,
        "threads": known.threads,
        "stored_pages": known.stored_pages,
        "zero_pages": known.zero_pages,
        "shared_pages": known.shared_pages,
        "parent_pages": known.parent_pages,
        "image_bytes": report.image_bytes,
        "frozen_us": known.frozen_us,
        "longest_frozen_us": report.longest_frozen_us,
        "longest_wait_us": report.longest_wait_us,
        "instants": report.instants,
        "freed_bytes": report.freed_bytes,
        "links": report.links.iter()
            .map(|link| link.display().to_string())
            .collect::<Vec<_>>(),
        "total_us": report.total_us,
        "statistics": statistics::to_json(known),
    }});
    if let Some(volume) = volume {
        told["dump"]["volume"] = with_volume::saved_to_json(volume);
    }
    told
}

fn to_text(report: &DumpReport, volume: Option<&DumpSummary>) -> String {
    let (longest_us, total_us) = (report.longest_frozen_us, report.total_us);
    let wait_us = report.longest_wait_us;
    format!(
        "image {}\n{}frozen at one time {longest_us:>14} us\n\
         longest wait {wait_us:>20} us\ninstants {:>24}\n\
         whole dump {total_us:>22} us\nimage bytes {:>21}\nfreed bytes {:>21}\n{}",
        report.image,
        statistics::to_text(&report.statistics, ""),
        report.instants,
        report.image_bytes,
        report.freed_bytes,
        volume.map_or_else(String::new, with_volume::saved_to_text),
    )
}
