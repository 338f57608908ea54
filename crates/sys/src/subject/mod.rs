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
mod mapping;
pub mod placed;
pub mod rom;
mod signals;
mod timers;
pub mod traps;
pub mod vdso;
mod written_code;

use std::io::{Error, Result};
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

pub use arena::{ARENA_START, Arena};
pub use mapping::Mapping;
pub use signals::{
    Counted, alternate_stack, alternate_stack_now, block_signals, count_signal, counted,
    ignore_signal, last_handler_stack, queue_signal, signal_within, take_signal, unblock_signals,
    wait_for_signal,
};
pub use timers::{Notify, Timer, create_timer, interval_timer_left, set_interval_timer};
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

/// Opens an io_uring. io_uring_setup(2).
///
/// # Errors
/// As io_uring_setup(2).
pub fn io_uring() -> Result<OwnedFd> {
    // The kernel's `io_uring_params`, all zeros.
    let mut params = [0_u64; 15];
    let params = params.as_mut_ptr();
    // SAFETY: 120 zeroed bytes are valid parameters, live for the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params) })?;
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
