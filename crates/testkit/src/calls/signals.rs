//! Signals that are counted, blocked, queued with a value; alternate stacks.
use std::io::{Error, Result};
use std::mem::{MaybeUninit, zeroed};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::check;

const SIGNALS: usize = 65;
static COUNTS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];
static LAST_VALUE: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];
static LAST_CODE: [AtomicI32; SIGNALS] = [const { AtomicI32::new(0) }; SIGNALS];
static LAST_STACK: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let Ok(index) = usize::try_from(signal) else {
        return;
    };
    let here = 0_u8;
    LAST_STACK.store((&raw const here).addr() as u64, Ordering::SeqCst);
    // SAFETY: the kernel hands a handler with SA_SIGINFO a valid siginfo.
    let code = unsafe { (*info).si_code };
    // SAFETY: likewise.
    let info = unsafe { &*info };
    // SAFETY: reading the value is reading plain bytes whatever the code.
    let value = unsafe { info.si_value() };
    LAST_CODE[index].store(code, Ordering::SeqCst);
    LAST_VALUE[index].store(value.sival_ptr.addr() as u64, Ordering::SeqCst);
    COUNTS[index].fetch_add(1, Ordering::SeqCst);
}

/// Handles `signal` by counting it, with further `flags` of sigaction(2) such as SA_ONSTACK.
///
/// # Errors
/// As sigaction(2).
pub fn count_signal(signal: i32, flags: i32) -> Result<()> {
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = count;
    action.sa_sigaction = handler as usize;
    action.sa_flags = flags | libc::SA_SIGINFO;
    // SAFETY: the handler only stores into atomics, which is safe at any instant.
    check(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }.into()).map(drop)
}

/// Ignores `signal`. sigaction(2).
///
/// # Errors
/// As sigaction(2).
pub fn ignore_signal(signal: i32) -> Result<()> {
    // SAFETY: ignoring runs no code.
    let before = unsafe { libc::signal(signal, libc::SIG_IGN) };
    if before == libc::SIG_ERR {
        Err(Error::last_os_error())
    } else {
        Ok(())
    }
}

/// What arrived of a signal that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalCount {
    /// How often it was handled.
    pub count: u64,
    /// The value of the last.
    pub last_value: u64,
    /// The si_code of the last.
    pub last_code: i32,
}

/// Tells what arrived of `signal`.
///
/// # Panics
/// When there is no such signal.
pub fn counted(signal: i32) -> SignalCount {
    let index = usize::try_from(signal).expect("signals are positive");
    SignalCount {
        count: COUNTS[index].load(Ordering::SeqCst),
        last_value: LAST_VALUE[index].load(Ordering::SeqCst),
        last_code: LAST_CODE[index].load(Ordering::SeqCst),
    }
}

/// An address on the stack that the last counted signal was handled on.
pub fn last_handler_stack() -> u64 {
    LAST_STACK.load(Ordering::SeqCst)
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the whole set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised just above.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: `set` is a valid set.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// Blocks `signals` for this thread. pthread_sigmask(3).
pub fn block_signals(signals: &[i32]) {
    let set = signal_set(signals);
    // SAFETY: a valid set; blocking touches no memory.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
}

/// Unblocks `signals` for this thread. pthread_sigmask(3).
pub fn unblock_signals(signals: &[i32]) {
    let set = signal_set(signals);
    // SAFETY: a valid set; handlers that run only store into atomics.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, ptr::null_mut()) };
}

/// The kernel's siginfo of a queued signal, as far as it is used.
#[repr(C)]
struct QueuedInfo {
    signal: i32,
    errno: i32,
    code: i32,
    pad: i32,
    pid: i32,
    uid: u32,
    value: u64,
    rest: [u64; 12],
}

/// Queues `signal` with `value` to this process, or to its thread `tid` alone.
/// rt_sigqueueinfo(2), rt_tgsigqueueinfo(2).
///
/// # Errors
/// As those.
pub fn queue_signal(tid: Option<u32>, signal: i32, value: u64) -> Result<()> {
    let pid = std::process::id();
    let info = QueuedInfo {
        signal,
        errno: 0,
        code: libc::SI_QUEUE,
        pad: 0,
        pid: pid.cast_signed(),
        uid: 0,
        value,
        rest: [0; 12],
    };
    let info = &raw const info;
    let answer = match tid {
        // SAFETY: `info` is a whole siginfo of 128 bytes, live for the call.
        Some(tid) => unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, info) },
        // SAFETY: likewise.
        None => unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, pid, signal, info) },
    };
    check(answer).map(drop)
}

