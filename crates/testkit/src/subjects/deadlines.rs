//! A thread in each way to wait until a time of a monotonic clock.
//!
//! `begin MS` has them wait until that many milliseconds from now. `results` answers a line for
//! each wait that ended: its name and how many microseconds later than it should, by the clock that
//! it waited for; negative when it was early. `now` answers what CLOCK_MONOTONIC and CLOCK_BOOTTIME
//! say, by system calls and by the vDSO, in nanoseconds.
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use rustix::io::Errno;
use rustix::thread::{ClockId, Timespec, clock_nanosleep_absolute, futex};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, clock_gettime, timerfd_create,
    timerfd_settime,
};

use super::{Control, Failure, not_understood};
use crate::calls::vdso::nanoseconds;
use crate::calls::{Notify, block_signals, create_timer, wait_for_signal};

const BILLION: i64 = 1_000_000_000;
/// Blocked in every thread: the one whose timer sends it waits for it.
const SIGNAL: i32 = 40;

type Wait = fn(i64) -> rustix::io::Result<()>;

const WAITS: &[(&str, ClockId, Wait)] = &[
    ("sleep", ClockId::Monotonic, |until_ns| {
        clock_nanosleep_absolute(ClockId::Monotonic, &timespec(until_ns))
    }),
    ("boottime-sleep", ClockId::Boottime, |until_ns| {
        clock_nanosleep_absolute(ClockId::Boottime, &timespec(until_ns))
    }),
    ("futex", ClockId::Monotonic, in_futex),
    ("timerfd", ClockId::Monotonic, |until_ns| {
        on_timerfd(TimerfdClockId::Monotonic, until_ns)
    }),
    ("boottime-timerfd", ClockId::Boottime, |until_ns| {
        on_timerfd(TimerfdClockId::Boottime, until_ns)
    }),
    ("timer", ClockId::Monotonic, |until_ns| {
        on_timer(ClockId::Monotonic, until_ns)
    }),
    ("boottime-timer", ClockId::Boottime, |until_ns| {
        on_timer(ClockId::Boottime, until_ns)
    }),
];

pub(super) fn run(control: Control, _arguments: &[String]) -> Result<(), Failure> {
    block_signals(&[SIGNAL]);
    let (results, ended) = channel();
    let mut lines: Vec<String> = Vec::new();
    control.serve(|question| match question.verb.as_str() {
        "begin" => {
            let ms = question.words.first().ok_or("in how many milliseconds?")?;
            begin(ms.parse::<i64>()? * 1_000_000, &results)?;
            Ok(String::new())
        }
        "results" => {
            lines.extend(ended.try_iter());
            Ok(lines.join("\n"))
        }
        "now" => {
            let calls = [ClockId::Monotonic, ClockId::Boottime].map(|id| nanoseconds(id as i32));
            let vdso = [ClockId::Monotonic, ClockId::Boottime].map(now_ns);
            let all = calls.into_iter().chain(vdso).map(|ns| ns.to_string());
            Ok(all.collect::<Vec<_>>().join(" "))
        }
        _ => not_understood(question),
    })
}

fn begin(limit_ns: i64, results: &Sender<String>) -> Result<(), Failure> {
    for &(name, clock, wait) in WAITS {
        let results = results.clone();
        let until_ns = now_ns(clock) + limit_ns;
        let body = move || {
            let line = match wait(until_ns) {
                Ok(()) => format!("{name} {}", (now_ns(clock) - until_ns).div_euclid(1000)),
                Err(errno) => format!("{name} {errno}"),
            };
            // The listener lives as long as the process.
            let _ = results.send(line);
        };
        thread::Builder::new().name(name.into()).spawn(body)?;
    }
    Ok(())
}

fn timespec(ns: i64) -> Timespec {
    Timespec {
        tv_sec: ns / BILLION,
        tv_nsec: ns % BILLION,
    }
}

fn now_ns(clock: ClockId) -> i64 {
    let now = clock_gettime(clock);
    now.tv_sec * BILLION + now.tv_nsec
}

fn in_futex(until_ns: i64) -> rustix::io::Result<()> {
    let word = AtomicU32::new(0);
    let all = NonZeroU32::MAX;
    let until = timespec(until_ns);
    match futex::wait_bitset(&word, futex::Flags::PRIVATE, 0, Some(&until), all) {
        Err(Errno::TIMEDOUT) => Ok(()),
        Err(errno) => Err(errno),
        Ok(()) => Err(Errno::AGAIN),
    }
}

fn on_timerfd(clock: TimerfdClockId, until_ns: i64) -> rustix::io::Result<()> {
    let timer = timerfd_create(clock, TimerfdFlags::CLOEXEC)?;
    let once = Itimerspec {
        it_interval: timespec(0),
        it_value: timespec(until_ns),
    };
    timerfd_settime(&timer, TimerfdTimerFlags::ABSTIME, &once)?;
    rustix::io::read(&timer, &mut [0; 8]).map(drop)
}

fn on_timer(clock: ClockId, until_ns: i64) -> rustix::io::Result<()> {
    let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let tid = rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .cast_unsigned();
    let timer = create_timer(clock as i32, Notify::Thread(SIGNAL, tid), 0).map_err(failed)?;
    timer.arm_until(until_ns).map_err(failed)?;
    // Its signal is what is waited for, however often.
    while let Err(error) = wait_for_signal(SIGNAL) {
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(failed(error));
        }
    }
    timer.delete().map_err(failed)
}
