//! `TCP_REPAIR`: a connection read out of one socket and put into another, without the other end
//! noticing.
//!
//! Everything that can be asked of a socket in use is; only sequence numbers, the data that was
//! not acknowledged and the windows need the repair mode, in which the socket's owner cannot use
//! it. The whole time in it is a handful of calls; see [`super::lock`] for who ends it when we
//! are killed.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use sys::socket::{Along, Count, count, number, option, receive, send, set_number, set_option};

use crate::fd::socket::{inet, inet_diag, options};

const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SOL_TCP: i32 = libc::SOL_TCP;
const SO_REUSEADDR: i32 = libc::SO_REUSEADDR;
const SO_RCVBUFFORCE: i32 = libc::SO_RCVBUFFORCE;
pub(super) const SO_PEEK_OFF: i32 = libc::SO_PEEK_OFF;
const TCP_MAXSEG: i32 = libc::TCP_MAXSEG;
const TCP_INFO: i32 = libc::TCP_INFO;
const TCP_REPAIR: i32 = libc::TCP_REPAIR;
const TCP_REPAIR_QUEUE: i32 = libc::TCP_REPAIR_QUEUE;
const TCP_QUEUE_SEQ: i32 = libc::TCP_QUEUE_SEQ;
const TCP_REPAIR_OPTIONS: i32 = libc::TCP_REPAIR_OPTIONS;
const TCP_TIMESTAMP: i32 = libc::TCP_TIMESTAMP;
const TCP_REPAIR_WINDOW: i32 = libc::TCP_REPAIR_WINDOW;

const REPAIR_OFF_QUIETLY: i32 = -1;
const REPAIR_OFF: i32 = 0;
const REPAIR_ON: i32 = 1;
const NO_QUEUE: i32 = 0;
const RECEIVE_QUEUE: i32 = 1;
const SEND_QUEUE: i32 = 2;

const MSG_PEEK_NOW: i32 = 0x42;
const MSG_DONTWAIT: i32 = libc::MSG_DONTWAIT;

/// A refilled receive queue is made of pieces this large.
const PIECE_BYTES: usize = 32 << 10;
/// More than any queue holds: what an image says beyond it is not believed.
const QUEUE_MAX_BYTES: usize = 1 << 30;

/// The states of a connection, numbered as the kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum State {
    /// Not a state.
    Unknown = 0,
    /// Both directions are open.
    Established = 1,
    /// Asked to connect.
    SynSent = 2,
    /// Being accepted.
    SynReceived = 3,
    /// Shut down here, which is not acknowledged.
    FinWait1 = 4,
    /// Shut down here.
    FinWait2 = 5,
    /// Over, with late packets expected.
    TimeWait = 6,
    /// Closed.
    Close = 7,
    /// Shut down there.
    CloseWait = 8,
    /// Shut down there, then here, which is not acknowledged.
    LastAck = 9,
    /// Listening.
    Listen = 10,
    /// Shut down on both sides at once.
    Closing = 11,
}

impl State {
    /// Whether both ends know of the connection.
    #[must_use]
    pub fn is_connected(self) -> bool {
        use State::{CloseWait, Closing, Established, FinWait1, FinWait2, LastAck};
        [Established, FinWait1, FinWait2, CloseWait, LastAck, Closing].contains(&self)
    }

    /// Whether one end does not know of the connection yet.
    #[must_use]
    pub fn is_being_made(self) -> bool {
        [Self::SynSent, Self::SynReceived].contains(&self)
    }

    /// Whether this end has shut down its direction.
    #[must_use]
    pub fn has_sent_fin(self) -> bool {
        use State::{Closing, FinWait1, FinWait2, LastAck};
        [FinWait1, FinWait2, LastAck, Closing].contains(&self)
    }

    /// Whether the other end has shut down its direction.
    #[must_use]
    pub fn has_received_fin(self) -> bool {
        [Self::CloseWait, Self::LastAck, Self::Closing].contains(&self)
    }

