//! The few netlink messages that the probes send.
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd};

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
    socket_with,
};

use super::{called, why};

/// Asks for an answer, at least whether the request succeeded.
const REQUEST: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
/// Asks for everything there is.
const LIST: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;

/// Opens the network namespace that this process is in.
pub(super) fn own_namespace() -> Result<File, String> {
    let path = "/proc/self/ns/net";
    File::open(path).map_err(|error| why(path, &error))
}

/// Opens the network namespace that a socket or a TUN device belongs to.
pub(super) fn namespace_of(socket: &impl AsRawFd) -> Result<OwnedFd, String> {
    /// `SIOCGSKNS` of the kernel's include/uapi/linux/sockios.h.
    const SIOCGSKNS: libc::Ioctl = libc::SIOCGSKNS;
    // SAFETY: the request has no argument.
    let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS, 0) };
    called("SIOCGSKNS", fd.into())?;
    // SAFETY: the call has just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `NETLINK_ROUTE`, the protocol 0.
const ROUTE: Option<Protocol> = None;

/// A netlink message under construction.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16, sequence: u32) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        Self(bytes)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn attribute(self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).expect("probes send short attributes");
        let mut attribute = length.to_ne_bytes().to_vec();
        attribute.extend(kind.to_ne_bytes());
        attribute.extend(value);
        self.bytes(&attribute)
    }

    fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).expect("probes send short messages");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

/// Sends messages and reads answers until one tells how it went; returns the answers before it.
fn exchange(
    protocol: Option<Protocol>,
    messages: &[u8],
    name: &str,
) -> Result<Vec<Vec<u8>>, String> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
        .map_err(|error| why("socket(AF_NETLINK)", &error.into()))?;
    send(&socket, messages, SendFlags::empty()).map_err(|error| why(name, &error.into()))?;
    let mut answers = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())
            .map_err(|error| why(name, &error.into()))?;
        if length == 0 {
            return Err(format!("{name}: the kernel does not answer"));
        }
        for (kind, body) in split(&buffer[..length]) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(answers),
                libc::NLMSG_ERROR => {
                    let code = body
                        .first_chunk()
                        .map_or(0, |code| -i32::from_ne_bytes(*code));
                    return match code {
                        0 => Ok(answers),
                        code => Err(why(name, &io::Error::from_raw_os_error(code))),
                    };
                }
                _ => answers.push(body.to_vec()),
            }
        }
    }
}

