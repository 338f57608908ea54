//! Addresses given back, whatever a socket's options became after it had got its own: what binding
//! needs is set for it, and the options of the dump afterwards ([`Options::restore_bound`]).
//!
//! [`Options::restore_bound`]: super::options::Options::restore_bound

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::{Nature, inet};
use crate::fd::RestoreContext;

const SOCK_DGRAM: i32 = libc::SOCK_DGRAM;
const SOCK_STREAM: i32 = libc::SOCK_STREAM;
const SOL_IP: i32 = libc::SOL_IP;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_REUSEADDR: i32 = libc::SO_REUSEADDR;
const SO_REUSEPORT: i32 = libc::SO_REUSEPORT;
const IP_FREEBIND: i32 = libc::IP_FREEBIND;
const IP_BIND_ADDRESS_NO_PORT: i32 = libc::IP_BIND_ADDRESS_NO_PORT;

/// Binds `own` to `local`, as it was before. `is_foreign`: the address was none of the host's
/// already at the dump.
///
/// # Errors
/// The calls' errno: `EADDRINUSE` where somebody who is not of the image has the address.
pub fn bind(
    own: BorrowedFd<'_>,
    (local, is_foreign): (&[u8], bool),
    cx: &dyn RestoreContext,
) -> io::Result<()> {
    if inet::parse(local).is_some_and(|local| local.port() == 0) {
        sys::socket::set_number(own, SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)?;
    }
    if is_foreign {
        sys::socket::set_number(own, SOL_IP, IP_FREEBIND, 1)?;
    }
    sharing(own, local, cx, || sys::socket::bind(own, local))
}

/// Has a bound `own` listen.
///
/// # Errors
/// As [`bind`].
pub fn listen(
    own: BorrowedFd<'_>,
    (local, backlog): (&[u8], i32),
    cx: &dyn RestoreContext,
) -> io::Result<()> {
    sharing(own, local, cx, || sys::socket::listen(own, backlog))
}

/// Makes a call that takes the address, where necessary with the others of the image that have it
/// too, and with what ended connections have left of it.
fn sharing(
    own: BorrowedFd<'_>,
    local: &[u8],
    cx: &dyn RestoreContext,
    call: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let first = call();
    if !is_in_use(&first) {
        return first;
    }
    let nature = Nature::of_fd(own).map_err(io::Error::other)?;
    let port = inet::parse(local).map_or(0, |local| local.port());
    let others = cx.opened();
    let mut others = others
        .iter()
        .filter(|other| has_port(**other, nature, port));
    let mut any = false;
    if let Some(first) = others.next() {
        any = true;
        for one in [*first, own].into_iter().chain(others.copied()) {
            sys::socket::set_number(one, SOL_SOCKET, SO_REUSEADDR, 1)?;
            sys::socket::set_number(one, SOL_SOCKET, SO_REUSEPORT, 1)?;
        }
    }
    let second = if any { call() } else { first };
    if !is_in_use(&second) || nature.kind != SOCK_STREAM {
        return second;
    }
    match inet::parse(local).map(super::inet_diag::end_late) {
        Some(Ok(true)) => call(),
        _ => second,
    }
}

fn is_in_use(result: &io::Result<()>) -> bool {
    let errno = result.as_ref().err().and_then(Errno::from_io_error);
    errno == Some(Errno::ADDRINUSE)
}

/// Whether `other` is an internet socket of this type with this port.
fn has_port(other: BorrowedFd<'_>, nature: Nature, port: u16) -> bool {
    let local = || inet::parse(&sys::socket::name(other).ok()?);
    let alike = |found: Nature| {
        let inet = [inet::AF_INET, inet::AF_INET6].contains(&found.family);
        inet && (found.kind, found.protocol) == (nature.kind, nature.protocol)
    };
    Nature::of_fd(other).is_ok_and(alike) && local().is_some_and(|local| local.port() == port)
}

/// Whether an address is none of this host's, so that binding to it takes `IP_FREEBIND`.
#[must_use]
pub fn is_foreign(family: i32, local: &[u8]) -> bool {
    let known = |ip: std::net::IpAddr| ip.is_unspecified() || ip.to_canonical().is_loopback();
    if inet::parse(local).is_none_or(|local| known(local.ip())) {
        return false;
    }
    let Ok(probe) = sys::socket::open(family, SOCK_DGRAM, 0) else {
        return false;
    };
    let mut local = local.to_vec();
    local[2..4].fill(0);
    let errno = sys::socket::bind(probe, &local).err();
    errno.as_ref().and_then(Errno::from_io_error) == Some(Errno::ADDRNOTAVAIL)
}