    /// Whether this end's shutdown is yet to be acknowledged.
    fn awaits_fin_ack(self) -> bool {
        [Self::FinWait1, Self::LastAck, Self::Closing].contains(&self)
    }
}

/// What `TCP_INFO` tells without disturbing anything.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// The state.
    pub state: State,
    has_timestamps: bool,
    has_sack: bool,
    window_scales: Option<(u8, u8)>,
    /// Of a listening socket: connections that wait to be accepted.
    pub waiting: u32,
    /// Of a listening socket: its backlog.
    pub backlog: u32,
}

/// Asks a TCP socket how it is.
///
/// # Errors
/// The call's errno.
pub fn info(own: BorrowedFd<'_>) -> io::Result<Info> {
    const LEN: usize = 32;
    let bytes = option(own, SOL_TCP, TCP_INFO, LEN)?;
    if bytes.len() < LEN {
        return Err(rustix::io::Errno::BADMSG.into());
    }
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let (options, scales) = (bytes[5], bytes[6]);
    Ok(Info {
        state: State::try_from(i32::from(bytes[0])).unwrap_or(State::Unknown),
        has_timestamps: options & 1 != 0,
        has_sack: options & 2 != 0,
        window_scales: (options & 4 != 0).then_some((scales & 0xf, scales >> 4)),
        waiting: word(24),
        backlog: word(28),
    })
}

/// A connection between two ends that both know of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Connection {
    /// The sequence number of the first byte of `sent`.
    #[prost(fixed32, tag = "1")]
    pub send_sequence: u32,
    /// The sequence number of the first byte of `received`.
    #[prost(fixed32, tag = "2")]
    pub receive_sequence: u32,
    /// Data that is not acknowledged.
    #[prost(bytes = "vec", tag = "3")]
    pub sent: Vec<u8>,
    /// How many bytes at the end of `sent` were never on the wire.
    #[prost(uint32, tag = "4")]
    pub unsent_bytes: u32,
    /// Data that is not read.
    #[prost(bytes = "vec", tag = "5")]
    pub received: Vec<u8>,
    /// The largest segment that the other end takes, in bytes.
    #[prost(uint32, tag = "6")]
    pub segment_bytes: u32,
    /// Window scales (of the other end, of this one), where they were agreed on.
    #[prost(message, optional, tag = "7")]
    pub scales: Option<Scales>,
    /// Whether selective acknowledgements were agreed on.
    #[prost(bool, tag = "8")]
    pub has_sack: bool,
    /// The time stamp clock, where time stamps were agreed on.
    #[prost(fixed32, optional, tag = "9")]
    pub timestamp: Option<u32>,
    /// `struct tcp_repair_window`: `snd_wl1`, `snd_wnd`, `max_window`, `rcv_wnd`, `rcv_wup`.
    #[prost(fixed32, repeated, tag = "10")]
    pub window: Vec<u32>,
}

/// Window scales, as shifts.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Scales {
    /// Of windows that the other end announces.
    #[prost(uint32, tag = "1")]
    pub send: u32,
    /// Of windows that this end announces.
    #[prost(uint32, tag = "2")]
    pub receive: u32,
}

/// The repair mode of a socket that goes on being used: switched off quietly, whatever happens.
struct Repairing<'a> {
    own: BorrowedFd<'a>,
    reuse: i32,
}

impl<'a> Repairing<'a> {
    fn new(own: BorrowedFd<'a>) -> io::Result<Self> {
        // Switching the mode forgets the option.
        let reuse = number(own, SOL_SOCKET, SO_REUSEADDR)?;
        set_number(own, SOL_TCP, TCP_REPAIR, REPAIR_ON)?;
        Ok(Self { own, reuse })
    }

    fn queue(&self, queue: i32) -> io::Result<u32> {
        set_number(self.own, SOL_TCP, TCP_REPAIR_QUEUE, queue)?;
        number(self.own, SOL_TCP, TCP_QUEUE_SEQ).map(i32::cast_unsigned)
    }
}

