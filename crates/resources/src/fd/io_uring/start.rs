//! What only threads of the tree can do for a ring: have it begin where one of them alone may
//! submit, register it under numbers of their own, and submit requests that wait.

use std::os::fd::BorrowedFd;

use sys::ring::{Part, Places, register};
use syscalls::Sysno;
use tracee::Submitting;

use super::advance::{Submit, Work};
use super::memory::Memory;
use super::message::Sender;
use super::record::Record;
use super::resubmit::resubmit;
use crate::callers::Callers;
use crate::fd::DescriptionId;
use crate::{Error, Result};

/// Does what threads must do for a ring, whose descriptor here is `own`.
///
/// # Errors
/// [`Error::Corrupt`] where a thread has no descriptor of it; those of `callers`; [`Error::Kernel`]
/// for calls that fail.
pub(super) fn start(
    record: &Record,
    (id, own): (DescriptionId, BorrowedFd<'_>),
    callers: &mut dyn Callers,
) -> Result<()> {
    let number = |callers: &dyn Callers, tid, id| {
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
    resubmit(record, (id, own), callers)
}

/// Has the submitter bring the ring's counters to where they stood. What is in its memory is put
/// aside meanwhile.
fn reach(
    record: &Record,
    (tid, fd): (i32, i32),
    (id, own): (DescriptionId, BorrowedFd<'_>),
    callers: &mut dyn Callers,
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
            own,
            sender: None,
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
    own: BorrowedFd<'a>,
    sender: Option<Sender>,
    callers: &'a mut dyn Callers,
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

    fn send(&mut self, count: u32) -> Result<()> {
        let sender = match self.sender.take() {
            Some(sender) => sender,
            None => Sender::new()?,
        };
        self.sender.insert(sender).send(self.own, count)
    }

    fn receive(&mut self) -> Result<()> {
        const GETEVENTS: u64 = 1;
        let fd = u64::from(self.fd.cast_unsigned());
        let args = [fd, 0, 0, GETEVENTS, 0, 0].map(Some);
        let result = self
            .callers
            .call(self.tid, Sysno::io_uring_enter, args, &[])?;
        checked(self.tid, "receive messages of an io_uring", result).map(drop)
    }

    fn submit_all(&mut self, work: Work, now: &dyn Fn() -> u32) -> Result<bool> {
        let parts = Part::Queues.offset()..Part::Entries.offset();
        let Some(queues) = self.callers.mapped(self.tid, self.id, parts) else {
            return Ok(false);
        };
        let at = |offset: usize| queues.plus(offset as u64);
        let submitting = Submitting {
            code: self.callers.submit_loop(),
            fd: self.fd,
            count: work.count,
            watched: at(work.watched),
            until: work.until,
            head: work.head.map(|(offset, limit)| (at(offset), limit)),
        };
        let done = submitting.run(self.tid, now);
        done.map_err(|error| {
            let doing = format!("have thread {} submit to an io_uring", self.tid);
            Error::kernel(doing, std::io::Error::other(error))
        })?;
        Ok(true)
    }
}

fn registered(
    callers: &mut dyn Callers,
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
