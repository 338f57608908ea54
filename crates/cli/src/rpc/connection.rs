//! One side of a client's connection: a message a packet.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_peercred, socket_type};
use rustix::net::{RecvFlags, SendFlags, SocketType, recv, send};
use rustix::process::Pid;

use crate::rpc::messages::Response;

/// The longest message, in bytes: far more than a request with many mounts has.
pub const MESSAGE_MAX_BYTES: usize = 1 << 20;

/// Packet of a client.
pub enum Packet {
    /// The bytes of a message.
    Message(Vec<u8>),
    /// A message of so many bytes, which is too long.
    TooLong(usize),
    /// The client is gone.
    End,
}

/// Connection with a client.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: Pid,
}

impl Connection {
    /// Takes a connected socket.
    ///
    /// # Errors
    /// It is no socket of packets, or its other side is not known in this pid namespace.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        if socket_type(&socket)? != SocketType::SEQPACKET {
            return Err(io::Error::other("its type is not SOCK_SEQPACKET"));
        }
        let peer = socket_peercred(&socket)?.pid;
        Ok(Self { socket, peer })
    }

    /// Waits for a packet. Descriptors that come with it are closed by the kernel.
    ///
    /// # Errors
    /// Those of recvmsg(2).
    pub fn receive(&self) -> io::Result<Packet> {
        let mut bytes = vec![0; MESSAGE_MAX_BYTES];
        let flags = RecvFlags::TRUNC;
        let received = rustix::io::retry_on_intr(|| recv(&self.socket, &mut *bytes, flags));
        let length = match received {
            Ok((_, length)) => length,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => return Err(errno.into()),
        };
        Ok(match length {
            0 => Packet::End,
            length if length > bytes.len() => Packet::TooLong(length),
            length => {
                bytes.truncate(length);
                Packet::Message(bytes)
            }
        })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Those of sendmsg(2): `EPIPE` where the client is gone.
    pub fn send(&self, response: &Response) -> io::Result<()> {
        let bytes = response.encode_to_vec();
        let flags = SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| send(&self.socket, &bytes, flags))?;
        Ok(())
    }

    /// Tells whether the client has closed its side.
    pub fn is_closed(&self) -> bool {
        let mut asked = [PollFd::new(&self.socket, PollFlags::empty())];
        let polled = poll(&mut asked, Some(&Timespec::default()));
        let gone = PollFlags::HUP | PollFlags::ERR;
        polled.is_ok() && asked[0].revents().intersects(gone)
    }

    /// Returns the path of a directory that the client has open under this number.
    ///
    /// # Errors
    /// It is not open, or is no directory.
    pub fn directory(&self, number: i32) -> io::Result<PathBuf> {
        let peer = self.peer.as_raw_nonzero();
        let link = PathBuf::from(format!("/proc/{peer}/fd/{number}"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &PathBuf| rustix::fs::openat(CWD, path, flags, Mode::empty());
        let same = |path: &PathBuf| {
            let stats = [&link, path].map(|path| rustix::fs::fstat(open(path).ok()?).ok());
            let ids = stats.map(|stat| stat.map(|stat| (stat.st_dev, stat.st_ino)));
            ids[0].is_some() && ids[0] == ids[1]
        };
        open(&link)?;
        // The name is what people know it by, unless it leads elsewhere from here.
        Ok(match std::fs::read_link(&link) {
            Ok(named) if same(&named) => named,
            _ => link,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use rustix::net::{AddressFamily, SocketFlags, socketpair};

    use super::*;

    fn pair(kind: SocketType) -> [OwnedFd; 2] {
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        pair.expect("a pair").into()
    }

    fn connection() -> (OwnedFd, Connection) {
        let [client, server] = pair(SocketType::SEQPACKET);
        (client, Connection::new(server).expect("one of packets"))
    }

    #[test]
    fn a_stream_is_refused() {
        let [_client, server] = pair(SocketType::STREAM);
        let error = Connection::new(server).unwrap_err();
        assert_eq!(error.to_string(), "its type is not SOCK_SEQPACKET");
    }

    #[test]
    fn packets_are_whole_or_too_long() {
        let (client, server) = connection();
        send(&client, b"abc", SendFlags::empty()).unwrap();
        assert!(matches!(server.receive().unwrap(), Packet::Message(bytes) if bytes == b"abc"));
        let long = vec![0; MESSAGE_MAX_BYTES + 1];
        rustix::net::sockopt::set_socket_send_buffer_size_force(&client, 4 << 20).ok();
        match send(&client, &long, SendFlags::DONTWAIT) {
            Ok(_) => assert!(matches!(
                server.receive().unwrap(),
                Packet::TooLong(length) if length == long.len()
            )),
            // Without the right to such a large buffer, nobody can send that much.
            Err(errno) => assert_eq!(errno, Errno::MSGSIZE),
        }
    }

    #[test]
    fn the_end_is_seen() {
        let (client, server) = connection();
        assert!(!server.is_closed());
        drop(client);
        assert!(server.is_closed());
        assert!(matches!(server.receive().unwrap(), Packet::End));
        let sent = server.send(&Response::default()).unwrap_err();
        assert_eq!(sent.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn directories_of_the_client_have_their_names() {
        let (_client, server) = connection();
        let folder = tempfile::tempdir().unwrap();
        let open = std::fs::File::open(folder.path()).unwrap();
        let found = server.directory(open.as_raw_fd()).unwrap();
        assert_eq!(found, folder.path().canonicalize().unwrap());
        let path = folder.path().to_owned();
        drop(folder);
        // Another directory of the same name is not meant.
        std::fs::create_dir(&path).unwrap();
        let found = server.directory(open.as_raw_fd()).unwrap();
        assert!(found.starts_with("/proc"), "{found:?}");
        std::fs::remove_dir(&path).unwrap();
        let file = tempfile::tempfile().unwrap();
        let refused = server.directory(file.as_raw_fd()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::NotADirectory);
        assert!(server.directory(1_000_000).is_err());
    }
}
