//! Two threads, each with a timer on its own processor time that it has made itself and that
//! signals it every 5 ms; one of them works, the other one waits.
//!
//! `turn N` has thread N (0 or 1) work, and the other one wait; `ticks` answers how often each was
//! signalled.
use std::hint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::gettid;

use super::{Control, Failure, not_understood, number};
use crate::calls::{Notify, count_signal, counted, create_timer};
use crate::wait;

/// What is signalled to each.
const TICKS: [i32; 2] = [42, 43];
const THREAD_CPUTIME: i32 = 3;
const SA_RESTART: i32 = 0x1000_0000;

/// Whose turn it is.
static TURN: AtomicUsize = AtomicUsize::new(0);
/// How many have made their timers.
static READY: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    for tick in TICKS {
        count_signal(tick, SA_RESTART)?;
    }
    for index in 0..TICKS.len() {
        thread::spawn(move || work(index).expect("a timer can be made"));
    }
    wait::wait_until("the timers", wait::SOON, || {
        READY.load(Ordering::SeqCst) == TICKS.len() as u64
    });
    control.serve(|question| match question.verb.as_str() {
        "turn" => {
            TURN.store(number(&question.words, 0, 0)? as usize, Ordering::SeqCst);
            Ok("right".to_owned())
        }
        "ticks" => Ok(TICKS.map(|tick| counted(tick).count.to_string()).join(" ")),
        _ => not_understood(question),
    })
}

fn work(index: usize) -> Result<(), Failure> {
    let own = gettid().as_raw_pid().cast_unsigned();
    let timer = create_timer(THREAD_CPUTIME, Notify::Thread(TICKS[index], own), 0)?;
    timer.arm(5, 5)?;
    READY.fetch_add(1, Ordering::SeqCst);
    loop {
        if TURN.load(Ordering::SeqCst) == index {
            hint::spin_loop();
        } else {
            thread::sleep(Duration::from_millis(2));
        }
    }
}
