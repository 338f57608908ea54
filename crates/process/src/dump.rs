//! The dump of a process tree, from the first stop to the end of the target.

use std::time::Instant;

use pages::EqualIndex;
use resources::fd::tcp::newcomers::Held;
use resources::kernel;

use crate::alone::Alone;
use crate::collect::Inventory;
use crate::contents::{Progress, Sources};
use crate::draft::Draft;
use crate::end::Ending;
use crate::layer::Layer;
use crate::stopping::freeze_and_collect;
use crate::{
    Afterwards, DumpKind, DumpOptions, DumpReport, Observer, Result, Stage, live, network, predump,
};

/// Saves the tree under `options.tree` into `options.images`, as `options.kind` says.
///
/// A live dump and a round of a pre-dump leave it running, whatever `options.afterwards` says.
///
/// # Errors
/// Every failure leaves the tree running as before and no image behind. After a round that failed,
/// the next one reads what it would have.
pub fn dump(options: &DumpOptions, observer: &mut dyn Observer) -> Result<DumpReport> {
    let _alone = Alone::enter()?;
    let (began, progress) = (Instant::now(), Progress::new(observer));
    let done = match options.kind {
        DumpKind::Dump => dump_stopped(options, began, progress),
        DumpKind::Live => live::dump(options, began, progress),
        DumpKind::PreDump => predump::dump(options, began, progress),
    };
    // The next dump finds the facts that this one has asked of the kernel.
    kernel::keep();
    done
}

/// Saves a tree that is stopped meanwhile.
fn dump_stopped(
    options: &DumpOptions,
    began: Instant,
    mut progress: Progress,
) -> Result<DumpReport> {
    if options.afterwards != Afterwards::Run {
        crate::alone::check_threads()?;
    }
    // Tasks and what they have open take a descriptor each.
    crate::alone::raise_open_files_to_the_hard_limit();
    progress.stage(Stage::PreDump, options.tree)?;
    let store = options.images.create().map_err(image::Error::Place)?;
    let mut layer = Layer::prepare(options)?;
    let mut draft = Draft::begin(options, &store, layer.parent(), began)?;
    progress.companion(|companion| companion.begin(&draft.writer))?;
    let image = draft.writer.id();
    let kill = options.afterwards == Afterwards::Kill;
    let ending = Ending::new(options, image)?;
    // `held` outlives `frozen`: new connections are kept away until the tree runs or is gone.
    let held;
    let (mut frozen, mut inventory) = freeze_and_collect(options, kill, layer.view())?;
    held = inventory.held.take();
    progress.stage(Stage::PostFreeze, options.tree)?;
    // From here on it comes before the tree where this fails: connections go on first.
    let ending = ending.hold(inventory.lock.take())?;
    let _leftover = inventory.leftover.take();
    let mut undo = std::mem::take(&mut inventory.undo);
    let parent_pages = layer.inherit(&mut inventory, &draft.writer)?;
    draft.stopped(&frozen);
    draft.report.statistics.parent_pages = parent_pages;
    layer.track(&mut frozen, &inventory)?;
    progress.companion(|companion| companion.instant(&draft.writer))?;
    read(&mut draft, &mut inventory, &progress)?;
    progress.companion(|companion| companion.put(&draft.writer))?;
    // What it replaces elsewhere is not freed before it is safe.
    let durable = options.sync && (kill || options.auto_dedup);
    let mut sealed = draft.seal(durable, &inventory.foreign, Some(frozen.since))?;
    sealed.tell(&mut progress, options.tree)?;
    sealed.report.instants = 1;
    sealed.report.stopped_since(frozen.since);
    undo.0.clear();
    ending.run(frozen, || network::label(image, options))?;
    // Nobody listens any more who could be asked.
    let _leftover = held.and_then(Held::lift);
    layer.done(options, image);
    log::info!("the tree is let go: {:?}", options.afterwards);
    Ok(sealed.finish())
}

/// From how many bytes on room is asked for before anything is written.
const RESERVE_FROM_BYTES: u64 = 4 << 20;

/// Reads all that the image is to have.
fn read(draft: &mut Draft, inventory: &mut Inventory, progress: &Progress) -> Result<()> {
    draft.note(inventory);
    let own = inventory.memory.iter().flat_map(|memory| &memory.extents);
    let equals = EqualIndex::new(own, std::mem::take(&mut inventory.copies));
    let sources = Sources::of(inventory);
    log::info!("the tree is collected");
    if sources.bytes() >= RESERVE_FROM_BYTES {
        draft.writer.reserve(sources.bytes())?;
    }
    draft.read(&sources, (equals.as_ref(), false), progress)
}
