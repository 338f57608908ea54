//! Socket options: those that the [ledger](super::ledger) says are kept are saved, and nothing else
//! is set from an image.
//!
//! - What: socket options
//! - Kept: all of every kind of socket that getsockopt(2) tells, and packet filters:
//!   docs/sockets.md has each number.
//! - Refused: "its filter is an eBPF program"; "the kernel's own tunnel receives its datagrams
//!   (UDP_ENCAP)".
//! - At a restore: "this kernel does not know the socket option …".
//! - CRIU 4.2: buffers, timeouts, priority, mark, device, lingering, keep-alive and some others.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use sys::socket::batch::{self, Question};

use super::Nature;
use super::hidden::{self, Hidden};
use super::ledger::{self, Entry, Fate, Kept, Kinds};
use crate::fd::{DumpContext, Open};
use crate::{Error, Result};

const SOL_IP: i32 = libc::SOL_IP;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SOL_TCP: i32 = libc::SOL_TCP;
const SOL_UDP: i32 = libc::SOL_UDP;
const SOL_IPV6: i32 = libc::SOL_IPV6;

const SO_SNDBUF: i32 = libc::SO_SNDBUF;
const SO_RCVBUF: i32 = libc::SO_RCVBUF;
const SO_RCVLOWAT: i32 = libc::SO_RCVLOWAT;
const SO_SNDBUFFORCE: i32 = libc::SO_SNDBUFFORCE;
const SO_RCVBUFFORCE: i32 = libc::SO_RCVBUFFORCE;
const SO_LOCK_FILTER: i32 = libc::SO_LOCK_FILTER;
const TCP_RTO_MIN_US: i32 = linux_raw_sys::net::TCP_RTO_MIN_US as i32;
const TCP_DELACK_MAX_US: i32 = linux_raw_sys::net::TCP_DELACK_MAX_US as i32;
const UDP_ENCAP: i32 = libc::UDP_ENCAP;
/// `UDP_ENCAP_L2TPINUDP`: what comes after is set by the kernel's own tunnels alone.
const UDP_ENCAP_LAST: i32 = 3;
/// More than this no call sets, of two limits of TCP; their sysctls do.
const TCP_MOST_US: i32 = 200_000;
/// Which of the two sizes were set by the owner and are not tuned.
pub(crate) const SO_BUF_LOCK: i32 = libc::SO_BUF_LOCK;

/// When an option is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the socket gets its address.
    Early,
    /// After addresses, connections and data are as they were.
    Late,
}

use Moment::{Early, Late};

/// Options that binding looks at: they may have been changed since.
const OF_BINDING: [(i32, i32); 7] = [
    (SOL_SOCKET, 2),
    (SOL_SOCKET, 15),
    (SOL_IP, 15),
    (SOL_IP, 19),
    (SOL_IP, 24),
    (SOL_IPV6, 78),
    (SOL_IPV6, 75),
];

/// An entry of the ledger, and how its option is kept.
type KeptOption = (&'static Entry, Kept);

/// The options of one socket.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Options {
    /// One entry an option that the kernel knows.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
    /// The classic packet filter, 8 bytes an instruction.
    #[prost(bytes = "vec", tag = "2")]
    pub filter: Vec<u8>,
    /// Whether that filter may no longer be changed.
    #[prost(bool, tag = "3")]
    pub filter_locked: bool,
    /// State of the socket of which no call tells.
    #[prost(message, optional, tag = "4")]
    pub hidden: Option<Hidden>,
}

/// One option.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// `SOL_SOCKET`, `SOL_TCP`, …
    #[prost(int32, tag = "1")]
    pub level: i32,
    /// `SO_SNDBUF`, …
    #[prost(int32, tag = "2")]
    pub name: i32,
    /// As getsockopt(2) gave it.
    #[prost(bytes = "vec", tag = "3")]
    pub value: Vec<u8>,
}