/// Splits what was received into messages: their kinds and what follows their headers.
fn split(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut messages = Vec::new();
    while let Some(&[l0, l1, l2, l3, k0, k1]) = bytes.first_chunk() {
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let Some(body) = bytes.get(16..length) else {
            break;
        };
        messages.push((u16::from_ne_bytes([k0, k1]), body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    messages
}

/// Lists the internet sockets of a protocol.
pub(super) fn diag_inet(protocol: u8) -> Result<(), String> {
    // struct inet_diag_req_v2: family, protocol, extensions, padding, states, socket id.
    let mut request = vec![libc::AF_INET as u8, protocol, 0, 0];
    request.extend(u32::MAX.to_ne_bytes());
    request.extend([0; 48]);
    list_sockets(&request)
}

/// Lists the unix sockets.
pub(super) fn diag_unix() -> Result<(), String> {
    // struct unix_diag_req: family, protocol, padding, states, inode, what to show, cookie.
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    request.extend(u32::MAX.to_ne_bytes());
    request.extend([0; 16]);
    list_sockets(&request)
}

fn list_sockets(request: &[u8]) -> Result<(), String> {
    const SOCK_DIAG_BY_FAMILY: u16 = abi::kernel::SOCK_DIAG_BY_FAMILY;
    let message = Message::new(SOCK_DIAG_BY_FAMILY, LIST, 1).bytes(request);
    exchange(
        Some(netlink::SOCK_DIAG),
        &message.finish(),
        "SOCK_DIAG_BY_FAMILY",
    )
    .map(drop)
}

const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

/// Asks which id the current namespace gives to `namespace`.
pub(super) fn namespace_id(namespace: &impl AsRawFd) -> Result<(), String> {
    let message = Message::new(libc::RTM_GETNSID, REQUEST, 1)
        .bytes(&[0; 4])
        .attribute(NETNSA_FD, &namespace.as_raw_fd().to_ne_bytes());
    let answers = exchange(ROUTE, &message.finish(), "RTM_GETNSID")?;
    if answers.is_empty() {
        Err("RTM_GETNSID: no answer".to_owned())
    } else {
        Ok(())
    }
}

/// Gives `namespace` an id in the current namespace.
pub(super) fn set_namespace_id(namespace: &impl AsRawFd, id: i32) -> Result<(), String> {
    let message = Message::new(libc::RTM_NEWNSID, REQUEST, 1)
        .bytes(&[0; 4])
        .attribute(NETNSA_NSID, &id.to_ne_bytes())
        .attribute(NETNSA_FD, &namespace.as_raw_fd().to_ne_bytes());
    exchange(ROUTE, &message.finish(), "RTM_NEWNSID").map(drop)
}

/// Returns a `struct ifinfomsg` for the device of this number.
fn interface(index: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes
}

/// Lists the devices of the namespace of this id.
pub(super) fn count_links(namespace: i32) -> Result<usize, String> {
    const IFLA_TARGET_NETNSID: u16 = libc::IFLA_TARGET_NETNSID;
    let message = Message::new(libc::RTM_GETLINK, LIST, 1)
        .bytes(&interface(0))
        .attribute(IFLA_TARGET_NETNSID, &namespace.to_ne_bytes());
    let links = exchange(ROUTE, &message.finish(), "RTM_GETLINK by id")?;
    if links.is_empty() {
        Err("RTM_GETLINK by id: no device".to_owned())
    } else {
        Ok(links.len())
    }
}

/// Makes a pair of devices, one of which has this number.
pub(super) fn make_dummy(index: i32) -> Result<(), String> {
    const IFLA_LINKINFO: u16 = libc::IFLA_LINKINFO;
    const IFLA_INFO_KIND: u16 = libc::IFLA_INFO_KIND;
    let create = REQUEST | (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
    let kind = Message(Vec::new()).attribute(IFLA_INFO_KIND, b"veth");
    let message = Message::new(libc::RTM_NEWLINK, create, 1)
        .bytes(&interface(index))
        .attribute(IFLA_LINKINFO, &kind.0);
    exchange(ROUTE, &message.finish(), "RTM_NEWLINK of a veth").map(drop)
}

/// Moves a device into `namespace`, where it gets another number.
pub(super) fn move_link(
    index: i32,
    namespace: &impl AsRawFd,
    new_index: i32,
) -> Result<(), String> {
    const IFLA_NET_NS_FD: u16 = libc::IFLA_NET_NS_FD;
    const IFLA_NEW_IFINDEX: u16 = libc::IFLA_NEW_IFINDEX;
    let message = Message::new(libc::RTM_SETLINK, REQUEST, 1)
        .bytes(&interface(index))
        .attribute(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes())
        .attribute(IFLA_NEW_IFINDEX, &new_index.to_ne_bytes());
    exchange(
        ROUTE,
        &message.finish(),
        "RTM_SETLINK with IFLA_NEW_IFINDEX",
    )
    .map(drop)
}

/// Makes a table of packet filters.
pub(super) fn make_table() -> Result<(), String> {
    const NFTABLES: u16 = 10;
    const BATCH_BEGIN: u16 = 0x10;
    const BATCH_END: u16 = 0x11;
    const NEW_TABLE: u16 = NFTABLES << 8;
    const NFTA_TABLE_NAME: u16 = 1;
    /// `NFPROTO_INET`, a table for both internet protocols.
    const INET: u8 = 1;
    let flags = libc::NLM_F_REQUEST as u16;
    let batch = [0, 0, 0, NFTABLES as u8];
    let create = REQUEST | libc::NLM_F_CREATE as u16;
    let mut messages = Message::new(BATCH_BEGIN, flags, 1).bytes(&batch).finish();
    let table = Message::new(NEW_TABLE, create, 2)
        .bytes(&[INET, 0, 0, 0])
        .attribute(NFTA_TABLE_NAME, b"probe\0");
    messages.extend(table.finish());
    messages.extend(Message::new(BATCH_END, flags, 3).bytes(&batch).finish());
    exchange(Some(netlink::NETFILTER), &messages, "NFT_MSG_NEWTABLE").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_split_and_a_lying_length_ends_them() {
        let mut bytes = Message::new(16, 0, 1).bytes(&[1, 2, 3]).finish();
        bytes.extend(Message::new(17, 0, 2).bytes(&[4; 4]).finish());
        assert_eq!(split(&bytes), [(16, &[1, 2, 3, 0][..]), (17, &[4; 4][..])]);
        let at = bytes.len() - 20;
        bytes[at] = 200;
        assert_eq!(split(&bytes).len(), 1);
        bytes[0] = 3;
        assert_eq!(split(&bytes).len(), 0);
    }
}
