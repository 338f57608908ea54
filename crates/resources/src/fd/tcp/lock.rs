//! Connections between the dump and the restore: their packets are dropped, so that nobody
//! answers "no such connection" while the socket does not exist.
//!
//! During a dump the rules belong to a netlink socket of ours and vanish with us, however we end.
//! Before the target is killed, rules that stay take their place ([`Lock::stay`]), so that they
//! stand whoever ends from then on. The restore removes those ([`release`]). What goes out is
//! dropped as well: the kernel's timers would send data that the image calls unsent, and an answer
//! to that would be one to nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sys::nft;
pub use sys::nft::{Label, Leftover};
use sys::watchdog::{Setting, Watchdog};
use xxhash_rust::xxh3::xxh3_64;

use super::repair;
use super::{TcpSocket, is_tcp};
use crate::fd::socket::Nature;
use crate::fd::socket::inet;
use crate::fd::{Description, Open};
use crate::{Allow, Error, Result};

/// What the names of all tables begin with.
pub const PREFIX: &str = "stillframe-";

/// Keeps packets away from the tree's connections.
///
/// Dropped, it removes the rules: the target goes on.
#[derive(Debug)]
pub struct Lock {
    name: String,
    connections: Vec<nft::Connection>,
    sockets: Vec<OwnedFd>,
    watchdog: Option<Watchdog>,
    /// None where the caller keeps packets away (`--network-lock skip`).
    owner: Option<nft::Owned>,
}

