//! Keys of signed TCP (RFC 2385, `TCP_MD5SIG`): sock_diag(7) tells them to who has `CAP_NET_ADMIN`.

use std::io;
use std::os::fd::BorrowedFd;

use super::inet::{AF_INET, AF_INET6};

const SOL_TCP: i32 = libc::SOL_TCP;
const TCP_MD5SIG_EXT: i32 = libc::TCP_MD5SIG_EXT;
const FLAG_PREFIX: u8 = 1;
/// The size of `struct tcp_diag_md5sig`.
const TOLD_BYTES: usize = 100;
/// `TCP_MD5SIG_MAXKEYLEN`
const KEY_BYTES: usize = libc::TCP_MD5SIG_MAXKEYLEN;
/// The size of `sockaddr_storage`, with which `struct tcp_md5sig` begins.
const ADDRESS_BYTES: usize = 128;

/// A key, and whose segments are signed with it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Signature {
    /// The others' address: 4 or 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub address: Vec<u8>,
    /// How many bits of it count.
    #[prost(uint32, tag = "2")]
    pub prefix_bits: u32,
    /// The key.
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
}

impl Signature {
    /// Reads all of an attribute `INET_DIAG_MD5SIG`.
    pub fn list(attribute: &[u8]) -> Option<Vec<Self>> {
        attribute.chunks_exact(TOLD_BYTES).map(Self::read).collect()
    }

    fn read(told: &[u8]) -> Option<Self> {
        let address_bytes = match i32::from(told[0]) {
            AF_INET => 4,
            AF_INET6 => 16,
            _ => return None,
        };
        let key_bytes = usize::from(u16::from_ne_bytes([told[2], told[3]]));
        Some(Self {
            address: told[4..4 + address_bytes].to_vec(),
            prefix_bits: told[1].into(),
            key: told.get(20..20 + key_bytes)?.to_vec(),
        })
    }

    /// True if a socket can have it.
    pub fn is_sound(&self) -> bool {
        matches!(self.address.len(), 4 | 16) && self.key.len() <= KEY_BYTES && {
            self.prefix_bits as usize <= 8 * self.address.len()
        }
    }

    /// Has a socket of this family sign with the key.
    ///
    /// # Errors
    /// The call's errno.
    pub fn set(&self, own: BorrowedFd<'_>, family: i32) -> io::Result<()> {
        let mut request = (family as u16).to_ne_bytes().to_vec();
        match (family, self.address.len()) {
            (AF_INET6, 4) => {
                request.resize(18, 0);
                request.extend([0xff; 2]);
            }
            (AF_INET6, _) => request.resize(8, 0),
            _ => request.resize(4, 0),
        }
        request.extend(&self.address);
        request.resize(ADDRESS_BYTES, 0);
        request.extend([FLAG_PREFIX, self.prefix_bits.to_ne_bytes()[0]]);
        request.extend((self.key.len() as u16).to_ne_bytes());
        request.extend([0; 4]);
        request.extend(&self.key);
        request.resize(ADDRESS_BYTES + 8 + KEY_BYTES, 0);
        sys::socket::set_option(own, SOL_TCP, TCP_MD5SIG_EXT, &request)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::super::super::socket::testing::World;
    use super::super::inet_diag;
    use super::*;
    use crate::testing::alone;

    fn signature(address: &[u8]) -> Signature {
        Signature {
            address: address.to_vec(),
            prefix_bits: 8 * address.len() as u32,
            key: b"password".to_vec(),
        }
    }

    /// The keys of a socket, as the kernel tells them.
    fn keys(own: impl AsFd, remote: &[u8]) -> Vec<Signature> {
        let inode = rustix::fs::fstat(&own).unwrap().st_ino;
        let local = sys::socket::name(&own).unwrap();
        let told = inet_diag::tcp(u32::try_from(inode).unwrap(), &local, remote).unwrap();
        told.expect("it is told of").signatures
    }

    #[test]
    fn keys_of_listeners_and_connections_survive() {
        alone!({
            let six = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            for (ip, family, address) in [("127.0.0.1", 2, &[127, 0, 0, 1][..]), ("::1", 10, &six)]
            {
                let signature = signature(address);
                let listener = TcpListener::bind((ip, 0)).unwrap();
                if signature.set(listener.as_fd(), family).is_err() {
                    testkit::skip!("this kernel signs no segments");
                }
                let client = sys::socket::open(family, 1, 0).unwrap();
                signature.set(client.as_fd(), family).unwrap();
                sys::socket::connect(&client, &sys::socket::name(&listener).unwrap()).unwrap();
                let mut client = TcpStream::from(client);
                let server = listener.accept().unwrap().0;
                client.write_all(b"unread").unwrap();
                let mut world = World::new(vec![listener.into(), server.into()]);
                world.allow.tcp_established = true;
                world.dump().unwrap();
                let [listener, server] = world.restore().unwrap().try_into().unwrap();
                assert_eq!(keys(&listener, &[]), std::slice::from_ref(&signature));
                let remote = sys::socket::peer_name(&server).unwrap();
                assert_eq!(keys(&server, &remote), [signature]);
                let (mut server, mut bytes) = (TcpStream::from(server), [0; 6]);
                server.read_exact(&mut bytes).unwrap();
                assert_eq!(&bytes, b"unread");
                server.write_all(b"answer").unwrap();
                client.read_exact(&mut bytes).unwrap();
                assert_eq!(&bytes, b"answer");
            }
        });
    }

    #[test]
    fn keys_of_a_closed_socket_are_refused() {
        alone!({
            testkit::needs_kernel_memory!();
            let own = sys::socket::open(2, 1, 0).unwrap();
            World::new(vec![own.try_clone().unwrap()]).dump().unwrap();
            if signature(&[10, 0, 0, 1]).set(own.as_fd(), 2).is_err() {
                testkit::skip!("this kernel signs no segments");
            }
            let error = World::new(vec![own]).dump().unwrap_err().to_string();
            assert!(error.contains("keys of signed TCP"), "{error}");
        });
    }

    #[test]
    fn damaged_keys_are_refused() {
        let good = signature(&[127, 0, 0, 1]);
        assert!(good.is_sound());
        for bad in [
            Signature {
                prefix_bits: 33,
                ..good.clone()
            },
            Signature {
                address: vec![1; 5],
                ..good.clone()
            },
            Signature {
                key: vec![1; 81],
                ..good
            },
        ] {
            assert!(!bad.is_sound());
        }
    }
}
