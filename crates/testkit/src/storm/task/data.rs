//! Steps that write and read: what is read must be what was written, all of it and in order.
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::thread::Timespec;
use sys::socket::{self, Along};

use super::descriptors::OpenDescriptor;
use super::{StepResult, Task, opened};
use crate::storm::step::FileKind;
use crate::subjects::Failure;
use crate::wait;

const DONT_WAIT: i32 = 0x40;
/// A pipe that has room has room for this much.
const PIECE_BYTES: usize = 4096;
const BUFFER_BYTES: usize = 64 << 10;
/// What stands in front of a message: where it goes, which it is, how long it is.
const HEADER_BYTES: usize = 8;
/// How much may be on its way through a terminal. How much more it takes depends on the pieces in
/// which it came, so one that is full may not take it again.
const TERMINAL_BYTES: u64 = 3000;
/// A TCP connection's state (include/net/tcp_states.h) after a reset.
const TCP_CLOSE: u8 = 7;
const AT_ONCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl Task {
    pub(super) fn send(&self, slot: u16, bytes: u32) -> StepResult {
        let Some(held) = self.held.get(&slot) else {
            return Ok(());
        };
        match (held.ends.kind, held.ends.out) {
            (FileKind::Mailbox, _) => Ok(()),
            (FileKind::Map, _) => {
                opened::write_entry(&held.file, bytes);
                Ok(())
            }
            (FileKind::Event, _) => {
                let count = u64::from(bytes).to_ne_bytes();
                rustix::io::write(&held.file, &count)?;
                Ok(())
            }
            (FileKind::Memfd | FileKind::File, _) => {
                // Sealed, perhaps.
                let _ = rustix::io::write(&held.file, &stream(slot, 0, bytes as usize));
                Ok(())
            }
            (kind, Some(to)) if kind.keeps_messages() => {
                let (number, _) = self.ledger.way(to);
                let message = message(to, number, bytes as usize);
                if write(held, &message)? == Some(message.len()) {
                    self.ledger.add_sent(to, 1);
                } else if kind == FileKind::Datagrams && socket::peer_name(&held.file).is_err() {
                    self.lose_unread(held);
                }
                Ok(())
            }
            (_, Some(to)) => self.send_stream(held, to, bytes as usize),
            _ => Ok(()),
        }
    }

    /// One of a pair that hears that the other is gone is parted from it, and one whose connection
    /// is broken hears no more: both lose what they have not read.
    fn lose_unread(&self, held: &OpenDescriptor) {
        if let Some(at) = held.ends.into {
            let (sent, received) = self.ledger.way(at);
            self.ledger.add_received(at, sent - received);
        }
    }

    fn send_stream(&self, held: &OpenDescriptor, to: u16, bytes: usize) -> StepResult {
        let mut left = bytes;
        while left > 0 {
            let (sent, received) = self.ledger.way(to);
            if held.ends.kind == FileKind::Terminal && sent - received > TERMINAL_BYTES {
                return Ok(());
            }
            let piece = stream(to, sent, left.min(PIECE_BYTES));
            let Some(written) = write(held, &piece)? else {
                return Ok(());
            };
            self.ledger.add_sent(to, written as u64);
            left -= written;
        }
        Ok(())
    }

    pub(super) fn receive(&self, slot: u16) -> StepResult {
        if let Some(held) = self.held.get(&slot)
            && held.ends.kind == FileKind::Netlink
        {
            return opened::hear(&held.file);
        }
        let Some((held, at)) = self
            .held
            .get(&slot)
            .and_then(|held| Some((held, held.ends.into?)))
        else {
            return Ok(());
        };
        if held.ends.kind == FileKind::Mailbox {
            return Ok(());
        }
        // What was sent through TCP may be on its way.
        let arrived = wait::try_wait_for(wait::SOON, || match self.receive_some(held, at) {
            Err(error) => Some(Err(error)),
            Ok(true) => {
                // It is told once that the rest does not come.
                self.lose_unread(held);
                Some(Ok(()))
            }
            Ok(false) => {
                let (sent, received) = self.ledger.way(at);
                (sent == received).then_some(Ok(()))
            }
        });
        arrived.unwrap_or_else(|| {
            let (sent, received) = self.ledger.way(at);
            Err(format!("{received} of {sent} arrived at {at}").into())
        })
    }

    /// Reads what is there; whether the other end broke the connection.
    fn receive_some(&self, held: &OpenDescriptor, at: u16) -> Result<bool, Failure> {
        let mut buffer = vec![0; BUFFER_BYTES];
        while can_read(&held.file)? {
            let read = match read(held, &mut buffer) {
                // A reset that a send has been told of shows no error here any more.
                Ok(0) if !held.ends.kind.keeps_messages() => return is_over(held),
                Ok(read) => &buffer[..read],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                // Its end of a terminal is closed.
                Err(error) if error.raw_os_error() == Some(5) => return Ok(false),
                // Told once, of what was sent before.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    // What waits here already stays where no network is between.
                    if held.ends.kind == FileKind::Tcp {
                        return Ok(true);
                    }
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(true),
                Err(error) => return Err(error.into()),
            };
            let (sent, received) = self.ledger.way(at);
            if held.ends.kind.keeps_messages() {
                if read.is_empty() {
                    return Ok(false);
                }
                let must = message(at, received, read.len());
                if read != must || received >= sent {
                    return Err(wrong(at, received, read, &must).into());
                }
                self.ledger.add_received(at, 1);
            } else {
                let must = stream(at, received, read.len());
                if read != must || received + read.len() as u64 > sent {
                    return Err(wrong(at, received, read, &must).into());
                }
                self.ledger.add_received(at, read.len() as u64);
            }
        }
        Ok(false)
    }
}

