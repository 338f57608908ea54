//! What only threads can do for rings of io_uring(7), before they get their registers.

use std::os::fd::BorrowedFd;

use abi::spans::{Spans, subtract};
use abi::{Addr, PAGE_BYTES, Span};
use freeze::read_proc;
use resources::fd::DescriptionId;
use resources::fd::io_uring::{self, Callers, IoUring, Work};
use resources::map::memory::{Mapping, Special};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use sys::proc::Limit;
use sys::process::Process;
use syscalls::Sysno;
use tracee::{Call, Submitting};

use crate::error::invalid;
use crate::records::{Saved, SavedTask};
use crate::{Error, Result};

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
                self.map_at(task, ring)?;
            }
        }
        Ok(())
    }

    /// Maps a ring where it was. The kernel chooses the address of a ring, and lets nobody say one,
    /// nor move it: so for that moment, all other room for it is taken.
    fn map_at(&mut self, task: &SavedTask<'_>, ring: &Mapping) -> Result<()> {
        const MAP_PRIVATE: u64 = libc::MAP_PRIVATE as u64;
        const MAP_ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;
        const MAP_NORESERVE: u64 = libc::MAP_NORESERVE as u64;
        const MAP_FIXED_NOREPLACE: u64 = libc::MAP_FIXED_NOREPLACE as u64;
        let pid = task.node.pid;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        let fd = ring.file.and_then(|id| self.number(pid, DescriptionId(id)));
        let missing = || resources::Error::corrupt(format!("memory of {pid}"), "no such ring");
        let fd = u64::from(fd.ok_or_else(missing)?.cast_unsigned());
        let taken = freeze::parse(&read_proc(&task.process(), "maps")?)?;
        let taken = taken.iter().map(|listed| listed.span).chain([ring.span()]);
        let mut taken = taken.collect::<Vec<_>>();
        taken.sort_unstable();
        let room = subtract(&[all_addresses()], &taken.into_iter().collect::<Spans>());
        // What is beside its place would be room together with that.
        let place = ring.span();
        let is_room = |gap: &Span| {
            let is_beside = gap.end == place.start || gap.start == place.end;
            is_beside || gap.bytes() >= place.bytes()
        };
        let room = room.into_iter().filter(is_room).collect::<Vec<_>>();
        for gap in &room {
            let args = [gap.start.0, gap.bytes(), 0, flags, u64::MAX, 0];
            self.make(pid, Sysno::mmap, args)?;
        }
        let (len_bytes, prot) = (ring.span().bytes(), u64::from(ring.prot));
        let args = [0, len_bytes, prot, ring.flags.into(), fd, ring.offset];
        let at = self.make(pid, Sysno::mmap, args)?;
        for gap in &room {
            self.make(pid, Sysno::munmap, [gap.start.0, gap.bytes(), 0, 0, 0, 0])?;
        }
        if at != ring.start {
            let what = format!("it is mapped at {at:#x}");
            let doing = format!("cannot map an io_uring at {:#x}", ring.start);
            return Err(Error::kernel(doing, std::io::Error::other(what)));
        }
        for advice in &ring.advice {
            let args = [at, len_bytes, u64::from(*advice), 0, 0, 0];
            self.make(pid, Sysno::madvise, args)?;
        }
        Ok(())
    }

    /// Has a thread make a call that must succeed.
    fn make(&mut self, tid: i32, call: Sysno, args: [u64; 6]) -> Result<u64> {
        let result = self.call(tid, call, args.map(Some), &[])?;
        checked(result, || {
            format!("{}{args:x?} for an io_uring of {tid}", call.name())
        })
    }
}

/// What a call returned that must have succeeded; `doing` says which it was.
pub(super) fn checked(result: i64, doing: impl FnOnce() -> String) -> Result<u64> {
    match result {
        -4095..0 => {
            let errno = i32::try_from(-result).expect("an errno");
            let source = std::io::Error::from_raw_os_error(errno);
            Err(Error::kernel(doing(), source))
        }
        result => Ok(result.cast_unsigned()),
    }
}

/// Where the entries of a ring are mapped, behind its queues.
const ENTRIES_AT: u64 = 0x1000_0000;

/// Where a program may have mappings.
fn all_addresses() -> Span {
    const TOP: Addr = Addr(0x7fff_ffff_f000);
    let lowest = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr");
    let lowest = lowest.ok().and_then(|text| text.trim().parse().ok());
    Span {
        start: Addr(lowest.unwrap_or(0).max(PAGE_BYTES)),
        end: TOP,
    }
}

/// A task whose limits of memory do not count; dropping this has them count again.
pub(super) struct Unlimited {
    pid: Pid,
    limits: Vec<(Resource, Rlimit)>,
}

impl Unlimited {
    /// Lifts what may be lifted: otherwise a call fails that needs more.
    pub fn make(pid: i32) -> Self {
        let pid = Pid::from_raw(pid).expect("checked when read");
        let mut unlimited = Self {
            pid,
            limits: Vec::new(),
        };
        for resource in [Resource::As, Resource::Memlock] {
            let (current, maximum) = (None, None);
            unlimited.lift(resource, Rlimit { current, maximum });
        }
        unlimited
    }

    /// Has room for one more descriptor, where that is allowed.
    pub fn add_descriptor(&mut self) -> Result<()> {
        let limits = read_proc(&Process::new(self.pid.as_raw_nonzero().get()), "limits")?;
        let limits = sys::proc::limits(&limits);
        let limits = limits.map_err(|error| Error::kernel(error.to_string(), invalid()))?;
        let mut tries = more_descriptors(limits[Resource::Nofile as usize]).into_iter();
        tries.any(|limit| self.lift(Resource::Nofile, limit));
        Ok(())
    }

    fn lift(&mut self, resource: Resource, limit: Rlimit) -> bool {
        match prlimit(Some(self.pid), resource, limit) {
            Ok(before) => {
                self.limits.push((resource, before));
                true
            }
            Err(error) => {
                log::debug!("a limit of {:?} stays: {error}", self.pid);
                false
            }
        }
    }
}

/// Limits of descriptors that leave room for one more than `now`, best first. None of them is lower
/// than that one: a hard limit that was lowered cannot be raised again without a privilege.
fn more_descriptors(now: Limit) -> [Rlimit; 2] {
    /// What fs.nr_open is, unless it was changed.
    const USUAL_MOST: u64 = 1 << 20;
    [now.hard.max(USUAL_MOST), now.hard].map(|most| {
        let most = Some(most).filter(|most| *most != u64::MAX);
        Rlimit {
            current: most,
            maximum: most,
        }
    })
}

impl Drop for Unlimited {
    fn drop(&mut self) {
        for (resource, before) in self.limits.drain(..) {
            if let Err(error) = prlimit(Some(self.pid), resource, before) {
                log::warn!("a limit of {:?} is not as it was: {error}", self.pid);
            }
        }
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

    fn number(&self, tid: i32, id: DescriptionId) -> Option<i32> {
        let mut descriptors = self.task_of(tid)?.descriptors.iter();
        let descriptor = descriptors.find(|one| one.description == id.0);
        descriptor.map(|descriptor| descriptor.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_of_descriptors_is_lowered() {
        let hard = |soft, hard| more_descriptors(Limit { soft, hard }).map(|limit| limit.maximum);
        assert_eq!(hard(1024, 20_000), [Some(1 << 20), Some(20_000)]);
        assert_eq!(hard(1024, 1 << 30), [Some(1 << 30); 2]);
        assert_eq!(hard(1024, u64::MAX), [None; 2]);
    }
}
