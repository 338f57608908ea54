//! One round of a pre-dump: the memory of a tree while it runs.
//!
//! The tree is stopped only while its tasks are listed with what they have mapped, and get a
//! userfaultfd if they have none. Then, while it runs, it is found out which pages were written
//! since the last round, and those are read once all I/O is over that was under way then
//! ([`settle`]). What vanishes meanwhile is left out: a page that an image does not describe is
//! read by the next round.

use std::time::Instant;

use abi::spans::{Spans, subtract};
use freeze::returned::freeze_and;
use freeze::tracker::DEFAULT_TRACK_TIME;
use memory::TaskMemory;
use pages::{EqualIndex, Extent};
use sys::process::Process;
use sys::realtime::Realtime;

use crate::contents::{Progress, Sources};
use crate::draft::Draft;
use crate::end::go_on;
use crate::numbering::Numbering;
use crate::records::{Node, TaskId, Tree};
use crate::settle::settle;
use crate::statistics::as_micros;
use crate::track::{Changes, Inheritance, Mapped, Tracking};
use crate::{DumpOptions, DumpReport, Result, Stage, parent};

/// Saves the memory of the tree under `options.tree` into `options.images` and lets it run.
///
/// # Errors
/// Every failure leaves the tree running and no image behind; the next round reads what this one
/// would have.
pub(crate) fn dump(
    options: &DumpOptions,
    began: Instant,
    mut progress: Progress,
) -> Result<DumpReport> {
    let root = options.tree;
    progress.stage(Stage::PreDump, root)?;
    let parent = options.parent.as_ref().map(parent::open).transpose()?;
    let mut numbering = Numbering::over(parent.as_ref().map(|one| &*one.reader))?;
    let store = options.images.create().map_err(image::Error::Place)?;
    let mut draft = Draft::begin(options, &store, parent.as_ref(), began)?;
    // Each task has a descriptor here.
    crate::alone::raise_open_files(1 << 16);
    let mut tracking = Tracking::start(root.as_raw_nonzero().get())?;
    let realtime = Realtime::new();
    let (frozen, mapped) = freeze_and(root, options.timeout, |frozen| tracking.enroll(frozen))?;
    draft.stopped(&frozen);
    let since = frozen.since;
    go_on(frozen, None)?;
    drop(realtime);
    draft.report.stopped_since(since);
    // Those whose memory is saved, of whose threads nothing is.
    draft.report.statistics.tasks = mapped.len() as u64;
    draft.report.statistics.threads = 0;
    log::info!("{} tasks run again", mapped.len());
    let looking = Instant::now();
    let inheritance = Inheritance::new(parent.as_ref().map(|one| &*one.reader), tracking.image());
    tracking.begin()?;
    let changes = take_written(&tracking, &mapped)?;
    let processes = mapped.iter().map(|mapped| mapped.process.clone());
    let processes = processes.collect::<Vec<_>>();
    settle(options, &processes, &mut draft.report)?;
    let tree = tree(&mapped, &mut numbering);
    let sources = sources(changes, &tree, &inheritance, &mut draft)?;
    draft.writer.record(tree.record());
    draft.report.statistics.collect_us = as_micros(looking.elapsed());
    let equals = EqualIndex::new(sources.extents(), []);
    draft.read(&sources, (equals.as_ref(), true), &progress)?;
    if let Some(parent) = &parent {
        parent::inherit_vdsos(&draft.writer, &parent.reader)?;
    }
    let image = draft.writer.id();
    // Its pages may be all that a later layer has.
    let sealed = draft.seal_memory(options.sync)?;
    let track_time = options.track.unwrap_or(DEFAULT_TRACK_TIME);
    // Without a tracker the next round starts anew; this one is whole all the same.
    if let Err(error) = tracking.client().end(image, track_time) {
        log::warn!("{error}");
    }
    Ok(sealed.finish())
}

/// Finds what all tasks have written, and has the kernel forget it.
fn take_written(tracking: &Tracking, mapped: &[Mapped]) -> Result<Vec<(Process, Changes)>> {
    let mut all = Vec::new();
    for mapped in mapped {
        tracking.lift_marks(mapped)?;
        match tracking.take_written(mapped)? {
            Some(changes) => all.push((mapped.process.clone(), changes)),
            None => log::info!("pid {} has ended", mapped.pid()),
        }
    }
    Ok(all)
}

/// What a layer over this image has to know of the tasks: who each of them is, and which space is
/// its memory.
fn tree(mapped: &[Mapped], numbering: &mut Numbering) -> Tree {
    let node = |(mapped, number): (&Mapped, u32)| Node {
        pid: mapped.pid(),
        number,
        space_number: numbering.space(mapped.pid(), mapped.start_ticks).0,
        start_ticks: mapped.start_ticks,
        ..Node::default()
    };
    let tasks = mapped.iter().zip(TaskId::FIRST.get()..).map(node).collect();
    let boot = numbering.boot().to_vec();
    Tree {
        tasks,
        boot,
        ..Tree::default()
    }
}

/// What has to be read of the tasks; the rest is left to the parent.
fn sources(
    changes: Vec<(Process, Changes)>,
    tree: &Tree,
    inheritance: &Inheritance,
    draft: &mut Draft,
) -> Result<Sources> {
    let mut sources = Sources::default();
    for (process, changes) in changes {
        let mut nodes = tree.tasks.iter();
        let node = nodes.find(|node| node.pid == process.pid());
        let space = node.expect("it was listed").space();
        let inherited = inheritance.inherit_unwritten(&draft.writer, space, &changes.unwritten)?;
        let unknown = subtract(&changes.unwritten, &inherited);
        let written = changes.written.and(&unknown);
        draft.report.statistics.parent_pages += inherited.pages();
        let [plain, quiet] = match memory::shared::exclusive(&process, &written) {
            Err(memory::Error::Gone { .. }) => continue,
            kinds => kinds?,
        };
        let extents = |spans: Spans| spans.into_iter().map(|span| Extent::of(space, span));
        let memory = TaskMemory::new(&process).while_it_runs();
        sources.add(memory, extents(plain).collect());
        let memory = TaskMemory::quiet(&process).while_it_runs();
        sources.add(memory, extents(quiet).collect());
    }
    Ok(sources)
}
