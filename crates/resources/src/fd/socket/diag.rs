//! sock_diag(7): what the kernel tells about a unix socket, asked by its inode number.
//!
//! A few sockets of the tree are asked about one by one. The kernel looks through those of the
//! whole host for each, so where there are many, it lists all of them.

use std::cell::OnceCell;
use std::collections::HashMap;

use sys::netlink::{Batch, DUMP, Netlink, REQUEST, attributes};

use crate::{Error, Result};

const SOCK_DIAG_BY_FAMILY: u16 = abi::kernel::SOCK_DIAG_BY_FAMILY;
const AF_UNIX: u8 = libc::AF_UNIX as u8;
const MESSAGE_BYTES: usize = 16;

/// `UDIAG_SHOW_PEER | UDIAG_SHOW_ICONS | UDIAG_SHOW_RQLEN`
const SHOW: u32 = 4 | 8 | 16;

/// The state of a unix socket, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Neither connected (or a datagram socket without peer) nor listening.
    Closed,
    /// Connected, or once connected.
    Established,
    /// Listening.
    Listening,
}

/// What sock_diag(7) tells about a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its state.
    pub state: State,
    /// The inode number of its peer: 0 for one that is closed or not accepted yet.
    pub peer: Option<u32>,
    /// Inode numbers of the clients that wait to be accepted, in order.
    pub waiting: Vec<u32>,
    /// How many connections wait, of a listening socket.
    pub waiting_count: u32,
    /// The backlog of a listening socket.
    pub backlog: u32,
    /// `RCV_SHUTDOWN` (1) and `SEND_SHUTDOWN` (2).
    pub shutdown: u8,
}

/// From so many unix sockets of a tree on, one list takes less time than a question about each.
pub const MANY: usize = 32;

/// What is asked about the unix sockets of a tree for all of them at once.
#[derive(Default)]
pub struct UnixIndex {
    /// By inode number; none where the tree has few, or the kernel does not list them.
    listed: OnceCell<Option<HashMap<u32, Facts>>>,
    /// How many stream sockets of the tree have a name.
    named: OnceCell<HashMap<Vec<u8>, usize>>,
}

impl UnixIndex {
    /// What the kernel tells about the socket with this inode number, of a tree that may have
    /// [`MANY`].
    ///
    /// # Errors
    /// Those of [`unix`].
    pub fn facts(&self, inode: u32, are_many: impl FnOnce() -> bool) -> Result<Facts> {
        let list = || are_many().then(|| all_unix().ok()).flatten();
        let listed = self.listed.get_or_init(list).as_ref();
        match listed.and_then(|listed| listed.get(&inode)) {
            Some(facts) => Ok(facts.clone()),
            None => unix(inode),
        }
    }

    /// How many of the `names` of the tree's stream sockets are this one.
    pub fn named<I>(&self, name: &[u8], names: impl FnOnce() -> I) -> usize
    where
        I: Iterator<Item = Vec<u8>>,
    {
        let count = || {
            let mut named = HashMap::new();
            names().for_each(|name| *named.entry(name).or_default() += 1);
            named
        };
        self.named
            .get_or_init(count)
            .get(name)
            .copied()
            .unwrap_or(0)
    }
}

/// Asks about the unix socket with this inode number.
///
/// # Errors
/// The system calls' errno; `ENOENT` for one of another network namespace.
pub fn unix(inode: u32) -> Result<Facts> {
    let doing = || format!("ask sock_diag about unix socket {inode}");
    ask(inode).map_err(|error| Error::kernel(doing(), error))
}

/// Asks about all unix sockets of this network namespace, by their inode numbers.
///
/// # Errors
/// The system calls' errno.
pub fn all_unix() -> Result<HashMap<u32, Facts>> {
    let failed = |error| Error::kernel("list unix sockets by sock_diag", error);
    let mut batch = Batch::default();
    batch.message(SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, &request(0));
    let netlink = Netlink::sock_diag().map_err(failed)?;
    let listed = netlink.list(batch).map_err(failed)?;
    let one = |payload: &[u8]| {
        let inode = payload.get(4..8)?.try_into().ok()?;
        Some((u32::from_ne_bytes(inode), read(payload)?))
    };
    Ok(listed
        .iter()
        .filter_map(|one_of| one(&one_of.payload))
        .collect())
}

