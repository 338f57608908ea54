//! Multicast groups that sockets have joined.
//!
//! - What: multicast groups
//! - Kept: the groups that IPv4 and IPv6 sockets have joined, each with its interface.
//! - Refused: "it has a multicast group with filtered sources".
//! - CRIU 4.2: not kept.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use crate::fd::Open;
use crate::{Error, Result};

pub(in crate::fd) const IP_ADD_MEMBERSHIP: i32 = libc::IP_ADD_MEMBERSHIP;
const IPV6_ADD_MEMBERSHIP: i32 = libc::IPV6_ADD_MEMBERSHIP;
/// With `IPPROTO_IP` and `IPPROTO_IPV6`.
const MCAST_MSFILTER: i32 = libc::MCAST_MSFILTER;
const MCAST_EXCLUDE: u32 = linux_raw_sys::net::MCAST_EXCLUDE;

/// Membership in a multicast group.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Group {
    /// The number of the interface.
    #[prost(uint32, tag = "1")]
    pub interface: u32,
    /// The group's address: 4 or 16 bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub address: Vec<u8>,
}

impl Group {
    /// Whether it has the address that it claims.
    pub(in crate::fd) fn is_address(&self) -> bool {
        matches!(self.address.len(), 4 | 16)
    }
}

/// The groups that a socket is a member of: the host's are known, and the socket is asked about
/// each.
///
/// # Errors
/// [`Error::Unsupported`] for one that takes some senders alone.
pub(in crate::fd) fn groups(open: &Open<'_>) -> Result<Vec<Group>> {
    let own = open.own()?;
    let mut groups = Vec::new();
    for group in known_groups() {
        let level = if group.address.len() == 4 { 0 } else { 41 };
        let mut filter = vec![0u8; 144];
        filter[..4].copy_from_slice(&group.interface.to_ne_bytes());
        let (family, at): (u16, usize) = if level == 0 { (2, 12) } else { (10, 16) };
        filter[8..10].copy_from_slice(&family.to_ne_bytes());
        filter[at..at + group.address.len()].copy_from_slice(&group.address);
        if sys::socket::ask_option(own, level, MCAST_MSFILTER, &mut filter).is_err() {
            continue;
        }
        let word = |at: usize| u32::from_ne_bytes(filter[at..at + 4].try_into().expect("4 bytes"));
        if (word(136), word(140)) != (MCAST_EXCLUDE, 0) {
            return Err(open.unsupported("it has a multicast group with filtered sources", None));
        }
        groups.push(group);
    }
    Ok(groups)
}

/// The multicast groups that any socket of the host has joined.
fn known_groups() -> Vec<Group> {
    let mut groups = Vec::new();
    // "1 lo : 1 V3", then a line for each group: "\t\t\t010000E0 1 0:00000000 0".
    let mut interface = 0;
    let table = sys::procfs::read_text("thread-self/net/igmp").unwrap_or_default();
    for line in table.lines().skip(1) {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if !line.starts_with('\t') {
            interface = first.parse().unwrap_or_default();
        } else if let Ok(address) = u32::from_str_radix(first, 16) {
            let address = address.to_ne_bytes().to_vec();
            groups.push(Group { interface, address });
        }
    }
    // "1    lo              ff020000000000000000000000000001     1 0000000C 0"
    let table = sys::procfs::read_text("thread-self/net/igmp6").unwrap_or_default();
    for line in table.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        let address = words
            .get(2)
            .and_then(|text| u128::from_str_radix(text, 16).ok());
        let interface = words.first().and_then(|text| text.parse().ok());
        if let (Some(address), Some(interface)) = (address, interface) {
            let address = address.to_be_bytes().to_vec();
            groups.push(Group { interface, address });
        }
    }
    groups
}

/// Has a socket join groups.
///
/// # Errors
/// The call's errno.
pub(in crate::fd) fn join(groups: &[Group], own: BorrowedFd<'_>) -> Result<()> {
    for group in groups {
        let interface = group.interface.to_ne_bytes();
        let joined = if group.address.len() == 4 {
            let request = [group.address.as_slice(), &[0; 4], &interface].concat();
            sys::socket::set_option(own, 0, IP_ADD_MEMBERSHIP, &request)
        } else {
            let request = [group.address.as_slice(), &interface].concat();
            sys::socket::set_option(own, 41, IPV6_ADD_MEMBERSHIP, &request)
        };
        joined.map_err(|error| {
            let address = match <[u8; 4]>::try_from(group.address.as_slice()) {
                Ok(four) => IpAddr::from(four),
                Err(_) => {
                    let all = group.address.as_slice().try_into().unwrap_or([0; 16]);
                    IpAddr::from(all)
                }
            };
            let interface = group.interface;
            Error::kernel(
                format!("join multicast group {address} on interface {interface}"),
                error,
            )
        })?;
    }
    Ok(())
}
