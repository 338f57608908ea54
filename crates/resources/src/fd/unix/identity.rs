//! Calls in the name of another process, where the kernel notes who makes them.
//!
//! - What: who made a unix socket's peer
//! - Kept: process, user, group and supplementary groups (`SO_PEERCRED`, `SO_PEERGROUPS`).
//! - Refused: "its peer has a security label that is not ours" (`SO_PEERSEC`).
//! - CRIU 4.2: does not look at supplementary groups and labels.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::socket::Credentials;

use super::{AF_UNIX, STREAM};
use crate::fd::Open;
use crate::{Error, Result};

/// How long is waited for a number that somebody has who ends, as a restore that was killed.
const PATIENCE: Duration = Duration::from_millis(250);

/// Makes a call in the name of `who` ([`sys::identity`]); where that cannot be, in our own: the
/// number is somebody else's, or we may not.
///
/// # Errors
/// The call's errno.
pub fn act_as<T>(
    who: Credentials,
    named: impl Fn() -> io::Result<T>,
    plain: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let error = match named() {
            Err(error) => error,
            done => return done,
        };
        match Errno::from_io_error(&error) {
            Some(Errno::EXIST) if sys::ending::is_ending(who.pid) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Some(Errno::EXIST | Errno::PERM | Errno::INVAL | Errno::NOSYS) => {
                log::info!("a unix socket is not told of {who:?}: {error}");
                return plain();
            }
            _ => return Err(error),
        }
    }
}

/// The supplementary groups of who made the other end.
///
/// # Errors
/// The call's errno.
pub fn groups_of(own: BorrowedFd<'_>) -> Result<Vec<u32>> {
    match sys::socket::peer_groups(own) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODATA) => Ok(Vec::new()),
        groups => {
            groups.map_err(|error| Error::kernel("ask a unix socket for its peer's groups", error))
        }
    }
}

/// Refuses a socket whose peer has a security label (`SO_PEERSEC`) that is not the one of sockets
/// which we make.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn refuse_label(open: &Open<'_>) -> Result<()> {
    const SO_PEERSEC: i32 = libc::SO_PEERSEC;
    const LABEL_BYTES: usize = 4096;
    static OURS: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let label = |own: BorrowedFd<'_>| sys::socket::option(own, 1, SO_PEERSEC, LABEL_BYTES).ok();
    let ours = || {
        let (left, _right) = sys::socket::pair(AF_UNIX, STREAM, 0).ok()?;
        label(left.as_fd())
    };
    let Some(ours) = OURS.get_or_init(ours) else {
        return Ok(());
    };
    if label(open.own()?).is_some_and(|label| label != *ours) {
        return Err(open.unsupported("its peer has a security label that is not ours", None));
    }
    Ok(())
}
