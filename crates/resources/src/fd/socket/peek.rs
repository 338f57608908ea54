//! Receive queues, looked at without taking anything.

use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;
use rustix::io::Errno;
use sys::socket::{Count, Received};
use sys::watchdog::{Setting, Watchdog};

use super::Nature;
use crate::fd::Open;
use crate::fd::ready;
use crate::{Error, Result};

const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_PEEK_OFF: i32 = libc::SO_PEEK_OFF;
const MSG_PEEK: i32 = libc::MSG_PEEK;
const MSG_TRUNC: i32 = libc::MSG_TRUNC;
const MSG_DONTWAIT: i32 = libc::MSG_DONTWAIT;
const PEEK: i32 = MSG_PEEK | MSG_DONTWAIT;

const AF_UNIX: i32 = libc::AF_UNIX;
const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;

/// Where messages of unknown size are received first.
const FIRST_BYTES: usize = 64 << 10;

/// A message as it was peeked.
pub struct Peeked {
    /// The bytes.
    pub data: Vec<u8>,
    /// What came with them.
    pub received: Received,
}

/// Where peeking starts, given back to what the target has set. It is a field of the socket and
/// so the target's own: it is changed only where one look does not show everything.
struct PeekFrom<'a> {
    own: BorrowedFd<'a>,
    old: i32,
    changed: bool,
}

impl<'a> PeekFrom<'a> {
    fn new(own: BorrowedFd<'a>) -> std::io::Result<Self> {
        let old = sys::socket::number(own, SOL_SOCKET, SO_PEEK_OFF)?;
        let changed = false;
        Ok(Self { own, old, changed })
    }

    fn set(&mut self, offset: usize) -> std::io::Result<()> {
        self.changed = true;
        let offset = i32::try_from(offset).map_err(|_| Errno::OVERFLOW)?;
        sys::socket::set_number(self.own, SOL_SOCKET, SO_PEEK_OFF, offset)
    }
}

impl Drop for PeekFrom<'_> {
    fn drop(&mut self) {
        if self.changed {
            let _ = sys::socket::set_number(self.own, SOL_SOCKET, SO_PEEK_OFF, self.old);
        }
    }
}

/// Has a watchdog set where peeking starts, should this process be killed, to what it is now for
/// those of `opens` whose queues are looked at; none where all queues are empty. It is to be kept
/// as long as they are.
///
/// # Errors
/// When a socket cannot be fetched from its task, or the system calls' errno.
pub fn guard(opens: &[Open<'_>]) -> Result<Option<Watchdog>> {
    let failed = |error| Error::kernel("guard where the tree's sockets peek from", error);
    let mut settings = Vec::new();
    for open in opens {
        let looked_at = |nature: Nature| nature.family == AF_UNIX || nature.kind == SOCK_DGRAM;
        // One that cannot be asked is refused by its kind.
        if !Nature::claims(open, looked_at) {
            continue;
        }
        let own = open.own()?;
        if !is_readable(own).map_err(|error| failed(error.into()))? {
            continue;
        }
        // Netlink has none; nor has it data that is saved.
        if let Ok(value) = sys::socket::number(own, SOL_SOCKET, SO_PEEK_OFF) {
            settings.push(Setting {
                socket: own,
                level: SOL_SOCKET,
                name: SO_PEEK_OFF,
                value,
            });
        }
    }
    if settings.is_empty() {
        return Ok(None);
    }
    Watchdog::start(&settings).map(Some).map_err(failed)
}

/// Whether there is anything to be read.
///
/// # Errors
/// The call's errno.
pub fn is_readable(own: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    Ok(ready::events(own, PollFlags::IN)?.contains(PollFlags::IN))
}

/// The pieces of a unix stream; `None` when not all bytes can be seen.
///
/// # Errors
/// The calls' errno.
pub fn stream(own: BorrowedFd<'_>) -> std::io::Result<Option<Vec<Peeked>>> {
    let total = usize::try_from(sys::socket::count(own, Count::Inbound)?).unwrap_or_default();
    let mut from = PeekFrom::new(own)?;
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < total {
        if at > 0 || from.old >= 0 {
            from.set(at)?;
        }
        let mut data = vec![0; total - at];
        let received = match sys::socket::receive(own, &mut data, PEEK) {
            Ok(received) if received.len > 0 => received,
            Ok(_) => return Ok(None),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error),
        };
        data.truncate(received.len);
        let end = at + received.len;
        if !received.rights.is_empty() && received.len > 1 {
            // What was sent before is glued to the piece that has the descriptors.
            if from.changed {
                from.set(at)?;
            }
            let before = sys::socket::before_last_piece(own, received.len)?;
            let before = data.drain(..before.min(received.len)).collect::<Vec<_>>();
            if !before.is_empty() {
                let credentials = received.credentials;
                pieces.push(Peeked {
                    data: before,
                    received: Received {
                        credentials,
                        ..Received::default()
                    },
                });
            }
        }
        pieces.push(Peeked { data, received });
        at = end;
    }
    Ok(Some(pieces))
}

/// The messages of a datagram or seqpacket socket.
///
/// # Errors
/// The calls' errno.
pub fn messages(own: BorrowedFd<'_>, seqpacket: bool) -> std::io::Result<Option<Vec<Peeked>>> {
    if !is_readable(own)? {
        return Ok(Some(Vec::new()));
    }
    let mut from = PeekFrom::new(own)?;
    let mut messages: Vec<Peeked> = Vec::new();
    let mut at = 0;
    let mut room = FIRST_BYTES;
    from.set(0)?;
    loop {
        let mut data = vec![0; room];
        let received = match sys::socket::receive(own, &mut data, PEEK | MSG_TRUNC) {
            Ok(received) => received,
            Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => break,
            Err(error) => return Err(error),
        };
        if received.len > room {
            room = received.len;
            from.set(at)?;
            continue;
        }
        // The end of a seqpacket connection looks like an empty message that never goes away.
        if seqpacket && received.len == 0 && is_shut(own)? {
            break;
        }
        data.truncate(received.len);
        at += received.len;
        messages.push(Peeked { data, received });
    }
    Ok(Some(messages))
}

fn is_shut(own: BorrowedFd<'_>) -> std::io::Result<bool> {
    let told = ready::events(own, PollFlags::RDHUP)?;
    Ok(told.intersects(PollFlags::RDHUP | PollFlags::HUP))
}
