//! Data in flight: what stands in a unix socket's receive queue, read without taking it and sent
//! again.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use sys::socket::{Along, Count, Credentials as Who};

use super::address::{Address, NOBODYS};
use super::identity::{self, Patience};
use crate::fd::ready;
use crate::fd::socket::options;
use crate::fd::socket::peek::{self, Peeked};
use crate::fd::{DescriptionId, DumpContext, Open, RestoreContext};
use crate::{Error, Result};

const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const MSG_DONTWAIT: i32 = libc::MSG_DONTWAIT;

/// A message, or a piece of a stream that carries its own descriptors.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Message {
    /// The bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
    /// The sender's name, of a datagram.
    #[prost(bytes = "vec", tag = "2")]
    pub from: Vec<u8>,
    /// The description that has that name.
    #[prost(uint32, optional, tag = "3")]
    pub sender: Option<u32>,
    /// Descriptions that are on their way with it.
    #[prost(uint32, repeated, tag = "4")]
    pub rights: Vec<u32>,
    /// Who sent it, where the receiver asks for that.
    #[prost(message, optional, tag = "5")]
    pub credentials: Option<Credentials>,
}

impl Message {
    /// Refuses a message that no dump writes.
    pub(super) fn check(&self) -> Result<()> {
        if self.rights.len() > sys::socket::RIGHTS_MAX {
            let what = "too many descriptors with one message";
            return Err(Error::corrupt("unix socket", what));
        }
        Address::of_name(self.from.clone()).check()
    }

    /// Who sent it, as far as the kernel has noted that.
    fn sent_by(&self) -> Option<Credentials> {
        self.credentials.filter(|who| who.pid > 0)
    }

    /// Whether the receiver asks who sent it, and is told that the kernel has not noted it: nobody
    /// asked when it was sent.
    fn is_nobodys(&self) -> bool {
        self.credentials.is_some() && self.sent_by().is_none()
    }
}

/// A process, a user and a group.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Credentials {
    /// The process.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// The user.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The group.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
}

impl From<Who> for Credentials {
    fn from(Who { pid, uid, gid }: Who) -> Self {
        Self { pid, uid, gid }
    }
}

impl From<Credentials> for Who {
    fn from(Credentials { pid, uid, gid }: Credentials) -> Self {
        Self { pid, uid, gid }
    }
}

/// The receive queue of `open`; descriptors in it become descriptions of the dump.
///
/// # Errors
/// For out-of-band data, or a system call's errno.
pub fn read(open: &Open<'_>, kind: i32, cx: &mut dyn DumpContext) -> Result<Vec<Message>> {
    let peeked = peek(open, kind)?;
    let mut messages = Vec::with_capacity(peeked.len());
    for Peeked { data, received } in peeked {
        let mut rights = Vec::with_capacity(received.rights.len());
        for right in received.rights {
            rights.push(cx.add(&open.process, right)?.0);
        }
        let from = received.name.get(2..).unwrap_or_default().to_vec();
        let from = if kind == super::STREAM {
            Vec::new()
        } else {
            from
        };
        messages.push(Message {
            sender: sender(&from, cx),
            data,
            from,
            rights,
            credentials: received.credentials.map(Into::into),
        });
    }
    Ok(messages)
}

/// The datagram socket of the tree with this name.
fn sender(name: &[u8], cx: &dyn DumpContext) -> Option<u32> {
    if name.is_empty() {
        return None;
    }
    super::sockets(cx)
        .find(|(open, nature)| nature.kind == super::DGRAM && super::name_of(open) == name)
        .map(|(open, _)| open.id.0)
}

