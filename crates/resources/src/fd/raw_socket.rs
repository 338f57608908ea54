//! Raw sockets of IPv4 and IPv6, and those of ping(8): protocol, addresses, options, multicast
//! groups. Packets that were not read cannot be delivered again.
//!
//! - Kept: raw sockets of IPv4 and IPv6 and those of ping(8): protocol, addresses, options, filter,
//!   multicast groups.
//! - Refused: unread packets (see there).
//! - CRIU 4.2: kept without multicast groups and without unread packets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::socket::multicast::{self, Group};
use super::socket::options::{Moment, Options};
use super::socket::{self, Nature, hidden, inet};
use super::{DumpContext, Kind, Open, RestoreContext, unread};
use crate::{Error, Result};

const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
const SOCK_RAW: i32 = libc::SOCK_RAW;
const IPPROTO_ICMP: i32 = libc::IPPROTO_ICMP;
const IPPROTO_ICMPV6: i32 = libc::IPPROTO_ICMPV6;

/// Where a `sockaddr_in6` has the interface of a link-local address.
const SCOPE: std::ops::Range<usize> = 24..28;

/// Such a socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Raw {
    /// `AF_INET` or `AF_INET6`.
    #[prost(int32, tag = "1")]
    pub family: i32,
    /// `SOCK_RAW`, or `SOCK_DGRAM` for one that can only ask for echoes.
    #[prost(int32, tag = "2")]
    pub kind: i32,
    /// The protocol of its packets.
    #[prost(int32, tag = "3")]
    pub protocol: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "4")]
    pub common: socket::Common,
    /// Its own address, as a `sockaddr`; instead of a port, the number of its echoes.
    #[prost(bytes = "vec", tag = "5")]
    pub local: Vec<u8>,
    /// What it is connected to; empty for nothing.
    #[prost(bytes = "vec", tag = "6")]
    pub remote: Vec<u8>,
    /// Whether its own address was none of the host's.
    #[prost(bool, tag = "7")]
    pub is_foreign: bool,
    /// The multicast groups that it has joined.
    #[prost(message, repeated, tag = "8")]
    pub groups: Vec<Group>,
    /// Its options.
    #[prost(message, required, tag = "9")]
    pub options: Options,
}

/// The kind.
pub struct RawSocket;

impl Kind for RawSocket {
    type Record = Raw;
    const TAG: u16 = super::tags::RAW;
    const NAME: &'static str = "raw socket";
    const STAYS: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, is_ours)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Raw> {
        read(open, cx)
    }

    fn check(record: &Raw) -> Result<()> {
        record.options.check()?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        let nature = Nature {
            family: record.family,
            kind: record.kind,
            protocol: record.protocol,
        };
        if !is_ours(nature) {
            return corrupt("is another kind of socket");
        }
        if !record.groups.iter().all(Group::is_address) {
            return corrupt("has a multicast group without an address");
        }
        Ok(())
    }

    fn describe(record: &Raw) -> String {
        let mut line = format!("protocol={}", record.protocol);
        for (word, address) in [(" at ", &record.local), (" to ", &record.remote)] {
            if is_bound(record, address) {
                line += word;
                line += &inet::print(address);
            }
        }
        line
    }

    fn open(record: &Raw, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let made = sys::socket::open(record.family, record.kind, record.protocol);
        let own = made.map_err(|error| Error::kernel("make a raw socket", error))?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
        if is_bound(record, &record.local) {
            let at = (record.local.as_slice(), record.is_foreign);
            socket::bind::bind(own.as_fd(), at, cx)
                .map_err(|error| Error::kernel(format!("bind a raw socket to {local}"), error))?;
        }
        if !record.remote.is_empty() {
            sys::socket::connect(&own, &record.remote).map_err(|error| {
                Error::kernel(format!("connect a raw socket to {remote}"), error)
            })?;
        }
        multicast::join(&record.groups, own.as_fd())?;
        Ok(own)
    }

    fn finish(record: &Raw, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.options.restore_bound(own)?;
        record.options.apply(own, Moment::Late)
    }
}

