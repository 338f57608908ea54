//! Sockets of every kind, and values for their options: the walk and the storm set these.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Entry, Kept, Nature, SOL_IPV6, SOL_SOCKET, SOL_TCP};

/// A socket as socket(2) makes it.
#[derive(Clone, Copy, Debug)]
pub struct Fresh {
    /// Its name in the tests.
    pub name: &'static str,
    /// The arguments of socket(2).
    pub nature: Nature,
}

impl Fresh {
    /// Makes one, close-on-exec; for tests.
    ///
    /// # Errors
    /// The errno of socket(2), where this kernel lacks the kind.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let Nature {
            family,
            kind,
            protocol,
        } = self.nature;
        sys::socket::open(family, kind, protocol)
    }
}

const fn fresh(name: &'static str, family: i32, kind: i32, protocol: i32) -> Fresh {
    Fresh {
        name,
        nature: Nature {
            family,
            kind,
            protocol,
        },
    }
}

/// One socket of each kind.
pub const FRESH: &[Fresh] = &[
    fresh("closed TCP, IPv4", 2, 1, 6),
    fresh("closed TCP, IPv6", 10, 1, 6),
    fresh("MPTCP, IPv4", 2, 1, 262),
    fresh("MPTCP, IPv6", 10, 1, 262),
    fresh("UDP, IPv4", 2, 2, 17),
    fresh("UDP, IPv6", 10, 2, 17),
    fresh("UDP-Lite, IPv4", 2, 2, 136),
    fresh("UDP-Lite, IPv6", 10, 2, 136),
    fresh("raw, IPv4", 2, 3, 253),
    fresh("raw, IPv6", 10, 3, 253),
    fresh("raw ICMP", 2, 3, 1),
    fresh("raw ICMPv6", 10, 3, 58),
    fresh("raw IGMP", 2, 3, 2),
    fresh("raw with headers, IPv4", 2, 3, 255),
    fresh("raw with headers, IPv6", 10, 3, 255),
    fresh("ping, IPv4", 2, 2, 1),
    fresh("ping, IPv6", 10, 2, 58),
    fresh("unix stream", 1, 1, 0),
    fresh("unix dgram", 1, 2, 0),
    fresh("unix seqpacket", 1, 5, 0),
    fresh("netlink route", 16, 3, 0),
    fresh("netlink sock_diag", 16, 3, 4),
    fresh("netlink xfrm", 16, 3, 6),
    fresh("netlink netfilter", 16, 3, 12),
    fresh("netlink uevent", 16, 3, 15),
    fresh("netlink generic", 16, 2, 16),
    fresh("packet", 17, 3, 0),
    fresh("packet without headers", 17, 2, 0),
    fresh("vsock stream", 40, 1, 0),
    fresh("vsock seqpacket", 40, 5, 0),
];

/// Options whose value the kernel changes by itself, of a socket with a connection; to bind one of
/// IPv6 says that it is for IPv6 alone.
pub const OF_CONNECTIONS: [(i32, i32); 3] = [(SOL_SOCKET, 49), (SOL_TCP, 2), (SOL_IPV6, 26)];

/// Values that options of this size may take.
pub fn values(bytes: usize) -> impl Iterator<Item = Vec<u8>> {
    const NUMBERS: [i32; 13] = [
        1, 0, 2, 3, 6, 16, 64, 150, 600, 5_000, 20_000, 65_537, 100_000,
    ];
    // An option of IPv4 that does nothing, ranges of ports, an interface in network order.
    let four = [
        [1, 1, 1, 0],
        0x7530_4e20_i32.to_ne_bytes(),
        1_i32.to_be_bytes(),
    ];
    let numbers = NUMBERS.map(i32::to_ne_bytes).into_iter().chain(four);
    let numbers = numbers.map(Vec::from).filter(move |_| bytes >= 4);
    let pairs = [(1, 7), (5, 0), (1 << 4 | 1 << 3, 0), (1, 1), (100_000, 0)];
    let pairs = pairs.map(|(one, two): (i32, i32)| [one.to_ne_bytes(), two.to_ne_bytes()].concat());
    let long = [
        // Algorithms of congestion control, interfaces, times.
        b"reno".to_vec(),
        b"cubic".to_vec(),
        b"lo\0".to_vec(),
        [5_u64.to_ne_bytes(), 0_u64.to_ne_bytes()].concat(),
        // Keys of TCP Fast Open, filters of ICMPv6.
        vec![7; 16],
        vec![0x55; 32],
        // A header of IPv6 with nothing in it, one of type 2.
        vec![0, 0, 1, 4, 0, 0, 0, 0],
        [&[0, 2, 2, 1, 0, 0, 0, 0][..], &[0xfc; 16]].concat(),
    ];
    let long = pairs.into_iter().chain(long);
    numbers.chain(long.filter(move |value| bytes >= 8 && value.len() <= bytes))
}

/// Sets an option to another value, the first that the kernel takes from value number `first` on,
/// round to the beginning; false if it takes none. For tests.
#[must_use]
pub fn change(own: BorrowedFd<'_>, entry: &Entry, kept: Kept, first: usize) -> bool {
    let read = || sys::socket::option(own, entry.level, entry.name, kept.bytes).ok();
    let Some(before) = read() else {
        return false;
    };
    let mut all: Vec<_> = values(kept.bytes).collect();
    let middle = first % all.len().max(1);
    all.rotate_left(middle);
    all.into_iter().any(|value| {
        sys::socket::set_option(own, entry.level, entry.name, &value).is_ok()
            && read().is_some_and(|now| now != before)
    })
}
