//! Machines that run before their memory has come: a process that is left behind brings in what the
//! guest touches, and everything else beside that.
//!
//! QEMU makes a userfaultfd in one call from outside, before it reads the state of its devices. As
//! long as a page is missing, a watchdog has that userfaultfd as well: if the server dies, QEMU is
//! ended before its faults are let go, and no page reads as zeros that is not. The server's lock on
//! the files of the memory says that they are not whole yet.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use guard::{Channel, Helper, UndoList};
use image::{Granule, Reader, SpaceId};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use serve::{Metrics, Options, Region, Session, Target};
use sys::uffd::Features;

use super::block;
use super::ram::{HUGE_BYTES, Memory};
use super::record::QemuMachine;
use super::restore::reopened;
use super::start::QemuProcess;
use crate::{Error, Result};

/// Features that the userfaultfd must have, also for huge pages.
const FEATURES: Features = Features::MISSING_SHMEM.union(Features::EVENT_REMOVE);
const HUGE_FEATURES: Features = Features::MISSING_HUGETLBFS;

/// Name of the process that fetches memory.
const SERVER: &std::ffi::CStr = c"stillframe-lazy";

/// The only message of a server.
#[derive(Clone, PartialEq, prost::Message)]
struct Begun {
    /// True if it answers faults.
    #[prost(bool, tag = "1")]
    is_ready: bool,
    /// Why it does not.
    #[prost(string, tag = "2")]
    why: String,
}

/// Tells whether all of a file of memory is there: a save would take what is not for zeros.
///
/// # Errors
/// That of flock(2).
pub(crate) fn is_whole(file: &OwnedFd) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            flock(file, FlockOperation::Unlock)?;
            Ok(true)
        }
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// A machine, as far as a server needs it.
struct Lazy {
    target: Target,
    process: OwnedFd,
    /// The files of its memory, locked.
    files: Vec<OwnedFd>,
    /// The log that tells why the machine was ended.
    log: File,
}

/// Leaves a process behind that brings the memory of a machine in, which waits for the state of its
/// devices. When this returns, faults are answered. From a process that has one thread.
pub(crate) fn leave_server(
    started: &QemuProcess,
    memory: &Memory,
    machine: &QemuMachine,
    reader: &Arc<Reader>,
) -> Result<()> {
    let lazy = Lazy::of(started, memory, machine)?;
    let open_files = reader.descriptors();
    let open_files = open_files.ok_or_else(|| {
        Error::Unfit("memory comes later only of an image in a directory".to_owned())
    })?;
    let helper = Helper::new(SERVER)
        .keep_numbers(lazy.numbers())
        .keep(open_files.iter().map(AsFd::as_fd));
    let left = helper.leave(|starter| {
        let streams = guard::standard_streams();
        lazy.serve(reader, starter);
        drop(streams);
    });
    let doing = "cannot leave a process behind that brings memory in";
    let server = left.map_err(Error::kernel(doing))?;
    let begun = server.receive::<Begun>();
    match begun.map_err(Error::kernel("cannot hear of the server of the memory"))? {
        Some((begun, _)) if begun.is_ready => Ok(()),
        Some((Begun { why, .. }, _)) => {
            Err(Error::Gone(format!("the memory cannot be served: {why}")))
        }
        None => Err(Error::Gone("the server of the memory has died".to_owned())),
    }
}

impl Lazy {
    fn of(started: &QemuProcess, memory: &Memory, machine: &QemuMachine) -> Result<Self> {
        let pid = started.pid();
        let mut regions = Vec::new();
        let mut files = Vec::new();
        let mut features = FEATURES;
        for (block, (_, bytes, file)) in machine.blocks.iter().zip(memory) {
            let is_huge = block::page_bytes(file)? == HUGE_BYTES;
            features |= if is_huge {
                HUGE_FEATURES
            } else {
                Features::empty()
            };
            regions.push(Region {
                at: block::place_of(pid, file, *bytes)?,
                bytes: *bytes,
                space: SpaceId(block.space),
                first_page: 0,
                granule: if is_huge {
                    Granule::Large
                } else {
                    Granule::Small
                },
            });
            // QEMU has the other one's open file, and would have its lock.
            let own = reopened(file)?;
            let locked = flock(&own, FlockOperation::NonBlockingLockExclusive);
            locked.map_err(Error::kernel("cannot lock the memory of a machine"))?;
            files.push(own);
        }
        regions.sort_by_key(|region| region.at);
        let uffd = freeze::userfaultfd_of(pid, false, features)?;
        let process = started.process().try_clone_to_owned();
        let log = File::options().append(true).open(&started.log);
        Ok(Self {
            target: Target { uffd, pid, regions },
            process: process.map_err(Error::kernel("cannot duplicate a descriptor"))?,
            files,
            log: log.map_err(Error::file("open", &started.log))?,
        })
    }

