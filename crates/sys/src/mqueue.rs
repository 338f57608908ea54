//! POSIX message queues by the kernel's own calls: mq_overview(7).
//!
//! Names have no slash here, as in the kernel; [`OwnedFd`] and the like are queues.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;

/// The most messages that a queue can be made for (`HARD_MSGMAX`).
pub const MESSAGES_MAX: u64 = 65_536;
/// The largest message that a queue can be made for, in bytes (`HARD_MSGSIZEMAX`).
pub const MESSAGE_MAX_BYTES: u64 = 16 << 20;
/// The highest priority of a message (`MQ_PRIO_MAX` less one).
pub const PRIORITY_MAX: u32 = 32_767;
/// The magic number of the file system that queues are in (`MQUEUE_MAGIC`).
pub const MAGIC: i64 = 0x1980_0202;
/// How large a queue is to stat(2), whatever is in it, in bytes (`FILENT_SIZE`).
pub const FILE_BYTES: i64 = 80;

/// What a queue holds, and can hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// How many messages fit.
    pub max_messages: u64,
    /// How long a message can be, in bytes.
    pub message_bytes: u64,
    /// How many messages there are.
    pub messages: u64,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its priority: higher ones come first.
    pub priority: u32,
    /// Its contents.
    pub bytes: Vec<u8>,
}

/// `struct mq_attr`, with what is reserved.
type Raw = [i64; 8];

fn check(result: i64) -> io::Result<i64> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Opens a queue that there is, close-on-exec (mq_open(2)).
///
/// # Errors
/// The call's errno, `ENOENT` among them.
pub fn open(name: &CStr, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = (flags.difference(OFlags::CREATE) | OFlags::CLOEXEC).bits();
    // SAFETY: the kernel reads the name; without O_CREAT there is nothing more.
    let fd = unsafe { libc::syscall(libc::SYS_mq_open, name.as_ptr(), flags, 0, 0) };
    owned(check(fd)?)
}

/// Makes a queue to read and to write, which nobody else has the name of, close-on-exec and without
/// waiting (mq_open(2)). Its owner is who calls.
///
/// # Errors
/// The call's errno: `EEXIST`, `EINVAL` beyond the limits of the system, `EMFILE` beyond
/// `RLIMIT_MSGQUEUE`, `ENOSPC` for one more than there may be.
pub fn create(name: &CStr, room: Attributes) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let number = |number| i64::try_from(number).unwrap_or(i64::MAX);
    let (most, bytes) = (number(room.max_messages), number(room.message_bytes));
    let raw: Raw = [0, most, bytes, 0, 0, 0, 0, 0];
    let (name, flags, at) = (name.as_ptr(), flags.bits(), raw.as_ptr());
    // SAFETY: the kernel reads the name and the attributes.
    let fd = unsafe { libc::syscall(libc::SYS_mq_open, name, flags, 0o600, at) };
    owned(check(fd)?)
}

fn owned(fd: i64) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).expect("a descriptor");
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes the name from a queue (mq_unlink(2)).
///
/// # Errors
/// The call's errno.
pub fn unlink(name: &CStr) -> io::Result<()> {
    // SAFETY: the kernel reads the name.
    check(unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) }).map(drop)
}

/// What a queue can hold, and how much it does (mq_getattr(3)).
///
/// # Errors
/// `EBADF` for what is no queue.
pub fn attributes(queue: impl AsFd) -> io::Result<Attributes> {
    let mut raw: Raw = [0; 8];
    let (queue, at) = (queue.as_fd().as_raw_fd(), raw.as_mut_ptr());
    // SAFETY: nothing is set, and the kernel fills in the attributes.
    check(unsafe { libc::syscall(libc::SYS_mq_getsetattr, queue, 0, at) })?;
    let number = |at: usize| raw[at].cast_unsigned();
    Ok(Attributes {
        max_messages: number(1),
        message_bytes: number(2),
        messages: number(3),
    })
}

/// How a process is told of a message.
#[derive(Clone, Copy, Debug)]
pub enum Tell<'a> {
    /// By a signal with this value.
    Signal(i32, u64),
    /// By what is sent to a netlink socket, as the C library has it for a thread (`SIGEV_THREAD`):
    /// these bytes, the last of which says why.
    Socket(BorrowedFd<'a>, &'a [u8; 32]),
    /// Not at all, but nobody else either.
    Nothing,
}

