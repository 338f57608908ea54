//! Connections that wait to be accepted: they cannot be saved, but a server that runs accepts them
//! soon. So a tree is looked at early, before the dump has done anything that it could not do
//! again.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::fd::socket::inet_diag;
use crate::fd::table::Row;
use crate::{Error, Result};

/// What allows a dump all the same.
const OPTION: &str = "--skip-in-flight";

/// Looks whether a connection waits to be accepted by one of the tree's listeners. `rows` are the
/// descriptors of its tasks.
///
/// # Errors
/// [`Error::Passing`], with all addresses at which the tree listens.
pub fn check<'a>(rows: impl Iterator<Item = (i32, &'a Row)>) -> Result<()> {
    let sockets = rows.filter(|(_, row)| row.link.starts_with(b"socket:["));
    let sockets = sockets.map(|(pid, row)| (row.stat.st_ino, (pid, row)));
    let sockets = sockets.collect::<HashMap<_, _>>();
    if sockets.is_empty() {
        return Ok(());
    }
    let listeners = inet_diag::listeners().unwrap_or_else(|error| {
        // Each listener is asked later.
        log::debug!("sock_diag does not tell who listens: {error}");
        Vec::new()
    });
    let of_tree = |inode: u32| sockets.get(&u64::from(inode));
    let own = listeners.iter().filter(|one| of_tree(one.inode).is_some());
    let Some(busy) = own.clone().find(|listener| listener.waiting > 0) else {
        return Ok(());
    };
    let (pid, row) = of_tree(busy.inode).expect("it is the tree's");
    let link = String::from_utf8_lossy(&row.link);
    let mut error = passing(*pid, &format!("fd {} ({link})", row.fd), None);
    if let Error::Passing {
        early, listeners, ..
    } = &mut error
    {
        (*early, *listeners) = (true, own.map(|listener| listener.local).collect());
    }
    Err(error)
}

/// The error that says that a connection waits at `place`.
#[must_use]
pub fn passing(pid: i32, place: &str, listener: Option<SocketAddr>) -> Error {
    Error::Passing {
        pid,
        what: format!("{place}: a connection waits to be accepted"),
        allow: Some(OPTION),
        early: false,
        listeners: listener.into_iter().collect(),
    }
}