impl Lock {
    /// Blocks the established connections among `opens`, whose tasks are stopped; `None` when
    /// there are none, or `allow` does not have them saved. From here on [`super::TcpSocket`] can
    /// read them: should this process be killed while it does, a watchdog ends the repair mode.
    ///
    /// # Errors
    /// When the rules cannot be installed (nothing is changed then), or a system call fails.
    pub fn install(opens: &[Open<'_>], allow: &Allow) -> Result<Option<Self>> {
        if allow.tcp_close || !allow.tcp_established {
            return Ok(None);
        }
        let mut found = Vec::new();
        for open in opens {
            if let Some(connection) = connection_of(open)? {
                found.push((connection, open));
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        let failed = |error| Error::kernel("watch over the tree's TCP connections", error);
        let mut sockets = Vec::with_capacity(found.len());
        let mut settings = Vec::with_capacity(2 * found.len());
        for (_, open) in &found {
            let own = open.own()?;
            let copy = rustix::io::fcntl_dupfd_cloexec(own, 0);
            sockets.push(copy.map_err(|error| failed(error.into()))?);
            let reuse = sys::socket::number(own, 1, 2).map_err(failed)?;
            let set = |(level, name, value)| Setting {
                socket: own,
                level,
                name,
                value,
            };
            settings.extend(repair::quiet_end(reuse).map(set));
            // Looking at a queue moves it where the target has set it.
            let from = sys::socket::number(own, 1, repair::SO_PEEK_OFF).unwrap_or(-1);
            if from >= 0 {
                settings.push(set((1, repair::SO_PEEK_OFF, from)));
            }
        }
        let watchdog = Watchdog::start(&settings).map_err(failed)?;
        let connections: Vec<_> = found.iter().map(|(connection, _)| *connection).collect();
        let name = name_of(connections.clone());
        let block = || nft::block_meanwhile(&format!("{name}-dump"), &connections);
        let owner = (!allow.network_unlocked).then(block).transpose();
        let owner = owner.map_err(|error| {
            Error::kernel("block the tree's TCP connections with nf_tables", error)
        })?;
        Ok(Some(Self {
            name,
            connections,
            sockets,
            watchdog: Some(watchdog),
            owner,
        }))
    }

    /// Removes the rules: the target is about to go on. The result is to be dropped once it does.
    #[must_use]
    pub fn lift(self) -> Option<Leftover> {
        self.owner.and_then(nft::Owned::lift)
    }

    /// Makes rules that stay when this process ends: the target is about to be killed. `label` says
    /// what they are for.
    ///
    /// # Errors
    /// The system calls' errno; nothing is changed then.
    pub fn stay(&mut self, label: &Label) -> Result<()> {
        // No connection is being read any more.
        self.watchdog = None;
        if self.owner.is_none() {
            return Ok(());
        }
        // What an earlier dump of these connections may have left is replaced.
        let blocked =
            nft::unblock(&self.name).and_then(|_| nft::block(&self.name, label, &self.connections));
        blocked.map_err(|error| {
            Error::kernel(
                "keep the tree's TCP connections blocked with nf_tables",
                error,
            )
        })
    }

    /// Takes back [`Lock::stay`]: the target goes on.
    pub fn revoke(&self) {
        // None is fine; a table that cannot be removed is told of by `network list`.
        let _ = nft::unblock(&self.name);
    }

    /// The sockets of the connections, to be kept by who calls [`Lock::silence`].
    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(AsFd::as_fd)
    }

    /// Has the connections vanish without a word when their last descriptors are closed: the target
    /// was killed.
    ///
    /// # Errors
    /// The system calls' errno.
    pub fn silence(&self) -> Result<()> {
        self.sockets.iter().try_for_each(|socket| {
            repair::silence(socket.as_fd())
                .map_err(|error| Error::kernel("silence a TCP connection", error))
        })
    }
}

/// Whether reading `open` needs a [`Lock`]: it is an established connection.
///
/// # Errors
/// When a system call fails.
pub fn is_needed(open: &Open<'_>) -> Result<bool> {
    Ok(connection_of(open)?.is_some())
}

/// Removes the rules that a dump has left for the connections among these descriptions; none is
/// fine. Called when the restored tree is about to run; the result is to be dropped once it does.
///
/// # Errors
/// The system calls' errno.
pub fn release(all: &[Box<dyn Description>]) -> Result<Option<Leftover>> {
    let Some(name) = table(all) else {
        return Ok(None);
    };
    nft::unblock(&name).map_err(|error| Error::kernel("unblock the tree's TCP connections", error))
}

/// The name of the table that a dump leaves for the connections among these descriptions; `None`
/// for no connections.
#[must_use]
pub fn table(all: &[Box<dyn Description>]) -> Option<String> {
    let sockets = all.iter().filter_map(|one| one.record::<TcpSocket>());
    let connected = sockets.filter(|socket| socket.connection.is_some());
    let ends = connected.filter_map(|socket| pair(&socket.local, &socket.remote));
    let connections: Vec<_> = ends.collect();
    (!connections.is_empty()).then(|| name_of(connections))
}

/// The name of the table: the same for the same connections, whatever their order.
fn name_of(mut connections: Vec<nft::Connection>) -> String {
    connections.sort_unstable();
    let text: Vec<_> = connections
        .iter()
        .map(|connection| format!("{} {}", connection.local, connection.remote))
        .collect();
    format!("{PREFIX}{:016x}", xxh3_64(text.join("\n").as_bytes()))
}

fn pair(local: &[u8], remote: &[u8]) -> Option<nft::Connection> {
    Some(nft::Connection {
        local: inet::parse(local)?,
        remote: inet::parse(remote)?,
    })
}

/// The connection that `open` is an end of.
fn connection_of(open: &Open<'_>) -> Result<Option<nft::Connection>> {
    if !Nature::of(open)?.is_some_and(is_tcp) {
        return Ok(None);
    }
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("look at {}", open.place()), error);
    if !repair::info(own).map_err(failed)?.state.is_connected() {
        return Ok(None);
    }
    let local = sys::socket::name(own).map_err(failed)?;
    let remote = sys::socket::peer_name(own).map_err(failed)?;
    Ok(pair(&local, &remote))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use nft::{Connection, block, block_meanwhile, unblock};

    fn connection(family: &str) -> (TcpStream, TcpStream, Connection) {
        let listener = TcpListener::bind((family, 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let connection = Connection {
            local: client.local_addr().unwrap(),
            remote: client.peer_addr().unwrap(),
        };
        (client, server, connection)
    }

    /// Whether a byte sent by one arrives at the other soon.
    fn passes(from: &mut TcpStream, to: &mut TcpStream) -> bool {
        from.write_all(b"x").unwrap();
        to.set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        to.read(&mut [0]).is_ok()
    }

    #[test]
    fn only_the_named_connections_are_blocked() {
        testkit::needs_root!();
        testkit::calls::isolated::run(|| {
            for family in ["127.0.0.1", "::1"] {
                let (mut client, mut server, blocked) = connection(family);
                let (mut other_client, mut other_server, _) = connection(family);
                let owner = block_meanwhile("stillframe-unit-test", &[blocked]).unwrap();
                assert!(!passes(&mut server, &mut client), "{family}");
                assert!(passes(&mut other_server, &mut other_client));
                let again = block("stillframe-unit-test", &Label::default(), &[blocked]);
                assert!(again.is_err(), "there is such a table");
                drop(owner);
                // What was dropped is sent again after a while.
                client
                    .set_read_timeout(Some(Duration::from_secs(60)))
                    .unwrap();
                assert_eq!(client.read(&mut [0]).unwrap(), 1);
            }
        })
        .unwrap();
    }

    #[test]
    fn a_table_that_is_not_owned_stays_until_it_is_removed() {
        testkit::needs_root!();
        testkit::calls::isolated::run(|| {
            let (mut client, mut server, blocked) = connection("127.0.0.1");
            let many: Vec<_> = (1..1200)
                .map(|port| Connection {
                    local: ([10, 0, 0, 1], port).into(),
                    remote: ([10, 0, 0, 2], 80).into(),
                })
                .chain([blocked])
                .collect();
            block("stillframe-unit-test", &Label::default(), &many).unwrap();
            assert!(!passes(&mut server, &mut client));
            assert!(unblock("stillframe-unit-test").unwrap().is_some());
            assert!(unblock("stillframe-unit-test").unwrap().is_none());
            client
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            assert_eq!(client.read(&mut [0]).unwrap(), 1);
        })
        .unwrap();
    }
}
