//! sock_diag(7): what the kernel tells about internet sockets, also those that nobody has open any
//! more.

use std::io;
use std::net::{IpAddr, SocketAddr};

use sys::netlink::{ACK, Batch, DUMP, Netlink, REQUEST, attributes};

use super::inet::{AF_INET, AF_INET6};
use crate::fd::tcp::signature::Signature;

const SOCK_DIAG_BY_FAMILY: u16 = abi::kernel::SOCK_DIAG_BY_FAMILY;
const SOCK_DESTROY: u16 = 21;
const MESSAGE_BYTES: usize = 72;
const IPPROTO_TCP: u8 = libc::IPPROTO_TCP as u8;
const IPPROTO_MPTCP: u32 = libc::IPPROTO_MPTCP as u32;
const INET_DIAG_SHUTDOWN: u16 = 8;
const INET_DIAG_SKV6ONLY: u16 = 11;
const INET_DIAG_MD5SIG: u16 = 18;
const INET_DIAG_ULP_INFO: u16 = 19;
const INET_ULP_INFO_NAME: u16 = 1;
const INET_DIAG_REQ_PROTOCOL: u16 = 3;
/// States, as bits: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, LAST_ACK, CLOSING.
const ENDING: u32 = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 11;
const TIME_WAIT: u8 = 6;
const LISTENING: u32 = 1 << 10;
/// `SYN_RECV`: connections that are being made.
const ASKING: u32 = 1 << 3;
const ANY_STATE: u32 = u32::MAX;

/// An internet socket, as sock_diag(7) tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    state: u8,
    local: SocketAddr,
    remote: SocketAddr,
    /// Addresses, interface and cookie: what the kernel knows it by.
    id: [u8; 48],
    /// 0 for one that nobody has open.
    inode: u32,
    shutdown: u8,
    /// Bytes, or connections of a listener, that wait.
    waiting: u32,
    family: u8,
    /// True if an IPv6 socket takes nothing by IPv4.
    v6_only: bool,
    /// How often the last data was sent again.
    sent_again: u8,
    /// True for a subflow of a socket of Multipath TCP.
    is_subflow: bool,
}

/// A TCP socket that listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its inode number.
    pub inode: u32,
    /// Its address.
    pub local: SocketAddr,
    /// True if it takes no connections by IPv4, if the address is one of IPv6.
    pub v6_only: bool,
    /// How many connections wait to be accepted.
    pub waiting: u32,
}

/// A connection that a listener has been asked for, and whose client has not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The address that the client has asked.
    pub local: SocketAddr,
    /// How often the client was told again that it may have it.
    pub told_again: u8,
}

impl Request {
    /// True if the request is for this listener.
    #[must_use]
    pub fn is_to(&self, listener: &Listener) -> bool {
        let (at, to) = (listener.local, self.local);
        at.port() == to.port() && (at.ip().is_unspecified() || at.ip() == to.ip())
    }
}

impl Found {
    fn read(payload: &[u8]) -> Option<Self> {
        let fixed = payload.get(..MESSAGE_BYTES)?;
        let family = fixed[0];
        let id: [u8; 48] = fixed[4..52].try_into().ok()?;
        let end = |port: usize, ip: usize| {
            let port = u16::from_be_bytes([id[port], id[port + 1]]);
            let ip = if i32::from(family) == AF_INET {
                IpAddr::from(<[u8; 4]>::try_from(&id[ip..ip + 4]).expect("4 bytes"))
            } else {
                IpAddr::from(<[u8; 16]>::try_from(&id[ip..ip + 16]).expect("16 bytes"))
            };
            SocketAddr::new(ip.to_canonical(), port)
        };
        let attribute = |wanted| {
            let mut all = attributes(payload, MESSAGE_BYTES);
            all.find(|(kind, _)| *kind == wanted).map(|(_, data)| data)
        };
        let byte = |wanted| attribute(wanted).and_then(|data| data.first()).copied();
        let upper = attribute(INET_DIAG_ULP_INFO).and_then(|upper| {
            let mut all = attributes(upper, 0);
            all.find(|(kind, _)| *kind == INET_ULP_INFO_NAME)
        });
        Some(Self {
            state: fixed[1],
            local: end(0, 4),
            remote: end(2, 20),
            id,
            inode: u32::from_ne_bytes(fixed[68..72].try_into().ok()?),
            waiting: u32::from_ne_bytes(fixed[56..60].try_into().ok()?),
            // Not told of one that waits for late packets.
            shutdown: byte(INET_DIAG_SHUTDOWN).unwrap_or(0),
            family,
            v6_only: byte(INET_DIAG_SKV6ONLY).unwrap_or(0) != 0,
            sent_again: fixed[3],
            is_subflow: upper.is_some_and(|(_, name)| name.starts_with(b"mptcp\0")),
        })
    }
}

