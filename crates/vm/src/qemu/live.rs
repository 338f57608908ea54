//! A save during which the guest runs: it is stopped for one instant, of which the image is.

use std::thread;
use std::time::Duration;

use abi::spans::{Ranges, subtract};
use image::{Seal, SpaceId, Writer};
use pages::{Drain, Extent};
use serde_json::json;
use sys::realtime::Realtime;

use super::block::Block;
use super::devices;
use super::disks::{self, Disks};
use super::guest::Guest;
use super::machine::{self, Machine};
use super::record::{self, QemuDisk};
use super::save::{
    Progress, SaveKind, SaveOptions, SaveSummary, begin_with, find_disks, finish, memories, whole,
};
use super::snapshot::{FEATURES, Snapshot};
use super::track::TrackedMemory;
use super::watch::Watch;
use super::watchdog::set;
use crate::sparse::PageCounts;
use crate::{Error, Result};

/// How often an instant is tried whose memory QEMU gives up while it is read.
const INSTANTS_MAX: u32 = 3;

/// State at the instant.
struct Instant {
    state: Vec<u8>,
    disks: Vec<QemuDisk>,
    stopped: Duration,
}

/// Saves a machine that runs on.
///
/// # Errors
/// As [`save()`](super::save()).
pub(crate) fn save(
    options: &SaveOptions,
    machine: &mut Machine,
    seal: Seal,
    watch: &mut Watch<'_>,
) -> Result<SaveSummary> {
    machine::refuse_unheard(machine)?;
    if let Some(tracking) = TrackedMemory::find(machine.pid, &machine.blocks)? {
        // Only one can protect a page. The next layer is found by comparing.
        tracking.quit();
    }
    for _ in 0..INSTANTS_MAX {
        if let Some(saved) = attempt(options, machine, seal.clone(), watch)? {
            return Ok(saved);
        }
        log::warn!("QEMU has given up memory that was not saved yet: there is another instant");
    }
    let options = SaveOptions {
        kind: SaveKind::Stopped,
        ..options.clone()
    };
    whole(&options, machine, seal, watch)
}

/// Saves the machine as it is at one instant; none where memory was given up meanwhile.
fn attempt(
    options: &SaveOptions,
    machine: &mut Machine,
    seal: Seal,
    watch: &mut Watch<'_>,
) -> Result<Option<SaveSummary>> {
    let (writer, mut record) = begin_with(options, machine, watch)?;
    let (id, pid) = (writer.id(), machine.pid);
    let again = machine.qmp.duplicate();
    let mut again = again.map_err(Error::kernel("cannot duplicate a descriptor"))?;
    let mut disks = find_disks(options, machine)?;
    let guest = Guest::guard(&mut machine.qmp, &machine.before, &options.images)?;
    set(guest.qmp, &machine.capabilities)?;
    // From here on QEMU waits for us when it gives memory up, and must not be asked anything before
    // somebody listens.
    let uffd = freeze::userfaultfd_of(pid, false, FEATURES)?;
    let snapshot = Snapshot::new(uffd, &machine.blocks)?;
    let copied = thread::scope(|scope| {
        let _end = ServiceGuard(&snapshot);
        scope.spawn(|| snapshot.serve());
        let more = InstantContext {
            folder: &record.folder,
            writer: &writer,
            disks: disks.as_mut(),
            watch: &mut *watch,
        };
        let instant = stop(guest, &snapshot, more)?;
        let fates = copy(&snapshot, &machine.blocks, &writer, watch.progress)?;
        // Memory is given up in one step of QEMU's main loop, at whose end it is told: when QEMU
        // answers, that has been heard.
        again.insist("query-status", &json!({}))?;
        Ok::<_, Error>((instant, fates))
    });
    let (instant, fates) = copied?;
    log::debug!("a writer waited for {:?} at most", snapshot.longest_wait());
    if snapshot.is_lost() {
        return Ok(None);
    }
    drop(snapshot);
    record.disks = instant.disks;
    let state_bytes = instant.state.len() as u64;
    writer.record(record::state(instant.state));
    let disk_bytes = finish(&writer, record, disks.as_ref(), true, watch)?;
    writer.seal(seal)?;
    Ok(Some(SaveSummary {
        state_bytes,
        disk_bytes,
        overlays: disks.map_or_else(Vec::new, |disks| disks.overlays),
        ..SaveSummary::new(id, pid, fates, instant.stopped)
    }))
}

