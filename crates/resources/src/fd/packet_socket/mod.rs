//! Packet sockets (packet(7)): what they are bound to, options, filters, memberships, groups for
//! fanout, and the ring that packets come into. Packets in the queue of one without a ring cannot
//! be delivered again.
//!
//! - Kept: protocol, interface by name, options, filter, memberships, group for fanout, the ring
//!   into which packets come with all that is in it.
//! - Refused: unread packets (see there); "its ring is full, or is just being used", for all of
//!   `--timeout`; "its ring is not understood"; "it has a ring to send from"; "a program spreads
//!   its packets (fanout)"; "it is in a group for fanout of an interface that is down"; "its
//!   interface is gone"; "sock_diag(7) does not tell of it".
//! - CRIU 4.2: kept, with a new ring: what is in it and where the kernel was in it is lost.

mod blocks;
mod diag;
mod feed;
mod ring;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sys::socket::Count;

use self::diag::Facts;
use self::ring::{Ring, SOL_PACKET};
use super::socket::options::{Moment, Options};
use super::socket::{self, Nature, hidden};
use super::{DumpContext, Kind, Open, RestoreContext, unread};
use crate::{Error, Result};

const AF_PACKET: i32 = libc::AF_PACKET;
const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
const SOCK_RAW: i32 = libc::SOCK_RAW;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_ERROR: i32 = libc::SO_ERROR;
const PACKET_ADD_MEMBERSHIP: i32 = libc::PACKET_ADD_MEMBERSHIP;
const PACKET_STATISTICS: i32 = libc::PACKET_STATISTICS;
const PACKET_COPY_THRESH: i32 = libc::PACKET_COPY_THRESH;
const PACKET_FANOUT: i32 = libc::PACKET_FANOUT;
/// Where an address has the interface.
const INTERFACE: usize = 4;
/// The longest address of an interface, in bytes.
const ADDRESS_MAX_BYTES: usize = 32;
/// The longest name of an interface, in bytes.
const NAME_MAX_BYTES: usize = 15;
/// Of kinds of fanout, those that a program of the owner's decides: `PACKET_FANOUT_CBPF`,
/// `PACKET_FANOUT_EBPF`.
const FANOUT_BY_PROGRAM: [u32; 2] = [6, 7];

/// Such a socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Packet {
    /// `SOCK_RAW` or `SOCK_DGRAM`.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "2")]
    pub common: socket::Common,
    /// The protocol of the packets that come; 0 for none.
    #[prost(uint32, tag = "3")]
    pub protocol: u32,
    /// The interface that it is bound to; empty for all.
    #[prost(bytes = "vec", tag = "4")]
    pub interface: Vec<u8>,
    /// Whether packets come in.
    #[prost(bool, tag = "5")]
    pub running: bool,
    /// What it is a member of.
    #[prost(message, repeated, tag = "6")]
    pub memberships: Vec<Membership>,
    /// `PACKET_FANOUT`, as the kernel tells it, where it is in a group.
    #[prost(uint32, optional, tag = "7")]
    pub fanout: Option<u32>,
    /// `PACKET_COPY_THRESH`
    #[prost(uint32, tag = "8")]
    pub copy_threshold: u32,
    /// The ring that packets come into.
    #[prost(message, optional, tag = "9")]
    pub ring: Option<Ring>,
    /// Its options.
    #[prost(message, required, tag = "10")]
    pub options: Options,
}

/// What an interface takes because of it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Membership {
    /// The interface.
    #[prost(bytes = "vec", tag = "1")]
    pub interface: Vec<u8>,
    /// `PACKET_MR_PROMISC`, …
    #[prost(uint32, tag = "2")]
    pub kind: u32,
    /// The address, of kinds that have one.
    #[prost(bytes = "vec", tag = "3")]
    pub address: Vec<u8>,
    /// How many times.
    #[prost(uint32, tag = "4")]
    pub count: u32,
}

/// The kind.
pub struct PacketSocket;

