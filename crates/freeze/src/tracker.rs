//! The tracker: a process that keeps the userfaultfds of a tree between the rounds of a pre-dump.
//!
//! The kernel remembers which pages were written only as long as somebody holds the userfaultfd.
//! So the first round leaves a process behind, [`server`], one for the root of each tree. The next
//! round finds it by a unix socket in a folder where nobody but its user can make names
//! ([`runtime`]); its name is made of the root's pid and start time, and both sides look at who the
//! other is. It goes when the root has ended, when nobody came for a time, or when it is told to;
//! and whatever it held goes with it, which ends the tracking.
//!
//! A round has the kernel forget which pages were written, and stores those. If it fails in
//! between, writes are lost. So the tracker is told before ([`Client::begin`]) and after
//! ([`Client::end`]), with the image that has them now; only a layer over that very image may
//! inherit pages.

mod server;
mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use guard::{Channel, Helper, PATIENCE};
use image::ImageId;
use rustix::fs::{Mode, OFlags};
use rustix::net::{SocketType, listen};
use sys::listener::{Failure, listen_at};
use sys::uffd::Uffd;

use self::wire::{Message, MessageKind};
use crate::{Error, Result, runtime, start_ticks};

/// How long writes are tracked after a round when nobody comes for the next one and nobody says
/// otherwise.
pub const DEFAULT_TRACK_TIME: Duration = Duration::from_secs(3600);

/// A task whose memory is tracked, as a round knows it.
#[derive(Debug)]
pub struct TrackedTask {
    /// Its pid.
    pub pid: i32,
    /// When it was started.
    pub start_ticks: u64,
    /// By what its memory is tracked.
    pub by: Means,
}

impl TrackedTask {
    /// Task `pid`, whose memory is registered with `uffd`.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub fn new(pid: i32, uffd: Uffd) -> Result<Self> {
        Ok(Self {
            pid,
            start_ticks: start_ticks(pid).ok_or(Error::Gone { pid })?,
            by: Means::Protection(uffd),
        })
    }
}

/// By what a task's memory is tracked, with a descriptor of it.
#[derive(Debug)]
pub enum Means {
    /// The userfaultfd with which its memory is registered.
    Protection(Uffd),
    /// Soft-dirty bits, which only one tracker may clear; the claim to them.
    Bits(OwnedFd),
}

impl Means {
    /// The userfaultfd, if it is one.
    pub fn uffd(&self) -> Option<&Uffd> {
        match self {
            Self::Protection(uffd) => Some(uffd),
            Self::Bits(_) => None,
        }
    }
}

impl AsFd for Means {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Protection(uffd) => uffd.as_fd(),
            Self::Bits(claim) => claim.as_fd(),
        }
    }
}

/// A conversation with the tracker of a tree.
#[derive(Debug)]
pub struct Client {
    channel: Channel,
    root: i32,
    /// What the tracker held when the conversation began.
    pub tasks: Vec<TrackedTask>,
    /// The image up to which writes are known.
    pub image: Option<ImageId>,
}

impl Client {
    /// Talks to the tracker of the tree under `root`; none where there is none.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Kernel`] where it belongs to somebody else or does not answer.
    pub fn find(root: i32) -> Result<Option<Self>> {
        let failed = |doing: &str| {
            let doing = format!("cannot {doing} the tracker of pid {root}");
            move |error: io::Error| Error::kernel(doing, error)
        };
        let path = runtime::folder()
            .map_err(failed("look for"))?
            .join(name(root)?);
        let channel = Channel::connect(&path).map_err(|error| {
            let is_other = error.raw_os_error().is_none();
            failed(if is_other { "use" } else { "reach" })(error)
        })?;
        let Some(channel) = channel else {
            return Ok(None);
        };
        let talk = || -> io::Result<_> {
            channel.set_patience(PATIENCE)?;
            let first = channel.receive::<Message>()?;
            let first = first.ok_or(io::ErrorKind::UnexpectedEof)?;
            let image = first.0.image.clone();
            Ok((image, wire::receive_tasks(&channel, first)?))
        };
        let (image, tasks) = match talk() {
            Ok(state) => state,
            // It was about to go.
            Err(error) if is_hung_up(&error) => return Ok(None),
            Err(error) => return Err(failed("hear from")(error)),
        };
        let tasks = tasks.into_iter().map(|(task, fd)| TrackedTask {
            pid: task.pid,
            start_ticks: task.start_ticks,
            by: if task.by_bits {
                Means::Bits(fd)
            } else {
                Means::Protection(fd.into())
            },
        });
        Ok(Some(Self {
            channel,
            root,
            tasks: tasks.collect(),
            image: image.try_into().ok().map(ImageId),
        }))
    }

