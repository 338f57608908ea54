//! TCP sockets: listening, closed, and connections whose other end must not notice.
//!
//! An established connection is saved only with `--tcp-established`: sequence numbers, windows,
//! what was agreed on and the data of both queues ([`repair`]). Between the dump and the restore
//! its packets are dropped ([`lock`]). Of a half-closed connection our own shutdown is made again
//! once it runs; the other end's is told to the socket by a packet made by hand ([`packet`]).
//!
//! A socket may be one of Multipath TCP (Go's listeners are): then it listens or is not connected,
//! as the kernel has no repair mode for such a connection. One that its listener accepted from a
//! client without MPTCP is plain TCP to the kernel.
//!
//! - What: TCP socket
//! - Kept: listeners; connections with their sequence numbers, windows and both queues with
//!   `--tcp-established`; half-closed and ended ones; Multipath TCP that listens or is not
//!   connected.
//! - Refused: "it is established, … to …" (`--tcp-established`, or `--tcp-close`); "…: a
//!   connection waits to be accepted", for all of `--timeout` (`--skip-in-flight`); "a connection
//!   to it is being made, which would wait to be accepted", for all of `--timeout`; "…: a
//!   connection is still being made", for all of `--timeout`; "it is a connection of Multipath
//!   TCP" (`--tcp-close`); "it is a connection that ended with data unread"; "it is an established
//!   TCP connection" (in flight in a unix socket); "it has an upper layer protocol (TLS in the
//!   kernel)"; "it is a connection in state …"; "it is in repair mode (TCP_REPAIR)"; "it signs its
//!   segments (TCP_AO)"; "it signs its segments (TCP_MD5SIG), and its other end has shut down";
//!   "nobody has fetched the packet that it keeps of its client yet (TCP_SAVED_SYN)"; "it has
//!   urgent data (MSG_OOB)".
//! - At a restore: "the TCP connection … to … is established (use --tcp-established to restore
//!   it)".
//! - CRIU 4.2: kept with the same options, also those still being made, and unread data of one that
//!   a reset has ended, though not the error. Refuses Multipath TCP altogether, and connections
//!   that wait to be accepted at once, but for `--skip-in-flight`. Does not look for TLS in the
//!   kernel.

pub mod backlog;
mod ended;
pub mod lock;
pub mod newcomers;
mod repair;
pub mod signature;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;

use repair::{Connection, State};
use signature::Signature;

use super::socket::options::{Moment, Options};
use super::socket::{self, Nature, hidden, inet, inet_diag, packet};
use super::{DumpContext, Kind, Open, RestoreContext, Stage, ready};
use crate::{Allow, Error, Result};

const SOCK_STREAM: i32 = libc::SOCK_STREAM;
const IPPROTO_TCP: i32 = libc::IPPROTO_TCP;
const IPPROTO_MPTCP: i32 = libc::IPPROTO_MPTCP;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_REUSEADDR: i32 = libc::SO_REUSEADDR;
const SO_INCOMING_CPU: i32 = libc::SO_INCOMING_CPU;
const TCP_MAXSEG: i32 = libc::TCP_MAXSEG;
const TCP_REPAIR: i32 = libc::TCP_REPAIR;
const TCP_SAVED_SYN: i32 = libc::TCP_SAVED_SYN;
const TCP_ULP: i32 = libc::TCP_ULP;
const TCP_AO_INFO: i32 = linux_raw_sys::net::TCP_AO_INFO as i32;
/// Sizes of segments that a socket can be told.
const MSS_BYTES: std::ops::RangeInclusive<i32> = 88..=32_767;
const SHUT_RD: i32 = libc::SHUT_RD;
const SHUT_WR: i32 = libc::SHUT_WR;
const SHUT_RDWR: i32 = libc::SHUT_RDWR;

/// A TCP socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tcp {
    /// `AF_INET` or `AF_INET6`.
    #[prost(int32, tag = "1")]
    pub family: i32,
    /// The state.
    #[prost(enumeration = "State", tag = "2")]
    pub state: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "3")]
    pub common: socket::Common,
    /// Its own address, as a `sockaddr`.
    #[prost(bytes = "vec", tag = "4")]
    pub local: Vec<u8>,
    /// The other end's address.
    #[prost(bytes = "vec", tag = "5")]
    pub remote: Vec<u8>,
    /// The backlog, of one that listens.
    #[prost(uint32, tag = "6")]
    pub backlog: u32,
    /// Whether a closed one reads as a connection that ended.
    #[prost(bool, tag = "7")]
    pub ended: bool,
    /// The connection.
    #[prost(message, optional, tag = "8")]
    pub connection: Option<Connection>,
    /// Its options.
    #[prost(message, required, tag = "9")]
    pub options: Options,
    /// Whether it is a socket of Multipath TCP.
    #[prost(bool, tag = "10")]
    pub multipath: bool,
    /// Whether its own address was none of the host's.
    #[prost(bool, tag = "11")]
    pub is_foreign: bool,
    /// Whether a connection whose other end may still send is shut down for reading.
    #[prost(bool, tag = "12")]
    pub is_deaf: bool,
    /// Keys of signed TCP.
    #[prost(message, repeated, tag = "13")]
    pub signatures: Vec<Signature>,
    /// The error that one whose connection ended has not told of yet.
    #[prost(int32, tag = "14")]
    pub error: i32,
}

