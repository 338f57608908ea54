//! Calls made inside a stopped process that open descriptors, the last of which is brought here;
//! none stays there, not even when this process is killed on the way.
//!
//! The leader makes the calls and parks. While it is parked the descriptor is copied; then the
//! leader closes them. What closes them stands in front of the leader's way back, so that a leader
//! that nobody fetches closes them as well.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use abi::{Addr, Kind, Op, Span, offset};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::{Batch, Injection, Place, inside};
use crate::{Error, Result, Thread};

/// The result of a call that was not reached: none that the kernel gives, and no descriptor.
pub(crate) const UNMADE: i64 = -4096;

/// Calls of the leader that open descriptors.
pub(crate) trait Opening: Batch {
    /// Does our part while the leader makes the calls; `has_ended` tells whether it has come to the
    /// end of them.
    fn assist(&self, _has_ended: &dyn Fn() -> bool) -> io::Result<()> {
        Ok(())
    }
}

/// A batch of one call.
struct One(Op);

impl Batch for One {
    fn ops_bytes(&self) -> usize {
        2 * Op::BYTES
    }

    fn data_bytes(&self) -> usize {
        0
    }

    fn compile(&self, _: Addr, _: Addr) -> (Vec<u8>, Vec<u8>) {
        let ops = [self.0.to_bytes(), Op::end().to_bytes()];
        (ops.concat(), Vec::new())
    }

    fn opened(&self, ops: Addr, _: Addr) -> Vec<Addr> {
        vec![ops.plus(offset::RESULT as u64)]
    }
}

impl Opening for One {}

impl Injection {
    /// Has the process make `call`, which opens a descriptor, and brings that here. The blob is
    /// taken out again, and the process has the descriptors that it had before.
    ///
    /// The outer result is that of the injection; the inner one that of the call: with a failed
    /// call the process is as it was.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`], [`Error::Astray`]. The threads go on then.
    pub fn fetch(self, call: Op) -> Result<(Vec<Thread>, io::Result<OwnedFd>)> {
        self.fetch_last(&One(call.with(Kind::Try, 0)))
    }

    /// As [`Injection::fetch`]: what the last call opens. The others fail the batch.
    pub(crate) fn fetch_last(
        mut self,
        opening: &dyn Opening,
    ) -> Result<(Vec<Thread>, io::Result<OwnedFd>)> {
        // The others stay as they are; only the leader has to find its way back.
        let others = self.threads.split_off(1);
        let fetched = self.fetch_by_leader(opening);
        self.threads.extend(others);
        let fetched = fetched?;
        Ok((self.cure()?, fetched))
    }

    fn fetch_by_leader(&mut self, opening: &dyn Opening) -> Result<io::Result<OwnedFd>> {
        let batches: [&dyn Batch; 1] = [opening];
        let area = self.map_area(&batches)?;
        let places = self.fill(area, &batches)?;
        self.start(&places)?;
        // Without our part a call fails, and the leader parks.
        let (process, parked) = (&self.threads[0].process, places[0].header);
        let assisted = opening.assist(&|| {
            let mut word = [0; 4];
            sys::vm::read_exact(process, parked, &mut word).is_err() || word != [0; 4]
        });
        self.wait_parked(&places)?;
        let place = &places[0];
        let fetched = match (self.copy(opening, place), assisted) {
            (Ok(Err(error)), Err(why)) if error.raw_os_error() == Some(-(UNMADE as i32)) => {
                Ok(Err(why))
            }
            (fetched, _) => fetched,
        };
        self.close_there(area, place, opening.opened(place.ops, place.data).len())?;
        self.lead_to_unmap(area)?;
        fetched
    }

