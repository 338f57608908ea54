//! Sockets by raw addresses and raw option values: any family, nothing lost in translation.
//!
//! An address is the bytes of a `sockaddr` (family first), as getsockname(2) gives them; an option
//! is the bytes that getsockopt(2) gives. Both can be stored and given back as they are.

pub mod batch;
mod message;

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

pub(crate) use message::with_message;
pub use message::{Along, Credentials, RIGHTS_MAX, Received, before_last_piece, receive, send};

/// The largest address that a socket can have, in bytes (`sockaddr_storage`).
pub const ADDRESS_BYTES: usize = size_of::<libc::sockaddr_storage>();

/// Makes a socket, close-on-exec (socket(2)).
///
/// # Errors
/// The call's errno.
pub fn open(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes no memory.
    let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
    owned(fd)
}

/// Makes two connected sockets, close-on-exec (socketpair(2)).
///
/// # Errors
/// The call's errno.
pub fn pair(family: i32, kind: i32, protocol: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: `fds` has room for two descriptors.
    let result = unsafe {
        libc::socketpair(
            family,
            kind | libc::SOCK_CLOEXEC,
            protocol,
            fds.as_mut_ptr(),
        )
    };
    check(result)?;
    Ok((owned(fds[0])?, owned(fds[1])?))
}

/// Takes a waiting connection, close-on-exec and without waiting itself (accept4(2)).
///
/// # Errors
/// The call's errno.
pub fn accept(fd: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: null pointers ask for no address.
    let fd = unsafe {
        libc::accept4(
            raw(&fd),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC,
        )
    };
    owned(fd)
}

/// The process that made the other end of a connected unix socket, or listened there, as a
/// descriptor (`SO_PEERPIDFD`, before Linux 6.5 by its pid, which may be another's by then). See
/// unix(7), pidfd_open(2).
///
/// # Errors
/// The call's errno; `ESRCH` when the process is gone.
pub fn peer(fd: impl AsFd) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: i32 = libc::SO_PEERPIDFD;
    match number(&fd, libc::SOL_SOCKET, SO_PEERPIDFD) {
        Ok(pidfd) => owned(pidfd),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let who = rustix::net::sockopt::socket_peercred(&fd)?;
            let flags = rustix::process::PidfdFlags::empty();
            Ok(rustix::process::pidfd_open(who.pid, flags)?)
        }
        Err(error) => Err(error),
    }
}

/// The supplementary groups of who made the other end of a unix socket (`SO_PEERGROUPS`).
///
/// # Errors
/// The call's errno; `ENODATA` where there is nobody.
pub fn peer_groups(fd: impl AsFd) -> io::Result<Vec<u32>> {
    const SOME_BYTES: usize = 256;
    const MOST_BYTES: usize = 65_536 * 4;
    let ask = |bytes| option(&fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, bytes);
    let groups = match ask(SOME_BYTES) {
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => ask(MOST_BYTES)?,
        groups => groups?,
    };
    let groups = groups.as_chunks::<4>().0.iter();
    Ok(groups.map(|group| u32::from_ne_bytes(*group)).collect())
}

/// The socket's own address (getsockname(2)).
///
/// # Errors
/// The call's errno.
pub fn name(fd: impl AsFd) -> io::Result<Vec<u8>> {
    address(raw(&fd), libc::getsockname)
}

/// The peer's address (getpeername(2)).
///
/// # Errors
/// The call's errno.
pub fn peer_name(fd: impl AsFd) -> io::Result<Vec<u8>> {
    address(raw(&fd), libc::getpeername)
}

type AddressCall =
    unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn address(fd: RawFd, call: AddressCall) -> io::Result<Vec<u8>> {
    let mut bytes = [0u8; ADDRESS_BYTES];
    let mut len = socklen(bytes.len());
    // SAFETY: the buffer is `len` bytes long, and the kernel writes bytes only.
    let result = unsafe { call(fd, bytes.as_mut_ptr().cast(), &raw mut len) };
    check(result)?;
    Ok(bytes[..(len as usize).min(ADDRESS_BYTES)].to_vec())
}

/// Gives the socket an address (bind(2)).
///
/// # Errors
/// The call's errno.
pub fn bind(fd: impl AsFd, address: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `address.len()` bytes.
    let result = unsafe { libc::bind(raw(&fd), address.as_ptr().cast(), socklen(address.len())) };
    check(result).map(drop)
}

/// Connects the socket to an address (connect(2)).
///
/// # Errors
/// The call's errno.
pub fn connect(fd: impl AsFd, address: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads `address.len()` bytes.
    let result =
        unsafe { libc::connect(raw(&fd), address.as_ptr().cast(), socklen(address.len())) };
    check(result).map(drop)
}

