//! Rings of io_uring(7) as descriptors and memory, without anybody who submits real requests.

use std::io::{self, Error};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

/// How many words of a ring's parameters say where things are in its memory.
const PLACE_WORDS: usize = 20;

/// A new ring.
#[derive(Debug)]
pub struct Ring {
    /// Its descriptor.
    pub own: OwnedFd,
    /// Where things are in its memory.
    pub places: Places,
}

/// Where things are in a ring's memory, in bytes from its start: `struct io_sqring_offsets` and
/// `struct io_cqring_offsets`, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places(pub [u32; PLACE_WORDS]);

impl Places {
    /// The head of the submission queue.
    #[must_use]
    pub fn sq_head(&self) -> usize {
        self.0[0] as usize
    }

    /// The tail of the submission queue.
    #[must_use]
    pub fn sq_tail(&self) -> usize {
        self.0[1] as usize
    }

    /// The array of indices.
    #[must_use]
    pub fn array(&self) -> usize {
        self.0[6] as usize
    }

    /// The head of the completion queue.
    #[must_use]
    pub fn cq_head(&self) -> usize {
        self.0[10] as usize
    }

    /// The tail of the completion queue.
    #[must_use]
    pub fn cq_tail(&self) -> usize {
        self.0[11] as usize
    }
}

/// Makes a ring with as many entries in its queues, and flags as io_uring_setup(2) has them.
///
/// # Errors
/// The call's errno: `EPERM` where `kernel.io_uring_disabled` says so, `EINVAL`.
pub fn setup(sq_entries: u32, cq_entries: u32, flags: u32) -> io::Result<Ring> {
    const CQSIZE: u32 = 1 << 3;
    // `struct io_uring_params`.
    let mut params = [0_u32; 30];
    params[1] = cq_entries;
    params[2] = flags | CQSIZE;
    let pointer = params.as_mut_ptr();
    // SAFETY: the parameters live for the call and have the kernel's size.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, sq_entries, pointer) };
    let fd = check(fd)? as i32;
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    let own = unsafe { OwnedFd::from_raw_fd(fd) };
    let places = params[10..].try_into().expect("the rest of the parameters");
    Ok(Ring {
        own,
        places: Places(places),
    })
}

/// Has up to `count` prepared entries submitted, and waits for nothing. io_uring_enter(2).
///
/// # Errors
/// The call's errno.
pub fn submit(ring: BorrowedFd<'_>, count: u32) -> io::Result<u32> {
    enter(ring, count, 0)
}

/// Has completions posted that are ready.
///
/// # Errors
/// The call's errno: `EEXIST` where only another thread may.
pub fn reap(ring: BorrowedFd<'_>) -> io::Result<()> {
    const GETEVENTS: u32 = 1;
    enter(ring, 0, GETEVENTS).map(drop)
}

/// Waits until there are `wanted` completions that nobody has seen.
///
/// # Errors
/// The call's errno.
pub fn wait(ring: BorrowedFd<'_>, wanted: u32) -> io::Result<()> {
    const GETEVENTS: u32 = 1;
    enter_for(ring.as_raw_fd(), 0, wanted, GETEVENTS).map(drop)
}

fn enter(ring: BorrowedFd<'_>, count: u32, flags: u32) -> io::Result<u32> {
    enter_for(ring.as_raw_fd(), count, 0, flags)
}

fn enter_for(fd: i32, count: u32, wanted: u32, flags: u32) -> io::Result<u32> {
    let call = libc::SYS_io_uring_enter;
    let none = ptr::null::<libc::c_void>();
    // SAFETY: no arguments are passed; what the entries ask for, those vouch for who wrote them.
    let done = unsafe { libc::syscall(call, fd, count, wanted, flags, none, 0) };
    check(done).map(|done| done as u32)
}

/// Operations of io_uring_register(2).
pub mod register {
    /// An eventfd.
    pub const EVENTFD: u32 = 4;
    /// One that is told of completions by others than the submitter alone.
    pub const EVENTFD_ASYNC: u32 = 7;
    /// Has a ring that was made disabled begin.
    pub const ENABLE_RINGS: u32 = 12;
    /// Files, with tags.
    pub const FILES2: u32 = 13;
    /// Buffers, with tags.
    pub const BUFFERS2: u32 = 15;
    /// How many workers there may be.
    pub const IOWQ_MAX_WORKERS: u32 = 19;
    /// Numbers for rings.
    pub const RING_FDS: u32 = 20;
    /// Which slots are given to files that choose none.
    pub const FILE_ALLOC_RANGE: u32 = 25;
}

