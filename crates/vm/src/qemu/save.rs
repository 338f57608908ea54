//! A running machine becomes an image.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use abi::spans::Ranges;
use image::{
    Base, Compression, Facts, Granule, ImageId, NewSpace, Reader, Seal, SpaceId, SpaceKind, Writer,
};
use store::Images;

use super::block::Block;
use super::disks::{self, Disks, Overlay};
use super::guest::Guest;
use super::machine::{Machine, unless_ended};
use super::record::{self, QemuBlock, QemuMachine};
use super::track::TrackedMemory;
use super::watch::Watch;
use super::watchdog::set;
use super::{devices, live, round};
use crate::place;
use crate::sparse::{self, Holes, Memory, PageCounts};
use crate::{Error, Result};

/// Which machine is to be saved, and where to.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Socket of its monitor (QMP).
    pub socket: PathBuf,
    /// Directory of the new image.
    pub images: Images,
    /// The image that it is over.
    pub parent: Option<Images>,
    /// How it is saved.
    pub kind: SaveKind,
    /// True if the contents of its disks are saved, too.
    pub with_disks: bool,
    /// True if each restore is going to be given a command line, as the recorded one does not make
    /// all devices of the machine.
    pub for_command: bool,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// True to wait until the image is on the disk.
    pub sync: bool,
    /// How long QEMU may take to answer.
    pub patience: Duration,
}

/// How a machine is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveKind {
    /// The guest is stopped while its memory is read, and QEMU ends when the image is whole.
    Ending,
    /// The guest is stopped while its memory is read, and goes on.
    Stopped,
    /// The guest is stopped for a moment, of which the image is; its memory is read afterwards.
    Live,
    /// Only the memory is saved, while the guest runs, and what it writes from then on is tracked.
    Round,
}

/// Summary of a save.
#[derive(Clone, Debug)]
pub struct SaveSummary {
    /// The image.
    pub image: ImageId,
    /// QEMU's process.
    pub pid: i32,
    /// Pages of the memory.
    pub pages: u64,
    /// Those that are stored.
    pub stored_pages: u64,
    /// Those that are zero.
    pub zero_pages: u64,
    /// Those that are the parent's.
    pub parent_pages: u64,
    /// Bytes of the state of devices, ROMs and video memory.
    pub state_bytes: u64,
    /// How long the guest stood still, if it goes on: until it was told to.
    pub stopped: Duration,
    /// Bytes of disks that are stored.
    pub disk_bytes: u64,
    /// The files in which disks go on, that were not written to before.
    pub overlays: Vec<Overlay>,
}

impl SaveSummary {
    pub(crate) fn new(image: ImageId, pid: i32, fates: PageCounts, stopped: Duration) -> Self {
        Self {
            image,
            pid,
            pages: fates.pages,
            stored_pages: fates.stored_pages,
            zero_pages: fates.zero_pages,
            parent_pages: fates.parent_pages,
            state_bytes: 0,
            stopped,
            disk_bytes: 0,
            overlays: Vec::new(),
        }
    }
}

/// Observer of a save's progress: the bytes done and to be done.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Saves a machine. The memory is read from its files, the state of the devices comes from QEMU.
///
/// The calling process must have one thread.
///
/// # Errors
/// [`Error::Unfit`] where the machine cannot be saved: nothing was changed then. After any other
/// error the guest runs on, if it ran before, and an image that was there stays.
pub fn save(options: &SaveOptions, facts: Facts, mut watch: Watch<'_>) -> Result<SaveSummary> {
    let watch = &mut watch;
    let mut machine = Machine::look(&options.socket, options.patience)?;
    if options.kind != SaveKind::Round {
        refuse_lost(options, &mut machine)?;
    }
    let seal = Seal {
        durable: options.sync,
        facts,
    };
    let pid = machine.pid;
    let saved = match options.kind {
        SaveKind::Round => round::save(options, &mut machine, seal, watch.progress),
        SaveKind::Live => live::save(options, &mut machine, seal, watch),
        SaveKind::Ending | SaveKind::Stopped => whole(options, &mut machine, seal, watch),
    };
    let saved = saved.map_err(|error| unless_ended(error, pid))?;
    log::info!("image {} is whole: {saved:?}", saved.image);
    Ok(saved)
}