impl Options {
    /// Reads all options of a socket at a dump, which refuses what no call would give back.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for state that is not kept, or a system call's errno.
    pub fn of(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Self> {
        let own = open.own()?;
        let nature = Nature::of_socket(open)?;
        let filter = match sys::socket::filter(own) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::ACCESS) => {
                return Err(open.unsupported("its filter is an eBPF program", None));
            }
            filter => filter.map_err(unread_filter)?,
        };
        if open.told.get().is_none() {
            ask_all(cx.all());
        }
        let told = open.told.get().map_or(&[][..], Vec::as_slice);
        let mut options = Self::with(own, Kinds::of(nature), told)?;
        options.filter = filter;
        let encapsulation = options.number(SOL_UDP, UDP_ENCAP).unwrap_or_default();
        if encapsulation > UDP_ENCAP_LAST {
            let why = "the kernel's own tunnel receives its datagrams (UDP_ENCAP)";
            return Err(open.unsupported(why, None));
        }
        let hidden = hidden::look(open, nature, &options, cx)?;
        options.hidden = Some(hidden).filter(|hidden| *hidden != Hidden::default());
        Ok(options)
    }

    /// Reads all options of a socket; those that this kernel does not know are left out.
    ///
    /// # Errors
    /// A system call's errno; `EACCES` for a filter that cannot be read back.
    pub fn read(own: BorrowedFd<'_>, of: Kinds) -> Result<Self> {
        let filter = sys::socket::filter(own).map_err(unread_filter)?;
        let options = Self::with(own, of, &[])?;
        Ok(Self { filter, ..options })
    }

    /// The options without the filter; those that were `told` already are not asked for again.
    fn with(own: BorrowedFd<'_>, of: Kinds, told: &[Answer]) -> Result<Self> {
        let mut values = Vec::new();
        for (entry, kept) in ledger::kept(of) {
            let is_it = |answer: &&Answer| (SOL_SOCKET, answer.name) == (entry.level, entry.name);
            let value = match told.iter().find(is_it) {
                Some(answer) => answer.value.clone(),
                None => ask(own, entry, kept)?,
            };
            let Some(value) = value else {
                continue;
            };
            if !value.is_empty() && !is_of_namespace(entry, &value) {
                values.push(Value {
                    level: entry.level,
                    name: entry.name,
                    value,
                });
            }
        }
        let filter_locked =
            sys::socket::number(own, SOL_SOCKET, SO_LOCK_FILTER).is_ok_and(|on| on != 0);
        Ok(Self {
            values,
            filter: Vec::new(),
            filter_locked,
            hidden: None,
        })
    }

    /// Forgets an option: it says nothing of a socket in this state.
    pub fn forget(&mut self, level: i32, name: i32) {
        self.values
            .retain(|value| (value.level, value.name) != (level, name));
    }

    /// The value of an option, if it was read.
    #[must_use]
    pub fn value(&self, level: i32, name: i32) -> Option<&[u8]> {
        let mut values = self.values.iter();
        let found = values.find(|value| (value.level, value.name) == (level, name))?;
        Some(&found.value)
    }

    /// The value of an option that is a number, if it was read.
    #[must_use]
    pub fn number(&self, level: i32, name: i32) -> Option<i32> {
        Some(i32::from_ne_bytes(
            self.value(level, name)?.try_into().ok()?,
        ))
    }

    /// Refuses options that no dump writes.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn check(&self) -> Result<()> {
        let unknown = self.values.iter().find(|value| value.known().is_none());
        unknown.map_or(Ok(()), |value| {
            let what = format!("level {} option {}", value.level, value.name);
            let what = format!("{what} is not one that is saved");
            Err(Error::corrupt("socket options", what))
        })
    }

    /// Gives a socket back the options that binding needed otherwise.
    ///
    /// # Errors
    /// As [`Options::apply`].
    pub fn restore_bound(&self, own: BorrowedFd<'_>) -> Result<()> {
        let bound = |value: &&Value| OF_BINDING.contains(&(value.level, value.name));
        for value in self.values.iter().filter(bound) {
            let known = value.known().expect("checked when decoded");
            apply_one(own, known, &value.value)?;
        }
        Ok(())
    }

    /// Gives a socket the options of one moment, setting only what differs.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for one that this kernel lacks, or the system call's errno.
    pub fn apply(&self, own: BorrowedFd<'_>, moment: Moment) -> Result<()> {
        if let (Early, Some(hidden)) = (moment, &self.hidden) {
            hidden.apply_before_device(own)?;
        }
        for value in &self.values {
            let known = value.known().expect("checked when decoded");
            if known.1.moment == moment {
                apply_one(own, known, &value.value)?;
            }
        }
        if moment == Late && !self.filter.is_empty() {
            sys::socket::attach_filter(own, &self.filter)
                .map_err(|error| Error::kernel("attach a socket's filter", error))?;
        }
        if let (Late, Some(hidden)) = (moment, &self.hidden) {
            hidden.apply(own)?;
        }
        if moment == Late && self.filter_locked {
            sys::socket::set_number(own, SOL_SOCKET, SO_LOCK_FILTER, 1)
                .map_err(|error| Error::kernel("set SO_LOCK_FILTER", error))?;
        }
        Ok(())
    }
}

