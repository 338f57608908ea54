//! A ticking timer that ends blocking calls of this thread, so that deadlines are seen.

use std::cell::Cell;
use std::io;
use std::time::Duration;

thread_local! {
    static LONGEST: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// How long one wait of this thread may last while a [`Ticker`] ticks, if that sets a limit.
#[must_use]
pub fn longest() -> Option<Duration> {
    LONGEST.get()
}

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
    /// Starts to tick. A single wait may last as long as `longest` says, if it says so.
    ///
    /// # Errors
    /// `EAGAIN` when the user has too many timers.
    pub fn start(interval: Duration, longest: Option<Duration>) -> io::Result<Self> {
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
        let timer = create(event)?;
        let ticker = Self { timer };
        ticker.every(interval)?;
        LONGEST.set(longest);
        Ok(ticker)
    }

    /// Has it tick in this interval from now on.
    ///
    /// # Errors
    /// None that is known: see timer_settime(2).
    pub fn every(&self, interval: Duration) -> io::Result<()> {
        set(self.timer, interval, interval)
    }
}

/// Ends this process by `SIGKILL` when its time is over, unless it is dropped before. The kernel
/// sees to that, also where this process is stopped or gets no processor.
#[derive(Debug)]
pub struct Deadline {
    timer: libc::timer_t,
}

// SAFETY: a timer id is a plain number for the kernel; timer_delete may be called by any thread.
unsafe impl Send for Deadline {}

impl Deadline {
    /// Begins the time.
    ///
    /// # Errors
    /// `EAGAIN` when the user has too many timers.
    pub fn start(time: Duration) -> io::Result<Self> {
        // SAFETY: an all-zero sigevent is valid.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGKILL;
        let timer = create(event)?;
        let deadline = Self { timer };
        set(timer, time, Duration::ZERO)?;
        Ok(deadline)
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        // SAFETY: the timer exists until here.
        unsafe { libc::timer_delete(self.timer) };
    }
}

/// Makes a timer of the monotonic clock.
fn create(mut event: libc::sigevent) -> io::Result<libc::timer_t> {
    let mut timer = std::ptr::null_mut();
    let clock = libc::CLOCK_MONOTONIC;
    // SAFETY: both structures outlive the call.
    check(unsafe { libc::timer_create(clock, &raw mut event, &raw mut timer) })?;
    Ok(timer)
}

/// Sets a timer that exists: when it ends first, and how long after that each time.
fn set(timer: libc::timer_t, first: Duration, interval: Duration) -> io::Result<()> {
    let timespec = |time: Duration| libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let times = libc::itimerspec {
        it_interval: timespec(interval),
        it_value: timespec(first),
    };
    let none = std::ptr::null_mut();
    // SAFETY: the timer exists; `times` outlives the call.
    check(unsafe { libc::timer_settime(timer, 0, &raw const times, none) })
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: the timer exists until here.
        unsafe { libc::timer_delete(self.timer) };
        LONGEST.set(None);
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
        let ticker = Ticker::start(Duration::from_secs(1000), None).expect("a timer");
        ticker
            .every(Duration::from_millis(1))
            .expect("another interval");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let end = rustix::io::read(&reader, &mut [0u8; 1]);
        assert_eq!(end, Err(rustix::io::Errno::INTR));
    }
}