    /// Copies the descriptor that the parked leader has opened last.
    fn copy(&self, opening: &dyn Opening, place: &Place) -> Result<io::Result<OwnedFd>> {
        let process = &self.threads[0].process;
        let mut ops = vec![0; opening.ops_bytes() - Op::BYTES];
        let read = sys::vm::read_exact(process, place.ops, &mut ops);
        read.map_err(|e| Error::of(process.pid(), "cannot read the blob's answers", e))?;
        let mut number = 0;
        for op in ops.chunks_exact(Op::BYTES) {
            let result = &op[offset::RESULT..][..8];
            number = i64::from_le_bytes(result.try_into().expect("eight bytes")) as i32;
            if number < 0 {
                return Ok(Err(io::Error::from_raw_os_error(-number)));
            }
        }
        let failed = |error| Error::of(process.pid(), "pidfd_getfd", error);
        let pidfd = process.pidfd().map_err(failed)?;
        let got = pidfd_getfd(pidfd.as_fd(), number, PidfdGetfdFlags::empty());
        got.map(Ok).map_err(|errno| failed(errno.into()))
    }

    /// Has the parked leader close what it opened; where a call failed there is none.
    fn close_there(&mut self, area: Span, place: &Place, count: usize) -> Result<()> {
        let leader = &mut self.threads[0];
        leader.halt()?;
        inside(leader, area)?;
        let mut closing = leader.saved.registers;
        closing.abandon_call();
        closing.enter(place.self_restore);
        leader.borrow(&closing)?;
        for _ in 0..count {
            leader.run_call()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::testing::{cat, descriptors, echo, memory, stop, vdso};

    /// memfd_create("", MFD_CLOEXEC): the empty name is the zero byte behind a name's end.
    fn memfd(pid: i32) -> Op {
        // The first bytes of an ELF file end with zeros before byte 16.
        Op::call(319, [vdso(pid).start.0 + 15, 1, 0, 0, 0, 0])
    }

    #[test]
    fn a_descriptor_is_brought_and_does_not_stay() {
        let (mut child, pid) = cat();
        let before = descriptors(pid);
        let maps = || std::fs::read(format!("/proc/{pid}/maps")).expect("maps");
        let maps_before = maps();
        let threads = stop(pid);
        let saved = threads[0].saved;
        let injection = Injection::new(threads, memory(pid), &[vdso(pid)]).expect("room");
        let (threads, fd) = injection.fetch(memfd(pid)).expect("an injection");
        let file = File::from(fd.expect("a descriptor"));
        file.write_all_at(b"here", 0).expect("it works");
        assert_eq!(descriptors(pid), before);
        assert_eq!(maps(), maps_before);
        assert_eq!(
            sys::ptrace::registers(pid).expect("registers"),
            saved.registers
        );
        assert_eq!(sys::ptrace::signal_mask(pid).expect("mask"), saved.mask);
        drop(threads);
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_call_that_fails_is_told_and_closes_nothing() {
        let (mut child, pid) = cat();
        let before = descriptors(pid);
        let injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let wrong = Op::call(319, [8, 0, 0, 0, 0, 0]);
        let (threads, fd) = injection.fetch(wrong).expect("an injection");
        assert_eq!(fd.expect_err("a bad address").raw_os_error(), Some(14));
        assert_eq!(descriptors(pid), before);
        drop(threads);
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_leader_that_nobody_fetches_closes_it_itself() {
        let (mut child, pid) = cat();
        let before = descriptors(pid);
        let counted = before.len();
        // A tracer that is killed: the kernel lets go of what a thread traces when it ends.
        let tracer = std::thread::spawn(move || {
            let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
            let batch = One(memfd(pid));
            let batches: [&dyn Batch; 1] = [&batch];
            let area = injection.map_area(&batches).expect("an area");
            let places = injection.fill(area, &batches).expect("filled");
            injection.start(&places).expect("started");
            injection.wait_parked(&places).expect("parked");
            assert_eq!(descriptors(pid).len(), counted + 1);
            drop(injection.forget());
            area
        });
        let area = tracer.join().expect("it does its work");
        echo(&mut child);
        assert_eq!(descriptors(pid), before);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mapped = || {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
            maps.contains(&format!("{:x}-", area.start.0))
        };
        while mapped() {
            assert!(Instant::now() < deadline, "the blob is still there");
            std::thread::yield_now();
        }
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