impl Value {
    /// The entry of the ledger for the option, if the ledger keeps it.
    fn known(&self) -> Option<KeptOption> {
        let entry = ledger::find(self.level, self.name)?;
        match entry.fate {
            Fate::Kept(kept) if self.value.len() <= kept.bytes => Some((entry, kept)),
            _ => None,
        }
    }
}

/// Answers for one socket.
pub(in crate::fd) type Answers = Vec<Answer>;

/// The kernel's answer about an option of the level `SOL_SOCKET`.
pub(in crate::fd) struct Answer {
    name: i32,
    /// Its value; none where the kernel or the family does not know it.
    value: Option<Vec<u8>>,
}

/// So many sockets at least are asked about together: to make a ring for fewer takes longer.
const TOGETHER: usize = 8;

/// Asks about all sockets of the tree by a few calls, where the kernel lets us; otherwise each is
/// asked when it is its turn.
fn ask_all(opens: &[Open<'_>]) {
    let sockets = opens.iter().filter(|open| open.told.get().is_none());
    let sockets = sockets.filter_map(|open| {
        let nature = Nature::of(open).ok().flatten()?;
        Some((open, open.own().ok()?, Kinds::of(nature)))
    });
    let sockets = sockets.collect::<Vec<_>>();
    let alone = || {
        for (open, ..) in &sockets {
            let _ = open.told.set(Answers::new());
        }
    };
    if sockets.len() < TOGETHER {
        return alone();
    }
    let wanted = |of| {
        let kept = ledger::kept(of).filter(|(entry, _)| entry.level == SOL_SOCKET);
        kept.map(|(entry, kept)| (entry.name, kept.bytes))
    };
    let questions = sockets.iter().flat_map(|(_, socket, of)| {
        wanted(*of).map(|(name, bytes)| Question {
            socket: *socket,
            name,
            bytes,
        })
    });
    let answers = match batch::options(&questions.collect::<Vec<_>>()) {
        Ok(answers) => answers,
        Err(error) => {
            log::debug!("options are asked for one by one: {error}");
            return alone();
        }
    };
    let mut answers = answers.into_iter();
    for (open, _, of) in &sockets {
        let mut told = Answers::new();
        for (name, _) in wanted(*of) {
            match answers.next() {
                Some(Ok(value)) => {
                    let value = Some(value);
                    told.push(Answer { name, value });
                }
                Some(Err(error)) if is_unknown(&error) => told.push(Answer { name, value: None }),
                // It is asked for again, and the error is told then.
                Some(Err(_)) | None => {}
            }
        }
        let _ = open.told.set(told);
    }
}

/// Asks for an option; none where the kernel or the family does not know it.
fn ask(own: BorrowedFd<'_>, entry: &Entry, kept: Kept) -> Result<Option<Vec<u8>>> {
    match sys::socket::option(own, entry.level, entry.name, kept.bytes) {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_unknown(&error) => Ok(None),
        Err(error) => Err(Error::kernel(format!("read {}", entry.label), error)),
    }
}

/// True if a value is the network namespace's: it is larger than a call could set.
fn is_of_namespace(entry: &Entry, value: &[u8]) -> bool {
    let limits = [(SOL_TCP, TCP_RTO_MIN_US), (SOL_TCP, TCP_DELACK_MAX_US)];
    let number = value.try_into().map(i32::from_ne_bytes);
    limits.contains(&(entry.level, entry.name)) && number.is_ok_and(|us| us > TCP_MOST_US)
}

fn unread_filter(error: io::Error) -> Error {
    Error::kernel("read a socket's filter", error)
}

fn apply_one(own: BorrowedFd<'_>, (entry, kept): KeptOption, value: &[u8]) -> Result<()> {
    match sys::socket::option(own, entry.level, entry.name, kept.bytes) {
        Ok(present) if present == value => return Ok(()),
        Err(error) if is_unknown(&error) && value.iter().all(|byte| *byte == 0) => return Ok(()),
        Err(error) if is_unknown(&error) => {
            let what = format!(
                "this kernel does not know the socket option {}",
                entry.label
            );
            return Err(Error::Mismatch { what });
        }
        Ok(_) | Err(_) => {}
    }
    let done = match (entry.level, entry.name) {
        (SOL_SOCKET, SO_SNDBUF) => set_buffer(own, SO_SNDBUFFORCE, SO_SNDBUF, value),
        (SOL_SOCKET, SO_RCVLOWAT) => set_low_mark(own, value),
        (SOL_SOCKET, SO_RCVBUF) => set_buffer(own, SO_RCVBUFFORCE, SO_RCVBUF, value),
        (level, name) => sys::socket::set_option(own, level, name, value),
    };
    done.map_err(|error| Error::kernel(format!("set {}", entry.label), error))
}

/// The kernel doubles what it is told, and tells the doubled size.
fn set_buffer(own: BorrowedFd<'_>, force: i32, plain: i32, value: &[u8]) -> io::Result<()> {
    let bytes = value.try_into().map_or(0, i32::from_ne_bytes);
    let half = bytes / 2;
    sys::socket::set_number(own, SOL_SOCKET, force, half)
        .or_else(|_| sys::socket::set_number(own, SOL_SOCKET, plain, half))
}

/// TCP takes no more than half of what its receive buffer may be.
fn set_low_mark(own: BorrowedFd<'_>, value: &[u8]) -> io::Result<()> {
    let set = || sys::socket::set_option(own, SOL_SOCKET, SO_RCVLOWAT, value);
    set()?;
    let wanted = value.try_into().map_or(0, i32::from_ne_bytes);
    if sys::socket::number(own, SOL_SOCKET, SO_RCVLOWAT)? == wanted {
        return Ok(());
    }
    let bytes = usize::try_from(wanted).unwrap_or_default();
    let old = enlarge_buffer(own, Buffer::Receive, bytes)?;
    set()?;
    restore_buffer(own, old)
}

/// One of a socket's two buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// What was sent and not received.
    Send,
    /// What was received and not read.
    Receive,
}

