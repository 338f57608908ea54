//! Features of sockets.
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::Need::Sometimes;
use super::{Feature, Outcome, called, netlink, why, yes};

pub(super) static ALL: &[Feature] = &[
    Feature::here(
        "tcp_repair",
        Sometimes,
        "established TCP connections",
        tcp_repair,
    ),
    Feature::here(
        "tcp_half_closed",
        Sometimes,
        "half-closed TCP connections",
        half_closed,
    ),
    Feature::here("tcp_diag", Sometimes, "list TCP sockets", || {
        diag(libc::IPPROTO_TCP)
    }),
    Feature::here("udp_diag", Sometimes, "list UDP sockets", || {
        diag(libc::IPPROTO_UDP)
    }),
    Feature::here("net_diag_raw", Sometimes, "list raw sockets", || {
        diag(libc::IPPROTO_RAW)
    }),
    Feature::here("unix_diag", Sometimes, "list unix sockets", unix_diag),
    Feature::here(
        "sk_ns",
        Sometimes,
        "namespaces of sockets",
        socket_namespace,
    ),
    Feature::here(
        "sk_unix_file",
        Sometimes,
        "files of bound unix sockets",
        unix_file,
    ),
    Feature::here(
        "sockopt_buf_lock",
        Sometimes,
        "locked socket buffers",
        buffer_lock,
    ),
    Feature::here(
        "ipv6_freebind",
        Sometimes,
        "free binding of IPv6",
        ipv6_freebind,
    ),
];

const TCP_REPAIR_ON: libc::c_int = linux_raw_sys::net::TCP_REPAIR_ON as libc::c_int;
const TCP_REPAIR_OFF: libc::c_int = linux_raw_sys::net::TCP_REPAIR_OFF as libc::c_int;

fn diag(protocol: libc::c_int) -> Outcome {
    let protocol = u8::try_from(protocol).expect("protocols of sock_diag fit a byte");
    netlink::diag_inet(protocol)?;
    yes()
}

fn unix_diag() -> Outcome {
    netlink::diag_unix()?;
    yes()
}

fn set(
    socket: &impl AsRawFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
    name: &str,
) -> Result<(), String> {
    let size = size_of_val(&value) as libc::socklen_t;
    let (fd, value) = (socket.as_raw_fd(), (&raw const value).cast());
    // SAFETY: the option's value is a number, whose address and size are given.
    let result = unsafe { libc::setsockopt(fd, level, option, value, size) };
    called(name, result.into()).map(drop)
}

fn repair(socket: &impl AsRawFd, mode: libc::c_int) -> Result<(), String> {
    set(
        socket,
        libc::IPPROTO_TCP,
        libc::TCP_REPAIR,
        mode,
        "TCP_REPAIR",
    )
}

fn open(family: AddressFamily, kind: SocketType) -> Result<std::os::fd::OwnedFd, String> {
    socket_with(family, kind, SocketFlags::CLOEXEC, None)
        .map_err(|error| why("socket", &error.into()))
}

fn tcp_repair() -> Outcome {
    let socket = open(AddressFamily::INET, SocketType::STREAM)?;
    repair(&socket, TCP_REPAIR_ON)?;
    repair(&socket, TCP_REPAIR_OFF)?;
    yes()
}

/// Takes a connection over loopback that one side has closed into repair mode.
fn half_closed() -> Outcome {
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let server = listener.accept()?.0;
        client.shutdown(Shutdown::Write)?;
        Ok((client, server))
    };
    let (client, _server) =
        connect().map_err(|error: io::Error| why("a connection over loopback", &error))?;
    repair(&client, TCP_REPAIR_ON)?;
    repair(&client, TCP_REPAIR_OFF)?;
    yes()
}

fn socket_namespace() -> Outcome {
    let socket = open(AddressFamily::INET, SocketType::DGRAM)?;
    netlink::namespace_of(&socket)?;
    yes()
}

/// Asks for the file of a socket that has none: a kernel that has the call tells that.
fn unix_file() -> Outcome {
    /// `SIOCUNIXFILE` of the kernel's include/uapi/linux/un.h.
    const SIOCUNIXFILE: libc::Ioctl = abi::kernel::SIOCUNIXFILE;
    let socket = open(AddressFamily::UNIX, SocketType::STREAM)?;
    // SAFETY: the request has no argument.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE, 0) };
    let error = io::Error::last_os_error();
    match (result, error.raw_os_error()) {
        (-1, Some(libc::ENOENT)) => yes(),
        _ => Err(why("SIOCUNIXFILE", &error)),
    }
}

fn buffer_lock() -> Outcome {
    const SO_BUF_LOCK: libc::c_int = libc::SO_BUF_LOCK;
    let socket = open(AddressFamily::INET, SocketType::STREAM)?;
    let mut value: libc::c_int = 0;
    let mut size = size_of_val(&value) as libc::socklen_t;
    let (fd, level) = (socket.as_raw_fd(), libc::SOL_SOCKET);
    let value = (&raw mut value).cast();
    // SAFETY: the option's value is a number, whose address and size are given.
    let result = unsafe { libc::getsockopt(fd, level, SO_BUF_LOCK, value, &raw mut size) };
    called("SO_BUF_LOCK", result.into())?;
    yes()
}

fn ipv6_freebind() -> Outcome {
    let socket = open(AddressFamily::INET6, SocketType::STREAM)?;
    set(
        &socket,
        libc::IPPROTO_IPV6,
        libc::IPV6_FREEBIND,
        1,
        "IPV6_FREEBIND",
    )?;
    yes()
}
