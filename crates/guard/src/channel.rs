//! The connection between two processes of ours: one protobuf message a packet, with descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, UCred, connect, socket_with,
    socketpair,
};
use sys::socket::{self, Along};

/// The longest message, in bytes.
const MESSAGE_MAX_BYTES: usize = 64 << 10;

/// How long a process that listens for others may take for an answer: it may be talking to
/// another one.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A message that was received, with its descriptors.
pub type Packet<M> = (M, Vec<OwnedFd>);

/// One side of a connection. The kernel closes it when the last process that has it ends.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl Channel {
    /// Makes both sides.
    ///
    /// # Errors
    /// Those of socketpair(2).
    pub fn pair() -> io::Result<(Self, Self)> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (one, other) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Connects to the process that listens at `path`; none where none does.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] without a number where another user listens there;
    /// those of connect(2).
    pub fn connect(path: &Path) -> io::Result<Option<Self>> {
        // No socket has a name that is too long for an address.
        let Ok(address) = SocketAddrUnix::new(path) else {
            return Ok(None);
        };
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        match connect(&socket, &address) {
            // A process that was killed leaves its name behind.
            Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
            other => {
                other?;
                Self(socket).trusted().map(Some)
            }
        }
    }

    /// Takes a waiting connection.
    ///
    /// # Errors
    /// Those of accept4(2); as [`Channel::connect`] where another user has connected.
    pub fn accept(listener: impl AsFd) -> io::Result<Self> {
        Self(socket::accept(listener)?).trusted()
    }

    /// The only rule of trust: the other side is this user or root.
    fn trusted(self) -> io::Result<Self> {
        let uid = self.peer()?.uid;
        match uid == rustix::process::geteuid() || uid.is_root() {
            true => Ok(self),
            false => {
                let what = "it is another user's";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
            }
        }
    }

    /// The process that has made the other side, or listened there (`SO_PEERCRED`).
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn peer(&self) -> io::Result<UCred> {
        Ok(socket_peercred(&self.0)?)
    }

    /// Lets a call wait at most so long for the other side; it fails with `EAGAIN` then.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        set_socket_timeout(&self.0, Timeout::Recv, Some(patience))?;
        Ok(set_socket_timeout(&self.0, Timeout::Send, Some(patience))?)
    }

    /// Lets no call wait for the other side; it fails with `EAGAIN` instead.
    ///
    /// # Errors
    /// Those of ioctl(2).
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.0, true)?)
    }

    /// Sends one message with descriptors, at most [`sys::socket::RIGHTS_MAX`].
    ///
    /// # Errors
    /// Those of sendmsg(2); [`io::ErrorKind::InvalidData`] for a message that is too long, or in
    /// which nothing is set.
    pub fn send(&self, message: &impl Message, rights: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = message.encode_to_vec();
        // An empty packet is the end.
        if bytes.is_empty() || bytes.len() > MESSAGE_MAX_BYTES {
            return Err(invalid("a message is empty or too long"));
        }
        #[cfg(any(test, feature = "harness"))]
        crate::failpoint::pass(&crate::failpoint::SENDS);
        let along = Along {
            rights,
            ..Along::default()
        };
        loop {
            match socket::send(&self.0, &bytes, along, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Receives one message with its descriptors; none when the other side is gone.
    ///
    /// # Errors
    /// Those of recvmsg(2); [`io::ErrorKind::InvalidData`] for what is no message.
    pub fn receive<M: Message + Default>(&self) -> io::Result<Option<Packet<M>>> {
        self.receive_with(RecvFlags::empty())
    }

    /// The same, which fails with [`io::ErrorKind::WouldBlock`] where there is no message yet.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub fn receive_now<M: Message + Default>(&self) -> io::Result<Option<Packet<M>>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with<M: Message + Default>(
        &self,
        flags: RecvFlags,
    ) -> io::Result<Option<Packet<M>>> {
        #[cfg(any(test, feature = "harness"))]
        crate::failpoint::pass(&crate::failpoint::RECEIVES);
        let mut buffer = vec![0; MESSAGE_MAX_BYTES];
        let received = loop {
            match socket::receive(&self.0, &mut buffer, flags.bits().cast_signed()) {
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => {}
                    // It had something of ours unread.
                    Some(Errno::CONNRESET) => return Ok(None),
                    _ => return Err(error),
                },
                Ok(received) => break received,
            }
        };
        if received.len == 0 {
            return Ok(None);
        }
        let whole = buffer.get(..received.len);
        let message = whole.and_then(|bytes| M::decode(bytes).ok());
        let message = message.ok_or_else(|| invalid("a message makes no sense"))?;
        Ok(Some((message, received.rights)))
    }

    /// Sends a question and receives the answer.
    ///
    /// # Errors
    /// As [`Channel::send`] and [`Channel::receive`]; [`io::ErrorKind::UnexpectedEof`] when the
    /// other side is gone.
    pub fn ask<M: Message + Default>(
        &self,
        question: &impl Message,
        rights: &[BorrowedFd<'_>],
    ) -> io::Result<Packet<M>> {
        self.send(question, rights)?;
        let answer = self.receive()?;
        answer.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Channel {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> Self {
        channel.0
    }
}

/// The error for what the other side must not send.
#[must_use]
pub fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Waits until one of `fds` can be read, has been hung up on or, as a pidfd, has ended; tells of
/// each, and of none when it is `until`. Descriptors that are not there are not waited for.
///
/// # Errors
/// Those of poll(2), but `EINTR`.
pub fn wait<const COUNT: usize>(
    fds: [Option<BorrowedFd<'_>>; COUNT],
    until: Option<Instant>,
) -> io::Result<[bool; COUNT]> {
    let given: Vec<_> = fds.iter().flatten().copied().collect();
    let mut ready = wait_all(&given, until)?.into_iter();
    Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or(false)))
}

/// The same for any number of descriptors.
///
/// # Errors
/// As [`wait`].
pub fn wait_all(fds: &[BorrowedFd<'_>], until: Option<Instant>) -> io::Result<Vec<bool>> {
    let fds = fds.iter().copied();
    let mut fds: Vec<_> = fds
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    loop {
        let rest = until.map(|until| until.saturating_duration_since(Instant::now()));
        // More than the kernel counts is for ever.
        let rest = rest.and_then(|rest| Timespec::try_from(rest).ok());
        match poll(&mut fds, rest.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        }
    }
}

/// Waits until a process has ended.
pub fn wait_for_end(pidfd: impl AsFd) {
    let _ = wait([Some(pidfd.as_fd())], None);
}
