//! Job control: which process group has the terminal (termios(3), setpgid(2)).

use std::io;
use std::os::fd::AsFd;

use rustix::process::Pid;

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

/// From now on `SIGCONT` interrupts a call of this process that waits (`EINTR`).
///
/// # Errors
/// None that is to be expected. See sigaction(2).
pub fn be_interrupted_by_continue() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: a structure of numbers, of which zeroes are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // SAFETY: the structure is whole, and the handler touches nothing.
    match unsafe { libc::sigaction(libc::SIGCONT, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