fn is_ours(nature: Nature) -> bool {
    let echoes = [IPPROTO_ICMP, IPPROTO_ICMPV6].contains(&nature.protocol);
    let inet = [inet::AF_INET, inet::AF_INET6].contains(&nature.family);
    inet && (nature.kind == SOCK_RAW || nature.kind == SOCK_DGRAM && echoes)
}

/// Whether an address says anything: the port of a raw socket is its protocol's number.
fn is_bound(record: &Raw, address: &[u8]) -> bool {
    let has_number = |port: u16| record.kind == SOCK_DGRAM && port != 0;
    let address = inet::parse(address);
    address.is_some_and(|address| !address.ip().is_unspecified() || has_number(address.port()))
}

fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Raw> {
    let own = open.own()?;
    hidden::refuse_errors(open)?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    unread::check_socket(open, cx.allow(), "packets")?;
    let nature = Nature::of_socket(open)?;
    let local = sys::socket::name(own).map_err(failed)?;
    let mut remote = remote(nature, socket::inode(open)).map_err(failed)?;
    // The tables do not tell the interface of an address that is one of many; its own does.
    if let (Some(to), Some(from)) = (remote.get_mut(SCOPE), local.get(SCOPE)) {
        to.copy_from_slice(from);
    }
    Ok(Raw {
        family: nature.family,
        kind: nature.kind,
        protocol: nature.protocol,
        common: socket::Common::of(open),
        is_foreign: socket::bind::is_foreign(nature.family, &local),
        local,
        remote,
        groups: multicast::groups(open)?,
        options: Options::of(open, cx)?,
    })
}

/// What a socket is connected to, as a `sockaddr`. getpeername(2) tells nothing where no port was
/// named, as is usual; the kernel's tables do.
fn remote(nature: Nature, inode: u32) -> std::io::Result<Vec<u8>> {
    let table = match (nature.kind, nature.family) {
        (SOCK_RAW, inet::AF_INET) => "raw",
        (SOCK_RAW, _) => "raw6",
        (_, inet::AF_INET) => "icmp",
        _ => "icmp6",
    };
    let table = sys::procfs::read_text(format_args!("thread-self/net/{table}"))?;
    let lines = table.lines().skip(1).map(str::split_ascii_whitespace);
    let mut lines = lines.map(Iterator::collect::<Vec<_>>);
    let inode = inode.to_string();
    // "200: 0100007F:00C8 0200007F:0000 01 …": connected is 01, as of TCP.
    let connected = |words: &[&str]| words.get(3) == Some(&"01") && words.get(9) == Some(&&*inode);
    let found = lines.find(|words| connected(words));
    let address = found.and_then(|words| sockaddr(nature.family, words[2]));
    Ok(address.unwrap_or_default())
}

