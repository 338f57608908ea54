//! Socket options, as one table: what is in it is saved, and nothing else is set from an image.
//!
//! - What: socket options
//! - Kept: all that one table names, of sockets of every kind, and packet filters.
//! - At a restore: "this kernel does not know the socket option …".
//! - CRIU 4.2: buffers, timeouts, priority, mark, device, lingering, keep-alive and some others.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{Error, Result};

const SOL_IP: i32 = 0;
const SOL_SOCKET: i32 = 1;
const SOL_TCP: i32 = 6;
const SOL_UDP: i32 = 17;
const SOL_VSOCK: i32 = 40;
const SOL_ICMPV6: i32 = 58;
const SOL_UDPLITE: i32 = 136;
const SOL_RAW: i32 = 255;
const SOL_IPV6: i32 = 41;
const SOL_PACKET: i32 = 263;
const SOL_NETLINK: i32 = 270;

const SO_SNDBUF: i32 = 7;
const SO_RCVBUF: i32 = 8;
const SO_SNDBUFFORCE: i32 = 32;
const SO_RCVBUFFORCE: i32 = 33;
/// Which of the two sizes were set by the owner and are not tuned.
pub(crate) const SO_BUF_LOCK: i32 = 72;

/// Options longer than this are none of ours.
const VALUE_MAX_BYTES: usize = 64;

/// When an option is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Before the socket gets its address.
    Early,
    /// After addresses, connections and data are as they were.
    Late,
}

/// One option that is saved.
#[derive(Clone, Copy, Debug)]
struct Known {
    level: i32,
    name: i32,
    bytes: usize,
    stage: Stage,
    label: &'static str,
}

impl Known {
    /// Options that streams tell, but do not let be set.
    fn is_multicast(&self) -> bool {
        self.label.contains("_MULTICAST_")
    }
}

const fn known(level: i32, name: i32, bytes: usize, stage: Stage, label: &'static str) -> Known {
    Known {
        level,
        name,
        bytes,
        stage,
        label,
    }
}

use Stage::{Early, Late};

