//! Unix sockets: pairs and connections inside of the tree, listeners, names, data in flight.
//!
//! Two connected sockets of the tree come back as a pair that has the names of before; a queue is
//! filled by sending its messages again through the other end. A listener is bound again and its
//! file made anew; clients that wait to be accepted connect again.
//!
//! - Kept: pairs and connections of the tree, listeners with the clients that wait, names with
//!   their files, unread data with descriptors and credentials in it. With `--ext-unix-sk`,
//!   datagram sockets to a named one outside; with `--unix-close`, connections to the outside come
//!   back as ended.
//! - Refused: "its peer (…) is outside of the tree" (`--ext-unix-sk` or `--unix-close`); "it waits
//!   to be accepted by a socket outside of the tree" (`--unix-close`); "a client outside of the
//!   tree… waits to be accepted" (`--unix-close`); "a client that has hung up waits to be
//!   accepted" (`--unix-close`); "it has sent data before it was accepted"; "datagrams are queued,
//!   and it has no name to send them to"; "it is connected one way to a socket without a name";
//!   "messages behind an error that nobody was told of"; "it has out-of-band data in its queue";
//!   "it is bound as …, which does not lead to …"; "its file has … names, of which … has …"; "its
//!   file's name … is longer than an address"; "it is no socket".
//! - At a restore: the socket's file: "… is in use by another process", or "… is in the way: it is
//!   no socket".
//! - CRIU 4.2: the same inside of the tree; refuses credentials in a queue, and out-of-band data
//!   becomes ordinary data. Of peers outside only named datagram sockets, with `--ext-unix-sk`, and
//!   those that `--external` names.

mod address;
mod connect;
mod deferred;
mod identity;
mod names;
mod queue;

pub use deferred::Deferred;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;

use address::Address;
use connect::Server;
use queue::{Credentials, Message, Source};

use super::socket::diag::{self, Facts, State};
use super::socket::options::{Moment, Options};
use super::socket::{self, Nature};
use super::{DescriptionId, DumpContext, Kind, Open, RestoreContext, Stage, ready};
use crate::{Allow, Error, Result};

const TAG: u16 = super::tags::UNIX;

const AF_UNIX: i32 = libc::AF_UNIX;
const STREAM: i32 = 1;
const DGRAM: i32 = 2;
const SEQPACKET: i32 = 5;
const RCV_SHUTDOWN: u32 = 1;
const SEND_SHUTDOWN: u32 = 2;
const BOTH_SHUTDOWN: u32 = RCV_SHUTDOWN | SEND_SHUTDOWN;
const SHUT_RD: i32 = libc::SHUT_RD;
const SHUT_WR: i32 = libc::SHUT_WR;

/// The option by which a connection to the outside ends.
const CLOSE: &str = "--unix-close";

/// Sockets of connections that ended are held under keys of their own.
const HELD: u64 = 1 << 40;

/// A unix socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Unix {
    /// The inode number at the dump: how two ends of a connection find each other.
    #[prost(uint32, tag = "1")]
    pub inode: u32,
    /// `SOCK_STREAM`, `SOCK_DGRAM` or `SOCK_SEQPACKET`.
    #[prost(int32, tag = "2")]
    pub kind: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "3")]
    pub common: socket::Common,
    /// Its name.
    #[prost(message, required, tag = "4")]
    pub address: Address,
    /// What it is connected to.
    #[prost(enumeration = "Link", tag = "5")]
    pub link: i32,
    /// The peer's inode number ([`Link::Pair`]).
    #[prost(uint32, tag = "6")]
    pub peer: u32,
    /// The peer's description ([`Link::Pair`]).
    #[prost(uint32, tag = "7")]
    pub peer_id: u32,
    /// The peer's name.
    #[prost(message, required, tag = "8")]
    pub peer_address: Address,
    /// Whether its abstract name is also another socket's: it was accepted by that one.
    #[prost(bool, tag = "9")]
    pub accepted: bool,
    /// The same of the peer.
    #[prost(bool, tag = "10")]
    pub peer_accepted: bool,
    /// The backlog ([`Link::Listening`]).
    #[prost(uint32, tag = "11")]
    pub backlog: u32,
    /// Descriptions of clients that wait to be accepted, in order.
    #[prost(uint32, repeated, tag = "12")]
    pub waiting: Vec<u32>,
    /// `RCV_SHUTDOWN` (1) and `SEND_SHUTDOWN` (2).
    #[prost(uint32, tag = "13")]
    pub shutdown: u32,
    /// Whether the next call reports that the peer went away with data unread.
    #[prost(bool, tag = "14")]
    pub reset: bool,
    /// The receive queue.
    #[prost(message, repeated, tag = "15")]
    pub queue: Vec<Message>,
    /// Its options.
    #[prost(message, required, tag = "16")]
    pub options: Options,
    /// Who made the other end, as it is told (`SO_PEERCRED`); of a listener, who made it listen.
    #[prost(message, optional, tag = "17")]
    pub maker: Option<Credentials>,
    /// What the peer is told.
    #[prost(message, optional, tag = "18")]
    pub peer_maker: Option<Credentials>,
    /// The supplementary groups of the `maker` (`SO_PEERGROUPS`).
    #[prost(uint32, repeated, tag = "19")]
    pub maker_groups: Vec<u32>,
    /// Those of the `peer_maker`.
    #[prost(uint32, repeated, tag = "20")]
    pub peer_maker_groups: Vec<u32>,
}

/// The maker of a socket, as `SO_PEERCRED` and `SO_PEERGROUPS` tell it.
type Maker<'a> = sys::identity::Identity<'a>;

impl Unix {
    fn maker(&self) -> Option<Maker<'_>> {
        let (who, groups) = (self.maker?.into(), &self.maker_groups);
        Some(Maker { who, groups })
    }

    fn peer_maker(&self) -> Option<Maker<'_>> {
        let (who, groups) = (self.peer_maker?.into(), &self.peer_maker_groups);
        Some(Maker { who, groups })
    }

    /// Has it come back as if its peer had been closed.
    fn lose_peer(&mut self) {
        self.set_link(Link::Gone);
        self.peer = 0;
        if self.kind != DGRAM {
            self.shutdown = BOTH_SHUTDOWN;
        }
    }
}

/// What a unix socket is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Link {
    /// Nothing.
    None = 0,
    /// It listens.
    Listening = 1,
    /// Another socket of the tree, which is connected to it.
    Pair = 2,
    /// A socket that was closed.
    Gone = 3,
    /// A socket that has not been accepted yet.
    Waiting = 4,
    /// A datagram socket with a name, in one direction.
    Named = 5,
}

/// The kind.
pub struct UnixSocket;