impl Drop for Repairing<'_> {
    fn drop(&mut self) {
        for (level, name, value) in quiet_end(self.reuse) {
            let _ = set_number(self.own, level, name, value);
        }
    }
}

/// The options (level, name, value) that end the repair mode of a socket in use, given its
/// `SO_REUSEADDR`.
#[must_use]
pub fn quiet_end(reuse: i32) -> [(i32, i32, i32); 2] {
    [
        (SOL_TCP, TCP_REPAIR, REPAIR_OFF_QUIETLY),
        (SOL_SOCKET, SO_REUSEADDR, reuse),
    ]
}

/// Reads a connection. Nothing may come in for it meanwhile and its owner must be stopped.
///
/// # Errors
/// The calls' errno.
pub fn read(own: BorrowedFd<'_>, info: &Info) -> io::Result<Connection> {
    let received = peek(own, usize_of(count(own, Count::Inbound)?))?;
    let outbound = usize_of(count(own, Count::Outbound)?);
    let fin_unacknowledged = usize::from(info.state.awaits_fin_ack());
    let sent_bytes = outbound.saturating_sub(fin_unacknowledged);
    let unsent = usize_of(count(own, Count::Unsent)?);
    // A shutdown that is not on the wire yet counts as one byte, behind all others.
    let fin_unsent = usize::from(unsent > 0) * fin_unacknowledged;
    let timestamp = number(own, SOL_TCP, TCP_TIMESTAMP)?.cast_unsigned();

    let repairing = Repairing::new(own)?;
    let end_sent = repairing.queue(SEND_QUEUE)?;
    let sent = peek(own, sent_bytes)?;
    let end_received = repairing.queue(RECEIVE_QUEUE)?;
    let segment_bytes = number(own, SOL_TCP, TCP_MAXSEG)?.cast_unsigned();
    let window = option(own, SOL_TCP, TCP_REPAIR_WINDOW, 20)?;
    drop(repairing);

    if sent.len() != sent_bytes {
        return Err(rustix::io::Errno::BADMSG.into());
    }
    let fin_sent = u32::from(info.state.has_sent_fin());
    let fin_received = u32::from(info.state.has_received_fin());
    Ok(Connection {
        send_sequence: end_sent
            .wrapping_sub(fin_sent)
            .wrapping_sub(u32_of(sent.len())),
        receive_sequence: end_received
            .wrapping_sub(fin_received)
            .wrapping_sub(u32_of(received.len())),
        unsent_bytes: u32_of(unsent.saturating_sub(fin_unsent).min(sent.len())),
        sent,
        received,
        segment_bytes,
        scales: info.window_scales.map(|(send, receive)| Scales {
            send: send.into(),
            receive: receive.into(),
        }),
        has_sack: info.has_sack,
        timestamp: info.has_timestamps.then_some(timestamp),
        window: window
            .chunks_exact(4)
            .map(|four| u32::from_ne_bytes(four.try_into().expect("4 bytes")))
            .collect(),
    })
}

/// Up to `bytes` bytes of the queue that is looked at.
fn peek(own: BorrowedFd<'_>, bytes: usize) -> io::Result<Vec<u8>> {
    let mut data = vec![0; bytes];
    if bytes == 0 {
        return Ok(data);
    }
    // A target that has set where it peeks from would have us look there.
    let from = number(own, SOL_SOCKET, SO_PEEK_OFF).unwrap_or(-1);
    if from > 0 {
        set_number(own, SOL_SOCKET, SO_PEEK_OFF, 0)?;
    }
    let received = receive(own, &mut data, MSG_PEEK_NOW);
    if from >= 0 {
        set_number(own, SOL_SOCKET, SO_PEEK_OFF, from)?;
    }
    data.truncate(received?.len);
    Ok(data)
}

fn usize_of(count: i32) -> usize {
    usize::try_from(count).unwrap_or_default()
}

