//! A thread in each of the calls that wait with a time limit, and one in a read that has none.
//! Argument: the limit in milliseconds.
//!
//! `results` answers a line for each call that returned: name, what it returned, and after how
//! many milliseconds.
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, accept, recv, socketpair};
use rustix::thread::{
    ClockId, NanosleepRelativeResult, Timespec, clock_nanosleep_absolute, futex, nanosleep,
};
use rustix::time::clock_gettime;

use super::{Control, Failure, not_understood, number};
use crate::calls::{select_readable, signal_within};

type Wait = fn(u64) -> String;

/// A signal that nobody sends.
const SIGRTMAX: i32 = 64;

const CALLS: &[(&str, Wait)] = &[
    ("nanosleep", in_nanosleep),
    ("until", in_absolute_sleep),
    ("poll", in_poll),
    ("futex", in_futex),
    ("epoll_wait", in_epoll_wait),
    ("select", in_select),
    ("recv", in_recv),
    ("accept", in_accept),
    ("sigtimedwait", in_sigtimedwait),
];

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let limit_ms = number(arguments, 0, 1000)?;
    let (results, returned) = channel();
    for &(name, wait) in CALLS {
        start(name, results.clone(), move || wait(limit_ms))?;
    }
    let (reader, writer) = rustix::pipe::pipe()?;
    start("read", results, move || {
        let mut byte = [0];
        show(rustix::io::read(&reader, &mut byte).map(|bytes| format!("{bytes} byte {}", byte[0])))
    })?;
    let mut lines: Vec<String> = Vec::new();
    control.serve(|question| match question.verb.as_str() {
        "results" => {
            lines.extend(returned.try_iter());
            lines.sort();
            Ok(lines.join("\n"))
        }
        "write" => {
            rustix::io::write(&writer, b"!")?;
            Ok(String::new())
        }
        _ => not_understood(question),
    })
}

fn start(
    name: &'static str,
    results: Sender<String>,
    wait: impl FnOnce() -> String + Send + 'static,
) -> Result<(), Failure> {
    let body = move || {
        let start = Instant::now();
        let outcome = wait();
        let line = format!("{name} {outcome} after {}", start.elapsed().as_millis());
        // The listener lives as long as the process.
        let _ = results.send(line);
    };
    thread::Builder::new().name(name.into()).spawn(body)?;
    Ok(())
}

fn show(result: rustix::io::Result<String>) -> String {
    match result {
        Ok(outcome) => outcome,
        Err(Errno::INTR) => "interrupted".into(),
        Err(Errno::TIMEDOUT) => "timeout".into(),
        Err(errno) => errno.to_string(),
    }
}

fn limit(ms: u64) -> Timespec {
    Timespec {
        tv_sec: (ms / 1000).cast_signed(),
        tv_nsec: (ms % 1000 * 1_000_000).cast_signed(),
    }
}

fn in_nanosleep(ms: u64) -> String {
    match nanosleep(&limit(ms)) {
        NanosleepRelativeResult::Ok => "timeout".into(),
        NanosleepRelativeResult::Interrupted(_) => "interrupted".into(),
        NanosleepRelativeResult::Err(errno) => errno.to_string(),
    }
}

fn in_absolute_sleep(ms: u64) -> String {
    let until = clock_gettime(ClockId::Monotonic) + limit(ms);
    show(clock_nanosleep_absolute(ClockId::Monotonic, &until).map(|()| "timeout".into()))
}

fn silent() -> std::os::fd::OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("descriptors are left")
}

fn in_poll(ms: u64) -> String {
    let file = silent();
    let mut watched = [PollFd::new(&file, PollFlags::IN)];
    show(poll(&mut watched, Some(&limit(ms))).map(when_none))
}

fn in_futex(ms: u64) -> String {
    let word = AtomicU32::new(0);
    show(futex::wait(&word, futex::Flags::PRIVATE, 0, Some(&limit(ms))).map(|()| "woken".into()))
}

fn in_epoll_wait(ms: u64) -> String {
    let file = silent();
    let waiter = epoll::create(epoll::CreateFlags::CLOEXEC).expect("descriptors are left");
    let data = epoll::EventData::new_u64(0);
    epoll::add(&waiter, &file, data, epoll::EventFlags::IN).expect("an eventfd can be watched");
    let mut events = Vec::with_capacity(1);
    let spare = rustix::buffer::spare_capacity(&mut events);
    show(epoll::wait(&waiter, spare, Some(&limit(ms))).map(when_none))
}

fn in_select(ms: u64) -> String {
    match select_readable(silent(), ms) {
        Ok(true) => "readable".into(),
        Ok(false) => "timeout".into(),
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => "interrupted".into(),
        Err(error) => error.to_string(),
    }
}

fn in_recv(ms: u64) -> String {
    let ends = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let (own, _other) = ends.expect("descriptors are left");
    set_limit(&own, ms);
    show_socket(recv(&own, &mut [0; 1], RecvFlags::empty()).map(|(bytes, _)| bytes))
}

fn in_accept(ms: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    set_limit(&listener, ms);
    show_socket(accept(&listener).map(|_| 1))
}

fn set_limit(socket: impl AsFd, ms: u64) {
    let limit = Some(Duration::from_millis(ms));
    let set = set_socket_timeout(socket, Timeout::Recv, limit);
    set.expect("sockets have a time limit");
}

fn show_socket(result: rustix::io::Result<usize>) -> String {
    match result {
        Err(Errno::AGAIN) => "timeout".into(),
        other => show(other.map(when_none)),
    }
}

fn in_sigtimedwait(ms: u64) -> String {
    match signal_within(SIGRTMAX, ms) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => "timeout".into(),
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => "interrupted".into(),
        Err(error) => error.to_string(),
        Ok(()) => "ready".into(),
    }
}

fn when_none(ready: usize) -> String {
    if ready == 0 {
        "timeout".into()
    } else {
        "ready".into()
    }
}