/// Refuses a machine whose image would not have all of it.
fn refuse_lost(options: &SaveOptions, machine: &mut Machine) -> Result<()> {
    let plugged = machine.record.plugged.join(", ");
    if !plugged.is_empty() && !options.for_command {
        return Err(Error::Unfit(format!(
            "the machine differs from its command line, which restores start others with, in \
             {plugged}: undo that, or save with --for-command and give each restore a command line \
             behind --"
        )));
    }
    let temporary = disks::temporary(&mut machine.qmp, machine.pid, &machine.record.folder)?;
    let Some(disk) = temporary.first() else {
        return Ok(());
    };
    let what = match (options.with_disks, options.kind) {
        (true, SaveKind::Ending) => return Ok(()),
        (true, _) => "it is saved where QEMU ends, without --leave-running",
        (false, _) => "save it with --with-disks",
    };
    Err(Error::Unfit(format!(
        "the disk {} is temporary (snapshot=on, or its file was removed): what the guest has \
         written to it ends with this QEMU; {what}",
        disk
    )))
}

/// Saves all of a machine while its guest is stopped.
pub(crate) fn whole(
    options: &SaveOptions,
    machine: &mut Machine,
    seal: Seal,
    watch: &mut Watch<'_>,
) -> Result<SaveSummary> {
    let (writer, mut record) = begin_with(options, machine, watch)?;
    let (id, pid) = (writer.id(), machine.pid);
    let mut disks = find_disks(options, machine)?;
    let tracking = TrackedMemory::find(pid, &machine.blocks)?;
    let mut guest = Guest::guard(&mut machine.qmp, &machine.before, &options.images)?;
    set(guest.qmp, &machine.capabilities)?;
    let state = devices::pipe(guest.qmp)?;
    if let Some(tracking) = &tracking {
        tracking.begin()?;
    }
    guest.stop()?;
    if options.kind != SaveKind::Ending
        && let Some(disks) = &mut disks
    {
        disks.hold(&mut guest, id)?;
    }
    devices::begin(&mut guest)?;
    let (progress, blocks) = (watch.progress, &machine.blocks);
    let patience = guest.qmp.patience;
    let (state, fates) = thread::scope(|scope| {
        let memory = scope.spawn(|| copy_memory(blocks, &writer, tracking.as_ref(), progress));
        let state = devices::read(state, patience).and_then(|state| {
            devices::end(&mut guest)?;
            record.disks = disks::told(guest.qmp, &record.folder)?;
            watch.instant(&writer)?;
            Ok(state)
        });
        let fates = memory
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, Error>((state?, fates?))
    })?;
    let state_bytes = state.len() as u64;
    writer.record(record::state(state));
    let (stopped, disk_bytes) = if options.kind == SaveKind::Ending {
        let disk_bytes = finish(&writer, record, disks.as_ref(), false, watch)?;
        let stopped = guest.end(id, || Ok(writer.seal(seal)?))?;
        (stopped, disk_bytes)
    } else {
        let stopped = guest.go_on()?;
        let disk_bytes = finish(&writer, record, disks.as_ref(), true, watch)?;
        writer.seal(seal)?;
        if let Some(tracking) = tracking {
            tracking.end(id);
        }
        (stopped, disk_bytes)
    };
    Ok(SaveSummary {
        state_bytes,
        disk_bytes,
        overlays: disks.map_or_else(Vec::new, |disks| disks.overlays),
        ..SaveSummary::new(id, pid, fates, stopped)
    })
}

/// The disks that are to be saved.
pub(crate) fn find_disks(options: &SaveOptions, machine: &mut Machine) -> Result<Option<Disks>> {
    let found = options
        .with_disks
        .then(|| Disks::find(&mut machine.qmp, machine.pid, &machine.record.folder));
    found.transpose()
}

/// Stores the disks that are to be saved, what is saved with the machine, and records that; gives
/// the bytes of disks that are stored. `beside`: whether the guest runs meanwhile.
pub(crate) fn finish(
    writer: &Writer,
    mut record: QemuMachine,
    disks: Option<&Disks>,
    beside: bool,
    watch: &mut Watch<'_>,
) -> Result<u64> {
    let mut disk_bytes = 0;
    if let Some(disks) = disks {
        (record.disks, disk_bytes) = disks.store(writer, beside, watch.progress)?;
    }
    watch.put(writer)?;
    writer.record(record.record());
    Ok(disk_bytes)
}