impl Kind for UnixSocket {
    type Record = Unix;
    const TAG: u16 = TAG;
    const NAME: &'static str = "unix socket";

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, |nature| nature.family == AF_UNIX)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Unix> {
        describe_open(open, cx)
    }

    fn check(record: &Unix) -> Result<()> {
        record.options.check()?;
        record.address.check()?;
        record.peer_address.check()?;
        record.queue.iter().try_for_each(Message::check)?;
        let known = [STREAM, DGRAM, SEQPACKET].contains(&record.kind);
        if !known || Link::try_from(record.link).is_err() {
            return Err(Error::corrupt(Self::NAME, "of no known type"));
        }
        Ok(())
    }

    fn describe(record: &Unix) -> String {
        let kind = match record.kind {
            STREAM => "stream",
            DGRAM => "dgram",
            _ => "seqpacket",
        };
        let bytes: usize = record.queue.iter().map(|message| message.data.len()).sum();
        let link = match record.link() {
            Link::None => "unconnected".to_owned(),
            Link::Listening => format!("listening backlog={}", record.backlog),
            Link::Pair => format!("peer={}", record.peer),
            Link::Gone => "peer gone".to_owned(),
            Link::Waiting => format!("waiting for {}", record.peer_address.print()),
            Link::Named => format!("to {}", record.peer_address.print()),
        };
        let (inode, name) = (record.inode, record.address.print());
        format!("{kind} {inode} {name} {link} queued={bytes}")
    }

    fn open(record: &Unix, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let own = match record.link() {
            Link::Pair | Link::Gone => connect::connected(record, cx)?,
            Link::None | Link::Named if record.kind == DGRAM && record.maker.is_some() => {
                connect::parted(record, &cx.unix().patience())?
            }
            Link::None | Link::Listening | Link::Waiting | Link::Named => new(record.kind)?,
        };
        // A listener gets its name last: connections that it accepted may have to borrow it.
        let is_named = is_connection(record) && connect::server(record) == Some(Server::Own);
        if record.link() != Link::Listening && !is_named {
            let what = (record.kind, record.inode);
            record.address.bind(own.as_fd(), what, cx.unix())?;
        }
        record.common.apply(own.as_fd())?;
        Ok(own)
    }

    fn finish(record: &Unix, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        match record.link() {
            Link::Listening => finish_listener(record, own, cx)?,
            Link::Pair => {
                record.options.apply(own, Moment::Early)?;
                let peer = Source::Peer(DescriptionId(record.peer_id));
                queue::fill(&record.queue, own, &peer, cx)?;
            }
            Link::Gone => finish_gone(record, own, cx)?,
            Link::None | Link::Named | Link::Waiting => finish_single(record, own, cx)?,
        }
        // Of a connection, one end's receiving side is the other end's sending side.
        if record.link() == Link::Pair && record.kind != DGRAM {
            shut(own, record.shutdown & RCV_SHUTDOWN)?;
        }
        record.options.apply(own, Moment::Late)
    }

    fn stages(record: &Unix, _allow: &Allow) -> &'static [Stage] {
        match record.kind != DGRAM && is_connection(record) {
            true => &[],
            false => &[Stage::Enable],
        }
    }

    fn act(record: &Unix, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        shut(own, record.shutdown)
    }
}

fn is_connection(record: &Unix) -> bool {
    matches!(record.link(), Link::Pair | Link::Gone)
}

/// The unix sockets of the tree.
fn sockets<'a>(cx: &'a dyn DumpContext) -> impl Iterator<Item = (&'a Open<'a>, Nature)> + use<'a> {
    cx.all().iter().filter_map(|open| {
        let nature = Nature::of(open).ok().flatten()?;
        (nature.family == AF_UNIX).then_some((open, nature))
    })
}

/// What the kernel tells about the socket with this inode number.
fn facts_of(inode: u32, cx: &dyn DumpContext) -> Result<Facts> {
    let are_many = || sockets(cx).nth(diag::MANY - 1).is_some();
    cx.all().unix.facts(inode, are_many)
}

fn describe_open(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Unix> {
    let own = open.own()?;
    let nature = Nature::of(open)?.ok_or_else(|| open.unsupported("it is no socket", None))?;
    let inode = socket::inode(open);
    let facts = facts_of(inode, cx)?;
    let reachable = facts.state != State::Established || nature.kind == DGRAM;
    let mut record = Unix {
        inode,
        kind: nature.kind,
        common: socket::Common::of(open),
        address: Address::read(open, reachable)?,
        peer_address: Address::of_name(address::peer_name_of(own)?),
        shutdown: facts.shutdown.into(),
        options: Options::of(open, cx)?,
        maker: maker_of(own)?,
        ..Unix::default()
    };
    identity::refuse_label(open)?;
    if record.maker.is_some() {
        record.maker_groups = identity::groups_of(own)?;
    }
    if facts.state == State::Listening {
        record.set_link(Link::Listening);
        record.backlog = facts.backlog;
        record.waiting = waiting(open, &facts, cx)?;
        return Ok(record);
    }
    record.reset = has_error(own)?;
    record.queue = queue::read(open, nature.kind, cx)?;
    if let Some(peer) = facts.peer {
        describe_peer(open, peer, &mut record, cx)?;
    }
    let name_matters = record.link() == Link::None && record.address.is_unnamed();
    if name_matters && !record.queue.is_empty() {
        return Err(open.unsupported(
            "datagrams are queued, and it has no name to send them to",
            None,
        ));
    }
    let shared = |address: &Address| address.is_abstract() && is_shared(&address.name, cx);
    record.accepted = nature.kind != DGRAM && shared(&record.address);
    record.peer_accepted = nature.kind != DGRAM && shared(&record.peer_address);
    Ok(record)
}

/// Whether several stream sockets of the tree have this name: a listener and what it accepted.
fn is_shared(name: &[u8], cx: &dyn DumpContext) -> bool {
    let streams = || sockets(cx).filter(|(_, nature)| nature.kind != DGRAM);
    let names = || streams().map(|(open, _)| name_of(open).to_vec());
    cx.all().unix.named(name, names) > 1
}

/// The name of a socket, asked once; none of one that cannot be asked.
fn name_of<'a>(open: &'a Open<'_>) -> &'a [u8] {
    open.known.name.get_or_init(|| {
        let name = open.own().and_then(|own| address::name_of(own));
        name.unwrap_or_default()
    })
}

/// The inode numbers of the descriptors in the queue of a socket, looked at once.
fn flying<'a>(open: &'a Open<'_>, nature: Nature) -> Result<&'a [u64]> {
    if let Some(known) = open.known.flying.get() {
        return Ok(known);
    }
    let rights = queue::rights(open, nature.kind)?;
    let inodes = rights.iter().map(rustix::fs::fstat);
    let inodes = inodes.flatten().map(|stat| stat.st_ino).collect();
    Ok(open.known.flying.get_or_init(|| inodes))
}

/// The inode numbers of the clients that wait to be accepted by a socket, looked at once.
fn waiting_at<'a>(open: &'a Open<'_>, cx: &dyn DumpContext) -> &'a [u32] {
    open.known.waiting.get_or_init(|| {
        let facts = facts_of(socket::inode(open), cx);
        facts.map_or_else(|_| Vec::new(), |facts| facts.waiting)
    })
}

/// Who made the other end, as far as that can be seen from here.
fn maker_of(own: BorrowedFd<'_>) -> Result<Option<Credentials>> {
    const SO_PEERCRED: i32 = libc::SO_PEERCRED;
    let bytes = sys::socket::option(own, 1, SO_PEERCRED, 12)
        .map_err(|error| Error::kernel("ask a unix socket who made its peer", error))?;
    let found = sys::socket::Credentials::from_bytes(&bytes);
    Ok(found.filter(|who| who.pid > 0).map(Credentials::from))
}

/// Whether an error waits to be reported.
fn has_error(own: BorrowedFd<'_>) -> Result<bool> {
    let told = ready::events(own, PollFlags::empty())
        .map_err(|error| Error::kernel("poll a unix socket", error))?;
    Ok(told.contains(PollFlags::ERR))
}

/// The descriptions of the clients that wait to be accepted by `open`.
fn waiting(open: &Open<'_>, facts: &Facts, cx: &mut dyn DumpContext) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for client in &facts.waiting {
        if *client == 0 {
            // What it may have sent cannot be seen, and it misses nothing.
            if cx.allow().unix_close {
                continue;
            }
            let why = "a client that has hung up waits to be accepted";
            return Err(open.unsupported(why, Some(CLOSE)));
        }
        match find_anywhere(*client, cx)? {
            Some(id) => ids.push(id.0),
            None if cx.allow().unix_close => {}
            None => {
                let who = socket::owner(*client);
                let why = format!("a client outside of the tree{who} waits to be accepted");
                return Err(open.unsupported(&why, Some(CLOSE)));
            }
        }
    }
    Ok(ids)
}

