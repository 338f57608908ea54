//! UDP sockets: addresses, options, multicast groups, and the datagrams that were not read. Those
//! of UDP-Lite (RFC 3828) differ from them in how much of a datagram its checksum covers.
//!
//! Waiting datagrams are sent again, to this host only and in the name of their senders. What a
//! control message said of one (its time, its interface) is then what it would say of a datagram
//! from the host itself; a firewall between may keep them, as any datagram may be lost. Those of
//! UDP-Lite are then covered as a whole, which every receiver takes.
//!
//! - What: UDP socket
//! - Kept: addresses, options, multicast groups, datagrams that were not read; of UDP-Lite also how
//!   much is covered by checksums.
//! - Refused: "it has a datagram under construction (UDP_CORK)"; "an error, or a message in its
//!   error queue, waits to be fetched: try again".
//! - At a restore: "this kernel has no UDP-Lite".
//! - CRIU 4.2: addresses and some options, without multicast groups and UDP-Lite's coverage; drops
//!   unread datagrams with a warning, and refuses `UDP_CORK`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use sys::socket::{Count, count};

use super::socket::multicast::{self, Group};
use super::socket::options::{Buffer, Moment, Options, enlarge_buffer, restore_buffer};
use super::socket::{self, Nature, inet, packet, peek};
use super::{DumpContext, Kind, Open, RestoreContext, ready};
use crate::{Error, Result};

const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
const IPPROTO_UDP: i32 = libc::IPPROTO_UDP;
const IPPROTO_UDPLITE: i32 = libc::IPPROTO_UDPLITE;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_REUSEPORT: i32 = libc::SO_REUSEPORT;
const UDP_CORK: i32 = libc::UDP_CORK;
const SHUT_RD: i32 = libc::SHUT_RD;
const SHUT_WR: i32 = libc::SHUT_WR;
const RCV_SHUTDOWN: u8 = 1;
const SEND_SHUTDOWN: u8 = 2;

/// A UDP socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Udp {
    /// `AF_INET` or `AF_INET6`.
    #[prost(int32, tag = "1")]
    pub family: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "2")]
    pub common: socket::Common,
    /// Its own address, as a `sockaddr`.
    #[prost(bytes = "vec", tag = "3")]
    pub local: Vec<u8>,
    /// What it is connected to; empty for nothing.
    #[prost(bytes = "vec", tag = "4")]
    pub remote: Vec<u8>,
    /// Whether it is shut down for reading.
    #[prost(bool, tag = "5")]
    pub is_shut: bool,
    /// The multicast groups that it has joined.
    #[prost(message, repeated, tag = "6")]
    pub groups: Vec<Group>,
    /// What it has not read.
    #[prost(message, repeated, tag = "7")]
    pub queue: Vec<Datagram>,
    /// Its options.
    #[prost(message, required, tag = "8")]
    pub options: Options,
    /// Whether it is shut down for writing.
    #[prost(bool, tag = "9")]
    pub is_mute: bool,
    /// Whether its own address was none of the host's.
    #[prost(bool, tag = "10")]
    pub is_foreign: bool,
    /// Whether it has not been told yet that nobody receives what it sent (`ECONNREFUSED`).
    #[prost(bool, tag = "11")]
    pub is_refused: bool,
    /// Whether it is one of UDP-Lite.
    #[prost(bool, tag = "12")]
    pub is_lite: bool,
}

impl Udp {
    fn protocol(&self) -> i32 {
        if self.is_lite {
            IPPROTO_UDPLITE
        } else {
            IPPROTO_UDP
        }
    }
}

/// A datagram.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Datagram {
    /// Who sent it, as a `sockaddr`.
    #[prost(bytes = "vec", tag = "1")]
    pub from: Vec<u8>,
    /// The bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub data: Vec<u8>,
}

/// The kind.
pub struct UdpSocket;

