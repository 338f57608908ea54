//! Calls in the name of another process, where the kernel notes who makes them.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::socket::Credentials;

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
