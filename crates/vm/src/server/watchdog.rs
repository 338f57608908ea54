//! A process that takes monitors on for the server, and ends them, or keeps them for another
//! server, when the server dies: a virtual processor that waits for a page would wait for ever.
//!
//! It has each monitor before the server has, and holds the userfaultfd as long as the server does:
//! pages that are missing when the last one who has it closes it read as zeros.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::setsid;
use sys::fork::fork_for_numbers;
use sys::socket::{self, Along};

use super::watching::{Begin, Watched, watch};

/// What the watchdog is told, before the number of the session that it is about.
pub(super) const DEPENDS: u64 = 1;
pub(super) const FORGET: u64 = 2;
pub(super) const DRAIN: u64 = 3;
pub(super) const DISMISSED: u64 = 4;
pub(super) const STATE: u64 = 7;
pub(super) const LEFT: u64 = 8;
/// What it tells: a monitor, or that there are no more; that another server is there; that it has
/// everything.
pub(super) const MONITOR: u64 = 5;
pub(super) const LAST: u64 = 6;
pub(super) const LEAVE: u64 = 9;
pub(super) const READY: u64 = 10;

/// A monitor that has connected.
#[derive(Debug)]
pub(crate) struct Connected {
    /// The number of its session.
    pub number: u64,
    /// Where it hands its memory over.
    pub connection: OwnedFd,
    /// Itself.
    pub monitor: OwnedFd,
}

/// What the watchdog tells next.
#[derive(Debug)]
pub(crate) enum Told {
    /// A monitor has connected.
    Connected(Connected),
    /// No more monitors are taken on.
    Last,
    /// Another server is there for the sessions.
    Leave,
    /// Nothing any more: it is gone.
    Gone,
}

/// The child process, from the side of the server.
#[derive(Debug)]
pub(crate) struct Watchdog(OwnedFd);

impl AsFd for Watchdog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Watchdog {
    /// Starts it, from a process that has one thread. It alone takes connections, and logs to the
    /// descriptor `log`. Whoever kept sessions until now does not any more when it is there; gives
    /// those sessions.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2); [`io::ErrorKind::BrokenPipe`] where whoever kept the
    /// sessions is gone.
    pub fn start(begin: Begin, log: Option<RawFd>) -> io::Result<(Self, Vec<Watched>)> {
        let kind = SocketType::SEQPACKET;
        let (theirs, own) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let mut kept = begin.descriptors();
        kept.push(theirs.as_raw_fd());
        kept.extend(log);
        log::logger().flush();
        let mut parts = Some((theirs, begin));
        fork_for_numbers(&kept, || {
            // Nothing that ends the server's group may end this process.
            let _ = setsid();
            if let Some((server, begin)) = parts.take() {
                watch(server, begin);
            }
            log::logger().flush();
        })?;
        let watched = parts.map_or_else(Vec::new, |(_, begin)| begin.watched);
        let mut words = [0; 16];
        let ready = socket::receive(&own, &mut words, 0)?;
        match ready.len == words.len() && parse(words).0 == READY {
            true => Ok((Self(own), watched)),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// The next monitor; waits for it.
    pub fn next(&self) -> Told {
        let mut words = [0; 16];
        loop {
            match socket::receive(&self.0, &mut words, 0) {
                Ok(received) if received.len == words.len() => {
                    let (what, number) = parse(words);
                    let mut rights = received.rights.into_iter();
                    let (connection, monitor) = (rights.next(), rights.next());
                    if let (MONITOR, Some(connection), Some(monitor)) = (what, connection, monitor)
                    {
                        return Told::Connected(Connected {
                            number,
                            connection,
                            monitor,
                        });
                    }
                    match what {
                        LAST => return Told::Last,
                        LEAVE => return Told::Leave,
                        _ => {}
                    }
                    log::warn!("a monitor is lost: its descriptors cannot be taken");
                    self.forget(number);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    log::error!("the watchdog is gone: no more monitors are taken on");
                    return Told::Gone;
                }
            }
        }
    }

    /// Has a monitor ended if the server dies before it says otherwise, and `held` held until then.
    pub fn depends(&self, number: u64, held: &[OwnedFd]) {
        let rights = held.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        self.tell(DEPENDS, number, &rights);
    }

    /// The same for a session that another server can go on with: what is known of it, and its
    /// userfaultfd.
    pub fn state(&self, number: u64, ledger: BorrowedFd<'_>, uffd: BorrowedFd<'_>) {
        self.tell(STATE, number, &[ledger, uffd]);
    }

    /// Forgets a monitor, which is gone or needs nothing any more.
    pub fn forget(&self, number: u64) {
        self.tell(FORGET, number, &[]);
    }

    /// Has nobody else connect. Who has connected before is told of, and then that it is the last.
    pub fn drain(&self) {
        self.tell(DRAIN, 0, &[]);
    }

    /// Ends it; the monitors go on.
    pub fn dismiss(&self) {
        self.tell(DISMISSED, 0, &[]);
    }

    /// Leaves all sessions to it, for another server: nobody serves them any more.
    pub fn left(&self) {
        self.tell(LEFT, 0, &[]);
    }

    fn tell(&self, what: u64, number: u64, rights: &[BorrowedFd<'_>]) {
        if let Err(error) = tell(&self.0, what, number, rights) {
            log::warn!("the watchdog is gone: {error}");
        }
    }
}

pub(super) fn tell(
    to: &OwnedFd,
    what: u64,
    number: u64,
    rights: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let words = [what.to_ne_bytes(), number.to_ne_bytes()].concat();
    let along = Along {
        rights,
        ..Along::default()
    };
    socket::send(to, &words, along, 0).map(drop)
}

pub(super) fn parse(words: [u8; 16]) -> (u64, u64) {
    let [what, number] = [0, 8].map(|at| {
        let word = words[at..at + 8].try_into().expect("8 bytes");
        u64::from_ne_bytes(word)
    });
    (what, number)
}

/// Waits until a process has ended.
pub(crate) fn wait_for_end(process: &OwnedFd) {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    while poll(&mut fds, None).is_err_and(|errno| errno == Errno::INTR) {}
}
