//! Netlink messages: built as bytes, sent, and their answers taken apart (netlink(7)).
//!
//! Two protocols are spoken here, each with a handful of messages: sock_diag(7) and nf_tables.
//! What a message means is its caller's business.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::socket;

const HEADER_BYTES: usize = 16;
const ATTRIBUTE_BYTES: usize = 4;
const NLA_TYPE_MASK: u16 = 0x3fff;
const NLA_F_NESTED: u16 = libc::NLA_F_NESTED as u16;
/// Replies are cut to this size by the kernel (`NLMSG_GOODSIZE` is at most 8 KiB) unless asked
/// for with more room.
const REPLY_BYTES: usize = 64 << 10;

/// `NLM_F_REQUEST`
pub const REQUEST: u16 = libc::NLM_F_REQUEST as u16;
/// `NLM_F_ACK`
pub const ACK: u16 = libc::NLM_F_ACK as u16;
/// `NLM_F_DUMP`
pub const DUMP: u16 = libc::NLM_F_DUMP as u16;
/// `NLM_F_CREATE`
pub const CREATE: u16 = libc::NLM_F_CREATE as u16;
/// `NLM_F_EXCL`
pub const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;

/// A buffer of messages under construction.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    last: usize,
    sequence: u32,
}

impl Batch {
    /// Starts a message; `fixed` is the protocol's own header.
    pub fn message(&mut self, kind: u16, flags: u16, fixed: &[u8]) -> &mut Self {
        self.finish();
        self.last = self.bytes.len();
        self.sequence += 1;
        self.bytes.extend([0; 4]);
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(flags.to_ne_bytes());
        self.bytes.extend(self.sequence.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(fixed);
        self.pad();
        self
    }

    /// Adds an attribute to the message.
    pub fn attribute(&mut self, kind: u16, data: &[u8]) -> &mut Self {
        let len = u16::try_from(ATTRIBUTE_BYTES + data.len()).expect("small attributes");
        self.bytes.extend(len.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(data);
        self.pad();
        self
    }

    /// Adds a string attribute with its NUL.
    pub fn string(&mut self, kind: u16, text: &str) -> &mut Self {
        let mut data = text.as_bytes().to_vec();
        data.push(0);
        self.attribute(kind, &data)
    }

    /// Adds a 32-bit attribute in network order, as nf_tables wants its numbers.
    pub fn big(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// Adds an attribute that holds those which `f` adds.
    pub fn nested(&mut self, kind: u16, f: impl FnOnce(&mut Self)) -> &mut Self {
        let at = self.bytes.len();
        self.attribute(kind | NLA_F_NESTED, &[]);
        f(self);
        let len = u16::try_from(self.bytes.len() - at).expect("callers keep below 64 KiB");
        self.bytes[at..at + 2].copy_from_slice(&len.to_ne_bytes());
        self
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(&mut self) {
        if self.bytes.is_empty() {
            return;
        }
        let len = u32::try_from(self.bytes.len() - self.last).expect("small messages");
        self.bytes[self.last..self.last + 4].copy_from_slice(&len.to_ne_bytes());
    }
}

/// One message of an answer.
#[derive(Clone, Debug)]
pub struct Message {
    /// `nlmsg_type`.
    pub kind: u16,
    /// What follows the netlink header.
    pub payload: Vec<u8>,
}

/// The attributes that follow `fixed_bytes` of a payload: kind and data. What is cut short ends
/// the list.
pub fn attributes(payload: &[u8], fixed_bytes: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = payload.get(fixed_bytes..).unwrap_or_default();
    std::iter::from_fn(move || {
        let half = |at: usize| Some(u16::from_ne_bytes(rest.get(at..at + 2)?.try_into().ok()?));
        let (len, kind) = (usize::from(half(0)?), half(2)? & NLA_TYPE_MASK);
        let data = rest.get(ATTRIBUTE_BYTES..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    })
}

/// The number that a payload or an attribute begins with; 0 for one that is too short.
#[must_use]
pub fn word(data: &[u8]) -> u32 {
    let bytes = data.get(..4).and_then(|four| four.try_into().ok());
    bytes.map_or(0, u32::from_ne_bytes)
}

/// A netlink socket.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
}

impl Netlink {
    /// Opens one for sock_diag(7).
    ///
    /// # Errors
    /// The calls' errno.
    pub fn sock_diag() -> io::Result<Self> {
        Self::open(libc::NETLINK_SOCK_DIAG)
    }

    /// Opens one for interfaces and routes (rtnetlink(7)).
    ///
    /// # Errors
    /// The calls' errno.
    pub fn route() -> io::Result<Self> {
        Self::open(libc::NETLINK_ROUTE)
    }

    /// Opens one for nf_tables and the like.
    ///
    /// # Errors
    /// The calls' errno.
    pub fn netfilter() -> io::Result<Self> {
        Self::open(libc::NETLINK_NETFILTER)
    }

    /// Opens one for IPsec (ip-xfrm(8)).
    ///
    /// # Errors
    /// The calls' errno; `EPROTONOSUPPORT` where the kernel has no IPsec.
    pub fn xfrm() -> io::Result<Self> {
        Self::open(libc::NETLINK_XFRM)
    }

    fn open(protocol: i32) -> io::Result<Self> {
        let socket = socket::open(libc::AF_NETLINK, libc::SOCK_RAW, protocol)?;
        let mut address = [0u8; 12];
        address[..2].copy_from_slice(&16u16.to_ne_bytes()); // AF_NETLINK, port chosen by the kernel
        socket::bind(&socket, &address)?;
        Ok(Self { socket })
    }

    /// Sends the batch in one call.
    ///
    /// # Errors
    /// The call's errno.
    pub fn send(&self, mut batch: Batch) -> io::Result<()> {
        batch.finish();
        let sent = socket::send(&self.socket, &batch.bytes, socket::Along::default(), 0)?;
        if sent != batch.bytes.len() {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        Ok(())
    }

    /// The messages of the next datagram. The first error in it becomes the result; what
    /// acknowledges is left out. `wait`: whether to wait for one.
    ///
    /// # Errors
    /// The call's errno, or the one that an answer reports; `EAGAIN` when nothing is there.
    pub fn receive(&self, wait: bool) -> io::Result<Vec<Message>> {
        let mut messages = parse(&self.datagram(wait)?)?;
        messages.retain(|message| i32::from(message.kind) != libc::NLMSG_DONE);
        Ok(messages)
    }

    fn datagram(&self, wait: bool) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; REPLY_BYTES];
        let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
        let received = socket::receive(&self.socket, &mut buffer, flags)?;
        if received.flags & libc::MSG_TRUNC != 0 {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        buffer.truncate(received.len);
        Ok(buffer)
    }

    /// Sends one request for a list ([`DUMP`]), and gives all of it.
    ///
    /// # Errors
    /// The call's errno, or the one that an answer reports.
    pub fn list(&self, batch: Batch) -> io::Result<Vec<Message>> {
        self.send(batch)?;
        let mut all = Vec::new();
        loop {
            for message in parse(&self.datagram(true)?)? {
                if i32::from(message.kind) == libc::NLMSG_DONE {
                    return Ok(all);
                }
                all.push(message);
            }
        }
    }

    /// Sends one request that has one answer, and gives that.
    ///
    /// # Errors
    /// The call's errno, or the one that the answer reports.
    pub fn ask(&self, batch: Batch) -> io::Result<Vec<Message>> {
        self.send(batch)?;
        self.receive(true)
    }

    /// Sends messages that are all applied or none, and waits for the verdict: the kernel answers
    /// while it is sent, so what is there afterwards is everything.
    ///
    /// # Errors
    /// The call's errno, or the first that an answer reports.
    pub fn apply(&self, batch: Batch) -> io::Result<()> {
        self.send(batch)?;
        let mut first = None;
        loop {
            match self.receive(false) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => break,
                Err(error) => first = first.or(Some(error)),
            }
        }
        first.map_or(Ok(()), Err)
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn parse(mut bytes: &[u8]) -> io::Result<Vec<Message>> {
    let mut messages = Vec::new();
    while bytes.len() >= HEADER_BYTES {
        let len = u32::from_ne_bytes(bytes[..4].try_into().expect("4 bytes")) as usize;
        let kind = u16::from_ne_bytes(bytes[4..6].try_into().expect("2 bytes"));
        if len < HEADER_BYTES || len > bytes.len() {
            return Err(io::Error::from_raw_os_error(libc::EBADMSG));
        }
        let payload = &bytes[HEADER_BYTES..len];
        if i32::from(kind) == libc::NLMSG_ERROR {
            let errno = payload.get(..4).and_then(|four| four.try_into().ok());
            let errno = -i32::from_ne_bytes(errno.unwrap_or_default());
            if errno != 0 {
                return Err(io::Error::from_raw_os_error(errno));
            }
        } else {
            messages.push(Message {
                kind,
                payload: payload.to_vec(),
            });
        }
        bytes = &bytes[len.next_multiple_of(4).min(bytes.len())..];
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_nest_and_come_back() {
        let mut batch = Batch::default();
        batch.message(7, REQUEST, &[1, 2, 3, 4]).string(1, "ab");
        batch.nested(2, |inner| {
            inner.big(3, 9);
        });
        batch.finish();
        let messages = parse(&batch.bytes).unwrap();
        assert_eq!(messages.len(), 1);
        let found: Vec<_> = attributes(&messages[0].payload, 4).collect();
        assert_eq!(found[0], (1, &b"ab\0"[..]));
        assert_eq!(found[1].0, 2);
        assert_eq!(
            attributes(found[1].1, 0).next(),
            Some((3, &[0, 0, 0, 9][..]))
        );
    }

    #[test]
    fn cut_messages_are_refused() {
        let mut batch = Batch::default();
        batch.message(7, REQUEST, &[0; 8]);
        batch.finish();
        assert!(parse(&batch.bytes[..20]).is_err());
    }

    #[test]
    fn the_kernel_answers() {
        let netlink = Netlink::sock_diag().unwrap();
        let mut batch = Batch::default();
        let mut request = [0u8; 24];
        request[0] = 1; // AF_UNIX, inode 1: nobody's
        request[8] = 1;
        request[16..].fill(0xff);
        batch.message(20, REQUEST, &request);
        let error = netlink.ask(batch).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