impl Kind for UdpSocket {
    type Record = Udp;
    const TAG: u16 = super::tags::UDP;
    const NAME: &'static str = "udp socket";
    const STAYS: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, |nature| {
            let inet = [inet::AF_INET, inet::AF_INET6].contains(&nature.family);
            let udp = [IPPROTO_UDP, IPPROTO_UDPLITE].contains(&nature.protocol);
            inet && nature.kind == SOCK_DGRAM && udp
        })
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Udp> {
        read(open, cx)
    }

    fn check(record: &Udp) -> Result<()> {
        record.options.check()?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        if ![inet::AF_INET, inet::AF_INET6].contains(&record.family) {
            return corrupt("of another family");
        }
        if !record.groups.iter().all(Group::is_address) {
            return corrupt("a multicast group without an address");
        }
        Ok(())
    }

    fn describe(record: &Udp) -> String {
        let mut line = if record.is_lite { "UDP-Lite " } else { "" }.to_owned();
        line += &inet::print(&record.local);
        if !record.remote.is_empty() {
            line += &format!(" to {}", inet::print(&record.remote));
        }
        if !record.queue.is_empty() {
            line += &format!(" queued={}", record.queue.len());
        }
        line
    }

    fn open(record: &Udp, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let own = make(record)?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
        if !inet::is_any(&record.local) {
            let at = (record.local.as_slice(), record.is_foreign);
            socket::bind::bind(own.as_fd(), at, cx)
                .map_err(|error| Error::kernel(format!("bind a UDP socket to {local}"), error))?;
        }
        if !record.remote.is_empty() {
            sys::socket::connect(&own, &record.remote).map_err(|error| {
                Error::kernel(format!("connect a UDP socket to {remote}"), error)
            })?;
        }
        multicast::join(&record.groups, own.as_fd())?;
        Ok(own)
    }

    fn finish(record: &Udp, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.options.restore_bound(own)?;
        record.options.apply(own, Moment::Late)?;
        let bytes: usize = record.queue.iter().map(|one| one.data.len() + 1024).sum();
        let failed = |error| Error::kernel("make room for unread datagrams", error);
        let old = enlarge_buffer(own, Buffer::Receive, bytes).map_err(failed)?;
        fill(record, own);
        restore_buffer(own, old).map_err(failed)?;
        if record.is_refused {
            set_refused(&record.local, &record.remote, record.is_lite);
        }
        for (_, how) in [(record.is_shut, SHUT_RD), (record.is_mute, SHUT_WR)]
            .into_iter()
            .filter(|(is_shut, _)| *is_shut)
        {
            // Says that it is not connected where it is not, and does it nevertheless.
            let _ = sys::socket::shutdown(own, how);
        }
        Ok(())
    }
}

fn make(record: &Udp) -> Result<OwnedFd> {
    let made = sys::socket::open(record.family, SOCK_DGRAM, record.protocol());
    made.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::PROTONOSUPPORT) if record.is_lite => Error::Mismatch {
            what: "this kernel has no UDP-Lite".to_owned(),
        },
        _ => Error::kernel("make a UDP socket", error),
    })
}

fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Udp> {
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    let nature = Nature::of_socket(open)?;
    let is_lite = nature.protocol == IPPROTO_UDPLITE;
    let corked = sys::socket::number(own, IPPROTO_UDP, UDP_CORK).map_err(failed)? != 0;
    if corked && count(own, Count::Outbound).map_err(failed)? > 0 {
        return Err(open.unsupported("it has a datagram under construction (UDP_CORK)", None));
    }
    let local = sys::socket::name(own).map_err(failed)?;
    let remote = match sys::socket::peer_name(own) {
        Ok(remote) => remote,
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTCONN) => Vec::new(),
        Err(error) => return Err(failed(error)),
    };
    let options = Options::of(open, cx)?;
    refuse_queued(open, &options).map_err(failed)??;
    // Whoever looks takes it, also who looks for datagrams.
    let error = take_error(own).map_err(failed)?;
    let is_queued = ready::events(own, PollFlags::empty()).map_err(|errno| failed(errno.into()))?;
    let is_queued = is_queued.contains(PollFlags::ERR);
    let peeked = peek::messages(own, false);
    let is_refused = error == Some(Errno::CONNREFUSED);
    if is_refused {
        set_refused(&local, &remote, is_lite);
    } else if let Some(error) = error {
        log::warn!("{}: it is not told of an error: {error}", open.place());
    }
    if is_queued {
        return Err(open.unsupported(QUEUED, None));
    }
    let peeked = peeked.map_err(failed)?.unwrap_or_default();
    let queue = peeked.into_iter().map(|peeked| Datagram {
        from: peeked.received.name,
        data: peeked.data,
    });
    let shutdown = shutdown(open, nature.protocol).map_err(failed)?;
    Ok(Udp {
        family: nature.family,
        common: socket::Common::of(open),
        is_foreign: socket::bind::is_foreign(nature.family, &local),
        local,
        remote,
        is_shut: shutdown & RCV_SHUTDOWN != 0,
        is_mute: shutdown & SEND_SHUTDOWN != 0,
        groups: multicast::groups(open)?,
        queue: queue.collect(),
        is_refused,
        options,
        is_lite,
    })
}

