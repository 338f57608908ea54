//! Timers of a process: interval timers and POSIX timers, by every clock and of every kind.
//!
//! Each is due in hours. The time left is told in steps of [`STEP_S`], so that it is the same words
//! before and after, and others if it is lost or begins anew.

use std::fs;
use std::io;
use std::time::Duration;

use rustix::time::ClockId;

use crate::calls::{
    Notify, Timer, clock_time, create_timer, interval_timer_left, set_interval_timer,
};

use super::sample::{Sample, Values};

/// The states.
#[rustfmt::skip]
pub(super) const TIMERS: &[Sample] = &[
    Sample::new("interval-timers", Values::These(&[0, 1, 2, 3, 4, 5]), interval, intervals)
        .by_call(36)
        .adding()
        .of_process(),
    Sample::new("timers", Values::Made(kinds), create, timers)
        .about(&["timers"])
        .adding()
        .of_process(),
];

/// The steps in which the time left is told, in seconds.
pub const STEP_S: u64 = 1000;
/// So much of a step is left at first: time that passes makes no difference for so long.
pub const MARGIN_S: u64 = 900;

/// When timer number `number` is due, in seconds from now.
#[must_use]
pub const fn due_s(number: u64) -> u64 {
    (4 + number) * STEP_S + MARGIN_S
}

/// Each of the three, once and again and again.
fn interval(value: u64) -> io::Result<()> {
    const US: u64 = 1_000_000;
    let (which, repeats) = (value % 3, value / 3);
    set_interval_timer(which as i32, due_s(value) * US, repeats * 7 * 3600 * US)
}

fn intervals() -> io::Result<String> {
    const STEP_US: u64 = STEP_S * 1_000_000;
    let timers = (0..3).map(interval_timer_left);
    let told = timers.map(|timer| timer.map(|(left, every)| (left / STEP_US, every)));
    let told: io::Result<Vec<_>> = told.collect();
    told.map(|told| format!("{told:?}"))
}

/// `CLOCK_REALTIME`, of the process's and the thread's processor time, `CLOCK_MONOTONIC`,
/// `CLOCK_BOOTTIME`, the two alarm clocks, `CLOCK_TAI`.
const CLOCKS: [u64; 8] = [0, 2, 3, 1, 7, 8, 9, 11];
/// Processor time, of which a process begins with none.
const OF_PROCESSORS: [u64; 2] = [2, 3];

/// The ways in which a timer has told already, the process or the thread, and nobody has heard.
const UNHEARD: [u64; 2] = [12, 13];

/// Each clock, with each way to tell (nobody, the process, the thread), once or again and again,
/// in a while or at a time, and with what it has told.
fn kinds() -> Vec<u64> {
    let ways = |clock| {
        let goes_on = !OF_PROCESSORS.contains(&clock);
        let unheard = UNHEARD.into_iter().filter(move |_| goes_on);
        (0..12).chain(unheard).map(move |way| way << 8 | clock)
    };
    CLOCKS.into_iter().flat_map(ways).collect()
}

fn create(kind: u64) -> io::Result<()> {
    const MS: u64 = 1000;
    let (clock, way) = (kind & 0xff, kind >> 8);
    let (notify, how) = match UNHEARD.iter().position(|unheard| *unheard == way) {
        Some(at) => (1 + at as u64, 4),
        None => (way % 3, way / 3),
    };
    let tid = rustix::thread::gettid().as_raw_pid().cast_unsigned();
    let signal = 36 + (clock as i32);
    let notify = match notify {
        0 => Notify::Nothing,
        1 => Notify::Process(signal),
        _ => Notify::Thread(signal, tid),
    };
    let timer = create_timer(clock as i32, notify, kind << 16 | 5)?;
    let due_s = due_s(way);
    match how {
        0 => timer.arm(due_s * MS, 0),
        1 => timer.arm(due_s * MS, 3600 * MS),
        // One that is not armed.
        2 => Ok(()),
        4 => {
            timer.arm(1, 3600 * MS)?;
            await_end(timer)
        }
        _ => timer.arm_until(now_ns(clock) + (due_s * 1_000_000_000) as i64),
    }
}

/// Waits until a timer that repeats has told once.
fn await_end(timer: Timer) -> io::Result<()> {
    const SOON: Duration = Duration::from_secs(10);
    let until = clock_time(ClockId::Monotonic) + SOON;
    while timer.left()?.0 <= 1 {
        if clock_time(ClockId::Monotonic) > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// The time by a clock.
fn now_ns(clock: u64) -> i64 {
    const TAI: u64 = 11;
    if OF_PROCESSORS.contains(&clock) {
        return 0;
    }
    let now = clock_time(match clock {
        0 | 8 | TAI => ClockId::Realtime,
        1 => ClockId::Monotonic,
        _ => ClockId::Boottime,
    });
    i64::try_from(now.as_nanos()).expect("it is not that late")
}

/// The list of timers, with what is left and how often each repeats.
fn timers() -> io::Result<String> {
    const STEP_MS: u64 = STEP_S * 1000;
    let text = fs::read_to_string("/proc/self/timers")?;
    let ids = text.lines().filter_map(|line| line.strip_prefix("ID: "));
    let ids = ids.filter_map(|id| id.trim().parse().ok());
    let told = ids.map(|id| {
        let left = Timer(id).left();
        left.map(|(left, every)| (id, left / STEP_MS, every))
    });
    let told: io::Result<Vec<_>> = told.collect();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !is_clock_of_thread(line))
        .collect();
    Ok(format!("{:?} {}", told?, lines.join(" ")))
}

/// Tells whether a line of the list names a thread's clock of processor time: by 0 where the thread
/// has made the timer itself, and by the thread's number after a restore.
fn is_clock_of_thread(line: &str) -> bool {
    const OF_THREAD: i32 = 4;
    let number = line
        .strip_prefix("ClockID: ")
        .and_then(|word| word.trim().parse().ok());
    number.is_some_and(|number: i32| number < 0 && number & OF_THREAD != 0)
}