/// The fixed part of a request.
fn request(family: u8, protocol: u8, states: u32, id: &[u8; 48]) -> Vec<u8> {
    let head = [family, protocol, 0, 0];
    [&head[..], &states.to_ne_bytes(), id].concat()
}

/// A request for TCP sockets with what goes along with `INET_DIAG_INFO` alone: keys.
fn request_with_keys(family: u8, states: u32, id: &[u8; 48]) -> Vec<u8> {
    const INFO: u8 = 1 << 1;
    let mut request = request(family, IPPROTO_TCP, states, id);
    request[2] = INFO;
    request
}

/// All sockets of a protocol in these states.
fn list(protocol: u8, states: u32) -> io::Result<Vec<Found>> {
    list_with(protocol, states, |_| {})
}

/// The same with what `more` adds to the requests.
fn list_with(protocol: u8, states: u32, more: impl Fn(&mut Batch)) -> io::Result<Vec<Found>> {
    let mut all = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let family = u8::try_from(family).expect("a small number");
        let mut batch = Batch::default();
        let what = request(family, protocol, states, &[0; 48]);
        batch.message(SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, &what);
        more(&mut batch);
        let answers = Netlink::sock_diag()?.list(batch)?;
        all.extend(answers.iter().filter_map(|one| Found::read(&one.payload)));
    }
    Ok(all)
}

/// The `RCV_SHUTDOWN` (1) and `SEND_SHUTDOWN` (2) bits of the socket of UDP or UDP-Lite with this
/// inode number; `None` for one that has no port, which nobody finds.
///
/// # Errors
/// The system calls' errno.
pub fn udp_shutdown(protocol: i32, inode: u32) -> io::Result<Option<u8>> {
    let protocol = u8::try_from(protocol).expect("a protocol's number");
    let all = list(protocol, ANY_STATE)?;
    let found = all.iter().find(|found| found.inode == inode);
    Ok(found.map(|found| found.shutdown))
}

/// Facts of a TCP socket besides its options.
#[derive(Debug, Default)]
pub struct TcpFacts {
    /// Bytes that were received and not read, urgent ones and what is behind them, too. The other
    /// end's shutdown counts as one.
    pub waiting: u32,
    /// Keys of signed TCP; none where `CAP_NET_ADMIN` is missing.
    pub signatures: Vec<Signature>,
}

/// Facts of the TCP socket with this inode number and these addresses; `None` for a closed one. A
/// listener has no `remote`.
///
/// # Errors
/// The system calls' errno.
pub fn tcp(inode: u32, local: &[u8], remote: &[u8]) -> io::Result<Option<TcpFacts>> {
    let Some(id) = id_of(local, remote) else {
        return Ok(None);
    };
    let family = local[0];
    let states = if remote.is_empty() {
        LISTENING
    } else {
        ANY_STATE
    };
    if !remote.is_empty() {
        let mut batch = Batch::default();
        let what = request_with_keys(family, states, &id);
        batch.message(SOCK_DIAG_BY_FAMILY, REQUEST, &what);
        // One that is bound to an interface is not found so.
        let answers = Netlink::sock_diag()?.ask(batch).unwrap_or_default();
        if let Some(told) = answers.iter().find_map(|one| facts_of(inode, &one.payload)) {
            return Ok(Some(told));
        }
    }
    let mut ports = [0; 48];
    ports[..4].copy_from_slice(&id[..4]);
    let mut batch = Batch::default();
    let what = request_with_keys(family, states, &ports);
    batch.message(SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, &what);
    let answers = Netlink::sock_diag()?.list(batch)?;
    let mut told = answers
        .iter()
        .filter_map(|one| facts_of(inode, &one.payload));
    Ok(told.next())
}

