//! A threaded program: workers that pass a token around by eventfds, each waiting in an epoll
//! that also watches a timerfd of its own. Argument: the number of workers.
//!
//! `laps` answers how often the token went round, `ticks` how often the timers fired in all,
//! `check` "right" while no token was lost or doubled.
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::{Control, Failure, not_understood, number};
use crate::wait;

const TICK_NS: i64 = 5_000_000;
const FOR_TOKEN: u64 = 1;
const FOR_TICK: u64 = 2;

/// What the workers share.
struct Ring {
    doors: Vec<OwnedFd>,
    passes: AtomicU64,
    ticks: AtomicU64,
    wrong: AtomicU64,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let workers = number(arguments, 0, 4)? as usize;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let doors: Result<Vec<OwnedFd>, _> = (0..workers).map(|_| eventfd(0, flags)).collect();
    let ring = Arc::new(Ring {
        doors: doors?,
        passes: AtomicU64::new(0),
        ticks: AtomicU64::new(0),
        wrong: AtomicU64::new(0),
    });
    for index in 0..workers {
        let ring = Arc::clone(&ring);
        thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || work(&ring, index).expect("the kernel keeps its promises"))?;
    }
    pass(&ring.doors[0])?;
    // Then every worker runs, under its name.
    wait::wait_until("a lap", wait::SOON, || {
        ring.passes.load(Ordering::SeqCst) >= workers as u64
    });
    control.serve(|question| match question.verb.as_str() {
        "laps" => Ok((ring.passes.load(Ordering::SeqCst) / workers as u64).to_string()),
        "ticks" => Ok(ring.ticks.load(Ordering::SeqCst).to_string()),
        "check" => Ok(match ring.wrong.load(Ordering::SeqCst) {
            0 => "right".to_owned(),
            times => format!("wrong {times} times"),
        }),
        _ => not_understood(question),
    })
}

fn pass(door: &OwnedFd) -> rustix::io::Result<()> {
    rustix::io::write(door, &1_u64.to_ne_bytes()).map(drop)
}

fn work(ring: &Ring, index: usize) -> rustix::io::Result<()> {
    let timer = timerfd_create(
        TimerfdClockId::Monotonic,
        TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
    )?;
    let tick = Timespec {
        tv_sec: 0,
        tv_nsec: TICK_NS,
    };
    let every = Itimerspec {
        it_interval: tick,
        it_value: tick,
    };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &every)?;
    let waiter = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let token = epoll::EventData::new_u64(FOR_TOKEN);
    epoll::add(&waiter, &ring.doors[index], token, epoll::EventFlags::IN)?;
    let ticked = epoll::EventData::new_u64(FOR_TICK);
    let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&waiter, &timer, ticked, edge)?;
    let mut events = Vec::with_capacity(4);
    loop {
        match epoll::wait(&waiter, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
        for event in events.drain(..) {
            if event.data.u64() == FOR_TOKEN {
                take_and_pass(ring, index)?;
            } else {
                let mut expired = [0; 8];
                if rustix::io::read(&timer, &mut expired).is_ok() {
                    let times = u64::from_ne_bytes(expired);
                    ring.ticks.fetch_add(times, Ordering::SeqCst);
                }
            }
        }
    }
}

fn take_and_pass(ring: &Ring, index: usize) -> rustix::io::Result<()> {
    let mut tokens = [0; 8];
    rustix::io::read(&ring.doors[index], &mut tokens)?;
    let turn = ring.passes.fetch_add(1, Ordering::SeqCst) as usize % ring.doors.len();
    if u64::from_ne_bytes(tokens) != 1 || turn != index {
        ring.wrong.fetch_add(1, Ordering::SeqCst);
    }
    pass(&ring.doors[(index + 1) % ring.doors.len()])
}
