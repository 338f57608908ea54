//! Memory that all tasks of a subject share: who lives, what each is told, what objects must hold.
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{Timespec, futex};

use super::step::{NUMBERED, OBJECT_PAGES, OBJECTS, SLOTS, TASKS};
use crate::calls::Mapping;
use crate::subjects::Failure;
use crate::{tree, wait};

/// A cache line of its own for each task.
const TASK_BYTES: usize = 64;
const ORDER: usize = 0;
const DONE: usize = 4;
const PID: usize = 8;
const WHAT: usize = 16;
const FAILED: usize = 24;
const OBJECTS_AT: usize = TASKS as usize * TASK_BYTES;
const WAYS_AT: usize = OBJECTS_AT + OBJECTS as usize * OBJECT_PAGES as usize * 8;
const WAY_BYTES: usize = 16;
/// What is in each set of semaphores, the next undo list's number, and those lists: how many tasks
/// have each, and what they have of each set.
const SETS_AT: usize = WAYS_AT + SLOTS as usize * WAY_BYTES;
const LISTS_AT: usize = SETS_AT + NUMBERED as usize * 8;
const LIST_BYTES: usize = (1 + NUMBERED as usize) * 8;
const LISTS: usize = 128;
const BYTES: usize = LISTS_AT + 8 + LISTS * LIST_BYTES;

/// What a task is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// To make the step of this number.
    Step(usize),
    /// To say what is wrong with what it has.
    Check,
    /// To say what it has.
    Describe,
}

impl Order {
    const CHECK: u64 = u64::MAX;
    const DESCRIBE: u64 = u64::MAX - 1;

    fn number(self) -> u64 {
        match self {
            Self::Step(number) => number as u64,
            Self::Check => Self::CHECK,
            Self::Describe => Self::DESCRIBE,
        }
    }

    fn of(number: u64) -> Self {
        match number {
            Self::CHECK => Self::Check,
            Self::DESCRIBE => Self::Describe,
            number => Self::Step(number as usize),
        }
    }
}

/// The shared memory; to be made before tasks are forked.
pub struct Ledger(Mapping);

