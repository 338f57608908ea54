//! Messages of sockets, with the descriptors, credentials and addresses that go along.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::{ADDRESS_BYTES, raw, socklen};

/// The most descriptors that one message carries (`SCM_MAX_FD`).
pub const RIGHTS_MAX: usize = 253;

/// Room for the descriptors and the credentials of one message.
const CONTROL_BYTES: usize = 1280;

/// Who sent a message, or made the other end (`struct ucred`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process; 0 for none that can be seen from here.
    pub pid: i32,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Credentials {
    /// As `SO_PEERCRED` gives them.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            pid: word(0)?.cast_signed(),
            uid: word(4)?,
            gid: word(8)?,
        })
    }
}

/// A received message.
#[derive(Debug, Default)]
pub struct Received {
    /// What recvmsg(2) returned; with `MSG_TRUNC` the whole message's length in bytes.
    pub len: usize,
    /// `msg_flags`.
    pub flags: i32,
    /// The sender's address; empty for none.
    pub name: Vec<u8>,
    /// Descriptors that came with it, close-on-exec.
    pub rights: Vec<OwnedFd>,
    /// The sender.
    pub credentials: Option<Credentials>,
}

/// Receives a message into `buffer` (recvmsg(2)).
///
/// # Errors
/// The call's errno.
pub fn receive(fd: impl AsFd, buffer: &mut [u8], flags: i32) -> io::Result<Received> {
    let mut name = [0u8; ADDRESS_BYTES];
    let mut control = [0u64; CONTROL_BYTES / 8];
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut message = blank_message();
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = socklen(name.len());
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    // SAFETY: every pointer of `message` is to a live buffer of the length given beside it.
    let len = unsafe { libc::recvmsg(raw(&fd), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    let mut received = Received {
        len,
        flags: message.msg_flags,
        name: name[..(message.msg_namelen as usize).min(ADDRESS_BYTES)].to_vec(),
        ..Received::default()
    };
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    parse_control(
        &bytes[..message.msg_controllen.min(CONTROL_BYTES)],
        &mut received,
    );
    Ok(received)
}

/// How many of the next `bytes` bytes of a unix stream stand in front of the piece that the last
/// of them was sent with; nothing is taken.
///
/// Looking glues pieces together. But the kernel copies one whole piece after the other, so what
/// it says of a buffer that is one byte too short (and then a bad address) is where the last
/// piece begins.
///
/// # Errors
/// The call's errno.
pub fn before_last_piece(fd: impl AsFd, bytes: usize) -> io::Result<usize> {
    let Some(room) = bytes.checked_sub(1) else {
        return Ok(0);
    };
    let mut buffer = vec![0u8; room];
    let mut parts = [
        libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: room,
        },
        libc::iovec {
            iov_base: std::ptr::without_provenance_mut(1),
            iov_len: 1,
        },
    ];
    let mut message = blank_message();
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the first part is a live buffer; address 1 is never mapped, the kernel fails on it.
    let len = unsafe { libc::recvmsg(raw(&fd), &raw mut message, flags) };
    match usize::try_from(len) {
        Ok(len) => Ok(len),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EFAULT) => Ok(0),
            error => Err(error),
        },
    }
}

/// Takes the descriptors and credentials out of a control buffer that the kernel has written.
fn parse_control(mut bytes: &[u8], received: &mut Received) {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    while bytes.len() >= HEADER {
        let word = |at: usize| i32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let len = usize::from_ne_bytes(bytes[..8].try_into().expect("8 bytes"));
        let (level, kind) = (word(8), word(12));
        if len < HEADER || len > bytes.len() {
            return;
        }
        let data = &bytes[HEADER..len];
        match (level, kind) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let fds = data.chunks_exact(4).map(|four| {
                    let fd = RawFd::from_ne_bytes(four.try_into().expect("4 bytes"));
                    // SAFETY: the kernel has just made this descriptor for us.
                    unsafe { OwnedFd::from_raw_fd(fd) }
                });
                received.rights.extend(fds);
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                received.credentials = Credentials::from_bytes(data);
            }
            _ => {}
        }
        bytes = &bytes[len.next_multiple_of(8).min(bytes.len())..];
    }
}

