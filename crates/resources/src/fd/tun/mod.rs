//! Descriptors of /dev/net/tun: queues of virtual interfaces, whose other end is a program (a VPN,
//! a monitor of machines), and those that are none yet.
//!
//! An interface goes with the last queue of it unless it is persistent. So the restore makes it
//! again, before anything else is opened that may have an address on it, and with all that the
//! host's network knew of it. One that is persistent and still there is taken as it is.
//!
//! Packets that wait to be read cannot be looked at without taking them: they are lost at a
//! restore, as packets may be on any way.
//!
//! - What: tun and tap devices
//! - Kept: name and number of the interface, type, queues, headers, offloads, owner, send buffer;
//!   of the interface hardware address, MTU, flags, master, settings (`net.ipv4.conf` and
//!   `net.ipv6.conf`), addresses, permanent neighbours, and routes that programs have made.
//! - Refused: "its interface is in another network namespace"; "it was opened in another network
//!   namespace"; "somebody outside of the tree has a queue of its interface"; "it has a packet
//!   filter (TUNATTACHFILTER), which the kernel does not tell".
//! - At a restore: "…: is another device"; "an interface named … is there already: remove or rename
//!   it"; "interface … of the image is part of …, which is missing".
//! - CRIU 4.2: the same, only in a network namespace of the tree's own, without headers' byte order
//!   and neighbours.

mod interface;
mod network;
mod settings;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use sys::tun::{self, Number, Setting};

use super::place::Place;
use super::{DumpContext, Kind, Open, RestoreContext, Stage, ready, status, tags};
use crate::{Allow, Error, Result};
pub(crate) use interface::Interface;
pub(crate) use network::{ForeignRoute, foreign_routes};

/// See the file.
pub struct Tun;

/// Major and minor number of /dev/net/tun.
const DEVICE: (u32, u32) = (10, 200);

const IFF_TUN: u32 = libc::IFF_TUN as u32;
const IFF_TAP: u32 = libc::IFF_TAP as u32;
const IFF_NAPI: u32 = libc::IFF_NAPI as u32;
const IFF_NAPI_FRAGS: u32 = libc::IFF_NAPI_FRAGS as u32;
const IFF_MULTI_QUEUE: u32 = libc::IFF_MULTI_QUEUE as u32;
const IFF_DETACH_QUEUE: u32 = libc::IFF_DETACH_QUEUE as u32;
const IFF_PERSIST: u32 = libc::IFF_PERSIST as u32;
/// What is told has `IFF_NOFILTER` in the same bit.
const IFF_NO_PI: u32 = libc::IFF_NO_PI as u32;
/// Without effect since Linux 3.8, but told.
const IFF_ONE_QUEUE: u32 = 0x2000;
const IFF_VNET_HDR: u32 = libc::IFF_VNET_HDR as u32;
/// What is asked for when a queue is attached.
const OF_ATTACHING: u32 = IFF_TUN
    | IFF_TAP
    | IFF_NAPI
    | IFF_NAPI_FRAGS
    | IFF_MULTI_QUEUE
    | IFF_NO_PI
    | IFF_ONE_QUEUE
    | IFF_VNET_HDR;

/// A descriptor of /dev/net/tun.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where the device's node is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The description's number in the image.
    #[prost(uint32, tag = "3")]
    id: u32,
    /// The queue that it is, if it is one.
    #[prost(message, optional, tag = "4")]
    queue: Option<Queue>,
}

/// A queue of an interface.
#[derive(Clone, PartialEq, Message)]
pub struct Queue {
    /// The interface's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// `IFF_TUN` or `IFF_TAP`, `IFF_NO_PI`, `IFF_MULTI_QUEUE`, `IFF_DETACH_QUEUE`, …
    #[prost(uint32, tag = "2")]
    pub flags: u32,
    /// How many bytes of packets may be under way into the host.
    #[prost(int32, tag = "3")]
    pub send_buffer_bytes: i32,
    /// The interface; each of several queues has it.
    #[prost(message, required, tag = "4")]
    pub interface: Interface,
}

