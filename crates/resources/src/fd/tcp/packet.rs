//! The one packet that is made by hand: the other end's shutdown, said again.
//!
//! A socket that has heard it is in a state that no call leads to. The packet goes to an address
//! of this host and is delivered here; it never leaves.

use std::io;
use std::net::{IpAddr, SocketAddr};

use sys::socket::{Along, open, send};

const IPPROTO_TCP: u8 = 6;
const IPPROTO_RAW: i32 = 255;
const SOCK_RAW: i32 = 3;
const FIN_ACK: u8 = 0x11;
const TCP_BYTES: usize = 20;

/// Sends "I shall send no more" from `remote` to `local`, with these sequence numbers.
///
/// # Errors
/// The calls' errno.
pub fn send_fin(
    local: SocketAddr,
    remote: SocketAddr,
    sequence: u32,
    acknowledged: u32,
) -> io::Result<()> {
    let mut tcp = Vec::with_capacity(TCP_BYTES);
    tcp.extend(remote.port().to_be_bytes());
    tcp.extend(local.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend(acknowledged.to_be_bytes());
    tcp.extend([5 << 4, FIN_ACK]);
    tcp.extend(0xffff_u16.to_be_bytes()); // window
    tcp.extend([0; 4]); // checksum, urgent pointer
    let (packet, family) = match (remote.ip().to_canonical(), local.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let sum = checksum(&[&from.octets(), &to.octets(), &pseudo(&tcp), &tcp]);
            tcp[16..18].copy_from_slice(&sum.to_be_bytes());
            let total = u16::try_from(20 + tcp.len()).expect("40 bytes");
            let mut packet = vec![0x45, 0];
            packet.extend(total.to_be_bytes());
            // Identification and checksum are filled in by the kernel.
            packet.extend([0, 0, 0, 0, 64, IPPROTO_TCP, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            (packet, super::address::AF_INET)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let sum = checksum(&[&from.octets(), &to.octets(), &pseudo(&tcp), &tcp]);
            tcp[16..18].copy_from_slice(&sum.to_be_bytes());
            let length = u16::try_from(tcp.len()).expect("20 bytes");
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend(length.to_be_bytes());
            packet.extend([IPPROTO_TCP, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            (packet, super::address::AF_INET6)
        }
        _ => return Err(rustix::io::Errno::AFNOSUPPORT.into()),
    };
    let packet = [packet, tcp].concat();
    let socket = open(family, SOCK_RAW, IPPROTO_RAW)?;
    let to = destination(local);
    let along = Along {
        name: Some(&to),
        ..Along::default()
    };
    send(&socket, &packet, along, 0).map(drop)
}

/// Protocol and length, as the checksum wants them.
fn pseudo(tcp: &[u8]) -> [u8; 8] {
    let length = u32::try_from(tcp.len()).expect("20 bytes").to_be_bytes();
    let [a, b, c, d] = length;
    [0, 0, 0, IPPROTO_TCP, a, b, c, d]
}

/// The `sockaddr` of the address, without port (raw sockets have none).
fn destination(address: SocketAddr) -> Vec<u8> {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => {
            let mut bytes = 2u16.to_ne_bytes().to_vec();
            bytes.extend([0; 2]);
            bytes.extend(ip.octets());
            bytes.extend([0; 8]);
            bytes
        }
        IpAddr::V6(ip) => {
            let mut bytes = 10u16.to_ne_bytes().to_vec();
            bytes.extend([0; 6]);
            bytes.extend(ip.octets());
            bytes.extend([0; 4]);
            bytes
        }
    }
}

/// The internet checksum of the parts, each of even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks_exact(2));
    let mut sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded above")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_1071() {
        let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&[&data]), !0xddf2);
    }
}
