//! What only threads of the tree can do for a ring: have it begin where one of them alone may
//! submit, and register it under numbers of their own.

use std::os::fd::BorrowedFd;

use abi::{Addr, Span};
use sys::ring::{Places, register};
use syscalls::Sysno;

use super::advance::{Submit, Work};
use super::record::Record;
use super::{DescriptionId, IoUring, Memory};
use crate::callers::Callers;
use crate::fd::Description;
use crate::{Error, Result};

/// Threads that can also submit to rings.
pub trait Submitters: Callers {
    /// Has a thread submit to a ring, of which it has descriptor `ring.1`, until a word of it is
    /// what it is to be, which `now` reads; false where the ring is not mapped in its process.
    ///
    /// # Errors
    /// When it cannot.
    fn submit(
        &mut self,
        tid: i32,
        ring: (DescriptionId, i32),
        work: Work,
        now: &dyn Fn() -> u32,
    ) -> Result<bool>;
}

/// True if memory of a task is pinned for the description: that must be there in time.
#[must_use]
pub fn pins_memory(description: &dyn Description) -> bool {
    let ring = description.record::<IoUring>();
    ring.is_some_and(|ring| !ring.buffers.is_empty())
}

/// The memory of the task that is registered with the description, if that is a ring.
pub fn buffers(description: &dyn Description) -> impl Iterator<Item = Span> {
    let slots = description.record::<IoUring>().map(|ring| &ring.buffers);
    let slots = slots.into_iter().flatten();
    let slots = slots.filter(|slot| slot.address != 0);
    slots.map(|slot| Span::new(Addr(slot.address), slot.len_bytes))
}

/// Does what threads must do for a ring, whose descriptor here is `own`.
///
/// # Errors
/// [`Error::Corrupt`] where a thread has no descriptor of it; those of `callers`; [`Error::Kernel`]
/// for calls that fail.
pub fn start(
    record: &Record,
    (id, own): (DescriptionId, BorrowedFd<'_>),
    callers: &mut dyn Submitters,
) -> Result<()> {
    let number = |callers: &dyn Submitters, tid, id| {
        let missing = || Error::corrupt("io_uring", format!("thread {tid} has no descriptor"));
        callers.number(tid, id).ok_or_else(missing)
    };
    if let Some(tid) = record.submitter {
        let fd = number(callers, tid, id)?;
        let args = [Some(0), Some(0)];
        registered(callers, (tid, fd), (register::ENABLE_RINGS, args), &[])?;
        reach(record, (tid, fd), (id, own), callers)?;
        if let Some(eventfd) = record.eventfd {
            let eventfd = number(callers, tid, DescriptionId(eventfd))?;
            let operation = match record.eventfd_async {
                true => register::EVENTFD_ASYNC,
                false => register::EVENTFD,
            };
            let data = eventfd.to_ne_bytes();
            registered(callers, (tid, fd), (operation, [None, Some(1)]), &data)?;
        }
    }
    for pair in record.numbers.chunks_exact(2) {
        let (tid, index) = (pair[0].cast_signed(), pair[1]);
        let fd = number(callers, tid, id)?;
        // `struct io_uring_rsrc_update`.
        let words = [u64::from(index), u64::from(fd.cast_unsigned())];
        let data = words.map(u64::to_ne_bytes).concat();
        let operation = (register::RING_FDS, [None, Some(1)]);
        registered(callers, (tid, fd), operation, &data)?;
    }
    Ok(())
}

/// Has the submitter bring the ring's counters to where they stood. What is in its memory is put
/// aside meanwhile.
fn reach(
    record: &Record,
    (tid, fd): (i32, i32),
    (id, own): (DescriptionId, BorrowedFd<'_>),
    callers: &mut dyn Submitters,
) -> Result<()> {
    let memory = Memory::map(&own, record)?;
    let contents = memory.copy();
    memory.fill(&vec![0; contents.len()]);
    let places = record
        .places
        .as_slice()
        .try_into()
        .expect("checked when read");
    memory.reach(
        record,
        &Places(places),
        &mut Submitter {
            tid,
            id,
            fd,
            callers,
        },
    )?;
    memory.fill(&contents);
    Ok(())
}

/// A thread of the tree submits.
struct Submitter<'a> {
    tid: i32,
    id: DescriptionId,
    fd: i32,
    callers: &'a mut dyn Submitters,
}

impl Submit for Submitter<'_> {
    fn submit(&mut self, count: u32) -> Result<u32> {
        let fd = u64::from(self.fd.cast_unsigned());
        let args = [fd, u64::from(count), 0, 0, 0, 0].map(Some);
        let result = self
            .callers
            .call(self.tid, Sysno::io_uring_enter, args, &[])?;
        checked(self.tid, "submit to an io_uring", result)
    }

    fn submit_all(&mut self, work: Work, now: &dyn Fn() -> u32) -> Result<bool> {
        self.callers.submit(self.tid, (self.id, self.fd), work, now)
    }
}

fn registered(
    callers: &mut dyn Submitters,
    (tid, fd): (i32, i32),
    (operation, [argument, count]): (u32, [Option<u64>; 2]),
    data: &[u8],
) -> Result<()> {
    let fd = Some(u64::from(fd.cast_unsigned()));
    let args = [
        fd,
        Some(operation.into()),
        argument,
        count,
        Some(0),
        Some(0),
    ];
    let result = callers.call(tid, Sysno::io_uring_register, args, data)?;
    let doing = format!("io_uring_register, operation {operation},");
    checked(tid, &doing, result).map(drop)
}

fn checked(tid: i32, doing: &str, result: i64) -> Result<u32> {
    u32::try_from(result).map_err(|_| {
        let errno = i32::try_from(-result).unwrap_or(0);
        let source = std::io::Error::from_raw_os_error(errno);
        Error::kernel(format!("{doing} in thread {tid}"), source)
    })
}
