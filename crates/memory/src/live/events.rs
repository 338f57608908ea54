//! The thread that hears of faults and of changed mappings.
//!
//! It touches nothing that could wait for the tasks: it reads their memory, lifts protection, and
//! opens books, which nobody keeps open for long. It writes no file and no log.
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use abi::Span;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::realtime::Realtime;
use sys::uffd::Event;

use super::blocks::{BLOCK_BYTES, State, block_of, bytes_of};
use super::copy::{self, Check};
use super::state::{SAVED_MAX_BYTES, SharedState};
use super::task::{Fault, Task, TrackingState};

/// Hears all events of a stopped task that have come.
pub fn hear_out(task: &Task, shared: &SharedState) {
    while hear(task, shared) {}
}

/// Serves the tasks until it is over.
pub fn serve(tasks: &[Arc<Task>], shared: &SharedState, wake: &OwnedFd) {
    const RETRY: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 200_000,
    };
    // Whoever waits for this thread cannot go on without it; and a thread that is to stop while it
    // writes to a protected page inside a system call does not wait, but tries again and again.
    let _realtime = Realtime::new();
    while !shared.over.load(Ordering::SeqCst) {
        let fds = tasks
            .iter()
            .map(|task| task.uffd.as_fd())
            .chain([wake.as_fd()]);
        let mut fds = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect::<Vec<_>>();
        let deferred = tasks.iter().any(|task| !task.book().deferred.is_empty());
        if poll(&mut fds, deferred.then_some(&RETRY)).is_err() {
            continue;
        }
        for (task, fd) in tasks.iter().zip(&fds) {
            if deferred || !fd.revents().is_empty() {
                hear(task, shared);
            }
        }
    }
}

/// Hears what has come of a task; returns whether there may be more.
pub fn hear(task: &Task, shared: &SharedState) -> bool {
    let since = Instant::now();
    let mut events = Vec::new();
    let mut book = task.book();
    // The book stays open from the reading of an event until it is entered: whoever closes a copy
    // finds it there.
    let more = task.uffd.events(&mut events).unwrap_or(false);
    for event in events {
        enter(task, shared, &mut book, event, since);
    }
    for deferred in std::mem::take(&mut book.deferred) {
        fault(task, shared, &mut book, deferred);
    }
    more
}

fn enter(
    task: &Task,
    shared: &SharedState,
    book: &mut TrackingState,
    event: Event,
    since: Instant,
) {
    match event {
        Event::Fault { addr, .. } => {
            let addr = addr.page_start();
            fault(task, shared, book, Fault { addr, since });
        }
        Event::Remove(span) => discarded(task, shared, book, span),
        Event::Unmap(span) => {
            book.registered.cut(span);
            discarded(task, shared, book, span);
        }
        Event::Remap { from, to, bytes } => {
            let [from, to] = [from, to].map(|start| Span::new(start, bytes));
            book.registered.cut(from);
            discarded(task, shared, book, from);
            discarded(task, shared, book, to);
        }
        Event::Fork(_) | Event::Unknown(_) => task.lose(),
    }
}

/// Pages were given up, or are about to be.
fn discarded(task: &Task, shared: &SharedState, book: &mut TrackingState, span: Span) {
    const SUSPECTS: usize = 4096;
    if shared.saving.load(Ordering::SeqCst) && book.blocks.would_lose(span) {
        task.lose();
    }
    book.suspects.push(span);
    if book.suspects.len() > SUSPECTS {
        let all = std::mem::take(&mut book.suspects).into_iter();
        book.suspects.extend(all.reduce(|one, other| Span {
            start: one.start.min(other.start),
            end: one.end.max(other.end),
        }));
    }
}

/// A thread is about to write to a page.
fn fault(task: &Task, shared: &SharedState, book: &mut TrackingState, fault: Fault) {
    let block = block_of(fault.addr);
    if shared.saving.load(Ordering::SeqCst) && !task.is_lost() {
        match book.blocks.state(block) {
            // Who copies it may not get to run soon: that copy will not be used.
            Some(State::Stale | State::Copying) => {
                if !save(task, shared, book, block) {
                    book.urgent.push(block);
                    book.waiting.push(fault);
                    return;
                }
            }
            None | Some(State::Common(_) | State::Saved | State::Done(_)) => {}
        }
    }
    match task.unprotect(&book.registered, fault.addr) {
        Some(lifted) => {
            book.lifted.add(lifted);
            shared.note_wait(fault.since);
        }
        None => book.deferred.push(fault),
    }
}

/// Saves a block before it changes; returns whether the thread need not wait for it any more.
fn save(task: &Task, shared: &SharedState, book: &mut TrackingState, block: u64) -> bool {
    let bytes = BLOCK_BYTES as usize;
    if shared.saved_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes > SAVED_MAX_BYTES {
        shared.saved_bytes.fetch_sub(bytes, Ordering::SeqCst);
        return false;
    }
    let mask = book.blocks.get(block).map_or(0, |block| block.mask);
    let mut contents = vec![0; bytes_of(mask)];
    let read = copy::read(task, &book.shared, &[(block, mask)], &mut contents);
    let checked = read.and_then(|_| copy::check(task, &[(block, mask)]));
    match checked {
        Ok(Check::Valid) => {
            book.blocks.set(block, State::Saved);
            book.saved.push((block, contents));
            return true;
        }
        Ok(Check::Changing) => {
            shared.saved_bytes.fetch_sub(bytes, Ordering::SeqCst);
            return false;
        }
        Ok(Check::Lost) | Err(_) => {}
    }
    shared.saved_bytes.fetch_sub(bytes, Ordering::SeqCst);
    task.lose();
    true
}
