//! A table that keeps new connections from listeners: who asks for one asks again a second later.

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::{
    CHAINS, CREATE, EXCLUSIVE, LIST_ELEMENT, NEW_CHAIN, NEW_RULE, NEW_TABLE, Owned, PRIORITY,
    PROTOCOLS, REGISTER, TABLE_OWNED, begin, end, expression, is_equal, load, message,
};
use crate::netlink::{Batch, Netlink};

const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const TCP: u8 = 6;
/// Of FIN, SYN, RST and ACK, which packets have.
const KINDS: u8 = 0x17;
/// What asks for a connection.
const SYN: u8 = 0x02;

/// Makes the table `name`, to live as long as the result.
///
/// # Errors
/// As [`super::block_meanwhile`].
pub fn hold_new_meanwhile(name: &str, listeners: &[SocketAddr]) -> io::Result<Owned> {
    let netlink = Netlink::netfilter()?;
    let mut batch = Batch::default();
    begin(&mut batch);
    message(&mut batch, NEW_TABLE, CREATE | EXCLUSIVE)
        .string(1, name)
        .big(2, TABLE_OWNED);
    let chain = &CHAINS[0];
    message(&mut batch, NEW_CHAIN, CREATE)
        .string(1, name)
        .string(3, chain.name)
        .nested(4, |hook| {
            hook.big(1, chain.hook).big(2, PRIORITY.cast_unsigned());
        })
        .big(5, 1) // accept what no rule drops
        .string(7, "filter");
    for listener in listeners {
        message(&mut batch, NEW_RULE, CREATE)
            .string(1, name)
            .string(2, chain.name)
            .nested(4, |rule| drop_new(rule, *listener));
    }
    end(&mut batch);
    netlink.apply(batch)?;
    Ok(Owned {
        name: name.to_owned(),
        netlink: Some(netlink),
    })
}

fn drop_new(rule: &mut Batch, listener: SocketAddr) {
    is_equal(rule, META_L4PROTO, TCP);
    let ip = listener.ip().to_canonical();
    if !ip.is_unspecified() {
        let protocol = &PROTOCOLS[usize::from(ip.is_ipv6())];
        is_equal(rule, META_NFPROTO, protocol.nfproto);
        let field = (protocol.destination, protocol.address_bytes);
        load(rule, REGISTER, NETWORK_HEADER, field);
        match ip {
            IpAddr::V4(ip) => compare(rule, &ip.octets()),
            IpAddr::V6(ip) => compare(rule, &ip.octets()),
        }
    }
    load(rule, REGISTER, TRANSPORT_HEADER, (2, 2));
    compare(rule, &listener.port().to_be_bytes());
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
    compare(rule, &[SYN]);
    expression(rule, "immediate", |data| {
        data.big(1, 0).nested(2, |value| {
            value.nested(2, |verdict| {
                verdict.big(1, 0); // drop
            });
        });
    });
}

/// The rule goes on where what was loaded is this.
fn compare(rule: &mut Batch, value: &[u8]) {
    rule.nested(LIST_ELEMENT, |element| {
        element.string(1, "cmp").nested(2, |data| {
            data.big(1, REGISTER).big(2, 0).nested(3, |wanted| {
                wanted.attribute(1, value);
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

    #[test]
    fn only_new_connections_to_the_listener_are_held() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        crate::isolated::run(|| {
            for at in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
                let listener = TcpListener::bind(at).unwrap();
                let other = TcpListener::bind(at.replace("0.0.0.0", "127.0.0.1")).unwrap();
                let mut to = listener.local_addr().unwrap();
                if to.ip().is_unspecified() {
                    to.set_ip([127, 0, 0, 1].into());
                }
                let mut client = TcpStream::connect(to).unwrap();
                let (mut server, _) = listener.accept().unwrap();
                let held = [listener.local_addr().unwrap()];
                let owner = hold_new_meanwhile("stillframe-unit-hold", &held).unwrap();
                let short = Duration::from_millis(100);
                let refused = TcpStream::connect_timeout(&to, short).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::TimedOut, "{at}");
                TcpStream::connect(other.local_addr().unwrap()).unwrap();
                client.write_all(b"x").unwrap();
                assert_eq!(server.read(&mut [0; 9]).unwrap(), 1);
                drop(owner);
                TcpStream::connect(to).unwrap();
            }
        })
        .unwrap();
    }
}
