//! Connections that wait to be accepted, or that are still being made: they cannot be saved, but a
//! server that runs accepts them soon. So a tree is looked at early, before the dump has done
//! anything that it could not do again.

use std::collections::HashMap;

use super::newcomers::Newcomers;
use crate::fd::socket::inet_diag::{self, Listener, Request};
use crate::fd::table::Row;
use crate::{Allow, Error, Result};

/// What allows a dump all the same.
const OPTION: &str = "--skip-in-flight";

/// Who has been told so often, over three seconds, that it may have a connection, and has not
/// answered, is not there.
const TOLD_ENOUGH: u8 = 2;

/// The sockets of a tree, by inode number.
type Sockets<'a> = HashMap<u64, (i32, &'a Row)>;

/// Keeps new connections from the tree's listeners, where `newcomers` are to be held, and looks
/// whether one waits to be accepted. `rows` are the descriptors of its tasks.
///
/// # Errors
/// [`Error::Passing`].
pub fn check<'a>(
    rows: impl Iterator<Item = (i32, &'a Row)>,
    allow: &Allow,
    newcomers: &mut Newcomers,
) -> Result<()> {
    if allow.skip_in_flight && !newcomers.are_held() {
        return Ok(());
    }
    let sockets = rows.filter(|(_, row)| row.link.starts_with(b"socket:["));
    let sockets = sockets.map(|(pid, row)| (row.stat.st_ino, (pid, row)));
    let sockets = sockets.collect::<Sockets<'_>>();
    if sockets.is_empty() {
        return Ok(());
    }
    let (listeners, requests) = look(&sockets, newcomers);
    if allow.skip_in_flight {
        return Ok(());
    }
    if let Some(busy) = listeners.iter().find(|listener| listener.waiting > 0) {
        return Err(early(
            &sockets,
            busy,
            ("a connection waits to be accepted", true),
        ));
    }
    let is_asked = |listener: &&Listener| {
        let mut all = requests.iter();
        all.any(|request| request.told_again < TOLD_ENOUGH && request.is_to(listener))
    };
    let why = "a connection to it is being made, which would wait to be accepted";
    match listeners.iter().find(is_asked) {
        Some(asked) => Err(early(&sockets, asked, (why, false))),
        None => Ok(()),
    }
}

/// The tree's listeners; also the connections that are being made to any of this host, where new
/// ones are held back before this look.
fn look(sockets: &Sockets<'_>, newcomers: &mut Newcomers) -> (Vec<Listener>, Vec<Request>) {
    let of_tree = |all: Vec<Listener>| {
        let is_its = |one: &Listener| sockets.contains_key(&u64::from(one.inode));
        all.into_iter().filter(is_its).collect::<Vec<_>>()
    };
    let all = match newcomers.is_holding() {
        true => inet_diag::listeners_and_requests(),
        false => inet_diag::listeners().map(|all| (all, Vec::new())),
    };
    let (listeners, requests) = all.unwrap_or_else(|error| {
        // Each listener is asked later.
        log::debug!("sock_diag does not tell who listens: {error}");
        Default::default()
    });
    let listeners = of_tree(listeners);
    if !newcomers.are_held() || newcomers.are_held_from(&listeners) {
        return (listeners, requests);
    }
    newcomers.hold(&listeners);
    match inet_diag::listeners_and_requests() {
        Ok((now, requests)) => (of_tree(now), requests),
        Err(_) => (listeners, requests),
    }
}

/// The error that says what keeps a listener's queue from being empty, before memory is looked at,
/// and whether the tree can do something about it.
fn early(sockets: &Sockets<'_>, listener: &Listener, (what, by_tree): (&str, bool)) -> Error {
    let (pid, row) = sockets[&u64::from(listener.inode)];
    let link = String::from_utf8_lossy(&row.link);
    Error::Passing {
        pid,
        what: format!("fd {} ({link}): {what}", row.fd),
        allow: Some(OPTION),
        early: true,
        by_tree,
    }
}

/// The error that says that a connection waits at `place`, which was seen late.
#[must_use]
pub fn passing(pid: i32, place: &str) -> Error {
    Error::Passing {
        pid,
        what: format!("{place}: a connection waits to be accepted"),
        allow: Some(OPTION),
        early: false,
        by_tree: true,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use testkit::wait::{SOON, wait_until};

    use super::*;
    use crate::fd::table;

    const TCP_DEFER_ACCEPT: i32 = 9;

    /// What keeps a dump waiting, and whether only the tree can do something about it.
    fn passing(checked: Result<()>) -> Option<(String, bool)> {
        match checked {
            Ok(()) => None,
            Err(Error::Passing { what, by_tree, .. }) => Some((what, by_tree)),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn clients_in_the_middle_of_their_handshake_are_waited_for() {
        testkit::needs_root!();
        sys::isolated::run(|| {
            for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
                let listener = TcpListener::bind(at).unwrap();
                // The kernel ends the handshake when the client sends something.
                sys::socket::set_number(&listener, 6, TCP_DEFER_ACCEPT, 60).unwrap();
                let port = listener.local_addr().unwrap().port();
                let to = SocketAddr::from(([127, 0, 0, 1], port));
                let to = match at {
                    "[::1]:0" => listener.local_addr().unwrap(),
                    _ => to,
                };
                let row = table::own(listener.as_fd()).unwrap();
                let mut newcomers = Newcomers::of(1, true, false);
                let mut checked = |allow: &Allow| {
                    let rows = [(1, &row)].into_iter();
                    passing(check(rows, allow, &mut newcomers))
                };
                let mut client = TcpStream::connect(to).unwrap();
                let (what, by_tree) = checked(&Allow::default()).unwrap();
                assert!(what.contains("is being made") && !by_tree, "{at}: {what}");
                let skip = Allow {
                    skip_in_flight: true,
                    ..Allow::default()
                };
                assert_eq!(checked(&skip), None);
                client.write_all(b"x").unwrap();
                wait_until("it to wait", SOON, || {
                    let passing = checked(&Allow::default()).unwrap();
                    passing.0.contains("waits to be accepted") && passing.1
                });
                listener.accept().unwrap();
                assert_eq!(checked(&Allow::default()), None, "{at}");
                let short = Duration::from_millis(100);
                let held = TcpStream::connect_timeout(&to, short).unwrap_err();
                assert_eq!(held.kind(), std::io::ErrorKind::TimedOut, "{at}");
                drop(newcomers.into_hold().and_then(|held| held.lift()));
                TcpStream::connect(to).unwrap();
            }
        })
        .unwrap();
    }

    #[test]
    fn who_is_welcome_is_not_held() {
        testkit::needs_root!();
        sys::isolated::run(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let row = table::own(listener.as_fd()).unwrap();
            let rows = || [(1, &row)].into_iter();
            for mut newcomers in [Newcomers::of(1, false, false), Newcomers::of(1, true, true)] {
                check(rows(), &Allow::default(), &mut newcomers).unwrap();
                TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                listener.accept().unwrap();
                // The caller may see to it.
                let may = !newcomers.are_held();
                newcomers.hold_from_now();
                check(rows(), &Allow::default(), &mut newcomers).unwrap();
                assert!(may && newcomers.are_held() == newcomers.into_hold().is_some());
            }
        })
        .unwrap();
    }
}
