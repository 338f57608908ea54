//! A running machine becomes an image.

use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use image::{
    Compression, Facts, Granule, ImageId, NewSpace, Reader, Seal, SpaceId, SpaceKind, Writer,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use store::Images;

use super::block::Block;
use super::machine::{self, Machine};
use super::qmp::{PATIENCE, Qmp};
use super::record::{self, QemuBlock, Saved as SavedMachine};
use super::watchdog::{Before, Watchdog, go_on, set};
use crate::place;
use crate::sparse::{self, Fates, Holes, Memory};
use crate::{Error, Result};

/// The most that QEMU saves of devices, ROMs and video memory, in bytes.
const STATE_MAX_BYTES: usize = 128 << 20;

/// What the pipe with the state can hold, in bytes.
const PIPE_BYTES: usize = 1 << 20;

/// What QEMU calls the descriptor that it writes the state to.
const STATE: &str = "stillframe-state";

/// Which machine is to be saved, and where to.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Where its monitor listens (QMP).
    pub socket: PathBuf,
    /// Where the image goes.
    pub images: Images,
    /// The image that it is over.
    pub parent: Option<Images>,
    /// Whether the guest goes on.
    pub leave_running: bool,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// Whether to wait until the image is on the disk.
    pub sync: bool,
}

/// What was saved.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
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
}

/// Saves a machine. The memory is read from its files, the state of the devices comes from QEMU.
///
/// The calling process must have one thread. Calls `progress` with the bytes done and to be done.
///
/// # Errors
/// [`Error::Unfit`] where the machine cannot be saved: nothing was changed then. After any other
/// error the guest runs on, if it ran before, and an image that was there stays.
pub fn save(
    options: &SaveOptions,
    facts: Facts,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Saved> {
    let mut machine = Machine::look(&options.socket)?;
    let writer = begin(options, &mut machine)?;
    let id = writer.id();
    let pid = machine.pid;
    let mut record = std::mem::take(&mut machine.record);
    let (state, fates, guest) = copy(options, &mut machine, &writer, progress)?;
    record.disks = machine::disks(guest.qmp, &record.folder)?;
    let state_bytes = state.len() as u64;
    writer.record(record.record());
    writer.record(record::state(state));
    let seal = Seal {
        durable: options.sync,
        facts,
    };
    let stopped = guest.end(options, id, || Ok(writer.seal(seal)?))?;
    let saved = Saved {
        image: id,
        pid,
        pages: fates.pages,
        stored_pages: fates.stored_pages,
        zero_pages: fates.zero_pages,
        parent_pages: fates.parent_pages,
        state_bytes,
        stopped,
    };
    log::info!("image {id} is whole: {saved:?}");
    Ok(saved)
}

/// Starts the image with a space for each block, under the number that the parent has for it.
fn begin(options: &SaveOptions, machine: &mut Machine) -> Result<Writer> {
    let parent = match &options.parent {
        None => None,
        Some(parents) => {
            let store = parents.open().map_err(Error::Store)?;
            let reader = Reader::open(&*store)?;
            SavedMachine::of(&reader)?;
            check_parent(&reader, &machine.blocks, parents)?;
            Some((reader, parents))
        }
    };
    let writer = place::begin(&options.images, parent, options.compress)?;
    for (number, block) in (1..).zip(&machine.blocks) {
        writer.space(NewSpace {
            id: SpaceId(number),
            kind: SpaceKind::Block,
            name: block.name.clone(),
            len_pages: block.pages,
            granule: Granule::Small,
        });
        machine.record.blocks.push(QemuBlock {
            space: number,
            backend: block.backend.clone(),
        });
    }
    Ok(writer)
}

/// Blocks are numbered in the order of their names, so those of one machine have the same numbers
/// in each image.
fn check_parent(reader: &Reader, blocks: &[Block], parents: &Images) -> Result<()> {
    let theirs = reader.spaces().iter();
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

/// A guest that stands still; dropped, it goes on.
struct Guest<'a> {
    qmp: &'a mut Qmp,
    before: &'a Before,
    watchdog: Watchdog,
    since: Instant,
    is_over: bool,
}

impl Guest<'_> {
    /// Has the guest go on and the image sealed, or, unless it is to go on, the image sealed and
    /// QEMU ended. Gives how long the guest stood still.
    fn end(
        mut self,
        options: &SaveOptions,
        id: ImageId,
        seal: impl FnOnce() -> Result<ImageId>,
    ) -> Result<Duration> {
        if options.leave_running {
            self.is_over = true;
            go_on(self.qmp, self.before)?;
            let stopped = self.since.elapsed();
            self.watchdog.dismiss();
            seal()?;
            return Ok(stopped);
        }
        let stopped = self.since.elapsed();
        self.watchdog.sealing(id)?;
        seal()?;
        // From here on the machine is in the image.
        self.is_over = true;
        match self.qmp.call::<Value>("quit", json!({})) {
            Ok(_) | Err(Error::Gone(_)) => {}
            Err(error) => log::warn!("QEMU does not end: {error}"),
        }
        self.watchdog.dismiss();
        Ok(stopped)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            match go_on(self.qmp, self.before) {
                Ok(()) => self.watchdog.dismiss(),
                // It tries as well, when it sees that this process is gone.
                Err(error) => log::error!("the guest does not go on: {error}"),
            }
        }
    }
}

