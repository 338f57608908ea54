//! Tables that stand, read back.

use std::io;

use super::{
    CHAIN_COMMENT, CHAINS, Connection, FAMILY_INET, GET_CHAIN, GET_ELEMENTS, GET_TABLE, Label,
    PROTOCOLS, TABLE_COMMENT, TABLE_OWNED, comment_of,
};
use crate::netlink::{Batch, DUMP, Message, Netlink, REQUEST, attributes};

/// What precedes the attributes of a message.
const HEADER_BYTES: usize = 4;

/// A table that drops the packets of connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Whether it goes away with the process that made it.
    pub is_owned: bool,
    /// What it says of itself.
    pub label: Label,
    /// Whether the label's path is there and not cut.
    pub is_path_whole: bool,
    /// The connections.
    pub connections: Vec<Connection>,
}

/// The tables of this network namespace whose names begin with `prefix`.
///
/// # Errors
/// The calls' errno; `EPERM` without `CAP_NET_ADMIN`.
pub fn tables(prefix: &str) -> io::Result<Vec<Table>> {
    let netlink = Netlink::netfilter()?;
    let mut tables = Vec::new();
    for found in list(&netlink, GET_TABLE, &[])? {
        let Some(name) = text(&found, 1).filter(|name| name.starts_with(prefix)) else {
            continue;
        };
        let flags = value(&found, 2).and_then(|four| four.try_into().ok());
        let own = comment_of(value(&found, TABLE_COMMENT).unwrap_or_default());
        let (label, is_path_whole) = Label::of(&own, &pieces(&netlink, &name)?);
        tables.push(Table {
            connections: connections(&netlink, &name)?,
            is_owned: flags.is_some_and(|flags| u32::from_be_bytes(flags) & TABLE_OWNED != 0),
            name,
            label,
            is_path_whole,
        });
    }
    Ok(tables)
}

/// The names of all tables of this network namespace, of every family; none where the kernel has no
/// nf_tables.
///
/// # Errors
/// As [`tables`].
pub fn names() -> io::Result<Vec<String>> {
    const ALL_FAMILIES: u8 = 0;
    let netlink = match Netlink::netfilter() {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut batch = Batch::default();
    batch.message(GET_TABLE, REQUEST | DUMP, &[ALL_FAMILIES, 0, 0, 0]);
    let found = match netlink.list(batch) {
        // No module knows such messages.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Vec::new(),
        found => found?,
    };
    Ok(found.iter().filter_map(|table| text(table, 1)).collect())
}

/// The comments of the table's chains, in their order.
fn pieces(netlink: &Netlink, table: &str) -> io::Result<Vec<Vec<u8>>> {
    let all = list(netlink, GET_CHAIN, &[])?;
    let of_chain = |name: &str| {
        let is = |found: &&Message| {
            let named = |kind, text: &str| self::text(found, kind).as_deref() == Some(text);
            named(1, table) && named(3, name)
        };
        let found = all.iter().find(is);
        comment_of(
            found
                .and_then(|found| value(found, CHAIN_COMMENT))
                .unwrap_or_default(),
        )
    };
    Ok(CHAINS.iter().map(|chain| of_chain(chain.name)).collect())
}

/// The elements of the table's sets.
fn connections(netlink: &Netlink, table: &str) -> io::Result<Vec<Connection>> {
    let mut connections = Vec::new();
    for protocol in &PROTOCOLS {
        let found = match list(netlink, GET_ELEMENTS, &[(1, table), (2, protocol.set)]) {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(error) => return Err(error),
        };
        for elements in found.iter().filter_map(|found| value(found, 3)) {
            let keys = attributes(elements, 0).filter_map(|(_, element)| {
                let key = attributes(element, 0).find(|(kind, _)| *kind == 1)?.1;
                attributes(key, 0).find(|(kind, _)| *kind == 1)
            });
            connections.extend(keys.filter_map(|(_, key)| Connection::of_key(key)));
        }
    }
    Ok(connections)
}

fn list(netlink: &Netlink, kind: u16, what: &[(u16, &str)]) -> io::Result<Vec<Message>> {
    let mut batch = Batch::default();
    batch.message(kind, REQUEST | DUMP, &[FAMILY_INET, 0, 0, 0]);
    for (kind, text) in what {
        batch.string(*kind, text);
    }
    netlink.list(batch)
}

fn value(message: &Message, wanted: u16) -> Option<&[u8]> {
    let mut all = attributes(&message.payload, HEADER_BYTES);
    all.find(|(kind, _)| *kind == wanted).map(|(_, data)| data)
}

fn text(message: &Message, wanted: u16) -> Option<String> {
    let text = value(message, wanted)?;
    let text = text.strip_suffix(b"\0").unwrap_or(text);
    Some(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::{block, block_meanwhile, unblock};
    use super::*;

    #[test]
    fn what_stands_is_read_back() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        testkit::calls::isolated::run(|| {
            let connection = |local: &str, remote: &str| Connection {
                local: local.parse().unwrap(),
                remote: remote.parse().unwrap(),
            };
            let mut connections = vec![
                connection("127.0.0.1:80", "127.0.0.1:4711"),
                connection("[2001:db8::1]:443", "[2001:db8::2]:1"),
            ];
            for (bytes, is_whole) in [(10, true), (127, true), (253, true), (254, false)] {
                let path = format!("/{}", "a".repeat(bytes - 1));
                let label = Label {
                    text: "what it is for".to_owned(),
                    path: path.into(),
                };
                block("stillframe-unit", &label, &connections).unwrap();
                let owner = block_meanwhile("stillframe-other", &connections[..1]).unwrap();
                let mut found = tables("stillframe-").unwrap();
                found.sort_by(|one, other| one.name.cmp(&other.name));
                let [other, unit] = <[Table; 2]>::try_from(found).unwrap();
                assert!(other.is_owned && !other.is_path_whole && !unit.is_owned);
                assert_eq!((unit.label, unit.is_path_whole), (label, is_whole));
                connections.sort_unstable();
                let mut now = unit.connections;
                now.sort_unstable();
                assert_eq!(now, connections);
                assert_eq!(tables("nobody").unwrap(), []);
                drop(owner);
                assert!(unblock("stillframe-unit").unwrap().is_some());
            }
            let many = (0..3000)
                .map(|port| Connection {
                    local: ([10, 0, 0, 1], port).into(),
                    remote: ([10, 0, 0, 2], 80).into(),
                })
                .collect::<Vec<_>>();
            block("stillframe-unit", &Label::default(), &many).unwrap();
            let found = tables("stillframe-unit").unwrap();
            assert_eq!(found[0].connections.len(), many.len());
        })
        .unwrap();
    }
}
