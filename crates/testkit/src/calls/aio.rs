//! Contexts of asynchronous I/O (io_setup(2)), whose requests read and write memory for ever.

use std::io::Result;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::check;

/// What requests ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// To read.
    Read = 0,
    /// To write.
    Write = 1,
    /// To wait until something can be read.
    Poll = 5,
}

/// A context. It goes with the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Its name: where its ring is.
    pub name: u64,
}

/// A request: `struct iocb`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    data: u64,
    key: u64,
    operation: u16,
    priority: i16,
    fd: u32,
    address: u64,
    len_bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// What became of a request: `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// What the request had for this.
    pub data: u64,
    /// Where the request stood.
    pub request: u64,
    /// The result.
    pub result: i64,
    /// Another one.
    pub result2: i64,
}

impl Request {
    /// Reads or writes `memory` at an offset of a file, which stays open.
    pub fn new(
        operation: Operation,
        file: impl AsFd,
        memory: &'static [AtomicU8],
        offset: u64,
        data: u64,
    ) -> Self {
        Self {
            data,
            key: 0,
            operation: operation as u16,
            priority: 0,
            fd: file.as_fd().as_raw_fd().cast_unsigned(),
            address: memory.as_ptr() as u64,
            len_bytes: memory.len() as u64,
            offset: offset.cast_signed(),
            reserved: 0,
            flags: 0,
            eventfd: 0,
        }
    }

    /// Waits until `file` can be read.
    pub fn poll(file: impl AsFd, data: u64) -> Self {
        const POLLIN: u64 = 1;
        let mut request = Self::new(Operation::Poll, file, &[], 0, data);
        (request.address, request.len_bytes) = (POLLIN, 0);
        request
    }

    /// Has an eventfd told.
    #[must_use]
    pub fn telling(mut self, eventfd: impl AsFd) -> Self {
        const RESFD: u32 = 1;
        self.flags |= RESFD;
        self.eventfd = eventfd.as_fd().as_raw_fd().cast_unsigned();
        self
    }
}

impl Context {
    /// Makes a context for some requests. io_setup(2).
    ///
    /// # Errors
    /// `EAGAIN` for too many.
    pub fn new(requests: u32) -> Result<Self> {
        let mut name = 0_u64;
        // SAFETY: the name lives for the call.
        check(unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut name) })?;
        Ok(Self { name })
    }

    /// Submits requests; gives how many the context took. io_submit(2).
    ///
    /// # Errors
    /// `EAGAIN` where there is no room.
    pub fn submit(self, requests: &mut [Request]) -> Result<usize> {
        let pointers = requests.iter_mut().map(ptr::from_mut).collect::<Vec<_>>();
        let (call, count) = (libc::SYS_io_submit, pointers.len());
        // SAFETY: the requests are copied; what they read into is there for ever, as atomics.
        let done = check(unsafe { libc::syscall(call, self.name, count, pointers.as_ptr()) })?;
        Ok(done as usize)
    }

    /// Fetches between `least` and `most` events, and waits for them at most so long.
    /// io_getevents(2).
    ///
    /// # Errors
    /// `EINTR`, `EINVAL`.
    pub fn fetch(self, least: usize, most: usize, limit: Option<Duration>) -> Result<Vec<Event>> {
        let mut events = vec![Event::default(); most];
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        });
        let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
        let (call, at) = (libc::SYS_io_getevents, events.as_mut_ptr());
        // SAFETY: there is room for so many events, and the limit lives for the call.
        let done = check(unsafe { libc::syscall(call, self.name, least, most, at, limit) })?;
        events.truncate(done as usize);
        Ok(events)
    }

    /// Ends it. io_destroy(2).
    ///
    /// # Errors
    /// `EINVAL` where it is none.
    pub fn end(self) -> Result<()> {
        // SAFETY: no memory of Rust's is in its ring.
        check(unsafe { libc::syscall(libc::SYS_io_destroy, self.name) }).map(drop)
    }

    /// The words of its ring before the events: number, room, head, tail, and four more. For one
    /// that has not ended.
    #[must_use]
    pub fn words(self) -> &'static [AtomicU32; 8] {
        let at = ptr::with_exposed_provenance::<[AtomicU32; 8]>(self.name as usize);
        // SAFETY: the kernel has mapped it there, and both touch it by atomics alone.
        unsafe { &*at }
    }

    /// Fetches an event as programs do that look into the ring themselves.
    #[must_use]
    pub fn take(self) -> Option<Event> {
        let words = self.words();
        let (room, head) = (words[1].load(Ordering::Relaxed), &words[2]);
        let at = head.load(Ordering::Relaxed);
        if at == words[3].load(Ordering::Acquire) {
            return None;
        }
        let from = self.name as usize + 32 + 32 * at as usize;
        let from = ptr::with_exposed_provenance::<[AtomicU64; 4]>(from);
        // SAFETY: as in `words`; the head is in the ring.
        let event = unsafe { &*from };
        let word = |at: usize| event[at].load(Ordering::Relaxed);
        let event = Event {
            data: word(0),
            request: word(1),
            result: word(2).cast_signed(),
            result2: word(3).cast_signed(),
        };
        head.store((at + 1) % room, Ordering::Release);
        Some(event)
    }

    /// Unmaps its ring, or a part of it.
    ///
    /// # Errors
    /// As munmap(2).
    pub fn unmap(self, bytes: usize) -> Result<()> {
        // SAFETY: nobody looks into the ring of a context that is given up so.
        check(unsafe { libc::syscall(libc::SYS_munmap, self.name, bytes) }).map(drop)
    }
}
