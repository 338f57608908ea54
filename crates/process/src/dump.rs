//! The dump of a process tree, from the first stop to the end of the target.

use std::time::Instant;

use image::Writer;
use memory::TaskMemory;
use pages::{Equals, Extent, Source};

use crate::collect::Inventory;
use crate::contents::{of_object, watch_progress};
use crate::end::Ending;
use crate::layer::Layer;
use crate::links::{self, Link};
use crate::network::{self, Replaced};
use crate::seal::seal;
use crate::statistics::as_micros;
use crate::stopping::{freeze_and_collect, statistics_of};
use crate::{
    Afterwards, DumpOptions, DumpReport, Error, Observer, Result, Stage, Statistics, dedup,
};

/// Saves the tree under `options.tree` into `options.images`.
///
/// A live dump leaves it running, whatever `options.afterwards` says.
///
/// # Errors
/// Every failure leaves the tree running as before and no image behind.
pub fn dump(options: &DumpOptions, observer: &mut dyn Observer) -> Result<DumpReport> {
    if options.live {
        return crate::live::dump(options, observer);
    }
    let began = Instant::now();
    let root = options.tree;
    // Tasks and what they have open take a descriptor each.
    crate::room::within_the_hard_limit();
    observer
        .stage(Stage::PreDump, Some(root))
        .map_err(Error::Vetoed)?;
    let store = options.images.create()?;
    let mut layer = Layer::prepare(options)?;
    let dedups = options.auto_dedup && layer.parent().is_some();
    if let Some(parent) = layer.parent().filter(|_| dedups) {
        dedup::check(&*store, &*parent.store)?;
    }
    let (replaced, replaced_links) = (Replaced::of(&*store), links::of_store(&*store));
    let writer = layer.writer(store.clone(), options)?;
    let image = writer.id();
    let kill = options.afterwards == Afterwards::Kill;
    let ending = Ending::new(options, image)?;
    let (mut frozen, mut inventory) = freeze_and_collect(options, began, kill, layer.look())?;
    observer
        .stage(Stage::PostFreeze, Some(root))
        .map_err(Error::Vetoed)?;
    // From here on it comes before the tree where this fails: connections go on first.
    let ending = ending.hold(inventory.lock.take())?;
    let _leftover = inventory.leftover.take();
    let mut undo = std::mem::take(&mut inventory.undo);
    let statistics = Statistics {
        parent_pages: layer.inherit(&mut inventory, &writer)?,
        collect_us: as_micros(frozen.since.elapsed() - frozen.freezing),
        ..statistics_of(&frozen)
    };
    layer.track(&mut frozen, &inventory)?;
    let since = frozen.since;
    let mut report = write(inventory, writer, statistics, since, options, observer)?;
    // The image that needed them is gone.
    links::remove(&replaced_links);
    if let Err(veto) = observer.stage(Stage::PostDump, Some(root)) {
        // The tree goes on: what the image says of it is true no longer.
        if let Err(error) = image::remove(&*store, image) {
            log::error!("the image stays although the tree goes on: {error}");
        }
        return Err(Error::Vetoed(veto));
    }
    report.statistics.frozen_us = as_micros(since.elapsed());
    report.longest_frozen_us = report.statistics.frozen_us;
    report.instants = 1;
    undo.0.clear();
    ending.run(frozen, || network::label(image, options))?;
    replaced.clear();
    layer.done(options);
    log::info!("the tree is let go: {:?}", options.afterwards);
    if dedups {
        report.freed_bytes = dedup::after_dump(&*store, options.sync);
    }
    report.total_us = as_micros(began.elapsed());
    Ok(report)
}

/// From how many bytes on room is asked for before anything is written.
const RESERVE_FROM_BYTES: u64 = 4 << 20;

fn write(
    inventory: Inventory,
    writer: Writer,
    mut statistics: Statistics,
    since: Instant,
    options: &DumpOptions,
    observer: &mut dyn Observer,
) -> Result<DumpReport> {
    let mut records_bytes = 0;
    inventory.name_objects(&writer);
    for record in inventory.records {
        records_bytes += record.payload.len() as u64;
        writer.record(record);
    }
    for run in inventory.same {
        statistics.shared_pages += u64::from(run.pages);
        writer.mark(run);
    }
    let own = inventory.memory.iter().flat_map(|memory| &memory.extents);
    let equals = Equals::new(own, inventory.copies);
    let sources = inventory.memory.into_iter().map(|memory| {
        let task = if memory.quiet {
            TaskMemory::quiet(memory.pid)
        } else {
            TaskMemory::new(memory.pid)
        };
        (Box::new(task) as Box<dyn Source>, memory.extents)
    });
    let objects = inventory.objects.into_iter().map(of_object);
    let sources = sources.chain(objects).collect::<Vec<_>>();
    log::info!("the tree is collected");
    let bytes = |extents: &[Extent]| extents.iter().map(Extent::bytes).sum::<u64>();
    let total_bytes = sources.iter().map(|source| bytes(&source.1)).sum::<u64>();
    if total_bytes >= RESERVE_FROM_BYTES {
        writer.reserve(total_bytes)?;
    }
    let sources = sources
        .iter()
        .map(|(source, extents)| (&**source, extents.as_slice()))
        .collect::<Vec<_>>();
    let progress = watch_progress(observer, total_bytes);
    let reading = Instant::now();
    let drained = pages::drain_once(&sources, equals.as_ref(), &writer, &progress)?;
    statistics.memory_us = as_micros(reading.elapsed());
    statistics.write_us = Some(as_micros(drained.writing));
    statistics.count(&drained);
    statistics.sum_up();
    log::info!("{} pages are stored", statistics.stored_pages);
    // What it replaces elsewhere is not freed before it is safe.
    let stored_bytes = writer.given_bytes();
    let durable = options.sync && (options.afterwards == Afterwards::Kill || options.auto_dedup);
    let counted = (&mut statistics, Some(since));
    let id = seal(writer, durable, &inventory.foreign, counted)?;
    log::info!("image {id} is whole");
    Ok(DumpReport {
        image: id.to_string(),
        image_bytes: stored_bytes + records_bytes,
        statistics,
        links: inventory.links.iter().map(Link::path).collect(),
        ..DumpReport::default()
    })
}