/// What a socket's buffer was before [`enlarge_buffer`].
#[derive(Clone, Copy, Debug)]
pub struct BufferSize {
    buffer: Buffer,
    bytes: i32,
    /// Whether its owner has set the sizes of buffers; absent where the kernel does not tell.
    locked: Option<i32>,
}

/// Enlarges a socket's buffer so that `bytes` fit, whatever its owner has set; gives what is to be
/// given back with [`restore_buffer`].
///
/// # Errors
/// The system calls' errno.
pub fn enlarge_buffer(own: BorrowedFd<'_>, buffer: Buffer, bytes: usize) -> io::Result<BufferSize> {
    let (size, force) = match buffer {
        Buffer::Send => (SO_SNDBUF, SO_SNDBUFFORCE),
        Buffer::Receive => (SO_RCVBUF, SO_RCVBUFFORCE),
    };
    let old = BufferSize {
        buffer,
        bytes: sys::socket::number(own, SOL_SOCKET, size)?,
        locked: sys::socket::number(own, SOL_SOCKET, SO_BUF_LOCK).ok(),
    };
    // Every small message is charged with its bookkeeping as well.
    let wanted = i32::try_from(bytes.saturating_mul(4)).unwrap_or(i32::MAX / 4);
    if old.bytes < wanted {
        sys::socket::set_number(own, SOL_SOCKET, force, wanted.min(i32::MAX / 4))?;
    }
    Ok(old)
}

/// Gives a socket the buffer that it had before [`enlarge_buffer`].
///
/// # Errors
/// The system calls' errno.
pub fn restore_buffer(own: BorrowedFd<'_>, old: BufferSize) -> io::Result<()> {
    let (force, plain) = match old.buffer {
        Buffer::Send => (SO_SNDBUFFORCE, SO_SNDBUF),
        Buffer::Receive => (SO_RCVBUFFORCE, SO_RCVBUF),
    };
    set_buffer(own, force, plain, &old.bytes.to_ne_bytes())?;
    // Having been set, the size is marked as one that the owner wants.
    old.locked.map_or(Ok(()), |locked| {
        sys::socket::set_number(own, SOL_SOCKET, SO_BUF_LOCK, locked)
    })
}