/// Every option that is saved, in the order in which they are given back.
const TABLE: &[Known] = &[
    known(SOL_SOCKET, 2, 4, Early, "SO_REUSEADDR"),
    known(SOL_SOCKET, 15, 4, Early, "SO_REUSEPORT"),
    known(SOL_SOCKET, 25, 16, Early, "SO_BINDTODEVICE"),
    known(SOL_SOCKET, 36, 4, Early, "SO_MARK"),
    known(SOL_SOCKET, 12, 4, Early, "SO_PRIORITY"),
    known(SOL_SOCKET, 16, 4, Early, "SO_PASSCRED"),
    known(SOL_SOCKET, 34, 4, Early, "SO_PASSSEC"),
    known(SOL_SOCKET, 76, 4, Early, "SO_PASSPIDFD"),
    known(SOL_IPV6, 26, 4, Early, "IPV6_V6ONLY"),
    known(SOL_IP, 15, 4, Early, "IP_FREEBIND"),
    known(SOL_IP, 19, 4, Early, "IP_TRANSPARENT"),
    known(SOL_IP, 24, 4, Early, "IP_BIND_ADDRESS_NO_PORT"),
    known(SOL_IPV6, 78, 4, Early, "IPV6_FREEBIND"),
    known(SOL_IPV6, 75, 4, Early, "IPV6_TRANSPARENT"),
    known(SOL_TCP, 13, 16, Early, "TCP_CONGESTION"),
    known(SOL_PACKET, 10, 4, Early, "PACKET_VERSION"),
    known(SOL_PACKET, 12, 4, Early, "PACKET_RESERVE"),
    known(SOL_PACKET, 14, 4, Early, "PACKET_LOSS"),
    known(SOL_PACKET, 15, 4, Early, "PACKET_VNET_HDR"),
    known(SOL_PACKET, 24, 4, Early, "PACKET_VNET_HDR_SZ"),
    known(SOL_PACKET, 19, 4, Early, "PACKET_TX_HAS_OFF"),
    known(SOL_SOCKET, SO_SNDBUF, 4, Late, "SO_SNDBUF"),
    known(SOL_SOCKET, SO_RCVBUF, 4, Late, "SO_RCVBUF"),
    known(SOL_SOCKET, SO_BUF_LOCK, 4, Late, "SO_BUF_LOCK"),
    known(SOL_SOCKET, 83, 4, Late, "SO_PASSRIGHTS"),
    known(SOL_SOCKET, 5, 4, Late, "SO_DONTROUTE"),
    known(SOL_SOCKET, 6, 4, Late, "SO_BROADCAST"),
    known(SOL_SOCKET, 9, 4, Late, "SO_KEEPALIVE"),
    known(SOL_SOCKET, 10, 4, Late, "SO_OOBINLINE"),
    known(SOL_SOCKET, 11, 4, Late, "SO_NO_CHECK"),
    known(SOL_SOCKET, 13, 8, Late, "SO_LINGER"),
    known(SOL_SOCKET, 18, 4, Late, "SO_RCVLOWAT"),
    known(SOL_SOCKET, 20, 16, Late, "SO_RCVTIMEO"),
    known(SOL_SOCKET, 21, 16, Late, "SO_SNDTIMEO"),
    known(SOL_SOCKET, 29, 4, Late, "SO_TIMESTAMP"),
    known(SOL_SOCKET, 35, 4, Late, "SO_TIMESTAMPNS"),
    known(SOL_SOCKET, 37, 8, Late, "SO_TIMESTAMPING"),
    known(SOL_SOCKET, 40, 4, Late, "SO_RXQ_OVFL"),
    known(SOL_SOCKET, 41, 4, Late, "SO_WIFI_STATUS"),
    known(SOL_SOCKET, 42, 4, Late, "SO_PEEK_OFF"),
    known(SOL_SOCKET, 43, 4, Late, "SO_NOFCS"),
    known(SOL_SOCKET, 45, 4, Late, "SO_SELECT_ERR_QUEUE"),
    known(SOL_SOCKET, 46, 4, Late, "SO_BUSY_POLL"),
    known(SOL_SOCKET, 47, 8, Late, "SO_MAX_PACING_RATE"),
    known(SOL_SOCKET, 60, 4, Late, "SO_ZEROCOPY"),
    known(SOL_SOCKET, 61, 8, Late, "SO_TXTIME"),
    known(SOL_SOCKET, 69, 4, Late, "SO_PREFER_BUSY_POLL"),
    known(SOL_SOCKET, 70, 4, Late, "SO_BUSY_POLL_BUDGET"),
    known(SOL_SOCKET, 74, 4, Late, "SO_TXREHASH"),
    known(SOL_SOCKET, 75, 4, Late, "SO_RCVMARK"),
    known(SOL_SOCKET, 82, 4, Late, "SO_RCVPRIORITY"),
    known(SOL_IP, 1, 4, Late, "IP_TOS"),
    known(SOL_IP, 2, 4, Late, "IP_TTL"),
    known(SOL_IP, 3, 4, Late, "IP_HDRINCL"),
    known(SOL_IP, 6, 4, Late, "IP_RECVOPTS"),
    known(SOL_IP, 7, 4, Late, "IP_RETOPTS"),
    known(SOL_IP, 8, 4, Late, "IP_PKTINFO"),
    known(SOL_IP, 10, 4, Late, "IP_MTU_DISCOVER"),
    known(SOL_IP, 11, 4, Late, "IP_RECVERR"),
    known(SOL_IP, 12, 4, Late, "IP_RECVTTL"),
    known(SOL_IP, 13, 4, Late, "IP_RECVTOS"),
    known(SOL_IP, 20, 4, Late, "IP_RECVORIGDSTADDR"),
    known(SOL_IP, 21, 4, Late, "IP_MINTTL"),
    known(SOL_IP, 25, 4, Late, "IP_RECVFRAGSIZE"),
    known(SOL_IP, 26, 4, Late, "IP_RECVERR_RFC4884"),
    known(SOL_IP, 33, 4, Late, "IP_MULTICAST_TTL"),
    known(SOL_IP, 34, 4, Late, "IP_MULTICAST_LOOP"),
    known(SOL_IP, 49, 4, Late, "IP_MULTICAST_ALL"),
    known(SOL_IP, 50, 4, Late, "IP_UNICAST_IF"),
    known(SOL_IP, 51, 4, Late, "IP_LOCAL_PORT_RANGE"),
    known(SOL_IPV6, 7, 4, Late, "IPV6_CHECKSUM"),
    known(SOL_IPV6, 16, 4, Late, "IPV6_UNICAST_HOPS"),
    known(SOL_IPV6, 17, 4, Late, "IPV6_MULTICAST_IF"),
    known(SOL_IPV6, 18, 4, Late, "IPV6_MULTICAST_HOPS"),
    known(SOL_IPV6, 19, 4, Late, "IPV6_MULTICAST_LOOP"),
    known(SOL_IPV6, 23, 4, Late, "IPV6_MTU_DISCOVER"),
    known(SOL_IPV6, 25, 4, Late, "IPV6_RECVERR"),
    known(SOL_IPV6, 29, 4, Late, "IPV6_MULTICAST_ALL"),
    known(SOL_IPV6, 33, 4, Late, "IPV6_FLOWINFO_SEND"),
    known(SOL_IPV6, 36, 4, Late, "IPV6_HDRINCL"),
    known(SOL_IPV6, 49, 4, Late, "IPV6_RECVPKTINFO"),
    known(SOL_IPV6, 51, 4, Late, "IPV6_RECVHOPLIMIT"),
    known(SOL_IPV6, 60, 4, Late, "IPV6_RECVPATHMTU"),
    known(SOL_IPV6, 62, 4, Late, "IPV6_DONTFRAG"),
    known(SOL_IPV6, 66, 4, Late, "IPV6_RECVTCLASS"),
    known(SOL_IPV6, 67, 4, Late, "IPV6_TCLASS"),
    known(SOL_IPV6, 70, 4, Late, "IPV6_AUTOFLOWLABEL"),
    known(SOL_IPV6, 72, 4, Late, "IPV6_ADDR_PREFERENCES"),
    known(SOL_IPV6, 73, 4, Late, "IPV6_MINHOPCOUNT"),
    known(SOL_IPV6, 74, 4, Late, "IPV6_RECVORIGDSTADDR"),
    known(SOL_IPV6, 76, 4, Late, "IPV6_UNICAST_IF"),
    known(SOL_IPV6, 77, 4, Late, "IPV6_RECVFRAGSIZE"),
    known(SOL_TCP, 1, 4, Late, "TCP_NODELAY"),
    known(SOL_TCP, 3, 4, Late, "TCP_CORK"),
    known(SOL_TCP, 4, 4, Late, "TCP_KEEPIDLE"),
    known(SOL_TCP, 5, 4, Late, "TCP_KEEPINTVL"),
    known(SOL_TCP, 6, 4, Late, "TCP_KEEPCNT"),
    known(SOL_TCP, 7, 4, Late, "TCP_SYNCNT"),
    known(SOL_TCP, 8, 4, Late, "TCP_LINGER2"),
    known(SOL_TCP, 9, 4, Late, "TCP_DEFER_ACCEPT"),
    known(SOL_TCP, 10, 4, Late, "TCP_WINDOW_CLAMP"),
    known(SOL_TCP, 16, 4, Late, "TCP_THIN_LINEAR_TIMEOUTS"),
    known(SOL_TCP, 18, 4, Late, "TCP_USER_TIMEOUT"),
    known(SOL_TCP, 23, 4, Late, "TCP_FASTOPEN"),
    known(SOL_TCP, 25, 4, Late, "TCP_NOTSENT_LOWAT"),
    known(SOL_TCP, 27, 4, Late, "TCP_SAVE_SYN"),
    known(SOL_TCP, 30, 4, Late, "TCP_FASTOPEN_CONNECT"),
    known(SOL_TCP, 34, 4, Late, "TCP_FASTOPEN_NO_COOKIE"),
    known(SOL_TCP, 36, 4, Late, "TCP_INQ"),
    known(SOL_TCP, 37, 4, Late, "TCP_TX_DELAY"),
    known(SOL_UDP, 1, 4, Late, "UDP_CORK"),
    known(SOL_UDP, 100, 4, Late, "UDP_ENCAP"),
    known(SOL_UDP, 101, 4, Late, "UDP_NO_CHECK6_TX"),
    known(SOL_UDP, 102, 4, Late, "UDP_NO_CHECK6_RX"),
    known(SOL_UDP, 103, 4, Late, "UDP_SEGMENT"),
    known(SOL_UDP, 104, 4, Late, "UDP_GRO"),
    known(SOL_UDPLITE, 10, 4, Late, "UDPLITE_SEND_CSCOV"),
    known(SOL_UDPLITE, 11, 4, Late, "UDPLITE_RECV_CSCOV"),
    known(SOL_RAW, 1, 4, Late, "ICMP_FILTER"),
    known(SOL_ICMPV6, 1, 32, Late, "ICMPV6_FILTER"),
    known(SOL_PACKET, 8, 4, Late, "PACKET_AUXDATA"),
    known(SOL_PACKET, 9, 4, Late, "PACKET_ORIGDEV"),
    known(SOL_PACKET, 17, 4, Late, "PACKET_TIMESTAMP"),
    known(SOL_PACKET, 20, 4, Late, "PACKET_QDISC_BYPASS"),
    known(SOL_PACKET, 23, 4, Late, "PACKET_IGNORE_OUTGOING"),
    known(SOL_VSOCK, 2, 8, Late, "SO_VM_SOCKETS_BUFFER_MAX_SIZE"),
    known(SOL_VSOCK, 1, 8, Late, "SO_VM_SOCKETS_BUFFER_MIN_SIZE"),
    known(SOL_VSOCK, 0, 8, Late, "SO_VM_SOCKETS_BUFFER_SIZE"),
    known(SOL_VSOCK, 8, 16, Late, "SO_VM_SOCKETS_CONNECT_TIMEOUT"),
    known(SOL_NETLINK, 3, 4, Late, "NETLINK_PKTINFO"),
    known(SOL_NETLINK, 4, 4, Late, "NETLINK_BROADCAST_ERROR"),
    known(SOL_NETLINK, 5, 4, Late, "NETLINK_NO_ENOBUFS"),
    known(SOL_NETLINK, 10, 4, Late, "NETLINK_CAP_ACK"),
    known(SOL_NETLINK, 11, 4, Late, "NETLINK_EXT_ACK"),
    known(SOL_NETLINK, 12, 4, Late, "NETLINK_GET_STRICT_CHK"),
];

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
    /// Reads all options of a socket; those that its family or this kernel does not know are left
    /// out.
    ///
    /// # Errors
    /// For a filter that cannot be read back, or a system call's errno.
    pub fn read(own: BorrowedFd<'_>, levels: &[i32]) -> Result<Self> {
        let mut values = Vec::new();
        let wanted = |known: &&Known| {
            let is_stream = levels.contains(&SOL_TCP);
            let here = known.level == SOL_SOCKET || levels.contains(&known.level);
            here && !(is_stream && known.is_multicast())
        };
        for known in TABLE.iter().filter(wanted) {
            let value = match sys::socket::option(own, known.level, known.name, known.bytes) {
                Ok(value) => value,
                Err(error) if is_unknown(&error) => continue,
                Err(error) => return Err(Error::kernel(format!("read {}", known.label), error)),
            };
            values.push(Value {
                level: known.level,
                name: known.name,
                value,
            });
        }
        let filter = sys::socket::filter(own)
            .map_err(|error| Error::kernel("read a socket's filter", error))?;
        let filter_locked = sys::socket::number(own, SOL_SOCKET, 44).is_ok_and(|on| on != 0);
        Ok(Self {
            values,
            filter,
            filter_locked,
        })
    }

    /// The value of an option that is a number, if it was read.
    #[must_use]
    pub fn number(&self, level: i32, name: i32) -> Option<i32> {
        let mut values = self.values.iter();
        let found = values.find(|value| (value.level, value.name) == (level, name))?;
        Some(i32::from_ne_bytes(found.value.as_slice().try_into().ok()?))
    }

    /// Gives a socket back the options that binding needed otherwise.
    ///
    /// # Errors
    /// As [`Options::apply`].
    pub fn restore_bound(&self, own: BorrowedFd<'_>) -> Result<()> {
        let bound = |value: &&Value| OF_BINDING.contains(&(value.level, value.name));
        for value in self.values.iter().filter(bound) {
            let same = |known: &&Known| (known.level, known.name) == (value.level, value.name);
            let known = TABLE.iter().find(same).expect("all of them are saved");
            apply_one(own, known, &value.value)?;
        }
        Ok(())
    }

    /// Gives a socket the options of one stage, setting only what differs.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for options that are not in the table, [`Error::Mismatch`] for one that
    /// this kernel lacks, or the system call's errno.
    pub fn apply(&self, own: BorrowedFd<'_>, stage: Stage) -> Result<()> {
        for value in &self.values {
            let known = TABLE
                .iter()
                .find(|known| (known.level, known.name) == (value.level, value.name))
                .filter(|_| value.value.len() <= VALUE_MAX_BYTES)
                .ok_or_else(|| {
                    let what = format!("level {} option {}", value.level, value.name);
                    Error::corrupt("socket options", format!("{what} is not one that is saved"))
                })?;
            if known.stage == stage {
                apply_one(own, known, &value.value)?;
            }
        }
        if stage == Late && !self.filter.is_empty() {
            sys::socket::attach_filter(own, &self.filter)
                .map_err(|error| Error::kernel("attach a socket's filter", error))?;
        }
        if stage == Late && self.filter_locked {
            sys::socket::set_number(own, SOL_SOCKET, 44, 1)
                .map_err(|error| Error::kernel("set SO_LOCK_FILTER", error))?;
        }
        Ok(())
    }
}

