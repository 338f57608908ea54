//! What all sockets have in common: how they are told apart, their options, their neighbours.

pub mod bind;
pub mod diag;
pub mod hidden;
pub mod inet;
pub mod inet_diag;
pub mod ledger;
pub mod multicast;
pub mod options;
pub mod packet;
pub mod peek;
#[cfg(test)]
pub(crate) mod testing;

use std::cell::OnceCell;
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, Gid, OFlags, Uid};

use super::{DescriptionId, DumpContext, Open};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// `SOL_SOCKET` options that say what a socket is.
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_TYPE: i32 = libc::SO_TYPE;
const SO_PROTOCOL: i32 = libc::SO_PROTOCOL;
const SO_DOMAIN: i32 = libc::SO_DOMAIN;

/// What kind of socket it is, as socket(2) was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nature {
    /// `AF_UNIX`, `AF_INET`, …
    pub family: i32,
    /// `SOCK_STREAM`, `SOCK_DGRAM`, …
    pub kind: i32,
    /// `IPPROTO_TCP`, …; 0 where the family has none.
    pub protocol: i32,
}

/// Answers of the kernel about a description that is a socket. They are kept while the tree is
/// stopped, as a search for one socket looks at all of them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    nature: OnceCell<Nature>,
    /// The name of one of unix.
    pub(crate) name: OnceCell<Vec<u8>>,
    /// The inode numbers of the descriptors in the queue of one of unix.
    pub(crate) flying: OnceCell<Vec<u64>>,
    /// The inode numbers of the clients that one of unix lets wait.
    pub(crate) waiting: OnceCell<Vec<u32>>,
}

impl Nature {
    /// What kind of socket `open` is; `None` when it is no socket at all, or only the place of
    /// one (`O_PATH`), which cannot be asked.
    ///
    /// # Errors
    /// When it cannot be fetched from its task, or the system calls' errno.
    pub fn of(open: &Open<'_>) -> Result<Option<Self>> {
        let is_socket = FileType::from_raw_mode(open.stat.st_mode) == FileType::Socket;
        if !is_socket || open.info.oflags().contains(OFlags::PATH) {
            return Ok(None);
        }
        // Each kind asks whether it is its own.
        if let Some(nature) = open.known.nature.get() {
            return Ok(Some(*nature));
        }
        let nature = Self::of_fd(open.own()?)?;
        Ok(Some(*open.known.nature.get_or_init(|| nature)))
    }

    /// The kind of socket that `open` is, which must be a socket.
    ///
    /// # Errors
    /// As [`Nature::of`].
    pub fn of_socket(open: &Open<'_>) -> Result<Self> {
        match Self::of(open)? {
            Some(nature) => Ok(nature),
            None => Self::of_fd(open.own()?),
        }
    }

    /// What kind of socket `own` is.
    ///
    /// # Errors
    /// The system calls' errno.
    pub fn of_fd(own: BorrowedFd<'_>) -> Result<Self> {
        let ask = |name| {
            sys::socket::number(own, SOL_SOCKET, name)
                .map_err(|error| Error::kernel("ask a socket what it is", error))
        };
        Ok(Self {
            family: ask(SO_DOMAIN)?,
            kind: ask(SO_TYPE)?,
            protocol: ask(SO_PROTOCOL)?,
        })
    }

    /// Whether `open` is a socket for which `is` holds; a socket that cannot be asked is none.
    pub fn claims(open: &Open<'_>, is: impl FnOnce(Self) -> bool) -> bool {
        matches!(Self::of(open), Ok(Some(nature)) if is(nature))
    }
}

/// The inode number of the socket behind `open`, by which sock_diag(7) knows it.
#[must_use]
pub fn inode(open: &Open<'_>) -> u32 {
    // sockfs numbers its inodes with 32 bits.
    u32::try_from(open.stat.st_ino).unwrap_or_default()
}

/// The description of the tree that is the socket with this inode number.
pub fn find(cx: &dyn DumpContext, wanted: u32) -> Option<&Open<'_>> {
    let mut all = cx.all().numbered(wanted.into());
    all.find(|open| FileType::from_raw_mode(open.stat.st_mode) == FileType::Socket)
}

/// The id of the description of the tree that is the socket with this inode number.
pub fn find_id(cx: &dyn DumpContext, wanted: u32) -> Option<DescriptionId> {
    find(cx, wanted).map(|open| open.id)
}

