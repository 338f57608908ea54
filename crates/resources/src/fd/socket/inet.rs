//! Internet addresses as the kernel writes them: `sockaddr_in` and `sockaddr_in6`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// `AF_INET`.
pub const AF_INET: i32 = libc::AF_INET;
/// `AF_INET6`.
pub const AF_INET6: i32 = linux_raw_sys::net::AF_INET6 as i32;

/// Reads a `sockaddr`; `None` for one of another family or cut short.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    let ip = match family {
        AF_INET => {
            let octets: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            IpAddr::V4(Ipv4Addr::from(octets))
        }
        AF_INET6 => {
            let octets: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(octets))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// Whether binding to the address would ask for nothing: no address, no port.
#[must_use]
pub fn is_any(bytes: &[u8]) -> bool {
    parse(bytes).is_none_or(|address| address.port() == 0 && address.ip().is_unspecified())
}

/// The address for messages.
#[must_use]
pub fn print(bytes: &[u8]) -> String {
    parse(bytes).map_or_else(|| "nowhere".to_owned(), |address| address.to_string())
}