/// The same as [`begin`], and has what is saved with the machine read ahead.
pub(crate) fn begin_with(
    options: &SaveOptions,
    machine: &mut Machine,
    watch: &mut Watch<'_>,
) -> Result<(Writer, QemuMachine)> {
    let begun = begin(options, machine)?;
    if watch.begin(&begun.0)? {
        // Somebody may have stopped the guest meanwhile, or begun to migrate it.
        machine.look_again()?;
    }
    Ok(begun)
}

/// Starts the image with a space for each block, under the number that the parent has for it; gives
/// what is recorded of the machine.
pub(crate) fn begin(options: &SaveOptions, machine: &Machine) -> Result<(Writer, QemuMachine)> {
    let parent = match &options.parent {
        None => None,
        Some(parents) => {
            let base = Base::open(parents)?;
            record::machine_of(&base.reader)?;
            check_parent(&base.reader, &machine.blocks, parents)?;
            Some(base)
        }
    };
    let writer = place::begin(&options.images, parent.as_ref(), options.compress)?;
    let mut record = machine.record.clone();
    for (number, block) in (1..).zip(&machine.blocks) {
        writer.space(NewSpace {
            id: SpaceId(number),
            kind: SpaceKind::Block,
            name: block.name.clone(),
            len_pages: block.pages,
            granule: Granule::Small,
        });
        record.blocks.push(QemuBlock {
            space: number,
            backend: block.backend.clone(),
            page_bytes: block.page_bytes()?,
        });
    }
    Ok((writer, record))
}

/// Blocks are numbered in the order of their names, so those of one machine have the same numbers
/// in each image.
fn check_parent(reader: &Reader, blocks: &[Block], parents: &Images) -> Result<()> {
    let theirs = reader.spaces().iter();
    let theirs = theirs.filter(|space| space.kind == SpaceKind::Block);
    let theirs = theirs.map(|space| (space.id, space.name.as_str(), space.len_pages));
    let own = (1..).map(SpaceId).zip(blocks);
    let own = own.map(|(id, block)| (id, block.name.as_str(), block.pages));
    match theirs.eq(own) {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "the image in {parents} is of a machine with other memory"
        ))),
    }
}

/// Copies the memory of a stopped guest.
fn copy_memory(
    blocks: &[Block],
    writer: &Writer,
    tracking: Option<&TrackedMemory>,
    progress: Progress<'_>,
) -> Result<PageCounts> {
    let mut memories = memories(blocks)?;
    if let Some(tracking) = tracking {
        let unwritten = tracking.take()?;
        memories = knowing(memories, writer, tracking, unwritten);
    }
    sparse::store(&memories, writer, Holes::Zero, false, progress)
}

/// Memories of which it is known what was written, if that is known since the very parent of the
/// image. `unwritten` is what [`TrackedMemory::take`] has told.
pub(crate) fn knowing(
    memories: Vec<Memory>,
    writer: &Writer,
    tracking: &TrackedMemory,
    unwritten: Vec<Ranges<u64>>,
) -> Vec<Memory> {
    let parent = writer.parent().map(|parent| parent.id());
    if parent.is_none() || tracking.image() != parent {
        log::info!("what was written since the parent image is not known");
        return memories;
    }
    let known = memories.into_iter().zip(unwritten);
    let known = known.map(|(memory, unwritten)| memory.knowing(unwritten));
    known.collect()
}

/// The files of the blocks, with the holes that they have now.
pub(crate) fn memories(blocks: &[Block]) -> Result<Vec<Memory>> {
    let memory = |(number, block): (u32, &Block)| {
        let file = block
            .file
            .try_clone()
            .map_err(Error::kernel("cannot duplicate a descriptor"))?;
        let space = SpaceId(number);
        Ok(Memory::new(file, space, block.pages, block.offset_bytes))
    };
    (1..).zip(blocks).map(memory).collect()
}
