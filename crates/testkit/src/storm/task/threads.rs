//! Threads that wait, and must not be let go before their time.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::thread::{ClockId, Timespec, clock_nanosleep_absolute, futex};
use rustix::time::clock_gettime;

use super::{StepResult, Task};
use crate::storm::step::{PAGE_BYTES, Wait};
use crate::{tree, wait};

const HOUR: Timespec = Timespec {
    tv_sec: 3600,
    tv_nsec: 0,
};

/// A thread that was started, and whether its call has returned.
pub(super) struct WaitingThread {
    wait: Wait,
    returned: Arc<AtomicU64>,
}

impl Task {
    pub(super) fn start_thread(&mut self, wait: Wait, stack_pages: u32) -> StepResult {
        if self.numbered.is_cloned {
            return Ok(());
        }
        let returned = Arc::new(AtomicU64::new(0));
        let (own, tid) = (Arc::clone(&returned), Arc::new(AtomicU32::new(0)));
        let its_tid = Arc::clone(&tid);
        // Less than this is not enough for a thread of Rust's.
        let stack_bytes = stack_pages.max(8) as usize * PAGE_BYTES;
        thread::Builder::new()
            .name(format!("waits-{}", self.waits.len()))
            .stack_size(stack_bytes)
            .spawn(move || {
                wait_in(wait, || {
                    let tid = rustix::thread::gettid().as_raw_pid().cast_unsigned();
                    its_tid.store(tid, Ordering::SeqCst);
                });
                own.store(1, Ordering::SeqCst);
                loop {
                    rustix::event::pause();
                }
            })?;
        wait::wait_until("a thread to wait", wait::SOON, || {
            let tid = tid.load(Ordering::SeqCst);
            tid != 0 && tree::is_waiting(tid)
        });
        self.waits.push(WaitingThread { wait, returned });
        Ok(())
    }

    pub(super) fn check_waits(&self) -> Vec<String> {
        let ended = |waiting: &&WaitingThread| waiting.returned.load(Ordering::SeqCst) != 0;
        let ended = self.waits.iter().filter(ended);
        ended
            .map(|waiting| format!("{:?} returned early", waiting.wait))
            .collect()
    }
}

/// Makes a call that returns in an hour at the earliest; an interruption is a return. `ready` is
/// called when nothing else that could wait is left to do: a thread also sleeps when others have
/// the memory allocator's lock.
fn wait_in(wait: Wait, ready: impl FnOnce()) {
    let silent = || eventfd(0, EventfdFlags::CLOEXEC).expect("descriptors are left");
    let word = AtomicU32::new(0);
    match wait {
        Wait::Futex => {
            ready();
            let _ = futex::wait(&word, futex::Flags::PRIVATE, 0, None);
        }
        Wait::FutexTimed => {
            ready();
            let _ = futex::wait(&word, futex::Flags::PRIVATE, 0, Some(&HOUR));
        }
        Wait::SleepUntil => {
            let until = clock_gettime(ClockId::Monotonic) + HOUR;
            ready();
            let _ = clock_nanosleep_absolute(ClockId::Monotonic, &until);
        }
        Wait::EpollTimed => {
            let file = silent();
            let waiter = epoll::create(epoll::CreateFlags::CLOEXEC).expect("descriptors are left");
            let data = epoll::EventData::new_u64(0);
            epoll::add(&waiter, &file, data, epoll::EventFlags::IN).expect("it can be watched");
            let mut events = Vec::with_capacity(1);
            let spare = rustix::buffer::spare_capacity(&mut events);
            ready();
            let _ = epoll::wait(&waiter, spare, Some(&HOUR));
        }
        Wait::Poll => {
            let file = silent();
            ready();
            let _ = poll(&mut [PollFd::new(&file, PollFlags::IN)], None);
        }
        Wait::Read => {
            let file = silent();
            ready();
            let _ = rustix::io::read(file, &mut [0; 8]);
        }
    }
}