impl Kind for PacketSocket {
    type Record = Packet;
    const TAG: u16 = super::tags::PACKET;
    const NAME: &'static str = "packet socket";

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, is_ours)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Packet> {
        read(open, cx)
    }

    fn check(record: &Packet) -> Result<()> {
        record.options.check()?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        let nature = Nature {
            family: AF_PACKET,
            kind: record.kind,
            protocol: 0,
        };
        if !is_ours(nature) || record.protocol > u32::from(u16::MAX) {
            return corrupt("is another kind of socket");
        }
        let names = record.memberships.iter().map(|one| &one.interface);
        let nameless = |name: &Vec<u8>| name.len() > NAME_MAX_BYTES || name.contains(&0);
        if names.chain([&record.interface]).any(nameless) {
            return corrupt("has an interface without a name");
        }
        let is_kind = |one: &Membership| one.kind <= 3 && one.address.len() <= ADDRESS_MAX_BYTES;
        if !record.memberships.iter().all(is_kind) {
            return corrupt("has a membership that makes no sense");
        }
        let ring = record.ring.as_ref();
        if ring.is_some_and(|ring| ring.next != 0) && !record.has_heard() {
            return corrupt("has a ring with packets that cannot have come");
        }
        match ring.and_then(Ring::nonsense) {
            Some(what) => corrupt(what),
            None => Ok(()),
        }
    }

    fn describe(record: &Packet) -> String {
        let mut line = format!("protocol={:#06x}", record.protocol);
        if !record.interface.is_empty() {
            line += &format!(" on {}", String::from_utf8_lossy(&record.interface));
        }
        if let Some(Ring { shape, .. }) = &record.ring {
            let (version, blocks, bytes) = (shape.version + 1, shape.blocks, shape.block_bytes);
            line += &format!(" ring=v{version} {blocks}x{bytes}");
        }
        line
    }

    fn open(record: &Packet, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let own = sys::socket::open(AF_PACKET, record.kind, 0);
        let own = own.map_err(|error| Error::kernel("make a packet socket", error))?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        if let Some(ring) = &record.ring {
            ring.restore(own.as_fd(), record.has_heard(), cx)?;
        }
        Ok(own)
    }

    fn finish(record: &Packet, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        let failed = |error| Error::kernel("have no packets come to a packet socket", error);
        record.join(own)?;
        // What its own filter keeps away does not come before it is there.
        feed::reject_all(own).map_err(failed)?;
        record.bind(own)?;
        // Packets by which its ring was moved were none of its own.
        let counted = sys::socket::option(own, SOL_PACKET, PACKET_STATISTICS, 12);
        counted.map_err(failed)?;
        if record.options.filter.is_empty() {
            feed::detach_filter(own).map_err(failed)?;
        }
        record.options.apply(own, Moment::Late)
    }
}

impl Packet {
    /// Whether packets may have come: a protocol, once it is there, never becomes none again.
    const fn has_heard(&self) -> bool {
        self.protocol != 0
    }

    fn join(&self, own: BorrowedFd<'_>) -> Result<()> {
        if self.copy_threshold != 0 {
            let value = self.copy_threshold.cast_signed();
            sys::socket::set_number(own, SOL_PACKET, PACKET_COPY_THRESH, value)
                .map_err(|error| Error::kernel("set PACKET_COPY_THRESH", error))?;
        }
        for membership in &self.memberships {
            let interface = number_of(own, &membership.interface)?;
            let mut request = interface.to_ne_bytes().to_vec();
            let half = |number: usize| u16::try_from(number).unwrap_or_default().to_ne_bytes();
            request.extend(half(membership.kind as usize));
            request.extend(half(membership.address.len()));
            request.extend(&membership.address);
            request.resize(8 + membership.address.len().max(8), 0);
            for _ in 0..membership.count {
                sys::socket::set_option(own, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &request)
                    .map_err(|error| Error::kernel("add a membership of packets", error))?;
            }
        }
        Ok(())
    }

    fn bind(&self, own: BorrowedFd<'_>) -> Result<()> {
        let name = String::from_utf8_lossy(&self.interface);
        let interface = match self.interface.as_slice() {
            [] => 0,
            name => number_of(own, name)?,
        };
        if self.protocol != 0 || interface != 0 {
            let protocol = u16::try_from(self.protocol).expect("it was checked");
            sys::socket::bind(own, &address(protocol, interface)).map_err(|error| {
                Error::kernel(format!("bind a packet socket to interface {name:?}"), error)
            })?;
        }
        if !self.running {
            // That the interface is down was told already.
            let _ = sys::socket::number(own, SOL_SOCKET, SO_ERROR);
        }
        if let Some(fanout) = self.fanout {
            let value = fanout.cast_signed();
            sys::socket::set_number(own, SOL_PACKET, PACKET_FANOUT, value)
                .map_err(|error| Error::kernel("set PACKET_FANOUT", error))?;
        }
        Ok(())
    }
}

fn is_ours(nature: Nature) -> bool {
    nature.family == AF_PACKET && [SOCK_DGRAM, SOCK_RAW].contains(&nature.kind)
}

