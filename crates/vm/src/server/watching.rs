//! The watchdog's life: taking monitors on, and what becomes of them when the server is gone.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use guard::{Channel, wait_for_end};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, shutdown};
use rustix::process::{Signal, pidfd_send_signal};
use sys::socket;

use super::keep::{self, Keeping, Place, Successor};
use super::watchdog::{Connected, Message, MessageKind};

/// How long it waits before it looks again for monitors that could not be taken on.
const SHORT_OF: Duration = Duration::from_millis(100);

/// What it begins with.
#[derive(Debug)]
pub(crate) struct Begin {
    /// Where monitors connect.
    pub listener: OwnedFd,
    /// The number of the next session.
    pub next: u64,
    /// Sessions that another server had.
    pub watched: Vec<Watched>,
    /// How sessions are kept when the server is gone, if they are.
    pub keeping: Option<Keeping>,
    /// Who kept the sessions until now, and hears that they are here.
    pub predecessor: Option<OwnedFd>,
}

impl Begin {
    /// All that it holds.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let watched = self.watched.iter().flat_map(Watched::descriptors);
        let rendezvous = self.keeping.iter().map(|keeping| &keeping.rendezvous);
        let others = rendezvous.chain(&self.predecessor).chain([&self.listener]);
        watched.chain(others).map(AsRawFd::as_raw_fd).collect()
    }
}

/// A monitor as the watchdog knows it.
#[derive(Debug)]
pub(crate) struct Watched {
    /// Who it is.
    pub connected: Connected,
    /// Whether something came of it: it may have handed its memory over.
    pub depends: bool,
    /// What it has sent.
    pub held: Vec<OwnedFd>,
    /// What is known of its session, and its userfaultfd, where another server can have them.
    pub state: Option<[OwnedFd; 2]>,
}

impl Watched {
    fn new(connected: Connected) -> Self {
        Self {
            connected,
            depends: false,
            held: Vec::new(),
            state: None,
        }
    }

    fn descriptors(&self) -> impl Iterator<Item = &OwnedFd> {
        let own = [&self.connected.connection, &self.connected.monitor];
        own.into_iter()
            .chain(&self.held)
            .chain(self.state.iter().flatten())
    }
}

/// How it ends.
enum End {
    /// Nobody needs it any more.
    Dismissed,
    /// Monitors that depend on the server are killed.
    Kill,
}

struct Watching {
    /// The server, until that is gone.
    server: Option<Channel>,
    listener: OwnedFd,
    next: u64,
    watched: Vec<Watched>,
    keeping: Option<Keeping>,
    /// Whether monitors are taken on.
    listens: bool,
    /// Whether there was no room for one just now.
    short_of: bool,
    /// Who wants the sessions.
    successor: Option<Successor>,
    /// Until when sessions are kept for somebody.
    until: Option<Instant>,
}

/// The watchdog's life.
pub(super) fn watch(server: Channel, begin: Begin) {
    if let Some(predecessor) = begin.predecessor
        && let Err(error) = keep::say_taken(&predecessor)
    {
        return log::error!("whoever kept the sessions is gone: {error}");
    }
    let _ = server.send(&Message::of(MessageKind::Ready, 0), &[]);
    let _ = rustix::io::ioctl_fionbio(&begin.listener, true);
    let mut watching = Watching {
        server: Some(server),
        listener: begin.listener,
        next: begin.next,
        watched: begin.watched,
        keeping: begin.keeping,
        listens: true,
        short_of: false,
        successor: None,
        until: None,
    };
    match watching.run() {
        End::Dismissed => {}
        End::Kill => watching.end_all(),
    }
}

impl Watching {
    fn run(&mut self) -> End {
        loop {
            let now = Instant::now();
            let is_over = self.until.is_some_and(|until| until <= now);
            let patience = self.successor.as_ref().and_then(|one| one.until);
            if is_over || patience.is_some_and(|until| until <= now) {
                // Somebody may have taken them in the last moment.
                if self.successor.take().is_some_and(Successor::has_taken_all) {
                    return End::Dismissed;
                }
                if is_over {
                    log::error!("nobody came for {} sessions", self.watched.len());
                    return End::Kill;
                }
            }
            let [server, listener, rendezvous, successor] = self.wait();
            self.short_of = false;
            if server && let Some(end) = self.hear() {
                return end;
            }
            if rendezvous && let Some(keeping) = &self.keeping {
                self.successor = keeping.meet(self.listens.then_some(&self.listener));
            }
            if successor && let Some(end) = self.talk() {
                return end;
            }
            // What the server says goes first.
            if listener && !server {
                self.short_of = self.take_on().is_err();
            }
        }
    }

    /// Waits until something is told; by whom.
    fn wait(&self) -> [bool; 4] {
        let listener =
            (self.listens && !self.short_of && self.server.is_some()).then_some(&self.listener);
        let rendezvous = self.keeping.as_ref().map(|keeping| &keeping.rendezvous);
        let rendezvous = rendezvous.filter(|_| self.successor.is_none());
        let successor = self.successor.as_ref().map(|one| one.connection.as_fd());
        let short_of = self.short_of.then(|| Instant::now() + SHORT_OF);
        let patience = self.successor.as_ref().and_then(|one| one.until);
        let until = [short_of, patience, self.until].into_iter().flatten().min();
        let server = self.server.as_ref().map(AsFd::as_fd);
        let (listener, rendezvous) = (listener.map(AsFd::as_fd), rendezvous.map(AsFd::as_fd));
        guard::wait([server, listener, rendezvous, successor], until).unwrap_or([false; 4])
    }

