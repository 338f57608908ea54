//! Descriptors that tell of events: counters, timers, signals, epolls, watches, groups.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_gettime, timerfd_settime,
};
use sys::epoll::{Params, params, set_params};
use sys::fanotify;

use super::descriptor::{Kind, info};
use crate::calls::clock_time;
use crate::samples::sample::Values;
use crate::samples::timers::{STEP_S, due_s};
use resources::ledger::fdinfo::{EPOLL_EVENTS, GROUP_FLAGS, WATCH_FLAGS};

/// The kinds.
#[rustfmt::skip]
pub(super) const EVENTS: &[Kind] = &[
    Kind::new("event-counter", Values::Made(counts), counter, |own| info(own, &["eventfd-count",
        "eventfd-semaphore", "flags"], ""))
        .about(&["eventfd: eventfd-count", "eventfd: eventfd-semaphore"]),
    Kind::new("timer", Values::Made(timers), timer, read_timer)
        .about(&[
            "timerfd: clockid", "timerfd: ticks", "timerfd: settime flags", "timerfd: it_value",
            "timerfd: it_interval", "TFD_TIMER_ABSTIME", "TFD_TIMER_CANCEL_ON_SET",
        ]),
    Kind::new("signals", Values::These(&[0, 1, 1 << 9 | 1 << 39, !0 << 33, 0x1234_5678]), signals,
        |own| info(own, &["sigmask", "flags"], ""))
        .about(&["signalfd: sigmask"]),
    Kind::new("epoll", Values::Of(&EPOLL_EVENTS), watching, |own| info(own, &["tfd"], " pos:"))
        .about(&["epoll: tfd"]),
    Kind::new("epoll-polling", Values::These(&[0, 1, 2]), polling, read_polling),
    Kind::new("inotify", Values::Of(&WATCH_FLAGS), watch, |own| info(own, &["inotify"], "sdev"))
        .about(&["inotify: inotify wd"]),
    Kind::new("fanotify", Values::Of(&GROUP_FLAGS), group, |own| info(own, &["fanotify"], " ino:"))
        .about(&["fanotify: fanotify flags", "fanotify: fanotify ino"]),
    Kind::new("fanotify-marks", Values::Made(marks), marked, |own| info(own, &["fanotify"], "f_h"))
        .about(&["fanotify: fanotify mnt_id", "fanotify: fanotify sdev"]),
];

/// Counters and semaphores, waiting and not, at both ends of what they hold.
fn counts() -> Vec<u64> {
    (0..16).collect()
}

fn counter(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    const COUNTS: [u64; 4] = [0, 1, 1 << 32, u64::MAX - 1];
    let mut flags = EventfdFlags::CLOEXEC;
    flags.set(EventfdFlags::SEMAPHORE, value & 1 != 0);
    flags.set(EventfdFlags::NONBLOCK, value & 2 != 0);
    let event = eventfd(0, flags)?;
    rustix::io::write(&event, &COUNTS[value as usize / 4 % 4].to_ne_bytes())?;
    Ok(vec![event])
}

const CLOCKS: [TimerfdClockId; 5] = [
    TimerfdClockId::Realtime,
    TimerfdClockId::Monotonic,
    TimerfdClockId::Boottime,
    TimerfdClockId::RealtimeAlarm,
    TimerfdClockId::BoottimeAlarm,
];

/// Each clock, each way to be due: not at all, in a while, at a time, at a time unless the clock is
/// set, and since a while; once and again and again.
fn timers() -> Vec<u64> {
    let ways = |clock| {
        let cancelled = [0, 3].contains(&clock);
        let ways = (0..10).filter(move |way| cancelled || way / 2 != 3);
        ways.map(move |way| way << 8 | clock)
    };
    (0..CLOCKS.len() as u64).flat_map(ways).collect()
}

fn timer(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    let (clock, way) = ((value & 0xff) as usize, value >> 8);
    let timer = timerfd_create(CLOCKS[clock], TimerfdFlags::CLOEXEC)?;
    let (how, repeats) = (way / 2, way % 2);
    let now = clock_time(match clock {
        0 | 3 => ClockId::Realtime,
        1 => ClockId::Monotonic,
        _ => ClockId::Boottime,
    });
    let seconds = |tv_sec: i64| Timespec { tv_sec, tv_nsec: 0 };
    let due = due_s(way) as i64;
    let (flags, due) = match how {
        // One that repeats and is not armed is none.
        0 => (TimerfdTimerFlags::empty(), seconds(0)),
        1 => (TimerfdTimerFlags::empty(), seconds(due)),
        2 => (
            TimerfdTimerFlags::ABSTIME,
            seconds(now.as_secs().cast_signed() + due),
        ),
        3 => {
            let both = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
            (both, seconds(now.as_secs().cast_signed() + due))
        }
        _ => (
            TimerfdTimerFlags::empty(),
            Timespec {
                tv_sec: 0,
                tv_nsec: 1,
            },
        ),
    };
    let time = Itimerspec {
        it_interval: seconds(repeats as i64 * (7 * 3600 + 1)),
        it_value: due,
    };
    timerfd_settime(&timer, flags, &time)?;
    if how == 4 {
        // Its time has come, and nobody reads of it.
        poll(&mut [PollFd::new(&timer, PollFlags::IN)], None)?;
    }
    Ok(vec![timer])
}