/// By what sock_diag(7) looks for a socket with these addresses.
fn id_of(local: &[u8], remote: &[u8]) -> Option<[u8; 48]> {
    const NO_COOKIE: [u8; 8] = [0xff; 8];
    let mut id = [0; 48];
    let address = match i32::from(*local.first()?) {
        AF_INET => 4..8,
        _ => 8..24,
    };
    for (end, port, ip) in [(local, 0, 4), (remote, 2, 20)] {
        if end.is_empty() {
            continue;
        }
        id[port..port + 2].copy_from_slice(end.get(2..4)?);
        id[ip..ip + address.len()].copy_from_slice(end.get(address.clone())?);
    }
    id[40..].copy_from_slice(&NO_COOKIE);
    Some(id)
}

fn facts_of(inode: u32, payload: &[u8]) -> Option<TcpFacts> {
    let found = Found::read(payload).filter(|found| found.inode == inode)?;
    let mut attributes = attributes(payload, MESSAGE_BYTES);
    let keys = attributes.find(|(kind, _)| *kind == INET_DIAG_MD5SIG);
    let signatures = keys.map(|(_, data)| Signature::list(data));
    Some(TcpFacts {
        waiting: found.waiting,
        signatures: signatures.unwrap_or_else(|| Some(Vec::new()))?,
    })
}

/// The TCP sockets of this network namespace that listen.
///
/// # Errors
/// The system calls' errno.
pub fn listeners() -> io::Result<Vec<Listener>> {
    listening(&list(IPPROTO_TCP, LISTENING)?)
}

/// The TCP sockets of this network namespace that listen, and the connections that are being made
/// to any of them.
///
/// # Errors
/// The system calls' errno.
pub fn listeners_and_requests() -> io::Result<(Vec<Listener>, Vec<Request>)> {
    let all = list(IPPROTO_TCP, LISTENING | ASKING)?;
    // One that somebody has open was made, or is made by who has it.
    let asking = |found: &&Found| 1 << found.state == ASKING && found.inode == 0;
    let requests = all.iter().filter(asking).map(|found| Request {
        local: found.local,
        told_again: found.sent_again,
    });
    Ok((listening(&all)?, requests.collect()))
}

/// The listeners among these sockets; those of Multipath TCP, which are known by inodes of their
/// own, are asked for where there are any.
fn listening(all: &[Found]) -> io::Result<Vec<Listener>> {
    let mut of_multipath = Vec::new();
    if all.iter().any(|found| found.is_subflow) {
        let more = |batch: &mut Batch| {
            batch.attribute(INET_DIAG_REQ_PROTOCOL, &IPPROTO_MPTCP.to_ne_bytes());
        };
        match list_with(IPPROTO_TCP, LISTENING, more) {
            Ok(found) => of_multipath = found,
            // Not every kernel tells of them.
            Err(error) if error.raw_os_error() == Some(2) => {}
            Err(error) => return Err(error),
        }
    }
    let is_listening = |found: &&Found| 1 << found.state == LISTENING;
    let listener = |found: &Found| Listener {
        inode: found.inode,
        local: found.local,
        v6_only: found.v6_only,
        waiting: found.waiting,
    };
    let all = all.iter().chain(&of_multipath);
    Ok(all.filter(is_listening).map(listener).collect())
}