/// Waits for `signal`, which this thread blocks from here on. sigtimedwait(2).
///
/// # Errors
/// `EAGAIN` after `timeout_ms`; `EINTR`.
pub fn signal_within(signal: i32, timeout_ms: u64) -> Result<()> {
    block_signals(&[signal]);
    let set = signal_set(&[signal]);
    let limit = libc::timespec {
        tv_sec: (timeout_ms / 1000).cast_signed(),
        tv_nsec: (timeout_ms % 1000 * 1_000_000).cast_signed(),
    };
    // SAFETY: two live values of the right types, and no place for more about the signal.
    let got = unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const limit) };
    check(got.into()).map(drop)
}

/// Takes one of the pending `signals` off the queue, lowest first: number, si_code and value.
/// sigtimedwait(2).
pub fn take_signal(signals: &[i32]) -> Option<(i32, i32, u64)> {
    let set = signal_set(signals);
    // SAFETY: all zeros is a valid siginfo.
    let mut info: libc::siginfo_t = unsafe { zeroed() };
    let at_once = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: three live values of the right types.
    let signal = unsafe { libc::sigtimedwait(&raw const set, &raw mut info, &raw const at_once) };
    if signal == -1 {
        return None;
    }
    // SAFETY: reading the value is reading plain bytes, zero where the kernel wrote none.
    let value = unsafe { info.si_value() };
    Some((signal, info.si_code, value.sival_ptr.addr() as u64))
}

/// Waits until `signal`, which is blocked, comes, and takes it. sigwaitinfo(2).
///
/// # Errors
/// As sigwaitinfo(2).
pub fn wait_for_signal(signal: i32) -> Result<()> {
    let set = signal_set(&[signal]);
    // SAFETY: a valid set, and nowhere to put what came.
    check(unsafe { libc::sigwaitinfo(&raw const set, ptr::null_mut()) }.into()).map(drop)
}

/// Gives this thread an alternate signal stack of `bytes`, for good; its address.
/// sigaltstack(2).
///
/// # Errors
/// As sigaltstack(2).
pub fn alternate_stack(bytes: usize) -> Result<u64> {
    let memory = Box::leak(vec![0_u8; bytes].into_boxed_slice());
    let stack = libc::stack_t {
        ss_sp: memory.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: bytes,
    };
    // SAFETY: the memory was leaked: it is this stack's for ever.
    check(unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) }.into())?;
    Ok(stack.ss_sp.addr() as u64)
}

/// The alternate signal stack of this thread: address, length in bytes, flags. sigaltstack(2).
///
/// # Errors
/// As sigaltstack(2).
pub fn alternate_stack_now() -> Result<(u64, usize, i32)> {
    // SAFETY: all zeros is a valid stack_t.
    let mut stack: libc::stack_t = unsafe { zeroed() };
    // SAFETY: `stack` is live for the call.
    check(unsafe { libc::sigaltstack(ptr::null(), &raw mut stack) }.into())?;
    Ok((stack.ss_sp.addr() as u64, stack.ss_size, stack.ss_flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_come_with_their_values() {
        let signal = libc::SIGRTMIN() + 3;
        block_signals(&[signal]);
        let tid = rustix::thread::gettid().as_raw_pid().cast_unsigned();
        queue_signal(Some(tid), signal, 41).unwrap();
        queue_signal(Some(tid), signal, 42).unwrap();
        assert_eq!(take_signal(&[signal]), Some((signal, libc::SI_QUEUE, 41)));
        assert_eq!(take_signal(&[signal]), Some((signal, libc::SI_QUEUE, 42)));
        assert_eq!(take_signal(&[signal]), None);
    }
}
