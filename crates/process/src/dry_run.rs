//! A dump that saves nothing: it tells whether there is something in the way of a real one.

use std::sync::Arc;
use std::time::Instant;

use image::{Run, RunKind};
use pages::Extent;
use store::Store;

use crate::alone::Alone;
use crate::collect::memory_view::Fresh;
use crate::draft::Draft;
use crate::end::go_on;
use crate::seal::check;
use crate::statistics::as_micros;
use crate::stopping::freeze_and_collect;
use crate::{DryRunReport, DumpKind, DumpOptions, Result, live};

/// Stops the tree under `options.tree`, looks at all that a dump would save but the contents of
/// memory, lets it go on, and plans its restore. The image directory is not touched.
///
/// # Errors
/// Those that [`crate::dump()`] would have, as far as they are about the tree.
pub fn dry_run(options: &DumpOptions) -> Result<DryRunReport> {
    let _alone = Alone::enter()?;
    let began = Instant::now();
    if options.kind == DumpKind::Live {
        live::check_kernel(options.tree.as_raw_nonzero().get())?;
    }
    let inherited = crate::rights::check(options)?;
    crate::alone::raise_open_files_to_the_hard_limit();
    let store: Arc<dyn Store> = Arc::new(store::Memory::default());
    let mut draft = Draft::begin(options, &store, None, began)?;
    let (frozen, mut inventory) = freeze_and_collect(options, false, &mut Fresh::default())?;
    draft.stopped(&frozen);
    let since = frozen.since;
    let lock = inventory.lock.take();
    go_on(frozen, lock)?;
    draft.report.stopped_since(since);
    // What was changed on the host for an image is taken back.
    drop(std::mem::take(&mut inventory.undo));
    let planning = Instant::now();
    draft.note(&mut inventory);
    for extent in inventory.memory.iter().flat_map(|memory| &memory.extents) {
        nothing(extent).for_each(|run| draft.writer.mark(run));
    }
    draft
        .writer
        .check(|draft| check(draft, &inventory.foreign, &inherited))?;
    let counted = draft.report.statistics;
    Ok(DryRunReport {
        tasks: counted.tasks,
        threads: counted.threads,
        frozen_us: counted.frozen_us,
        plan_us: as_micros(planning.elapsed()),
        total_us: as_micros(began.elapsed()),
    })
}

/// Pages without their contents.
fn nothing(extent: &Extent) -> impl Iterator<Item = Run> {
    const MOST_PAGES: u64 = 1 << 31;
    let (space, first_page, pages) = (extent.space, extent.first_page, extent.pages);
    let starts = (0..pages).step_by(usize::try_from(MOST_PAGES).expect("64 bits"));
    starts.map(move |done| Run {
        space,
        first_page: first_page + done,
        pages: u32::try_from((pages - done).min(MOST_PAGES)).expect("capped"),
        kind: RunKind::Zero,
    })
}
