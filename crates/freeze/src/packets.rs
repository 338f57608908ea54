//! Messages between processes of ours: one a packet of a unix socket, with descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::io::Errno;
use sys::socket::{self, Along};

/// The longest message, in bytes.
const LONGEST_BYTES: usize = 64 << 10;

/// The error for what the other side must not say.
pub fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Sends one message with descriptors.
///
/// # Errors
/// Those of sendmsg(2), and where the message is cut.
pub fn send(socket: impl AsFd, said: &impl Message, rights: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = said.encode_to_vec();
    let along = Along {
        rights,
        ..Along::default()
    };
    loop {
        match socket::send(&socket, &bytes, along, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Ok(_) => return Err(invalid("a message was cut")),
            Err(error) => return Err(error),
        }
    }
}

/// Receives one message with descriptors; none when the other side has hung up.
///
/// # Errors
/// Those of recvmsg(2), and for what is no message.
pub fn receive<M: Message + Default>(socket: impl AsFd) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut buffer = vec![0; LONGEST_BYTES];
    let received = loop {
        match socket::receive(&socket, &mut buffer, 0) {
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
    let said = whole.and_then(|bytes| M::decode(bytes).ok());
    let said = said.ok_or_else(|| invalid("a message makes no sense"))?;
    Ok(Some((said, received.rights)))
}
