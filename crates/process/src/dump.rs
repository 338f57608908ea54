//! The dump of a process tree, from the first stop to the end of the target.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use abi::Addr;
use image::{Facts, PAGE_BYTES, Writer};
use memory::TaskMemory;
use pages::{Equals, Extent, Source, source};
use rustix::process::Pid;

use crate::collect::look::Look;
use crate::collect::{Contents, Inventory, Object, collect};
use crate::end::Ending;
use crate::freeze::{Frozen, freeze};
use crate::layer::Layer;
use crate::links::{self, Link};
use crate::network::{self, Replaced};
use crate::patience::Patience;
use crate::seal::seal;
use crate::statistics::as_micros;
use crate::{
    Afterwards, DumpOptions, DumpReport, Error, Observer, Result, Stage, Statistics, dedup,
};

/// Saves the tree under `options.tree` into `options.images_dir`.
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
    let store = store::Directory::create(&options.images_dir).map_err(Error::Store)?;
    let store = Arc::new(store);
    let mut layer = Layer::prepare(options)?;
    let dedup_over = options
        .prev_images_dir
        .as_deref()
        .filter(|_| options.auto_dedup);
    if let Some(parent) = dedup_over {
        dedup::check(&options.images_dir, parent)?;
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
    if dedup_over.is_some() {
        report.freed_bytes = dedup::after_dump(&options.images_dir, options.sync);
    }
    report.total_us = as_micros(began.elapsed());
    Ok(report)
}

/// What is known of a dump when the tree is stopped.
pub(crate) fn statistics_of(frozen: &Frozen) -> Statistics {
    let threads = frozen.tasks.iter().map(|task| task.threads().len() as u64);
    Statistics {
        tasks: frozen.tasks.len() as u64,
        threads: threads.sum(),
        freezing_us: as_micros(frozen.freezing),
        ..Statistics::default()
    }
}

/// Stops the tree and collects it, with `look` for its memory; see [`collect`] about `stay`.
pub(crate) fn freeze_and_collect(
    options: &DumpOptions,
    began: Instant,
    stay: bool,
    look: &mut dyn Look,
) -> Result<(Frozen, Inventory)> {
    let allow = options.allowed.for_resources(options.ghost_limit_bytes);
    let root = options.tree.as_raw_nonzero().get();
    let plain = !options.live && options.prev_images_dir.is_none() && options.track.is_none();
    let mut patience = Patience::new(root, options.timeout, plain);
    loop {
        let tried = patiently(began, || {
            let mut frozen = freeze(root, options.timeout)?;
            log::info!("{} tasks are stopped", frozen.tasks.len());
            if !options.live {
                frozen.limit.lift();
            }
            let inventory = collect(&mut frozen, &allow, stay, look)?;
            frozen.take_time();
            Ok((frozen, inventory))
        });
        match tried {
            Err(error) => patience.wait(error)?,
            Ok((frozen, mut inventory)) => {
                inventory.leftover = patience.done();
                return Ok((frozen, inventory));
            }
        }
    }
}

/// Stops the tree under `root` and has `look` look at it.
///
/// # Errors
/// Those of [`freeze`] and of `look`; the tree goes on then.
pub(crate) fn freeze_and<T>(
    root: Pid,
    timeout: Option<Duration>,
    began: Instant,
    mut look: impl FnMut(&mut Frozen) -> Result<T>,
) -> Result<(Frozen, T)> {
    patiently(began, || {
        let mut frozen = freeze(root.as_raw_nonzero().get(), timeout)?;
        let found = look(&mut frozen)?;
        Ok((frozen, found))
    })
}

/// Tries again while threads are still on their way back from a dump that was cut short.
pub(crate) fn patiently<T>(began: Instant, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    const PATIENCE: Duration = Duration::from_secs(5);
    loop {
        match work() {
            Err(Error::Returning { .. }) if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

/// Tells the observer how far the work is, from whichever thread.
pub(crate) fn watch_progress(observer: &mut dyn Observer, total_bytes: u64) -> impl Fn(u64) + Sync {
    let observer = Mutex::new(observer);
    move |done_bytes| {
        // Nobody panics while holding it; a bar that misses a step is none to stop for.
        if let Ok(mut observer) = observer.try_lock() {
            observer.progress(done_bytes, total_bytes);
        }
    }
}

/// From how many bytes on room is asked for before anything is written.
const RESERVE_FROM_BYTES: u64 = 4 << 20;

/// What the dump changed on the host and takes back if it fails.
#[derive(Default)]
pub(crate) struct Undo(pub Vec<Box<dyn FnOnce()>>);

impl Drop for Undo {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|undo| undo());
    }
}

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

/// What an image that is made now says of its creation.
#[must_use]
pub fn facts() -> Facts {
    let host = crate::host::kernel();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let since_1970 = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Facts {
        kernel_release: text(host.release()),
        stillframe_version: env!("CARGO_PKG_VERSION").to_owned(),
        created_ns: u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX),
        arch: text(host.machine()),
    }
}

/// The pages of an object, holes left out.
pub(crate) fn of_object(object: Object) -> (Box<dyn Source>, Vec<Extent>) {
    let whole = abi::Span::new(
        Addr(0),
        object.len_bytes.next_multiple_of(PAGE_BYTES as u64),
    );
    let allocated = match &object.contents {
        Contents::File(file) => source::allocated(file.as_fd()).ok(),
        Contents::Bytes(_) => None,
    };
    let spans = allocated.unwrap_or_else(|| vec![whole]);
    let spans = spans
        .iter()
        .map(|span| span.intersect(whole))
        .filter(|span| !span.is_empty());
    let extents = spans.map(|span| Extent {
        space: object.space,
        first_page: span.start.page(),
        at: span.start,
        pages: span.pages(),
    });
    let extents = extents.collect();
    match object.contents {
        Contents::File(file) => (Box::new(source::Object::new(file)), extents),
        Contents::Bytes(bytes) => (Box::new(source::Bytes(bytes)), extents),
    }
}
