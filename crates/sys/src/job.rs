//! Job control: which process group has the terminal (termios(3), setpgid(2)), and what a shell and
//! a terminal tell a job.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{Pid, Signal, kill_current_process_group};

/// Puts a process group in the foreground of the terminal behind `fd`, also from the background.
///
/// # Errors
/// `EPERM` for a group of another session, `ENOTTY` for what is not this session's terminal.
pub fn set_foreground(fd: impl AsFd, group: Pid) -> io::Result<()> {
    Ok(without_stop(|| rustix::termios::tcsetpgrp(fd, group))?)
}

/// Has `change` change a terminal, also from the background, where the kernel would stop this
/// process for it (`SIGTTOU`).
pub fn without_stop<T>(change: impl FnOnce() -> T) -> T {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the call fills the set.
    unsafe { libc::sigemptyset(signals.as_mut_ptr()) };
    // SAFETY: the set was filled, and the signal exists.
    unsafe { libc::sigaddset(signals.as_mut_ptr(), libc::SIGTTOU) };
    // SAFETY: the first set was filled, and the call fills the second one.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), before.as_mut_ptr()) };
    let result = change();
    // SAFETY: the set was filled by the call that blocked.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}

/// The signals that would end or stop this process, noted while [`Told`] lives. `SIGCHLD` and
/// `SIGCONT` are noted, too.
const PASSED_ON: [Signal; 5] = [
    Signal::INT,
    Signal::QUIT,
    Signal::TSTP,
    Signal::HUP,
    Signal::TERM,
];

/// The signals that have come, bit 0 is signal 1.
static CAME: AtomicU64 = AtomicU64::new(0);
/// The eventfd that is told of one.
static TELLS: AtomicI32 = AtomicI32::new(-1);

extern "C" fn note(signal: libc::c_int) {
    CAME.fetch_or(1 << (signal - 1), Ordering::SeqCst);
    let one = 1_u64.to_ne_bytes();
    // SAFETY: the calling thread's own place for the number of an error.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above; what runs outside of this handler finds its error again.
    let before = unsafe { *errno };
    let fd = TELLS.load(Ordering::SeqCst);
    // SAFETY: eight bytes of this function's own; write(2) may be called in a handler.
    unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Signals from a shell and a terminal to this process as a job, noted instead of obeyed, by
/// whichever thread they reach. There is one at a time; dropped, the signals have their default
/// effects.
#[derive(Debug)]
pub struct Told {
    eventfd: OwnedFd,
    /// Those with a handler: one that is ignored stays so.
    handled: Vec<Signal>,
}

impl Told {
    /// Begins to note the signals.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn begin() -> io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        CAME.store(0, Ordering::SeqCst);
        TELLS.store(eventfd.as_raw_fd(), Ordering::SeqCst);
        let mut told = Self {
            eventfd,
            handled: Vec::new(),
        };
        for signal in PASSED_ON {
            if set(signal, handler())? == libc::SIG_IGN {
                set(signal, libc::SIG_IGN)?;
            } else {
                told.handled.push(signal);
            }
        }
        for signal in [Signal::CHILD, Signal::CONT] {
            set(signal, handler())?;
            told.handled.push(signal);
        }
        Ok(told)
    }

    /// Waits until one has come; gives all that have.
    ///
    /// # Errors
    /// None that is to be expected. See poll(2).
    pub fn wait(&self) -> io::Result<Vec<Signal>> {
        let mut asked = [PollFd::new(&self.eventfd, PollFlags::IN)];
        match poll(&mut asked, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut count = [0; 8];
        // Empty where the wait was interrupted.
        let _ = rustix::io::read(&self.eventfd, &mut count);
        let came = CAME.swap(0, Ordering::SeqCst);
        let has = |signal: &Signal| came >> (signal.as_raw() - 1) & 1 == 1;
        Ok(self.handled.iter().copied().filter(has).collect())
    }

    /// Stops this process's group as the terminal does (`SIGTSTP`), until it is continued, which is
    /// not noted. In a group that no shell looks after, nothing stops.
    ///
    /// # Errors
    /// None that is to be expected. See sigaction(2).
    pub fn stop_group(&self) -> io::Result<()> {
        let before = set(Signal::TSTP, libc::SIG_DFL)?;
        let _ = kill_current_process_group(Signal::TSTP);
        set(Signal::TSTP, before)?;
        let continued = 1 << (Signal::CONT.as_raw() - 1);
        CAME.fetch_and(!continued, Ordering::SeqCst);
        Ok(())
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        for signal in &self.handled {
            let _ = set(*signal, libc::SIG_DFL);
        }
        TELLS.store(-1, Ordering::SeqCst);
    }
}

fn handler() -> libc::sighandler_t {
    let handler: extern "C" fn(libc::c_int) = note;
    handler as libc::sighandler_t
}

/// Sets what is done at a signal; what was done before.
fn set(signal: Signal, handler: libc::sighandler_t) -> io::Result<libc::sighandler_t> {
    // SAFETY: structures of numbers, of which zeroes are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: likewise.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the structures are whole; a handler of this file's makes only calls that one may.
    match unsafe { libc::sigaction(signal.as_raw(), &raw const action, &raw mut before) } {
        0 => Ok(before.sa_sigaction),
        _ => Err(io::Error::last_os_error()),
    }
}
