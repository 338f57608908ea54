//! What happened, counted.
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::Progress;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Fault {
    /// `missing` or `write-protect`.
    pub kind: &'static str,
    /// In bytes.
    pub page_size: u64,
    /// `data`, `zero`, `removed`, `there`, `written`, `poisoned`, `deferred`.
    pub outcome: &'static str,
}

/// Origin of bytes, or reason of an action.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Source {
    /// Of bytes `image`, `zero`, `prefetch`; of what was taken out of the tracking of missing pages
    /// `empty`, `remove`.
    pub source: &'static str,
}

/// The counters of one server, of all its sessions.
#[derive(Debug)]
pub struct Metrics {
    faults: Family<Fault, Counter>,
    latency: Family<Fault, Histogram, fn() -> Histogram>,
    bytes: Family<Source, Counter>,
    unregistered: Family<Source, Counter>,
    unregistered_bytes: Family<Source, Counter>,
    unregistering: Family<Source, Counter<f64, std::sync::atomic::AtomicU64>>,
    /// Events that were read together and are not answered yet.
    pub(crate) queued: Gauge,
    /// Sessions that are served.
    pub sessions: Gauge,
    resident: Gauge,
    remaining: Gauge,
    native: Gauge,
    /// Faults on pages that were brought in, or on their way, before they were asked for.
    pub(crate) prefetch_hits: Counter,
    diffs: Counter,
    diff_pages: Counter,
    saved_bytes: Counter,
}

/// From 1 microsecond to 4 seconds.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(1e-6, 2.0, 23))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// New ones.
    #[must_use]
    pub fn new() -> Self {
        Self {
            faults: Family::default(),
            latency: Family::new_with_constructor(buckets),
            bytes: Family::default(),
            unregistered: Family::default(),
            unregistered_bytes: Family::default(),
            unregistering: Family::default(),
            queued: Gauge::default(),
            sessions: Gauge::default(),
            resident: Gauge::default(),
            remaining: Gauge::default(),
            native: Gauge::default(),
            prefetch_hits: Counter::default(),
            diffs: Counter::default(),
            diff_pages: Counter::default(),
            saved_bytes: Counter::default(),
        }
    }

    /// Gives them the names that docs/serve.md lists.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("stillframe_uffd");
        let faults = "Page faults, by kind, page size in bytes and what became of them";
        registry.register("faults", faults, self.faults.clone());
        let latency = "From reading a fault until its page was there";
        let name = "fault_latency";
        registry.register_with_unit(name, latency, Unit::Seconds, self.latency.clone());
        let bytes = "Bytes brought in, by where they came from";
        registry.register_with_unit("installed", bytes, Unit::Bytes, self.bytes.clone());
        let what = "Calls that took pages out of missing-page tracking, by reason";
        registry.register("unregister", what, self.unregistered.clone());
        let what = "What these took out";
        let family = self.unregistered_bytes.clone();
        registry.register_with_unit("unregister", what, Unit::Bytes, family);
        let what = "How long these took";
        let family = self.unregistering.clone();
        registry.register_with_unit("unregister_duration", what, Unit::Seconds, family);
        let what = "Events that were read and are not answered yet";
        registry.register("queue_depth", what, self.queued.clone());
        let what = "Sessions that are served";
        registry.register("sessions", what, self.sessions.clone());
        for (name, what, gauge) in [
            ("resident", "Bytes that were brought in", &self.resident),
            (
                "remaining",
                "Bytes that machines would wait for",
                &self.remaining,
            ),
            (
                "native",
                "Bytes that the kernel brings in by itself",
                &self.native,
            ),
        ] {
            registry.register_with_unit(name, what, Unit::Bytes, gauge.clone());
        }
        let what = "Faults on pages that were on their way, or there, before they were asked for";
        registry.register("prefetch_hits", what, self.prefetch_hits.clone());
        let what = "Differences that were written";
        registry.register("diffs", what, self.diffs.clone());
        let what = "Pages of 4 KiB that these stored";
        registry.register("diff_pages", what, self.diff_pages.clone());
        let what = "Bytes saved for live differences before they changed";
        registry.register_with_unit("diff_saved", what, Unit::Bytes, self.saved_bytes.clone());
    }

    /// Tells how far all sessions are together.
    pub fn progress(&self, progress: &[Progress]) {
        for (gauge, bytes) in [
            (
                &self.resident,
                progress.iter().map(|one| one.resident_bytes).sum::<u64>(),
            ),
            (
                &self.remaining,
                progress.iter().map(|one| one.remaining_bytes).sum(),
            ),
            (
                &self.native,
                progress.iter().map(|one| one.native_bytes).sum(),
            ),
        ] {
            gauge.set(bytes.cast_signed());
        }
    }

    pub(crate) fn fault(&self, fault: &Fault, took: Duration) {
        self.faults.get_or_create(fault).inc();
        self.latency
            .get_or_create(fault)
            .observe(took.as_secs_f64());
    }

    pub(crate) fn installed(&self, source: &'static str, bytes: u64) {
        self.bytes.get_or_create(&Source { source }).inc_by(bytes);
    }

    pub(crate) fn unregistered(&self, source: &'static str, bytes: u64, took: Duration) {
        let source = Source { source };
        self.unregistered.get_or_create(&source).inc();
        self.unregistered_bytes.get_or_create(&source).inc_by(bytes);
        let time = self.unregistering.get_or_create(&source);
        time.inc_by(took.as_secs_f64());
    }

    pub(crate) fn saved(&self, bytes: u64) {
        self.saved_bytes.inc_by(bytes);
    }

    pub(crate) fn diff(&self, pages: u64) {
        self.diffs.inc();
        self.diff_pages.inc_by(pages);
    }
}
