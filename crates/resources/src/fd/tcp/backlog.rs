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

/// A client that was told so often, over three seconds, that it may have a connection, and that has
/// not answered, is taken for gone.
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
