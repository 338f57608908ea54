//! Signals to single threads, and a thread without signals.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Sends `signal` to thread `tid` of process `pid`. See tgkill(2).
///
/// # Errors
/// `ESRCH` when there is no such thread, `EPERM`, `EINVAL`.
pub fn to_thread(pid: i32, tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes three numbers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// While it lives, the calling thread and what is forked by it get no signals but those that nobody
/// can block. See pthread_sigmask(3).
pub struct SignalBlock {
    before: libc::sigset_t,
    /// It is of one thread.
    _thread: PhantomData<*const ()>,
}

impl SignalBlock {
    /// Blocks all of them.
    #[must_use]
    pub fn all() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: fills the set in.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: reads the filled set, fills in the other.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        Self {
            // SAFETY: the call fails for no mask, and has filled it in.
            before: unsafe { before.assume_init() },
            _thread: PhantomData,
        }
    }
}

impl Drop for SignalBlock {
    fn drop(&mut self) {
        let before = &raw const self.before;
        // SAFETY: reads the set that was filled in when this was made.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_reached_by_both_its_numbers() {
        let own = std::process::id().cast_signed();
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        to_thread(own, tid, 0).expect("it is this one");
        let error = to_thread(own, i32::MAX, 0).expect_err("nobody");
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
