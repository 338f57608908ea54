//! One nf_tables table that drops what comes in and what goes out for a set of TCP connections.
//!
//! The table is made in one transaction: it is there as a whole or not at all. An *owned* table
//! goes away with the netlink socket that made it, whatever happens to the process.

mod hold;
mod listing;

use std::ffi::OsStr;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

pub use hold::{Hold, Listening};
pub use listing::{Table, names, tables};

use crate::netlink::{ACK, Batch, CREATE, EXCLUSIVE, Netlink, REQUEST};

const SUBSYSTEM: u16 = 10 << 8; // NFNL_SUBSYS_NFTABLES
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const NEW_TABLE: u16 = SUBSYSTEM;
const GET_TABLE: u16 = SUBSYSTEM | 1;
const DELETE_TABLE: u16 = SUBSYSTEM | 2;
const NEW_CHAIN: u16 = SUBSYSTEM | 3;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const NEW_RULE: u16 = SUBSYSTEM | 6;
const NEW_SET: u16 = SUBSYSTEM | 9;
const NEW_ELEMENTS: u16 = SUBSYSTEM | 12;
const GET_ELEMENTS: u16 = SUBSYSTEM | 13;

const FAMILY_INET: u8 = 1;
const TABLE_OWNED: u32 = 2;
/// Before the raw table, connection tracking and everybody's filters.
const PRIORITY: i32 = -400;
const LIST_ELEMENT: u16 = 1;
/// Elements go in messages of this many, below the 64 KiB of an attribute.
const ELEMENTS_MAX: usize = 500;

/// The longest comment in bytes, without its NUL.
const COMMENT_MAX_BYTES: usize = 127;
const TABLE_COMMENT: u16 = 6;
const CHAIN_COMMENT: u16 = 12;

/// The first of the 32-bit registers.
const REGISTER: u32 = 8;

/// A connection, as its packets come in: from the remote to the local address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection {
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the other end.
    pub remote: SocketAddr,
}

/// What a table that stays says of itself, as comments that `nft list ruleset` shows: the text is
/// the table's, and the path stands in those of its two chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// A text, of which 127 bytes are kept.
    pub text: String,
    /// A path, of which 254 bytes are kept.
    pub path: PathBuf,
}

impl Label {
    /// The part of the path that belongs to a chain.
    fn piece(&self, chain: usize) -> &[u8] {
        let mut pieces = self.path.as_os_str().as_bytes().chunks(COMMENT_MAX_BYTES);
        pieces.nth(chain).unwrap_or_default()
    }

    /// The label of comments that were read, and whether its path is whole.
    fn of(text: &[u8], pieces: &[Vec<u8>]) -> (Self, bool) {
        let path = pieces.concat();
        let is_whole = path.first() == Some(&b'/') && path.len() < 2 * COMMENT_MAX_BYTES;
        let label = Self {
            text: String::from_utf8_lossy(text).into_owned(),
            path: OsStr::from_bytes(&path).into(),
        };
        (label, is_whole)
    }
}

/// A comment as nft(8) stores it: one item of the type 0.
fn comment(text: &[u8]) -> Vec<u8> {
    let text = &text[..text.len().min(COMMENT_MAX_BYTES)];
    let len = u8::try_from(text.len() + 1).expect("128 bytes at most");
    [&[0, len], text, &[0]].concat()
}

/// The comment among the items of what an object was given by its maker.
fn comment_of(mut items: &[u8]) -> Vec<u8> {
    while let [kind, len, rest @ ..] = items {
        let Some(value) = rest.get(..usize::from(*len)) else {
            break;
        };
        if *kind == 0 {
            return value.strip_suffix(b"\0").unwrap_or(value).to_vec();
        }
        items = &rest[value.len()..];
    }
    Vec::new()
}

/// What differs between the address families.
struct Protocol {
    set: &'static str,
    set_id: u32,
    nfproto: u8,
    source: u32,
    destination: u32,
    address_bytes: u32,
}

const PROTOCOLS: [Protocol; 2] = [
    Protocol {
        set: "v4",
        set_id: 1,
        nfproto: 2,
        source: 12,
        destination: 16,
        address_bytes: 4,
    },
    Protocol {
        set: "v6",
        set_id: 2,
        nfproto: 10,
        source: 8,
        destination: 24,
        address_bytes: 16,
    },
];

/// Where packets are dropped, and where they have the key's addresses then: the remote one first.
struct Chain {
    name: &'static str,
    hook: u32,
    comes_in: bool,
}