    fn numbers(&self) -> impl Iterator<Item = i32> + '_ {
        let own = [
            self.target.uffd.as_fd(),
            self.process.as_fd(),
            self.log.as_fd(),
        ];
        let own = own.map(|fd| fd.as_raw_fd()).into_iter();
        own.chain(self.files.iter().map(|file| file.as_raw_fd()))
    }

    /// Brings all in; tells `starter` when faults are answered, or why they are not.
    fn serve(self, image: &Arc<Reader>, starter: Channel) {
        let mut log = self.log.try_clone();
        let begun = self.begin(image);
        let why = begun.as_ref().err().map(|error| sys::causes::line(error));
        let told = Begun {
            is_ready: why.is_none(),
            why: why.unwrap_or_default(),
        };
        // The restore waits for it, or is gone, and the machine with it.
        let _ = starter.send(&told, &[]);
        drop(starter);
        let Ok(serving) = begun else { return };
        match serving.bring_in() {
            // Where the watchdog is gone, it ends nobody.
            Ok(true) => drop(serving.undo.dismiss()),
            Ok(false) => {}
            Err(error) => {
                let told = sys::causes::line(&error);
                let told = format!("stillframe: the machine's memory does not come: {told}");
                // Before the machine is ended, by the end of this.
                let _ = log.as_mut().map(|log| writeln!(log, "{told}"));
            }
        }
    }

    fn begin(self, image: &Arc<Reader>) -> Result<LazyService> {
        let held = self.files.iter().map(OwnedFd::as_fd);
        let held = held.chain([self.target.uffd.as_fd()]);
        let undo = UndoList::start(&held.collect::<Vec<_>>());
        let undo = undo.map_err(Error::kernel("cannot post a watchdog"))?;
        let added = undo.add_process(self.process.as_fd());
        added.map_err(Error::untold)?;
        let options = Options {
            unregister: false,
            poison: false,
            everything: true,
        };
        let metrics = Arc::new(Metrics::new());
        Ok(LazyService {
            undo,
            session: Session::begin(self.target, image.clone(), options, metrics)?,
            process: self.process,
            _files: self.files,
        })
    }
}

/// A machine whose memory is being brought in.
struct LazyService {
    /// Who ends it when this is gone.
    undo: UndoList,
    session: Session,
    process: OwnedFd,
    _files: Vec<OwnedFd>,
}

impl LazyService {
    /// Brings everything in; tells whether all is there, or the machine has ended before.
    fn bring_in(&self) -> Result<bool> {
        let (over, is_over) = pipe()?;
        let session = &self.session;
        let stopped = AtomicBool::new(false);
        let (served, fetched) = thread::scope(|scope| {
            let fetched = scope.spawn(|| {
                let fetched = session.fetch(&|| stopped.load(Relaxed));
                // Faults are answered until then.
                drop(is_over);
                fetched
            });
            let served = session.serve(&[self.process.as_fd(), over.as_fd()]);
            stopped.store(true, Relaxed);
            let fetched = fetched.join();
            (
                served,
                fetched.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            )
        });
        match served {
            // It has ended, and whatever failed is due to that.
            Ok(0) | Err(serve::Error::Gone { .. }) => return Ok(false),
            served => served?,
        };
        fetched?;
        session.end()?;
        Ok(true)
    }
}

fn pipe() -> Result<(File, File)> {
    let made = pipe_with(PipeFlags::CLOEXEC).map_err(Error::kernel("cannot make a pipe"))?;
    Ok((made.0.into(), made.1.into()))
}
