//! Packets of no use, sent to a packet socket over the loopback interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::socket::Along;

use super::{AF_PACKET, SOCK_DGRAM, address};

/// The interface's index in every network namespace.
const LOOPBACK: u32 = 1;
/// Protocols that nobody speaks: with a number of this process, so that two of us do not meet.
const PROTOCOL: u16 = 0xe000;
/// What the loopback interface carries at a time, in bytes.
pub(super) const LARGEST_BYTES: usize = 60_000;
/// A packet that takes as little room as can be.
pub(super) const SMALL_BYTES: usize = 16;
/// How long a packet may take.
const PATIENCE: Duration = Duration::from_secs(2);
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_DETACH_FILTER: i32 = libc::SO_DETACH_FILTER;
/// `ret #0`: no packet passes.
const NOTHING: [u8; 8] = [6, 0, 0, 0, 0, 0, 0, 0];

/// Sends packets to one socket, which is bound to their protocol.
pub(super) struct Feed<'a> {
    to: BorrowedFd<'a>,
    from: OwnedFd,
    protocol: u16,
}

impl<'a> Feed<'a> {
    /// Binds `to` to a protocol that nobody else speaks.
    pub(super) fn start(to: BorrowedFd<'a>) -> io::Result<Self> {
        let protocol = PROTOCOL | (std::process::id() & 0xfff) as u16;
        let from = sys::socket::open(AF_PACKET, SOCK_DGRAM, 0)?;
        sys::socket::bind(to, &address(protocol, LOOPBACK))?;
        Ok(Self { to, from, protocol })
    }

    /// Sends a packet and waits until it `came`.
    ///
    /// # Errors
    /// `ETIMEDOUT` where it does not come; the call's errno.
    pub(super) fn send(&self, bytes: usize, came: impl Fn() -> bool) -> io::Result<()> {
        let along = Along {
            name: Some(&address(self.protocol, LOOPBACK)),
            ..Along::default()
        };
        sys::socket::send(&self.from, &vec![0; bytes], along, 0)?;
        let until = Instant::now() + PATIENCE;
        while !came() {
            if Instant::now() > until {
                return Err(Errno::TIMEDOUT.into());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// No packet comes any more.
    pub(super) fn end(&self) -> io::Result<()> {
        reject_all(self.to)
    }

    /// Packets come again.
    pub(super) fn again(&self) -> io::Result<()> {
        detach_filter(self.to)
    }
}

/// Gives a socket a filter that no packet passes.
pub(super) fn reject_all(socket: impl AsFd) -> io::Result<()> {
    sys::socket::attach_filter(socket, &NOTHING)
}

/// Takes the filter from a socket.
pub(super) fn detach_filter(socket: impl AsFd) -> io::Result<()> {
    sys::socket::set_number(socket, SOL_SOCKET, SO_DETACH_FILTER, 0)
}
