//! How sessions come from one server to the next: the watchdog keeps them, and listens at a socket
//! of its own, beside that of monitors, where whoever wants them connects.
//!
//! Both sides send messages of JSON over a `SOCK_SEQPACKET` connection, with descriptors as
//! `SCM_RIGHTS`. The watchdog says what it has ([`Greeting`]); who can use that asks for it; when
//! the server is gone, it gets all of it ([`Place`], then a [`Handover`] each) and has a watchdog
//! of its own say that it is there. From that message on the other one is responsible for the
//! sessions, and until then this one is: who fails before has changed nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guard::Channel;
use image::ImageId;
use rustix::fs::{fstat, lstat};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, Shutdown, SocketType, shutdown};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serve::Ledger;
use sys::listener;
use sys::socket::{self, Along};

use super::watchdog::Connected;
use super::watching::Watched;
use crate::{Error, Result};

/// What the messages mean. Others are not understood.
const VERSION: u64 = 1;
/// The longest message, in bytes.
const MESSAGE_MAX: usize = 1 << 12;
/// Descriptors that a monitor has sent and of which nothing is known: more are not passed on.
const HELD_MAX: usize = 8;
/// How long who has connected may say nothing.
const PATIENCE: Duration = Duration::from_secs(30);

/// How sessions are kept.
#[derive(Debug)]
pub(crate) struct Keeping {
    /// Where who wants them connects.
    pub rendezvous: OwnedFd,
    /// How long they are kept when the server is gone.
    pub patience: Duration,
    /// Of which image they are.
    pub image: ImageId,
}

/// What the watchdog says first.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    /// What the messages are.
    version: u64,
    /// What is known of sessions.
    ledger: u64,
    /// The image's id.
    image: String,
    /// The device and the inode of the socket where monitors connect, if they can.
    socket: Option<[u64; 2]>,
}

/// What who wants the sessions says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Request {
    /// It can use them.
    Take,
    /// It has them.
    Taken,
}

/// Where monitors connect, and who wants sessions: two descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Place {
    /// The number of the next session.
    pub next: u64,
    /// Whether monitors can connect.
    pub listens: bool,
    /// How many sessions there are.
    pub sessions: usize,
}

/// A session: its connection, its monitor, its state where there is one, and what else was sent.
#[derive(Debug, Serialize, Deserialize)]
struct Handover {
    number: u64,
    depends: bool,
    state: bool,
}

impl Keeping {
    /// Takes who has connected; none where it is gone already. Monitors connect at `listener`, if
    /// they can.
    pub fn meet(&self, listener: Option<&OwnedFd>) -> Option<Successor> {
        let connection = OwnedFd::from(Channel::accept(&self.rendezvous).ok()?);
        let greeting = Greeting {
            version: VERSION,
            ledger: Ledger::VERSION,
            image: self.image.to_string(),
            socket: listener.and_then(bound_to),
        };
        // Who does not read must not keep this process.
        set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE)).ok()?;
        say(&connection, &greeting, &[]).ok()?;
        Some(Successor {
            connection,
            wants: false,
            offered: false,
            until: Some(Instant::now() + PATIENCE),
        })
    }
}

/// Who wants the sessions, from the side of the watchdog.
#[derive(Debug)]
pub(super) struct Successor {
    /// Where it is heard.
    pub connection: OwnedFd,
    /// Whether it can use them.
    pub wants: bool,
    offered: bool,
    /// Until when it may say nothing.
    pub until: Option<Instant>,
}

/// What it says.
#[derive(Debug)]
pub(super) enum Reply {
    /// Nothing.
    Nothing,
    /// It can use them.
    Take,
    /// It has them.
    Taken,
    /// It is gone.
    Gone,
}

impl Successor {
    /// Hears what it says.
    pub fn hear(&mut self) -> Reply {
        match hear::<Request>(&self.connection, RecvFlags::DONTWAIT) {
            Ok((Request::Take, _)) if !self.wants => {
                self.wants = true;
                // It waits for the server as long as that needs.
                self.until = None;
                Reply::Take
            }
            Ok((Request::Taken, _)) if self.offered => Reply::Taken,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Reply::Nothing,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Reply::Nothing,
            _ => Reply::Gone,
        }
    }

