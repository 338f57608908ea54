//! A table that keeps new connections from listeners: who asks for one asks again a second later.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use super::{
    CHAINS, CREATE, EXCLUSIVE, FAMILY_INET, LIST_ELEMENT, Leftover, NEW_CHAIN, NEW_RULE, NEW_TABLE,
    Owned, PRIORITY, PROTOCOLS, REGISTER, TABLE_OWNED, begin, end, expression, is_equal, load,
};
use crate::netlink::{Batch, Netlink, REQUEST};

const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const TCP: u8 = 6;
/// Of FIN, SYN, RST and ACK, which packets have.
const KINDS: u8 = 0x17;
/// What asks for a connection.
const SYN: u8 = 0x02;
const EQUAL: u32 = 0;
const UNEQUAL: u32 = 1;
const DROP: u32 = 0;
const ACCEPT: u32 = 1;
/// Rules go in batches of this many, below what a netlink socket takes at once.
const RULES_MAX: usize = 256;

/// Where a socket listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Listening {
    /// Its address.
    pub at: SocketAddr,
    /// True if it takes no connections by IPv4, if the address is one of IPv6.
    pub v6_only: bool,
}

impl Listening {
    /// The family of the packets that come to it; none for both.
    fn family(&self) -> Option<&'static super::Protocol> {
        let ip = self.at.ip().to_canonical();
        let takes_both = ip.is_ipv6() && ip.is_unspecified() && !self.v6_only;
        (!takes_both).then(|| &PROTOCOLS[usize::from(ip.is_ipv6())])
    }
}

/// Keeps new connections from listeners as long as it lives, or this process.
#[derive(Debug)]
pub struct Hold {
    table: Owned,
    held: BTreeSet<Listening>,
}

impl Hold {
    /// Makes the table `name`.
    ///
    /// # Errors
    /// As [`super::block_meanwhile`].
    pub fn new(name: &str, listeners: &[Listening]) -> io::Result<Self> {
        let netlink = Netlink::netfilter()?;
        let mut batch = Batch::default();
        begin(&mut batch);
        let chain = &CHAINS[0];
        message(&mut batch, NEW_TABLE, CREATE | EXCLUSIVE)
            .string(1, name)
            .big(2, TABLE_OWNED);
        message(&mut batch, NEW_CHAIN, CREATE)
            .string(1, name)
            .string(3, chain.name)
            .nested(4, |hook| {
                hook.big(1, chain.hook).big(2, PRIORITY.cast_unsigned());
            })
            .big(5, 1) // accept what no rule drops
            .string(7, "filter");
        // All but what asks for a connection is done with here, however many listeners follow.
        rule(&mut batch, name, |rule| {
            load_protocol(rule);
            compare(rule, UNEQUAL, &[TCP]);
            decide(rule, ACCEPT);
        });
        rule(&mut batch, name, |rule| {
            load_kind(rule);
            compare(rule, UNEQUAL, &[SYN]);
            decide(rule, ACCEPT);
        });
        let mut hold = Self {
            table: Owned {
                name: name.to_owned(),
                netlink: Some(netlink),
            },
            held: BTreeSet::new(),
        };
        hold.add_with(batch, listeners)?;
        Ok(hold)
    }

    /// True if new connections are kept from this listener.
    #[must_use]
    pub fn has(&self, listener: &Listening) -> bool {
        self.held.contains(listener)
    }

    /// Keeps new connections from these as well.
    ///
    /// # Errors
    /// The calls' errno; others are still held.
    pub fn add(&mut self, listeners: &[Listening]) -> io::Result<()> {
        let mut batch = Batch::default();
        begin(&mut batch);
        self.add_with(batch, listeners)
    }

    /// Has the table's rules end at once.
    #[must_use]
    pub fn lift(self) -> Option<Leftover> {
        self.table.lift()
    }

    /// Adds rules behind what a batch has begun with.
    fn add_with(&mut self, mut batch: Batch, listeners: &[Listening]) -> io::Result<()> {
        let new = listeners.iter().filter(|one| !self.held.contains(one));
        let new = new.copied().collect::<BTreeSet<_>>();
        let netlink = self.table.netlink.as_ref().expect("only its end takes it");
        let mut rules = 0;
        for listener in &new {
            rule(&mut batch, &self.table.name, |rule| {
                drop_to(rule, listener);
            });
            rules += 1;
            if rules % RULES_MAX == 0 {
                end(&mut batch);
                netlink.apply(std::mem::take(&mut batch))?;
                begin(&mut batch);
            }
        }
        end(&mut batch);
        netlink.apply(batch)?;
        self.held.extend(new);
        Ok(())
    }
}

/// A message that is answered only where it fails.
fn message(batch: &mut Batch, kind: u16, flags: u16) -> &mut Batch {
    batch.message(kind, REQUEST | flags, &[FAMILY_INET, 0, 0, 0])
}

fn rule(batch: &mut Batch, table: &str, expressions: impl FnOnce(&mut Batch)) {
    message(batch, NEW_RULE, CREATE | APPEND)
        .string(1, table)
        .string(2, CHAINS[0].name)
        .nested(4, expressions);
}