/// What goes along with a message besides its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Along<'a> {
    /// Where to, for sockets that are not connected.
    pub name: Option<&'a [u8]>,
    /// Descriptors, at most [`RIGHTS_MAX`].
    pub rights: &'a [BorrowedFd<'a>],
    /// Who says that he sends it (root may name anyone who exists).
    pub credentials: Option<Credentials>,
}

/// Sends a message (sendmsg(2), never with `SIGPIPE`); gives the bytes taken.
///
/// # Errors
/// The call's errno.
///
/// # Panics
/// With more than [`RIGHTS_MAX`] descriptors.
pub fn send(fd: impl AsFd, bytes: &[u8], along: Along<'_>, flags: i32) -> io::Result<usize> {
    with_message(bytes, along, |message| {
        // SAFETY: the message is sound as long as this function runs; the kernel only reads it.
        let sent = unsafe { libc::sendmsg(raw(&fd), message, flags | libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    })
}

/// Calls `f` with a message whose every pointer is to a live buffer of the length given beside it.
pub(crate) fn with_message<T>(
    bytes: &[u8],
    along: Along<'_>,
    f: impl FnOnce(*const libc::msghdr) -> T,
) -> T {
    assert!(along.rights.len() <= RIGHTS_MAX, "checked by the caller");
    let mut control = Vec::with_capacity(CONTROL_BYTES);
    if !along.rights.is_empty() {
        let fds = along.rights.iter();
        let data: Vec<u8> = fds.flat_map(|fd| fd.as_raw_fd().to_ne_bytes()).collect();
        put_control(&mut control, libc::SCM_RIGHTS, &data);
    }
    if let Some(who) = along.credentials {
        let words = [who.pid.cast_unsigned(), who.uid, who.gid];
        let data: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        put_control(&mut control, libc::SCM_CREDENTIALS, &data);
    }
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut message = blank_message();
    if let Some(name) = along.name {
        message.msg_name = name.as_ptr().cast_mut().cast();
        message.msg_namelen = socklen(name.len());
    }
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = control.len();
    }
    f(&raw const message)
}

fn put_control(control: &mut Vec<u8>, kind: i32, data: &[u8]) {
    let len = size_of::<libc::cmsghdr>() + data.len();
    control.extend(len.to_ne_bytes());
    control.extend(libc::SOL_SOCKET.to_ne_bytes());
    control.extend(kind.to_ne_bytes());
    control.extend(data);
    control.resize(control.len().next_multiple_of(8), 0);
}

fn blank_message() -> libc::msghdr {
    let message = MaybeUninit::<libc::msghdr>::zeroed();
    // SAFETY: integers and null pointers: all zeros is a value of the type.
    unsafe { message.assume_init() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::{Count, count, pair, set_number};

    #[test]
    fn messages_carry_rights_and_credentials() {
        let (left, right) = pair(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
        set_number(&right, libc::SOL_SOCKET, libc::SO_PASSCRED, 1).unwrap();
        let rights = [left.as_fd(), right.as_fd()];
        let along = Along {
            rights: &rights,
            ..Along::default()
        };
        assert_eq!(send(&left, b"hello", along, 0).unwrap(), 5);
        let mut buffer = [0; 16];
        let received = receive(&right, &mut buffer, 0).unwrap();
        assert_eq!(&buffer[..received.len], b"hello");
        assert_eq!(received.rights.len(), 2);
        let pid = std::process::id().cast_signed();
        assert_eq!(received.credentials.map(|who| who.pid), Some(pid));
    }

    #[test]
    fn the_last_piece_of_a_stream_is_found() {
        let (left, right) = pair(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        send(&left, b"0123456", Along::default(), 0).unwrap();
        send(&left, b"789", Along::default(), 0).unwrap();
        let found = [1, 7, 8, 10].map(|bytes| before_last_piece(&right, bytes).unwrap());
        assert_eq!(found, [0, 0, 7, 7]);
        assert_eq!(count(&right, Count::Inbound).unwrap(), 10);
    }
}
