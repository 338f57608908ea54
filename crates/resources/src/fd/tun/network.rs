//! Addresses, neighbours and routes of an interface: as rtnetlink(7) lists them, so they are
//! entered again.

use std::io;

use rustix::io::Errno;
use sys::netlink::{ACK, Batch, CREATE, DUMP, EXCLUSIVE, Netlink, REQUEST, attributes};

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = linux_raw_sys::net::AF_INET6 as u8;
const APPEND: u16 = 0x800;
const RTM_DELADDR: u16 = libc::RTM_DELADDR;
const IFA_ADDRESS: u16 = libc::IFA_ADDRESS;
const IFA_FLAGS: u16 = libc::IFA_FLAGS;
const IFA_F_TEMPORARY: u32 = libc::IFA_F_TEMPORARY;
const IFA_F_NODAD: u32 = libc::IFA_F_NODAD;
const IFA_F_TENTATIVE: u32 = libc::IFA_F_TENTATIVE;
const NUD_PERMANENT: u16 = libc::NUD_PERMANENT;
const RTA_OIF: u16 = libc::RTA_OIF;
/// `RTPROT_REDIRECT`, `RTPROT_KERNEL`, `RTPROT_RA`: routes that the kernel makes by itself.
const OF_KERNEL: [u8; 3] = [1, 2, 9];
const RTM_F_CLONED: u32 = libc::RTM_F_CLONED;
/// `RTNH_F_PERVASIVE`, `RTNH_F_ONLINK`
const SETTABLE: u32 = 2 | 4;
/// `RTA_MULTIPATH`, `RTA_ENCAP_TYPE`, `RTA_ENCAP`, `RTA_NH_ID`
const NOT_YET: [u16; 4] = [9, 21, 22, 30];
/// Where the head of an address or a neighbour has the number of its interface.
const INDEX: std::ops::Range<usize> = 4..8;
/// Where that of a route has its flags.
const FLAGS: std::ops::Range<usize> = 8..12;
const PROTOCOL: usize = 5;
const ENTRY_MAX_BYTES: usize = 4096;

/// One of the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// `RTM_GETADDR`
    Addresses,
    /// `RTM_GETNEIGH`
    Neighbours,
    /// `RTM_GETROUTE`
    Routes,
}

/// A route that is not saved with an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForeignRoute {
    /// It leads over another one, or over none.
    Elsewhere,
    /// It has several ways.
    Multipath,
}

/// One address, neighbour or route.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Entry {
    /// `struct ifaddrmsg`, `ndmsg` or `rtmsg`; the interface's number in it is the new one's.
    #[prost(bytes = "vec", tag = "1")]
    pub head: Vec<u8>,
    /// What follows.
    #[prost(message, repeated, tag = "2")]
    pub attributes: Vec<Attribute>,
}

/// An attribute of an entry.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Attribute {
    /// `IFA_LOCAL`, `RTA_DST`, …
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Its value.
    #[prost(bytes = "vec", tag = "2")]
    pub data: Vec<u8>,
}

impl List {
    /// The number of the message that enters one; that which asks for all is two more.
    fn new_one(self) -> u16 {
        match self {
            Self::Addresses => 20,
            Self::Neighbours => 28,
            Self::Routes => 24,
        }
    }

    fn head_bytes(self) -> usize {
        match self {
            Self::Addresses => 8,
            Self::Neighbours | Self::Routes => 12,
        }
    }

