//! One round of a pre-dump: the memory of a tree while it runs.
//!
//! The tree is stopped only while its tasks are listed with what they have mapped, and get a
//! userfaultfd if they have none. Then, while it runs, it is found out which pages were written
//! since the last round, and those are read. What vanishes meanwhile is left out: a page that an
//! image does not describe is read by the next round.

use std::time::Instant;

use abi::Span;
use image::{Seal, SpaceId, Writer};
use memory::TaskMemory;
use memory::spans::subtract;
use pages::{Drained, Equals, Extent, Source};
use sys::realtime::Prompt;

use crate::contents::watch_progress;
use crate::end::go_on;
use crate::over::Parent;
use crate::seal::facts;
use crate::statistics::as_micros;
use crate::stopping::freeze_and;
use crate::track::{Inheritance, Mapped, Tracking, count, merge};
use crate::{
    DumpKind, Error, Observer, PreDumpOptions, PreDumpReport, Result, Stage, Statistics, dedup,
    links, over, room,
};

/// Saves the memory of the tree under `options.tree` into `options.images` and lets it run.
///
/// # Errors
/// Every failure leaves the tree running and no image behind; the next round reads what this one
/// would have.
pub fn predump(options: &PreDumpOptions, observer: &mut dyn Observer) -> Result<PreDumpReport> {
    let began = Instant::now();
    let root = options.tree;
    observer
        .stage(Stage::PreDump, Some(root))
        .map_err(Error::Vetoed)?;
    let parent = options.parent.as_ref().map(Parent::open).transpose()?;
    let store = options.images.create()?;
    let replaced = links::of_store(&*store);
    let dedup_over = parent.as_ref().filter(|_| options.auto_dedup);
    if let Some(parent) = dedup_over {
        dedup::check(&*store, &*parent.store)?;
    }
    let writer = over::writer(store.handle(), parent.as_ref(), options.compress)?;
    // Each task has a descriptor here.
    room::for_descriptors(1 << 16);
    let mut tracking = Tracking::start(root.as_raw_nonzero().get())?;
    let prompt = Prompt::new();
    let (frozen, mapped) = freeze_and(root, options.timeout, began, |frozen| {
        tracking.enroll(frozen)
    })?;
    let (since, freezing) = (frozen.since, frozen.freezing);
    go_on(frozen, None)?;
    drop(prompt);
    let mut statistics = Statistics {
        kind: DumpKind::PreDump,
        freezing_us: as_micros(freezing),
        frozen_us: micros(since),
        tasks: mapped.len() as u64,
        ..Statistics::default()
    };
    log::info!("{} tasks run again", statistics.tasks);
    let looking = Instant::now();
    let inheritance = Inheritance::new(parent.as_ref().map(|one| &*one.image), tracking.image());
    tracking.begin()?;
    let sources = look(&tracking, &mapped, &inheritance, &writer, &mut statistics)?;
    statistics.collect_us = micros(looking);
    let reading = Instant::now();
    let drained = drain(&sources, &writer, observer)?;
    statistics.memory_us = micros(reading);
    statistics.write_us = Some(as_micros(drained.writing));
    statistics.count(&drained);
    if let Some(parent) = &parent {
        over::hand_down(&writer, &parent.image)?;
    }
    writer.record(statistics.record());
    let image_bytes = writer.given_bytes();
    let id = writer.seal(Seal {
        // Its pages may be all that a later layer has.
        durable: options.sync,
        facts: facts(),
    })?;
    log::info!("image {id} is whole");
    links::remove(&replaced);
    // Without a tracker the next round starts anew; this one is whole all the same.
    if let Err(error) = tracking.client().end(id, options.track_time) {
        log::warn!("{error}");
    }
    let freed_bytes = dedup_over.map_or(0, |_| dedup::after_dump(&*store, options.sync));
    Ok(PreDumpReport {
        image: id.to_string(),
        freed_bytes,
        image_bytes,
        total_us: micros(began),
        statistics,
    })
}

fn micros(since: Instant) -> u64 {
    as_micros(since.elapsed())
}

type Sources = Vec<(TaskMemory, Vec<Extent>)>;

/// Finds what has to be read of all tasks, and leaves the rest to the parent.
fn look(
    tracking: &Tracking,
    mapped: &[Mapped],
    inheritance: &Inheritance,
    writer: &Writer,
    statistics: &mut Statistics,
) -> Result<Sources> {
    let mut sources = Vec::new();
    for mapped in mapped {
        tracking.lift_marks(mapped)?;
        let Some(changes) = tracking.look(mapped)? else {
            log::info!("pid {} has ended", mapped.pid);
            continue;
        };
        let space = SpaceId(mapped.pid.cast_unsigned());
        let inherited = inheritance.leave(writer, space, &changes.unwritten)?;
        let unknown = subtract(&changes.unwritten, &inherited);
        let written = merge(&changes.written, &unknown);
        statistics.parent_pages += count(&inherited);
        statistics.scanned_pages += count(&inherited) + count(&written);
        let [plain, quiet] = match memory::shared::exclusive(mapped.pid, &written) {
            Err(memory::Error::Gone { .. }) => continue,
            kinds => kinds?,
        };
        let extents = |spans: Vec<Span>| spans.into_iter().map(|span| Extent::of(space, span));
        let memory = TaskMemory::new(mapped.pid).while_it_runs();
        sources.push((memory, extents(plain).collect()));
        let memory = TaskMemory::quiet(mapped.pid).while_it_runs();
        sources.push((memory, extents(quiet).collect()));
    }
    Ok(sources)
}

fn drain(sources: &Sources, writer: &Writer, observer: &mut dyn Observer) -> Result<Drained> {
    let bytes = |extents: &[Extent]| extents.iter().map(Extent::bytes).sum::<u64>();
    let total_bytes = sources.iter().map(|(_, extents)| bytes(extents)).sum();
    let sources = sources
        .iter()
        .map(|(memory, extents)| (memory as &dyn Source, extents.as_slice()))
        .collect::<Vec<_>>();
    let progress = watch_progress(observer, total_bytes);
    let equals = Equals::new(sources.iter().flat_map(|(_, extents)| *extents), []);
    let equals = equals.as_ref();
    Ok(pages::drain_beside(&sources, equals, writer, &progress)?)
}