/// Has the socket listen (listen(2)); on a listening one, changes the backlog.
///
/// # Errors
/// The call's errno.
pub fn listen(fd: impl AsFd, backlog: i32) -> io::Result<()> {
    // SAFETY: takes no memory.
    check(unsafe { libc::listen(raw(&fd), backlog) }).map(drop)
}

/// Shuts one or both directions down (shutdown(2)).
///
/// # Errors
/// The call's errno.
pub fn shutdown(fd: impl AsFd, how: i32) -> io::Result<()> {
    // SAFETY: takes no memory.
    check(unsafe { libc::shutdown(raw(&fd), how) }).map(drop)
}

/// An option's value, at most `max_bytes` of it (getsockopt(2)).
///
/// # Errors
/// The call's errno.
///
/// # Panics
/// For an option whose value holds addresses.
pub fn option(fd: impl AsFd, level: i32, name: i32, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut value = vec![0u8; max_bytes];
    let len_bytes = ask_option(fd, level, name, &mut value)?;
    value.truncate(len_bytes);
    Ok(value)
}

/// Asks about an option with a question in `value`, which becomes the answer; its length in bytes
/// (getsockopt(2)).
///
/// # Errors
/// The call's errno.
///
/// # Panics
/// For an option whose value holds addresses.
pub fn ask_option(fd: impl AsFd, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    assert!(!holds_addresses(level, name), "a plain option");
    let mut len = socklen(value.len());
    // SAFETY: the buffer is `len` bytes long; the options that would have the kernel write
    // elsewhere were refused above.
    let result = unsafe {
        libc::getsockopt(
            raw(&fd),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    check(result)?;
    Ok((len as usize).min(value.len()))
}

/// The value of an option that is a number.
///
/// # Errors
/// The call's errno; `EINVAL` when the value is no number.
pub fn number(fd: impl AsFd, level: i32, name: i32) -> io::Result<i32> {
    let value = option(fd, level, name, 4)?;
    match *value.as_slice() {
        [a, b, c, d] => Ok(i32::from_ne_bytes([a, b, c, d])),
        [one] => Ok(i32::from(one)),
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Sets an option (setsockopt(2)).
///
/// # Errors
/// The call's errno.
///
/// # Panics
/// For an option whose value holds addresses.
pub fn set_option(fd: impl AsFd, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    assert!(!holds_addresses(level, name), "a plain option");
    // SAFETY: the kernel reads `value.len()` bytes; options with pointers were refused above.
    let result = unsafe {
        libc::setsockopt(
            raw(&fd),
            level,
            name,
            value.as_ptr().cast(),
            socklen(value.len()),
        )
    };
    check(result).map(drop)
}

/// Sets an option that is a number.
///
/// # Errors
/// The call's errno.
pub fn set_number(fd: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_option(fd, level, name, &value.to_ne_bytes())
}

/// True if an option's value is or holds an address of memory; those of iptables, arptables and
/// ebtables (from 64, 96 and 128) are none of ours either.
#[must_use]
pub fn holds_addresses(level: i32, name: i32) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_ATTACH_FILTER | libc::SO_ATTACH_REUSEPORT_CBPF
        ),
        libc::IPPROTO_TCP => name == libc::TCP_ZEROCOPY_RECEIVE,
        libc::IPPROTO_IP => matches!(name, 64..=67 | 96..=99 | 128..=131),
        libc::IPPROTO_IPV6 => matches!(name, 64 | 65),
        _ => false,
    }
}

/// The classic filter attached to the socket: 8 bytes an instruction, empty without one.
///
/// # Errors
/// The call's errno; `EACCES` for a filter that cannot be read back.
pub fn filter(fd: impl AsFd) -> io::Result<Vec<u8>> {
    let mut count: libc::socklen_t = 0;
    // SAFETY: a length of 0 asks for the number of instructions only.
    let result = unsafe {
        libc::getsockopt(
            raw(&fd),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            std::ptr::null_mut(),
            &raw mut count,
        )
    };
    check(result)?;
    let mut code = vec![0u8; count as usize * 8];
    if count == 0 {
        return Ok(code);
    }
    // SAFETY: this option counts in instructions, and the buffer has 8 bytes for each.
    let result = unsafe {
        libc::getsockopt(
            raw(&fd),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            code.as_mut_ptr().cast(),
            &raw mut count,
        )
    };
    check(result)?;
    code.truncate(count as usize * 8);
    Ok(code)
}

/// Attaches a classic filter, as [`filter`] gives it.
///
/// # Errors
/// The call's errno; `EINVAL` for code that is no filter.
pub fn attach_filter(fd: impl AsFd, code: &[u8]) -> io::Result<()> {
    attach(&fd, libc::SO_ATTACH_FILTER, code)
}

/// Attaches a classic program that chooses among the sockets that share a port
/// (`SO_ATTACH_REUSEPORT_CBPF`): 8 bytes an instruction.
///
/// # Errors
/// The call's errno; `EINVAL` for code that is no program, and for a socket without such a port.
pub fn attach_chooser(fd: impl AsFd, code: &[u8]) -> io::Result<()> {
    attach(&fd, libc::SO_ATTACH_REUSEPORT_CBPF, code)
}

fn attach(fd: &impl AsFd, name: i32, code: &[u8]) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    if !code.len().is_multiple_of(8) {
        return Err(invalid());
    }
    let mut aligned: Vec<libc::sock_filter> = code
        .chunks_exact(8)
        .map(|word| libc::sock_filter {
            code: u16::from_ne_bytes([word[0], word[1]]),
            jt: word[2],
            jf: word[3],
            k: u32::from_ne_bytes([word[4], word[5], word[6], word[7]]),
        })
        .collect();
    let program = libc::sock_fprog {
        len: u16::try_from(aligned.len()).map_err(|_| invalid())?,
        filter: aligned.as_mut_ptr(),
    };
    // SAFETY: the program points at `len` instructions that live until the call returns.
    let result = unsafe {
        libc::setsockopt(
            raw(fd),
            libc::SOL_SOCKET,
            name,
            (&raw const program).cast(),
            socklen(size_of::<libc::sock_fprog>()),
        )
    };
    check(result).map(drop)
}