    /// Offers everything.
    pub fn offer(
        &mut self,
        place: &Place,
        listeners: [&OwnedFd; 2],
        watched: &[Watched],
    ) -> io::Result<()> {
        say(&self.connection, place, &listeners)?;
        for one in watched {
            let Connected {
                number,
                connection,
                monitor,
            } = &one.connected;
            let handover = Handover {
                number: *number,
                depends: one.depends,
                state: one.state.is_some(),
            };
            let state = one.state.iter().flatten();
            let held = one.held.iter().take(HELD_MAX);
            let rights = [connection, monitor].into_iter().chain(state).chain(held);
            say(&self.connection, &handover, &rights.collect::<Vec<_>>())?;
        }
        self.offered = true;
        self.until = Some(Instant::now() + PATIENCE);
        Ok(())
    }

    /// Lets nothing more be said, and tells whether it has said that it has everything.
    pub fn has_taken_all(mut self) -> bool {
        let _ = shutdown(&self.connection, Shutdown::Both);
        loop {
            match self.hear() {
                Reply::Taken => return true,
                Reply::Take => {}
                Reply::Nothing | Reply::Gone => return false,
            }
        }
    }
}

/// Says that everything is here.
///
/// # Errors
/// Whoever kept it does not wait any more.
pub(super) fn say_taken(predecessor: &OwnedFd) -> io::Result<()> {
    say(predecessor, &Request::Taken, &[])
}

/// What another server has left.
#[derive(Debug)]
pub(crate) struct Left {
    /// Who keeps it until it is told otherwise.
    pub predecessor: OwnedFd,
    /// Where monitors connect, if they still can.
    pub listener: Option<OwnedFd>,
    /// Where who wants sessions connects.
    pub rendezvous: OwnedFd,
    /// The number of the next session.
    pub next: u64,
    /// The sessions.
    pub watched: Vec<Watched>,
}

/// Where the sessions of the server that listens at `socket` are kept: beside it, with `.keep`
/// behind its name.
pub(crate) fn rendezvous_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".keep");
    name.into()
}

/// Asks at `path` for sessions over `image` of a server that listens at `socket`, and waits until
/// that has left them.
///
/// # Errors
/// [`Error::Unfit`] where nobody keeps sessions there, or others than can be used; those of the
/// connection. The sessions stay where they are.
pub(crate) fn take(path: &Path, image: ImageId, socket: &Path) -> Result<Left> {
    let failed = |source: io::Error| Error::File {
        action: "take sessions over at",
        path: path.to_owned(),
        source,
    };
    let predecessor = meet(path)?;
    let (greeting, _) = hear::<Greeting>(&predecessor, RecvFlags::empty()).map_err(failed)?;
    fits(&greeting, image).map_err(Error::Unfit)?;
    if greeting.socket.is_some() && greeting.socket != inode_of(socket) {
        let socket = socket.display();
        return Err(Error::Unfit(format!(
            "the sessions are of a server that listens elsewhere than at {socket}"
        )));
    }
    say(&predecessor, &Request::Take, &[]).map_err(failed)?;
    let (place, rights) = hear::<Place>(&predecessor, RecvFlags::empty()).map_err(failed)?;
    let [listener, rendezvous] = <[OwnedFd; 2]>::try_from(rights).map_err(|_| failed(lost()))?;
    let watched = (0..place.sessions).map(|_| hear_session(&predecessor));
    let watched = watched.collect::<io::Result<Vec<_>>>().map_err(failed)?;
    Ok(Left {
        predecessor,
        listener: place.listens.then_some(listener),
        rendezvous,
        next: place.next,
        watched,
    })
}

fn meet(path: &Path) -> Result<OwnedFd> {
    let nobody = |why: String| {
        let path = path.display();
        Error::Unfit(format!("nobody keeps sessions at {path}{why}"))
    };
    match Channel::connect(path) {
        Ok(Some(channel)) => Ok(channel.into()),
        Ok(None) => Err(nobody(String::new())),
        Err(error) => Err(nobody(format!(": {error}"))),
    }
}

/// Whether sessions can be used here.
fn fits(greeting: &Greeting, image: ImageId) -> std::result::Result<(), String> {
    let versions = [
        ("kept", greeting.version, VERSION),
        ("described", greeting.ledger, Ledger::VERSION),
    ];
    for (how, theirs, own) in versions {
        if theirs != own {
            return Err(format!(
                "the sessions are {how} as version {theirs} has it, and this program knows {own}"
            ));
        }
    }
    match greeting.image == image.to_string() {
        true => Ok(()),
        false => Err(format!(
            "the sessions are over image {}, and this is {image}",
            greeting.image
        )),
    }
}

fn hear_session(from: &OwnedFd) -> io::Result<Watched> {
    let (handover, rights) = hear::<Handover>(from, RecvFlags::empty())?;
    let mut rights = rights.into_iter();
    let mut next = || rights.next().ok_or_else(lost);
    Ok(Watched {
        connected: Connected {
            number: handover.number,
            connection: next()?,
            monitor: next()?,
        },
        depends: handover.depends,
        state: match handover.state {
            true => Some([next()?, next()?]),
            false => None,
        },
        held: rights.collect(),
    })
}

