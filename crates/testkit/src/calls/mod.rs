//! Calls that only test subjects make, to get into the states that are to be saved: mappings of
//! all kinds, signals with values, timers.
//!
//! Each is safe because what it touches is only ever touched atomically and bounds-checked, or
//! is never given back.
pub mod aio;
mod arena;
pub mod attributes;
pub mod callers;
pub mod clone;
pub mod filters;
pub mod guest;
pub mod isolated;
mod mapping;
pub mod placed;
pub mod puppet;
mod ring;
pub mod rom;
mod signals;
mod timers;
pub mod traps;
pub mod vdso;
mod written_code;

use std::ffi::CStr;
use std::io::{Error, Result};
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;

use rustix::process::{PidfdFlags, pidfd_open};
use sys::fork::{ended_child, reap};

pub use arena::{ARENA_START, Arena};
pub use mapping::Mapping;
pub use ring::{
    io_uring, register_buffers, register_number, register_personality, submit_by_number,
};
pub use signals::{
    SignalCount, alternate_stack, alternate_stack_now, block_signals, count_signal, counted,
    ignore_signal, last_handler_stack, queue_signal, signal_within, take_signal, unblock_signals,
    wait_for_signal,
};
pub use timers::{
    Notify, Timer, clock_time, create_timer, interval_timer_left, set_interval_timer,
};
pub use written_code::{WrittenCode, deny_write_exec};

fn check(answer: i64) -> Result<i64> {
    if answer == -1 {
        Err(Error::last_os_error())
    } else {
        Ok(answer)
    }
}

/// Ends the calling thread alone, with this status: what it has on its stack is never given back.
/// Where it is the first one of its process, the others run on without it.
pub fn end_thread(status: i32) -> ! {
    loop {
        // SAFETY: nothing of the thread's is ever touched again, as after an endless wait.
        unsafe { libc::syscall(libc::SYS_exit, status) };
    }
}

/// Waits with select(2) until `file` can be read; false after `timeout_ms`.
///
/// # Errors
/// As select(2), `EINTR` among them.
///
/// # Panics
/// When the descriptor is too high for select.
pub fn select_readable(file: impl AsFd, timeout_ms: u64) -> Result<bool> {
    let fd = file.as_fd().as_raw_fd();
    assert!(usize::try_from(fd).is_ok_and(|fd| fd < libc::FD_SETSIZE));
    // SAFETY: all zeros is the empty set.
    let mut set: libc::fd_set = unsafe { zeroed() };
    // SAFETY: `fd` is within the set.
    unsafe { libc::FD_SET(fd, &raw mut set) };
    let mut timeout = libc::timeval {
        tv_sec: (timeout_ms / 1000) as i64,
        tv_usec: (timeout_ms % 1000 * 1000) as i64,
    };
    let none = ptr::null_mut();
    // SAFETY: a live set and timeout, null for the other sets.
    let answer = unsafe { libc::select(fd + 1, &raw mut set, none, none, &raw mut timeout) };
    check(answer.into()).map(|ready| ready > 0)
}

/// Sends a signal, or none with 0, to whom a pidfd refers to (`pidfd_send_signal`).
///
/// # Errors
/// `ESRCH` where that is gone.
pub fn signal_by(pidfd: impl AsFd, signal: i32) -> Result<()> {
    let (call, fd) = (libc::SYS_pidfd_send_signal, pidfd.as_fd().as_raw_fd());
    let none = ptr::null::<libc::siginfo_t>();
    // SAFETY: no information is given.
    check(unsafe { libc::syscall(call, fd, signal, none, 0) }).map(drop)
}

/// A pidfd of a child that has ended and was waited for: it refers to nobody any more.
///
/// # Errors
/// As fork(2), pidfd_open(2) and waitpid(2).
pub fn pidfd_of_nobody() -> Result<OwnedFd> {
    let child = ended_child(0)?;
    let opened = pidfd_open(child, PidfdFlags::empty());
    reap(child)?;
    Ok(opened?)
}

/// The lease on the file, as its kind (`F_GETLEASE`: `F_RDLCK`, `F_WRLCK`, `F_UNLCK` for none).
///
/// # Errors
/// `EBADF`.
pub fn leased(file: impl AsFd) -> Result<i32> {
    // SAFETY: the call takes no argument.
    let kind = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GETLEASE) };
    check(kind.into())?;
    Ok(kind)
}

/// Has a tracepoint count only events that fit `filter` (`PERF_EVENT_IOC_SET_FILTER`).
///
/// # Errors
/// As ioctl(2): `EINVAL` for a filter that is not valid for it.
pub fn set_filter(event: impl AsFd, filter: &CStr) -> Result<()> {
    const SET_FILTER: libc::Ioctl = 0x4008_2406;
    // SAFETY: the kernel reads a string, which outlives the call.
    let result = unsafe { libc::ioctl(event.as_fd().as_raw_fd(), SET_FILTER, filter.as_ptr()) };
    check(result.into()).map(drop)
}

/// Runs `work` in a thread that has a new session keyring, without a name and empty.
///
/// # Errors
/// As keyctl(2): `EDQUOT`, `ENOSYS`.
pub fn in_new_session<T: Send>(work: impl FnOnce(i32) -> T + Send) -> Result<T> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    let joined = || {
        let unnamed = ptr::null::<libc::c_char>();
        // SAFETY: without a name the call reads nothing.
        let serial = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, unnamed) };
        Ok(work(i32::try_from(check(serial)?).map_err(Error::other)?))
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, joined)?;
        let ended = thread.join();
        ended.unwrap_or_else(|_| Err(Error::other("the thread with a session keyring panicked")))
    })
}