/// A question that an ioctl(2) of sockets answers with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// `SIOCINQ`: bytes that can be read (of a datagram socket: of the next datagram).
    Inbound,
    /// `SIOCOUTQ`: bytes sent and not yet taken (unix) or acknowledged (TCP).
    Outbound,
    /// `SIOCOUTQNSD`: bytes of TCP that were never on the wire.
    Unsent,
    /// `SIOCATMARK`: whether the urgent mark is next.
    AtMark,
}

/// Asks a socket for a number.
///
/// # Errors
/// The call's errno.
pub fn count(fd: impl AsFd, what: Count) -> io::Result<i32> {
    let request = match what {
        Count::Inbound => libc::FIONREAD,
        Count::Outbound => libc::TIOCOUTQ,
        Count::Unsent => 0x894b,
        Count::AtMark => 0x8905,
    };
    let mut value: libc::c_int = 0;
    // SAFETY: these requests write one int.
    check(unsafe { libc::ioctl(raw(&fd), request, &raw mut value) })?;
    Ok(value)
}

/// The file that a unix socket is bound to, as an `O_PATH` descriptor (`SIOCUNIXFILE`).
///
/// # Errors
/// The call's errno; `ENOENT` for a socket without a file.
pub fn unix_file(fd: impl AsFd) -> io::Result<OwnedFd> {
    const SIOCUNIXFILE: libc::c_ulong = abi::kernel::SIOCUNIXFILE;
    // SAFETY: takes no memory; gives a new descriptor.
    owned(unsafe { libc::ioctl(raw(&fd), SIOCUNIXFILE, 0) })
}

/// Runs `f` on a thread with a working directory and a root of its own, which it may change
/// (unshare(2), `CLONE_FS`).
///
/// # Errors
/// The call's errno, or that no thread can be made.
///
/// # Panics
/// When `f` does.
pub fn in_own_fs<T: Send>(f: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            // SAFETY: only this new thread's directory, root and umask become its own.
            check(unsafe { libc::unshare(libc::CLONE_FS) })?;
            Ok(f())
        })?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn raw(fd: &impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}

fn socklen(bytes: usize) -> libc::socklen_t {
    libc::socklen_t::try_from(bytes).unwrap_or(libc::socklen_t::MAX)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    check(fd)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a plain option")]
    fn options_with_addresses_are_refused() {
        let socket = open(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        let _ = set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &[0; 16]);
    }

    #[test]
    fn the_other_end_is_found() {
        let (own, other) = pair(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        let told = peer(&own).unwrap();
        let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", raw(&told))).unwrap();
        let line = format!("Pid:\t{}\n", std::process::id());
        assert!(told.contains(&line), "{told}");
        drop(other);
        let nobody = open(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        assert!(peer(&nobody).is_err());
    }

    #[test]
    fn filters_come_back_as_attached() {
        let socket = open(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        assert!(filter(&socket).unwrap().is_empty());
        let code = [6, 0, 0, 0, 0xff, 0xff, 0, 0]; // return 65535
        attach_filter(&socket, &code).unwrap();
        assert_eq!(filter(&socket).unwrap(), code);
    }
}