/// Descriptors in the receive queue of `open`, whose queue has connections instead if it listens.
///
/// # Errors
/// As [`read`].
pub fn rights(open: &Open<'_>, kind: i32) -> Result<Vec<std::os::fd::OwnedFd>> {
    let listens = rustix::net::sockopt::socket_acceptconn(open.own()?);
    if listens.map_err(|error| Error::kernel("ask whether a socket listens", error))? {
        return Ok(Vec::new());
    }
    let peeked = peek(open, kind)?;
    Ok(peeked
        .into_iter()
        .flat_map(|peeked| peeked.received.rights)
        .collect())
}

fn peek(open: &Open<'_>, kind: i32) -> Result<Vec<Peeked>> {
    let own = open.own()?;
    let doing = || format!("look into the queue of {}", open.place());
    let failed = |error| Error::kernel(doing(), error);
    if !peek::is_readable(own).map_err(|error| failed(error.into()))? {
        return Ok(Vec::new());
    }
    // To look at messages would take an error that waits to be reported.
    if kind != super::STREAM && super::has_error(own)? {
        return match sys::socket::count(own, Count::Inbound).map_err(failed)? {
            0 => Ok(Vec::new()),
            _ => Err(open.unsupported("messages behind an error that nobody was told of", None)),
        };
    }
    let out_of_band = || open.unsupported("it has out-of-band data in its queue", None);
    // Newer kernels show it among the other data as well, not where it was.
    let urgent = ready::events(own, PollFlags::PRI).map_err(|error| failed(error.into()))?;
    if kind == super::STREAM && urgent.contains(PollFlags::PRI) {
        return Err(out_of_band());
    }
    let peeked = match kind {
        super::STREAM => peek::stream(own),
        kind => peek::messages(own, kind == super::SEQPACKET),
    };
    peeked.map_err(failed)?.ok_or_else(out_of_band)
}

/// Who sends a queue's messages again.
pub enum Source<'a> {
    /// The other end of the connection, in the tree.
    Peer(DescriptionId),
    /// The other end, of a connection whose other side is gone.
    Held(BorrowedFd<'a>),
    /// Anyone, to this address of the socket that had this inode number: a datagram socket that is
    /// not connected yet.
    Anyone(&'a Address, u32),
}

/// Fills the receive queue of `own`.
///
/// # Errors
/// [`Error::Corrupt`] for what no queue can have, or a system call's errno.
pub fn fill(
    messages: &[Message],
    own: BorrowedFd<'_>,
    source: &Source<'_>,
    cx: &mut dyn RestoreContext,
) -> Result<()> {
    let failed = |error| Error::kernel("refill a unix socket's queue", error);
    let total: usize = messages
        .iter()
        .map(|message| message.data.len() + 1024)
        .sum();
    for message in messages {
        let dup = |fd: BorrowedFd<'_>| {
            rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| failed(error.into()))
        };
        let (from, to) = match source {
            Source::Held(held) => (dup(*held)?, None),
            Source::Peer(id) => (dup(cx.description(*id)?)?, None),
            Source::Anyone(to, inode) => {
                let from = match message.sender {
                    Some(id) => dup(cx.description(DescriptionId(id))?)?,
                    None => stand_in(&message.from, cx)?,
                };
                (from, Some((*to, *inode)))
            }
        };
        let old =
            options::enlarge_buffer(from.as_fd(), options::Buffer::Send, total).map_err(failed)?;
        let ends = [from.as_fd(), own];
        // A sender without a name would get one if it asked.
        let quiet = if message.is_nobodys() {
            &ends
        } else {
            &ends[..1]
        };
        let nobody_asks = NobodyAsks::new(quiet).map_err(failed)?;
        send(message, from.as_fd(), to, cx)?;
        drop(nobody_asks);
        options::restore_buffer(from.as_fd(), old).map_err(failed)?;
    }
    Ok(())
}

/// Ends that do not ask who sends, as long as this lives. Of a message between two of them nothing
/// of its sender is noted.
struct NobodyAsks<'a> {
    were_on: Vec<(BorrowedFd<'a>, i32)>,
}

