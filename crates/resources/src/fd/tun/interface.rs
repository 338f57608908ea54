//! The interface of a queue, as rtnetlink(7) tells of it and makes it again.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use sys::netlink::{ACK, Batch, Message, Netlink, REQUEST, attributes, word};
use sys::tun::{self, Number, Setting};

use super::failed;
use super::network::{self, Entry, List};
use super::settings::{self, Value};
use crate::{Error, Result};

const RTM_NEWLINK: u16 = libc::RTM_NEWLINK;
const RTM_GETLINK: u16 = libc::RTM_GETLINK;
const RTM_SETLINK: u16 = libc::RTM_SETLINK;
/// The size of `struct ifinfomsg`.
const HEAD_BYTES: usize = 16;

const IFLA_ADDRESS: u16 = libc::IFLA_ADDRESS;
const IFLA_BROADCAST: u16 = libc::IFLA_BROADCAST;
const IFLA_IFNAME: u16 = libc::IFLA_IFNAME;
const IFLA_MTU: u16 = libc::IFLA_MTU;
const IFLA_MASTER: u16 = libc::IFLA_MASTER;
const IFLA_TXQLEN: u16 = libc::IFLA_TXQLEN;
const IFLA_LINKINFO: u16 = libc::IFLA_LINKINFO;
const IFLA_IFALIAS: u16 = libc::IFLA_IFALIAS;
const IFLA_GROUP: u16 = libc::IFLA_GROUP;
const IFLA_CARRIER: u16 = libc::IFLA_CARRIER;
const IFLA_INFO_DATA: u16 = libc::IFLA_INFO_DATA;
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_PI: u16 = 4;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;

/// `IFF_UP`, `IFF_NOARP`, `IFF_PROMISC`, `IFF_ALLMULTI`, `IFF_MULTICAST`, `IFF_DYNAMIC`
const SETTABLE: u32 = 0x1 | 0x80 | 0x100 | 0x200 | 0x1000 | 0x8000;
/// The longest hardware address (`MAX_ADDR_LEN`) and alias (`IFALIASZ`).
const ADDRESS_MAX_BYTES: usize = 32;
const ALIAS_MAX_BYTES: usize = 255;

/// What `TUNSETOFFLOAD` is told, by the features that follow from it.
const OFFLOADS: &[(&str, u32)] = &[
    ("tx-checksum-ip-generic", 0x1),
    ("tx-tcp-segmentation", 0x2),
    ("tx-tcp6-segmentation", 0x4),
    ("tx-tcp-ecn-segmentation", 0x8),
    // TUN_F_USO4 and TUN_F_USO6: the kernel takes both or none.
    ("tx-udp-segmentation", 0x20 | 0x40),
];

/// An interface in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Interface {
    /// Its number.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// The type of its hardware addresses (`ARPHRD_NONE`, `ARPHRD_ETHER`, …).
    #[prost(uint32, tag = "2")]
    pub link_type: u32,
    /// `IFF_UP` and others that can be set.
    #[prost(uint32, tag = "3")]
    pub flags: u32,
    /// The largest packet, in bytes.
    #[prost(uint32, tag = "4")]
    pub mtu_bytes: u32,
    /// Its hardware address; none of a tun.
    #[prost(bytes = "vec", tag = "5")]
    pub address: Vec<u8>,
    /// The hardware address of all.
    #[prost(bytes = "vec", tag = "6")]
    pub broadcast: Vec<u8>,
    /// How many packets wait in a queue at most.
    #[prost(uint32, tag = "7")]
    pub queue_packets: u32,
    /// Its alias.
    #[prost(bytes = "vec", tag = "8")]
    pub alias: Vec<u8>,
    /// Its group.
    #[prost(uint32, tag = "9")]
    pub group: u32,
    /// The name of the interface that it is part of (a bridge); empty for none.
    #[prost(string, tag = "10")]
    pub master: String,
    /// Which user may attach to it, if it is said.
    #[prost(uint32, optional, tag = "11")]
    pub owner: Option<u32>,
    /// Which group may attach to it, if it is said.
    #[prost(uint32, optional, tag = "12")]
    pub owner_group: Option<u32>,
    /// How long the header before each packet is; 0 without `IFF_VNET_HDR`.
    #[prost(int32, tag = "13")]
    pub header_bytes: i32,
    /// Whether that header is little-endian on every machine.
    #[prost(bool, tag = "14")]
    pub is_little_endian: bool,
    /// What the program does for the host (`TUN_F_CSUM`, …).
    #[prost(uint32, tag = "15")]
    pub offload: u32,
    /// Whether it has a carrier.
    #[prost(bool, tag = "16")]
    pub has_carrier: bool,
    /// Its addresses.
    #[prost(message, repeated, tag = "17")]
    pub addresses: Vec<Entry>,
    /// Its neighbours that were entered for good.
    #[prost(message, repeated, tag = "18")]
    pub neighbours: Vec<Entry>,
    /// The routes over it that the kernel has not made by itself.
    #[prost(message, repeated, tag = "19")]
    pub routes: Vec<Entry>,
    /// Its settings in /proc/sys.
    #[prost(message, repeated, tag = "20")]
    pub settings: Vec<Value>,
}