/// Reads an address of such a table: words of 32 bits in the host's order, and the port.
fn sockaddr(family: i32, text: &str) -> Option<Vec<u8>> {
    let (address, port) = text.split_once(':')?;
    let words = (0..address.len() / 8).map(|word| address.get(8 * word..8 * word + 8));
    let words = words.map(|word| u32::from_str_radix(word?, 16).ok());
    let words = words.collect::<Option<Vec<_>>>()?;
    let address = words.into_iter().flat_map(u32::to_ne_bytes);
    let mut bytes = u16::try_from(family).ok()?.to_ne_bytes().to_vec();
    bytes.extend(u16::from_str_radix(port, 16).ok()?.to_be_bytes());
    let (before, after) = match family {
        inet::AF_INET => (0, 8),
        _ => (4, 4),
    };
    bytes.resize(bytes.len() + before, 0);
    bytes.extend(address);
    bytes.resize(bytes.len() + after, 0);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::socket::testing::World;
    use super::*;
    use crate::testing::alone;

    fn loopback(family: i32, number: u16) -> Vec<u8> {
        let mut bytes = vec![0; if family == inet::AF_INET { 16 } else { 28 }];
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&number.to_be_bytes());
        match family {
            inet::AF_INET => bytes[4..8].copy_from_slice(&[127, 0, 0, 1]),
            _ => bytes[23] = 1,
        }
        bytes
    }

    /// Asks for an echo, and whether it comes.
    fn echoes(socket: &OwnedFd) -> bool {
        let request = [8, 0, 0xf7, 0xfd, 0, 1, 0, 1];
        sys::socket::send(socket, &request, sys::socket::Along::default(), 0).expect("sent");
        let mut packet = [0; 256];
        let mut times = (0..200).map(|_| {
            let received = sys::socket::receive(socket, &mut packet, 0x40);
            received.is_ok_and(|received| received.len > 0) || {
                std::thread::sleep(std::time::Duration::from_millis(5));
                false
            }
        });
        times.any(|came| came)
    }

    #[test]
    fn protocol_addresses_and_filters_survive() {
        testkit::needs_root!();
        alone!({
            let icmp = sys::socket::open(2, SOCK_RAW, IPPROTO_ICMP).unwrap();
            sys::socket::bind(&icmp, &loopback(2, 0)).unwrap();
            sys::socket::connect(&icmp, &loopback(2, 0)).unwrap();
            // Of all kinds of messages, answers to echo requests alone.
            sys::socket::set_number(&icmp, 255, 1, !1).unwrap();
            let six = sys::socket::open(10, SOCK_RAW, 200).unwrap();
            sys::socket::set_number(&six, 41, 7, 4).unwrap();
            sys::socket::connect(&six, &loopback(10, 0)).unwrap();
            let header = sys::socket::open(2, SOCK_RAW, 255).unwrap();
            let mut world = World::new(vec![icmp, six, header]);
            let told = [
                "protocol=1 at 127.0.0.1:1 to 127.0.0.1:0",
                "protocol=200 at [::1]:200 to [::1]:0",
                "protocol=255",
            ];
            world.dump().unwrap();
            assert_eq!(world.lines(), told);
            let [icmp, six, header] = world.restore().unwrap().try_into().unwrap();
            assert_eq!(sys::socket::number(&icmp, 255, 1).unwrap(), !1);
            assert_eq!(sys::socket::number(&six, 41, 7).unwrap(), 4);
            assert_eq!(sys::socket::number(&header, 0, 3).unwrap(), 1);
            let mut world = World::new(vec![icmp, six, header]);
            world.dump().unwrap();
            assert_eq!(world.lines(), told);
        });
    }

    #[test]
    fn who_asks_for_echoes_gets_them_afterwards() {
        testkit::needs_root!();
        alone!({
            // Who may ask is the namespace's own.
            std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").unwrap();
            let ping = sys::socket::open(2, SOCK_DGRAM, IPPROTO_ICMP).unwrap();
            sys::socket::bind(&ping, &loopback(2, 4711)).unwrap();
            sys::socket::connect(&ping, &loopback(2, 0)).unwrap();
            assert!(echoes(&ping));
            let mut world = World::new(vec![ping]);
            world.dump().unwrap();
            let told = "protocol=1 at 127.0.0.1:4711 to 127.0.0.1:0";
            assert_eq!(world.lines(), [told]);
            let [ping] = world.restore().unwrap().try_into().unwrap();
            assert!(echoes(&ping));
        });
    }

    #[test]
    fn unread_packets_are_refused() {
        testkit::needs_root!();
        let socket = sys::socket::open(2, SOCK_RAW, 201).unwrap();
        sys::socket::connect(&socket, &loopback(2, 0)).unwrap();
        let along = sys::socket::Along::default();
        sys::socket::send(&socket, b"packet", along, 0).unwrap();
        let error = World::new(vec![socket]).dump().unwrap_err().to_string();
        assert!(error.contains("unread packets"), "{error}");
    }
}