/// The errnos for options that a kernel or a family lacks.
fn is_unknown(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    let unknown = [Errno::NOPROTOOPT, Errno::OPNOTSUPP, Errno::INVAL];
    errno.is_some_and(|errno| unknown.contains(&errno))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn socket(kind: i32) -> std::os::fd::OwnedFd {
        sys::socket::open(1, kind, 0).unwrap()
    }

    #[test]
    fn options_move_to_a_fresh_socket() {
        let source = socket(1);
        let set = |name, value| sys::socket::set_number(&source, SOL_SOCKET, name, value);
        set(16, 1).unwrap();
        set(12, 3).unwrap();
        set(SO_SNDBUF, 30_000).unwrap();
        sys::socket::set_option(&source, SOL_SOCKET, 20, &[7; 8].repeat(2)).unwrap_err();
        let mut timeout = [0; 16];
        timeout[0] = 5;
        sys::socket::set_option(&source, SOL_SOCKET, 20, &timeout).unwrap();
        let options = Options::read(source.as_fd(), Kinds::UNIX).unwrap();
        let fresh = socket(1);
        options.apply(fresh.as_fd(), Early).unwrap();
        options.apply(fresh.as_fd(), Late).unwrap();
        assert_eq!(Options::read(fresh.as_fd(), Kinds::UNIX).unwrap(), options);
        assert_eq!(options.number(SOL_SOCKET, SO_SNDBUF), Some(60_000));
    }

    #[test]
    fn options_asked_for_together_are_those_asked_for_alone() {
        let sockets: Vec<_> = (0..2 * TOGETHER).map(|_| socket(1)).collect();
        for (socket, value) in sockets.iter().zip(1..) {
            sys::socket::set_number(socket, SOL_SOCKET, 12, value % 6).unwrap();
            sys::socket::set_number(socket, SOL_SOCKET, SO_RCVBUF, 10_000 + value).unwrap();
        }
        let opens = sockets.iter().enumerate();
        let opens = opens.map(|(id, own)| super::super::testing::describe(id, own));
        let opens = opens.collect::<Vec<_>>();
        ask_all(&opens);
        for (socket, open) in sockets.iter().zip(&opens) {
            let told = open.told.get().expect("it was asked");
            let together = Options::with(socket.as_fd(), Kinds::UNIX, told).unwrap();
            assert_eq!(
                together,
                Options::read(socket.as_fd(), Kinds::UNIX).unwrap()
            );
        }
        let first = opens[0].told.get().expect("it was asked");
        if first.is_empty() {
            testkit::skip!("this kernel does not answer in a ring");
        }
    }

    #[test]
    fn an_image_cannot_set_what_is_not_in_the_table() {
        let value = Value {
            level: SOL_SOCKET,
            name: 26,
            value: vec![0; 16],
        };
        let options = Options {
            values: vec![value],
            ..Options::default()
        };
        let error = options.check().unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }

    #[test]
    fn a_fresh_socket_needs_no_option_set() {
        let options = Options::read(socket(2).as_fd(), Kinds::UNIX).unwrap();
        let fresh = socket(2);
        options.apply(fresh.as_fd(), Late).unwrap();
        // Setting a size would have set its lock as well.
        let lock = sys::socket::number(&fresh, SOL_SOCKET, 72).unwrap();
        assert_eq!(lock, 0);
    }

    #[test]
    fn an_enlarged_buffer_is_not_noticed_afterwards() {
        let socket = socket(1);
        let number = |name| sys::socket::number(&socket, SOL_SOCKET, name).unwrap();
        for (buffer, size) in [(Buffer::Send, SO_SNDBUF), (Buffer::Receive, SO_RCVBUF)] {
            let before = [size, SO_BUF_LOCK].map(number);
            let old = enlarge_buffer(socket.as_fd(), buffer, 1 << 20).unwrap();
            assert!(number(size) > before[0]);
            restore_buffer(socket.as_fd(), old).unwrap();
            assert_eq!([size, SO_BUF_LOCK].map(number), before);
        }
    }
}
