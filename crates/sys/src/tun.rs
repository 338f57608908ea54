//! Queues of virtual interfaces: descriptors of /dev/net/tun
//! (Documentation/networking/tuntap.rst), and what ethtool(8) tells of an interface.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{Ioctl, c_int, c_ulong};
use rustix::io::Errno;

use crate::socket;

/// The longest name of an interface, in bytes, with the NUL at its end (`IFNAMSIZ`).
pub const NAME_MAX_BYTES: usize = libc::IFNAMSIZ;

/// What [`attach`] and [`attached`] tell of a queue: `IFF_TUN`, `IFF_MULTI_QUEUE`, …
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The interface's name.
    pub name: String,
    /// The flags.
    pub flags: u16,
}

/// A number that a queue or its interface has and that is told through memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// How many bytes of packets may be under way into the host (`TUNSETSNDBUF`).
    SendBufferBytes,
    /// How long the header before each packet is, with `IFF_VNET_HDR` (`TUNSETVNETHDRSZ`).
    HeaderBytes,
    /// Whether that header is little-endian on every machine (`TUNSETVNETLE`).
    IsLittleEndian,
}

impl Number {
    fn calls(self) -> (Ioctl, Ioctl) {
        match self {
            Self::SendBufferBytes => (libc::TUNGETSNDBUF, libc::TUNSETSNDBUF),
            Self::HeaderBytes => (libc::TUNGETVNETHDRSZ, libc::TUNSETVNETHDRSZ),
            Self::IsLittleEndian => (libc::TUNGETVNETLE, libc::TUNSETVNETLE),
        }
    }
}

/// A number that can only be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Whether the interface outlives its queues (`TUNSETPERSIST`).
    Persistent,
    /// Which user may attach to it (`TUNSETOWNER`).
    Owner,
    /// Which group may attach to it (`TUNSETGROUP`).
    Group,
    /// The type of its hardware addresses, while it is down (`TUNSETLINK`).
    LinkType,
    /// What the program does for the host: `TUN_F_CSUM`, … (`TUNSETOFFLOAD`).
    Offload,
}

