//! A task that goes from kernel to kernel: one thread asks its vDSO for the time without end,
//! others sleep, wait for timers, or until a time. Argument: in how many seconds that is.
//!
//! `steps` answers how often each has been through its loop, the least of them; `check` "right" if
//! no clock stepped back or leapt, no sleep was short and the wait did not end early, or what was
//! wrong; `deadline` by how many milliseconds the wait until a time ended late, or "waits".
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use rustix::thread::{ClockId, Timespec, clock_nanosleep_absolute, nanosleep};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, clock_gettime, timerfd_create,
    timerfd_settime,
};

use super::{Control, Failure, not_understood, number};
use crate::calls::{Notify, block_signals, count_signal, counted, create_timer, unblock_signals};

const BILLION: i64 = 1_000_000_000;
const NAP_NS: i64 = 20_000_000;
const ROUNDS_AT_ONCE: u32 = 1000;
/// More than a dump and a restore take; hosts differ by more.
const LEAP_NS: i64 = 60 * BILLION;
const SIGNAL: i32 = 41;

static LOOKS: AtomicU64 = AtomicU64::new(0);
static NAPS: AtomicU64 = AtomicU64::new(0);
static TICKS: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let limit_s = number(arguments, 0, 30)?.cast_signed();
    let (wrong, found) = channel();
    let (late, ended) = channel();
    // No sleep but this thread's is to be interrupted by it.
    block_signals(&[SIGNAL]);
    count_signal(SIGNAL, 0)?;
    create_timer(ClockId::Monotonic as i32, Notify::Process(SIGNAL), 0)?.arm(30, 30)?;
    for body in [look, nap, tick] {
        let wrong = wrong.clone();
        thread::Builder::new().spawn(move || body(&wrong))?;
    }
    let until_ns = now_ns() + limit_s * BILLION;
    thread::Builder::new().spawn(move || {
        let waited = clock_nanosleep_absolute(ClockId::Monotonic, &timespec(until_ns));
        let late_ms = (now_ns() - until_ns).div_euclid(1_000_000);
        let told = waited.map_or_else(|errno| errno.to_string(), |()| late_ms.to_string());
        // The listener lives as long as the process.
        let _ = late.send(told);
    })?;
    unblock_signals(&[SIGNAL]);
    let (mut first_wrong, mut deadline) = (None, "waits".to_owned());
    control.serve(|question| match question.verb.as_str() {
        "steps" => {
            let loops = [&LOOKS, &NAPS, &TICKS].map(|count| count.load(Ordering::Relaxed));
            let signals = counted(SIGNAL).count;
            let least = loops.into_iter().min().unwrap_or(0).min(signals);
            Ok(least.to_string())
        }
        "check" => {
            first_wrong = first_wrong.take().or_else(|| found.try_iter().next());
            Ok(first_wrong.clone().unwrap_or_else(|| "right".to_owned()))
        }
        "deadline" => {
            deadline = ended.try_iter().next().unwrap_or_else(|| deadline.clone());
            Ok(deadline.clone())
        }
        _ => not_understood(question),
    })
}

fn timespec(ns: i64) -> Timespec {
    Timespec {
        tv_sec: ns / BILLION,
        tv_nsec: ns % BILLION,
    }
}

/// By the vDSO.
fn now_ns() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * BILLION + now.tv_nsec
}

fn look(wrong: &Sender<String>) {
    let mut before_ns = now_ns();
    loop {
        for _ in 0..ROUNDS_AT_ONCE {
            let now = now_ns();
            if !(0..LEAP_NS).contains(&(now - before_ns)) {
                let _ = wrong.send(format!("the clock went from {before_ns} to {now}"));
            }
            before_ns = now;
        }
        LOOKS.fetch_add(1, Ordering::Relaxed);
        // An emulator's clock may count what is done.
        let _ = nanosleep(&timespec(NAP_NS));
    }
}

fn nap(wrong: &Sender<String>) {
    loop {
        let before_ns = now_ns();
        let _ = nanosleep(&timespec(NAP_NS));
        let slept_ns = now_ns() - before_ns;
        if slept_ns < NAP_NS {
            let _ = wrong.send(format!("slept for {slept_ns} ns instead of {NAP_NS}"));
        }
        NAPS.fetch_add(1, Ordering::Relaxed);
    }
}

fn tick(wrong: &Sender<String>) {
    let every = Itimerspec {
        it_interval: timespec(NAP_NS),
        it_value: timespec(NAP_NS),
    };
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC);
    let timer = timer.and_then(|timer| {
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &every).map(|_| timer)
    });
    let timer = match timer {
        Ok(timer) => timer,
        Err(errno) => {
            let _ = wrong.send(format!("timerfd: {errno}"));
            return;
        }
    };
    loop {
        let mut bytes = [0; 8];
        if let Err(errno) = rustix::io::read(&timer, &mut bytes) {
            let _ = wrong.send(format!("timerfd: {errno}"));
        }
        TICKS.fetch_add(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}
