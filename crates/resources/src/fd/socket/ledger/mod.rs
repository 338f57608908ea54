//! The ledger of socket options: every number of every level that a kernel knows, and its fate.
//!
//! The list is closed. A number that the running kernel answers, or that the kernel's headers name,
//! and that no entry has, fails a test (`tests`). An option that is refused has its words here.

mod inet;
mod others;
pub mod samples;
mod socket;
#[cfg(test)]
mod tests;
mod transport;

use super::Nature;
use super::inet::{AF_INET, AF_INET6};
use super::options::Moment;

pub(super) const SOL_IP: i32 = libc::SOL_IP;
pub(super) const SOL_SOCKET: i32 = libc::SOL_SOCKET;
pub(super) const SOL_TCP: i32 = libc::SOL_TCP;
pub(super) const SOL_UDP: i32 = libc::SOL_UDP;
pub(super) const SOL_VSOCK: i32 = 40;
pub(super) const SOL_IPV6: i32 = libc::SOL_IPV6;
pub(super) const SOL_ICMPV6: i32 = libc::SOL_ICMPV6;
pub(super) const SOL_UDPLITE: i32 = linux_raw_sys::net::SOL_UDPLITE as i32;
pub(super) const SOL_RAW: i32 = libc::SOL_RAW;
pub(super) const SOL_PACKET: i32 = libc::SOL_PACKET;
pub(super) const SOL_NETLINK: i32 = libc::SOL_NETLINK;
pub(super) const SOL_MPTCP: i32 = linux_raw_sys::net::SOL_MPTCP as i32;
/// The level of control messages of vsock's error queue.
pub(super) const SOL_VSOCK_ERRORS: i32 = 287;

/// Kinds of sockets, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds(u32);

impl Kinds {
    pub(in crate::fd) const TCP4: Self = Self(1);
    pub(in crate::fd) const TCP6: Self = Self(1 << 1);
    pub(in crate::fd) const MPTCP4: Self = Self(1 << 2);
    pub(in crate::fd) const MPTCP6: Self = Self(1 << 3);
    pub(in crate::fd) const UDP4: Self = Self(1 << 4);
    pub(in crate::fd) const UDP6: Self = Self(1 << 5);
    pub(in crate::fd) const UDPLITE: Self = Self(1 << 6);
    pub(in crate::fd) const RAW4: Self = Self(1 << 7);
    pub(in crate::fd) const RAW6: Self = Self(1 << 8);
    pub(in crate::fd) const PING4: Self = Self(1 << 9);
    pub(in crate::fd) const PING6: Self = Self(1 << 10);
    pub(in crate::fd) const UNIX: Self = Self(1 << 11);
    pub(in crate::fd) const NETLINK: Self = Self(1 << 12);
    pub(in crate::fd) const PACKET: Self = Self(1 << 13);
    pub(in crate::fd) const VSOCK: Self = Self(1 << 14);

    pub(in crate::fd) const ALL: Self = Self((1 << 15) - 1);
    pub(in crate::fd) const TCP: Self = Self::TCP4.or(Self::TCP6);
    pub(in crate::fd) const MPTCP: Self = Self::MPTCP4.or(Self::MPTCP6);
    pub(in crate::fd) const UDP: Self = Self::UDP4.or(Self::UDP6);
    /// Those with options of IPv4: an IPv6 socket may talk to IPv4, too.
    pub(in crate::fd) const IP: Self = Self::TCP
        .or(Self::UDP)
        .or(Self::RAW4)
        .or(Self::PING4.or(Self::PING6));
    /// Of those, the ones without connections.
    pub(in crate::fd) const IP_PACKETS: Self =
        Self::UDP.or(Self::RAW4).or(Self::PING4).or(Self::PING6);
    pub(in crate::fd) const IPV6: Self = Self::TCP6.or(Self::IPV6_PACKETS);
    pub(in crate::fd) const IPV6_PACKETS: Self = Self::UDP6.or(Self::RAW6).or(Self::PING6);

