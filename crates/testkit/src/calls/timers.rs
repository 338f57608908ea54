//! Interval timers and POSIX timers.
use std::io::Result;
use std::mem::zeroed;
use std::ptr;
use std::time::Duration;

use rustix::time::ClockId;

use super::check;

fn interval_timer(call: i64, which: i32, new: Option<(u64, u64)>) -> Result<(u64, u64)> {
    let split = |us: u64| libc::timeval {
        tv_sec: (us / 1_000_000) as i64,
        tv_usec: (us % 1_000_000) as i64,
    };
    let join = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    let (value, interval) = new.unwrap_or_default();
    let mut timer = libc::itimerval {
        it_value: split(value),
        it_interval: split(interval),
    };
    // SAFETY: both calls take a timer number and a live itimerval, setitimer a third null.
    check(unsafe { libc::syscall(call, which, &raw mut timer, ptr::null_mut::<u8>()) })?;
    Ok((join(timer.it_value), join(timer.it_interval)))
}

/// Sets interval timer `which` to fire in `value_us`, then each `interval_us`. setitimer(2).
///
/// # Errors
/// As setitimer(2).
pub fn set_interval_timer(which: i32, value_us: u64, interval_us: u64) -> Result<()> {
    interval_timer(libc::SYS_setitimer, which, Some((value_us, interval_us))).map(drop)
}

/// Time left of interval timer `which` and its interval, in microseconds. getitimer(2).
///
/// # Errors
/// As getitimer(2).
pub fn interval_timer_left(which: i32) -> Result<(u64, u64)> {
    interval_timer(libc::SYS_getitimer, which, None)
}

/// How a POSIX timer tells that it fired.
#[derive(Clone, Copy, Debug)]
pub enum Notify {
    /// Not at all.
    Nothing,
    /// By a signal to the process.
    Process(i32),
    /// By a signal to one thread.
    Thread(i32, u32),
}

/// A POSIX timer under the kernel's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer(pub i32);

/// Creates a POSIX timer whose signals carry `value`. timer_create(2).
///
/// # Errors
/// As timer_create(2).
pub fn create_timer(clock: i32, notify: Notify, value: u64) -> Result<Timer> {
    // SAFETY: all zeros is a valid sigevent.
    let mut event: libc::sigevent = unsafe { zeroed() };
    event.sigev_value.sival_ptr = ptr::without_provenance_mut(value as usize);
    match notify {
        Notify::Nothing => event.sigev_notify = libc::SIGEV_NONE,
        Notify::Process(signal) => {
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = signal;
        }
        Notify::Thread(signal, tid) => {
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = tid.cast_signed();
        }
    }
    let mut id = 0_i32;
    let (event, there) = (&raw mut event, &raw mut id);
    // SAFETY: a live sigevent and a live int; signals have handlers or are blocked.
    check(unsafe { libc::syscall(libc::SYS_timer_create, clock, event, there) })?;
    Ok(Timer(id))
}

impl Timer {
    /// Arms it to fire in `value_ms`, then each `interval_ms`. timer_settime(2).
    ///
    /// # Errors
    /// As timer_settime(2).
    pub fn arm(self, value_ms: u64, interval_ms: u64) -> Result<()> {
        let split = |ms: u64| libc::timespec {
            tv_sec: (ms / 1000) as i64,
            tv_nsec: (ms % 1000 * 1_000_000) as i64,
        };
        let new = libc::itimerspec {
            it_value: split(value_ms),
            it_interval: split(interval_ms),
        };
        let (new, none) = (&raw const new, ptr::null_mut::<u8>());
        // SAFETY: a live itimerspec, and null for the old one.
        check(unsafe { libc::syscall(libc::SYS_timer_settime, self.0, 0, new, none) }).map(drop)
    }

    /// Arms it to fire once, when its clock says `until_ns`. timer_settime(2).
    ///
    /// # Errors
    /// As timer_settime(2).
    pub fn arm_until(self, until_ns: i64) -> Result<()> {
        const BILLION: i64 = 1_000_000_000;
        // SAFETY: all zeros is a valid itimerspec.
        let mut new: libc::itimerspec = unsafe { zeroed() };
        new.it_value.tv_sec = until_ns / BILLION;
        new.it_value.tv_nsec = until_ns % BILLION;
        let (number, flags) = (self.0, libc::TIMER_ABSTIME);
        let (new, none) = (&raw const new, ptr::null_mut::<u8>());
        // SAFETY: a live itimerspec, and null for the old one.
        check(unsafe { libc::syscall(libc::SYS_timer_settime, number, flags, new, none) }).map(drop)
    }

    /// Time left and interval, in milliseconds. timer_gettime(2).
    ///
    /// # Errors
    /// As timer_gettime(2).
    pub fn left(self) -> Result<(u64, u64)> {
        // SAFETY: all zeros is a valid itimerspec.
        let mut now: libc::itimerspec = unsafe { zeroed() };
        // SAFETY: a live itimerspec.
        check(unsafe { libc::syscall(libc::SYS_timer_gettime, self.0, &raw mut now) })?;
        let join =
            |time: libc::timespec| time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000;
        Ok((join(now.it_value), join(now.it_interval)))
    }

    /// Deletes it. timer_delete(2).
    ///
    /// # Errors
    /// As timer_delete(2).
    pub fn delete(self) -> Result<()> {
        // SAFETY: takes a number.
        check(unsafe { libc::syscall(libc::SYS_timer_delete, self.0) }).map(drop)
    }
}

/// The time by a clock, of the kernel itself: the vDSO reads the processor's counter, which a
/// thread may be denied (`PR_SET_TSC`).
#[must_use]
pub fn clock_time(clock: ClockId) -> Duration {
    let mut time = [0u64; 2];
    // SAFETY: the kernel writes a time to the two words.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock as i32, &raw mut time) };
    assert_eq!(result, 0, "{clock:?} is a clock");
    Duration::new(time[0], time[1] as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_counts_down() {
        let timer = create_timer(libc::CLOCK_MONOTONIC, Notify::Nothing, 0).unwrap();
        timer.arm(1_000_000, 5).unwrap();
        let (left, interval) = timer.left().unwrap();
        assert!((900_000..=1_000_000).contains(&left), "{left}");
        assert_eq!(interval, 5);
        timer.delete().unwrap();
        assert!(timer.left().is_err());
    }
}