/// What is told of a device besides what its interface is.
pub(crate) struct Told {
    /// Whether each packet has a header of its own (no `IFF_NO_PI`).
    pub(super) has_header: bool,
    /// How many queues it has, with those that are detached.
    pub(super) queues: u32,
}

/// The head of a message about the interface of this number, with flags and which of them to set.
fn head(index: u32, flags: u32, change: u32) -> Vec<u8> {
    let words = [0, index, flags, change];
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// What rtnetlink tells of one interface; `None` where there is none.
fn ask(index: u32, name: Option<&str>) -> std::io::Result<Option<Message>> {
    let mut batch = Batch::default();
    batch.message(RTM_GETLINK, REQUEST, &head(index, 0, 0));
    if let Some(name) = name {
        batch.string(IFLA_IFNAME, name);
    }
    match Netlink::route()?.ask(batch) {
        Ok(answer) => Ok(answer.into_iter().find(|one| one.kind == RTM_NEWLINK)),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether there is an interface of this name.
pub(super) fn exists(name: &str) -> Result<bool> {
    let answer = ask(0, Some(name)).map_err(|error| failed(name, "look for it", error))?;
    Ok(answer.is_some())
}

/// The number of the interface of this name.
fn index_of(name: &str) -> Result<Option<u32>> {
    let answer = ask(0, Some(name)).map_err(|error| failed(name, "look for it", error))?;
    Ok(answer.map(|answer| word(&answer.payload[4..])))
}

impl Interface {
    /// Takes down all that rtnetlink and /proc/sys tell of an interface.
    pub(crate) fn read(name: &str) -> Result<(Self, Told)> {
        let fails = |error| failed(name, "read it", error);
        let answer = ask(0, Some(name)).map_err(fails)?;
        let answer = answer.filter(|answer| answer.payload.len() >= HEAD_BYTES);
        let payload = answer.ok_or_else(|| fails(Errno::NODEV.into()))?.payload;
        let type_bytes = payload[2..4].try_into().expect("two bytes");
        let mut interface = Self {
            link_type: u16::from_ne_bytes(type_bytes).into(),
            index: word(&payload[4..]),
            flags: word(&payload[8..]) & SETTABLE,
            ..Self::default()
        };
        let mut told = Told {
            has_header: false,
            queues: 0,
        };
        let mut master = 0;
        for (kind, data) in attributes(&payload, HEAD_BYTES) {
            match kind {
                IFLA_ADDRESS => interface.address = data.to_vec(),
                IFLA_BROADCAST => interface.broadcast = data.to_vec(),
                IFLA_MTU => interface.mtu_bytes = word(data),
                IFLA_TXQLEN => interface.queue_packets = word(data),
                IFLA_IFALIAS => interface.alias = data.to_vec(),
                IFLA_GROUP => interface.group = word(data),
                IFLA_CARRIER => interface.has_carrier = data.first() == Some(&1),
                IFLA_MASTER => master = word(data),
                IFLA_LINKINFO => interface.read_device(data, &mut told),
                _ => {}
            }
        }
        interface.master = name_of(master).map_err(fails)?;
        let index = interface.index;
        interface.addresses = network::read(List::Addresses, index).map_err(fails)?;
        interface.neighbours = network::read(List::Neighbours, index).map_err(fails)?;
        interface.routes = network::read(List::Routes, index).map_err(fails)?;
        interface.settings = settings::read(name);
        Ok((interface, told))
    }

    fn read_device(&mut self, info: &[u8], told: &mut Told) {
        let data = attributes(info, 0).find(|(kind, _)| *kind == IFLA_INFO_DATA);
        for (kind, data) in data.iter().flat_map(|(_, data)| attributes(data, 0)) {
            match kind {
                IFLA_TUN_OWNER => self.owner = Some(word(data)),
                IFLA_TUN_GROUP => self.owner_group = Some(word(data)),
                IFLA_TUN_PI => told.has_header = data.first() == Some(&1),
                IFLA_TUN_NUM_QUEUES | IFLA_TUN_NUM_DISABLED_QUEUES => told.queues += word(data),
                _ => {}
            }
        }
    }

    /// Takes down what a queue tells of its interface.
    pub(super) fn read_numbers(
        &mut self,
        own: BorrowedFd<'_>,
        name: &str,
        has_header: bool,
    ) -> Result<()> {
        let ask = |which| tun::number(own, which).map_err(|error| failed(name, "read it", error));
        if has_header {
            self.header_bytes = ask(Number::HeaderBytes)?;
            self.is_little_endian = ask(Number::IsLittleEndian)? != 0;
        }
        let active = tun::active_features(name);
        let active = active.map_err(|error| failed(name, "read its features", error))?;
        let known = OFFLOADS.iter();
        let known = known.filter(|(name, _)| active.iter().any(|active| active == name));
        self.offload = known.fold(0, |all, (_, flags)| all | flags);
        Ok(())
    }

    /// Gives a device what its program has said of it.
    pub(super) fn set_numbers(
        &self,
        own: BorrowedFd<'_>,
        name: &str,
        has_header: bool,
    ) -> Result<()> {
        if has_header {
            let little = i32::from(self.is_little_endian);
            for (which, value) in [
                (Number::HeaderBytes, self.header_bytes),
                (Number::IsLittleEndian, little),
            ] {
                tun::set_number(own, which, value)
                    .map_err(|error| failed(name, "set the headers of its packets", error))?;
            }
        }
        tun::set(own, Setting::Offload, self.offload)
            .map_err(|error| failed(name, "set what its program does for the host", error))
    }

    /// Makes a new interface what it was.
    pub(super) fn apply(&self, own: BorrowedFd<'_>, name: &str) -> Result<()> {
        let fails = |doing: &'static str| move |error| failed(name, doing, error);
        for (which, value) in [
            (Setting::Owner, self.owner),
            (Setting::Group, self.owner_group),
        ] {
            if let Some(value) = value {
                tun::set(own, which, value).map_err(fails("set its owner"))?;
            }
        }
        let (fresh, _) = Self::read(name)?;
        if fresh.link_type != self.link_type {
            tun::set(own, Setting::LinkType, self.link_type).map_err(fails("set its type"))?;
        }
        self.apply_over(name, &fresh, || match self.has_carrier {
            true => Ok(()),
            false => tun::set_carrier(own, false).map_err(fails("take its carrier")),
        })
    }

    /// Makes an interface that is there what it was.
    pub(crate) fn apply_link(&self, name: &str) -> Result<()> {
        let (fresh, _) = Self::read(name)?;
        self.apply_over(name, &fresh, || Ok(()))
    }

    /// Makes an interface, which is now as `fresh` has it, what it was; calls `once_set` before it
    /// gets its addresses.
    fn apply_over(
        &self,
        name: &str,
        fresh: &Self,
        once_set: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let fails = |doing: &'static str| move |error| failed(name, doing, error);
        let index = index_of(name)?.ok_or_else(|| failed(name, "find it", Errno::NODEV))?;
        settings::apply(name, &self.settings);
        self.set_link(name, index, fresh)?;
        once_set()?;
        // The other addresses of a network go with its first one.
        network::remove_others(&self.addresses, index).map_err(fails("take addresses from it"))?;
        network::apply(List::Addresses, &self.addresses, index)
            .map_err(fails("give it its addresses"))?;
        settings::apply_last(name, &self.settings);
        network::remove_others(&self.addresses, index).map_err(fails("take addresses from it"))?;
        network::apply(List::Neighbours, &self.neighbours, index)
            .map_err(fails("give it its neighbours"))?;
        network::apply(List::Routes, &self.routes, index).map_err(fails("give it its routes"))
    }

    /// Sets what differs from a fresh one, and has it up at last.
    fn set_link(&self, name: &str, index: u32, fresh: &Self) -> Result<()> {
        let mut batch = Batch::default();
        let (request, flags) = (REQUEST | ACK, self.flags & SETTABLE);
        batch.message(RTM_SETLINK, request, &head(index, flags, SETTABLE));
        for (kind, data, present) in [
            (IFLA_ADDRESS, &self.address, &fresh.address),
            (IFLA_BROADCAST, &self.broadcast, &fresh.broadcast),
            (IFLA_IFALIAS, &self.alias, &fresh.alias),
        ] {
            if data != present {
                batch.attribute(kind, data);
            }
        }
        for (kind, value, present) in [
            (IFLA_MTU, self.mtu_bytes, fresh.mtu_bytes),
            (IFLA_TXQLEN, self.queue_packets, fresh.queue_packets),
            (IFLA_GROUP, self.group, fresh.group),
        ] {
            if value != present {
                batch.attribute(kind, &value.to_ne_bytes());
            }
        }
        if !self.master.is_empty() {
            let master = index_of(&self.master)?.ok_or_else(|| Error::Mismatch {
                what: format!(
                    "interface {name} of the image is part of {}, which is missing",
                    self.master
                ),
            })?;
            batch.attribute(IFLA_MASTER, &master.to_ne_bytes());
        }
        let applied = Netlink::route().and_then(|route| route.apply(batch));
        applied.map_err(|error| failed(name, "set what it was", error))
    }

    /// Refuses what no dump writes.
    pub(crate) fn check(&self) -> Result<()> {
        let corrupt = |what| Err(Error::corrupt("network interface", what));
        let hardware = [&self.address, &self.broadcast];
        if hardware.iter().any(|one| one.len() > ADDRESS_MAX_BYTES) {
            return corrupt("has too long an address");
        }
        if self.alias.len() > ALIAS_MAX_BYTES || self.master.len() >= tun::NAME_MAX_BYTES {
            return corrupt("has too long a name");
        }
        for (list, entries) in [
            (List::Addresses, &self.addresses),
            (List::Neighbours, &self.neighbours),
            (List::Routes, &self.routes),
        ] {
            if !entries.iter().all(|entry| list.is_sound(entry)) {
                return corrupt("has what is no address or route");
            }
        }
        if !self.settings.iter().all(Value::is_sound) {
            return corrupt("has a setting of no known kind");
        }
        Ok(())
    }
}

/// The name of the interface with this number; empty for none.
fn name_of(index: u32) -> std::io::Result<String> {
    if index == 0 {
        return Ok(String::new());
    }
    let answer = ask(index, None)?.ok_or(Errno::NODEV)?;
    let mut told = attributes(&answer.payload, HEAD_BYTES);
    let name = told.find(|(kind, _)| *kind == IFLA_IFNAME);
    let name = name.map_or(&[][..], |(_, data)| {
        data.strip_suffix(b"\0").unwrap_or(data)
    });
    Ok(String::from_utf8_lossy(name).into_owned())
}
