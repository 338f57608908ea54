//! A helper process that sets socket options when this process dies without having done so.
//!
//! Reading a connection needs it in a mode in which its owner cannot use it. Whoever is killed in
//! that moment cannot switch it off any more; the watchdog, which waits for nothing else, can.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::fork::close_all_but;
use crate::signal::SignalBlock;
use crate::socket::Along;

/// An option to be set on a socket.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The socket.
    pub socket: BorrowedFd<'a>,
    /// `SOL_SOCKET`, …
    pub level: i32,
    /// The option.
    pub name: i32,
    /// Its value.
    pub value: i32,
}

/// A process that waits for this one to die; it is gone when this is dropped.
#[derive(Debug)]
pub struct Watchdog {
    pub(crate) pid: libc::pid_t,
    /// Written to by [`Watchdog::tell`]; ends when this process does.
    alive: OwnedFd,
}

/// What a watchdog is told: that all is well.
pub(crate) const DISMISSED: u8 = 1;

impl Watchdog {
    /// Starts it with the settings that it is to make, in their order. It holds copies of these
    /// sockets and of no other descriptor.
    ///
    /// # Errors
    /// The calls' errno.
    pub fn start(settings: &[Setting<'_>]) -> io::Result<Self> {
        let sockets = settings.iter().map(|setting| setting.socket.as_raw_fd());
        // SAFETY: it makes nothing but system calls, on memory that was prepared before.
        unsafe { Self::with(sockets.collect(), |end| guard(end, settings)) }
    }

    /// Makes a copy of this process that blocks all signals, closes all descriptors but `kept` and
    /// the one where it is told something, lives its `life` with that and ends. Its end sends no
    /// signal.
    ///
    /// # Errors
    /// The calls' errno.
    ///
    /// # Safety
    /// 1. `life` makes nothing but system calls, on memory that is there already: in the copy,
    ///    locks of other threads stay locked.
    pub(crate) unsafe fn with(kept: Vec<RawFd>, life: impl FnOnce(RawFd)) -> io::Result<Self> {
        let (end, alive) = pipe_with(PipeFlags::CLOEXEC)?;
        let end_fd = end.as_raw_fd();
        let mut kept = kept;
        kept.push(end_fd);
        kept.sort_unstable();
        kept.dedup();
        let blocked = SignalBlock::all();
        // SAFETY: a copy of this process with no signal at its end, which makes nothing but system
        // calls (condition 1).
        let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        if pid == 0 {
            close_all_but(&kept);
            life(end_fd);
            loop {
                // SAFETY: does not return.
                unsafe { libc::syscall(libc::SYS_exit_group, 0) };
            }
        }
        let failure = io::Error::last_os_error();
        drop(blocked);
        match libc::pid_t::try_from(pid) {
            Ok(pid) if pid > 0 => Ok(Self { pid, alive }),
            _ => Err(failure),
        }
    }

    /// Tells it something. Where it is gone, nothing can be told.
    pub(crate) fn tell(&self, what: u8) {
        let _ = rustix::io::write(&self.alive, &[what]);
    }
}

/// The watchdog's life, with all signals blocked.
fn guard(end: RawFd, settings: &[Setting<'_>]) {
    let mut byte = 0u8;
    // SAFETY: reads one byte into one byte.
    let read = unsafe { libc::syscall(libc::SYS_read, end, &raw mut byte, 1) };
    if read == 0 {
        for setting in settings {
            let (socket, value) = (setting.socket.as_raw_fd(), &raw const setting.value);
            let (level, name) = (setting.level, setting.name);
            // SAFETY: the kernel reads the 4 bytes of the value.
            unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, name, value, 4) };
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.tell(DISMISSED);
        wait(self.pid);
    }
}

/// Runs `f` in a process of its own and gives what it returned: `f` ends what it has begun even
/// when this process is killed meanwhile.
///
/// # Errors
/// The calls' errno; `EPIPE` when the process died early.
pub fn apart(f: impl FnOnce() -> Vec<u8>) -> io::Result<Vec<u8>> {
    let (end, result) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the C library makes its memory usable in the copy; what else `f` may use belongs to
    // the calling thread.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        // Never dropped: this copy ends first.
        let _blocked = SignalBlock::all();
        let bytes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
        if let Ok(bytes) = &bytes {
            let mut rest = bytes.as_slice();
            while let Ok(written) = rustix::io::write(&result, rest) {
                rest = &rest[written..];
                if rest.is_empty() {
                    break;
                }
            }
        }
        // SAFETY: ends this copy without running anything that belongs to the original.
        unsafe { libc::_exit(i32::from(bytes.is_err())) };
    }
    drop(result);
    let mut bytes = Vec::new();
    let read = io::Read::read_to_end(&mut std::fs::File::from(end), &mut bytes);
    let status = wait(pid);
    read?;
    if status != 0 {
        return Err(io::Error::from_raw_os_error(libc::EPIPE));
    }
    Ok(bytes)
}

/// Runs `f` in a process of its own, as [`apart`] does, and gives the file that it made.
///
/// # Errors
/// That of `f`, or those of the calls.
pub fn apart_with_file(f: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let (here, there) = crate::socket::pair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0)?;
    let failure = apart(|| {
        let sent = f().and_then(|file| {
            let rights = [file.as_fd()];
            let along = Along {
                rights: &rights,
                ..Along::default()
            };
            crate::socket::send(&there, &[0], along, 0)
        });
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        sent.map_or_else(|error| errno(error).to_ne_bytes().to_vec(), |_| Vec::new())
    })?;
    if let Ok(errno) = <[u8; 4]>::try_from(failure) {
        return Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)));
    }
    let received = crate::socket::receive(&here, &mut [0], libc::MSG_DONTWAIT)?;
    let file = received.rights.into_iter().next();
    file.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
}

/// Waits for a child to end and gives its status.
pub(crate) fn wait(pid: libc::pid_t) -> libc::c_int {
    let mut status = -1;
    loop {
        // SAFETY: waits for our own child and writes one int.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
        let interrupted = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if waited >= 0 || !interrupted {
            return status;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket;

    const PRIORITY: i32 = libc::SO_PRIORITY;

    fn setting(socket: &OwnedFd) -> Setting<'_> {
        Setting {
            socket: socket.as_fd(),
            level: libc::SOL_SOCKET,
            name: PRIORITY,
            value: 5,
        }
    }

    #[test]
    fn nothing_is_set_when_all_goes_well() {
        let socket = socket::open(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        drop(Watchdog::start(&[setting(&socket)]).unwrap());
        assert_eq!(
            socket::number(&socket, libc::SOL_SOCKET, PRIORITY).unwrap(),
            0
        );
    }

    #[test]
    fn options_are_set_when_the_process_is_gone() {
        let socket = socket::open(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        let mut watchdog = Watchdog::start(&[setting(&socket)]).unwrap();
        // To the watchdog, the other end of its pipe closing is this process's death.
        let (_, other) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        watchdog.alive = other;
        assert_eq!(wait(watchdog.pid), 0);
        assert_eq!(
            socket::number(&socket, libc::SOL_SOCKET, PRIORITY).unwrap(),
            5
        );
    }

    #[test]
    fn what_runs_apart_gives_its_result() {
        let mine = std::process::id();
        let bytes = apart(|| std::process::id().to_ne_bytes().to_vec()).unwrap();
        assert_ne!(bytes, mine.to_ne_bytes());
        assert_eq!(apart(|| vec![7; 200_000]).unwrap(), vec![7; 200_000]);
    }
}