    /// Which attributes are kept.
    fn kept(self) -> &'static [u16] {
        match self {
            // IFA_ADDRESS, LOCAL, LABEL, BROADCAST, CACHEINFO, FLAGS, RT_PRIORITY, PROTO
            Self::Addresses => &[1, 2, 3, 4, 6, 8, 9, 11],
            // NDA_DST, LLADDR
            Self::Neighbours => &[1, 2],
            // RTA_DST, SRC, GATEWAY, PRIORITY, PREFSRC, METRICS, FLOW, TABLE, VIA, PREF
            Self::Routes => &[1, 2, 5, 6, 7, 8, 11, 15, 18, 20],
        }
    }

    /// Whether an entry of an image is one that a dump could have written.
    pub(super) fn is_sound(self, entry: &Entry) -> bool {
        let data = entry.attributes.iter().map(|one| one.data.len());
        let known = |one: &Attribute| self.kept().iter().any(|kind| u32::from(*kind) == one.kind);
        entry.head.len() == self.head_bytes()
            && [AF_INET, AF_INET6].contains(&entry.head[0])
            && entry.attributes.iter().all(known)
            && data.sum::<usize>() <= ENTRY_MAX_BYTES
    }

    /// Whether one of the host's entries belongs to the interface, and is kept.
    fn is_ours(self, payload: &[u8], index: u32) -> bool {
        let head = &payload[..self.head_bytes()];
        let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
        if ![AF_INET, AF_INET6].contains(&head[0]) {
            return false;
        }
        let attribute = |wanted: u16| {
            let mut all = attributes(payload, self.head_bytes());
            all.find(|(kind, data)| *kind == wanted && data.len() >= 4)
        };
        let number = |wanted: u16| attribute(wanted).map(|(_, data)| word(&data[..4]));
        match self {
            // Those that an advertisement has brought for a time come back with the next one.
            Self::Addresses => {
                let flags = number(IFA_FLAGS).unwrap_or_default();
                let passing = head[0] == AF_INET6 && flags & IFA_F_TEMPORARY != 0;
                word(&head[INDEX]) == index && !passing
            }
            Self::Neighbours => {
                let state = u16::from_ne_bytes([head[8], head[9]]);
                word(&head[INDEX]) == index && state == NUD_PERMANENT
            }
            Self::Routes => {
                let made = !OF_KERNEL.contains(&head[PROTOCOL]);
                let is_cached = word(&head[FLAGS]) & RTM_F_CLONED != 0;
                number(RTA_OIF) == Some(index) && made && !is_cached
            }
        }
    }

    /// The list of the host, of an address family, as payloads with a whole head.
    fn told(self, family: u8) -> io::Result<Vec<Vec<u8>>> {
        let mut head = vec![0; self.head_bytes()];
        head[0] = family;
        let mut batch = Batch::default();
        batch.message(self.new_one() + 2, REQUEST | DUMP, &head);
        let told = Netlink::route()?.list(batch)?.into_iter();
        let payloads = told.map(|message| message.payload);
        Ok(payloads
            .filter(|payload| payload.len() >= head.len())
            .collect())
    }

    /// Tells what a route is that somebody has entered and that is not saved with the interface.
    fn foreign(payload: &[u8], index: u32) -> Option<ForeignRoute> {
        let all = Self::Routes;
        let head = &payload[..all.head_bytes()];
        let flags = u32::from_ne_bytes(head[FLAGS].try_into().expect("four bytes"));
        let is_made = ![AF_INET, AF_INET6].contains(&head[0])
            || OF_KERNEL.contains(&head[PROTOCOL])
            || flags & RTM_F_CLONED != 0;
        if is_made {
            return None;
        }
        let mut attributes = attributes(payload, all.head_bytes());
        if attributes.any(|(kind, _)| NOT_YET.contains(&kind)) {
            return Some(ForeignRoute::Multipath);
        }
        (!all.is_ours(payload, index)).then_some(ForeignRoute::Elsewhere)
    }

    fn entry(self, payload: &[u8]) -> Entry {
        let mut head = payload[..self.head_bytes()].to_vec();
        if self == Self::Routes {
            let flags = u32::from_ne_bytes(head[FLAGS].try_into().expect("four bytes"));
            head[FLAGS].copy_from_slice(&(flags & SETTABLE).to_ne_bytes());
        } else {
            head[INDEX].fill(0);
        }
        let kept = attributes(payload, self.head_bytes());
        let kept = kept.filter(|(kind, _)| self.kept().contains(kind));
        let attribute = |(kind, data): (u16, &[u8])| Attribute {
            kind: kind.into(),
            data: data.to_vec(),
        };
        Entry {
            head,
            attributes: kept.map(attribute).collect(),
        }
    }

    /// The message that does something with an entry on the interface of this number.
    fn message(self, kind: u16, flags: u16, entry: &Entry, index: u32) -> Batch {
        let mut head = entry.head.clone();
        if self != Self::Routes {
            head[INDEX].copy_from_slice(&index.to_ne_bytes());
        }
        let is_six = head[0] == AF_INET6;
        let mut batch = Batch::default();
        batch.message(kind, REQUEST | ACK | flags, &head);
        for one in &entry.attributes {
            let number = u16::try_from(one.kind).expect("checked");
            match one.data.as_slice().try_into() {
                Ok(flags) if self == Self::Addresses && is_six && number == IFA_FLAGS => {
                    // It was looked for whether anybody else has it: it is at once there again.
                    let flags = u32::from_ne_bytes(flags) & !IFA_F_TENTATIVE | IFA_F_NODAD;
                    batch.attribute(number, &flags.to_ne_bytes())
                }
                _ => batch.attribute(number, &one.data),
            };
        }
        if self == Self::Routes {
            batch.attribute(RTA_OIF, &index.to_ne_bytes());
        }
        batch
    }
}