/// The description that is this socket, also one that is only in flight.
fn find_anywhere(wanted: u32, cx: &mut dyn DumpContext) -> Result<Option<DescriptionId>> {
    if let Some(id) = socket::find_id(cx, wanted) {
        return Ok(Some(id));
    }
    let mut found = Vec::new();
    for (open, nature) in sockets(cx) {
        if flying(open, nature)?.contains(&u64::from(wanted)) {
            let rights = queue::rights(open, nature.kind)?;
            found.extend(rights.into_iter().map(|right| (&open.process, right)));
        }
    }
    for (process, right) in found {
        let is_it = rustix::fs::fstat(&right).is_ok_and(|stat| stat.st_ino == u64::from(wanted));
        if is_it && Nature::of_fd(right.as_fd())?.family == AF_UNIX {
            return cx.add(&process.clone(), right).map(Some);
        }
    }
    Ok(None)
}

/// Notes what `open` is connected to.
fn describe_peer(
    open: &Open<'_>,
    peer: u32,
    record: &mut Unix,
    cx: &mut dyn DumpContext,
) -> Result<()> {
    if peer == 0 {
        return describe_absent(open, record, cx);
    }
    record.peer = peer;
    let Some(id) = find_anywhere(peer, cx)? else {
        return describe_outside(open, record, cx);
    };
    record.peer_id = id.0;
    let back = facts_of(peer, cx)?.peer;
    if back == Some(record.inode) && !is_by_name(record) {
        record.set_link(Link::Pair);
        if let Some(peer) = socket::find(cx, peer) {
            let own = peer.own()?;
            record.peer_maker = maker_of(own)?;
            if record.peer_maker.is_some() {
                record.peer_maker_groups = identity::groups_of(own)?;
            }
        }
        return Ok(());
    }
    record.set_link(Link::Named);
    if record.peer_address.is_unnamed() {
        return Err(open.unsupported("it is connected one way to a socket without a name", None));
    }
    if let Some(peer) = socket::find(cx, peer) {
        record.peer_address = Address::read(peer, true)?;
    }
    Ok(())
}

/// Whether a datagram socket was connected to its peer by connect(2): to itself, or each of the two
/// to the other. Those that were made as a pair are told of their maker.
fn is_by_name(record: &Unix) -> bool {
    let named = !record.address.is_unnamed() && !record.peer_address.is_unnamed();
    record.kind == DGRAM && named && record.maker.is_none()
}

