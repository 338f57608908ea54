//! Packets made by hand, from another host's address to one of this host: they are delivered
//! here and never leave.
//!
//! One is the other end's shutdown of a TCP connection, said again: a socket that has heard it is
//! in a state that no call leads to. The others are datagrams that were not read yet, and that
//! nobody receives what was sent.

use std::io;
use std::net::{IpAddr, SocketAddr};

use sys::socket::{Along, open, send};

use super::inet::{AF_INET, AF_INET6};

const IPPROTO_ICMP: u8 = libc::IPPROTO_ICMP as u8;
const IPPROTO_TCP: u8 = libc::IPPROTO_TCP as u8;
const IPPROTO_UDP: u8 = libc::IPPROTO_UDP as u8;
const IPPROTO_ICMPV6: u8 = libc::IPPROTO_ICMPV6 as u8;
const IPPROTO_UDPLITE: u8 = libc::IPPROTO_UDPLITE as u8;
const IPPROTO_RAW: i32 = libc::IPPROTO_RAW;
const SOCK_RAW: i32 = libc::SOCK_RAW;
const FIN_ACK: u8 = 0x11;
const HOPS: u8 = 64;
const UDP_BYTES: usize = 8;

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
    let mut tcp = Vec::new();
    tcp.extend(remote.port().to_be_bytes());
    tcp.extend(local.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend(acknowledged.to_be_bytes());
    tcp.extend([5 << 4, FIN_ACK]);
    tcp.extend(0xffff_u16.to_be_bytes()); // window
    tcp.extend([0; 4]); // checksum, urgent pointer
    deliver(local.ip(), remote.ip(), IPPROTO_TCP, (tcp, 16))
}

/// Sends a datagram from `remote` to `local`, of UDP-Lite where `is_lite`.
///
/// # Errors
/// The calls' errno; `EMSGSIZE` for more than a datagram can hold.
pub fn send_datagram(
    local: SocketAddr,
    remote: SocketAddr,
    data: &[u8],
    is_lite: bool,
) -> io::Result<()> {
    let too_long = |_| io::Error::from(rustix::io::Errno::MSGSIZE);
    let length = u16::try_from(UDP_BYTES + data.len()).map_err(too_long)?;
    let mut udp = Vec::with_capacity(usize::from(length));
    udp.extend(remote.port().to_be_bytes());
    udp.extend(local.port().to_be_bytes());
    // In its place UDP-Lite says how much the checksum covers: 0 is all of it.
    udp.extend(if is_lite { 0 } else { length }.to_be_bytes());
    udp.extend([0; 2]); // checksum
    udp.extend(data);
    deliver(local.ip(), remote.ip(), protocol(is_lite), (udp, 6))
}

fn protocol(is_lite: bool) -> u8 {
    if is_lite {
        IPPROTO_UDPLITE
    } else {
        IPPROTO_UDP
    }
}

/// Says to `local` that nobody receives its datagrams at `remote`: "port unreachable", as RFC 792
/// and RFC 4443 have it.
///
/// # Errors
/// The calls' errno.
pub fn send_unreachable(local: SocketAddr, remote: SocketAddr, is_lite: bool) -> io::Result<()> {
    let mut udp = Vec::with_capacity(UDP_BYTES);
    udp.extend(local.port().to_be_bytes());
    udp.extend(remote.port().to_be_bytes());
    udp.extend((UDP_BYTES as u16).to_be_bytes());
    udp.extend([0; 2]); // checksum
    let ends = (local.ip().to_canonical(), remote.ip().to_canonical());
    // What is complained about goes along.
    let header = header(ends, protocol(is_lite), UDP_BYTES)?.0;
    let (protocol, what) = match ends {
        (IpAddr::V4(_), IpAddr::V4(_)) => (IPPROTO_ICMP, [3, 3]),
        _ => (IPPROTO_ICMPV6, [1, 4]),
    };
    let mut message = what.to_vec();
    message.extend([0; 6]); // checksum, unused
    message.extend(header);
    message.extend(udp);
    deliver(local.ip(), remote.ip(), protocol, (message, 2))
}

/// Sends a segment, whose checksum goes to a place in it.
fn deliver(
    local: IpAddr,
    remote: IpAddr,
    protocol: u8,
    (mut segment, place): (Vec<u8>, usize),
) -> io::Result<()> {
    let too_long = |_| io::Error::from(rustix::io::Errno::MSGSIZE);
    let length = u16::try_from(segment.len()).map_err(too_long)?;
    let pseudo = [
        0,
        0,
        0,
        protocol,
        0,
        0,
        length.to_be_bytes()[0],
        length.to_be_bytes()[1],
    ];
    let ends = (remote.to_canonical(), local.to_canonical());
    // ICMP for IPv4 counts no addresses in.
    let counted: &[&[u8]] = match (protocol, ends) {
        (IPPROTO_ICMP, _) => &[&segment],
        (_, (IpAddr::V4(from), IpAddr::V4(to))) => {
            &[&from.octets(), &to.octets(), &pseudo, &segment]
        }
        (_, (IpAddr::V6(from), IpAddr::V6(to))) => {
            &[&from.octets(), &to.octets(), &pseudo, &segment]
        }
        _ => return Err(rustix::io::Errno::AFNOSUPPORT.into()),
    };
    let sum = checksum(counted);
    segment[place..place + 2].copy_from_slice(&sum.to_be_bytes());
    let (header, family) = header(ends, protocol, segment.len())?;
    let packet = [header, segment].concat();
    let socket = open(family, SOCK_RAW, IPPROTO_RAW)?;
    let to = destination(local);
    let along = Along {
        name: Some(&to),
        ..Along::default()
    };
    send(&socket, &packet, along, 0).map(drop)
}

/// The header of a packet of the first address to the second with so many bytes after it, and the
/// family.
fn header(
    ends: (IpAddr, IpAddr),
    protocol: u8,
    segment_bytes: usize,
) -> io::Result<(Vec<u8>, i32)> {
    let too_long = |_| io::Error::from(rustix::io::Errno::MSGSIZE);
    match ends {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0];
            let total = u16::try_from(20 + segment_bytes).map_err(too_long)?;
            header.extend(total.to_be_bytes());
            // Identification and checksum are filled in by the kernel.
            header.extend([0, 0, 0, 0, HOPS, protocol, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
            Ok((header, AF_INET))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(
                u16::try_from(segment_bytes)
                    .map_err(too_long)?
                    .to_be_bytes(),
            );
            header.extend([protocol, HOPS]);
            header.extend(from.octets());
            header.extend(to.octets());
            Ok((header, AF_INET6))
        }
        _ => Err(rustix::io::Errno::AFNOSUPPORT.into()),
    }
}

/// The `sockaddr` of the address, without port (raw sockets have none).
fn destination(address: IpAddr) -> Vec<u8> {
    match address.to_canonical() {
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

/// The internet checksum of the parts; all but the last are of even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let word =
        |bytes: &[u8]| u64::from(bytes[0]) << 8 | bytes.get(1).map_or(0, |low| (*low).into());
    let mut sum: u64 = words.map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // What is 0 would mean "none" in a datagram; its complement says the same.
    match !u16::try_from(sum).expect("folded above") {
        0 => 0xffff,
        sum => sum,
    }
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
