//! A process that takes monitors on for the server, and ends them when the server dies: a virtual
//! processor that waits for a page would wait for ever.
//!
//! It has each monitor before the server has, and holds the userfaultfd as long as the server does:
//! pages that are missing when the last one who has it closes it read as zeros.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType};
use rustix::net::{shutdown, socketpair};
use rustix::process::{Signal, pidfd_send_signal, setsid};
use sys::fork::fork_for;
use sys::socket::{self, Along};

/// What the watchdog is told, before the number of the session that it is about.
const DEPENDS: u64 = 1;
const FORGET: u64 = 2;
const DRAIN: u64 = 3;
const DISMISSED: u64 = 4;
/// What it tells: a monitor, or that there are no more.
const MONITOR: u64 = 5;
const LAST: u64 = 6;

/// How long it waits before it looks again for monitors that could not be taken on.
const SHORT_OF: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

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
    /// Starts it, from a process that has one thread. It alone takes connections of `listener`.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2).
    pub fn start(listener: UnixListener) -> io::Result<Self> {
        let kind = SocketType::SEQPACKET;
        let (theirs, own) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let listener = OwnedFd::from(listener);
        fork_for(&[theirs.as_fd(), listener.as_fd()], || {
            // Nothing that ends the server's group may end this process.
            let _ = setsid();
            watch(&theirs, &listener);
        })?;
        Ok(Self(own))
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
                    if what == LAST {
                        return Told::Last;
                    }
                    log::warn!("a monitor is lost: its descriptors cannot be taken");
                    self.forget(number);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => {
                    log::error!("the watchdog is gone: no more monitors are taken on");
                    return Told::Last;
                }
            }
        }
    }

    /// Has a monitor ended if the server dies before it says otherwise, and `held` held until then.
    pub fn depends(&self, number: u64, held: &[OwnedFd]) {
        let rights = held.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        self.tell(DEPENDS, number, &rights);
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

    fn tell(&self, what: u64, number: u64, rights: &[BorrowedFd<'_>]) {
        if let Err(error) = tell(&self.0, what, number, rights) {
            log::warn!("the watchdog is gone: {error}");
        }
    }
}

fn tell(to: &OwnedFd, what: u64, number: u64, rights: &[BorrowedFd<'_>]) -> io::Result<()> {
    let words = [what.to_ne_bytes(), number.to_ne_bytes()].concat();
    let along = Along {
        rights,
        ..Along::default()
    };
    socket::send(to, &words, along, 0).map(drop)
}

fn parse(words: [u8; 16]) -> (u64, u64) {
    let [what, number] = [0, 8].map(|at| {
        let word = words[at..at + 8].try_into().expect("8 bytes");
        u64::from_ne_bytes(word)
    });
    (what, number)
}

/// A monitor as the watchdog knows it.
struct Watched {
    connected: Connected,
    /// Whether something came of it: it may have handed its memory over.
    depends: bool,
    /// What it has sent.
    held: Vec<OwnedFd>,
}

/// The watchdog's life.
fn watch(server: &OwnedFd, listener: &OwnedFd) {
    let _ = rustix::io::ioctl_fionbio(listener, true);
    let mut watched: Vec<Watched> = Vec::new();
    let (mut next, mut listens, mut short_of) = (1, true, false);
    loop {
        let listened = match listens && !short_of {
            true => PollFlags::IN,
            false => PollFlags::empty(),
        };
        let mut fds = [
            PollFd::new(server, PollFlags::IN),
            PollFd::new(listener, listened),
        ];
        let until = short_of.then_some(&SHORT_OF);
        let told = match poll(&mut fds, until) {
            Ok(_) => !fds[0].revents().is_empty(),
            Err(_) => continue,
        };
        short_of = false;
        if told {
            match hear(server, &mut watched) {
                Heard::Nothing => {}
                Heard::Drain => {
                    let _ = shutdown(listener, Shutdown::Read);
                    while let Ok(true) = take_on(server, listener, &mut next, &mut watched) {}
                    let _ = tell(server, LAST, 0, &[]);
                    listens = false;
                }
                Heard::Dismissed => return,
                Heard::Gone => break,
            }
        } else if listens {
            short_of = take_on(server, listener, &mut next, &mut watched).is_err();
        }
    }
    end_all(listener, next, watched);
}

enum Heard {
    Nothing,
    Drain,
    Dismissed,
    Gone,
}

/// Hears what the server says.
fn hear(server: &OwnedFd, watched: &mut Vec<Watched>) -> Heard {
    let mut words = [0; 16];
    let received = match socket::receive(server, &mut words, 0) {
        Ok(received) if received.len == words.len() => received,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Heard::Nothing,
        _ => return Heard::Gone,
    };
    let (what, number) = parse(words);
    match what {
        DEPENDS => {
            let one = watched
                .iter_mut()
                .find(|one| one.connected.number == number);
            if let Some(one) = one {
                one.depends = true;
                one.held.extend(received.rights);
            }
        }
        FORGET => watched.retain(|one| one.connected.number != number),
        DRAIN => return Heard::Drain,
        DISMISSED => return Heard::Dismissed,
        _ => {}
    }
    Heard::Nothing
}

/// Takes a monitor on, where one waits, and tells the server; whether there was one.
fn take_on(
    server: &OwnedFd,
    listener: &OwnedFd,
    next: &mut u64,
    watched: &mut Vec<Watched>,
) -> io::Result<bool> {
    let connected = match accept(listener, *next) {
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
    *next += 1;
    let rights = [connected.connection.as_fd(), connected.monitor.as_fd()];
    // Whether the server is gone is seen where it is heard.
    let _ = tell(server, MONITOR, connected.number, &rights);
    watched.push(Watched {
        connected,
        depends: false,
        held: Vec::new(),
    });
    Ok(true)
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

/// Ends all who have sent something, and waits until they are gone.
fn end_all(listener: &OwnedFd, next: u64, watched: Vec<Watched>) {
    let _ = shutdown(listener, Shutdown::Read);
    let waiting = (next..).map_while(|number| accept(listener, number).ok());
    let waiting = waiting.flatten().map(|connected| Watched {
        connected,
        depends: false,
        held: Vec::new(),
    });
    let all = waiting.collect::<Vec<_>>().into_iter().chain(watched);
    let depends = all.filter(|one| {
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

/// Waits until a process has ended.
pub(crate) fn wait_for_end(process: &OwnedFd) {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    while poll(&mut fds, None).is_err_and(|errno| errno == Errno::INTR) {}
}

/// Whether there is something to be read from a connection.
fn has_sent(connection: &OwnedFd) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let peeked = socket::receive(connection, &mut [0], flags.bits().cast_signed());
    peeked.is_ok_and(|received| received.len > 0 || !received.rights.is_empty())
}