    /// Hears what the server says.
    fn hear(&mut self) -> Option<End> {
        let server = self.server.as_ref()?;
        let Ok(Some((message, rights))) = server.receive::<Message>() else {
            return self.be_alone();
        };
        let number = message.number;
        let mut all = self.watched.iter_mut();
        let one = all.find(|one| one.connected.number == number);
        match (message.kind(), one) {
            (MessageKind::Depends, Some(one)) => {
                one.depends = true;
                one.held.extend(rights);
            }
            (MessageKind::State, Some(one)) => {
                one.depends = true;
                match <[OwnedFd; 2]>::try_from(rights) {
                    Ok(state) => one.state = Some(state),
                    // Without its userfaultfd it would read zeros when the server dies.
                    Err(_) => {
                        log::error!("session {number} cannot be held: its monitor is killed");
                        let _ = pidfd_send_signal(&one.connected.monitor, Signal::KILL);
                    }
                }
            }
            (MessageKind::Forget, _) => self.watched.retain(|one| one.connected.number != number),
            (MessageKind::Drain, _) => {
                let _ = shutdown(&self.listener, Shutdown::Read);
                while let Ok(true) = self.take_on() {}
                let last = Message::of(MessageKind::Last, 0);
                let _ = self.server.as_ref()?.send(&last, &[]);
                self.listens = false;
            }
            (MessageKind::Left, _) => return self.be_alone(),
            (MessageKind::Dismissed, _) => return Some(End::Dismissed),
            _ => {}
        }
        None
    }

    /// The server is gone.
    fn be_alone(&mut self) -> Option<End> {
        let Some(keeping) = &self.keeping else {
            return Some(End::Kill);
        };
        self.server = None;
        self.until = Some(Instant::now() + keeping.patience);
        let count = self.watched.len();
        log::warn!("the server is gone: {count} sessions are kept for another one");
        self.offer();
        None
    }

    /// Hears who wants the sessions.
    fn talk(&mut self) -> Option<End> {
        let successor = self.successor.as_mut()?;
        match successor.hear() {
            keep::Reply::Nothing => {}
            keep::Reply::Take => match &self.server {
                Some(server) => {
                    let _ = server.send(&Message::of(MessageKind::Leave, 0), &[]);
                }
                None => self.offer(),
            },
            keep::Reply::Taken => return Some(End::Dismissed),
            keep::Reply::Gone => self.successor = None,
        }
        None
    }

    /// Gives everything to who wants it, if there is somebody.
    fn offer(&mut self) {
        let Some(keeping) = &self.keeping else {
            return;
        };
        let place = Place {
            next: self.next,
            listens: self.listens,
            sessions: self.watched.len(),
        };
        let offered = match &mut self.successor {
            Some(successor) if successor.wants => {
                successor.offer(&place, [&self.listener, &keeping.rendezvous], &self.watched)
            }
            _ => return,
        };
        if let Err(error) = offered {
            log::warn!("who wants the sessions does not take them: {error}");
            self.successor = None;
        }
    }

    /// Takes a monitor on, where one waits, and tells the server; whether there was one.
    fn take_on(&mut self) -> io::Result<bool> {
        let connected = match accept(&self.listener, self.next) {
            Ok(Some(connected)) => connected,
            Ok(None) => return Ok(true),
            Err(error) => {
                return match Errno::from_io_error(&error) {
                    // The latter of one that nobody can connect to any more.
                    Some(Errno::AGAIN | Errno::INVAL) => Ok(false),
                    _ => Err(error),
                };
            }
        };
        self.next += 1;
        let rights = [connected.connection.as_fd(), connected.monitor.as_fd()];
        if let Some(server) = &self.server {
            // Whether it is gone is seen where it is heard.
            let message = Message::of(MessageKind::Monitor, connected.number);
            let _ = server.send(&message, &rights);
        }
        self.watched.push(Watched::new(connected));
        Ok(true)
    }

    /// Ends all who have sent something, and waits until they are gone.
    fn end_all(self) {
        let (listener, next) = (self.listener, self.next);
        let _ = shutdown(&listener, Shutdown::Read);
        let waiting = (next..).map_while(|number| accept(&listener, number).ok());
        let waiting = waiting.flatten().map(Watched::new).collect::<Vec<_>>();
        let depends = waiting.into_iter().chain(self.watched).filter(|one| {
            // Who sends from here on hears that nobody is there.
            let _ = shutdown(&one.connected.connection, Shutdown::Read);
            one.depends || has_sent(&one.connected.connection)
        });
        let depends = depends.collect::<Vec<_>>();
        for one in &depends {
            let _ = pidfd_send_signal(&one.connected.monitor, Signal::KILL);
        }
        for one in &depends {
            wait_for_end(&one.connected.monitor);
        }
    }
}

/// Takes a connection; none if who made it is gone already.
fn accept(listener: &OwnedFd, number: u64) -> io::Result<Option<Connected>> {
    let connection = socket::accept(listener)?;
    match socket::peer(&connection) {
        Ok(monitor) => Ok(Some(Connected {
            number,
            connection,
            monitor,
        })),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Err(error),
            _ => Ok(None),
        },
    }
}

/// Whether there is something to be read from a connection.
fn has_sent(connection: &OwnedFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let peeked = socket::receive(connection, &mut [0], flags.bits().cast_signed());
    peeked.is_ok_and(|received| received.len > 0 || !received.rights.is_empty())
}