impl Tcp {
    /// Forgets what options tell of the connection, not of what its owner has set.
    fn forget_measured(&mut self) {
        let mss = self.options.number(IPPROTO_TCP, TCP_MAXSEG);
        let is_fresh = self.connection.is_none() && !self.ended;
        if !(is_fresh && mss.is_some_and(|bytes| MSS_BYTES.contains(&bytes))) {
            self.options.forget(IPPROTO_TCP, TCP_MAXSEG);
        }
        if !is_fresh {
            self.options.forget(SOL_SOCKET, SO_INCOMING_CPU);
        }
    }
}

/// The kind.
pub struct TcpSocket;

fn is_tcp(nature: Nature) -> bool {
    let inet = [inet::AF_INET, inet::AF_INET6].contains(&nature.family);
    let tcp = [IPPROTO_TCP, IPPROTO_MPTCP].contains(&nature.protocol);
    inet && nature.kind == SOCK_STREAM && tcp
}

impl Kind for TcpSocket {
    type Record = Tcp;
    const TAG: u16 = super::tags::TCP;
    const NAME: &'static str = "tcp socket";
    const STAYS: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, is_tcp)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Tcp> {
        read(open, cx)
    }

    fn check(record: &Tcp) -> Result<()> {
        record.options.check()?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        if ![inet::AF_INET, inet::AF_INET6].contains(&record.family) {
            return corrupt("of another family");
        }
        let state = State::try_from(record.state).unwrap_or(State::Unknown);
        let connected = state.is_connected();
        if !(connected || [State::Close, State::Listen].contains(&state)) {
            return corrupt("in no state that is saved");
        }
        if connected && record.multipath {
            return corrupt("a connection of Multipath TCP");
        }
        if connected != record.connection.is_some() {
            return corrupt("connected to nothing");
        }
        if !record.connection.as_ref().is_none_or(Connection::is_sound) {
            return corrupt("its connection does not make sense");
        }
        if !record.signatures.iter().all(Signature::is_sound) {
            return corrupt("has a key that no socket can have");
        }
        if record.error != 0 && !(record.ended && ended::is_made(record.error)) {
            return corrupt("has an error that no connection has ended with");
        }
        Ok(())
    }

    fn describe(record: &Tcp) -> String {
        let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
        let queues = record.connection.as_ref().map(|connection| {
            let (sent, received) = (connection.sent.len(), connection.received.len());
            format!(" unacknowledged={sent} unread={received}")
        });
        match record.state() {
            State::Listen if record.multipath => {
                format!("{local} listening backlog={} multipath", record.backlog)
            }
            State::Listen => format!("{local} listening backlog={}", record.backlog),
            State::Close => format!("{local} closed"),
            state => format!(
                "{local} to {remote} {state:?}{}",
                queues.unwrap_or_default()
            ),
        }
    }

    fn open(record: &Tcp, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let (protocol, doing) = if record.multipath {
            (IPPROTO_MPTCP, "make a Multipath TCP socket")
        } else {
            (IPPROTO_TCP, "make a TCP socket")
        };
        let own = sys::socket::open(record.family, SOCK_STREAM, protocol)
            .map_err(|error| Error::kernel(doing, error))?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        for signature in &record.signatures {
            signature
                .set(own.as_fd(), record.family)
                .map_err(|error| Error::kernel("set TCP_MD5SIG_EXT", error))?;
        }
        match (record.state(), &record.connection) {
            (State::Listen, _) => bind(record, own.as_fd(), cx)?,
            (_, Some(_)) if !cx.allow().tcp_established && !cx.allow().tcp_close => {
                let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
                return Err(Error::Mismatch {
                    what: format!(
                        "the TCP connection {local} to {remote} is established \
                         (use --tcp-established to restore it)"
                    ),
                });
            }
            (_, Some(_)) if cx.allow().tcp_close => end(own.as_fd()),
            // Ports of others are taken first: a connection can share one, not the reverse.
            (_, Some(_)) => {}
            (_, None) if record.ended => {
                if record.error != 0 {
                    ended::fail(own.as_fd(), record.family, record.error)
                        .map_err(|error| Error::kernel("have a connection fail again", error))?;
                }
                // Nothing can be done with its address any more.
                if let Err(error) = bind(record, own.as_fd(), cx) {
                    log::warn!("an ended connection loses its address: {error}");
                }
                end(own.as_fd());
            }
            (_, None) => bind(record, own.as_fd(), cx)?,
        }
        Ok(own)
    }

    fn finish(record: &Tcp, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        if let (Some(connection), false) = (&record.connection, cx.allow().tcp_close) {
            let written = connection.write(own, &record.local, &record.remote);
            written.map_err(|(doing, error)| {
                let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
                Error::kernel(
                    format!("{doing} the TCP connection {local} to {remote}"),
                    error,
                )
            })?;
        }
        if record.state() == State::Listen {
            listen(record, own, cx)?;
        }
        record.options.apply(own, Moment::Late)
    }

    fn stages(record: &Tcp, allow: &Allow) -> &'static [Stage] {
        match record.connection.is_some() && !allow.tcp_close {
            true => &[Stage::Wake],
            false => &[Stage::Enable],
        }
    }

    fn act(record: &Tcp, _stage: Stage, own: BorrowedFd<'_>, allow: &Allow) -> Result<()> {
        let Some(connection) = record.connection.as_ref().filter(|_| !allow.tcp_close) else {
            return record.options.restore_bound(own);
        };
        let failed = |error| {
            let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
            Error::kernel(
                format!("let the TCP connection {local} to {remote} run"),
                error,
            )
        };
        let reuse = record
            .options
            .number(SOL_SOCKET, SO_REUSEADDR)
            .unwrap_or_default();
        connection.wake(own, reuse).map_err(failed)?;
        half_close(record, connection, own).map_err(failed)?;
        if record.is_deaf {
            sys::socket::shutdown(own, SHUT_RD).map_err(failed)?;
        }
        Ok(())
    }
}