/// Registers files, or leaves their slots empty, each with a tag.
///
/// # Errors
/// The call's errno.
///
/// # Panics
/// Unless there is a tag for each.
pub fn register_files(
    ring: BorrowedFd<'_>,
    files: &[Option<BorrowedFd<'_>>],
    tags: &[u64],
) -> io::Result<()> {
    assert_eq!(files.len(), tags.len(), "a tag each");
    let number = |file: &Option<BorrowedFd<'_>>| file.map_or(-1, |file| file.as_raw_fd());
    let numbers = files.iter().map(number).collect::<Vec<_>>();
    // `struct io_uring_rsrc_register`.
    let argument = [
        files.len() as u64,
        0,
        numbers.as_ptr() as u64,
        tags.as_ptr() as u64,
    ];
    let len = size_of_val(&argument) as u32;
    register_with(ring, register::FILES2, argument.as_ptr().cast(), len)
}

/// Has an eventfd counted up at completions.
///
/// # Errors
/// The call's errno.
pub fn register_eventfd(
    ring: BorrowedFd<'_>,
    eventfd: impl AsFd,
    is_async: bool,
) -> io::Result<()> {
    let number = eventfd.as_fd().as_raw_fd();
    let operation = match is_async {
        true => register::EVENTFD_ASYNC,
        false => register::EVENTFD,
    };
    register_with(ring, operation, (&raw const number).cast(), 1)
}

/// Limits the workers of a ring, bounded and unbounded.
///
/// # Errors
/// The call's errno.
pub fn limit_workers(ring: BorrowedFd<'_>, mut limits: [u32; 2]) -> io::Result<()> {
    let pointer = limits.as_mut_ptr();
    register_with(ring, register::IOWQ_MAX_WORKERS, pointer.cast(), 2)
}

/// Sets which slots are given to files that choose none.
///
/// # Errors
/// The call's errno.
pub fn set_slots(ring: BorrowedFd<'_>, start: u32, len: u32) -> io::Result<()> {
    let range = [u64::from(start) | u64::from(len) << 32, 0];
    register_with(ring, register::FILE_ALLOC_RANGE, range.as_ptr().cast(), 0)
}

fn register_with(
    ring: BorrowedFd<'_>,
    operation: u32,
    argument: *const libc::c_void,
    count: u32,
) -> io::Result<()> {
    let (call, fd) = (libc::SYS_io_uring_register, ring.as_raw_fd());
    // SAFETY: the callers' arguments have the operation's form and live for the call; it keeps
    // files alone.
    check(unsafe { libc::syscall(call, fd, operation, argument, count) }).map(drop)
}

fn check(result: i64) -> io::Result<i64> {
    match result {
        ..0 => Err(Error::last_os_error()),
        result => Ok(result),
    }
}

/// Which part of a ring's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Both queues' heads and tails, completions, the array of indices.
    Queues,
    /// The entries to submit.
    Entries,
}

impl Part {
    /// At which offset it is mapped.
    #[must_use]
    pub fn offset(self) -> u64 {
        match self {
            Self::Queues => 0,
            Self::Entries => 0x1000_0000,
        }
    }
}

/// A part of a ring's memory, mapped here. Whoever else has it, and the kernel, may change it at
/// any time.
#[derive(Debug)]
pub struct RingMemory {
    start: usize,
    bytes: usize,
}

impl RingMemory {
    /// Maps `bytes` of a part.
    ///
    /// # Errors
    /// `EINVAL` where the part is shorter, or in the program's own memory.
    pub fn map(ring: BorrowedFd<'_>, part: Part, bytes: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let at = ptr::null_mut();
        // SAFETY: without a fixed address nothing that is mapped is touched.
        let start = unsafe { rustix::mm::mmap(at, bytes, prot, flags, ring, part.offset()) };
        let start = start?.expose_provenance();
        Ok(Self { start, bytes })
    }

    /// Where it starts.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// How long it is.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A word of it.
    ///
    /// # Panics
    /// Outside of it, or unaligned.
    #[must_use]
    pub fn word(&self, at: usize) -> &AtomicU32 {
        assert!(
            at.is_multiple_of(4) && at + 4 <= self.bytes,
            "{at} is in it"
        );
        // SAFETY: mapped for as long as `self`, aligned, and reached by atomics only.
        unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(self.start + at)) }
    }

    /// A byte of it.
    ///
    /// # Panics
    /// Outside of it.
    #[must_use]
    pub fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < self.bytes, "{at} is in it");
        // SAFETY: mapped for as long as `self`, and reached by atomics only.
        unsafe { AtomicU8::from_ptr(ptr::with_exposed_provenance_mut(self.start + at)) }
    }

    /// Copies all of it.
    #[must_use]
    pub fn copy(&self) -> Vec<u8> {
        let words = (0..self.bytes).step_by(4);
        let words = words.map(|at| self.word(at).load(Ordering::Relaxed).to_ne_bytes());
        words.flatten().collect()
    }

    /// Fills all of it.
    ///
    /// # Panics
    /// Unless there are as many bytes.
    pub fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes, "as long as it is");
        for (at, word) in (0..).step_by(4).zip(bytes.as_chunks::<4>().0) {
            let word = u32::from_ne_bytes(*word);
            self.word(at).store(word, Ordering::Relaxed);
        }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: mapped by `map`, and no reference outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(start, self.bytes) };
        debug_assert!(unmapped.is_ok(), "whole mappings are unmapped");
    }
}