/// Stops the guest and copies memory and devices.
fn copy<'a>(
    options: &SaveOptions,
    machine: &'a mut Machine,
    writer: &Writer,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Vec<u8>, Fates, Guest<'a>)> {
    let watchdog = Watchdog::post(&machine.qmp, &machine.before, &options.images)?;
    watchdog.stopping()?;
    let guest = Guest {
        qmp: &mut machine.qmp,
        before: &machine.before,
        watchdog,
        since: Instant::now(),
        is_over: false,
    };
    set(guest.qmp, &machine.capabilities)?;
    guest.qmp.call::<Value>("stop", json!({}))?;
    let state = begin_migration(guest.qmp)?;
    let (state, fates) = thread::scope(|scope| {
        let devices = scope.spawn(|| read_state(state));
        let fates = copy_memory(&machine.blocks, writer, progress);
        let state = devices
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, Error>((state?, fates?))
    })?;
    match guest.qmp.end_of_migration(PATIENCE)?.as_str() {
        "completed" => {}
        _ => return Err(refused(guest.qmp)),
    }
    Ok((state, fates, guest))
}

/// Has QEMU write the state of its devices; gives where it can be read.
fn begin_migration(qmp: &mut Qmp) -> Result<OwnedFd> {
    let kernel = |errno: rustix::io::Errno| Error::Kernel {
        doing: "cannot make a pipe",
        source: errno.into(),
    };
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(kernel)?;
    // Without the privilege for so much it takes longer.
    let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE_BYTES);
    qmp.call_along::<Value>("getfd", json!({ "fdname": STATE }), &[writer.as_fd()])?;
    drop(writer);
    qmp.call::<Value>("migrate", json!({ "uri": format!("fd:{STATE}") }))?;
    Ok(reader)
}

fn read_state(from: OwnedFd) -> Result<Vec<u8>> {
    let failed = |source: std::io::Error| Error::Kernel {
        doing: "cannot read the state of the devices",
        source,
    };
    let patience = Timespec::try_from(PATIENCE).expect("it is short");
    let (mut state, mut from) = (Vec::new(), std::fs::File::from(from));
    let mut buffer = vec![0; 256 << 10];
    loop {
        let mut fds = [PollFd::new(&from, PollFlags::IN)];
        match poll(&mut fds, Some(&patience)) {
            Ok(0) => return Err(failed(std::io::ErrorKind::TimedOut.into())),
            Err(Errno::INTR) => continue,
            other => other.map_err(|errno| failed(errno.into()))?,
        };
        match from.read(&mut buffer).map_err(failed)? {
            0 => return Ok(state),
            count => state.extend_from_slice(&buffer[..count]),
        }
        if state.len() > STATE_MAX_BYTES {
            return Err(Error::Unfit(format!(
                "QEMU says more than {} MiB of its devices: is there memory that is not shared?",
                STATE_MAX_BYTES >> 20
            )));
        }
    }
}

fn copy_memory(
    blocks: &[Block],
    writer: &Writer,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Fates> {
    let memory = |(number, block): (u32, &Block)| -> Result<Memory> {
        let file = block.file.try_clone().map_err(|source| Error::Kernel {
            doing: "cannot duplicate a descriptor",
            source,
        })?;
        Ok(Memory::new(
            file,
            SpaceId(number),
            block.pages,
            block.offset_bytes,
        ))
    };
    let memories = (1..).zip(blocks).map(memory).collect::<Result<Vec<_>>>()?;
    sparse::store(&memories, writer, Holes::Zero, progress)
}

/// Why a migration has failed.
fn refused(qmp: &mut Qmp) -> Error {
    let told = qmp.call::<Value>("query-migrate", json!({}));
    let why = told
        .as_ref()
        .ok()
        .and_then(|told| told.get("error-desc")?.as_str());
    Error::Refused {
        command: "migrate",
        what: why.unwrap_or("it does not say why").to_owned(),
    }
}
