//! An image of a tree under construction and its report: what every kind of dump does alike.

use std::sync::Arc;
use std::time::Instant;

use freeze::Frozen;
use image::{Base, ImageId, Seal, Writer};
use pages::{Drain, EqualIndex};
use resources::Inherited;
use resources::map::vdso::Vdso;
use rustix::process::Pid;
use store::Store;

use crate::collect::Inventory;
use crate::contents::{Progress, Sources};
use crate::links::{self, Link};
use crate::network::Replaced;
use crate::seal::{check, facts};
use crate::statistics::as_micros;
use crate::{DumpOptions, DumpReport, Result, Stage, Statistics, cpuinfo, dedup, rights};

/// An image that has no name yet.
pub(crate) struct Draft {
    pub writer: Writer,
    /// What is known so far.
    pub report: DumpReport,
    records_bytes: u64,
    /// The state that the tasks of its restore start with.
    inherited: Inherited,
    around: Around,
}

/// An image that has its name.
pub(crate) struct Sealed {
    pub report: DumpReport,
    image: ImageId,
    around: Around,
}

/// Where and for how long.
struct Around {
    began: Instant,
    store: Arc<dyn Store>,
    sync: bool,
    /// Whether what it replaces in older images is freed.
    dedups: bool,
    /// The image of which it takes the place.
    replaced: Replaced,
    /// That one's links.
    links: Vec<Link>,
}

impl Draft {
    /// Starts the image in `store`, over `parent` where there is one.
    ///
    /// # Errors
    /// Those of [`dedup::check`] and [`Writer::begin`].
    pub fn begin(
        options: &DumpOptions,
        store: &Arc<dyn Store>,
        parent: Option<&Base>,
        began: Instant,
    ) -> Result<Self> {
        let dedups = options.auto_dedup && parent.is_some();
        if let Some(parent) = parent.filter(|_| dedups) {
            dedup::check(&**store, &*parent.store)?;
        }
        let around = Around {
            began,
            store: store.clone(),
            sync: options.sync,
            dedups,
            replaced: Replaced::of(&**store),
            links: links::of_store(&**store),
        };
        let mut report = DumpReport::default();
        report.statistics.kind = options.kind;
        let writer = Writer::begin(store.clone(), parent, options.compress)?;
        if options.cpu_cap.needs_instructions() {
            writer.record(cpuinfo::instructions());
        }
        Ok(Self {
            writer,
            report,
            records_bytes: 0,
            inherited: rights::check(options)?,
            around,
        })
    }

    /// Notes what is known of the tree once it is stopped and collected. Pages that were counted at
    /// an earlier stop count no more.
    pub fn stopped(&mut self, frozen: &Frozen) {
        let threads = frozen.tasks.iter().map(|task| task.threads().len() as u64);
        let before = &self.report.statistics;
        self.report.statistics = Statistics {
            kind: before.kind,
            tasks: frozen.tasks.len() as u64,
            threads: threads.sum(),
            freezing_us: before.freezing_us + as_micros(frozen.freezing),
            frozen_us: before.frozen_us,
            collect_us: as_micros(frozen.since.elapsed() - frozen.freezing),
            memory_us: before.memory_us,
            ..Statistics::default()
        };
    }

    /// Puts all into the image that is no contents of pages.
    pub fn note(&mut self, inventory: &mut Inventory) {
        inventory.name_objects(&self.writer);
        for record in inventory.records.drain(..) {
            self.records_bytes += record.payload.len() as u64;
            self.writer.record(record);
        }
        for run in inventory.same.drain(..) {
            self.report.statistics.shared_pages += u64::from(run.pages);
            self.writer.mark(run);
        }
        self.report.links = inventory.links.iter().map(Link::path).collect();
    }