fn u32_of(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

impl Connection {
    /// Refuses what no connection can have.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let queues = [self.sent.len(), self.received.len()];
        let scales = self.scales.unwrap_or_default();
        queues.iter().all(|bytes| *bytes < QUEUE_MAX_BYTES)
            && self.unsent_bytes as usize <= self.sent.len()
            && [scales.send, scales.receive]
                .iter()
                .all(|shift| *shift <= 14)
            && self.window.len() == 5
    }

    /// Makes a fresh socket, bound to nothing, this connection from `local` to `remote`. It stays
    /// in repair mode: it neither sends nor minds being closed, until [`Self::wake`].
    ///
    /// # Errors
    /// What was tried, and the call's errno.
    pub fn write(
        &self,
        own: BorrowedFd<'_>,
        local: &[u8],
        remote: &[u8],
    ) -> Result<(), (&'static str, io::Error)> {
        let doing = |doing| move |error| (doing, error);
        set_number(own, SOL_TCP, TCP_REPAIR, REPAIR_ON).map_err(doing("repair"))?;
        for (queue, sequence) in [
            (SEND_QUEUE, self.send_sequence),
            (RECEIVE_QUEUE, self.receive_sequence),
        ] {
            set_number(own, SOL_TCP, TCP_REPAIR_QUEUE, queue).map_err(doing("repair"))?;
            set_number(own, SOL_TCP, TCP_QUEUE_SEQ, sequence.cast_signed())
                .map_err(doing("set the sequence numbers of"))?;
        }
        sys::socket::bind(own, local).map_err(doing("bind"))?;
        connect(own, local, remote).map_err(doing("connect"))?;
        self.write_options(own)
            .map_err(doing("set what was agreed on for"))?;
        self.write_received(own)
            .map_err(doing("refill the receive queue of"))?;
        let sent = &self.sent[..self.sent.len() - self.unsent_bytes as usize];
        set_number(own, SOL_TCP, TCP_REPAIR_QUEUE, SEND_QUEUE).map_err(doing("repair"))?;
        send_all(own, sent).map_err(doing("refill the send queue of"))?;
        set_number(own, SOL_TCP, TCP_REPAIR_QUEUE, NO_QUEUE).map_err(doing("repair"))?;
        self.write_window(own).map_err(doing("set the windows of"))
    }

    fn write_options(&self, own: BorrowedFd<'_>) -> io::Result<()> {
        const MSS: u32 = 2;
        const WINDOW: u32 = 3;
        const SACK: u32 = 4;
        const TIMESTAMP: u32 = 8;
        let mut agreed = vec![(MSS, self.segment_bytes)];
        if let Some(scales) = self.scales {
            agreed.push((WINDOW, scales.send | scales.receive << 16));
        }
        if self.has_sack {
            agreed.push((SACK, 0));
        }
        if self.timestamp.is_some() {
            agreed.push((TIMESTAMP, 0));
        }
        let words = agreed.iter().flat_map(|(code, value)| [*code, *value]);
        let bytes: Vec<u8> = words.flat_map(u32::to_ne_bytes).collect();
        set_option(own, SOL_TCP, TCP_REPAIR_OPTIONS, &bytes)?;
        match self.timestamp {
            Some(clock) => set_number(own, SOL_TCP, TCP_TIMESTAMP, clock.cast_signed()),
            None => Ok(()),
        }
    }

    fn write_received(&self, own: BorrowedFd<'_>) -> io::Result<()> {
        if self.received.is_empty() {
            return Ok(());
        }
        set_number(own, SOL_TCP, TCP_REPAIR_QUEUE, RECEIVE_QUEUE)?;
        // The buffer's own size comes back with the other options.
        let room = i32::try_from(self.received.len() * 2 + (64 << 10)).unwrap_or(i32::MAX / 2);
        set_number(own, SOL_SOCKET, SO_RCVBUFFORCE, room)?;
        for piece in self.received.chunks(PIECE_BYTES) {
            let mut rest = piece;
            while !rest.is_empty() {
                rest = &rest[send(own, rest, Along::default(), MSG_DONTWAIT)?..];
            }
        }
        Ok(())
    }

    /// The windows of the dump; what they say of the other end's shutdown, which comes later, is
    /// cut.
    fn write_window(&self, own: BorrowedFd<'_>) -> io::Result<()> {
        let mut window = self.window.clone();
        let next = self
            .receive_sequence
            .wrapping_add(u32_of(self.received.len()));
        let is_after = |one: u32, other: u32| one.wrapping_sub(other).cast_signed() > 0;
        for sequence in [0, 4] {
            if is_after(window[sequence], next) {
                window[sequence] = next;
            }
        }
        let bytes: Vec<u8> = window.iter().flat_map(|word| word.to_ne_bytes()).collect();
        set_option(own, SOL_TCP, TCP_REPAIR_WINDOW, &bytes)
    }

    /// Lets the connection run: a probe tells the other end that this one is back, and what was
    /// never on the wire is sent. Who was killed while it did this may have somebody else do it
    /// again: what was sent already is not sent twice.
    ///
    /// # Errors
    /// The calls' errno.
    pub fn wake(&self, own: BorrowedFd<'_>, reuse: i32) -> io::Result<()> {
        let sleeps = number(own, SOL_TCP, TCP_REPAIR)? != 0;
        set_number(own, SOL_TCP, TCP_REPAIR, REPAIR_OFF)?;
        set_number(own, SOL_SOCKET, SO_REUSEADDR, reuse)?;
        let unsent = &self.sent[self.sent.len() - self.unsent_bytes as usize..];
        let taken = if sleeps { 0 } else { self.taken(own)? };
        send_all(own, unsent.get(taken..).unwrap_or_default())
    }

    /// How much the woken connection was given to send since it was made.
    fn taken(&self, own: BorrowedFd<'_>) -> io::Result<usize> {
        const ACKNOWLEDGED_AT: usize = 120;
        let info = option(own, SOL_TCP, TCP_INFO, ACKNOWLEDGED_AT + 8)?;
        let acknowledged = info
            .get(ACKNOWLEDGED_AT..)
            .and_then(|eight| eight.try_into().ok());
        let acknowledged = acknowledged.map_or(0, u64::from_ne_bytes);
        let all = usize::try_from(acknowledged).unwrap_or(usize::MAX);
        let all = all.saturating_add(usize_of(count(own, Count::Outbound)?));
        Ok(all.saturating_sub(self.sent.len() - self.unsent_bytes as usize))
    }
}

/// Connects, also where the end of this very connection is still in the way: that of the original,
/// which was killed a moment ago, and which somebody may be about to close.
fn connect(own: BorrowedFd<'_>, local: &[u8], remote: &[u8]) -> io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(2);
    const LOOK: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let failed = match sys::socket::connect(own, remote) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => error,
            other => return other,
        };
        let ends = inet::parse(local).zip(inet::parse(remote));
        let Some((here, there)) = ends.filter(|_| Instant::now() < deadline) else {
            return Err(failed);
        };
        if !inet_diag::end_leftovers(here, there).unwrap_or(false) {
            std::thread::sleep(LOOK);
        }
    }
}

/// Sends it all, whatever the size of the send buffer.
fn send_all(own: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let old = options::enlarge_buffer(own, options::Buffer::Send, bytes.len() + (64 << 10))?;
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[send(own, rest, Along::default(), MSG_DONTWAIT)?..];
    }
    options::restore_buffer(own, old)
}

/// Has a socket vanish: when its last descriptor is closed the other end hears nothing.
///
/// # Errors
/// The call's errno.
pub fn silence(own: BorrowedFd<'_>) -> io::Result<()> {
    set_number(own, SOL_TCP, TCP_REPAIR, REPAIR_ON)
}
