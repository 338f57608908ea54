//! A process for tests that does nothing but make the system calls it is told to.
//!
//! What is written into [`Puppet`]'s memory stands at the same address in it, so that structures
//! for its calls are prepared outside.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The size of the memory that is shared with a puppet, in bytes.
pub const MEMORY_BYTES: usize = 1 << 20;
/// Where the caller's data begins in it.
const DATA_AT: usize = 4096;
/// How long a puppet waits for its next call, and its owner for a call to return.
const PATIENCE: Duration = Duration::from_secs(60);

const IDLE: u32 = 0;
const CALLING: u32 = 1;
const DONE: u32 = 2;

#[repr(C)]
struct SharedState {
    state: AtomicU32,
    number: AtomicU64,
    args: [AtomicU64; 6],
    result: AtomicI64,
}

/// A child process that makes system calls on demand. Dropping it kills it.
///
/// It starts as a restored task does: a fresh process with all signals blocked and default
/// dispositions, with descriptors, credentials and limits of the caller.
#[derive(Debug)]
pub struct Puppet {
    pid: libc::pid_t,
    shared: NonNull<SharedState>,
}

impl Puppet {
    /// Starts one.
    ///
    /// # Errors
    /// As mmap(2) and clone3(2).
    pub fn start() -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let memory = unsafe { libc::mmap(null, MEMORY_BYTES, prot, flags, -1, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let shared = NonNull::new(memory.cast::<SharedState>()).expect("mmap gives no null");
        let old = block_signals(u64::MAX);
        let pid = clone_fresh();
        if pid == 0 {
            // SAFETY: the mapping was inherited and stays; zeroes are a valid `SharedState`.
            obey(unsafe { shared.as_ref() });
        }
        block_signals(old);
        let puppet = Self {
            pid: libc::pid_t::try_from(pid).expect("a pid"),
            shared,
        };
        if pid < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(puppet)
        }
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The address of the memory that is shared with it, the same here and there.
    #[must_use]
    pub fn data(&self) -> u64 {
        self.shared.as_ptr() as u64 + DATA_AT as u64
    }

    /// Writes into the shared memory, `offset` bytes after [`Puppet::data`].
    ///
    /// # Panics
    /// Past its end.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY_BYTES - DATA_AT, "no room");
        for (index, byte) in bytes.iter().enumerate() {
            let at = self.at(offset + index);
            // SAFETY: inside of the mapping, as checked above.
            unsafe { at.write_volatile(*byte) };
        }
    }

    /// Reads the shared memory, `offset` bytes after [`Puppet::data`].
    ///
    /// # Panics
    /// Past its end.
    #[must_use]
    pub fn read(&self, offset: usize, len_bytes: usize) -> Vec<u8> {
        assert!(offset + len_bytes <= MEMORY_BYTES - DATA_AT, "no room");
        let byte = |index| {
            let at = self.at(offset + index);
            // SAFETY: inside of the mapping, as checked above.
            unsafe { at.read_volatile() }
        };
        (0..len_bytes).map(byte).collect()
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.shared
            .as_ptr()
            .cast::<u8>()
            .wrapping_add(DATA_AT + offset)
    }

    fn shared(&self) -> &SharedState {
        // SAFETY: the mapping lives as long as the puppet; all fields are atomic.
        unsafe { self.shared.as_ref() }
    }

    /// Makes it call and gives the result, a negative errno on failure.
    ///
    /// # Panics
    /// When it dies of the call or the call does not return within a minute.
    pub fn call(&mut self, number: i64, args: &[u64]) -> i64 {
        self.begin(number, args);
        self.finish()
    }

    /// Makes it call without waiting for the call to return.
    pub fn begin(&mut self, number: i64, args: &[u64]) {
        let shared = self.shared();
        shared
            .number
            .store(number.cast_unsigned(), Ordering::Relaxed);
        for (slot, index) in shared.args.iter().zip(0..) {
            let arg = args.get(index).copied().unwrap_or(0);
            slot.store(arg, Ordering::Relaxed);
        }
        shared.state.store(CALLING, Ordering::Release);
        futex_wake(&shared.state);
    }