const QUEUED: &str = "an error, or a message in its error queue, waits to be fetched: try again";

/// Refuses a socket that has an error, or something in its error queue, and asked for that queue:
/// to take the error and to put it back would add to it.
fn refuse_queued(open: &Open<'_>, options: &Options) -> std::io::Result<Result<()>> {
    const ASKED: [(i32, i32); 5] = [
        (0, 11),
        (41, 25),
        (SOL_SOCKET, 37),
        (SOL_SOCKET, 60),
        (0, 26),
    ];
    let own = open.own().map_err(std::io::Error::other)?;
    let told = ready::events(own, PollFlags::empty())?;
    let is_on = |(level, name)| {
        let value = options.value(level, name);
        value.is_some_and(|value| value.iter().any(|byte| *byte != 0))
    };
    if told.contains(PollFlags::ERR) && ASKED.into_iter().any(is_on) {
        return Ok(Err(open.unsupported(QUEUED, None)));
    }
    Ok(Ok(()))
}

/// The error that the next call would be told of; nobody is from then on.
fn take_error(own: BorrowedFd<'_>) -> std::io::Result<Option<Errno>> {
    const SO_ERROR: i32 = libc::SO_ERROR;
    let error = sys::socket::number(own, SOL_SOCKET, SO_ERROR)?;
    Ok((error != 0).then(|| Errno::from_raw_os_error(error)))
}

/// Has a connected socket told that nobody receives what it sends, as it was to be. Where that
/// cannot be done the message is lost, as it may be on any way.
fn set_refused(local: &[u8], remote: &[u8], is_lite: bool) {
    let told = match inet::parse(local).zip(inet::parse(remote)) {
        Some((local, remote)) => packet::send_unreachable(local, remote, is_lite),
        None => Err(Errno::DESTADDRREQ.into()),
    };
    if let Err(error) = told {
        let local = inet::print(local);
        log::warn!("udp {local}: it is not told that nobody receives what it sent: {error}");
    }
}

/// In which directions it is shut down, as bits.
fn shutdown(open: &Open<'_>, protocol: i32) -> std::io::Result<u8> {
    let own = open.own().map_err(std::io::Error::other)?;
    let told = ready::events(own, PollFlags::RDHUP)?;
    if told.contains(PollFlags::HUP) {
        return Ok(RCV_SHUTDOWN | SEND_SHUTDOWN);
    }
    if told.contains(PollFlags::RDHUP) {
        return Ok(RCV_SHUTDOWN);
    }
    // That it is shut for writing alone, poll does not tell; sock_diag does, of one with a port.
    match socket::inet_diag::udp_shutdown(protocol, socket::inode(open)) {
        Ok(shutdown) => Ok(shutdown.unwrap_or_default()),
        Err(error) => {
            log::debug!("{}: sock_diag does not tell of it: {error}", open.place());
            Ok(0)
        }
    }
}

