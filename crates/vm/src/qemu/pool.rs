//! Machines that were started ahead and wait for the state of their devices: a clone that is taken
//! out of the pool pays for nothing else.
//!
//! The keeper of the template has them: of each its process, the connection to its monitor, and
//! the channel to its undo list, which ends it when nobody has that channel any more.

use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use guard::{Helper, UndoList};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::own_disks::{MachineDisks, OwnDisks};
use super::ram::Memory;
use super::restore::{Batch, NumberedMachine, undo_list};
use super::start::QemuProcess;
use super::template::{Keeper, Pooled};
use crate::{Error, Result};

/// What the process is called that fills a pool.
const FILLER: &CStr = c"stillframe-pool";

/// How long guests that were just set running are left the processors before the pool is filled.
const COURTESY: Duration = Duration::from_millis(300);

/// What a keeper is told of a machine.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    number: u32,
    name: String,
    pid: i32,
    socket: PathBuf,
    log: PathBuf,
    disks: Vec<PathBuf>,
    state: i32,
}

/// What tells machines of one command line and place from others.
fn key(batch: &Batch<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let (line, sockets) = (batch.line, batch.sockets);
    let disks = batch.disks.map(OwnDisks::folder);
    (
        &line.program,
        &line.folder,
        &line.words,
        sockets,
        disks,
        batch.pattern,
    )
        .hash(&mut hasher);
    hasher.finish()
}

/// Takes at most `count` machines out of the pool, each with the list that ends it if this
/// process does.
pub(crate) fn take(
    keeper: &Keeper,
    batch: &Batch<'_>,
    count: u32,
) -> Vec<(NumberedMachine, UndoList)> {
    let key = key(batch);
    let mut taken = Vec::new();
    while taken.len() < count as usize {
        let Some(pooled) = keeper.take(key) else {
            break;
        };
        match understood(pooled) {
            Some((mut one, undo)) => {
                one.started.set_patience(batch.patience);
                taken.push((one, undo));
            }
            // It has ended since.
            None => log::info!("a machine of the pool is gone"),
        }
    }
    taken
}

fn understood(pooled: Pooled) -> Option<(NumberedMachine, UndoList)> {
    let about = serde_json::from_slice::<About>(&pooled.about).ok()?;
    let [process, qmp, line] = <[OwnedFd; 3]>::try_from(pooled.rights).ok()?;
    let has_ended = PollFd::new(&process, PollFlags::IN);
    // One that is ending has hung up before.
    let hung_up = PollFd::new(&qmp, PollFlags::empty());
    if poll(&mut [has_ended, hung_up], Some(&Timespec::default())) != Ok(0) {
        return None;
    }
    let pid = Pid::from_raw(about.pid)?;
    let places = (about.socket, about.log);
    let mut disks = MachineDisks::default();
    disks.made = about.disks;
    let started = QemuProcess::waiting((pid, process), qmp, places, disks, about.state);
    let clone = NumberedMachine {
        number: about.number,
        name: about.name,
        started,
    };
    Some((clone, UndoList::of(line.into())))
}

/// Starts machines until `wanted` wait in the pool.
///
/// # Errors
/// Those of [`Batch::start`]; [`Error::Gone`] where the keeper has ended. None is left in the pool
/// of those that were started.
pub(crate) fn fill_whole(
    batch: &Batch<'_>,
    memory: &Memory,
    keeper: &Keeper,
    wanted: u32,
) -> Result<()> {
    let mut put = 0;
    let filled = fill(batch, memory, keeper, wanted, &mut put);
    if filled.is_err() {
        // Its undo list ends a machine that nobody keeps.
        (0..put).for_each(|_| drop(keeper.take(key(batch))));
    }
    filled
}

/// The same, and says how many were `put` there, which are left where one cannot be.
fn fill(
    batch: &Batch<'_>,
    memory: &Memory,
    keeper: &Keeper,
    wanted: u32,
    put: &mut u32,
) -> Result<()> {
    let gone = || Error::Gone("the keeper of the template has ended".to_owned());
    let key = key(batch);
    while keeper.pooled(key).ok_or_else(gone)? < wanted.into() {
        let number = keeper.numbers(1).ok_or_else(gone)?;
        let undo = undo_list()?;
        let mut clone = batch.start(number, memory, &undo)?;
        clone.started.greet(batch.machine)?;
        let about = About {
            number,
            name: clone.name,
            pid: clone.started.pid(),
            socket: clone.started.socket.clone(),
            log: clone.started.log.clone(),
            disks: clone.started.disks.made.clone(),
            state: clone.started.state(),
        };
        let own = [clone.started.process(), clone.started.monitor()];
        let rights = own.map(|right| right.try_clone_to_owned());
        let rights = rights.into_iter().collect::<std::io::Result<Vec<_>>>();
        let mut rights = rights.map_err(Error::kernel("cannot duplicate a descriptor"))?;
        rights.push(undo.into_channel().into());
        let pooled = Pooled {
            key,
            about: serde_json::to_vec(&about).expect("it is plain"),
            rights,
        };
        keeper.put(&pooled).map_err(|_| gone())?;
        *put += 1;
        clone.started.leave();
    }
    Ok(())
}

/// The same by a process that is left behind.
///
/// # Errors
/// [`Error::Kernel`] where it cannot be made.
pub(crate) fn fill_behind(
    batch: &Batch<'_>,
    memory: &Memory,
    keeper: &Keeper,
    wanted: u32,
) -> Result<()> {
    let helper = Helper::new(FILLER)
        .keep(memory.iter().map(|file| file.2.as_fd()))
        .keep([batch.state.as_fd(), keeper.line()]);
    let left = helper.leave_alone(|| {
        std::thread::sleep(COURTESY);
        let streams = guard::standard_streams();
        let _ = fill(batch, memory, keeper, wanted, &mut 0);
        drop(streams);
    });
    let doing = "cannot leave a process behind that fills the pool";
    left.map_err(Error::kernel(doing))
}
