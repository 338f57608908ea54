//! Connections that have ended with an error which nobody was told of yet: the kernel shows it only
//! to who takes it, and in its memory.
//!
//! - What: errors of ended TCP connections
//! - Kept: a reset, also of one whose other end had shut down (`ECONNRESET`, `EPIPE`), a refusal
//!   (`ECONNREFUSED`). Needs bpf(2) and the kernel's description of its types.
//! - Refused: "an error that nobody was told of yet waits, and the kernel does not tell which: …";
//!   "an error that nobody was told of yet waits: …"; "messages wait in its error queue"; "it has
//!   keys of signed TCP (TCP_MD5SIG), and neither listens nor is connected".
//! - CRIU 4.2: lost.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::inet::AF_INET6;
use crate::fd::{Open, ready};
use crate::kernel::Kernel;
use crate::{Error, Result};

const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_LINGER: i32 = libc::SO_LINGER;
/// On, and for no time: closing resets.
const RESETS: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];
const SHUT_WR: i32 = libc::SHUT_WR;

const RESET: i32 = Errno::CONNRESET.raw_os_error();
const PIPE: i32 = Errno::PIPE.raw_os_error();
const REFUSED: i32 = Errno::CONNREFUSED.raw_os_error();

/// True for an error with which [`fail`] can end a connection.
pub fn is_made(error: i32) -> bool {
    [RESET, PIPE, REFUSED].contains(&error)
}

/// The error that a closed socket has not told of; 0 for none.
///
/// # Errors
/// [`Error::Unsupported`] for one that [`fail`] cannot make, or a call's errno.
pub fn error(open: &Open<'_>, has_ended: bool) -> Result<i32> {
    let told = ready::events(open.own()?, PollFlags::empty())
        .map_err(|error| Error::kernel(format!("poll {}", open.place()), error))?;
    if !told.contains(PollFlags::ERR) {
        return Ok(0);
    }
    let (error, queued) = match look(open.own()?) {
        Ok(found) => found,
        Err(why) => {
            let why = format!(
                "an error that nobody was told of yet waits, and the kernel does not tell which: \
                 {why}"
            );
            return Err(open.unsupported(&why, None));
        }
    };
    if queued != 0 {
        return Err(open.unsupported("messages wait in its error queue", None));
    }
    if error != 0 && !(has_ended && is_made(error)) {
        let name = Errno::from_raw_os_error(error);
        let why = format!("an error that nobody was told of yet waits: {name}");
        return Err(open.unsupported(&why, None));
    }
    Ok(error)
}

/// A socket's error, and how many messages are in its error queue.
fn look(own: BorrowedFd<'_>) -> std::result::Result<(i32, u32), String> {
    let kernel = Kernel::get().map_err(str::to_owned)?;
    let read = || {
        let sock = kernel.socket(own)?;
        let error = kernel.half_of("sock", "sk_err", sock)?.cast_signed();
        let queued = kernel.half_of("sock", "sk_error_queue.qlen", sock)?;
        io::Result::Ok((error, queued))
    };
    read().map_err(|error| error.to_string())
}

/// Refuses a closed socket with keys of signed TCP, which sock_diag(7) does not tell of. Where the
/// kernel may not be looked into they are not seen.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn refuse_signed(open: &Open<'_>) -> Result<()> {
    let Ok(kernel) = Kernel::get() else {
        return Ok(());
    };
    let own = open.own()?;
    let keys = kernel
        .socket(own)
        .and_then(|sock| kernel.word_of("tcp_sock", "md5sig_info", sock));
    if keys.is_ok_and(|keys| keys != 0) {
        let why = "it has keys of signed TCP (TCP_MD5SIG), and neither listens nor is connected";
        return Err(open.unsupported(why, None));
    }
    Ok(())
}

/// Has a fresh socket end a connection with this error: one to this host itself, for a moment.
///
/// # Errors
/// The calls' errno.
pub fn fail(own: BorrowedFd<'_>, family: i32, error: i32) -> io::Result<()> {
    let ip = match family {
        AF_INET6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
        _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let listener = TcpListener::bind(SocketAddr::new(ip, 0))?;
    let to = sys::socket::name(&listener)?;
    if error == REFUSED {
        drop(listener);
        return refuse(own, &to);
    }
    sys::socket::connect(own, &to)?;
    let (other, _) = listener.accept()?;
    sys::socket::set_option(&other, SOL_SOCKET, SO_LINGER, &RESETS)?;
    if error == PIPE {
        sys::socket::shutdown(&other, SHUT_WR)?;
    }
    drop(other);
    Ok(())
}

/// Has a socket ask for a connection to where nobody listens, and not be told of the answer.
fn refuse(own: BorrowedFd<'_>, to: &[u8]) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(own)?;
    rustix::io::ioctl_fionbio(own, true)?;
    match sys::socket::connect(own, to) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::INPROGRESS) => {}
        // It was told at once.
        other => other?,
    }
    Ok(rustix::fs::fcntl_setfl(own, flags)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::super::super::socket::testing::World;
    use super::*;
    use crate::testing::alone;

    /// Waits until a socket has an error.
    fn fails(own: impl AsFd) {
        let told = || ready::events(own.as_fd(), PollFlags::empty()).unwrap();
        let fails = || told().contains(PollFlags::ERR);
        testkit::wait::wait_until("an error", Duration::from_secs(30), fails);
    }

    #[test]
    fn a_reset_is_told_after_the_restore() {
        alone!({
            testkit::needs_kernel_memory!();
            for at in ["127.0.0.1:0", "[::1]:0"] {
                let listener = TcpListener::bind(at).unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                client.write_all(b"unread").unwrap();
                // Closed with data unread, it resets the connection.
                drop(listener.accept().unwrap());
                fails(&client);
                let mut world = World::new(vec![client.into()]);
                world.dump().unwrap();
                let [client] = world.restore().unwrap().try_into().unwrap();
                fails(&client);
                let mut client = TcpStream::from(client);
                let error = client.read(&mut [0; 1]).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(RESET), "{at}");
                assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
            }
        });
    }
}