    /// Its pid.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn pid(&self) -> Result<i32> {
        let peer = self.channel.peer().map_err(|error| self.gone(error))?;
        Ok(peer.pid.as_raw_nonzero().get())
    }

    /// Talks to the tracker of the tree under `root`, which is left behind where there is none.
    ///
    /// # Errors
    /// As [`Self::find`]; [`Error::Kernel`] where no process can be made.
    pub fn find_or_start(root: i32) -> Result<Self> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            if let Some(client) = Self::find(root)? {
                return Ok(client);
            }
            match start(root) {
                // Another one was faster, or the old one is not quite gone.
                Err(Error::Kernel { source, .. })
                    if source.kind() == io::ErrorKind::AddrInUse && begun.elapsed() < PATIENCE => {}
                other => other?,
            }
            if begun.elapsed() > PATIENCE {
                let ended = io::Error::other("it ended at once");
                let doing = format!("cannot use the tracker of pid {root}");
                return Err(Error::kernel(doing, ended));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PATIENCE / 10);
        }
    }

    /// Gives the tracker the tasks that it is to hold from now on.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn hold(&self, tasks: &[TrackedTask]) -> Result<()> {
        let tasks = tasks.iter().map(|task| {
            let tracked = wire::Tracked {
                pid: task.pid,
                start_ticks: task.start_ticks,
                by_bits: matches!(task.by, Means::Bits(_)),
            };
            (tracked, task.by.as_fd())
        });
        let message = Message::of(MessageKind::Tasks);
        let sent = wire::send_tasks(&self.channel, message, &tasks.collect::<Vec<_>>());
        sent.map_err(|error| self.gone(error))
    }

    /// Says that writes are about to be forgotten by the kernel: until [`Self::end`] is said, no
    /// image has them all.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn begin(&self) -> Result<()> {
        self.send(&Message::of(MessageKind::Begin))
    }

    /// Says that everything written before is in `image` or one of its parents, and how long to
    /// wait for the next round.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn end(&self, image: ImageId, idle: Duration) -> Result<()> {
        self.send(&Message {
            image: image.0.to_vec(),
            idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
            ..Message::of(MessageKind::End)
        })
    }

    /// Ends the tracker, and with it the tracking.
    pub fn quit(self) {
        if let Err(error) = self.send(&Message::of(MessageKind::Quit)) {
            log::debug!("{error}");
        }
    }

    fn send(&self, message: &Message) -> Result<()> {
        let sent = self.channel.send(message, &[]);
        sent.map_err(|error| self.gone(error))
    }

    fn gone(&self, error: io::Error) -> Error {
        Error::kernel(format!("the tracker of pid {} is gone", self.root), error)
    }
}

