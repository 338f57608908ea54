//! Threads that wait for a few milliseconds in a system call, over and over. Argument: how many.
//!
//! `rounds` answers how many waits have ended in all threads, `ended` what a wait returned that it
//! should not have.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::thread::{NanosleepRelativeResult, nanosleep};

use super::{Control, Failure, not_understood, number};
use crate::calls::select_readable;

const MS: u64 = 7;
const STACK_BYTES: usize = 64 << 10;

static ROUNDS: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let (faults, told) = channel();
    for index in 0..number(arguments, 0, 24)? {
        let wait = [in_poll, in_nanosleep, in_select][index as usize % 3];
        let faults = faults.clone();
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        thread.spawn(move || go_round(wait, &faults))?;
    }
    let mut lines: Vec<String> = Vec::new();
    control.serve(|question| match question.verb.as_str() {
        "rounds" => Ok(ROUNDS.load(Ordering::SeqCst).to_string()),
        "ended" => {
            lines.extend(told.try_iter());
            Ok(lines.join("\n"))
        }
        _ => not_understood(question),
    })
}

fn go_round(wait: fn() -> Result<(), Errno>, faults: &Sender<String>) {
    loop {
        let begun = Instant::now();
        let ended = wait();
        let early = begun.elapsed() < Duration::from_millis(MS);
        if ended.is_err() || early {
            // The listener lives as long as the process.
            let _ = faults.send(format!("{ended:?} after {:?}", begun.elapsed()));
        }
        ROUNDS.fetch_add(1, Ordering::SeqCst);
    }
}

fn limit() -> Timespec {
    Timespec {
        tv_sec: 0,
        tv_nsec: (MS * 1_000_000).cast_signed(),
    }
}

fn in_poll() -> Result<(), Errno> {
    let silent = eventfd(0, EventfdFlags::CLOEXEC)?;
    let mut watched = [PollFd::new(&silent, PollFlags::IN)];
    poll(&mut watched, Some(&limit())).map(drop)
}

fn in_nanosleep() -> Result<(), Errno> {
    match nanosleep(&limit()) {
        NanosleepRelativeResult::Ok => Ok(()),
        NanosleepRelativeResult::Interrupted(_) => Err(Errno::INTR),
        NanosleepRelativeResult::Err(errno) => Err(errno),
    }
}

fn in_select() -> Result<(), Errno> {
    let silent = eventfd(0, EventfdFlags::CLOEXEC)?;
    let ready = select_readable(&silent, MS);
    ready
        .map(drop)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
