//! A dump that saves nothing: it tells whether there is something in the way of a real one.

use std::sync::Arc;
use std::time::Instant;

use image::{Run, RunKind, Writer};
use pages::Extent;

use crate::collect::look::Afresh;
use crate::end::go_on;
use crate::seal::check;
use crate::statistics::as_micros;
use crate::stopping::{freeze_and_collect, statistics_of};
use crate::{DryRunReport, DumpOptions, Result, live};

/// Stops the tree under `options.tree`, looks at all that a dump would save but the contents of
/// memory, lets it go on, and plans its restore. The image directory is not touched.
///
/// # Errors
/// Those that [`crate::dump()`] would have, as far as they are about the tree.
pub fn dry_run(options: &DumpOptions) -> Result<DryRunReport> {
    let began = Instant::now();
    if options.live {
        live::check_kernel(options.tree.as_raw_nonzero().get())?;
    }
    crate::room::within_the_hard_limit();
    let (frozen, mut inventory) = freeze_and_collect(options, began, false, &mut Afresh)?;
    let since = frozen.since;
    let counted = statistics_of(&frozen);
    let lock = inventory.lock.take();
    go_on(frozen, lock)?;
    let frozen_us = as_micros(since.elapsed());
    // What was changed on the host for an image is taken back.
    drop(std::mem::take(&mut inventory.undo));
    let planning = Instant::now();
    let writer = Writer::create(Arc::new(store::Memory::default()))?;
    inventory.name_objects(&writer);
    inventory
        .records
        .into_iter()
        .for_each(|record| writer.record(record));
    inventory.same.into_iter().for_each(|run| writer.mark(run));
    for extent in inventory.memory.iter().flat_map(|memory| &memory.extents) {
        nothing(extent).for_each(|run| writer.mark(run));
    }
    writer.check(|draft| check(draft, &inventory.foreign))?;
    Ok(DryRunReport {
        tasks: counted.tasks,
        threads: counted.threads,
        frozen_us,
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