impl<'a> NobodyAsks<'a> {
    fn new(ends: &[BorrowedFd<'a>]) -> std::io::Result<Self> {
        const SO_PASSCRED: i32 = libc::SO_PASSCRED;
        const SO_PASSPIDFD: i32 = libc::SO_PASSPIDFD;
        let mut this = Self {
            were_on: Vec::new(),
        };
        for &end in ends {
            for option in [SO_PASSCRED, SO_PASSPIDFD] {
                // Kernels before 6.5 have but one of them.
                if sys::socket::number(end, SOL_SOCKET, option).is_ok_and(|on| on != 0) {
                    sys::socket::set_number(end, SOL_SOCKET, option, 0)?;
                    this.were_on.push((end, option));
                }
            }
        }
        Ok(this)
    }
}

impl Drop for NobodyAsks<'_> {
    fn drop(&mut self) {
        for (end, option) in &self.were_on {
            if let Err(error) = sys::socket::set_number(*end, SOL_SOCKET, *option, 1) {
                log::warn!("a unix socket no longer asks who sends: {error}");
            }
        }
    }
}

/// A datagram socket with the name of a sender that is not in the tree.
fn stand_in(name: &[u8], cx: &mut dyn RestoreContext) -> Result<std::os::fd::OwnedFd> {
    let socket = sys::socket::open(1, super::DGRAM, 0)
        .map_err(|error| Error::kernel("make a unix socket", error))?;
    let address = Address::of_name(name.to_vec());
    address.bind(socket.as_fd(), (super::DGRAM, NOBODYS), cx.unix())?;
    Ok(socket)
}

fn send(
    message: &Message,
    from: BorrowedFd<'_>,
    to: Option<(&Address, u32)>,
    cx: &mut dyn RestoreContext,
) -> Result<()> {
    let failed = |error| Error::kernel("refill a unix socket's queue", error);
    let mut rights = Vec::with_capacity(message.rights.len());
    for id in &message.rights {
        let right = cx.description(DescriptionId(*id))?;
        let right = rustix::io::fcntl_dupfd_cloexec(right, 0);
        rights.push(right.map_err(|error| failed(error.into()))?);
    }
    let name = to.map(|(to, _)| to.reached_by());
    let patience = cx.unix().patience();
    let sending = Sending {
        from,
        to: name.as_deref(),
        patience: &patience,
    };
    let deliver = || sending.deliver(message, &rights);
    let result = match to {
        Some((to, inode)) => to.route(inode, cx.unix())?.run(deliver)?,
        None => deliver(),
    };
    result.map_err(failed)
}

/// A socket that sends what waits in another's queue.
struct Sending<'a> {
    from: BorrowedFd<'a>,
    /// The name of the other, where they are not connected.
    to: Option<&'a [u8]>,
    patience: &'a Patience,
}

impl Sending<'_> {
    fn deliver(&self, message: &Message, rights: &[std::os::fd::OwnedFd]) -> std::io::Result<()> {
        let rights = rights.iter().map(AsFd::as_fd).collect::<Vec<_>>();
        let mut rest = message.data.as_slice();
        let mut along = Along {
            name: self.to,
            rights: &rights,
            credentials: message.sent_by().map(Into::into),
        };
        loop {
            let sent = self.piece(rest, along)?;
            rest = &rest[sent..];
            if rest.is_empty() {
                return Ok(());
            }
            along.rights = &[];
        }
    }

    /// Sends as much as there is room for, in the name of the message's sender.
    fn piece(&self, bytes: &[u8], along: Along<'_>) -> std::io::Result<usize> {
        let plain = || sys::socket::send(self.from, bytes, along, MSG_DONTWAIT);
        let Some(who) = along.credentials else {
            return plain();
        };
        // The sender comes to life later: nobody else can name him now.
        let named = |who| sys::identity::send(who, self.from, bytes, along, MSG_DONTWAIT);
        identity::act_as(who, self.patience, named, plain)
    }
}