/// The description of the tree that is the socket at this address in the kernel's memory.
fn find_address(cx: &dyn DumpContext, wanted: u64) -> Option<DescriptionId> {
    let kernel = Kernel::get().ok()?;
    let is_it = |open: &&Open<'_>| {
        let is_socket = FileType::from_raw_mode(open.stat.st_mode) == FileType::Socket;
        let path = open.info.oflags().contains(OFlags::PATH);
        let address = |own| kernel.socket(own).is_ok_and(|at| at == wanted);
        is_socket && !path && open.own().is_ok_and(address)
    };
    cx.all().iter().find(is_it).map(|open| open.id)
}

/// Who has the socket with this inode number open, for messages: ", pid 5 (redis-server)"; nothing
/// where that cannot be found. Looks at every process: for a refusal only.
pub fn owner(inode: u32) -> String {
    let wanted = format!("socket:[{inode}]");
    let entries = |path: &str| std::fs::read_dir(path).into_iter().flatten().flatten();
    let has_it = |pid: &i32| {
        let links = entries(&sys::procfs::path(format_args!("{pid}/fd")));
        let mut links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        links.any(|link| link.as_os_str() == wanted.as_str())
    };
    sys::procfs::processes()
        .find(has_it)
        .map_or_else(String::new, |pid| {
            let name = sys::procfs::read_text(format_args!("{pid}/comm")).unwrap_or_default();
            format!(", pid {pid} ({})", name.trim_end().escape_debug())
        })
}

/// Status flags that fcntl(2) can set later; `O_ASYNC` goes with the owner of its signals.
const SETTABLE: u32 = OFlags::NONBLOCK.bits() | OFlags::APPEND.bits();

/// What every socket has besides its options.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Common {
    /// Status flags.
    #[prost(uint32, tag = "1")]
    pub flags: u32,
    /// The user who made it.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The group who made it.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
}

impl Common {
    /// Takes down what `fstat` and /proc say of a socket.
    #[must_use]
    pub fn of(open: &Open<'_>) -> Self {
        Self {
            flags: open.info.flags,
            uid: open.stat.st_uid,
            gid: open.stat.st_gid,
        }
    }

    /// Gives a new socket the status flags and the owner of the dump.
    ///
    /// # Errors
    /// The system calls' errno.
    pub fn apply(self, own: BorrowedFd<'_>) -> Result<()> {
        let wanted = self.flags & SETTABLE;
        if wanted != 0 {
            rustix::fs::fcntl_setfl(own, OFlags::from_bits_retain(wanted))
                .map_err(|error| Error::kernel("set a socket's status flags", error))?;
        }
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let (me, group) = (rustix::process::geteuid(), rustix::process::getegid());
        if (uid, gid) == (me, group) {
            return Ok(());
        }
        rustix::fs::fchown(own, Some(uid), Some(gid))
            .map_err(|error| Error::kernel("give a socket to its owner", error))
    }
}

/// What kind of socket it is, for messages; nothing for what is no socket.
pub(super) fn explain(open: &Open<'_>) -> Option<String> {
    let nature = Nature::of(open).ok().flatten()?;
    let family = match nature.family {
        1 => "unix",
        2 => "IPv4",
        10 => "IPv6",
        15 => "key management",
        16 => "netlink",
        17 => "packet",
        29 => "CAN",
        31 => "Bluetooth",
        38 => "cryptography",
        40 => "vsock",
        44 => "XDP",
        _ => return Some(format!("a socket of family {}", nature.family)),
    };
    let kind = match nature.kind {
        1 => "stream",
        2 => "datagram",
        3 => "raw",
        5 => "seqpacket",
        _ => "other",
    };
    let protocol = match (nature.family, nature.kind, nature.protocol) {
        (1, ..) => String::new(),
        (2 | 10, 1, 6) => ", TCP".to_owned(),
        (2 | 10, 2, 17) => ", UDP".to_owned(),
        (2 | 10, 2, 136) => ", UDP-Lite".to_owned(),
        (2 | 10, 1, 262) => ", Multipath TCP".to_owned(),
        (.., protocol) => format!(", protocol {protocol}"),
    };
    let article = if family.starts_with("IP") { "an" } else { "a" };
    Some(format!("{article} {family} {kind} socket{protocol}"))
}