    /// Waits for the call that was begun and gives its result.
    ///
    /// # Panics
    /// When it dies of the call or the call does not return within a minute.
    pub fn finish(&mut self) -> i64 {
        let shared = self.shared();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = shared.state.load(Ordering::Acquire);
            if state == DONE {
                break;
            }
            futex_wait(&shared.state, state, Duration::from_millis(100));
            assert!(!self.is_gone(), "the puppet died");
            assert!(Instant::now() < deadline, "the call does not return");
        }
        shared.state.store(IDLE, Ordering::Relaxed);
        shared.result.load(Ordering::Relaxed)
    }

    fn is_gone(&self) -> bool {
        let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let id = self.pid.cast_unsigned();
        // SAFETY: `info` outlives the call.
        let got = unsafe { libc::waitid(libc::P_PID, id, info.as_mut_ptr(), flags) };
        // SAFETY: zeroes are a valid siginfo_t, and so is what waitid writes.
        let info = unsafe { info.assume_init() };
        // SAFETY: si_pid is at the same place in every siginfo_t that waitid writes.
        got != 0 || unsafe { info.si_pid() } != 0
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        if self.pid > 0 {
            let mut status = 0;
            // SAFETY: our own child, not yet waited for.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            // SAFETY: `status` outlives the call.
            while unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) } == self.pid
                && !libc::WIFEXITED(status)
                && !libc::WIFSIGNALED(status)
            {}
        }
        // SAFETY: nobody here refers to the mapping any more.
        unsafe { libc::munmap(self.shared.as_ptr().cast(), MEMORY_BYTES) };
    }
}

/// clone3(CLONE_CLEAR_SIGHAND) without the C library's handlers.
fn clone_fresh() -> i64 {
    let mut args = [0u64; 11];
    args[0] = 1 << 32; // flags: CLONE_CLEAR_SIGHAND
    args[4] = libc::SIGCHLD as u64; // exit_signal
    let size = size_of_val(&args);
    // SAFETY: no CLONE_VM: the child has its own copy of everything, and makes only raw calls.
    unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size) }
}

fn block_signals(mask: u64) -> u64 {
    let (set, mut old) = (mask, 0u64);
    let (new, was) = (&raw const set, &raw mut old);
    // SAFETY: both masks outlive the call.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, new, was, 8) };
    old
}

/// The puppet's life.
fn obey(shared: &SharedState) -> ! {
    loop {
        let state = shared.state.load(Ordering::Acquire);
        if state == CALLING {
            let number = shared.number.load(Ordering::Relaxed).cast_signed();
            let args = [0, 1, 2, 3, 4, 5].map(|index| shared.args[index].load(Ordering::Relaxed));
            let result = raw_call(number, args);
            shared.result.store(result, Ordering::Relaxed);
            shared.state.store(DONE, Ordering::Release);
            futex_wake(&shared.state);
        } else if !futex_wait(&shared.state, state, PATIENCE) {
            raw_call(libc::SYS_exit_group, [1, 0, 0, 0, 0, 0]);
        }
    }
}

/// Makes a call that tests choose.
pub(crate) fn raw_call(number: i64, args: [u64; 6]) -> i64 {
    let result: i64;
    // SAFETY: tests choose the calls; the mapping with this loop's state is not theirs to unmap.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            inlateout("rdi") args[0] => _, inlateout("rsi") args[1] => _,
            inlateout("rdx") args[2] => _, inlateout("r10") args[3] => _,
            inlateout("r8") args[4] => _, inlateout("r9") args[5] => _,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

pub(crate) fn futex_wake(word: &AtomicU32) {
    let args = [word.as_ptr() as u64, 1, i32::MAX as u64, 0, 0, 0];
    raw_call(libc::SYS_futex, args);
}

/// Waits until the word is no longer `seen`; `false` when the time is over.
pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, patience: Duration) -> bool {
    let time = [patience.as_secs(), u64::from(patience.subsec_nanos())];
    let time = time.as_ptr() as u64;
    let args = [word.as_ptr() as u64, 0, u64::from(seen), time, 0, 0];
    raw_call(libc::SYS_futex, args) != i64::from(-libc::ETIMEDOUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_puppet_calls_and_sees_its_memory() {
        let mut puppet = Puppet::start().expect("a puppet");
        let pid = i64::from(puppet.pid());
        assert_eq!(puppet.call(libc::SYS_getpid, &[]), pid);
        puppet.write(64, b"/proc/self/comm\0");
        let path = puppet.data() + 64;
        let fd = puppet.call(libc::SYS_open, &[path, 0]);
        assert!(fd >= 0, "{fd}");
        let room = puppet.data() + 128;
        let len = puppet.call(libc::SYS_read, &[fd.cast_unsigned(), room, 16]);
        assert!(len > 0, "{len}");
        let comm = std::fs::read(format!("/proc/{pid}/comm")).expect("it lives");
        assert_eq!(puppet.read(128, comm.len()), comm);
        assert_eq!(puppet.call(libc::SYS_close, &[9999]), -9);
    }

    #[test]
    #[should_panic(expected = "the puppet died")]
    fn a_dead_puppet_is_noticed() {
        let mut puppet = Puppet::start().expect("a puppet");
        puppet.call(libc::SYS_exit_group, &[3]);
    }
}