/// The peer is closed, or not accepted yet.
fn describe_absent(open: &Open<'_>, record: &mut Unix, cx: &dyn DumpContext) -> Result<()> {
    if record.kind == DGRAM || record.shutdown == BOTH_SHUTDOWN {
        record.set_link(Link::Gone);
        return Ok(());
    }
    let waits_at =
        |(listener, _): &(&Open<'_>, Nature)| waiting_at(listener, cx).contains(&record.inode);
    if sockets(cx).find(waits_at).is_none() {
        if cx.allow().unix_close {
            record.lose_peer();
            return Ok(());
        }
        let why = "it waits to be accepted by a socket outside of the tree";
        return Err(open.unsupported(why, Some(CLOSE)));
    }
    let sent = sys::socket::count(open.own()?, sys::socket::Count::Outbound)
        .map_err(|error| Error::kernel("ask a unix socket what it has sent", error))?;
    if sent > 0 {
        let why = "it has sent data before it was accepted";
        return Err(open.unsupported(why, None));
    }
    record.set_link(Link::Waiting);
    Ok(())
}

/// The peer is outside of the tree.
fn describe_outside(open: &Open<'_>, record: &mut Unix, cx: &dyn DumpContext) -> Result<()> {
    const OPTION: &str = "--ext-unix-sk";
    let name = record.peer_address.print();
    let peer = record.peer;
    let path = record.peer_address.path();
    let found = record.peer_address.is_abstract() || path.is_some_and(std::path::Path::is_absolute);
    let comes_back = record.kind == DGRAM && found;
    let inodes = &cx.allow().ext_unix_inodes;
    let is_meant = inodes.is_empty() || inodes.contains(&record.inode.into());
    if !(comes_back && cx.allow().ext_unix_sk && is_meant) {
        if cx.allow().unix_close {
            record.lose_peer();
            return Ok(());
        }
        let who = socket::owner(peer);
        let why = format!("its peer ({name}{who}) is outside of the tree");
        let option = if comes_back { OPTION } else { CLOSE };
        return Err(open.unsupported(&why, Some(option)));
    }
    if record.peer_address.path().is_some() {
        record.peer_address.file = Some(address::BoundFile::default());
    }
    record.set_link(Link::Named);
    Ok(())
}

fn new(kind: i32) -> Result<OwnedFd> {
    sys::socket::open(AF_UNIX, kind, 0).map_err(|error| Error::kernel("make a unix socket", error))
}

fn finish_listener(record: &Unix, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
    let name = record.address.print();
    let failed = |error| Error::kernel(format!("listen on unix socket {name}"), error);
    record.options.apply(own, Moment::Early)?;
    let whose = (record.kind, record.inode);
    record.address.bind(own, whose, cx.unix())?;
    let patience = cx.unix().patience();
    if !record.waiting.is_empty() {
        connect::listen(record.maker(), own, i32::MAX, &patience).map_err(failed)?;
    }
    for id in &record.waiting {
        let client = cx.description(DescriptionId(*id))?;
        let client = rustix::io::fcntl_dupfd_cloexec(client, 0)
            .map_err(|error| Error::kernel("dup", error))?;
        let bytes = record.address.reached_by();
        let connect = || sys::socket::connect(&client, &bytes);
        let route = record.address.route(record.inode, cx.unix())?;
        route
            .run(connect)?
            .map_err(|error| Error::kernel(format!("connect to unix socket {name}"), error))?;
    }
    let backlog = i32::try_from(record.backlog).unwrap_or(i32::MAX);
    connect::listen(record.maker(), own, backlog, &patience).map_err(failed)
}

fn finish_gone(record: &Unix, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
    if record.reset && record.kind != DGRAM {
        // Closing an end with data unread is what the other end notices. One that asks who sends
        // would get a name by sending.
        sys::socket::send(own, &[0], sys::socket::Along::default(), 0)
            .map_err(|error| Error::kernel("send to a unix socket", error))?;
    }
    record.options.apply(own, Moment::Early)?;
    let key = (TAG, u64::from(record.inode) | HELD);
    let held = cx.shared().remove(&key).and_then(|mut fds| fds.pop());
    let held = held.ok_or_else(|| Error::corrupt("unix socket", "finished twice"))?;
    queue::fill(&record.queue, own, &Source::Held(held.as_fd()), cx)
}

fn finish_single(record: &Unix, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
    let is_connected = record.link() == Link::Named;
    if record.address.is_unnamed() {
        // Connecting with SO_PASSCRED set would give it a name.
        if is_connected {
            let bytes = record.peer_address.reached_by();
            let name = record.peer_address.print();
            let route = record.peer_address.route(record.peer, cx.unix())?;
            let connected = route.run(|| sys::socket::connect(own, &bytes))?;
            connected.map_err(|e| Error::kernel(format!("connect to unix socket {name}"), e))?;
        }
        return record.options.apply(own, Moment::Early);
    }
    record.options.apply(own, Moment::Early)?;
    let to = Source::Anyone(&record.address, record.inode);
    queue::fill(&record.queue, own, &to, cx)?;
    if is_connected {
        let peer = (&record.peer_address, record.peer);
        cx.unix().connect((own, record.inode), peer)?;
    }
    Ok(())
}

/// Shuts down what is shut down.
fn shut(own: BorrowedFd<'_>, bits: u32) -> Result<()> {
    for (bit, how) in [(RCV_SHUTDOWN, SHUT_RD), (SEND_SHUTDOWN, SHUT_WR)] {
        if bits & bit != 0 {
            let done = sys::socket::shutdown(own, how);
            done.map_err(|error| Error::kernel("shut down a unix socket", error))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::path::Path;

    use sys::socket::{Along, Received};

    use super::super::socket::ledger::Kinds;
    use super::super::socket::testing::{World, cycle};
    use super::*;
    use crate::testing::alone;

    fn pair(kind: i32) -> [OwnedFd; 2] {
        sys::socket::pair(AF_UNIX, kind, 0).unwrap().into()
    }

    fn send(fd: &OwnedFd, bytes: &[u8]) {
        assert_eq!(
            sys::socket::send(fd, bytes, Along::default(), 0).unwrap(),
            bytes.len()
        );
    }

    fn receive(fd: &OwnedFd) -> (Vec<u8>, Received) {
        let mut buffer = vec![0; 1 << 20];
        let received = sys::socket::receive(fd, &mut buffer, 0x40).unwrap();
        buffer.truncate(received.len);
        (buffer, received)
    }

    fn is_empty(fd: &OwnedFd) -> bool {
        let error = sys::socket::receive(fd, &mut [0; 1], 0x40).unwrap_err();
        error.kind() == ErrorKind::WouldBlock
    }

    fn bound(kind: i32, name: &[u8]) -> OwnedFd {
        let socket = new(kind).unwrap();
        sys::socket::bind(&socket, &Address::of_name(name.to_vec()).bytes()).unwrap();
        socket
    }

    fn connect(fd: &OwnedFd, to: &OwnedFd) {
        sys::socket::connect(fd, &sys::socket::name(to).unwrap()).unwrap();
    }

    /// A listener, a client and what the listener accepted.
    fn connection(name: &[u8]) -> [OwnedFd; 3] {
        let listener = bound(STREAM, name);
        sys::socket::listen(&listener, 5).unwrap();
        let client = new(STREAM).unwrap();
        connect(&client, &listener);
        let server = sys::socket::accept(&listener).unwrap();
        [listener, client, server]
    }

    #[test]
    fn streams_keep_both_queues_and_go_on() {
        alone!({
            let [left, right] = pair(STREAM);
            send(&left, b"to the right, ");
            send(&left, b"in two pieces");
            send(&right, &vec![7; 100_000]);
            let [left, right] = cycle([left, right]);
            assert_eq!(receive(&right).0, b"to the right, in two pieces");
            assert_eq!(receive(&left).0, vec![7; 100_000]);
            send(&left, b"more");
            assert_eq!(receive(&right).0, b"more");
            assert!(is_empty(&left) && is_empty(&right));
        });
    }

    #[test]
    fn a_target_left_running_keeps_its_queue() {
        alone!({
            let [left, right] = pair(SEQPACKET);
            send(&left, b"one");
            send(&left, b"two");
            let mut world = World::new(vec![
                rustix::io::dup(&left).unwrap(),
                rustix::io::dup(&right).unwrap(),
            ]);
            world.dump().unwrap();
            let offset = sys::socket::number(&right, 1, 42).unwrap();
            assert_eq!(offset, -1);
            assert_eq!(receive(&right).0, b"one");
            assert_eq!(receive(&right).0, b"two");
        });
    }

    #[test]
    fn message_boundaries_survive() {
        alone!({
            for kind in [DGRAM, SEQPACKET] {
                let [left, right] = pair(kind);
                let big = vec![3; 100_000];
                for message in [&b"one"[..], b"", b"three", &big, b"", b"", b"end"] {
                    send(&left, message);
                }
                let [left, right] = cycle([left, right]);
                for message in [&b"one"[..], b"", b"three", &big, b"", b"", b"end"] {
                    assert_eq!(receive(&right).0, message);
                }
                assert!(is_empty(&right));
                send(&left, b"on");
                assert_eq!(receive(&right).0, b"on");
            }
        });
    }

    #[test]
    fn one_sided_shutdown_survives() {
        alone!({
            let [left, right] = pair(STREAM);
            send(&left, b"last words");
            send(&right, b"answer");
            sys::socket::shutdown(&left, SHUT_WR).unwrap();
            let [left, right] = cycle([left, right]);
            assert_eq!(receive(&right).0, b"last words");
            assert_eq!(receive(&right).0, b"");
            send(&right, b", more");
            assert_eq!(receive(&left).0, b"answer, more");
            let error = sys::socket::send(&left, b"x", Along::default(), 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        });
    }

    #[test]
    fn descriptors_in_flight_arrive_with_their_bytes() {
        alone!({
            for kind in [STREAM, SEQPACKET, DGRAM] {
                let [left, right] = pair(kind);
                let [near, far] = pair(STREAM);
                send(&left, b"before");
                let along = Along {
                    rights: &[far.as_fd()],
                    ..Along::default()
                };
                sys::socket::send(&left, b"with", along, 0).unwrap();
                send(&left, b"after");
                drop(far);
                let [left, right, near] = cycle([left, right, near]);
                let (bytes, mut received) = receive(&right);
                if kind == STREAM {
                    assert_eq!(bytes, b"beforewith");
                } else {
                    assert_eq!(
                        (bytes.as_slice(), received.rights.len()),
                        (&b"before"[..], 0)
                    );
                    received = receive(&right).1;
                }
                let far = received.rights.pop().unwrap();
                send(&near, b"through");
                assert_eq!(receive(&far).0, b"through");
                assert_eq!(receive(&right).0, b"after");
                drop(left);
            }
        });
    }

    #[test]
    fn descriptors_belong_to_the_bytes_they_were_sent_with() {
        alone!({
            let [left, right] = pair(STREAM);
            let along = Along {
                rights: &[left.as_fd()],
                ..Along::default()
            };
            send(&left, b"0123456");
            sys::socket::send(&left, b"789", along, 0).unwrap();
            let [_left, right] = cycle([left, right]);
            let mut seven = [0; 7];
            assert!(
                sys::socket::receive(&right, &mut seven, 0)
                    .unwrap()
                    .rights
                    .is_empty()
            );
            let mut one = [0; 1];
            assert_eq!(
                sys::socket::receive(&right, &mut one, 0)
                    .unwrap()
                    .rights
                    .len(),
                1
            );
            assert_eq!(&one, b"7");
        });
    }

    #[test]
    fn credentials_of_queued_messages_survive() {
        alone!({
            let [left, right] = pair(DGRAM);
            sys::socket::set_number(&right, 1, 16, 1).unwrap();
            send(&left, b"who");
            let [_left, right] = cycle([left, right]);
            let who = receive(&right).1.credentials.unwrap();
            assert_eq!(who.pid, std::process::id().cast_signed());
        });
    }

    #[test]
    fn messages_sent_before_anybody_asked_are_nobodys() {
        alone!({
            for kind in [STREAM, SEQPACKET, DGRAM] {
                let [left, right] = pair(kind);
                send(&left, b"before");
                sys::socket::set_number(&right, 1, 16, 1).unwrap();
                send(&left, b"after");
                let before = receive_but_keep(&right);
                let [_left, right] = cycle([left, right]);
                assert_eq!(sys::socket::number(&right, 1, 16).unwrap(), 1);
                let told = |right| receive(right).1.credentials.unwrap();
                assert_eq!(told(&right), before, "{kind}");
                assert_eq!(told(&right).pid, std::process::id().cast_signed());
            }
        });
    }

    /// Who sent what is to be received next.
    fn receive_but_keep(fd: &OwnedFd) -> sys::socket::Credentials {
        let received = sys::socket::receive(fd, &mut [0; 64], 0x42).unwrap();
        received.credentials.unwrap()
    }

    #[test]
    fn a_connection_keeps_its_names_and_its_listener() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let name = path.as_os_str().as_encoded_bytes();
            let [listener, client, server] = connection(name);
            rustix::fs::chmod(&path, rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
            send(&client, b"request");
            let [listener, client, server] = cycle([listener, client, server]);
            assert_eq!(name_of(&server), name);
            assert_eq!(address::peer_name_of(client.as_fd()).unwrap(), nul(name));
            assert_eq!(name_of(&listener), name);
            assert_eq!(receive(&server).0, b"request");
            assert_eq!(rustix::fs::stat(&path).unwrap().st_mode & 0o7777, 0o640);
            let second = new(STREAM).unwrap();
            connect(&second, &listener);
            sys::socket::accept(&listener).unwrap();
        });
    }

    fn name_of(fd: &OwnedFd) -> Vec<u8> {
        let name = address::name_of(fd.as_fd()).unwrap();
        name.strip_suffix(b"\0").unwrap_or(&name).to_vec()
    }

    fn nul(name: &[u8]) -> Vec<u8> {
        [name, b"\0"].concat()
    }

    #[test]
    fn abstract_names_are_shared_by_what_was_accepted() {
        alone!({
            let [listener, client, server] = connection(b"\0stillframe-test-accepted");
            let second = new(STREAM).unwrap();
            connect(&second, &listener);
            let other = sys::socket::accept(&listener).unwrap();
            send(&second, b"second");
            let all = cycle([client, server, listener, second, other]);
            let [client, server, listener, second, other] = all;
            for fd in [&server, &listener, &other] {
                assert_eq!(name_of(fd), b"\0stillframe-test-accepted");
            }
            assert_eq!(name_of(&client), b"");
            assert_eq!(receive(&other).0, b"second");
            send(&server, b"first");
            assert_eq!(receive(&client).0, b"first");
            let third = new(STREAM).unwrap();
            connect(&third, &listener);
            drop(second);
        });
    }

    #[test]
    fn clients_still_wait_to_be_accepted() {
        alone!({
            let listener = bound(STREAM, b"\0stillframe-test-waiting");
            sys::socket::listen(&listener, 1).unwrap();
            let clients = [new(STREAM).unwrap(), new(STREAM).unwrap()];
            clients.iter().for_each(|client| connect(client, &listener));
            let [first, second] = clients;
            let [second, listener, first] = cycle([second, listener, first]);
            for client in [first, second] {
                let server = sys::socket::accept(&listener).unwrap();
                send(&server, b"hello");
                assert_eq!(receive(&client).0, b"hello");
            }
            let inode = u32::try_from(rustix::fs::fstat(&listener).unwrap().st_ino).unwrap();
            assert_eq!(diag::unix(inode).unwrap().backlog, 1);
        });
    }

    #[test]
    fn the_end_of_a_connection_survives() {
        alone!({
            let [left, right] = pair(STREAM);
            send(&left, b"farewell");
            drop(left);
            let [right] = cycle([right]);
            assert_eq!(receive(&right).0, b"farewell");
            assert_eq!(receive(&right).0, b"");
        });
    }

    #[test]
    fn a_reset_is_still_reported() {
        alone!({
            let [left, right] = pair(STREAM);
            send(&right, b"unread");
            drop(left);
            let [right] = cycle([right]);
            let error = sys::socket::receive(&right, &mut [0; 1], 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        });
    }

    #[test]
    fn a_reset_of_a_socket_of_messages_is_still_reported() {
        alone!({
            let [left, right] = pair(SEQPACKET);
            send(&right, b"unread");
            drop(left);
            let [right] = cycle([right]);
            let error = sys::socket::receive(&right, &mut [0; 1], 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        });
    }

    #[test]
    fn messages_behind_an_error_are_refused_and_stay() {
        alone!({
            let [left, right] = pair(SEQPACKET);
            send(&right, b"unread");
            send(&left, b"sent");
            drop(left);
            let mut world = World::new(vec![rustix::io::dup(&right).unwrap()]);
            let error = world.dump().unwrap_err();
            assert!(error.to_string().contains("behind an error"), "{error}");
            let error = sys::socket::receive(&right, &mut [0; 8], 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            let read = sys::socket::receive(&right, &mut [0; 8], 0).unwrap();
            assert_eq!(read.len, 4);
        });
    }

    #[test]
    fn named_datagrams_keep_their_senders() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("server");
            let server = bound(DGRAM, path.as_os_str().as_encoded_bytes());
            let client = bound(DGRAM, b"\0stillframe-test-sender");
            connect(&client, &server);
            send(&client, b"one");
            let stranger = bound(DGRAM, b"\0stillframe-test-stranger");
            connect(&stranger, &server);
            send(&stranger, b"two");
            drop(stranger);
            let [client, server] = cycle([client, server]);
            let (bytes, received) = receive(&server);
            assert_eq!(bytes, b"one");
            assert_eq!(received.name[2..], *b"\0stillframe-test-sender");
            let (bytes, received) = receive(&server);
            assert_eq!(bytes, b"two");
            assert_eq!(received.name[2..], *b"\0stillframe-test-stranger");
            send(&client, b"still connected");
            assert_eq!(receive(&server).0, b"still connected");
        });
    }

    #[test]
    fn a_deleted_name_is_kept_without_a_file() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("server");
            let server = bound(DGRAM, path.as_os_str().as_encoded_bytes());
            let client = new(DGRAM).unwrap();
            connect(&client, &server);
            rustix::fs::unlink(&path).unwrap();
            send(&client, b"one");
            let [client, server] = cycle([client, server]);
            assert!(!path.exists());
            assert_eq!(name_of(&server), path.as_os_str().as_encoded_bytes());
            send(&client, b"two");
            assert_eq!(receive(&server).0, b"one");
            assert_eq!(receive(&server).0, b"two");
        });
    }

    #[test]
    fn deleted_names_are_deleted_after_every_restore() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("gone");
            for put_there in [None, Some("a file"), Some("a socket")] {
                let server = bound(DGRAM, &nul(path.as_os_str().as_encoded_bytes()));
                let client = new(DGRAM).unwrap();
                connect(&client, &server);
                std::fs::remove_file(&path).unwrap();
                let other = (put_there == Some("a socket"))
                    .then(|| bound(DGRAM, &nul(path.as_os_str().as_encoded_bytes())));
                if put_there == Some("a file") {
                    std::fs::write(&path, "somebody's").unwrap();
                }
                let mut all = [server, client];
                for _ in 0..3 {
                    all = cycle(all);
                    send(&all[1], b"on");
                    assert_eq!(receive(&all[0]).0, b"on");
                }
                assert_eq!(path.exists(), put_there.is_some());
                drop(other);
                let _ = std::fs::remove_file(&path);
            }
        });
    }

    #[test]
    fn of_several_deleted_sockets_of_one_name_each_keeps_its_clients() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("twin");
            let pairs = [(); 3].map(|()| {
                let server = bound(DGRAM, &nul(path.as_os_str().as_encoded_bytes()));
                let clients = [(); 2].map(|()| new(DGRAM).unwrap());
                clients.iter().for_each(|client| connect(client, &server));
                std::fs::remove_file(&path).unwrap();
                let [one, other] = clients;
                send(&one, b"before");
                [server, one, other]
            });
            let mut all = pairs.into_iter().flatten().collect::<Vec<_>>();
            for round in 0..2 {
                let mut world = World::new(all);
                world.dump().unwrap();
                all = world.restore().unwrap();
                for (number, three) in (0u8..).zip(all.chunks(3)) {
                    if round == 0 {
                        assert_eq!(receive(&three[0]).0, b"before");
                    }
                    send(&three[1], &[number, 1]);
                    send(&three[2], &[number, 2]);
                    assert_eq!(receive(&three[0]).0, [number, 1]);
                    assert_eq!(receive(&three[0]).0, [number, 2]);
                }
            }
        });
    }

    #[test]
    fn datagram_connections_by_name_come_back_in_any_order() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            for peers in [[1, 2, 3, 4, 4], [1, 2, 3, 4, 3]] {
                for backwards in [false, true] {
                    let at = |number: usize| if backwards { 4 - number } else { number };
                    let names = [0, 1, 2, 3, 4].map(|one| folder.path().join(one.to_string()));
                    let bind = |path: &std::path::PathBuf| {
                        bound(DGRAM, &nul(path.as_os_str().as_encoded_bytes()))
                    };
                    let mut sockets = [0, 1, 2, 3, 4].map(|one| bind(&names[at(one)]));
                    // Each is connected before its peer is: the kernel wants it so.
                    for (own, peer) in peers.into_iter().enumerate() {
                        connect(&sockets[at(own)], &sockets[at(peer)]);
                        if own == 2 {
                            send(&sockets[at(2)], b"queued");
                        }
                    }
                    std::fs::remove_file(&names[1]).unwrap();
                    for round in 0..3 {
                        sockets = cycle(sockets);
                        if round == 0 {
                            assert_eq!(receive(&sockets[at(3)]).0, b"queued");
                        }
                        for (own, peer) in peers.into_iter().enumerate() {
                            let inode = |at: usize| {
                                let stat = rustix::fs::fstat(&sockets[at]).unwrap();
                                u32::try_from(stat.st_ino).unwrap()
                            };
                            let facts = diag::unix(inode(at(own))).unwrap();
                            assert_eq!(facts.peer, Some(inode(at(peer))), "{own} {peers:?}");
                        }
                        // Who is connected hears its own peer alone.
                        let (last, peer) = (at(4), at(peers[4]));
                        send(&sockets[last], b"on");
                        assert_eq!(receive(&sockets[peer]).0, b"on");
                    }
                    drop(sockets);
                    for name in &names {
                        let _ = std::fs::remove_file(name);
                    }
                }
            }
        });
    }

    #[test]
    fn a_renamed_file_is_where_it_was_renamed_to() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let (draft, path) = (folder.path().join("draft"), folder.path().join("server"));
            let server = bound(DGRAM, draft.as_os_str().as_encoded_bytes());
            rustix::fs::rename(&draft, &path).unwrap();
            let client = new(DGRAM).unwrap();
            let address = Address::of_name(path.as_os_str().as_encoded_bytes().to_vec());
            sys::socket::connect(&client, &address.bytes()).unwrap();
            send(&client, b"one");
            // The old file is still there at the restore, and belongs to nobody.
            let [client, server] = cycle([client, server]);
            assert_eq!(name_of(&server), draft.as_os_str().as_encoded_bytes());
            assert!(!draft.exists());
            send(&client, b"two");
            assert_eq!(receive(&server).0, b"one");
            assert_eq!(receive(&server).0, b"two");
            let other = new(DGRAM).unwrap();
            sys::socket::connect(&other, &address.bytes()).unwrap();
        });
    }

    #[test]
    fn a_file_keeps_all_its_names() {
        alone!({
            for (kept, others) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
                let folder = tempfile::tempdir().unwrap();
                let at = |name: &str| folder.path().join(name);
                let listener = bound(STREAM, at("s.4711").as_os_str().as_encoded_bytes());
                sys::socket::listen(&listener, 5).unwrap();
                let names: Vec<_> = (0..others).map(|one| at(&format!("s{one}"))).collect();
                for name in &names {
                    std::fs::hard_link(at("s.4711"), name).unwrap();
                }
                if !kept {
                    std::fs::remove_file(at("s.4711")).unwrap();
                }
                let mut sockets = [listener];
                for _ in 0..2 {
                    sockets = cycle(sockets);
                    let bound_as = at("s.4711");
                    assert_eq!(
                        name_of(&sockets[0]),
                        bound_as.as_os_str().as_encoded_bytes()
                    );
                    assert_eq!(bound_as.exists(), kept);
                    for name in &names {
                        let client = new(STREAM).unwrap();
                        let name = name.as_os_str().as_encoded_bytes().to_vec();
                        sys::socket::connect(&client, &Address::of_name(name).bytes()).unwrap();
                        sys::socket::accept(&sockets[0]).unwrap();
                    }
                }
            }
        });
    }

    #[test]
    fn a_name_in_another_folder_is_refused() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let (path, other) = (folder.path().join("one"), folder.path().join("below"));
            let listener = bound(STREAM, path.as_os_str().as_encoded_bytes());
            sys::socket::listen(&listener, 5).unwrap();
            std::fs::create_dir(&other).unwrap();
            std::fs::hard_link(&path, other.join("two")).unwrap();
            let error = World::new(vec![listener]).dump().unwrap_err();
            let told = format!(
                "its file has 2 names, of which {} has 1",
                folder.path().display()
            );
            assert!(error.to_string().contains(&told), "{error}");
        });
    }

    #[test]
    fn relative_names_are_bound_where_they_were() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let at = folder.path();
            let listener = new(STREAM).unwrap();
            let address = Address::of_name(b"relative".to_vec());
            let bind = || {
                rustix::process::chdir(at).unwrap();
                sys::socket::bind(&listener, &address.bytes())
            };
            sys::socket::in_own_fs(bind).unwrap().unwrap();
            sys::socket::listen(&listener, 5).unwrap();
            let [listener] = cycle([listener]);
            assert_eq!(name_of(&listener), b"relative");
            assert!(at.join("relative").exists());
            let client = new(STREAM).unwrap();
            let there = at.join("relative");
            let address = Address::of_name(there.into_os_string().into_encoded_bytes());
            sys::socket::connect(&client, &address.bytes()).unwrap();
        });
    }

    #[test]
    fn a_live_socket_in_the_way_is_not_replaced() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let name = path.as_os_str().as_encoded_bytes();
            let listener = bound(STREAM, name);
            sys::socket::listen(&listener, 5).unwrap();
            let mut world = World::new(vec![listener]);
            world.dump().unwrap();
            rustix::fs::unlink(&path).unwrap();
            let other = bound(STREAM, name);
            let error = world.restore().unwrap_err();
            assert!(
                error.to_string().contains("in use by another process"),
                "{error}"
            );
            assert!(Path::new(&path).exists());
            drop(other);
        });
    }

    #[test]
    fn out_of_band_data_is_refused_by_name() {
        use rustix::net::SendFlags;
        alone!({
            let [left, right] = pair(STREAM);
            send(&left, b"ab");
            if rustix::net::send(&left, b"!", SendFlags::OOB).is_err() {
                testkit::skip!("no out-of-band data in unix sockets");
            }
            let error = World::new(vec![left, right]).dump().unwrap_err();
            let told = error.to_string();
            assert!(
                told.contains("it has out-of-band data in its queue"),
                "{told}"
            );
        });
    }

    #[test]
    fn peers_outside_of_the_tree_are_refused_by_name() {
        alone!({
            let [left, right] = pair(STREAM);
            let error = World::new(vec![left]).dump().unwrap_err();
            let told = error.to_string();
            assert!(told.contains("outside of the tree"), "{told}");
            assert!(told.contains("a unix stream socket"), "{told}");
            assert!(told.contains("--unix-close"), "{told}");
            drop(right);
            let server = bound(DGRAM, b"\0stillframe-test-outside");
            let client = new(DGRAM).unwrap();
            connect(&client, &server);
            let inode = rustix::fs::fstat(&client).unwrap().st_ino;
            let mut world = World::new(vec![client]);
            let error = world.dump().unwrap_err();
            assert!(error.to_string().contains("--ext-unix-sk"), "{error}");
            world.allow.ext_unix_sk = true;
            world.allow.ext_unix_inodes = vec![1, 2];
            let error = world.dump().unwrap_err();
            assert!(error.to_string().contains("--ext-unix-sk"), "{error}");
            world.allow.ext_unix_inodes.push(inode);
            world.dump().unwrap();
            let client = world.restore().unwrap().remove(0);
            send(&client, b"log line");
            assert_eq!(receive(&server).0, b"log line");
        });
    }

    #[test]
    fn connections_to_the_outside_end_where_that_is_asked_for() {
        alone!({
            for kind in [STREAM, SEQPACKET] {
                let [left, right] = pair(kind);
                send(&right, b"on its way");
                let mut world = World::new(vec![left]);
                world.allow.unix_close = true;
                world.dump().unwrap();
                drop(right);
                let left = world.restore().unwrap().remove(0);
                assert_eq!(receive(&left).0, b"on its way");
                assert_eq!(receive(&left).0, b"", "the end");
                let sent = sys::socket::send(&left, b"x", Along::default(), 0x4000);
                let told = sent.map_err(|error| error.kind());
                assert_eq!(told, Err(ErrorKind::BrokenPipe));
            }
            // A client that waits is turned away, one of the tree's own is not.
            let name = b"\0stillframe-test-waits";
            let listener = bound(STREAM, name);
            sys::socket::listen(&listener, 5).unwrap();
            let client = new(STREAM).unwrap();
            connect(&client, &listener);
            let mut world = World::new(vec![listener]);
            let error = world.dump().unwrap_err().to_string();
            assert!(error.contains("--unix-close"), "{error}");
            world.allow.unix_close = true;
            world.dump().unwrap();
            drop(client);
            let listener = world.restore().unwrap().remove(0);
            let client = new(STREAM).unwrap();
            connect(&client, &listener);
            let server = sys::socket::accept(&listener).unwrap();
            send(&client, b"new");
            assert_eq!(receive(&server).0, b"new");
        });
    }

    /// A pid that nobody has: that of a child that ended.
    fn free_pid() -> i32 {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id().cast_signed()
    }

    fn who(uid: u32) -> Credentials {
        Credentials {
            pid: free_pid(),
            uid,
            gid: uid + 1,
        }
    }

    #[test]
    fn makers_are_remembered() {
        alone!({
            let one = who(1001);
            let (left, right) =
                sys::identity::pair(sys::socket::Credentials::from(one), AF_UNIX, STREAM, 0)
                    .unwrap();
            let [left, right] = cycle([left, right]);
            assert_eq!(maker_of(left.as_fd()).unwrap(), Some(one));
            assert_eq!(maker_of(right.as_fd()).unwrap(), Some(one));
            // A server and its client, with a path and with an abstract name.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            for name in [
                path.as_os_str().as_encoded_bytes(),
                b"\0stillframe-test-makers",
            ] {
                let (serves, asks) = (who(1001), who(1002));
                let listener = bound(STREAM, name);
                sys::identity::listen(sys::socket::Credentials::from(serves), &listener, 5)
                    .unwrap();
                if name[0] != 0 {
                    let all = rustix::fs::Mode::from_raw_mode(0o777);
                    rustix::fs::chmod(folder.path(), all).unwrap();
                    rustix::fs::chmod(&path, all).unwrap();
                }
                let client = new(STREAM).unwrap();
                let address = sys::socket::name(&listener).unwrap();
                sys::identity::connect(sys::socket::Credentials::from(asks), &client, &address)
                    .unwrap();
                let server = sys::socket::accept(&listener).unwrap();
                let [client, listener, server] = cycle([client, listener, server]);
                assert_eq!(maker_of(client.as_fd()).unwrap(), Some(serves));
                assert_eq!(maker_of(server.as_fd()).unwrap(), Some(asks));
                assert_eq!(maker_of(listener.as_fd()).unwrap(), Some(serves));
                assert_eq!(
                    (name_of(&server), name_of(&client)),
                    (name.to_vec(), Vec::new())
                );
                send(&client, b"x");
                assert_eq!(receive(&server).0, b"x");
            }
        });
    }

    #[test]
    fn ends_that_both_have_names_remember_their_makers() {
        alone!({
            let folder = tempfile::tempdir().unwrap();
            let all = rustix::fs::Mode::from_raw_mode(0o777);
            rustix::fs::chmod(folder.path(), all).unwrap();
            let at = |name: &str| {
                folder
                    .path()
                    .join(name)
                    .into_os_string()
                    .into_encoded_bytes()
            };
            let abstracts = [&b"\0stillframe-test-a"[..], b"\0stillframe-test-b"];
            for (number, [server, client]) in [
                [at("server"), at("client")],
                [at("other"), abstracts[0].to_vec()],
                [abstracts[1].to_vec(), at("third")],
            ]
            .into_iter()
            .enumerate()
            {
                let (serves, asks) = (who(1001), who(1002));
                let listener = bound(STREAM, &server);
                sys::identity::listen(sys::socket::Credentials::from(serves), &listener, 5)
                    .unwrap();
                let address = sys::socket::name(&listener).unwrap();
                if server[0] != 0 {
                    let path = Address::of_name(server.clone());
                    rustix::fs::chmod(path.path().unwrap(), all).unwrap();
                }
                let own = bound(STREAM, &client);
                sys::identity::connect(sys::socket::Credentials::from(asks), &own, &address)
                    .unwrap();
                let accepted = sys::socket::accept(&listener).unwrap();
                drop(listener);
                let mut ends = [own, accepted];
                for _ in 0..2 {
                    ends = cycle(ends);
                    let [own, accepted] = &ends;
                    assert_eq!(maker_of(own.as_fd()).unwrap(), Some(serves), "{number}");
                    assert_eq!(maker_of(accepted.as_fd()).unwrap(), Some(asks), "{number}");
                    assert_eq!(
                        (name_of(own), name_of(accepted)),
                        (client.clone(), server.clone())
                    );
                    send(own, b"x");
                    assert_eq!(receive(accepted).0, b"x");
                }
            }
        });
    }

    #[test]
    fn who_was_parted_from_its_pair_knows_its_maker() {
        alone!({
            let one = who(1001);
            let parted = || {
                let (own, peer) =
                    sys::identity::pair(sys::socket::Credentials::from(one), AF_UNIX, DGRAM, 0)
                        .unwrap();
                drop(peer);
                // Is told that its peer is gone, and is connected to nobody from then on.
                sys::socket::send(&own, b"x", Along::default(), 0).unwrap_err();
                own
            };
            let server = bound(DGRAM, b"\0stillframe-test-parted");
            let (own, named) = (parted(), parted());
            connect(&named, &server);
            let [own, named, server] = cycle([own, named, server]);
            for own in [&own, &named] {
                assert_eq!(maker_of(own.as_fd()).unwrap(), Some(one));
            }
            sys::socket::send(&own, b"x", Along::default(), 0).unwrap_err();
            send(&named, b"on");
            assert_eq!(receive(&server).0, b"on");
        });
    }

    #[test]
    fn senders_that_are_gone_are_named() {
        alone!({
            let [left, right] = pair(DGRAM);
            sys::socket::set_number(&right, 1, 16, 1).unwrap();
            let sender = who(1003);
            sys::identity::send(sender.into(), &left, b"x", Along::default(), 0).unwrap();
            let [_left, right] = cycle([left, right]);
            let found = receive(&right).1.credentials.unwrap();
            assert_eq!((found.pid, found.uid), (sender.pid, 1003));
        });
    }

    #[test]
    fn options_and_flags_survive() {
        alone!({
            let [left, right] = pair(STREAM);
            sys::socket::set_number(&left, 1, 7, 12_345).unwrap();
            sys::socket::set_number(&left, 1, 16, 1).unwrap();
            rustix::fs::fcntl_setfl(&left, rustix::fs::OFlags::NONBLOCK).unwrap();
            let wanted = Options::read(left.as_fd(), Kinds::UNIX).unwrap();
            send(&right, b"with credentials");
            let [left, _right] = cycle([left, right]);
            assert_eq!(Options::read(left.as_fd(), Kinds::UNIX).unwrap(), wanted);
            let flags = rustix::fs::fcntl_getfl(&left).unwrap();
            assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
        });
    }

    #[test]
    fn damaged_payloads_are_refused() {
        alone!({
            let [left, right] = pair(STREAM);
            let mut world = World::new(vec![left, right]);
            world.dump().unwrap();
            assert!(
                world.lines()[0].starts_with("stream "),
                "{:?}",
                world.lines()
            );
            let record = Unix {
                kind: 77,
                ..Unix::default()
            };
            assert!(UnixSocket::check(&record).is_err());
        });
    }
}