fn read_timer(own: BorrowedFd<'_>) -> io::Result<String> {
    let time = timerfd_gettime(own)?;
    let left = time.it_value.tv_sec / STEP_S as i64;
    let every = time.it_interval.tv_sec;
    let told = info(own, &["clockid", "ticks", "settime flags"], "")?;
    Ok(format!("{told} left {left} every {every}"))
}

fn signals(_: &Path, mask: u64) -> io::Result<Vec<OwnedFd>> {
    Ok(vec![sys::signalfd::create(mask, mask % 2 == 1)?])
}

/// An epoll that watches an eventfd, which comes after it.
fn watching(_: &Path, bit: u64) -> io::Result<Vec<OwnedFd>> {
    /// `EPOLLEXCLUSIVE` and beyond are about others.
    const FIRST_FLAG: u64 = 1 << 28;
    let own = epoll::create(CreateFlags::CLOEXEC)?;
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    let bits = if bit >= FIRST_FLAG { bit | 1 } else { bit };
    let data = EventData::new_u64(bit << 32 | 0x1234);
    epoll::add(
        &own,
        &event,
        data,
        EventFlags::from_bits_retain(bits as u32),
    )?;
    Ok(vec![own, event])
}

fn polling(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    let own = epoll::create(CreateFlags::CLOEXEC)?;
    let wanted = [
        Params::new(0, 0, 0),
        Params::new(40, 8, 1),
        Params::new(7, 64, 0),
    ];
    set_params(own.as_fd(), wanted[value as usize % 3])?;
    Ok(vec![own])
}

fn read_polling(own: BorrowedFd<'_>) -> io::Result<String> {
    params(own).map(|params| format!("{params:?}"))
}

/// Watches a directory of its own, in which nothing happens.
fn watch(path: &Path, bit: u64) -> io::Result<Vec<OwnedFd>> {
    /// `IN_EXCL_UNLINK` and beyond are about others.
    const FIRST_FLAG: u64 = 0x100_0000;
    const MODIFY: u64 = 2;
    fs::create_dir_all(path)?;
    let own = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    let bits = if bit >= FIRST_FLAG { bit | MODIFY } else { bit };
    inotify::add_watch(&own, path, WatchFlags::from_bits_retain(bits as u32))?;
    Ok(vec![own])
}

/// `FAN_REPORT_FID`, `FAN_REPORT_DIR_FID`, `FAN_REPORT_NAME`, `FAN_REPORT_TARGET_FID`
const FID: u32 = 0x200;
const DIR_FID: u32 = 0x400;
const NAME: u32 = 0x800;
const TARGET_FID: u32 = 0x1000;
/// `FAN_MODIFY`
const MODIFY: u64 = 2;

/// A group with one flag and those that it needs, that is told of a directory of its own.
fn group(path: &Path, flag: u64) -> io::Result<Vec<OwnedFd>> {
    fs::create_dir_all(path)?;
    let flag = flag as u32;
    let needed = match flag {
        NAME => DIR_FID,
        TARGET_FID => FID | DIR_FID | NAME,
        _ => 0,
    };
    let own = fanotify::init(flag | needed, 0)?;
    fanotify::mark(&own, fanotify::ADD, MODIFY, &text(path)?)?;
    Ok(vec![own])
}

/// Marks of a mount and of a file system in which nobody writes, and masks of events to ignore.
fn marks() -> Vec<u64> {
    vec![0, 0x10, 0x100, 0x20, 0x60, 0x30, 0x200, 0x2000_0000]
}

fn marked(path: &Path, flags: u64) -> io::Result<Vec<OwnedFd>> {
    /// `FAN_MARK_MOUNT`, `FAN_MARK_FILESYSTEM`
    const OF_MANY: u64 = 0x10 | 0x100;
    const ON_DIRECTORIES: u64 = 0x4000_0000;
    fs::create_dir_all(path)?;
    let own = fanotify::init(fanotify::NONBLOCK, 0)?;
    let there = if flags & OF_MANY != 0 {
        Path::new("/sys")
    } else {
        path
    };
    let (flags, mask) = match flags {
        0x2000_0000 => (0, MODIFY | ON_DIRECTORIES),
        _ => (flags as u32, MODIFY),
    };
    fanotify::mark(&own, fanotify::ADD | flags, mask, &text(there)?)?;
    Ok(vec![own])
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}
