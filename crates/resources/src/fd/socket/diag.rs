//! sock_diag(7): what the kernel tells about a unix socket, asked by its inode number.
//!
//! Only sockets of the tree are asked about, one question each: no listing of the whole host.

use sys::netlink::{Batch, Netlink, REQUEST, attributes};

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

/// Asks about the unix socket with this inode number.
///
/// # Errors
/// The system calls' errno; `ENOENT` for one of another network namespace.
pub fn unix(inode: u32) -> Result<Facts> {
    let doing = || format!("ask sock_diag about unix socket {inode}");
    ask(inode).map_err(|error| Error::kernel(doing(), error))
}

fn ask(inode: u32) -> std::io::Result<Facts> {
    let mut request = [0u8; 24];
    request[0] = AF_UNIX;
    request[4..8].fill(0xff); // all states
    request[8..12].copy_from_slice(&inode.to_ne_bytes());
    request[12..16].copy_from_slice(&SHOW.to_ne_bytes());
    request[16..24].fill(0xff); // no cookie
    let mut batch = Batch::default();
    batch.message(SOCK_DIAG_BY_FAMILY, REQUEST, &request);
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
