//! Connections made again: both ends at once, with their names and what each is told of the
//! other's maker.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::Maker;
use super::address::{Address, NOBODYS};
use super::identity::{self, Patience};
use super::{AF_UNIX, DGRAM, HELD, Link, TAG, Unix, new};
use crate::fd::RestoreContext;
use crate::{Error, Result};

/// Which end of a connection was accepted by a listener with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The one of the record.
    Own,
    /// Its peer.
    Peer,
}

/// The end that is to be accepted by a listener with its name. Both ends' records say the same.
///
/// A name that several sockets have can only be had so (an abstract one; a path is bound again),
/// and only so can the ends be told of different makers. Where both have a name, either will do:
/// each is told of the other's maker, and the other one is bound.
pub fn server(record: &Unix) -> Option<Server> {
    let own = !record.address.is_unnamed();
    let peer = !record.peer_address.is_unnamed();
    match (record.accepted, record.peer_accepted) {
        _ if record.kind == DGRAM => None,
        (true, _) => Some(Server::Own),
        (false, true) => Some(Server::Peer),
        (false, false) if record.maker() == record.peer_maker() => None,
        (false, false) if own && peer && record.inode < record.peer => Some(Server::Own),
        (false, false) if peer => Some(Server::Peer),
        (false, false) if own => Some(Server::Own),
        (false, false) => None,
    }
}

/// One end of a connection: the first one to be opened leaves the other for its owner.
///
/// # Errors
/// The system calls' errno.
pub fn connected(record: &Unix, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
    let mine = (TAG, u64::from(record.inode));
    if let Some(own) = cx.shared().remove(&mine).and_then(|mut fds| fds.pop()) {
        return Ok(own);
    }
    let (own, other) = pair(record, cx)?;
    let key = if record.link() == Link::Gone {
        if server(record) != Some(Server::Peer) {
            let what = (record.kind, NOBODYS);
            record.peer_address.bind(other.as_fd(), what, cx.unix())?;
        }
        u64::from(record.inode) | HELD
    } else {
        u64::from(record.peer)
    };
    cx.shared().insert((TAG, key), vec![other]);
    Ok(own)
}

/// A datagram socket that was made as one of a pair and is not connected to the other any more: it
/// still tells who made them.
///
/// # Errors
/// The system calls' errno.
pub fn parted(record: &Unix, patience: &Patience) -> Result<OwnedFd> {
    const NOBODY: [u8; 2] = [0; 2];
    let (own, _other) = made_as_pair(record, patience)?;
    sys::socket::connect(&own, &NOBODY)
        .map_err(|error| Error::kernel("part a pair of unix sockets", error))?;
    Ok(own)
}

fn made_as_pair(record: &Unix, patience: &Patience) -> Result<(OwnedFd, OwnedFd)> {
    as_maker(
        record.maker(),
        patience,
        |who| sys::identity::pair(who, AF_UNIX, record.kind, 0),
        || sys::socket::pair(AF_UNIX, record.kind, 0),
    )
    .map_err(|error| Error::kernel("make a pair of unix sockets", error))
}

/// Two connected sockets, this record's first.
fn pair(record: &Unix, cx: &mut dyn RestoreContext) -> Result<(OwnedFd, OwnedFd)> {
    let Some(server) = server(record) else {
        return made_as_pair(record, &cx.unix().patience());
    };
    // The client is told who listened, the server who connected.
    let (name, listens, connects) = match server {
        Server::Own => (&record.address, record.peer_maker(), record.maker()),
        Server::Peer => (&record.peer_address, record.maker(), record.peer_maker()),
    };
    let name = Address::of_name(name.name.clone());
    let failed = |error| {
        Error::kernel(
            format!("connect a pair of unix sockets as {}", name.print()),
            error,
        )
    };
    let (listener, client) = (new(record.kind)?, new(record.kind)?);
    name.bind(listener.as_fd(), (record.kind, NOBODYS), cx.unix())?;
    let patience = cx.unix().patience();
    listen(listens, listener.as_fd(), 1, &patience).map_err(failed)?;
    let bytes = name.bytes();
    let connect = || {
        as_maker(
            connects,
            &patience,
            |who| sys::identity::connect(who, &client, &bytes),
            || sys::socket::connect(&client, &bytes),
        )
    };
    let route = name.route(NOBODYS, cx.unix())?;
    route.run(connect)?.map_err(failed)?;
    let accepted = sys::socket::accept(&listener).map_err(failed)?;
    Ok(match server {
        Server::Own => (accepted, client),
        Server::Peer => (client, accepted),
    })
}

/// Has a socket listen, in the name of who made it listen.
///
/// # Errors
/// The system call's errno.
pub fn listen(
    maker: Option<Maker<'_>>,
    own: BorrowedFd<'_>,
    backlog: i32,
    patience: &Patience,
) -> std::io::Result<()> {
    as_maker(
        maker,
        patience,
        |who| sys::identity::listen(who, own, backlog),
        || sys::socket::listen(own, backlog),
    )
}

/// Makes a call in the name of who made it before.
fn as_maker<T>(
    maker: Option<Maker<'_>>,
    patience: &Patience,
    named: impl Fn(Maker<'_>) -> std::io::Result<T>,
    plain: impl FnOnce() -> std::io::Result<T>,
) -> std::io::Result<T> {
    match maker {
        Some(maker) => {
            let named = |who| named(Maker { who, ..maker });
            identity::act_as(maker.who, patience, named, plain)
        }
        None => plain(),
    }
}
