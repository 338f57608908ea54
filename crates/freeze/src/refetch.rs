//! Events of asynchronous I/O that a thread had fetched when a stop ended its wait for more: they
//! go back into their ring, and it fetches them again.
//!
//! io_getevents(2) returns then with as many as it has, as at a signal, and no call would go on
//! from there. The events are still in the ring, before its head, and what the thread was given is
//! the same: so the head is put back. There must be few enough in the ring that nothing is put over
//! them before the thread, which makes its call again, has them.

use std::io;

use abi::Addr;
use resources::map::aio::place;
use resources::task::interrupted;
use sys::proc::Status;
use syscalls::Sysno;
use tracee::Thread;

use crate::Result;

/// How long an event is.
const EVENT_BYTES: u64 = 32;

/// What a call was to fetch, and has.
struct Fetched {
    ring: u64,
    given: u64,
    count: u32,
}

/// Has the stopped threads of a process make the calls again that have fetched too few. `read`
/// gives files of a thread's /proc/PID/task/TID.
///
/// # Errors
/// [`crate::Error::Tracee`].
pub fn fetch_again(
    threads: &mut [Thread],
    read: impl Fn(i32, &str) -> Option<Vec<u8>>,
) -> Result<()> {
    let mut left = threads.iter_mut().collect::<Vec<_>>();
    left.retain(|thread| fetched(thread).is_some() && !expects_it(thread, &read));
    // The last that has fetched is the first to put back.
    loop {
        let was_last = |thread: &&mut Thread| put_back(thread).unwrap_or(false);
        let Some(at) = left.iter().position(was_last) else {
            return Ok(());
        };
        let thread = left.swap_remove(at);
        let mut registers = thread.saved.registers;
        if let Some(number) = registers.call() {
            registers.make_call(registers.call_at(), number, registers.args());
            thread.redirect(registers);
            thread.give_back()?;
        }
    }
}

/// What a thread's call has fetched, if that is less than it was to wait for.
fn fetched(thread: &Thread) -> Option<Fetched> {
    let registers = &thread.saved.registers;
    let calls = [Sysno::io_getevents as u64, Sysno::io_pgetevents as u64];
    registers.call().filter(|call| calls.contains(call))?;
    let [ring, least, _, given, ..] = registers.args();
    let count = u64::try_from(registers.result()).ok()?;
    let count = Some(count).filter(|count| (1..least).contains(count))?;
    Some(Fetched {
        ring,
        given,
        count: count.try_into().ok()?,
    })
}

/// Whether the program expects that its call is interrupted.
fn expects_it(thread: &Thread, read: &impl Fn(i32, &str) -> Option<Vec<u8>>) -> bool {
    let status = read(thread.tid, "status").and_then(|status| Status::parse(&status).ok());
    let mask = thread.saved.mask;
    let handles = |status: &Status| interrupted::handler_waits(status, mask);
    thread.group_stop.is_some() || status.as_ref().is_none_or(handles)
}

/// Puts the head of a ring back to before what a thread has fetched; false where others have
/// fetched since, or there is too much in the ring.
fn put_back(thread: &Thread) -> io::Result<bool> {
    const MAGIC: u32 = 0xa10a_10a1;
    const MOST_ROOM: u32 = 1 << 24;
    let Some(Fetched { ring, given, count }) = fetched(thread) else {
        return Ok(false);
    };
    let read = |at: u64, bytes: &mut [u8]| sys::vm::read_exact(&thread.process, Addr(at), bytes);
    let mut words = [0; 20];
    read(ring, &mut words)?;
    let word = |at: usize| u32::from_le_bytes(words[at..at + 4].try_into().expect("four bytes"));
    let room = word(place::EVENTS);
    let (head, tail) = (word(place::HEAD), word(place::TAIL));
    let is_room = room > head.max(tail) && room < MOST_ROOM;
    if word(16) != MAGIC || !is_room || count > room / 2 {
        return Ok(false);
    }
    let before = (head + room - count) % room;
    if (tail + room - before) % room > room / 2 {
        return Ok(false);
    }
    let [mut theirs, mut here] = [[0; EVENT_BYTES as usize]; 2];
    for number in 0..count {
        let at = u64::from((before + number) % room);
        let at = place::FIRST as u64 + EVENT_BYTES * at;
        read(ring.wrapping_add(at), &mut here)?;
        let at = EVENT_BYTES * u64::from(number);
        read(given.wrapping_add(at), &mut theirs)?;
        if theirs != here {
            return Ok(false);
        }
    }
    let at = Addr(ring.wrapping_add(place::HEAD as u64));
    sys::vm::write(&thread.process, at, &before.to_le_bytes())?;
    Ok(true)
}