    pub(in crate::fd) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if any kind is in both.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The kinds of a socket of this `nature`; a UDP-Lite socket is a UDP socket, too. Empty for
    /// kinds that are not saved.
    #[must_use]
    pub fn of(nature: Nature) -> Self {
        const SOCK_STREAM: i32 = libc::SOCK_STREAM;
        const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
        const SOCK_RAW: i32 = libc::SOCK_RAW;
        const MPTCP: i32 = 262;
        let of_family = |four, six| match nature.family {
            AF_INET6 => six,
            _ => four,
        };
        match (nature.family, nature.kind, nature.protocol) {
            (1, ..) => Self::UNIX,
            (16, ..) => Self::NETLINK,
            (17, ..) => Self::PACKET,
            (40, ..) => Self::VSOCK,
            (AF_INET | AF_INET6, SOCK_STREAM, MPTCP) => of_family(Self::MPTCP4, Self::MPTCP6),
            (AF_INET | AF_INET6, SOCK_STREAM, _) => of_family(Self::TCP4, Self::TCP6),
            (AF_INET | AF_INET6, SOCK_RAW, _) => of_family(Self::RAW4, Self::RAW6),
            (AF_INET | AF_INET6, SOCK_DGRAM, 136) => {
                of_family(Self::UDP4, Self::UDP6).or(Self::UDPLITE)
            }
            (AF_INET | AF_INET6, SOCK_DGRAM, 17) => of_family(Self::UDP4, Self::UDP6),
            (AF_INET | AF_INET6, SOCK_DGRAM, _) => of_family(Self::PING4, Self::PING6),
            _ => Self(0),
        }
    }
}

/// The fate of an option at a dump and a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// getsockopt(2) tells its value, and setsockopt(2) gives it back.
    Kept(Kept),
    /// Another part of a socket's record has it: which one.
    Recorded(&'static str),
    /// Another option, or the same one of another level, has the same state: which one.
    Alias(&'static str),
    /// A dump refuses a socket on which it was used; the words of the refusal.
    Refused(&'static str),
    /// It is an action, or tells what the kernel knows by itself: which of both, and what.
    Stateless(&'static str),
    /// It tells the kernel's own count or number of this very socket, which begins anew.
    Renewed(&'static str),
}

/// How an option is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The most bytes that its value has.
    pub bytes: usize,
    /// When it is given back.
    pub moment: Moment,
    /// The kinds of sockets that have it.
    pub of: Kinds,
}

/// One option of one level.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// `SOL_SOCKET`, …
    pub level: i32,
    /// Its number.
    pub name: i32,
    /// Its name in the kernel's headers.
    pub label: &'static str,
    /// Its fate at a dump and a restore.
    pub fate: Fate,
}

const fn entry(level: i32, name: i32, label: &'static str, fate: Fate) -> Entry {
    Entry {
        level,
        name,
        label,
        fate,
    }
}

const fn early(level: i32, name: i32, label: &'static str, of: Kinds, bytes: usize) -> Entry {
    let moment = Moment::Early;
    entry(level, name, label, Fate::Kept(Kept { bytes, moment, of }))
}

const fn late(level: i32, name: i32, label: &'static str, of: Kinds, bytes: usize) -> Entry {
    let moment = Moment::Late;
    entry(level, name, label, Fate::Kept(Kept { bytes, moment, of }))
}

const fn recorded(level: i32, name: i32, label: &'static str, by: &'static str) -> Entry {
    entry(level, name, label, Fate::Recorded(by))
}

const fn alias(level: i32, name: i32, label: &'static str, of: &'static str) -> Entry {
    entry(level, name, label, Fate::Alias(of))
}

const fn refused(level: i32, name: i32, label: &'static str, why: &'static str) -> Entry {
    entry(level, name, label, Fate::Refused(why))
}

const fn stateless(level: i32, name: i32, label: &'static str, why: &'static str) -> Entry {
    entry(level, name, label, Fate::Stateless(why))
}

const fn renewed(level: i32, name: i32, label: &'static str, what: &'static str) -> Entry {
    entry(level, name, label, Fate::Renewed(what))
}

/// All entries, in the order in which options are given back.
pub fn all() -> impl Iterator<Item = &'static Entry> {
    let tables = [
        transport::BEFORE_SUBFLOW,
        inet::BEFORE_DEVICE,
        socket::ENTRIES,
        inet::IP,
        inet::IPV6,
        transport::ENTRIES,
        others::ENTRIES,
        socket::LAST,
    ];
    tables.into_iter().flatten()
}

/// The entry of an option, if it is known.
#[must_use]
pub fn find(level: i32, name: i32) -> Option<&'static Entry> {
    all().find(|entry| (entry.level, entry.name) == (level, name))
}

/// The options that are kept of a kind of sockets, and how.
pub fn kept(of: Kinds) -> impl Iterator<Item = (&'static Entry, Kept)> {
    all().filter_map(move |entry| match entry.fate {
        Fate::Kept(kept) if kept.of.meets(of) => Some((entry, kept)),
        _ => None,
    })
}