const CHAINS: [Chain; 2] = [
    Chain {
        name: "input",
        hook: 1,
        comes_in: true,
    },
    Chain {
        name: "output",
        hook: 3,
        comes_in: false,
    },
];

/// An IPv4 address inside of an IPv6 one is on the wire what it is inside.
fn plain(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

impl Connection {
    fn is_of(&self, protocol: &Protocol) -> bool {
        plain(self.remote).0.is_ipv4() == (protocol.address_bytes == 4)
    }

    /// The set's element: addresses and ports, each padded to whole registers.
    fn key(&self) -> Vec<u8> {
        let mut key = Vec::with_capacity(40);
        for address in [self.remote, self.local] {
            let (ip, port) = plain(address);
            match ip {
                IpAddr::V4(ip) => key.extend(ip.octets()),
                IpAddr::V6(ip) => key.extend(ip.octets()),
            }
            key.extend(port.to_be_bytes());
            key.extend([0; 2]);
        }
        key
    }

    /// The connection that a set's element stands for.
    fn of_key(key: &[u8]) -> Option<Self> {
        let end = |half: &[u8]| {
            let (ip, port) = half.split_at_checked(half.len().checked_sub(4)?)?;
            let ip = match ip.len() {
                4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
                _ => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
            };
            Some(SocketAddr::new(ip, u16::from_be_bytes([port[0], port[1]])))
        };
        let (remote, local) = key.split_at(key.len() / 2);
        Some(Self {
            local: end(local)?,
            remote: end(remote)?,
        })
    }
}

/// A table that lives as long as this does, or this process.
#[derive(Debug)]
pub struct Owned {
    name: String,
    netlink: Option<Netlink>,
}

impl Owned {
    /// Has the table's rules end at once.
    #[must_use]
    pub fn lift(mut self) -> Option<Leftover> {
        self.delete()
    }

    fn delete(&mut self) -> Option<Leftover> {
        let netlink = self.netlink.take()?;
        // Where it cannot be deleted, closing the socket does it.
        let _ = delete(&netlink, &self.name);
        Some(Leftover { _netlink: netlink })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.delete();
    }
}

/// A socket whose close waits (8 to 20 ms) until the memory of deleted rules is free: to be
/// dropped when nothing urgent is left to do.
#[derive(Debug)]
pub struct Leftover {
    _netlink: Netlink,
}

/// Makes the table `name`, to live as long as the result.
///
/// # Errors
/// The calls' errno: `EEXIST` or `EPERM` when there is such a table, `EPERM` without
/// `CAP_NET_ADMIN`.
pub fn block_meanwhile(name: &str, connections: &[Connection]) -> io::Result<Owned> {
    Ok(Owned {
        name: name.to_owned(),
        netlink: Some(make(name, TABLE_OWNED, &Label::default(), connections)?),
    })
}

/// Makes the table `name`, to stay until [`unblock`], whoever ends; `label` says what it is for.
///
/// # Errors
/// As [`block_meanwhile`].
pub fn block(name: &str, label: &Label, connections: &[Connection]) -> io::Result<()> {
    make(name, 0, label, connections).map(drop)
}

/// Removes the table `name`; `None` when there was none.
///
/// # Errors
/// The calls' errno.
pub fn unblock(name: &str) -> io::Result<Option<Leftover>> {
    let netlink = Netlink::netfilter()?;
    match delete(&netlink, name) {
        Ok(()) => Ok(Some(Leftover { _netlink: netlink })),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn make(name: &str, flags: u32, label: &Label, connections: &[Connection]) -> io::Result<Netlink> {
    let netlink = Netlink::netfilter()?;
    let mut batch = Batch::default();
    begin(&mut batch);
    message(&mut batch, NEW_TABLE, CREATE | EXCLUSIVE)
        .string(1, name)
        .big(2, flags)
        .attribute(TABLE_COMMENT, &comment(label.text.as_bytes()));
    for (number, chain) in CHAINS.iter().enumerate() {
        message(&mut batch, NEW_CHAIN, CREATE)
            .string(1, name)
            .string(3, chain.name)
            .nested(4, |hook| {
                hook.big(1, chain.hook).big(2, PRIORITY.cast_unsigned());
            })
            .big(5, 1) // accept what no rule drops
            .string(7, "filter")
            .attribute(CHAIN_COMMENT, &comment(label.piece(number)));
    }
    for protocol in &PROTOCOLS {
        let keys: Vec<_> = connections
            .iter()
            .filter(|connection| connection.is_of(protocol))
            .map(Connection::key)
            .collect();
        if !keys.is_empty() {
            add_set(&mut batch, name, protocol, &keys);
            for chain in &CHAINS {
                add_rule(&mut batch, name, chain, protocol);
            }
        }
    }
    end(&mut batch);
    netlink.apply(batch)?;
    Ok(netlink)
}

/// Has the table's rules end at once.
fn delete(netlink: &Netlink, name: &str) -> io::Result<()> {
    let mut batch = Batch::default();
    begin(&mut batch);
    message(&mut batch, DELETE_TABLE, 0).string(1, name);
    end(&mut batch);
    netlink.apply(batch)
}

fn begin(batch: &mut Batch) {
    batch.message(BATCH_BEGIN, REQUEST, &[0, 0, 0, 10]);
}

fn end(batch: &mut Batch) {
    batch.message(BATCH_END, REQUEST, &[0, 0, 0, 10]);
}

fn message(batch: &mut Batch, kind: u16, flags: u16) -> &mut Batch {
    batch.message(kind, REQUEST | ACK | flags, &[FAMILY_INET, 0, 0, 0])
}

fn add_set(batch: &mut Batch, table: &str, protocol: &Protocol, keys: &[Vec<u8>]) {
    let key_bytes = u32::try_from(keys[0].len()).expect("40 bytes at most");
    let count = u32::try_from(keys.len()).expect("fewer than 2^32 connections");
    message(batch, NEW_SET, CREATE)
        .string(1, table)
        .string(2, protocol.set)
        .big(3, 0)
        .big(4, 0)
        .big(5, key_bytes)
        .nested(9, |description| {
            description.big(1, count);
        })
        .big(10, protocol.set_id);
    for keys in keys.chunks(ELEMENTS_MAX) {
        message(batch, NEW_ELEMENTS, CREATE)
            .string(1, table)
            .string(2, protocol.set)
            .big(4, protocol.set_id)
            .nested(3, |elements| {
                for key in keys {
                    elements.nested(LIST_ELEMENT, |element| {
                        element.nested(1, |data| {
                            data.attribute(1, key);
                        });
                    });
                }
            });
    }
}

fn add_rule(batch: &mut Batch, table: &str, chain: &Chain, protocol: &Protocol) {
    const TCP: u8 = 6;
    const META_NFPROTO: u32 = 15;
    const META_L4PROTO: u32 = 16;
    const NETWORK_HEADER: u32 = 1;
    const TRANSPORT_HEADER: u32 = 2;
    let address = protocol.address_bytes;
    let words = address / 4;
    let (source, destination) = ((protocol.source, 0), (protocol.destination, 2));
    let (remote, local) = if chain.comes_in {
        (source, destination)
    } else {
        (destination, source)
    };
    message(batch, NEW_RULE, CREATE)
        .string(1, table)
        .string(2, chain.name)
        .nested(4, |rule| {
            is_equal(rule, META_NFPROTO, protocol.nfproto);
            is_equal(rule, META_L4PROTO, TCP);
            load(rule, REGISTER, NETWORK_HEADER, (remote.0, address));
            load(rule, REGISTER + words, TRANSPORT_HEADER, (remote.1, 2));
            load(
                rule,
                REGISTER + words + 1,
                NETWORK_HEADER,
                (local.0, address),
            );
            load(
                rule,
                REGISTER + 2 * words + 1,
                TRANSPORT_HEADER,
                (local.1, 2),
            );
            expression(rule, "lookup", |data| {
                data.string(1, protocol.set)
                    .big(2, REGISTER)
                    .big(4, protocol.set_id);
            });
            expression(rule, "immediate", |data| {
                data.big(1, 0).nested(2, |value| {
                    value.nested(2, |verdict| {
                        verdict.big(1, 0); // drop
                    });
                });
            });
        });
}

fn expression(rule: &mut Batch, name: &str, data: impl FnOnce(&mut Batch)) {
    rule.nested(LIST_ELEMENT, |element| {
        element.string(1, name).nested(2, data);
    });
}

/// The rule goes on where a byte of the packet's meta data has this value.
fn is_equal(rule: &mut Batch, meta: u32, value: u8) {
    expression(rule, "meta", |data| {
        data.big(1, REGISTER).big(2, meta);
    });
    expression(rule, "cmp", |data| {
        data.big(1, REGISTER).big(2, 0).nested(3, |wanted| {
            wanted.attribute(1, &[value]);
        });
    });
}

/// Loads bytes (offset, length) of a header into a register.
fn load(rule: &mut Batch, register: u32, base: u32, (offset, bytes): (u32, u32)) {
    expression(rule, "payload", |data| {
        data.big(1, register)
            .big(2, base)
            .big(3, offset)
            .big(4, bytes);
    });
}