fn read(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Tcp> {
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    let nature = Nature::of_socket(open)?;
    let info = repair::info(own).map_err(failed)?;
    let mut record = Tcp {
        family: nature.family,
        common: socket::Common::of(open),
        local: sys::socket::name(own).map_err(failed)?,
        options: Options::of(open, cx)?,
        multipath: nature.protocol == IPPROTO_MPTCP,
        ..Tcp::default()
    };
    record.set_state(info.state);
    refuse_unread(open, &record)?;
    match info.state {
        State::Listen if info.waiting > 0 && !cx.allow().skip_in_flight => {
            return Err(backlog::passing(open.process.pid(), &open.place()));
        }
        State::Listen => {
            record.backlog = info.backlog;
            record.signatures = told(open, &record)?.signatures;
            record.is_foreign = socket::bind::is_foreign(record.family, &record.local);
        }
        State::Close => read_closed(open, &mut record)?,
        state if cx.allow().tcp_close => {
            log::debug!("{}: {state:?}, saved as closed", open.place());
            record.set_state(State::Close);
            record.ended = true;
            record.local.clear();
        }
        state if state.is_being_made() => {
            return Err(Error::Passing {
                pid: open.process.pid(),
                what: format!("{}: a connection is still being made", open.place()),
                allow: None,
                early: false,
                by_tree: false,
            });
        }
        state if !state.is_connected() => {
            return Err(open.unsupported(&format!("it is a connection in state {state:?}"), None));
        }
        _ if record.multipath => {
            let why = "it is a connection of Multipath TCP";
            return Err(open.unsupported(why, Some("--tcp-close")));
        }
        _ if open.fd < 0 => {
            return Err(open.unsupported("it is an established TCP connection", None));
        }
        _ => {
            record.remote = sys::socket::peer_name(own).map_err(failed)?;
            if !cx.allow().tcp_established {
                let (local, remote) = (inet::print(&record.local), inet::print(&record.remote));
                let end = other_end(&record);
                let why = format!("it is established, {local} to {remote}{end}");
                return Err(open.unsupported(&why, Some("--tcp-established")));
            }
            record.is_deaf = !info.state.has_received_fin() && reads_as_ended(open)?;
            hidden::refuse_errors(open)?;
            read_connection(open, &mut record)?;
            let connection = repair::read(own, &info).map_err(failed)?;
            record.connection = Some(connection);
        }
    }
    record.forget_measured();
    Ok(record)
}

/// Takes down what a closed socket has.
fn read_closed(open: &Open<'_>, record: &mut Tcp) -> Result<()> {
    record.ended = has_ended(open)?;
    record.error = ended::error(open, record.ended)?;
    if !record.multipath && !record.ended {
        ended::refuse_signed(open)?;
    }
    record.is_foreign = socket::bind::is_foreign(record.family, &record.local);
    Ok(())
}

/// Refuses what calls tell of a socket in any state, and do not give back.
fn refuse_unread(open: &Open<'_>, record: &Tcp) -> Result<()> {
    const AO_BYTES: usize = 64;
    let own = open.own()?;
    let upper = sys::socket::option(own, IPPROTO_TCP, TCP_ULP, 16).unwrap_or_default();
    if !(upper.is_empty() || record.multipath && upper.starts_with(b"mptcp\0")) {
        return Err(open.unsupported("it has an upper layer protocol (TLS in the kernel)", None));
    }
    if record.multipath {
        return Ok(());
    }
    if sys::socket::number(own, IPPROTO_TCP, TCP_REPAIR).is_ok_and(|mode| mode != 0) {
        return Err(open.unsupported("it is in repair mode (TCP_REPAIR)", None));
    }
    if sys::socket::option(own, IPPROTO_TCP, TCP_AO_INFO, AO_BYTES).is_ok() {
        return Err(open.unsupported("it signs its segments (TCP_AO)", None));
    }
    Ok(())
}

/// The facts of a socket that sock_diag(7) tells.
fn told(open: &Open<'_>, record: &Tcp) -> Result<inet_diag::TcpFacts> {
    let told = inet_diag::tcp(socket::inode(open), &record.local, &record.remote);
    let told = told.map_err(|error| Error::kernel(format!("ask {}", open.place()), error))?;
    Ok(told.unwrap_or_default())
}

/// Takes down what a connection has besides its sequence numbers, and refuses what is not kept.
fn read_connection(open: &Open<'_>, record: &mut Tcp) -> Result<()> {
    let own = open.own()?;
    // Where there is one, room for it is asked for.
    if sys::socket::option(own, IPPROTO_TCP, TCP_SAVED_SYN, 0).is_err() {
        let why = "nobody has fetched the packet that it keeps of its client yet (TCP_SAVED_SYN)";
        return Err(open.unsupported(why, None));
    }
    let told = told(open, record)?;
    let inbound = sys::socket::count(own, sys::socket::Count::Inbound)
        .map_err(|error| Error::kernel(format!("read {}", open.place()), error))?;
    let fin = u32::from(record.state().has_received_fin());
    let urgent = ready::events(own, PollFlags::PRI)
        .map_err(|error| Error::kernel(format!("poll {}", open.place()), error))?;
    let behind = told.waiting.saturating_sub(fin) > inbound.cast_unsigned();
    if behind || urgent.contains(PollFlags::PRI) {
        return Err(open.unsupported("it has urgent data (MSG_OOB)", None));
    }
    if fin != 0 && !told.signatures.is_empty() {
        let why = "it signs its segments (TCP_MD5SIG), and its other end has shut down";
        return Err(open.unsupported(why, None));
    }
    record.signatures = told.signatures;
    Ok(())
}

/// Who has the other end of a connection of this host, for messages.
fn other_end(record: &Tcp) -> String {
    let ends = inet::parse(&record.remote).zip(inet::parse(&record.local));
    let inode = ends.and_then(|(local, remote)| inet_diag::tcp_owner(local, remote).ok()?);
    inode.map_or_else(String::new, socket::owner)
}

/// Whether a closed socket was connected once: it reads as ended then.
fn has_ended(open: &Open<'_>) -> Result<bool> {
    let own = open.own()?;
    let ended = reads_as_ended(open)?;
    // Data that came before the end is still there to be read, but cannot be put back. To look at
    // it would take an error that the target was not told of.
    let unread =
        ended && sys::socket::count(own, sys::socket::Count::Inbound).is_ok_and(|bytes| bytes > 0);
    if unread {
        return Err(open.unsupported("it is a connection that ended with data unread", None));
    }
    Ok(ended)
}

/// Whether nothing is to be read any more behind what is there.
fn reads_as_ended(open: &Open<'_>) -> Result<bool> {
    let own = open.own()?;
    let told = ready::events(own, PollFlags::RDHUP)
        .map_err(|error| Error::kernel(format!("poll {}", open.place()), error))?;
    Ok(told.contains(PollFlags::RDHUP))
}

/// Gives a socket its address, if it had one. Ended connections of before do not stand in the way.
fn bind(record: &Tcp, own: BorrowedFd<'_>, cx: &dyn RestoreContext) -> Result<()> {
    if inet::is_any(&record.local) {
        return Ok(());
    }
    let at = (record.local.as_slice(), record.is_foreign);
    sys::socket::set_number(own, SOL_SOCKET, SO_REUSEADDR, 1)
        .and_then(|()| socket::bind::bind(own, at, cx))
        .map_err(|error| {
            let local = inet::print(&record.local);
            Error::kernel(format!("bind a TCP socket to {local}"), error)
        })
}

/// Has a bound socket listen. Only when all others of the image are bound: nobody can share the
/// port of one that listens.
fn listen(record: &Tcp, own: BorrowedFd<'_>, cx: &dyn RestoreContext) -> Result<()> {
    let backlog = i32::try_from(record.backlog).unwrap_or(i32::MAX);
    socket::bind::listen(own, (&record.local, backlog), cx).map_err(|error| {
        let local = inet::print(&record.local);
        Error::kernel(format!("listen on {local}"), error)
    })
}

/// Has a closed socket read as a connection that ended. The call says that it is not connected,
/// and does it nevertheless.
fn end(own: BorrowedFd<'_>) {
    let _ = sys::socket::shutdown(own, SHUT_RDWR);
}

/// Brings a connection that was established again to the half-closed state of the dump, as far as
/// it is not there yet.
fn half_close(record: &Tcp, connection: &Connection, own: BorrowedFd<'_>) -> std::io::Result<()> {
    let (wanted, now) = (record.state(), repair::info(own)?.state);
    let hear = || {
        let ends = inet::parse(&record.local).zip(inet::parse(&record.remote));
        let (local, remote) = ends.ok_or(rustix::io::Errno::AFNOSUPPORT)?;
        let received = u32::try_from(connection.received.len()).unwrap_or(u32::MAX);
        let sequence = connection.receive_sequence.wrapping_add(received);
        packet::send_fin(local, remote, sequence, connection.send_sequence)
    };
    let shuts = wanted.has_sent_fin() && !now.has_sent_fin();
    // Both at once is what makes it Closing: our own shutdown must come first.
    if wanted == State::Closing && shuts {
        sys::socket::shutdown(own, SHUT_WR)?;
    }
    if wanted.has_received_fin() && !now.has_received_fin() {
        hear()?;
    }
    if wanted != State::Closing && shuts {
        sys::socket::shutdown(own, SHUT_WR)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::Duration;

    use super::super::socket::ledger::Kinds;
    use super::super::socket::testing::World;
    use super::*;

    const KINDS: Kinds = Kinds::TCP.or(Kinds::MPTCP);
    use crate::testing::alone;

    const ESTABLISHED: crate::Allow = crate::Allow {
        save_files: Vec::new(),
        tcp_established: true,
        tcp_close: false,
        skip_in_flight: false,
        network_unlocked: false,
        ext_unix_sk: false,
        ext_unix_inodes: Vec::new(),
        unix_close: false,
        external_pipes: crate::ExternalPipes {
            all: false,
            inodes: Vec::new(),
        },
        shell_job: false,
        file_locks: false,
        drop_events: false,
        perf_events: false,
        link_remap: false,
        force_irmap: false,
        irmap_scan_paths: Vec::new(),
        file_validation: crate::FileValidation::BuildId,
        cgroups: crate::cgroup::Management {
            mode: crate::cgroup::Mode::Soft,
            roots: Vec::new(),
            yard: None,
        },
        ghost_limit_bytes: 0,
        namespaces: crate::NamespaceOptions {
            root: None,
            mounts: Vec::new(),
            external: Vec::new(),
            empty: Vec::new(),
        },
    };

    fn connection(at: &str) -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind((at, 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
        }
        (listener, client, server)
    }

    fn world(live: Vec<OwnedFd>) -> World {
        let mut world = World::new(live);
        world.allow = ESTABLISHED;
        world
    }

    fn restored<const N: usize>(live: [OwnedFd; N]) -> [TcpStream; N] {
        let mut world = world(live.into());
        world.dump().unwrap();
        let opened = world.restore().unwrap().into_iter().map(TcpStream::from);
        opened.collect::<Vec<_>>().try_into().unwrap()
    }

    fn read(from: &mut TcpStream, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        from.read_exact(&mut data).unwrap();
        data
    }

    fn state(of: &TcpStream) -> State {
        repair::info(of.as_fd()).unwrap().state
    }

    /// Waits until a connection has reached a state.
    fn reaches(of: &TcpStream, wanted: State) {
        let started = std::time::Instant::now();
        while state(of) != wanted {
            let waited = started.elapsed();
            assert!(
                waited < Duration::from_secs(60),
                "{:?}, not {wanted:?}",
                state(of)
            );
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_other_end_does_not_notice() {
        alone!({
            for at in ["127.0.0.1", "::1"] {
                let (_listener, mut client, server) = connection(at);
                client.write_all(b"before, ").unwrap();
                (&server).write_all(b"unread by the other end, ").unwrap();
                let [mut server] = restored([server.into()]);
                client.write_all(b"after").unwrap();
                assert_eq!(read(&mut server, 13), b"before, after");
                server.write_all(b"and more").unwrap();
                assert_eq!(read(&mut client, 33), b"unread by the other end, and more");
                drop(server);
                assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
            }
        });
    }

    #[test]
    fn both_ends_can_be_in_the_tree() {
        alone!({
            let (_listener, client, server) = connection("127.0.0.1");
            (&client).write_all(&[1; 50_000]).unwrap();
            (&server).write_all(&[2; 70_000]).unwrap();
            let [mut client, mut server] = restored([client.into(), server.into()]);
            assert_eq!(read(&mut server, 50_000), [1; 50_000]);
            assert_eq!(read(&mut client, 70_000), [2; 70_000]);
            client.write_all(b"on").unwrap();
            assert_eq!(read(&mut server, 2), b"on");
        });
    }

    /// Writes until nothing more is taken.
    fn stuff(stream: &TcpStream) -> Vec<u8> {
        stream.set_nonblocking(true).unwrap();
        let mut all = Vec::new();
        loop {
            let piece: Vec<u8> = (0..40_000_u32)
                .map(|n| (n + all.len() as u32) as u8)
                .collect();
            match (&*stream).write(&piece) {
                Ok(taken) => all.extend(&piece[..taken]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        stream.set_nonblocking(false).unwrap();
        all
    }

    #[test]
    fn data_that_was_never_on_the_wire_arrives() {
        alone!({
            let (_listener, client, mut server) = connection("127.0.0.1");
            let wanted = stuff(&client);
            assert!(sys::socket::count(&client, sys::socket::Count::Unsent).unwrap() > 0);
            let [client] = restored([client.into()]);
            assert!(read(&mut server, wanted.len()) == wanted);
            (&client).write_all(b"end").unwrap();
            assert_eq!(read(&mut server, 3), b"end");
        });
    }

    #[test]
    fn a_full_receive_queue_comes_back() {
        alone!({
            let (_listener, client, server) = connection("127.0.0.1");
            let wanted = stuff(&client);
            let [mut server] = restored([server.into()]);
            assert!(read(&mut server, wanted.len()) == wanted);
            (&client).write_all(b"end").unwrap();
            assert_eq!(read(&mut server, 3), b"end");
        });
    }

    #[test]
    fn a_target_left_running_goes_on() {
        alone!({
            let (_listener, mut client, mut server) = connection("127.0.0.1");
            sys::socket::set_number(&server, SOL_SOCKET, SO_REUSEADDR, 1).unwrap();
            client.write_all(b"one").unwrap();
            let mut world = world(vec![server.try_clone().unwrap().into()]);
            world.dump().unwrap();
            drop(world);
            assert_eq!(
                sys::socket::number(&server, SOL_SOCKET, SO_REUSEADDR).unwrap(),
                1
            );
            client.write_all(b"two").unwrap();
            assert_eq!(read(&mut server, 6), b"onetwo");
            server.write_all(b"three").unwrap();
            assert_eq!(read(&mut client, 5), b"three");
        });
    }

    #[test]
    fn half_closed_connections_stay_half_closed() {
        alone!({
            // Shut down there.
            let (_listener, mut client, server) = connection("127.0.0.1");
            client.write_all(b"last").unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            reaches(&server, State::CloseWait);
            let [mut server] = restored([server.into()]);
            reaches(&server, State::CloseWait);
            assert_eq!(read(&mut server, 4), b"last");
            assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
            server.write_all(b"answer").unwrap();
            assert_eq!(read(&mut client, 6), b"answer");
            // Shut down here, and the other end closes afterwards.
            let (_listener, client, mut server) = connection("::1");
            client.shutdown(Shutdown::Write).unwrap();
            reaches(&client, State::FinWait2);
            let [mut client] = restored([client.into()]);
            reaches(&client, State::FinWait2);
            server.write_all(b"answer").unwrap();
            assert_eq!(read(&mut client, 6), b"answer");
            assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
            drop(server);
            assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
        });
    }

    #[test]
    fn a_shutdown_for_reading_survives() {
        alone!({
            let (_listener, mut client, server) = connection("127.0.0.1");
            server.shutdown(Shutdown::Read).unwrap();
            let [mut server] = restored([server.into()]);
            assert_eq!(state(&server), State::Established);
            assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
            server.write_all(b"still sent").unwrap();
            assert_eq!(read(&mut client, 10), b"still sent");
            // What comes all the same is read before the end.
            client.write_all(b"late").unwrap();
            let [mut server] = restored([server.into()]);
            assert_eq!(read(&mut server, 4), b"late");
            assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
        });
    }

    #[test]
    fn urgent_data_is_refused() {
        alone!({
            const MSG_OOB: i32 = libc::MSG_OOB;
            let (_listener, client, mut server) = connection("127.0.0.1");
            (&client).write_all(b"before").unwrap();
            let along = sys::socket::Along::default();
            sys::socket::send(&client, b"!", along, MSG_OOB).unwrap();
            (&client).write_all(b"behind").unwrap();
            // One that was read already is a mark in the data all the same.
            for _ in 0..2 {
                let refused = || {
                    let dumped = world(vec![server.try_clone().unwrap().into()]).dump();
                    dumped.is_err_and(|error| error.to_string().contains("urgent data"))
                };
                testkit::wait::wait_until("a refusal", Duration::from_secs(30), refused);
                let got = sys::socket::receive(&server, &mut [0; 1], MSG_OOB);
                assert!(got.is_ok() || got.is_err_and(|error| error.raw_os_error() == Some(22)));
            }
            assert_eq!(read(&mut server, 12), b"beforebehind");
        });
    }

    #[test]
    fn a_kept_packet_of_a_client_is_refused() {
        const TCP_SAVE_SYN: i32 = libc::TCP_SAVE_SYN;
        alone!({
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            sys::socket::set_number(&listener, IPPROTO_TCP, TCP_SAVE_SYN, 1).unwrap();
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let server = listener.accept().unwrap().0;
            let dumped = world(vec![server.try_clone().unwrap().into()]).dump();
            let error = dumped.unwrap_err().to_string();
            assert!(error.contains("TCP_SAVED_SYN"), "{error}");
            // Fetched, it is gone.
            sys::socket::option(&server, IPPROTO_TCP, TCP_SAVED_SYN, 256).unwrap();
            let [_server] = restored([server.into()]);
        });
    }

    #[test]
    fn a_target_left_running_is_told_of_a_reset() {
        alone!({
            let (_listener, client, server) = connection("127.0.0.1");
            (&client).write_all(b"unread").unwrap();
            // A socket that is closed with data unread resets its connection.
            drop(server);
            reaches(&client, State::Close);
            let mut left = client.try_clone().unwrap();
            let _ = world(vec![client.into()]).dump();
            let error = left.read(&mut [0; 1]);
            assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
        });
    }

    #[test]
    fn a_shutdown_behind_unsent_data_is_made_again() {
        alone!({
            let (_listener, client, mut server) = connection("127.0.0.1");
            let wanted = stuff(&client);
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(state(&client), State::FinWait1);
            let [client] = restored([client.into()]);
            assert!(read(&mut server, wanted.len()) == wanted);
            assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
            reaches(&client, State::FinWait2);
        });
    }

    #[test]
    fn ten_cycles_in_a_row() {
        alone!({
            let (_listener, mut client, mut server) = connection("127.0.0.1");
            for round in 0..10_u8 {
                client.write_all(&[round; 100]).unwrap();
                let [again] = restored([server.into()]);
                server = again;
                assert_eq!(read(&mut server, 100), [round; 100]);
                server.write_all(&[round]).unwrap();
                assert_eq!(read(&mut client, 1), [round]);
            }
        });
    }

    #[test]
    fn listeners_take_connections_again() {
        alone!({
            let (listener, mut client, server) = connection("127.0.0.1");
            sys::socket::listen(&listener, 17).unwrap();
            let at = listener.local_addr().unwrap();
            let wanted = Options::read(listener.as_fd(), KINDS).unwrap();
            let mut world = world(vec![server.into(), listener.into()]);
            world.dump().unwrap();
            let mut opened = world.restore().unwrap();
            let listener = TcpListener::from(opened.remove(1));
            let mut server = TcpStream::from(opened.remove(0));
            assert_eq!(listener.local_addr().unwrap(), at);
            assert_eq!(repair::info(listener.as_fd()).unwrap().backlog, 17);
            assert_eq!(Options::read(listener.as_fd(), KINDS).unwrap(), wanted);
            let _second = TcpStream::connect(at).unwrap();
            listener.accept().unwrap();
            client.write_all(b"old").unwrap();
            assert_eq!(read(&mut server, 3), b"old");
        });
    }

    /// A socket bound to `at` with this option.
    fn bound(at: std::net::SocketAddr, option: i32) -> OwnedFd {
        let family = match at {
            std::net::SocketAddr::V4(_) => inet::AF_INET,
            std::net::SocketAddr::V6(_) => inet::AF_INET6,
        };
        let own = sys::socket::open(family, SOCK_STREAM, IPPROTO_TCP).unwrap();
        sys::socket::set_number(&own, SOL_SOCKET, option, 1).unwrap();
        rustix::net::bind(&own, &at).unwrap();
        own
    }

    #[test]
    fn a_port_is_shared_although_the_option_was_cleared() {
        alone!({
            for at in ["127.0.0.1:7762", "[::1]:7762", "[::]:7762"] {
                let at = at.parse().unwrap();
                // One listens and one does not; two of one group listen.
                for (option, listen) in [(SO_REUSEADDR, [true, false]), (15, [true, true])] {
                    for backwards in [false, true] {
                        let mut all = [(); 2].map(|()| bound(at, option));
                        for (own, listens) in all.iter().zip(listen) {
                            if listens {
                                sys::socket::listen(own, 5).unwrap();
                            }
                        }
                        for own in &all {
                            sys::socket::set_number(own, SOL_SOCKET, option, 0).unwrap();
                        }
                        if backwards {
                            all.reverse();
                        }
                        let all = restored(restored(all).map(OwnedFd::from)).map(OwnedFd::from);
                        for own in &all {
                            let now = sys::socket::number(own, SOL_SOCKET, option).unwrap();
                            assert_eq!(now, 0, "{at} {option}");
                            let name = sys::socket::name(own).unwrap();
                            assert_eq!(inet::parse(&name), Some(at));
                        }
                        TcpStream::connect(at).unwrap();
                    }
                }
            }
        });
    }

    #[test]
    fn what_the_killed_original_left_is_not_in_the_way() {
        alone!({
            for at in ["127.0.0.1", "::1"] {
                let (listener, client, server) = connection(at);
                sys::socket::set_number(&listener, SOL_SOCKET, SO_REUSEADDR, 0).unwrap();
                let port = listener.local_addr().unwrap();
                let third = TcpStream::connect(port).unwrap();
                let (fourth, _) = listener.accept().unwrap();
                let (_elsewhere, alive, mut other) = connection(at);
                let all = vec![server.into(), client.into(), listener.into()];
                let mut world = world(all);
                world.dump().unwrap();
                // The target goes on, and is killed later: all that it had open is closed.
                world.left_running();
                drop((fourth, third));
                let mut opened = world.restore().unwrap();
                let listener = TcpListener::from(opened.remove(2));
                let mut client = TcpStream::from(opened.remove(1));
                let mut server = TcpStream::from(opened.remove(0));
                client.write_all(b"on").unwrap();
                assert_eq!(read(&mut server, 2), b"on");
                server.write_all(b"and on").unwrap();
                assert_eq!(read(&mut client, 6), b"and on");
                (&alive).write_all(b"x").unwrap();
                assert_eq!(read(&mut other, 1), b"x");
                drop(listener);
            }
        });
    }

    #[test]
    fn an_ended_connection_does_not_need_its_port() {
        alone!({
            let (listener, mut client, mut server) = connection("127.0.0.1");
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(server.read(&mut [0]).unwrap(), 0);
            drop(server);
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
            reaches(&client, State::Close);
            let [client, listener] =
                restored(restored([client.into(), listener.into()]).map(OwnedFd::from));
            assert_eq!((&client).read(&mut [0]).unwrap(), 0);
            let listener = TcpListener::from(OwnedFd::from(listener));
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            listener.accept().unwrap();
        });
    }

    #[test]
    fn multipath_listeners_take_connections_again() {
        alone!({
            let Ok(own) = sys::socket::open(inet::AF_INET, SOCK_STREAM, IPPROTO_MPTCP) else {
                testkit::skip!("this kernel has no Multipath TCP, or it is switched off");
            };
            let free = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
            rustix::net::bind(&own, &free).unwrap();
            rustix::net::listen(&own, 17).unwrap();
            let wanted = Options::read(own.as_fd(), KINDS).unwrap();
            let listener = TcpListener::from(own);
            let at = listener.local_addr().unwrap();
            let client = TcpStream::connect(at).unwrap();
            let (server, _) = listener.accept().unwrap();
            let mut world = world(vec![server.into(), listener.into()]);
            world.dump().unwrap();
            let mut opened = world.restore().unwrap();
            let listener = TcpListener::from(opened.remove(1));
            let mut server = TcpStream::from(opened.remove(0));
            assert_eq!(
                Nature::of_fd(listener.as_fd()).unwrap().protocol,
                IPPROTO_MPTCP
            );
            assert_eq!(listener.local_addr().unwrap(), at);
            assert_eq!(repair::info(listener.as_fd()).unwrap().backlog, 17);
            assert_eq!(Options::read(listener.as_fd(), KINDS).unwrap(), wanted);
            (&client).write_all(b"old").unwrap();
            assert_eq!(read(&mut server, 3), b"old");
            let client = sys::socket::open(inet::AF_INET, SOCK_STREAM, IPPROTO_MPTCP).unwrap();
            rustix::net::connect(&client, &at).unwrap();
            let (server, _) = listener.accept().unwrap();
            let error = World::new(vec![server.into()]).dump().unwrap_err();
            assert!(error.to_string().contains("Multipath TCP"), "{error}");
            assert!(error.to_string().contains("--tcp-close"), "{error}");
        });
    }

    #[test]
    fn options_survive() {
        alone!({
            let (_listener, mut client, server) = connection("127.0.0.1");
            server.set_nodelay(true).unwrap();
            server.set_nonblocking(true).unwrap();
            for (level, name, value) in [(1, 9, 1), (6, 4, 77), (6, 18, 5000), (1, 8, 50_000)] {
                sys::socket::set_number(&server, level, name, value).unwrap();
            }
            sys::socket::set_option(&server, 6, 13, b"reno").unwrap();
            let options = |server: &TcpStream| {
                let mut options = Options::read(server.as_fd(), KINDS).unwrap();
                options.forget(IPPROTO_TCP, TCP_MAXSEG);
                options.forget(SOL_SOCKET, SO_INCOMING_CPU);
                options
            };
            let wanted = options(&server);
            let [mut server] = restored([server.into()]);
            assert_eq!(options(&server), wanted);
            assert_eq!(
                server.read(&mut [0]).unwrap_err().kind(),
                ErrorKind::WouldBlock
            );
            server.write_all(b"on").unwrap();
            assert_eq!(read(&mut client, 2), b"on");
        });
    }

    #[test]
    fn connections_are_refused_without_the_option() {
        alone!({
            let (listener, mut client, server) = connection("127.0.0.1");
            let mut world = World::new(vec![server.into()]);
            let told = world.dump().unwrap_err().to_string();
            assert!(told.contains("--tcp-established"), "{told}");
            assert!(told.contains("an IPv4 stream socket, TCP"), "{told}");
            world.allow.tcp_close = true;
            world.dump().unwrap();
            let mut server = TcpStream::from(world.restore().unwrap().remove(0));
            assert_eq!(server.read(&mut [0]).unwrap(), 0);
            assert_eq!(
                server.write(&[0]).unwrap_err().kind(),
                ErrorKind::BrokenPipe
            );
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
            let _waiting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut world = World::new(vec![listener.into()]);
            let error = world.dump().unwrap_err();
            assert!(matches!(error, Error::Passing { .. }), "{error}");
            let told = error.to_string();
            assert!(told.contains("waits to be accepted"), "{told}");
            assert!(told.contains("--skip-in-flight"), "{told}");
            world.allow.skip_in_flight = true;
            world.dump().unwrap();
            let listener = TcpListener::from(world.restore().unwrap().remove(0));
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            listener.accept().unwrap();
        });
    }

    #[test]
    fn a_failed_restore_can_be_tried_again() {
        alone!({
            let (_listener, mut client, server) = connection("127.0.0.1");
            client.write_all(b"kept").unwrap();
            let mut world = world(vec![server.into()]);
            world.dump().unwrap();
            let mut second = world.copy();
            world.restore_until_resume().unwrap();
            second.allow = ESTABLISHED;
            let mut server = TcpStream::from(second.restore().unwrap().remove(0));
            assert_eq!(read(&mut server, 4), b"kept");
            client.write_all(b"on").unwrap();
            assert_eq!(read(&mut server, 2), b"on");
        });
    }

    #[test]
    fn damaged_payloads_are_refused() {
        let mut record = Tcp {
            family: inet::AF_INET,
            ..Tcp::default()
        };
        record.set_state(State::Established);
        let refused = |record: &Tcp| {
            let error = TcpSocket::check(record).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        };
        refused(&record);
        record.connection = Some(Connection {
            unsent_bytes: 1,
            window: vec![0; 5],
            ..Connection::default()
        });
        refused(&record);
        record.family = 1;
        refused(&record);
    }
}