fn is_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// Claims the soft-dirty bits of a task, for as long as somebody keeps what is returned; none where
/// another tracker has claimed them.
///
/// # Errors
/// [`Error::Kernel`].
pub fn claim_bits(pid: i32, start_ticks: u64) -> Result<Option<OwnedFd>> {
    let failed = |error: io::Error| {
        let doing = format!("cannot claim the soft-dirty bits of pid {pid}");
        Error::kernel(doing, error)
    };
    let path = runtime::folder().map_err(failed)?;
    let path = path.join(format!("bits-{}", space()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let claim = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
    let claim = claim.map_err(|errno| failed(errno.into()))?;
    let claimed = sys::fcntl::claim(claim.as_fd(), place_of(pid, start_ticks));
    Ok(claimed.map_err(failed)?.then_some(claim))
}

/// Which byte of the file of claims stands for a task.
fn place_of(pid: i32, start_ticks: u64) -> u64 {
    const TICKS_BITS: u32 = 40;
    u64::from(pid.cast_unsigned()) << TICKS_BITS | start_ticks & ((1 << TICKS_BITS) - 1)
}

/// Leaves a tracker behind for the tree under `root`.
fn start(root: i32) -> Result<()> {
    let started = |error: io::Error| {
        let doing = format!("cannot start a tracker for pid {root}");
        Error::kernel(doing, error)
    };
    let folder = runtime::folder().map_err(started)?;
    let path = folder.join(name(root)?);
    let tracked = wire::Tracked {
        pid: root,
        start_ticks: start_ticks(root).ok_or(Error::Gone { pid: root })?,
        by_bits: false,
    };
    // Two that find the name of one that has ended would replace each other's.
    let locked = runtime::lock(&folder).map_err(started)?;
    let listener = listen_at(&path, SocketType::SEQPACKET, 16);
    let listener = listener.map_err(|failure| match failure {
        Failure::Taken => started(io::ErrorKind::AddrInUse.into()),
        Failure::Call(doing, errno) => {
            log::debug!("cannot {doing} {}", path.display());
            started(errno.into())
        }
    })?;
    drop(locked);
    let serve = || {
        // Clients see whom they talk to by who has listened last.
        let _ = listen(&listener, 16);
        server::serve(&listener, tracked);
        // While it still listens, nobody takes the name.
        let locked = runtime::lock(&folder);
        let _ = std::fs::remove_file(&path);
        drop(locked);
    };
    let helper = Helper::new(c"stillframe-trk").keep([listener.as_fd()]);
    helper.leave_alone(serve).map_err(started)
}

/// The name of the tracker's socket. Pids are told apart by their namespace, as others may have the
/// same folder.
fn name(root: i32) -> Result<String> {
    let ticks = start_ticks(root).ok_or(Error::Gone { pid: root })?;
    Ok(format!("tracker-{}-{root}-{ticks}", space()))
}

/// The namespace of this process's pids.
fn space() -> u64 {
    sys::procfs::stat("self/ns/pid").map_or(0, |stat| stat.st_ino)
}

#[cfg(test)]
mod tests {
    use testkit::program::Program;
    use testkit::wait;

    use super::*;

    fn uffd() -> Uffd {
        // Any descriptor can be held.
        let fd = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, 0.into());
        fd.expect("/dev/null").into()
    }

    fn task(pid: i32) -> TrackedTask {
        TrackedTask {
            pid,
            start_ticks: 1,
            by: Means::Protection(uffd()),
        }
    }

    #[track_caller]
    fn wait_gone(root: i32) {
        wait::wait_for("the tracker's end", wait::SOON, || {
            matches!(Client::find(root), Ok(None) | Err(Error::Gone { .. })).then_some(())
        });
    }

    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn what_is_held_is_given_to_the_next() {
        let program = Program::new("sleep").arg("1000").spawn();
        let root = program.pid().cast_signed();
        assert!(Client::find(root).expect("a look").is_none());
        let client = Client::find_or_start(root).expect("a tracker");
        assert!(client.tasks.is_empty() && client.image.is_none());
        client.hold(&[task(5), task(6)]).expect("held");
        client.begin().expect("told");
        client.end(ImageId([7; 16]), LONG).expect("told");
        drop(client);
        for _ in 0..2 {
            let client = Client::find_or_start(root).expect("the same");
            let pids = client.tasks.iter().map(|task| task.pid);
            assert!(pids.eq([5, 6]));
            let tracker = client.pid().expect("a pid");
            let name = std::fs::read_to_string(format!("/proc/{tracker}/comm"));
            assert_eq!(name.expect("it lives"), "stillframe-trk\n");
            assert_eq!(client.image, Some(ImageId([7; 16])));
        }
        let client = Client::find_or_start(root).expect("the same");
        client.hold(&[task(6)]).expect("held");
        client.begin().expect("told");
        // A round that fails.
        drop(client);
        let client = Client::find(root).expect("a look").expect("the same");
        assert_eq!((client.tasks.len(), client.image), (1, None));
        client.quit();
        wait_gone(root);
    }

    #[test]
    fn bits_are_claimed_once() {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let claim = claim_bits(pid, u64::MAX).expect("a claim");
        assert!(claim.is_some());
        assert!(claim_bits(pid, u64::MAX).expect("a look").is_none());
        drop(claim);
        // What other tests start at this moment has it for a moment as well.
        wait::wait_until("the claim to be given up", wait::SOON, || {
            claim_bits(pid, u64::MAX).expect("a claim").is_some()
        });
    }

    #[test]
    fn it_goes_when_the_root_ends() {
        let program = Program::new("sleep").arg("1000").spawn();
        let root = program.pid().cast_signed();
        let client = Client::find_or_start(root).expect("a tracker");
        client.end(ImageId([7; 16]), LONG).expect("told");
        // Also while it talks to somebody.
        program.kill();
        let hung_up = client.channel.receive::<Message>();
        assert!(hung_up.is_err() || hung_up.is_ok_and(|message| message.is_none()));
        wait_gone(root);
    }

    #[test]
    fn it_goes_when_nobody_comes() {
        let program = Program::new("sleep").arg("1000").spawn();
        let root = program.pid().cast_signed();
        let client = Client::find_or_start(root).expect("a tracker");
        client.end(ImageId([7; 16]), Duration::ZERO).expect("told");
        drop(client);
        wait_gone(root);
    }

    #[test]
    fn a_client_that_talks_nonsense_is_hung_up_on() {
        let program = Program::new("sleep").arg("1000").spawn();
        let root = program.pid().cast_signed();
        let client = Client::find_or_start(root).expect("a tracker");
        client.end(ImageId([7; 16]), LONG).expect("told");
        let along = sys::socket::Along::default();
        sys::socket::send(&client.channel, b"\xff\xff\xff", along, 0).expect("sent");
        assert!(
            client
                .channel
                .receive::<Message>()
                .expect("an end")
                .is_none()
        );
        let next = Client::find(root).expect("a look").expect("it stays");
        assert_eq!(next.image, Some(ImageId([7; 16])));
        next.quit();
        wait_gone(root);
    }
}
