//! What only threads can do for rings of io_uring(7), before they get their registers.

use std::os::fd::BorrowedFd;

use abi::Addr;
use resources::callers::{Callers, Unlimited};
use resources::fd::DescriptionId;
use resources::fd::io_uring::{self, IoUring, Submitters, Work, mapping};
use resources::map::memory::{Mapping, Special};
use syscalls::Sysno;
use tracee::{Call, Submitting};

use crate::Result;
use crate::records::{Saved, SavedTask};

/// The stopped threads of a tree.
pub(super) struct Threads<'a> {
    pub saved: &'a Saved<'a>,
    /// Where a `syscall` instruction stands in all of them.
    pub syscall: Addr,
    /// Where [`tracee::arch::SUBMIT_LOOP`] stands in all of them.
    pub submit_loop: Addr,
    /// Room for 24 bytes that all of them have.
    pub scratch: Addr,
    /// Writes there.
    pub write: &'a dyn Fn(Addr, &[u8]),
}

impl Threads<'_> {
    /// Has rings begin that wait for their submitters, and gives others the numbers that threads
    /// have for them. `own` gives the descriptor of a description here.
    pub fn start<'b>(&mut self, own: impl Fn(usize) -> BorrowedFd<'b>) -> Result<()> {
        let saved = self.saved;
        for (id, description) in (0u32..).zip(&saved.descriptions) {
            if let Some(ring) = description.record::<IoUring>() {
                io_uring::start(ring, (DescriptionId(id), own(id as usize)), self)?;
            }
        }
        Ok(())
    }
}

impl<'a> Threads<'a> {
    fn task_of(&self, tid: i32) -> Option<&'a SavedTask<'a>> {
        let mut tasks = self.saved.tasks.iter();
        tasks.find(|task| task.threads.iter().any(|thread| thread.tid == tid))
    }

    /// Maps the rings of all tasks.
    pub fn map(&mut self) -> Result<()> {
        let saved = self.saved;
        for task in &saved.tasks {
            let is_ring = |map: &&Mapping| map.special() == Special::Ring;
            let rings = task.memory.mappings.iter().filter(is_ring);
            let rings = rings.collect::<Vec<_>>();
            if rings.is_empty() {
                continue;
            }
            let _unlimited = Unlimited::make(task.node.pid);
            for ring in rings {
                mapping::map(&task.process(), ring, self)?;
            }
        }
        Ok(())
    }
}

/// Where the entries of a ring are mapped, behind its queues.
const ENTRIES_AT: u64 = 0x1000_0000;

impl Callers for Threads<'_> {
    fn call(
        &mut self,
        tid: i32,
        call: Sysno,
        args: [Option<u64>; 6],
        data: &[u8],
    ) -> resources::Result<i64> {
        (self.write)(self.scratch, data);
        let call = Call {
            at: self.syscall,
            number: call as u64,
            args: args.map(|arg| arg.unwrap_or(self.scratch.0)),
        };
        call.make(tid).map_err(|error| {
            let doing = format!("have thread {tid} make a call");
            resources::Error::kernel(doing, std::io::Error::other(error))
        })
    }

    fn scratch(&self) -> Addr {
        self.scratch
    }

    fn number(&self, tid: i32, id: DescriptionId) -> Option<i32> {
        let mut descriptors = self.task_of(tid)?.descriptors.iter();
        let descriptor = descriptors.find(|one| one.description == id.0);
        descriptor.map(|descriptor| descriptor.fd)
    }
}

impl Submitters for Threads<'_> {
    fn submit(
        &mut self,
        tid: i32,
        (id, fd): (DescriptionId, i32),
        work: Work,
        now: &dyn Fn() -> u32,
    ) -> resources::Result<bool> {
        let is_queues = |map: &&Mapping| {
            map.special() == Special::Ring && map.file == Some(id.0) && map.offset < ENTRIES_AT
        };
        let task = self.task_of(tid);
        let queues = task.and_then(|task| task.memory.mappings.iter().find(is_queues));
        let Some(queues) = queues else {
            return Ok(false);
        };
        let at = |offset: usize| Addr(queues.start + offset as u64);
        let submitting = Submitting {
            code: self.submit_loop,
            fd,
            count: work.count,
            watched: at(work.watched),
            until: work.until,
            head: work.head.map(|(offset, limit)| (at(offset), limit)),
        };
        let done = submitting.run(tid, now);
        done.map_err(|error| {
            let doing = format!("have thread {tid} submit to an io_uring");
            resources::Error::kernel(doing, std::io::Error::other(error))
        })?;
        Ok(true)
    }
}