/// Whether an interface may be called so; a pattern is no name.
pub fn is_name(name: &str) -> bool {
    let is_odd = |c: char| c.is_ascii_whitespace() || ['\0', '%', '/', ':', '\x0b'].contains(&c);
    (1..NAME_MAX_BYTES).contains(&name.len())
        && !name.contains(is_odd)
        && ![".", ".."].contains(&name)
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// `struct ifreq`: a name, and 24 bytes that depend on the call.
#[repr(C, align(8))]
struct Request {
    name: [u8; NAME_MAX_BYTES],
    rest: [u8; 24],
}

impl Request {
    fn new(name: &str) -> io::Result<Self> {
        let mut request = Self {
            name: [0; NAME_MAX_BYTES],
            rest: [0; 24],
        };
        if !is_name(name) {
            return Err(Errno::INVAL.into());
        }
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(request)
    }

    fn with_flags(mut self, flags: u16) -> Self {
        self.rest[..2].copy_from_slice(&flags.to_ne_bytes());
        self
    }

    fn name(&self) -> String {
        let name = self.name.split(|byte| *byte == 0).next();
        String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
    }

    fn call(&mut self, fd: BorrowedFd<'_>, call: Ioctl) -> io::Result<()> {
        let at: *mut Self = self;
        // SAFETY: these calls read and write one `ifreq`, which is as long as this.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), call, at) }).map(drop)
    }
}

/// Makes `fd`, which is new, a queue of the interface of this name, which is made where there is
/// none. A name with a pattern in it is refused.
///
/// # Errors
/// The call's errno: `EBUSY` where somebody has its only queue, `EINVAL` where the interface is
/// another one.
pub fn attach(fd: impl AsFd, name: &str, flags: u16) -> io::Result<()> {
    let mut request = Request::new(name)?.with_flags(flags);
    request.call(fd.as_fd(), libc::TUNSETIFF)
}

/// The interface of a queue and its flags; `None` where it is none.
///
/// # Errors
/// The call's errno.
pub fn attached(fd: impl AsFd) -> io::Result<Option<Attached>> {
    let mut request = Request {
        name: [0; NAME_MAX_BYTES],
        rest: [0; 24],
    };
    match request.call(fd.as_fd(), libc::TUNGETIFF) {
        Ok(()) => Ok(Some(Attached {
            name: request.name(),
            flags: u16::from_ne_bytes([request.rest[0], request.rest[1]]),
        })),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::BADFD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Has a queue of several get packets no more (`IFF_DETACH_QUEUE`), or again.
///
/// # Errors
/// The call's errno.
pub fn set_detached(fd: impl AsFd, is_detached: bool) -> io::Result<()> {
    let flags = if is_detached {
        libc::IFF_DETACH_QUEUE
    } else {
        libc::IFF_ATTACH_QUEUE
    };
    let flags = u16::try_from(flags).expect("16 bits");
    let mut request = Request {
        name: [0; NAME_MAX_BYTES],
        rest: [0; 24],
    }
    .with_flags(flags);
    request.call(fd.as_fd(), libc::TUNSETQUEUE)
}

/// Asks a queue for a number.
///
/// # Errors
/// The call's errno.
pub fn number(fd: impl AsFd, which: Number) -> io::Result<i32> {
    let mut value: c_int = 0;
    let at: *mut c_int = &raw mut value;
    // SAFETY: the call writes an `int`.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), which.calls().0, at) })?;
    Ok(value)
}

/// Gives a queue a number.
///
/// # Errors
/// The call's errno.
pub fn set_number(fd: impl AsFd, which: Number, value: i32) -> io::Result<()> {
    set_by_pointer(fd.as_fd(), which.calls().1, value)
}

/// How many instructions the packet filter has that an interface was given (`TUNATTACHFILTER`),
/// also if it was taken away again; 0 for none.
///
/// # Errors
/// The call's errno.
pub fn filter_length(fd: impl AsFd) -> io::Result<u16> {
    let mut filter = libc::sock_fprog {
        len: 0,
        filter: std::ptr::null_mut(),
    };
    let at: *mut libc::sock_fprog = &raw mut filter;
    // SAFETY: the call writes one `sock_fprog`.
    match check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNGETFILTER, at) }) {
        Ok(_) => Ok(filter.len),
        // Only a tap can have one.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Says which number the interface shall have that [`attach`] makes.
///
/// # Errors
/// The call's errno.
pub fn want_index(fd: impl AsFd, index: u32) -> io::Result<()> {
    set_by_pointer(fd.as_fd(), libc::TUNSETIFINDEX, index.cast_signed())
}

/// Says whether the interface has a carrier.
///
/// # Errors
/// The call's errno.
pub fn set_carrier(fd: impl AsFd, has_carrier: bool) -> io::Result<()> {
    set_by_pointer(fd.as_fd(), libc::TUNSETCARRIER, c_int::from(has_carrier))
}

fn set_by_pointer(fd: BorrowedFd<'_>, call: Ioctl, value: c_int) -> io::Result<()> {
    let at: *const c_int = &raw const value;
    // SAFETY: these calls read an `int`.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), call, at) }).map(drop)
}

/// Sets what can only be set.
///
/// # Errors
/// The call's errno.
pub fn set(fd: impl AsFd, which: Setting, value: u32) -> io::Result<()> {
    let call = match which {
        Setting::Persistent => libc::TUNSETPERSIST,
        Setting::Owner => libc::TUNSETOWNER,
        Setting::Group => libc::TUNSETGROUP,
        Setting::LinkType => libc::TUNSETLINK,
        Setting::Offload => libc::TUNSETOFFLOAD,
    };
    // SAFETY: these calls take the number itself.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), call, c_ulong::from(value)) }).map(drop)
}

/// The network namespace that the interface of a queue is in, which need not be that in which it
/// was made.
///
/// # Errors
/// The call's errno; `ENOTTY` before Linux 5.6.
pub fn network(fd: impl AsFd) -> io::Result<OwnedFd> {
    namespace(fd.as_fd(), libc::TUNGETDEVNETNS)
}

/// The network namespace in which a descriptor of /dev/net/tun was opened.
///
/// # Errors
/// The call's errno.
pub fn opened_in(fd: impl AsFd) -> io::Result<OwnedFd> {
    const SIOCGSKNS: Ioctl = libc::SIOCGSKNS;
    namespace(fd.as_fd(), SIOCGSKNS)
}

fn namespace(fd: BorrowedFd<'_>, call: Ioctl) -> io::Result<OwnedFd> {
    // SAFETY: these calls take no argument.
    let fd = check(unsafe { libc::ioctl(fd.as_raw_fd(), call, 0) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETH_SS_FEATURES: u32 = 4;
const STRING_BYTES: usize = 32;
/// The bytes of one block of 32 features, and where it says which are active.
const BLOCK_BYTES: usize = 16;
const ACTIVE: usize = 8;

/// What the interface of this name does by itself, as `ethtool --show-features` names it, but for
/// what is off.
///
/// # Errors
/// The calls' errno.
pub fn active_features(name: &str) -> io::Result<Vec<String>> {
    let word = |value: u32| value.to_ne_bytes();
    let at = |bytes: &[u8], at: usize| {
        let four = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_ne_bytes(four)
    };
    let mut asked = [word(ETHTOOL_GSSET_INFO), [0; 4]].concat();
    asked.extend((1u64 << ETH_SS_FEATURES).to_ne_bytes());
    asked.extend([0; 4]);
    ethtool(name, &mut asked)?;
    let count = at(&asked, 16).min(4096) as usize;
    let mut names = [word(ETHTOOL_GSTRINGS), word(ETH_SS_FEATURES), [0; 4]].concat();
    names.resize(names.len() + count * STRING_BYTES, 0);
    ethtool(name, &mut names)?;
    let blocks = count.div_ceil(32);
    let size = u32::try_from(blocks).expect("few");
    let mut features = [word(ETHTOOL_GFEATURES), word(size)].concat();
    features.resize(features.len() + blocks * BLOCK_BYTES, 0);
    ethtool(name, &mut features)?;
    let is_active = |bit: &usize| {
        let block = 8 + bit / 32 * BLOCK_BYTES;
        at(&features, block + ACTIVE) & (1 << (bit % 32)) != 0
    };
    let named = |bit: usize| {
        let text = &names[12 + bit * STRING_BYTES..][..STRING_BYTES];
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    };
    Ok((0..count).filter(is_active).map(named).collect())
}

/// Makes one call of ethtool(8), whose answer takes the place of what is asked.
fn ethtool(name: &str, asked: &mut [u8]) -> io::Result<()> {
    let any = socket::open(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    let mut request = Request::new(name)?;
    let at = asked.as_mut_ptr().expose_provenance();
    request.rest[..size_of::<usize>()].copy_from_slice(&at.to_ne_bytes());
    request.call(any.as_fd(), libc::SIOCETHTOOL)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_queue_tells_its_interface() {
        let opened = File::options().read(true).write(true).open("/dev/net/tun");
        let Ok(queue) = opened else {
            return; // Without privileges, or without the driver.
        };
        assert_eq!(attached(&queue).unwrap(), None);
        let name = format!("sfs{}", std::process::id());
        let flags = u16::try_from(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
        if attach(&queue, &name, flags).is_err() {
            return; // Not allowed here.
        }
        let told = attached(&queue).unwrap().unwrap();
        assert_eq!(told.name, name);
        assert_eq!(told.flags & flags, flags);
        set_number(&queue, Number::SendBufferBytes, 70_000).unwrap();
        assert_eq!(number(&queue, Number::SendBufferBytes).unwrap(), 70_000);
        let checksums = || active_features(&name).unwrap();
        let name_of_them = "tx-checksum-ip-generic".to_owned();
        assert!(!checksums().contains(&name_of_them));
        set(&queue, Setting::Offload, 1).unwrap();
        assert!(checksums().contains(&name_of_them));
        let own = std::fs::metadata("/proc/thread-self/ns/net").unwrap();
        let there = rustix::fs::fstat(network(&queue).unwrap()).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::ino(&own), there.st_ino);
    }

    #[test]
    fn patterns_are_no_names() {
        for name in [
            "",
            ".",
            "..",
            "tun%d",
            "0123456789abcdef",
            "a/b",
            "a\0b",
            "a b",
            "a:b",
        ] {
            assert!(Request::new(name).is_err(), "{name:?}");
        }
    }
}