/// Sends the unread datagrams again. Where that cannot be done they are lost, as datagrams are.
fn fill(record: &Udp, own: BorrowedFd<'_>) {
    if record.queue.is_empty() {
        return;
    }
    let shared = record
        .options
        .number(SOL_SOCKET, SO_REUSEPORT)
        .is_some_and(|on| on != 0);
    let mut lost = 0;
    for datagram in &record.queue {
        let ends = inet::parse(&record.local).zip(inet::parse(&datagram.from));
        let sent = match ends {
            // Another socket of the same address might get it.
            Some((local, from)) if !shared || !record.remote.is_empty() => {
                let (to, data) = (reachable(local, from), &datagram.data);
                packet::send_datagram(to, from, data, record.is_lite).is_ok()
            }
            _ => false,
        };
        lost += usize::from(!sent);
    }
    let arrived = count(own, Count::Inbound).is_ok_and(|bytes| bytes > 0)
        || peek::is_readable(own).unwrap_or(false);
    if lost > 0 || !arrived {
        let local = inet::print(&record.local);
        let lost = if arrived { lost } else { record.queue.len() };
        log::warn!("udp {local}: {lost} unread datagrams are lost");
    }
}

/// An address at which the host reaches a socket that may be bound to any: loopback, of the
/// sender's family.
fn reachable(local: SocketAddr, from: SocketAddr) -> SocketAddr {
    let ip = match (local.ip().is_unspecified(), from.ip().to_canonical()) {
        (false, _) => local.ip(),
        (true, IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        (true, IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    SocketAddr::new(ip, local.port())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket as Socket;
    use std::time::Duration;

    use super::super::socket::ledger::Kinds;
    use super::super::socket::testing::{World, cycle};
    use super::*;
    use crate::testing::alone;

    const KINDS: Kinds = Kinds::UDP;

    fn restored(socket: Socket) -> Socket {
        let [own] = cycle([socket.into()]);
        let socket = Socket::from(own);
        socket
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        socket
    }

    #[test]
    fn addresses_and_connections_survive() {
        alone!({
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let (one, two) = (Socket::bind(at).unwrap(), Socket::bind(at).unwrap());
                one.connect(two.local_addr().unwrap()).unwrap();
                one.set_broadcast(true).unwrap();
                let address = one.local_addr().unwrap();
                let wanted = Options::read(one.as_fd(), KINDS).unwrap();
                let one = restored(one);
                assert_eq!(one.local_addr().unwrap(), address);
                assert_eq!(one.peer_addr().unwrap(), two.local_addr().unwrap());
                let mut options = Options::read(one.as_fd(), KINDS).unwrap();
                // The time-out is the test's own.
                options
                    .values
                    .retain(|value| value.name != 20 || value.level != 1);
                let mut wanted = wanted;
                wanted
                    .values
                    .retain(|value| value.name != 20 || value.level != 1);
                assert_eq!(options, wanted);
                one.send(b"on").unwrap();
                assert_eq!(two.recv_from(&mut [0; 9]).unwrap(), (2, address));
            }
        });
    }

    #[test]
    fn unread_datagrams_come_back_with_their_senders() {
        alone!({
            for (at, to) in [
                ("127.0.0.1:0", "127.0.0.1"),
                ("0.0.0.0:0", "127.0.0.1"),
                ("[::]:0", "::1"),
                ("[::]:0", "127.0.0.1"),
            ] {
                let server = Socket::bind(at).unwrap();
                let port = server.local_addr().unwrap().port();
                let senders = [(); 2].map(|()| Socket::bind((to, 0)).unwrap());
                for (number, sender) in (0..).zip(&senders) {
                    sender.send_to(&[number; 1001], (to, port)).unwrap();
                    sender.send_to(&[], (to, port)).unwrap();
                }
                let server = restored(server);
                for (number, sender) in (0..).zip(&senders) {
                    let mut data = [9; 2000];
                    let (bytes, from) = server.recv_from(&mut data).unwrap();
                    assert_eq!(&data[..bytes], &[number; 1001]);
                    assert_eq!(from.port(), sender.local_addr().unwrap().port());
                    assert_eq!(server.recv_from(&mut data).unwrap().0, 0);
                }
                server.set_nonblocking(true).unwrap();
                server.recv_from(&mut [0]).unwrap_err();
            }
        });
    }

    #[test]
    fn more_than_the_buffer_takes_now_comes_back() {
        alone!({
            let server = Socket::bind("127.0.0.1:0").unwrap();
            let sender = Socket::bind("127.0.0.1:0").unwrap();
            for number in 0..5 {
                sender
                    .send_to(&[number; 30_000], server.local_addr().unwrap())
                    .unwrap();
            }
            // Made smaller than what waits.
            sys::socket::set_number(&server, SOL_SOCKET, 8, 1).unwrap();
            let wanted = sys::socket::number(&server, SOL_SOCKET, 8).unwrap();
            let server = restored(server);
            assert_eq!(sys::socket::number(&server, SOL_SOCKET, 8).unwrap(), wanted);
            for number in 0..5 {
                let mut data = vec![9; 40_000];
                let bytes = server.recv(&mut data).unwrap();
                assert_eq!(&data[..bytes], &[number; 30_000]);
            }
        });
    }

    #[test]
    fn a_refusal_is_still_reported() {
        alone!({
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let nobody = Socket::bind(at).unwrap().local_addr().unwrap();
                let sender = Socket::bind(at).unwrap();
                sender.connect(nobody).unwrap();
                let refused = |sender: &Socket| {
                    sender.set_nonblocking(true).unwrap();
                    let error = sender.recv(&mut [0]).unwrap_err();
                    Errno::from_io_error(&error)
                };
                sender.send(b"x").unwrap();
                let left = sender.try_clone().unwrap();
                let mut world = World::new(vec![sender.into()]);
                world.dump().unwrap();
                assert_eq!(
                    refused(&left),
                    Some(Errno::CONNREFUSED),
                    "left running, {at}"
                );
                assert_eq!(refused(&left), Some(Errno::AGAIN));
                drop(left);
                let sender = Socket::from(world.restore().unwrap().remove(0));
                assert_eq!(refused(&sender), Some(Errno::CONNREFUSED), "restored, {at}");
                assert_eq!(refused(&sender), Some(Errno::AGAIN));
            }
        });
    }

    #[test]
    fn multicast_groups_are_joined_again() {
        alone!({
            let socket = Socket::bind("0.0.0.0:0").unwrap();
            let group = Ipv4Addr::new(224, 0, 0, 251);
            let interface = 1u32.to_ne_bytes();
            let request = [&group.octets()[..], &[0; 4], &interface].concat();
            sys::socket::set_option(&socket, 0, multicast::IP_ADD_MEMBERSHIP, &request).unwrap();
            let mut world = World::new(vec![socket.into()]);
            world.dump().unwrap();
            let socket = world.restore().unwrap().remove(0);
            let again = sys::socket::set_option(&socket, 0, multicast::IP_ADD_MEMBERSHIP, &request);
            let errno = again.as_ref().err().and_then(Errno::from_io_error);
            assert_eq!(errno, Some(Errno::ADDRINUSE), "it is a member already");
        });
    }

    #[test]
    fn a_datagram_under_construction_is_refused() {
        alone!({
            let socket = Socket::bind("127.0.0.1:0").unwrap();
            socket.connect("127.0.0.1:9").unwrap();
            sys::socket::set_number(&socket, IPPROTO_UDP, UDP_CORK, 1).unwrap();
            socket.send(b"begun").unwrap();
            let error = World::new(vec![socket.into()]).dump().unwrap_err();
            assert!(error.to_string().contains("UDP_CORK"), "{error}");
        });
    }

    #[test]
    fn every_kind_of_shutdown_survives() {
        alone!({
            for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
                for (how, bits) in [(0, 1), (1, 2), (2, 3)] {
                    for connected in [false, true] {
                        let socket = Socket::bind(at).unwrap();
                        let peer = Socket::bind(at.replace("0.0.0.0", "127.0.0.1")).unwrap();
                        let to = peer.local_addr().unwrap();
                        if connected {
                            socket.connect(to).unwrap();
                        }
                        let _ = sys::socket::shutdown(&socket, how);
                        let [own] = cycle([socket.into()]);
                        let inode = rustix::fs::fstat(&own).unwrap().st_ino as u32;
                        let now = socket::inet_diag::udp_shutdown(IPPROTO_UDP, inode).unwrap();
                        assert_eq!(now, Some(bits), "{at} {how} {connected}");
                        let sent = Socket::from(own).send_to(b"x", to);
                        assert_eq!(sent.is_ok(), bits & SEND_SHUTDOWN == 0, "{sent:?}");
                    }
                }
            }
        });
    }

    #[test]
    fn a_port_is_shared_although_the_option_was_cleared() {
        alone!({
            for option in [2, SO_REUSEPORT] {
                for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
                    let shared = |at: &[u8]| {
                        let family = i32::from(at[0]);
                        let own = sys::socket::open(family, SOCK_DGRAM, IPPROTO_UDP).unwrap();
                        sys::socket::set_number(&own, SOL_SOCKET, option, 1).unwrap();
                        sys::socket::bind(&own, at).unwrap();
                        own
                    };
                    let free = Socket::bind(at).unwrap();
                    let name = sys::socket::name(&free).unwrap();
                    drop(free);
                    let all = [(); 3].map(|()| shared(&name));
                    for own in &all[..2] {
                        sys::socket::set_number(own, SOL_SOCKET, option, 0).unwrap();
                    }
                    let all = cycle(cycle(all));
                    for (own, is_on) in all.iter().zip([0, 0, 1]) {
                        assert_eq!(sys::socket::name(own).unwrap(), name);
                        let now = sys::socket::number(own, SOL_SOCKET, option).unwrap();
                        assert_eq!(now, is_on, "{at} {option}");
                    }
                }
            }
        });
    }

    #[test]
    fn a_port_that_somebody_else_has_is_not_shared() {
        alone!({
            let socket = Socket::bind("127.0.0.1:0").unwrap();
            let at = socket.local_addr().unwrap();
            let mut world = World::new(vec![socket.into()]);
            world.dump().unwrap();
            world.forget();
            let _other = Socket::bind(at).unwrap();
            let error = world.restore().unwrap_err();
            assert!(error.to_string().contains(&at.to_string()), "{error}");
        });
    }

    #[test]
    fn a_foreign_address_is_bound_again() {
        alone!({
            for (level, options) in [(0, [15, 19]), (41, [78, 75])] {
                for option in options {
                    let family = if level == 0 {
                        inet::AF_INET
                    } else {
                        inet::AF_INET6
                    };
                    let at: SocketAddr = if level == 0 {
                        ([192, 0, 2, 7], 5353).into()
                    } else {
                        ([0x2001, 0xdb8, 0, 0, 0, 0, 0, 7], 5353).into()
                    };
                    for kind in [SOCK_DGRAM, 1] {
                        let own = sys::socket::open(family, kind, 0).unwrap();
                        sys::socket::set_number(&own, level, option, 1).unwrap();
                        rustix::net::bind(&own, &at).unwrap();
                        sys::socket::set_number(&own, level, option, 0).unwrap();
                        let name = sys::socket::name(&own).unwrap();
                        let [own] = cycle(cycle([own]));
                        assert_eq!(sys::socket::name(&own).unwrap(), name);
                        assert_eq!(sys::socket::number(&own, level, option).unwrap(), 0);
                    }
                }
            }
        });
    }

    #[test]
    fn other_protocols_are_refused_by_name() {
        let Ok(socket) = sys::socket::open(15, 3, 2) else {
            testkit::skip!("no key management here");
        };
        let error = World::new(vec![socket]).dump().unwrap_err();
        let wanted = "a key management raw socket, protocol 2";
        assert!(error.to_string().contains(wanted), "{error}");
    }

    /// A socket of UDP-Lite at a loopback address; `None` where the kernel has none.
    fn lite(at: &str) -> Option<Socket> {
        let at: SocketAddr = at.parse().unwrap();
        let family = if at.is_ipv4() {
            inet::AF_INET
        } else {
            inet::AF_INET6
        };
        let own = sys::socket::open(family, SOCK_DGRAM, IPPROTO_UDPLITE).ok()?;
        rustix::net::bind(&own, &at).unwrap();
        Some(Socket::from(own))
    }

    #[test]
    fn partly_covered_datagrams_survive() {
        const COVERAGE: [i32; 2] = [10, 11];
        alone!({
            for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
                let (Some(server), Some(sender)) =
                    (lite(at), lite(&at.replace("0.0.0.0", "127.0.0.1")))
                else {
                    testkit::skip!("no UDP-Lite here");
                };
                for (name, bytes) in COVERAGE.into_iter().zip([20, 12]) {
                    sys::socket::set_number(&server, IPPROTO_UDPLITE, name, bytes).unwrap();
                }
                sys::socket::set_number(&sender, IPPROTO_UDPLITE, COVERAGE[0], 16).unwrap();
                let port = server.local_addr().unwrap().port();
                let to = SocketAddr::new(sender.local_addr().unwrap().ip(), port);
                sender.connect(to).unwrap();
                for number in 0..3 {
                    sender.send(&[number; 701]).unwrap();
                }
                sender.send(&[]).unwrap();
                let [server, sender] = cycle(cycle(cycle([server.into(), sender.into()])));
                for (name, bytes) in COVERAGE.into_iter().zip([20, 12]) {
                    let now = sys::socket::number(&server, IPPROTO_UDPLITE, name).unwrap();
                    assert_eq!(now, bytes, "{at}");
                }
                let now = sys::socket::number(&sender, IPPROTO_UDPLITE, COVERAGE[0]);
                assert_eq!(now.unwrap(), 16);
                let (server, sender) = (Socket::from(server), Socket::from(sender));
                server
                    .set_read_timeout(Some(Duration::from_secs(30)))
                    .unwrap();
                sender.send(b"later").unwrap();
                let mut data = [9; 2000];
                for number in 0..3 {
                    let (bytes, from) = server.recv_from(&mut data).unwrap();
                    assert_eq!(&data[..bytes], &[number; 701]);
                    assert_eq!(from, sender.local_addr().unwrap(), "{at}");
                }
                assert_eq!(server.recv(&mut data).unwrap(), 0);
                assert_eq!(server.recv(&mut data).unwrap(), 5);
            }
        });
    }

    #[test]
    fn a_refusal_of_udp_lite_is_still_reported() {
        alone!({
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let (Some(nobody), Some(sender)) = (lite(at), lite(at)) else {
                    testkit::skip!("no UDP-Lite here");
                };
                sender.connect(nobody.local_addr().unwrap()).unwrap();
                drop(nobody);
                sender.send(b"x").unwrap();
                let sender = restored(sender);
                sender.set_nonblocking(true).unwrap();
                let error = sender.recv(&mut [0]).unwrap_err();
                assert_eq!(
                    Errno::from_io_error(&error),
                    Some(Errno::CONNREFUSED),
                    "{at}"
                );
            }
        });
    }

    #[test]
    fn shutdowns_of_udp_lite_survive() {
        alone!({
            for (how, bits) in [(0, 1), (1, 2), (2, 3)] {
                let Some(socket) = lite("127.0.0.1:0") else {
                    testkit::skip!("no UDP-Lite here");
                };
                let _ = sys::socket::shutdown(&socket, how);
                let [own] = cycle([socket.into()]);
                let inode = rustix::fs::fstat(&own).unwrap().st_ino as u32;
                let now = socket::inet_diag::udp_shutdown(IPPROTO_UDPLITE, inode).unwrap();
                assert_eq!(now, Some(bits), "{how}");
            }
        });
    }

    #[test]
    fn damaged_payloads_are_refused() {
        assert!(UdpSocket::check(&Udp::default()).is_err());
        let group = Group {
            interface: 1,
            address: vec![1; 5],
        };
        let record = Udp {
            family: inet::AF_INET,
            groups: vec![group],
            ..Udp::default()
        };
        assert!(UdpSocket::check(&record).is_err());
    }
}