impl Ledger {
    pub fn new() -> Result<Self, Failure> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let memory = Mapping::anonymous(BYTES, both, MapFlags::SHARED)?;
        Ok(Self(memory))
    }

    fn half(&self, task: u8, at: usize) -> &AtomicU32 {
        self.0.half_word(usize::from(task) * TASK_BYTES + at)
    }

    fn at(task: u8, at: usize) -> usize {
        usize::from(task) * TASK_BYTES + at
    }

    /// The pid of a task that lives.
    pub fn pid(&self, task: u8) -> Option<u32> {
        let pid = self.0.load(Self::at(task, PID)) as u32;
        (pid != 0).then_some(pid)
    }

    pub fn set_pid(&self, task: u8, pid: u32) {
        self.0.store(Self::at(task, PID), u64::from(pid));
    }

    /// What page `page` of an object must begin with.
    pub fn object(&self, object: u8, page: u32) -> u64 {
        self.0.load(object_at(object, page))
    }

    pub fn set_object(&self, object: u8, page: u32, value: u64) {
        self.0.store(object_at(object, page), value);
    }

    /// How much was sent to the end `slot`, and how much of it was received: bytes, or messages.
    pub fn way(&self, slot: u16) -> (u64, u64) {
        let at = way_at(slot);
        (self.0.load(at), self.0.load(at + 8))
    }

    pub fn add_sent(&self, slot: u16, sent: u64) {
        self.0.add(way_at(slot), sent);
    }

    pub fn add_received(&self, slot: u16, received: u64) {
        self.0.add(way_at(slot) + 8, received);
    }

    /// What the semaphore of a set must be.
    pub fn semaphore(&self, set: u8) -> u64 {
        self.0.load(set_at(set))
    }

    pub fn set_semaphore(&self, set: u8, value: u64) {
        self.0.store(set_at(set), value);
    }

    /// An undo list that nobody else has; none when all were given.
    pub fn new_undo(&self) -> Option<u8> {
        let list = self.0.load(LISTS_AT);
        (list < LISTS as u64).then(|| {
            self.0.store(LISTS_AT, list + 1);
            self.0.add(list_at(list as u8), 1);
            list as u8
        })
    }

    /// One more task has it.
    pub fn share_undo(&self, list: u8) {
        self.0.add(list_at(list), 1);
    }

    /// Takes `count` off the semaphore of a set, to be given back with the list.
    pub fn borrow(&self, list: u8, set: u8, count: u64) {
        self.set_semaphore(set, self.semaphore(set) - count);
        self.0.add(list_at(list) + 8 + usize::from(set) * 8, count);
    }

    /// One task less has it; after the last one all is given back.
    pub fn leave_undo(&self, list: u8) {
        let at = list_at(list);
        let left = self.0.load(at) - 1;
        self.0.store(at, left);
        for set in (0..NUMBERED).filter(|_| left == 0) {
            let borrowed = self.0.load(at + 8 + usize::from(set) * 8);
            self.set_semaphore(set, self.semaphore(set) + borrowed);
        }
    }

    /// Has a task do something, and waits until it is done.
    pub fn tell(&self, task: u8, order: Order) -> Result<(), Failure> {
        let pid = self.pid(task).ok_or("it does not live")?;
        self.0.store(Self::at(task, WHAT), order.number());
        self.0.store(Self::at(task, FAILED), 0);
        let number = self.half(task, ORDER).fetch_add(1, Ordering::SeqCst) + 1;
        futex::wake(self.half(task, ORDER), futex::Flags::empty(), 1)?;
        let deadline = Instant::now() + wait::SOON;
        let done = self.half(task, DONE);
        loop {
            // Who is told to end does so when it is done.
            let is_alive = tree::is_alive(pid);
            let now = done.load(Ordering::SeqCst);
            if now == number {
                break;
            }
            if !is_alive || Instant::now() > deadline {
                let state = tree::state(pid);
                return Err(format!("task {task} does not do it: {state:?}").into());
            }
            // Woken, or it is time to look again.
            let _ = futex::wait(done, futex::Flags::empty(), now, Some(&PATIENCE));
        }
        match self.0.load(Self::at(task, FAILED)) {
            0 => Ok(()),
            _ => Err(format!("task {task} failed").into()),
        }
    }

    /// Waits for what `task` is told, for ever; `do_it` tells whether it could be done.
    pub fn obey(&self, task: u8, mut do_it: impl FnMut(Order) -> bool) -> ! {
        let order = self.half(task, ORDER);
        let mut last = order.load(Ordering::SeqCst);
        self.set_pid(task, std::process::id());
        loop {
            while order.load(Ordering::SeqCst) == last {
                // Interrupted, or there is something to do: look again.
                let _ = futex::wait(order, futex::Flags::empty(), last, None);
            }
            last = order.load(Ordering::SeqCst);
            if !do_it(Order::of(self.0.load(Self::at(task, WHAT)))) {
                self.0.store(Self::at(task, FAILED), 1);
            }
            self.done(task);
        }
    }

    /// Says that `task` has done what it was told.
    pub fn done(&self, task: u8) {
        let number = self.half(task, ORDER).load(Ordering::SeqCst);
        let done = self.half(task, DONE);
        done.store(number, Ordering::SeqCst);
        // Nobody may be waiting yet.
        let _ = futex::wake(done, futex::Flags::empty(), 1);
    }
}

const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: Duration::from_millis(50).as_nanos() as i64,
};

fn object_at(object: u8, page: u32) -> usize {
    assert!(object < OBJECTS && page < OBJECT_PAGES, "an object's page");
    OBJECTS_AT + (usize::from(object) * OBJECT_PAGES as usize + page as usize) * 8
}

fn way_at(slot: u16) -> usize {
    assert!(slot < SLOTS, "the name of an end");
    WAYS_AT + usize::from(slot) * WAY_BYTES
}

fn set_at(set: u8) -> usize {
    assert!(set < NUMBERED, "a set's number");
    SETS_AT + usize::from(set) * 8
}

fn list_at(list: u8) -> usize {
    assert!(usize::from(list) < LISTS, "an undo list's number");
    LISTS_AT + 8 + usize::from(list) * LIST_BYTES
}