/// The inode number of the TCP socket that has this connection open on this host.
///
/// # Errors
/// The system calls' errno.
pub fn tcp_owner(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
    let ends = (canonical(local), canonical(remote));
    let all = list(IPPROTO_TCP, ANY_STATE)?;
    let found = all.iter().find(|found| (found.local, found.remote) == ends);
    Ok(found.map(|found| found.inode).filter(|inode| *inode != 0))
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Ends what is left of a connection that was closed on this host, seen from either of its ends:
/// what waits for late packets, and what nobody has open any more. Returns whether there was any.
///
/// # Errors
/// The system calls' errno.
pub fn end_leftovers(local: SocketAddr, remote: SocketAddr) -> io::Result<bool> {
    let (local, remote) = (canonical(local), canonical(remote));
    let ends = [(local, remote), (remote, local)];
    destroy(|found| ends.contains(&(found.local, found.remote)))
}

/// Ends what waits for late packets of connections from this address. Returns whether there was
/// any.
///
/// # Errors
/// As [`end_leftovers`].
pub fn end_late(local: SocketAddr) -> io::Result<bool> {
    let local = canonical(local);
    destroy(|found| {
        let same = local.ip().is_unspecified() || found.local.ip() == local.ip();
        found.state == TIME_WAIT && same && found.local.port() == local.port()
    })
}

/// Destroys TCP sockets that are ending and that nobody has open.
fn destroy(which: impl Fn(&Found) -> bool) -> io::Result<bool> {
    let mut any = false;
    for found in list(IPPROTO_TCP, ENDING)? {
        if found.inode != 0 || !which(&found) {
            continue;
        }
        // Its cookie is in the id: no other socket of these addresses is meant.
        let what = request(found.family, IPPROTO_TCP, 1 << found.state, &found.id);
        let mut batch = Batch::default();
        batch.message(SOCK_DESTROY, REQUEST | ACK, &what);
        match Netlink::sock_diag()?.apply(batch) {
            Ok(()) => any = true,
            // It has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(2) => any = true,
            Err(error) => return Err(error),
        }
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn udp_sockets_tell_what_is_shut() {
        for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let socket = UdpSocket::bind(at).unwrap();
            let inode = u32::try_from(rustix::fs::fstat(&socket).unwrap().st_ino).unwrap();
            assert_eq!(udp_shutdown(17, inode).unwrap(), Some(0), "{at}");
            let _ = sys::socket::shutdown(&socket, 1);
            assert_eq!(udp_shutdown(17, inode).unwrap(), Some(2), "{at}");
        }
    }

    #[test]
    fn listeners_of_multipath_tcp_are_told() {
        let Ok(own) = sys::socket::open(AF_INET, 1, 262) else {
            testkit::skip!("this kernel has no Multipath TCP, or it is switched off");
        };
        rustix::net::bind(&own, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        rustix::net::listen(&own, 5).unwrap();
        let inode = u32::try_from(rustix::fs::fstat(&own).unwrap().st_ino).unwrap();
        let listener = TcpListener::from(own);
        let at = listener.local_addr().unwrap();
        let found = || {
            let all = listeners().unwrap();
            all.into_iter().find(|one| one.inode == inode)
        };
        let Some(first) = found() else {
            testkit::skip!("this kernel does not tell of Multipath TCP");
        };
        assert_eq!((first.local, first.waiting), (at, 0));
        let _client = TcpStream::connect(at).unwrap();
        assert_eq!(found().unwrap().waiting, 1);
    }

    #[test]
    fn listeners_of_ipv6_tell_whether_they_take_both() {
        for (at, wanted) in [("[::]:0", false), ("127.0.0.1:0", false)] {
            let listener = TcpListener::bind(at).unwrap();
            let inode = u32::try_from(rustix::fs::fstat(&listener).unwrap().st_ino).unwrap();
            let all = listeners().unwrap();
            let found = all.iter().find(|one| one.inode == inode).unwrap();
            assert_eq!(found.v6_only, wanted, "{at}");
        }
        let own = sys::socket::open(AF_INET6, 1, 6).unwrap();
        sys::socket::set_number(&own, 41, 26, 1).unwrap();
        let any = SocketAddr::from(([0u16; 8], 0));
        rustix::net::bind(&own, &any).unwrap();
        rustix::net::listen(&own, 5).unwrap();
        let inode = u32::try_from(rustix::fs::fstat(&own).unwrap().st_ino).unwrap();
        let all = listeners().unwrap();
        assert!(all.iter().any(|one| one.inode == inode && one.v6_only));
    }

    #[test]
    fn only_the_leftovers_of_one_connection_are_ended() {
        testkit::needs_root!();
        testkit::calls::isolated::run(|| {
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let listener = TcpListener::bind(at).unwrap();
                let connect = || {
                    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                    let server = listener.accept().unwrap().0;
                    let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
                    (client, server, ends)
                };
                let (client, server, ends) = connect();
                let (other_client, other_server, other) = connect();
                let (_alive, _server, alive) = connect();
                drop((client, other_client));
                drop((server, other_server));
                let there = |(local, remote)| {
                    let all = list(IPPROTO_TCP, ANY_STATE).unwrap();
                    let same = |found: &Found| (found.local, found.remote) == (local, remote);
                    all.iter().any(same)
                };
                assert!(there(ends) && there(other));
                assert!(end_leftovers(ends.0, ends.1).unwrap());
                assert!(!there(ends) && there(other));
                assert!(!end_leftovers(alive.0, alive.1).unwrap());
                assert!(!end_late(listener.local_addr().unwrap()).unwrap());
                assert!(end_late(other.0).unwrap());
                assert!(!there(other) && there(alive));
                TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            }
        })
        .unwrap();
    }
}