/// Context of the instant, besides memory and devices.
struct InstantContext<'a, 'b> {
    /// QEMU's working directory.
    folder: &'a str,
    writer: &'a Writer,
    disks: Option<&'a mut Disks>,
    watch: &'a mut Watch<'b>,
}

/// Stops the guest for the instant, and has it go on.
fn stop(
    mut guest: Guest<'_>,
    snapshot: &Snapshot,
    more: InstantContext<'_, '_>,
) -> Result<Instant> {
    let pipe = devices::pipe(guest.qmp)?;
    snapshot.protect_ahead()?;
    // Without the privilege the stop takes longer.
    let realtime = Realtime::new();
    guest.stop()?;
    if let Some(disks) = more.disks {
        disks.hold(&mut guest, more.writer.id())?;
    }
    devices::begin(&mut guest)?;
    let patience = guest.qmp.patience;
    let state = thread::scope(|scope| {
        let state = scope.spawn(|| devices::read(pipe, patience));
        let protected = snapshot.set();
        let state = state
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        protected.and(state)
    })?;
    devices::end(&mut guest)?;
    let disks = disks::told(guest.qmp, more.folder)?;
    more.watch.instant(more.writer)?;
    let stopped = guest.go_on()?;
    drop(realtime);
    Ok(Instant {
        state,
        disks,
        stopped,
    })
}

/// Copies the memory of the instant.
fn copy(
    snapshot: &Snapshot,
    blocks: &[Block],
    writer: &Writer,
    progress: Progress<'_>,
) -> Result<PageCounts> {
    let memories = memories(blocks)?;
    let data = memories.iter().map(|memory| memory.data().clone());
    let data = data.collect::<Vec<_>>();
    let mut fates = PageCounts::default();
    for memory in &memories {
        memory.mark_holes(writer);
        fates.pages += memory.pages();
        fates.zero_pages += memory.holes();
    }
    let total = (fates.pages - fates.zero_pages) * abi::PAGE_BYTES;
    writer.reserve(total)?;
    let mut plan = snapshot.plan(&data);
    let mut done = 0;
    while let Some((window, pages)) = plan.next(snapshot) {
        let space = SpaceId(window.0 as u32 + 1);
        let extents = pages.iter().map(|range| memories[window.0].extent(range));
        let extents = extents.collect::<Vec<_>>();
        let source = snapshot.source(window.0);
        let read = match writer.parent().cloned() {
            None => extents,
            Some(parent) => {
                let changed = pages::changed(&source, &extents, &parent, &|_| ())?;
                let numbers = changed.iter().map(Extent::numbers).collect::<Ranges<_>>();
                let same = subtract(&pages, &numbers);
                fates.parent_pages += same.iter().map(|it| it.end - it.start).sum::<u64>();
                writer.inherit_described(space, &same)?;
                changed
            }
        };
        let how = Drain {
            beside: true,
            ..Drain::default()
        };
        let drained = pages::drain_all(&[(&source, &read)], writer, how)?;
        snapshot.done(window);
        fates.stored_pages += drained.stored_pages;
        fates.zero_pages += drained.zero_pages;
        done += pages.iter().map(|it| it.end - it.start).sum::<u64>() * abi::PAGE_BYTES;
        progress(done, total);
    }
    Ok(fates)
}

/// Ends the thread that serves a snapshot.
struct ServiceGuard<'a>(&'a Snapshot);

impl Drop for ServiceGuard<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