fn wrong(at: u16, position: u64, is: &[u8], must: &[u8]) -> String {
    let start = |bytes: &[u8]| bytes[..bytes.len().min(12)].to_vec();
    let (is, must, bytes) = (start(is), start(must), is.len());
    format!("{bytes} bytes at {at}, from {position}, begin {is:?} and not {must:?}")
}

/// What stands in a stream to the end `at` from `position` on.
fn stream(at: u16, position: u64, bytes: usize) -> Vec<u8> {
    let byte = |position: u64| (position * 31 + (position >> 8) * 7 + u64::from(at) * 17) as u8;
    (position..position + bytes as u64).map(byte).collect()
}

/// The message of that number to the end `at`, of at least a header's bytes.
fn message(at: u16, number: u64, bytes: usize) -> Vec<u8> {
    let bytes = bytes.clamp(HEADER_BYTES, PIECE_BYTES);
    let mut message = stream(at, number, bytes);
    message[..2].copy_from_slice(&at.to_le_bytes());
    message[2..6].copy_from_slice(&(number as u32).to_le_bytes());
    message[6..8].copy_from_slice(&(bytes as u16).to_le_bytes());
    message
}

/// Tells whether a TCP connection is over in both directions. The other end broke it, or both ends
/// were shut down: the kernel does not tell these apart, so what is lost then is not found here.
fn is_over(held: &OpenDescriptor) -> Result<bool, Failure> {
    if held.ends.kind != FileKind::Tcp {
        return Ok(false);
    }
    let info = socket::option(&held.file, libc::SOL_TCP, libc::TCP_INFO, 1)?;
    Ok(info.first() == Some(&TCP_CLOSE))
}

/// Tells whether there is something to read, or an end.
pub(super) fn can_read(file: &OwnedFd) -> Result<bool, Failure> {
    let mut watched = [PollFd::new(file, PollFlags::IN)];
    poll(&mut watched, Some(&AT_ONCE))?;
    let seen = watched[0].revents();
    Ok(seen.intersects(PollFlags::IN | PollFlags::ERR | PollFlags::HUP))
}

/// Writes without waiting; nothing where there is no room or nobody who reads.
fn write(held: &OpenDescriptor, bytes: &[u8]) -> Result<Option<usize>, Failure> {
    let written = if held.ends.kind.is_socket() {
        socket::send(&held.file, bytes, Along::default(), DONT_WAIT)
    } else {
        let mut watched = [PollFd::new(&held.file, PollFlags::OUT)];
        poll(&mut watched, Some(&AT_ONCE))?;
        if !watched[0].revents().contains(PollFlags::OUT) {
            return Ok(None);
        }
        match held.ends.kind {
            FileKind::Queue => opened::send_message(&held.file, bytes),
            _ => write_file(held, bytes),
        }
    };
    let gone = [
        Errno::AGAIN,
        Errno::PIPE,
        Errno::CONNREFUSED,
        Errno::CONNRESET,
        Errno::NOTCONN,
        Errno::DESTADDRREQ,
        Errno::NOBUFS,
        Errno::IO,
    ];
    match written {
        Ok(written) => Ok(Some(written)),
        Err(error) if gone.iter().any(|errno| is(&error, *errno)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes to something that has room for a little at least. A terminal would wait for the rest.
fn write_file(held: &OpenDescriptor, bytes: &[u8]) -> io::Result<usize> {
    if held.ends.kind != FileKind::Terminal {
        return Ok(rustix::io::write(&held.file, bytes)?);
    }
    let flags = rustix::fs::fcntl_getfl(&held.file)?;
    rustix::fs::fcntl_setfl(&held.file, flags | OFlags::NONBLOCK)?;
    let written = rustix::io::write(&held.file, bytes);
    rustix::fs::fcntl_setfl(&held.file, flags)?;
    Ok(written?)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn read(held: &OpenDescriptor, buffer: &mut [u8]) -> io::Result<usize> {
    if held.ends.kind.is_socket() {
        return socket::receive(&held.file, buffer, DONT_WAIT).map(|received| received.len);
    }
    if held.ends.kind == FileKind::Queue {
        return opened::take_message(&held.file, buffer);
    }
    Ok(rustix::io::read(&held.file, buffer)?)
}