/// Whether what listens was bound to the socket that is at `path` now.
pub(crate) fn is_at(listener: &OwnedFd, path: &Path) -> bool {
    let bound = bound_to(listener);
    bound.is_some() && bound == inode_of(path)
}

/// The device and the inode of the socket that something is bound to.
fn bound_to(listener: &OwnedFd) -> Option<[u64; 2]> {
    let stat = fstat(socket::unix_file(listener).ok()?).ok()?;
    Some([stat.st_dev, stat.st_ino])
}

fn inode_of(path: &Path) -> Option<[u64; 2]> {
    let stat = lstat(path).ok()?;
    Some([stat.st_dev, stat.st_ino])
}

/// Listens at `path` for who wants sessions.
///
/// # Errors
/// [`Error::Unfit`] where somebody else does; [`Error::File`].
pub(crate) fn listen(path: &Path) -> Result<OwnedFd> {
    listener::listen_at(path, SocketType::SEQPACKET, 8).map_err(|failure| match failure {
        listener::Failure::Taken => {
            Error::Unfit(format!("sessions are kept at {}", path.display()))
        }
        listener::Failure::Call(doing, errno) => {
            Error::file::<io::Error>(doing, path)(errno.into())
        }
    })
}

fn lost() -> io::Error {
    io::Error::other("its descriptors cannot be taken")
}

fn say(to: &OwnedFd, what: &impl Serialize, rights: &[&OwnedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(what)?;
    let rights = rights.iter().map(AsFd::as_fd).collect::<Vec<_>>();
    let along = Along {
        rights: &rights,
        ..Along::default()
    };
    socket::send(to, &bytes, along, 0).map(drop)
}

fn hear<T: DeserializeOwned>(from: &OwnedFd, flags: RecvFlags) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_MAX];
    let received = loop {
        match socket::receive(from, &mut bytes, flags.bits().cast_signed()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if received.len == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let what = serde_json::from_slice(&bytes[..received.len])?;
    Ok((what, received.rights))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let (ours, theirs) = Channel::pair().expect("a pair");
        (ours.into(), theirs.into())
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null")
            .expect("it is there")
            .into()
    }

    fn successor(connection: OwnedFd) -> Successor {
        Successor {
            connection,
            wants: true,
            offered: true,
            until: None,
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let image = ImageId([7; 16]);
        let greeting = |version, ledger, image: ImageId| Greeting {
            version,
            ledger,
            image: image.to_string(),
            socket: None,
        };
        let own = Ledger::VERSION;
        fits(&greeting(VERSION, own, image), image).expect("its own");
        for (greeting, what) in [
            (
                greeting(9, own, image),
                "kept as version 9 has it, and this program knows 1",
            ),
            (greeting(VERSION, 9, image), "described as version 9"),
            (greeting(VERSION, own, ImageId([8; 16])), "over image 0808"),
        ] {
            let error = fits(&greeting, image).expect_err("refused");
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn sessions_come_as_they_are() {
        let (ours, theirs) = pair();
        let watched =
            [(true, true), (true, false), (false, false)].map(|(depends, state)| Watched {
                connected: Connected {
                    number: 5,
                    connection: file(),
                    monitor: file(),
                },
                depends,
                held: (0..20).map(|_| file()).collect(),
                state: state.then(|| [file(), file()]),
            });
        let place = Place {
            next: 9,
            listens: true,
            sessions: watched.len(),
        };
        let listeners = [&file(), &file()];
        let offered = successor(ours).offer(&place, listeners, &watched);
        offered.expect("there is room");
        let (place, rights) = hear::<Place>(&theirs, RecvFlags::empty()).expect("a place");
        assert_eq!((place.next, place.sessions, rights.len()), (9, 3, 2));
        for one in &watched {
            let came = hear_session(&theirs).expect("a session");
            assert_eq!(came.connected.number, 5);
            assert_eq!(came.depends, one.depends);
            assert_eq!(came.state.is_some(), one.state.is_some());
            assert_eq!(came.held.len(), HELD_MAX);
        }
    }

    #[test]
    fn who_said_in_time_that_it_has_everything_has_it() {
        for (said, taken) in [(true, true), (false, false)] {
            let (ours, theirs) = pair();
            if said {
                say_taken(&theirs).expect("it is heard");
            }
            assert_eq!(successor(ours).has_taken_all(), taken);
            say_taken(&theirs).expect_err("nobody hears it any more");
        }
    }
}
