//! A process that takes monitors on for the server, and ends them, or keeps them for another
//! server, when the server dies: a virtual processor that waits for a page would wait for ever.
//!
//! It has each monitor before the server has, and holds the userfaultfd as long as the server does:
//! pages that are missing when the last one who has it closes it read as zeros.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use guard::{Channel, Helper};

use super::watching::{Begin, Watched, watch};

/// A message between the server and its watchdog.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    /// The session that it is about.
    #[prost(uint64, tag = "2")]
    pub number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum MessageKind {
    Unknown = 0,
    /// Server: the monitor ends with this process; descriptors to hold come along.
    Depends = 1,
    /// Server: the monitor needs nothing any more.
    Forget = 2,
    /// Server: nobody else is to connect.
    Drain = 3,
    /// Server: nothing is to be done.
    Dismissed = 4,
    /// Watchdog: a monitor has connected.
    Monitor = 5,
    /// Watchdog: no more monitors come.
    Last = 6,
    /// Server: the session can go on elsewhere, with the descriptors that come along.
    State = 7,
    /// Server: all sessions are left to another server.
    Left = 8,
    /// Watchdog: another server is there.
    Leave = 9,
    /// Watchdog: it has everything.
    Ready = 10,
}

impl Message {
    /// One about a session.
    pub fn of(kind: MessageKind, number: u64) -> Self {
        Self {
            kind: kind as i32,
            number,
        }
    }
}

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
pub(crate) enum Event {
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
pub(crate) struct Watchdog(Channel);

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
        let helper = Helper::new(c"stillframe-wdog").log(log);
        let helper = helper.keep_numbers(begin.descriptors());
        let mut parts = Some(begin);
        let child = helper.start(|server| {
            if let Some(begin) = parts.take() {
                watch(server, begin);
            }
        })?;
        let watched = parts.map_or_else(Vec::new, |begin| begin.watched);
        let channel = child.into_channel();
        match channel.receive::<Message>()? {
            Some((message, _)) if message.kind() == MessageKind::Ready => {
                Ok((Self(channel), watched))
            }
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// The next monitor; waits for it.
    pub fn next(&self) -> Event {
        while let Ok(Some((message, rights))) = self.0.receive::<Message>() {
            let number = message.number;
            match (message.kind(), <[OwnedFd; 2]>::try_from(rights)) {
                (MessageKind::Monitor, Ok([connection, monitor])) => {
                    return Event::Connected(Connected {
                        number,
                        connection,
                        monitor,
                    });
                }
                (MessageKind::Last, _) => return Event::Last,
                (MessageKind::Leave, _) => return Event::Leave,
                _ => {
                    log::warn!("a monitor is lost: its descriptors cannot be taken");
                    self.forget(number);
                }
            }
        }
        log::error!("the watchdog is gone: no more monitors are taken on");
        Event::Gone
    }

    /// Has a monitor ended if the server dies before it says otherwise, and `held` held until then.
    pub fn depends(&self, number: u64, held: &[OwnedFd]) {
        let rights = held.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        self.tell(MessageKind::Depends, number, &rights);
    }

    /// The same for a session that another server can go on with: what is known of it, and its
    /// userfaultfd.
    pub fn state(&self, number: u64, ledger: BorrowedFd<'_>, uffd: BorrowedFd<'_>) {
        self.tell(MessageKind::State, number, &[ledger, uffd]);
    }

    /// Forgets a monitor, which is gone or needs nothing any more.
    pub fn forget(&self, number: u64) {
        self.tell(MessageKind::Forget, number, &[]);
    }

    /// Has nobody else connect. Who has connected before is told of, and then that it is the last.
    pub fn drain(&self) {
        self.tell(MessageKind::Drain, 0, &[]);
    }

    /// Ends it; the monitors go on.
    pub fn dismiss(&self) {
        self.tell(MessageKind::Dismissed, 0, &[]);
    }

    /// Leaves all sessions to it, for another server: nobody serves them any more.
    pub fn left(&self) {
        self.tell(MessageKind::Left, 0, &[]);
    }

    fn tell(&self, kind: MessageKind, number: u64, rights: &[BorrowedFd<'_>]) {
        if let Err(error) = self.0.send(&Message::of(kind, number), rights) {
            log::warn!("the watchdog is gone: {error}");
        }
    }
}