/// A `sockaddr_ll`.
fn address(protocol: u16, interface: u32) -> [u8; 20] {
    let mut address = [0; 20];
    address[..2].copy_from_slice(&(AF_PACKET as u16).to_ne_bytes());
    address[2..4].copy_from_slice(&protocol.to_be_bytes());
    address[INTERFACE..8].copy_from_slice(&interface.to_ne_bytes());
    // The length of an Ethernet address, which is all zero.
    address[11] = 6;
    address
}

fn number_of(own: BorrowedFd<'_>, name: &[u8]) -> Result<u32> {
    let name = String::from_utf8_lossy(name);
    rustix::net::netdevice::name_to_index(own, &name)
        .map_err(|errno| Error::kernel(format!("look for the interface {name:?}"), errno))
}

fn name_of(open: &Open<'_>, number: u32) -> Result<Vec<u8>> {
    let name = rustix::net::netdevice::index_to_name(open.own()?, number);
    let gone = |_| open.unsupported("its interface is gone", None);
    Ok(name.map_err(gone)?.into_bytes())
}

fn read(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Packet> {
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    let facts = diag::facts(socket::inode(open)).map_err(failed)?;
    let facts = facts.ok_or_else(|| open.unsupported("sock_diag(7) does not tell of it", None))?;
    if facts.sends_from_ring {
        return Err(open.unsupported("it has a ring to send from", None));
    }
    match facts.receive_ring {
        Some(_) => {
            let bytes = sys::socket::count(own, Count::Inbound).map_err(failed)?;
            let bytes = u64::try_from(bytes).unwrap_or(0);
            unread::check_open(open, cx.allow(), "packets", bytes)?;
        }
        None => unread::check_socket(open, cx.allow(), "packets")?,
    }
    hidden::refuse_errors(open)?;
    let local = sys::socket::name(own).map_err(failed)?;
    let number = local
        .get(INTERFACE..8)
        .and_then(|four| four.try_into().ok());
    let number = u32::from_ne_bytes(number.unwrap_or_default());
    let protocol = u16::from_be_bytes([local[2], local[3]]);
    let named = |(number, one): (u32, Membership)| {
        let interface = name_of(open, number)?;
        Ok(Membership { interface, ..one })
    };
    let memberships = facts.memberships.iter().cloned().map(named);
    Ok(Packet {
        kind: Nature::of_socket(open)?.kind,
        common: socket::Common::of(open),
        protocol: protocol.into(),
        interface: match number {
            0 => Vec::new(),
            number => name_of(open, number)?,
        },
        running: facts.running,
        memberships: memberships.collect::<Result<_>>()?,
        fanout: fanout(open, &facts)?,
        copy_threshold: facts.copy_threshold,
        options: Options::of(open, cx)?,
        ring: match facts.receive_ring {
            Some(shape) => Some(Ring::dump(open, shape, cx)?),
            None => None,
        },
    })
}

/// The group for fanout.
fn fanout(open: &Open<'_>, facts: &Facts) -> Result<Option<u32>> {
    if !facts.in_fanout {
        return Ok(None);
    }
    if !facts.running {
        let why = "it is in a group for fanout of an interface that is down";
        return Err(open.unsupported(why, None));
    }
    let fanout = sys::socket::number(open.own()?, SOL_PACKET, PACKET_FANOUT);
    let fanout = fanout.map_err(|error| Error::kernel(format!("read {}", open.place()), error))?;
    let fanout = fanout.cast_unsigned();
    if FANOUT_BY_PROGRAM.contains(&(fanout >> 16 & 0xff)) {
        return Err(open.unsupported("a program spreads its packets (fanout)", None));
    }
    Ok(Some(fanout))
}

/// Whether the socket behind `open` is one whose ring is mapped as a whole at `bytes` of addresses.
///
/// # Errors
/// [`Error::Kernel`].
pub fn has_ring_of(open: &Open<'_>, bytes: u64) -> Result<bool> {
    if !PacketSocket::claims(open) {
        return Ok(false);
    }
    let facts = diag::facts(socket::inode(open));
    let facts = facts.map_err(|error| Error::kernel(format!("ask {}", open.place()), error))?;
    let shape = facts.and_then(|facts| facts.receive_ring);
    let ring_bytes = shape.and_then(|shape| shape.bytes());
    Ok(ring_bytes.is_some_and(|ring| ring as u64 == bytes))
}

#[cfg(test)]
mod tests;