/// Has this process told, once, when a message comes into the queue while it is empty
/// (mq_notify(3)).
///
/// # Errors
/// `EBUSY` where somebody is to be told already, `EINVAL` for what is no signal.
pub fn notify(queue: impl AsFd, tell: Tell<'_>) -> io::Result<()> {
    // SAFETY: all zeros is a valid sigevent.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    match tell {
        Tell::Signal(signal, value) => {
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = signal;
            event.sigev_value.sival_ptr = std::ptr::without_provenance_mut(value as usize);
        }
        Tell::Socket(socket, cookie) => {
            event.sigev_notify = libc::SIGEV_THREAD;
            event.sigev_signo = socket.as_raw_fd();
            event.sigev_value.sival_ptr = cookie.as_ptr().cast_mut().cast();
        }
        Tell::Nothing => event.sigev_notify = libc::SIGEV_NONE,
    }
    let (queue, at) = (queue.as_fd().as_raw_fd(), &raw const event);
    // SAFETY: the kernel reads the event, and the 32 bytes that it may point at.
    check(unsafe { libc::syscall(libc::SYS_mq_notify, queue, at) }).map(drop)
}

/// Sends a message without waiting (mq_send(3)): `queue` must be one that does not wait.
///
/// # Errors
/// The call's errno: `EAGAIN` for a queue that is full, `EMSGSIZE`.
pub fn send(queue: impl AsFd, message: &Message) -> io::Result<()> {
    let queue = queue.as_fd().as_raw_fd();
    let (at, len) = (message.bytes.as_ptr(), message.bytes.len());
    let number = libc::SYS_mq_timedsend;
    // SAFETY: the kernel reads the message; no time is named.
    check(unsafe { libc::syscall(number, queue, at, len, message.priority, 0) }).map(drop)
}

/// Takes the first message without waiting, if there is one (mq_receive(3)): `queue` must be one
/// that does not wait, and `room` as long as its messages can be.
///
/// # Errors
/// The call's errno: `EMSGSIZE` for too little room.
pub fn receive(queue: impl AsFd, room: &mut [u8]) -> io::Result<Option<Message>> {
    let queue = queue.as_fd().as_raw_fd();
    let (at, len) = (room.as_mut_ptr(), room.len());
    let mut priority = 0u32;
    let (number, to) = (libc::SYS_mq_timedreceive, &raw mut priority);
    // SAFETY: the kernel writes at most as many bytes as there is room, and the priority.
    let got = check(unsafe { libc::syscall(number, queue, at, len, to, 0) });
    match got {
        Ok(len) => Ok(Some(Message {
            priority,
            bytes: room[..usize::try_from(len).expect("a length")].to_vec(),
        })),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(priority: u32, text: &str) -> Message {
        Message {
            priority,
            bytes: text.as_bytes().to_vec(),
        }
    }

    #[test]
    fn messages_come_by_priority_and_then_in_order() {
        let room = Attributes {
            max_messages: 3,
            message_bytes: 5,
            messages: 0,
        };
        let queue = match create(c"stillframe-sys-test", room) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return,
            queue => queue.unwrap(),
        };
        assert!(create(c"stillframe-sys-test", room).is_err());
        drop(open(c"stillframe-sys-test", OFlags::RDONLY).unwrap());
        unlink(c"stillframe-sys-test").unwrap();
        for (priority, text) in [(1, "low"), (PRIORITY_MAX, "high1"), (PRIORITY_MAX, "")] {
            send(&queue, &message(priority, text)).unwrap();
        }
        assert_eq!(
            attributes(&queue).unwrap(),
            Attributes {
                messages: 3,
                ..room
            }
        );
        let full = send(&queue, &message(0, "full")).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let mut bytes = [0; 5];
        assert!(receive(&queue, &mut bytes[..4]).is_err());
        let mut next = || receive(&queue, &mut bytes).unwrap();
        assert_eq!(next(), Some(message(PRIORITY_MAX, "high1")));
        assert_eq!(next(), Some(message(PRIORITY_MAX, "")));
        assert_eq!(next(), Some(message(1, "low")));
        assert_eq!(next(), None);
        assert!(send(&queue, &message(PRIORITY_MAX + 1, "")).is_err());
    }
}