/// `NLM_F_APPEND`: behind the rules that are there.
const APPEND: u16 = 0x800;

/// Drops packets that ask for a connection to this listener.
fn drop_to(rule: &mut Batch, listener: &Listening) {
    if let Some(family) = listener.family() {
        is_equal(rule, META_NFPROTO, family.nfproto);
        let ip = listener.at.ip().to_canonical();
        if !ip.is_unspecified() {
            let field = (family.destination, family.address_bytes);
            load(rule, REGISTER, NETWORK_HEADER, field);
            match ip {
                IpAddr::V4(ip) => compare(rule, EQUAL, &ip.octets()),
                IpAddr::V6(ip) => compare(rule, EQUAL, &ip.octets()),
            }
        }
    }
    load(rule, REGISTER, TRANSPORT_HEADER, (2, 2));
    compare(rule, EQUAL, &listener.at.port().to_be_bytes());
    decide(rule, DROP);
}

fn load_protocol(rule: &mut Batch) {
    expression(rule, "meta", |data| {
        data.big(1, REGISTER).big(2, META_L4PROTO);
    });
}

/// Loads which of the kinds a packet of TCP is.
fn load_kind(rule: &mut Batch) {
    load(rule, REGISTER, TRANSPORT_HEADER, (13, 1));
    expression(rule, "bitwise", |data| {
        data.big(1, REGISTER).big(2, REGISTER).big(3, 1);
        data.nested(4, |mask| {
            mask.attribute(1, &[KINDS]);
        });
        data.nested(5, |flip| {
            flip.attribute(1, &[0]);
        });
    });
}

/// The rule goes on where what was loaded compares like this.
fn compare(rule: &mut Batch, how: u32, value: &[u8]) {
    rule.nested(LIST_ELEMENT, |element| {
        element.string(1, "cmp").nested(2, |data| {
            data.big(1, REGISTER).big(2, how).nested(3, |wanted| {
                wanted.attribute(1, value);
            });
        });
    });
}

fn decide(rule: &mut Batch, verdict: u32) {
    expression(rule, "immediate", |data| {
        data.big(1, 0).nested(2, |value| {
            value.nested(2, |code| {
                code.big(1, verdict);
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    const SHORT: Duration = Duration::from_millis(100);

    fn is_held(to: SocketAddr) -> bool {
        match TcpStream::connect_timeout(&to, SHORT) {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{to}");
                true
            }
        }
    }

    fn held(at: SocketAddr) -> Listening {
        Listening { at, v6_only: false }
    }

    #[test]
    fn only_new_connections_to_the_listener_are_held() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        testkit::calls::isolated::run(|| {
            for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"] {
                let listener = TcpListener::bind(at).unwrap();
                let own = at.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]");
                let other = TcpListener::bind(own).unwrap();
                let mut to = other.local_addr().unwrap();
                to.set_port(listener.local_addr().unwrap().port());
                let mut client = TcpStream::connect(to).unwrap();
                let (mut server, _) = listener.accept().unwrap();
                let all = [held(listener.local_addr().unwrap())];
                let owner = Hold::new("stillframe-unit-hold", &all).unwrap();
                assert!(owner.has(&all[0]) && is_held(to), "{at}");
                TcpStream::connect(other.local_addr().unwrap()).unwrap();
                client.write_all(b"x").unwrap();
                assert_eq!(server.read(&mut [0; 9]).unwrap(), 1);
                drop(owner.lift());
                TcpStream::connect(to).unwrap();
            }
        })
        .unwrap();
    }

    #[test]
    fn both_families_are_held_only_where_both_are_taken() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        testkit::calls::isolated::run(|| {
            // One that takes both.
            let both = TcpListener::bind("[::]:0").unwrap();
            let port = both.local_addr().unwrap().port();
            let four = SocketAddr::from(([127, 0, 0, 1], port));
            let six = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], port));
            let any = held(SocketAddr::from(([0u16; 8], port)));
            let owner = Hold::new("stillframe-unit-hold", &[any]).unwrap();
            assert!(is_held(four) && is_held(six));
            drop(owner);
            let own = Listening {
                v6_only: true,
                ..any
            };
            let mut owner = Hold::new("stillframe-unit-hold", &[own]).unwrap();
            assert!(!is_held(four) && is_held(six));
            // Another one is added, and those that are held are not held twice.
            let any = held(SocketAddr::from(([0; 4], port)));
            owner.add(&[own, any]).unwrap();
            assert!(is_held(four) && is_held(six));
        })
        .unwrap();
    }

    #[test]
    fn many_listeners_are_held() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        testkit::calls::isolated::run(|| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let at = listener.local_addr().unwrap();
            let many = (1..2000).map(|port| held(([10, 0, 0, 1], port).into()));
            let many = many.chain([held(at)]).collect::<Vec<_>>();
            let owner = Hold::new("stillframe-unit-hold", &many).unwrap();
            assert!(is_held(at));
            drop(owner);
            assert!(!is_held(at));
        })
        .unwrap();
    }
}