/// The question about the socket with this inode number; for a list, about all.
fn request(inode: u32) -> [u8; 24] {
    let mut request = [0u8; 24];
    request[0] = AF_UNIX;
    request[4..8].fill(0xff); // all states
    request[8..12].copy_from_slice(&inode.to_ne_bytes());
    request[12..16].copy_from_slice(&SHOW.to_ne_bytes());
    request[16..24].fill(0xff); // no cookie
    request
}

fn ask(inode: u32) -> std::io::Result<Facts> {
    let mut batch = Batch::default();
    batch.message(SOCK_DIAG_BY_FAMILY, REQUEST, &request(inode));
    let answer = Netlink::sock_diag()?.ask(batch)?;
    let cut = || std::io::Error::from(rustix::io::Errno::BADMSG);
    let answer = answer.first().ok_or_else(cut)?;
    read(&answer.payload).ok_or_else(cut)
}

fn read(payload: &[u8]) -> Option<Facts> {
    let word =
        |data: &[u8], at: usize| Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?));
    let mut facts = Facts {
        state: match payload.get(2)? {
            1 => State::Established,
            10 => State::Listening,
            _ => State::Closed,
        },
        peer: None,
        waiting: Vec::new(),
        waiting_count: 0,
        backlog: 0,
        shutdown: 0,
    };
    for (kind, data) in attributes(payload, MESSAGE_BYTES) {
        match kind {
            2 => facts.peer = Some(word(data, 0)?),
            3 => {
                facts.waiting = data
                    .chunks_exact(4)
                    .filter_map(|four| word(four, 0))
                    .collect()
            }
            4 if facts.state == State::Listening => {
                (facts.waiting_count, facts.backlog) = (word(data, 0)?, word(data, 4)?);
            }
            6 => facts.shutdown = *data.first()?,
            _ => {}
        }
    }
    Some(facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode(fd: impl std::os::fd::AsFd) -> u32 {
        u32::try_from(rustix::fs::fstat(fd).unwrap().st_ino).unwrap()
    }

    #[test]
    fn pairs_know_their_peers_and_what_is_shut_down() {
        let (left, right) = sys::socket::pair(1, 1, 0).unwrap();
        sys::socket::shutdown(&left, 1).unwrap();
        let facts = unix(inode(&left)).unwrap();
        assert_eq!(facts.state, State::Established);
        assert_eq!(facts.peer, Some(inode(&right)));
        assert_eq!(facts.shutdown, 2);
        assert_eq!(unix(inode(&right)).unwrap().shutdown, 1);
    }

    #[test]
    fn list_says_of_each_socket_what_the_question_about_it_says() {
        let pairs = (0..40).map(|_| sys::socket::pair(1, 1, 0).unwrap());
        let pairs = pairs.collect::<Vec<_>>();
        sys::socket::shutdown(&pairs[7].0, 1).unwrap();
        let listener = sys::socket::open(1, 1, 0).unwrap();
        sys::socket::bind(&listener, &[1, 0]).unwrap();
        sys::socket::listen(&listener, 7).unwrap();
        let client = sys::socket::open(1, 1, 0).unwrap();
        sys::socket::connect(&client, &sys::socket::name(&listener).unwrap()).unwrap();
        let listed = all_unix().unwrap();
        let ends = pairs.iter().flat_map(|(one, other)| [one, other]);
        for own in ends.chain([&listener, &client]).map(inode) {
            assert_eq!(listed.get(&own), Some(&unix(own).unwrap()));
        }
    }

    #[test]
    fn listeners_know_who_waits() {
        let listener = sys::socket::open(1, 1, 0).unwrap();
        sys::socket::bind(&listener, &[1, 0]).unwrap();
        sys::socket::listen(&listener, 7).unwrap();
        let client = sys::socket::open(1, 1, 0).unwrap();
        sys::socket::connect(&client, &sys::socket::name(&listener).unwrap()).unwrap();
        let facts = unix(inode(&listener)).unwrap();
        assert_eq!((facts.state, facts.backlog), (State::Listening, 7));
        assert_eq!(facts.waiting, [inode(&client)]);
        assert_eq!(unix(inode(&client)).unwrap().peer, Some(0));
    }
}
