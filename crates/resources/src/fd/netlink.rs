//! Netlink sockets with nothing under way: protocol, address and multicast groups.
//!
//! - Kept: protocol, port, whom it talks to, multicast groups (any number of them), options.
//! - Refused: unread messages (see there).
//! - CRIU 4.2: the same; refuses groups above the 32nd, and groups without a port.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::socket::options::{Moment, Options};
use super::socket::{self, Nature, hidden};
use super::{DumpContext, Kind, Open, RestoreContext, unread};
use crate::{Error, Result};

const AF_NETLINK: i32 = libc::AF_NETLINK;
const SOCK_RAW: i32 = libc::SOCK_RAW;
const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
const SOL_NETLINK: i32 = libc::SOL_NETLINK;
const NETLINK_ADD_MEMBERSHIP: i32 = libc::NETLINK_ADD_MEMBERSHIP;
const NETLINK_LIST_MEMBERSHIPS: i32 = libc::NETLINK_LIST_MEMBERSHIPS;
/// More groups than any protocol has, as a bit map.
const GROUPS_BYTES: usize = 512;
/// The size of `sockaddr_nl`.
const ADDRESS_BYTES: usize = 12;

/// A netlink socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Netlink {
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// `NETLINK_ROUTE`, …
    #[prost(int32, tag = "2")]
    pub protocol: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "3")]
    pub common: socket::Common,
    /// Its address, 0 for none.
    #[prost(uint32, tag = "4")]
    pub port: u32,
    /// Whom it sends to without saying so: address, groups.
    #[prost(uint32, repeated, tag = "5")]
    pub peer: Vec<u32>,
    /// The multicast groups that it has joined.
    #[prost(uint32, repeated, tag = "6")]
    pub groups: Vec<u32>,
    /// Its options.
    #[prost(message, required, tag = "7")]
    pub options: Options,
}

/// The kind.
pub struct NetlinkSocket;

impl Kind for NetlinkSocket {
    type Record = Netlink;
    const TAG: u16 = super::tags::NETLINK;
    const NAME: &'static str = "netlink socket";

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, |nature| nature.family == AF_NETLINK)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Netlink> {
        read(open, cx)
    }

    fn check(record: &Netlink) -> Result<()> {
        record.options.check()?;
        if ![SOCK_RAW, SOCK_DGRAM].contains(&record.kind) {
            return Err(Error::corrupt(Self::NAME, "of no known type"));
        }
        Ok(())
    }

    fn describe(record: &Netlink) -> String {
        let (protocol, port, groups) = (record.protocol, record.port, record.groups.len());
        format!("protocol={protocol} port={port} groups={groups}")
    }

    fn open(record: &Netlink, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let own = sys::socket::open(AF_NETLINK, record.kind, record.protocol)
            .map_err(|error| Error::kernel("make a netlink socket", error))?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        if record.port != 0 {
            sys::socket::bind(&own, &address(record.port, 0)).map_err(|error| {
                Error::kernel(
                    format!("bind a netlink socket to port {}", record.port),
                    error,
                )
            })?;
        }
        for group in &record.groups {
            let group = group.cast_signed();
            sys::socket::set_number(&own, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
                .map_err(|error| Error::kernel(format!("join netlink group {group}"), error))?;
        }
        if let [port, groups] = *record.peer.as_slice() {
            sys::socket::connect(&own, &address(port, groups))
                .map_err(|error| Error::kernel("connect a netlink socket", error))?;
        }
        Ok(own)
    }

    fn finish(record: &Netlink, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.options.apply(own, Moment::Late)
    }
}

fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Netlink> {
    let own = open.own()?;
    hidden::refuse_errors(open)?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    unread::check_socket(open, cx.allow(), "messages")?;
    let nature = Nature::of_socket(open)?;
    let (port, _) = parse(&sys::socket::name(own).map_err(failed)?);
    let (peer, groups) = parse(&sys::socket::peer_name(own).map_err(failed)?);
    let mut joined = vec![0; GROUPS_BYTES];
    let bits = sys::socket::ask_option(own, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, &mut joined)
        .map_err(failed)?;
    joined.truncate(bits);
    let bit = |index: &usize| joined[index / 8] & (1 << (index % 8)) != 0;
    let joined = (0..joined.len() * 8).filter(bit);
    Ok(Netlink {
        kind: nature.kind,
        protocol: nature.protocol,
        common: socket::Common::of(open),
        port,
        peer: if (peer, groups) == (0, 0) {
            Vec::new()
        } else {
            vec![peer, groups]
        },
        groups: joined
            .filter_map(|index| u32::try_from(index + 1).ok())
            .collect(),
        options: Options::of(open, cx)?,
    })
}

/// Port and groups of a `sockaddr_nl`.
fn parse(address: &[u8]) -> (u32, u32) {
    let word = |at: usize| {
        let bytes = address
            .get(at..at + 4)
            .and_then(|four| four.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    };
    (word(4), word(8))
}

fn address(port: u32, groups: u32) -> [u8; ADDRESS_BYTES] {
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..2].copy_from_slice(&16u16.to_ne_bytes());
    bytes[4..8].copy_from_slice(&port.to_ne_bytes());
    bytes[8..].copy_from_slice(&groups.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::socket::testing::{World, cycle};
    use super::*;
    use crate::testing::alone;

    const ROUTE: i32 = 0;

    #[test]
    fn address_groups_and_options_survive() {
        alone!({
            let socket = sys::socket::open(AF_NETLINK, SOCK_RAW, ROUTE).unwrap();
            sys::socket::bind(&socket, &address(4_000_123, 0)).unwrap();
            for group in [1, 5] {
                let join = NETLINK_ADD_MEMBERSHIP;
                sys::socket::set_number(&socket, SOL_NETLINK, join, group).unwrap();
            }
            sys::socket::set_number(&socket, SOL_NETLINK, 10, 1).unwrap();
            let mut world = World::new(vec![socket]);
            world.dump().unwrap();
            assert_eq!(world.lines(), ["protocol=0 port=4000123 groups=2"]);
            let [socket] = world.restore().unwrap().try_into().unwrap();
            assert_eq!(parse(&sys::socket::name(&socket).unwrap()).0, 4_000_123);
            assert_eq!(sys::socket::number(&socket, SOL_NETLINK, 10).unwrap(), 1);
            let mut world = World::new(vec![socket]);
            world.dump().unwrap();
            assert_eq!(world.lines(), ["protocol=0 port=4000123 groups=2"]);
        });
    }

    #[test]
    fn an_unbound_one_stays_unbound() {
        let socket = sys::socket::open(AF_NETLINK, SOCK_DGRAM, ROUTE).unwrap();
        let [socket] = cycle([socket]);
        assert_eq!(parse(&sys::socket::name(&socket).unwrap()), (0, 0));
    }

    #[test]
    fn unread_messages_are_refused() {
        let socket = sys::socket::open(AF_NETLINK, SOCK_RAW, ROUTE).unwrap();
        // An empty request is answered: "no such message".
        let request = [16u32.to_ne_bytes(), 5u32.to_ne_bytes(), [0; 4], [0; 4]].concat();
        let kind = 0xffff_u16.to_ne_bytes();
        let request = [&request[..4], &kind, &[5, 0], &request[8..]].concat();
        sys::socket::send(&socket, &request, sys::socket::Along::default(), 0).unwrap();
        let error = World::new(vec![socket]).dump().unwrap_err();
        assert!(error.to_string().contains("unread messages"), "{error}");
    }
}
