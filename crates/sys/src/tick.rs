//! A ticking timer that ends blocking calls of this thread, so that deadlines are seen.

use std::io;
use std::time::Duration;

/// While it lives, the calling thread gets `SIGALRM` every interval; the handler does nothing, but
/// a blocking call ends with `EINTR`.
#[derive(Debug)]
pub struct Ticker {
    timer: libc::timer_t,
}

// SAFETY: a timer id is a plain number for the kernel; timer_delete may be called by any thread.
unsafe impl Send for Ticker {}

extern "C" fn nothing(_: libc::c_int) {}

impl Ticker {
    /// Starts to tick.
    ///
    /// # Errors
    /// `EAGAIN` when the user has too many timers.
    pub fn start(interval: Duration) -> io::Result<Self> {
        // SAFETY: an all-zero sigaction is valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as *const () as usize;
        // SAFETY: `action` is initialised; the handler touches nothing.
        let set =
            unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
        check(set)?;
        // SAFETY: an all-zero sigevent is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer = std::ptr::null_mut();
        let clock = libc::CLOCK_MONOTONIC;
        // SAFETY: both structures outlive the call.
        check(unsafe { libc::timer_create(clock, &raw mut event, &raw mut timer) })?;
        let ticker = Self { timer };
        ticker.every(interval)?;
        Ok(ticker)
    }

    /// Has it tick in this interval from now on.
    ///
    /// # Errors
    /// None that is known: see timer_settime(2).
    pub fn every(&self, interval: Duration) -> io::Result<()> {
        let every = libc::timespec {
            tv_sec: i64::try_from(interval.as_secs()).expect("a short interval"),
            tv_nsec: i64::from(interval.subsec_nanos()),
        };
        let times = libc::itimerspec {
            it_interval: every,
            it_value: every,
        };
        let none = std::ptr::null_mut();
        // SAFETY: the timer exists; `times` outlives the call.
        check(unsafe { libc::timer_settime(self.timer, 0, &raw const times, none) })
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: the timer exists until here.
        unsafe { libc::timer_delete(self.timer) };
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocking_call_ends() {
        let ticker = Ticker::start(Duration::from_secs(1000)).expect("a timer");
        ticker
            .every(Duration::from_millis(1))
            .expect("another interval");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let end = rustix::io::read(&reader, &mut [0u8; 1]);
        assert_eq!(end, Err(rustix::io::Errno::INTR));
    }
}
