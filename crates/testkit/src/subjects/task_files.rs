//! A process, a child of it and their files of each other: pidfds (one of the child's is the very
//! one of the parent), files and directories of /proc read halfway, an epoll that waits for the
//! child's end, a pidfd of somebody who is gone. Argument `lease`: also a file with a lease.
//!
//! `check` answers "right" if all of them lead where they did, `lease` what breaks it, `end` ends
//! the child and answers who heard of it.
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fs::{Mode, OFlags, open, openat};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, pidfd_open, pidfd_send_signal,
    waitid,
};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};
use crate::calls::pidfd_of_nobody;
use crate::wait;

const WATCHED: u64 = 0xfeed_beef;
/// How much of its mappings the parent has read.
const READ_BYTES: usize = 100;
/// `PIDFD_THREAD`.
const OF_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());

/// What the parent has.
struct ParentFiles {
    child: OwnedFd,
    itself: OwnedFd,
    thread: OwnedFd,
    nobody: OwnedFd,
    mappings: File,
    begins: Vec<u8>,
    /// /proc/PID of the child, as a place (`O_PATH`).
    place: OwnedFd,
    ends: OwnedFd,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    // The child has it as well.
    let itself = pidfd_open(getpid(), PidfdFlags::NONBLOCK)?;
    let child = match fork()? {
        Fork::Parent(child) => child,
        Fork::Child => return be_child(),
    };
    let folder = control.folder().to_owned();
    let held = ParentFiles::take(child, itself)?;
    let leased = arguments.first().map(|_| leased(&folder)).transpose()?;
    // The child has its own, too.
    let descriptors = format!("/proc/{child}/fd");
    wait::wait_until("the child's descriptors", wait::SOON, || {
        std::fs::read_dir(&descriptors).is_ok_and(|all| all.count() >= 6)
    });
    control.serve(|question| match question.verb.as_str() {
        "check" => Ok(match held.check() {
            Ok(()) => "right".to_owned(),
            Err(error) => error.to_string(),
        }),
        "lease" if leased.is_some() => breaking(&folder),
        "end" => Ok(held.end()?),
        _ => not_understood(question),
    })
}

/// Holds a pidfd of its parent and its own status, and waits to be killed.
fn be_child() -> Result<(), Failure> {
    let parent = getppid().ok_or("no parent")?;
    let _parent = pidfd_open(parent, PidfdFlags::empty())?;
    let _status = File::open("/proc/self/status")?;
    loop {
        std::thread::park();
    }
}

impl ParentFiles {
    fn take(child: Pid, itself: OwnedFd) -> Result<Self, Failure> {
        let ends = epoll::create(CreateFlags::CLOEXEC)?;
        let of_child = pidfd_open(child, PidfdFlags::empty())?;
        let data = EventData::new_u64(WATCHED);
        epoll::add(&ends, &of_child, data, EventFlags::IN)?;
        let mut mappings = File::open(format!("/proc/{child}/maps"))?;
        let mut begins = vec![0; READ_BYTES];
        mappings.read_exact(&mut begins)?;
        let place = format!("/proc/{child}");
        Ok(Self {
            child: of_child,
            itself,
            thread: pidfd_open(getpid(), OF_THREAD)?,
            nobody: pidfd_of_nobody()?,
            mappings,
            begins,
            place: open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            ends,
        })
    }

    fn check(&self) -> Result<(), Failure> {
        let nothing = |pidfd: &OwnedFd| crate::calls::signal_by(pidfd.as_fd(), 0);
        for pidfd in [&self.child, &self.itself, &self.thread] {
            nothing(pidfd)?;
        }
        let gone = nothing(&self.nobody)
            .err()
            .and_then(|error| error.raw_os_error());
        if gone != Some(Errno::SRCH.raw_os_error()) {
            return Err(format!("nobody: {gone:?}").into());
        }
        let (mut mappings, mut all) = (&self.mappings, Vec::new());
        let at = mappings.stream_position()?;
        mappings.seek(SeekFrom::Start(0))?;
        mappings.read_to_end(&mut all)?;
        mappings.seek(SeekFrom::Start(at))?;
        if at != READ_BYTES as u64 || !all.starts_with(&self.begins) {
            return Err(format!("mappings at {at}").into());
        }
        let comm = openat(&self.place, "comm", OFlags::RDONLY, Mode::empty())?;
        let mut name = String::new();
        File::from(comm).read_to_string(&mut name)?;
        match name.trim_end() {
            "subject" => Ok(()),
            other => Err(format!("the place is of {other:?}").into()),
        }
    }

    fn end(&self) -> Result<String, Failure> {
        pidfd_send_signal(&self.child, Signal::KILL)?;
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 2];
        let count = epoll::wait(&self.ends, &mut events[..], None)?;
        let child = WaitId::PidFd(self.child.as_fd());
        let ended = waitid(child, WaitIdOptions::EXITED)?;
        let signal = ended.and_then(|status| status.terminating_signal());
        let heard = events[..count].iter().map(|event| event.data.u64());
        let heard = heard.collect::<Vec<_>>();
        Ok(format!("{:x?} {signal:?}", heard))
    }
}

/// A file that nobody else shall write without this process hearing of it.
fn leased(folder: &Path) -> Result<File, Failure> {
    std::fs::write(folder.join("leased"), "contents")?;
    let file = File::open(folder.join("leased"))?;
    sys::fcntl::lease(file.as_fd(), false)?;
    Ok(file)
}

/// What becomes of who wants to write to the leased file without waiting.
fn breaking(folder: &Path) -> Result<String, Failure> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    crate::calls::ignore_signal(Signal::IO.as_raw())?;
    let opened = open(folder.join("leased"), flags, Mode::empty());
    Ok(opened.map_or_else(|error| error.to_string(), |_| "nothing".to_owned()))
}