/// What the host has in a list for the interface of this number.
pub(super) fn read(list: List, index: u32) -> io::Result<Vec<Entry>> {
    let mut all = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let told = list.told(family)?;
        let payloads = told.iter().map(Vec::as_slice);
        for payload in payloads.filter(|payload| list.is_ours(payload, index)) {
            let mut attributes = attributes(payload, list.head_bytes());
            if list == List::Routes && attributes.any(|(kind, _)| NOT_YET.contains(&kind)) {
                log::warn!("a route over interface {index} has several ways: it is not saved");
                continue;
            }
            all.push(list.entry(payload));
        }
    }
    Ok(all)
}

/// The routes that are not saved with the interface of this number.
pub(crate) fn foreign_routes(index: u32) -> io::Result<Vec<ForeignRoute>> {
    const ALL_FAMILIES: u8 = 0;
    let told = List::Routes.told(ALL_FAMILIES)?;
    let foreign = told
        .iter()
        .filter_map(|payload| List::foreign(payload, index));
    Ok(foreign.collect())
}

/// Enters what was read before; an entry may need another one, so that the order is found out.
pub(super) fn apply(list: List, entries: &[Entry], index: u32) -> io::Result<()> {
    let mut left = entries.iter().collect::<Vec<_>>();
    loop {
        let mut last = None;
        let before = left.len();
        let mut failing = Vec::new();
        for entry in left {
            let flags = match (list, entry.head[0]) {
                // Another one with the same destination stands before it.
                (List::Routes, AF_INET) => CREATE | APPEND,
                _ => CREATE | EXCLUSIVE,
            };
            let batch = list.message(list.new_one(), flags, entry, index);
            match Netlink::route()?.apply(batch) {
                Ok(()) => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::EXIST) => {}
                Err(error) => {
                    failing.push(entry);
                    last = Some(error);
                }
            }
        }
        match last {
            None => return Ok(()),
            Some(error) if failing.len() == before => return Err(error),
            Some(_) => left = failing,
        }
    }
}

/// Takes addresses away that the kernel has added by itself.
pub(super) fn remove_others(entries: &[Entry], index: u32) -> io::Result<()> {
    /// Where the head of an address has the length of its network's part.
    const PREFIX: usize = 1;
    let address = |entry: &Entry| {
        let mut all = entry.attributes.iter();
        let found = all.find(|one| one.kind == u32::from(IFA_ADDRESS));
        (entry.head[PREFIX], found.map(|one| one.data.clone()))
    };
    for other in read(List::Addresses, index)? {
        if entries
            .iter()
            .any(|entry| address(entry) == address(&other))
        {
            continue;
        }
        let batch = List::Addresses.message(RTM_DELADDR, 0, &other, index);
        Netlink::route()?.apply(batch)?;
    }
    Ok(())
}