impl Queue {
    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

impl Kind for Tun {
    type Record = Record;
    const TAG: u16 = tags::TUN;
    const NAME: &'static str = "tun device";
    const STAYS: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::CharacterDevice) && is_tun(&open.stat)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        Ok(Record {
            place: Place::dump(open, cx)?,
            flags: open.info.flags,
            id: open.id.0,
            queue: read(open, cx)?,
        })
    }

    fn check(record: &Record) -> Result<()> {
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        status::check(Self::NAME, record.flags)?;
        record.place.check(Self::NAME, FileType::CharacterDevice)?;
        let Some(queue) = &record.queue else {
            return Ok(());
        };
        if queue.has(IFF_TUN) == queue.has(IFF_TAP) {
            return corrupt("is of no known type");
        }
        if !tun::is_name(&queue.name) {
            return corrupt("has a name that no interface has");
        }
        if queue.flags & !(OF_ATTACHING | IFF_DETACH_QUEUE | IFF_PERSIST) != 0 {
            return corrupt("has unknown flags");
        }
        queue.interface.check()
    }

    fn describe(record: &Record) -> String {
        let Some(queue) = &record.queue else {
            return "no queue yet".to_owned();
        };
        let kind = if queue.has(IFF_TUN) { "tun" } else { "tap" };
        let detached = if queue.has(IFF_DETACH_QUEUE) {
            " detached"
        } else {
            ""
        };
        let (name, interface) = (&queue.name, &queue.interface);
        let (addresses, routes) = (interface.addresses.len(), interface.routes.len());
        format!("{kind} {name}{detached} addresses={addresses} routes={routes}")
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place.describe())
    }

    fn prepare(record: &Record, cx: &mut dyn RestoreContext) -> Result<()> {
        let own = make(record, cx)?;
        cx.shared().insert(key(record.id), vec![own]);
        Ok(())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let made = cx.shared().remove(&key(record.id));
        match made.and_then(|mut made| made.pop()) {
            Some(own) => Ok(own),
            None => make(record, cx),
        }
    }

    fn stages(_record: &Record, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    fn act(record: &Record, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        // Until now it would have gone with a restore that fails.
        match &record.queue {
            Some(queue) if queue.has(IFF_PERSIST) => tun::set(own, Setting::Persistent, 1)
                .map_err(|error| failed(&queue.name, "make it persistent", error)),
            _ => Ok(()),
        }
    }
}

fn is_tun(stat: &Stat) -> bool {
    let (major, minor) = DEVICE;
    stat.st_rdev == rustix::fs::makedev(major, minor)
}

/// Under which key a queue waits for [`Kind::open`].
fn key(id: u32) -> (u16, u64) {
    (tags::TUN, id.into())
}

/// Under which key a queue of an interface is found that this restore has attached.
fn key_of_interface(index: u32) -> (u16, u64) {
    (tags::TUN, 1 << 32 | u64::from(index))
}

fn failed(name: &str, doing: &str, error: impl Into<std::io::Error>) -> Error {
    Error::kernel(format!("interface {name}: {doing}"), error)
}

/// What a descriptor is a queue of.
fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Option<Queue>> {
    let own = open.own()?;
    let told = |error| Error::kernel(format!("read {}", open.place()), error);
    let here = |network: std::io::Result<OwnedFd>| -> Result<bool> {
        let there = rustix::fs::fstat(network.map_err(told)?);
        let here = sys::procfs::stat("thread-self/ns/net");
        let (there, here) = (
            there.map_err(|e| told(e.into()))?,
            here.map_err(|e| told(e.into()))?,
        );
        Ok((there.st_dev, there.st_ino) == (here.st_dev, here.st_ino))
    };
    let Some(attached) = tun::attached(own).map_err(told)? else {
        if !here(tun::opened_in(own))? {
            return Err(open.unsupported("it was opened in another network namespace", None));
        }
        return Ok(None);
    };
    if !here(tun::network(own))? {
        return Err(open.unsupported("its interface is in another network namespace", None));
    }
    let name = attached.name;
    let (mut interface, told_of) = Interface::read(&name)?;
    let mut flags = u32::from(attached.flags) & (OF_ATTACHING | IFF_DETACH_QUEUE | IFF_PERSIST);
    let without_filter = told_of.has_header && flags & IFF_NO_PI != 0;
    if told_of.has_header {
        flags &= !IFF_NO_PI;
    }
    if !without_filter && tun::filter_length(own).map_err(told)? > 0 {
        let why = "it has a packet filter (TUNATTACHFILTER), which the kernel does not tell";
        return Err(open.unsupported(why, None));
    }
    let of_tree = cx.all().iter().filter(|other| is_queue_of(other, &name));
    if of_tree.count() < told_of.queues as usize {
        let why = "somebody outside of the tree has a queue of its interface";
        return Err(open.unsupported(why, None));
    }
    interface.read_numbers(own, &name, flags & IFF_VNET_HDR != 0)?;
    if flags & IFF_DETACH_QUEUE == 0 && socket_is_readable(own) {
        log::warn!(
            "{}: packets that wait for it are lost at a restore",
            open.place()
        );
    }
    Ok(Some(Queue {
        flags,
        send_buffer_bytes: tun::number(own, Number::SendBufferBytes).map_err(told)?,
        interface,
        name,
    }))
}

