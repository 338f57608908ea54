//! Calls that only threads of the tree can make, before they get their registers.

use std::ops::Range;

use abi::Addr;
use resources::callers::Callers;
use resources::fd::DescriptionId;
use resources::map::memory::Mapping;
use resources::map::placed;
use syscalls::Sysno;
use tracee::Call;

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

impl<'a> Threads<'a> {
    fn task_of(&self, tid: i32) -> Option<&'a SavedTask<'a>> {
        let mut tasks = self.saved.tasks.iter();
        tasks.find(|task| task.threads.iter().any(|thread| thread.tid == tid))
    }

    /// Makes the mappings of all tasks that only they can make.
    pub fn map(&mut self) -> Result<()> {
        let saved = self.saved;
        let placed = saved.placed();
        Ok(placed::make(&placed, self)?)
    }
}

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

    fn mapped(&self, tid: i32, id: DescriptionId, offsets: Range<u64>) -> Option<Addr> {
        let mut mappings = self.task_of(tid)?.memory.mappings.iter();
        let is_it = |map: &&Mapping| map.file == Some(id.0) && offsets.contains(&map.offset);
        mappings.find(is_it).map(|map| Addr(map.start))
    }

    fn submit_loop(&self) -> Addr {
        self.submit_loop
    }
}