fn apply_one(own: BorrowedFd<'_>, known: &Known, value: &[u8]) -> Result<()> {
    match sys::socket::option(own, known.level, known.name, known.bytes) {
        Ok(present) if present == value => return Ok(()),
        Err(error) if is_unknown(&error) && value.iter().all(|byte| *byte == 0) => return Ok(()),
        Err(error) if is_unknown(&error) => {
            let what = format!(
                "this kernel does not know the socket option {}",
                known.label
            );
            return Err(Error::Mismatch { what });
        }
        Ok(_) | Err(_) => {}
    }
    let done = match (known.level, known.name) {
        (SOL_SOCKET, SO_SNDBUF) => set_buffer(own, SO_SNDBUFFORCE, SO_SNDBUF, value),
        (SOL_SOCKET, SO_RCVBUF) => set_buffer(own, SO_RCVBUFFORCE, SO_RCVBUF, value),
        (level, name) => sys::socket::set_option(own, level, name, value),
    };
    done.map_err(|error| Error::kernel(format!("set {}", known.label), error))
}

/// The kernel doubles what it is told, and tells the doubled size.
fn set_buffer(own: BorrowedFd<'_>, force: i32, plain: i32, value: &[u8]) -> io::Result<()> {
    let bytes = value.try_into().map_or(0, i32::from_ne_bytes);
    let half = bytes / 2;
    sys::socket::set_number(own, SOL_SOCKET, force, half)
        .or_else(|_| sys::socket::set_number(own, SOL_SOCKET, plain, half))
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
    use rustix::io::Errno;
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
        let options = Options::read(source.as_fd(), &[]).unwrap();
        let fresh = socket(1);
        options.apply(fresh.as_fd(), Early).unwrap();
        options.apply(fresh.as_fd(), Late).unwrap();
        assert_eq!(Options::read(fresh.as_fd(), &[]).unwrap(), options);
        assert_eq!(options.number(SOL_SOCKET, SO_SNDBUF), Some(60_000));
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
        let error = options.apply(socket(1).as_fd(), Early).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }

    #[test]
    fn a_fresh_socket_needs_no_option_set() {
        let options = Options::read(socket(2).as_fd(), &[]).unwrap();
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