fn socket_is_readable(own: BorrowedFd<'_>) -> bool {
    let wanted = rustix::event::PollFlags::IN;
    ready::events(own, wanted).is_ok_and(|told| told.contains(wanted))
}

fn is_queue_of(open: &Open<'_>, name: &str) -> bool {
    let attached = || tun::attached(open.own().ok()?).ok()?;
    Tun::claims(open) && attached().is_some_and(|attached| attached.name == name)
}

/// Opens the device and, where it was one, makes it the queue that it was.
fn make(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
    let flags = status::opening(record.flags);
    let own = record.place.open(flags, None, cx)?;
    let stat = rustix::fs::fstat(&own).map_err(|error| Error::kernel("stat a device", error))?;
    if !is_tun(&stat) {
        return Err(Error::Mismatch {
            what: format!("{}: is another device", record.place.describe()),
        });
    }
    let Some(queue) = &record.queue else {
        return Ok(own);
    };
    let (name, interface) = (&queue.name, &queue.interface);
    let known = key_of_interface(interface.index);
    let of_image = cx.shared().get(&known).and_then(|queues| queues.first());
    let of_image = of_image.map(tun::attached).transpose();
    let of_image = of_image
        .map_err(|error| failed(name, "look at it", error))?
        .flatten();
    let is_there = interface::exists(name)?;
    let is_new = match of_image {
        Some(attached) if attached.name == *name => false,
        _ if is_there && !queue.has(IFF_PERSIST) => {
            return Err(Error::InUse {
                what: format!("an interface named {name} is there already: remove or rename it"),
            });
        }
        _ => !is_there,
    };
    attach(own.as_fd(), queue, is_new)?;
    interface.set_numbers(own.as_fd(), name, queue.has(IFF_VNET_HDR))?;
    if is_new {
        interface.apply(own.as_fd(), name)?;
    }
    let bytes = queue.send_buffer_bytes;
    tun::set_number(&own, Number::SendBufferBytes, bytes)
        .map_err(|error| failed(name, "set its send buffer", error))?;
    if queue.has(IFF_DETACH_QUEUE) {
        tun::set_detached(&own, true).map_err(|error| failed(name, "detach a queue", error))?;
    }
    let copy = status::dup(own.as_fd())?;
    cx.shared().entry(known).or_default().push(copy);
    Ok(own)
}

/// Attaches a new descriptor, and makes the interface, where possible with the number it had.
fn attach(own: BorrowedFd<'_>, queue: &Queue, is_new: bool) -> Result<()> {
    let (name, index) = (&queue.name, queue.interface.index);
    let flags = u16::try_from(queue.flags & OF_ATTACHING).expect("16 bits");
    let doing = if is_new { "make it" } else { "attach to it" };
    let fails = |error| failed(name, doing, error);
    if is_new {
        tun::want_index(own, index).map_err(fails)?;
    }
    match tun::attach(own, name, flags) {
        Err(error) if is_new && Errno::from_io_error(&error) == Some(Errno::BUSY) => {
            log::warn!("interface {name}: another one has number {index} now");
            tun::want_index(own, 0).map_err(fails)?;
            tun::attach(own, name, flags).map_err(fails)
        }
        attached => attached.map_err(fails),
    }
}