    /// Reads all sources into the image; those that `equals` finds equal are stored once. `beside`
    /// is that of [`Drain`].
    ///
    /// # Errors
    /// [`crate::Error::Memory`].
    pub fn read(
        &mut self,
        sources: &Sources,
        (equals, beside): (Option<&EqualIndex>, bool),
        progress: &Progress,
    ) -> Result<()> {
        progress.expect(sources.bytes());
        let how = Drain {
            equals,
            beside,
            progress: &|bytes| progress.tell(bytes),
        };
        let reading = Instant::now();
        let drained = pages::drain_all(&sources.each(), &self.writer, how)?;
        let statistics = &mut self.report.statistics;
        statistics.memory_us = as_micros(reading.elapsed());
        statistics.write_us = Some(as_micros(drained.writing));
        statistics.count(&drained);
        log::info!("{} pages are stored", statistics.stored_pages);
        Ok(())
    }

    /// Gives an image of a whole tree its name if its restore can be planned. `foreign` are the
    /// vDSOs of the tree that are not this host's; `since` tells since when the tree is stopped,
    /// where it is.
    ///
    /// # Errors
    /// [`crate::Error::Unrestorable`], and those of [`Writer::seal_after`]; there is no new image
    /// then.
    pub fn seal(self, durable: bool, foreign: &[Vdso], since: Option<Instant>) -> Result<Sealed> {
        let inherited = self.inherited.clone();
        self.seal_after(durable, |draft, statistics| {
            let began = Instant::now();
            check(draft, foreign, &inherited)?;
            statistics.plan_us = Some(as_micros(began.elapsed()));
            Ok(since.map_or(0, |since| as_micros(since.elapsed())))
        })
    }

    /// Gives an image of memory alone its name.
    ///
    /// # Errors
    /// Those of [`Writer::seal_after`]; there is no new image then.
    pub fn seal_memory(self, durable: bool) -> Result<Sealed> {
        self.seal_after(durable, |_, _| Ok(0))
    }

    /// Does as [`Writer::seal_after`], with the statistics as a record. `check` gives for how long
    /// the tree is stopped already.
    fn seal_after(
        self,
        durable: bool,
        check: impl FnOnce(&image::Reader, &mut Statistics) -> Result<u64>,
    ) -> Result<Sealed> {
        let (writer, mut report) = (self.writer, self.report);
        let statistics = &mut report.statistics;
        statistics.sum_up();
        // Some of what was written may be room that goes.
        let stored_bytes = statistics.stored_bytes().min(writer.given_bytes());
        report.image_bytes = stored_bytes + self.records_bytes;
        let facts = facts();
        let image = writer.seal_after(Seal { durable, facts }, |draft| {
            let stopped_us = check(draft, statistics)?;
            let known = Statistics {
                frozen_us: statistics.frozen_us + stopped_us,
                ..statistics.clone()
            };
            Ok::<_, crate::Error>(vec![known.record()])
        })?;
        log::info!("image {image} is whole");
        // The image that needed them is gone.
        links::remove(&self.around.links);
        report.image = image.to_string();
        Ok(Sealed {
            report,
            image,
            around: self.around,
        })
    }
}

impl Sealed {
    /// Tells that the image is whole.
    ///
    /// # Errors
    /// [`crate::Error::Vetoed`]. The tree goes on then, and there is no image of it.
    pub fn tell(&self, progress: &mut Progress, root: Pid) -> Result<()> {
        progress.stage(Stage::PostDump, root).inspect_err(|_| {
            if let Err(error) = image::remove(&*self.around.store, self.image) {
                log::error!("the image stays although the tree goes on: {error}");
            }
        })
    }

    /// Does what is left when nothing can take the image back any more.
    pub fn finish(self) -> DumpReport {
        let (around, mut report) = (self.around, self.report);
        around.replaced.clear();
        if around.dedups {
            report.freed_bytes = dedup::after_dump(&*around.store, around.sync);
        }
        report.total_us = as_micros(around.began.elapsed());
        report
    }
}
