//! What waits until all unix sockets have their names and their queues: connections of datagram
//! sockets, and that names of deleted sockets are deleted.
//!
//! A datagram socket that is connected takes neither messages nor connections from anyone but its
//! peer. So whoever is connected to it must be so before it is connected itself.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use super::address::{Address, Route, new_scratch};
use super::identity::Patience;
use crate::{Error, Result};

/// Work that is put off until the last socket of the image is open and filled.
#[derive(Debug, Default)]
pub struct Deferred {
    scratch: Option<OwnedFd>,
    patience: Patience,
    connections: Vec<Connection>,
    deleted: Vec<(Route, PathBuf)>,
}

/// A connection of a datagram socket to a named one.
#[derive(Debug)]
struct Connection {
    own: OwnedFd,
    inode: u32,
    peer: u32,
    address: Address,
    route: Route,
}

impl Deferred {
    /// A descriptor of the scratch file system of this restore.
    ///
    /// # Errors
    /// The system calls' errno.
    pub fn scratch(&mut self) -> Result<OwnedFd> {
        let scratch = match self.scratch.take() {
            Some(scratch) => scratch,
            None => new_scratch()?,
        };
        dup(self.scratch.insert(scratch).as_fd())
    }

    /// How long this restore waits for the numbers of those who made its sockets.
    pub fn patience(&self) -> Patience {
        self.patience.clone()
    }

    /// Has a name deleted at the end: that of a socket that was deleted.
    pub fn delete(&mut self, route: Route, path: PathBuf) {
        self.deleted.push((route, path));
    }

    /// Has `own`, whose inode number was `inode`, connected at the end to the socket whose inode
    /// number was `peer`.
    ///
    /// # Errors
    /// As [`Address::route`].
    pub fn connect(
        &mut self,
        (own, inode): (BorrowedFd<'_>, u32),
        (address, peer): (&Address, u32),
    ) -> Result<()> {
        let route = address.route(peer, self)?;
        self.connections.push(Connection {
            own: dup(own)?,
            inode,
            peer,
            address: address.clone(),
            route,
        });
        Ok(())
    }

    /// Does what was put off.
    ///
    /// # Errors
    /// The system calls' errno.
    pub fn finish(&mut self) -> Result<()> {
        while let Some(next) = next(&self.connections) {
            self.connections.swap_remove(next).make()?;
        }
        for (route, path) in self.deleted.drain(..) {
            let deleted = route.run(|| rustix::fs::unlink(&path))?;
            deleted.map_err(|error| Error::kernel("delete the name of a unix socket", error))?;
        }
        self.scratch = None;
        Ok(())
    }
}

/// The connection that is to be made next: of a socket that nobody else is still to be connected
/// to, but for its own peer and itself.
fn next(all: &[Connection]) -> Option<usize> {
    let waits_for = |one: &Connection, other: &Connection| {
        other.peer == one.inode && ![one.peer, one.inode].contains(&other.inode)
    };
    let is_free = |one: &Connection| !all.iter().any(|other| waits_for(one, other));
    // Without a first one the image makes no sense, and the kernel says so.
    let fallback = (!all.is_empty()).then_some(0);
    all.iter().position(is_free).or(fallback)
}

impl Connection {
    fn make(self) -> Result<()> {
        let bytes = self.address.reached_by();
        let connected = self.route.run(|| sys::socket::connect(&self.own, &bytes))?;
        connected.map_err(|error| {
            let name = self.address.print();
            Error::kernel(format!("connect to unix socket {name}"), error)
        })
    }
}

fn dup(own: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(own, 0)
        .map_err(|error| Error::kernel("copy a descriptor", error))
}
