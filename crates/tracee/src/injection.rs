//! An injection: the blob is mapped into a stopped process and makes calls in each thread.
//!
//! The first call, the `mmap` that makes room, is made from a *stub*: a `syscall` instruction,
//! then the `munmap` of what it returned, then [`self_restore`] code, written into the zero padding
//! that ends an executable mapping (the vDSO has some). Such a write goes into a private copy of
//! the page, is never executed by the target itself, and is zeroed again at the end.
//!
//! A process may not be allowed to run memory that it may write (`PR_SET_MDWE`, prctl(2)). Then
//! the area's code is mapped apart, never to be written by the process, and comes through
//! /proc/PID/mem, which writes to a private mapping whatever its protection. Both calls give the
//! area's start, so the stub unmaps all of it after either.
//!
//! A thread that runs in the mapping belongs to its tracer as long as that lives: parked at the end
//! of its script, it waits for a lock of futex(2) that bears the number of the tracer's thread. The
//! kernel gives it the lock when that thread ends, at once; no clock decides. A tracer that stands
//! still for however long finds everything as it was. A thread that an ended tracer leaves behind
//! has a way back:
//! - in the stub: what was mapped is unmapped and the self-restore code follows;
//! - in a batch: the thread comes to the end of its script and goes back by itself. A leader that
//!   is alone unmaps the area through the stub. Where others may be in it, it stays, and whoever
//!   stops the process next removes it ([`Injection::remove`]): no thread can tell that another
//!   one has executed its last instruction there;
//! - afterwards: the leader's registers lead to the stub's `munmap`, the others' are their own.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::arch::self_restore::{self, Leaving};
use crate::arch::{self, Ground, STUB_BYTES};
use sys::stand_in::StandIn;

use crate::limit::Limit;
use crate::{Call, Error, Result, Thread};
use abi::{Addr, Header, PAGE_BYTES, Span, offset};

pub(crate) use fetch::{Opening, UNMADE};
pub use left::{Left, is_injected, left_areas};
use left::{TRAILER_AT, Trailer};

mod answers;
mod fetch;
mod left;
mod owner;

/// How many bytes at the end of a mapping are looked at for room for it: some more, so that the
/// last instruction before them may end in zeros.
pub const PADDING_BYTES: usize = STUB_BYTES + MARGIN_BYTES;
const MARGIN_BYTES: usize = 64;
/// Calls to be made by one thread, laid out for addresses that are known only then.
pub trait Batch {
    /// The size of the compiled ops in bytes, with the end.
    fn ops_bytes(&self) -> usize;
    /// The size of the data that they point at, in bytes.
    fn data_bytes(&self) -> usize;
    /// The ops and the data for these addresses.
    fn compile(&self, ops: Addr, data: Addr) -> (Vec<u8>, Vec<u8>);
    /// Where the numbers of descriptors stand that the process is not to keep, come what may; a
    /// negative number is none.
    fn opened(&self, _ops: Addr, _data: Addr) -> Vec<Addr> {
        Vec::new()
    }
}

/// What became of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Each op's result (negative errno on failure), without the end.
    pub results: Vec<i64>,
    /// The data after the calls.
    pub data: Vec<u8>,
    /// The index of the op that failed and ended the batch.
    pub failed: Option<usize>,
}

/// A stopped process with the blob in it. Dropping it takes the blob out.
#[derive(Debug)]
pub struct Injection {
    threads: Vec<Thread>,
    /// Given away by [`Injection::forget`] alone.
    memory: Option<File>,
    stub: Addr,
    /// What was there before.
    covered: Vec<u8>,
    area: Option<Span>,
    /// True if the stub was written.
    has_stub: bool,
    /// True if the area's code is in pages of its own, which the process may not write.
    is_code_apart: bool,
    /// The number of this thread, whose end gives parked threads free, as the process sees it.
    owner: u32,
    /// A process that ends with this thread, for a target that cannot see this thread's number.
    stand_in: Option<StandIn>,
}

/// Where each thread's part of the area is.
struct Place {
    header: Addr,
    ops: Addr,
    data: Addr,
    data_end: Addr,
    self_restore: Addr,
}

impl Place {
    /// From its header to the end of its data, in bytes.
    fn body_bytes(&self) -> usize {
        (self.data_end.0 - self.header.0) as usize
    }
}

impl Injection {
    /// Prepares an injection into the process whose threads these are, the leader first.
    /// `executable` are its executable mappings, the vDSO first if it has one; `memory` is its
    /// /proc/PID/mem opened for reading and writing.
    ///
    /// # Errors
    /// [`Error::NoPadding`] when no mapping ends with enough zeros; the threads go on then.
    ///
    /// # Panics
    /// Without threads.
    pub fn new(threads: Vec<Thread>, memory: File, executable: &[Span]) -> Result<Self> {
        let pid = threads[0].process.pid();
        let stub = executable.iter().find_map(|span| padding(&memory, *span));
        let stub = stub.ok_or(Error::NoPadding {
            pid,
            bytes: STUB_BYTES,
        })?;
        Ok(Self::at(threads, memory, stub))
    }

    /// As [`Injection::new`], with `stub` where [`padding_in`] found it to fit.
    #[must_use]
    pub fn at(threads: Vec<Thread>, memory: File, stub: Addr) -> Self {
        Self::covering(threads, memory, stub, vec![0; STUB_BYTES])
    }

    fn covering(threads: Vec<Thread>, memory: File, stub: Addr, covered: Vec<u8>) -> Self {
        let owner = rustix::thread::gettid().as_raw_nonzero().get();
        Self {
            threads,
            memory: Some(memory),
            stub,
            covered,
            area: None,
            has_stub: false,
            is_code_apart: false,
            owner: owner.cast_unsigned(),
            stand_in: None,
        }
    }

    /// As [`Injection::new`] for a process whose executable mappings end with no zeros: the last
    /// [`STUB_BYTES`] of `executable` are no code, and what they are is put back.
    ///
    /// # Errors
    /// [`Error::NoPadding`] when they cannot be read; the threads go on then.
    ///
    /// # Panics
    /// Without threads.
    pub fn over(threads: Vec<Thread>, memory: File, executable: Span) -> Result<Self> {
        let stub = Addr(executable.end.0 - STUB_BYTES as u64);
        let mut covered = vec![0; STUB_BYTES];
        let read = memory.read_exact_at(&mut covered, stub.0);
        read.map_err(|_| Error::NoPadding {
            pid: threads[0].process.pid(),
            bytes: STUB_BYTES,
        })?;
        Ok(Self::covering(threads, memory, stub, covered))
    }

    /// Runs one batch in each thread, at the same time, and calls `meanwhile`; `batches` are in the
    /// threads' order.
    ///
    /// # Errors
    /// [`Error::Gone`] when the process dies; [`Error::Kernel`] when it may not map memory;
    /// [`Error::Astray`].
    pub fn run(
        &mut self,
        batches: &[&dyn Batch],
        meanwhile: impl FnOnce(),
    ) -> Result<Vec<Outcome>> {
        assert_eq!(batches.len(), self.threads.len(), "one batch a thread");
        let area = self.map_area(batches)?;
        let places = self.fill(area, batches)?;
        self.start(&places)?;
        meanwhile();
        let answers = self.wait_parked(&places)?;
        self.fetch_threads(area, &places)?;
        Ok(answers::outcomes(&places, batches, &answers))
    }

    /// Sends every thread into the blob, the leader first: from the moment in which others may be
    /// there, it must not unmap the area.
    fn start(&mut self, places: &[Place]) -> Result<()> {
        let leader = places[0].header;
        let entry = self.area.expect("it was filled").start;
        for (index, place) in places.iter().enumerate() {
            if index == 1 {
                self.set_shared(leader, true)?;
            }
            let thread = &mut self.threads[index];
            let mut code = thread.saved.registers;
            arch::enter_blob(&mut code, entry, (place.ops, place.header));
            thread.borrow(&code)?;
            thread.start()?;
        }
        Ok(())
    }

    /// Tells the leader, whose header this is, whether others may be in the area.
    fn set_shared(&self, leader: Addr, shared: bool) -> Result<()> {
        let process = &self.threads[0].process;
        let word = u32::from(shared).to_le_bytes();
        let put = sys::vm::write(process, leader.plus(offset::SHARED as u64), &word);
        put.map_err(|e| Error::of(process.pid(), "cannot write the blob's state", e))
    }

    /// Has the leader map the area.
    fn map_area(&mut self, batches: &[&dyn Batch]) -> Result<Span> {
        const READ_WRITE_EXEC: u64 = 7;
        const READ_WRITE: u64 = 3;
        const READ_EXEC: u64 = 5;
        let parts = batches
            .iter()
            .map(|batch| part_bytes(*batch))
            .sum::<usize>();
        // With room for either way.
        let code_bytes = (code_bytes(batches.len()) as u64).next_multiple_of(PAGE_BYTES);
        let rest = (flags_bytes(batches.len()) + parts) as u64;
        let bytes = (code_bytes + rest).next_multiple_of(PAGE_BYTES);
        self.put_stub(bytes)?;
        let executable = "it may not map executable memory";
        let start = match self.map(0, bytes, READ_WRITE_EXEC, 0)? {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                self.is_code_apart = true;
                let start = self.map(0, bytes, READ_WRITE, 0)?;
                let start = start.map_err(|e| self.refused("it may not map memory", e))?;
                self.area = Some(Span::new(start, bytes));
                self.map(start.0, code_bytes, READ_EXEC, MAP_FIXED)?
            }
            mapped => mapped,
        };
        let start = start.map_err(|e| self.refused(executable, e))?;
        let area = Span::new(start, bytes);
        self.area = Some(area);
        Ok(area)
    }

    /// Writes the stub, for an area of so many bytes.
    fn put_stub(&mut self, bytes: u64) -> Result<()> {
        let leader = &self.threads[0];
        let len_bytes = u32::try_from(bytes).map_err(|_| too_large(leader.tid))?;
        let stub = arch::stub(len_bytes, &leader.saved.way_back());
        let memory = self.memory.as_ref().expect("given away at the end");
        self.has_stub = true;
        let put = memory.write_all_at(&stub, self.stub.0);
        put.map_err(|e| Error::of(leader.tid, "cannot write the stub", e))
    }

    fn refused(&self, doing: &'static str, error: io::Error) -> Error {
        Error::of(self.threads[0].tid, doing, error)
    }

    /// Has the leader make the stub's first call: private memory with this protection, and `flags`
    /// besides. The inner result is the kernel's.
    fn map(
        &mut self,
        start: u64,
        bytes: u64,
        protection: u64,
        flags: u64,
    ) -> Result<io::Result<Addr>> {
        const PRIVATE_ANONYMOUS: u64 = 0x22;
        const MAP_32BIT: u64 = libc::MAP_32BIT as u64;
        // All of its memory is below 4 GiB, where its own kind of calls reach, and where the kernel
        // does not look for room without being told.
        let low = match self.threads[0].saved.registers.is_32_bit() {
            true if flags & MAP_FIXED == 0 => MAP_32BIT,
            _ => 0,
        };
        let flags = PRIVATE_ANONYMOUS | low | flags;
        let call = Call {
            at: self.stub,
            number: arch::MMAP,
            args: [start, bytes, protection, flags, u64::MAX, 0],
        };
        let leader = &mut self.threads[0];
        leader.borrow(&call.registers(leader.saved.registers))?;
        let start = leader.run_call()?;
        if let errno @ 1..4096 = -start {
            let errno = i32::try_from(errno).expect("an errno");
            return Ok(Err(io::Error::from_raw_os_error(errno)));
        }
        Ok(Ok(Addr(start.cast_unsigned())))
    }

    /// Writes the area: the blob, each thread's way back, the bytes that tell who is on that way,
    /// then each one's header, ops and data.
    fn fill(&self, area: Span, batches: &[&dyn Batch]) -> Result<Vec<Place>> {
        let count = batches.len();
        let in_pages = self.is_code_apart || count > 1;
        let code_bytes = match in_pages {
            false => code_bytes(count),
            true => code_bytes(count).next_multiple_of(PAGE_BYTES as usize),
        };
        let ground = Ground {
            area,
            code_bytes: code_bytes as u64,
            stub: self.stub,
        };
        let flags = area.start.plus(code_bytes as u64);
        let mut code = blob::code().to_vec();
        code.resize(TRAILER_AT, 0xcc);
        code.extend(Trailer::new(count, &ground).to_bytes());
        let mut rest = vec![0; flags_bytes(count)];
        let mut places = Vec::new();
        for (index, batch) in batches.iter().enumerate() {
            rest.resize(rest.len().next_multiple_of(64), 0);
            let header = flags.plus(rest.len() as u64);
            let ops = header.plus(Header::BYTES as u64);
            let data = ops.plus((batch.ops_bytes().next_multiple_of(64)) as u64);
            let data_end = data.plus(batch.data_bytes().next_multiple_of(64) as u64);
            code.resize(CODE_BYTES + index * WAYS_BYTES, 0xcc);
            let way = area.start.plus(code.len() as u64);
            code.extend(match index {
                0 => self.leaders_way(header, &ground, batch.opened(ops, data)),
                _ => {
                    let flag = flags.plus(index as u64);
                    let leaving = Leaving { code: way, flag };
                    self_restore::code(&self.threads[index].saved.way_back(), Some(leaving))
                }
            });
            let header_value = Header {
                resume: way.0,
                owner: self.owner,
                ..Header::default()
            };
            let (op_bytes, data_bytes) = batch.compile(ops, data);
            rest.extend(header_value.to_bytes());
            rest.extend(op_bytes);
            rest.resize((data.0 - flags.0) as usize, 0);
            rest.extend(data_bytes);
            rest.resize((data_end.0 - flags.0) as usize, 0);
            places.push(Place {
                header,
                ops,
                data,
                data_end,
                self_restore: way,
            });
        }
        code.resize(code_bytes, 0xcc);
        self.put(area.start, code, &rest)?;
        Ok(places)
    }

    /// The code with which the leader goes back whose tracer has ended, and closes what it opened.
    fn leaders_way(&self, header: Addr, ground: &Ground, opened: Vec<Addr>) -> Vec<u8> {
        let mut code = opened
            .into_iter()
            .flat_map(arch::closing)
            .collect::<Vec<_>>();
        code.extend(arch::leaders_way(header, ground));
        assert!(code.len() <= WAYS_BYTES, "{}", code.len());
        code
    }

    /// Writes the code at the area's start, and what follows it.
    fn put(&self, start: Addr, mut code: Vec<u8>, rest: &[u8]) -> Result<()> {
        let process = &self.threads[0].process;
        let failed = |e| Error::of(process.pid(), "cannot write the blob", e);
        if !self.is_code_apart {
            code.extend(rest);
            return sys::vm::write(process, start, &code).map_err(failed);
        }
        let memory = self.memory.as_ref().expect("given away at the end");
        memory.write_all_at(&code, start.0).map_err(failed)?;
        sys::vm::write(process, start.plus(code.len() as u64), rest).map_err(failed)
    }

    /// Waits until every thread has parked; gives what each has left from its header on.
    fn wait_parked(&mut self, places: &[Place]) -> Result<Vec<Vec<u8>>> {
        const LONG_PAUSE: Duration = Duration::from_millis(1);
        const AT_ONCE: usize = 16;
        let process = self.threads[0].process.clone();
        let limit = Limit::begin();
        let mut pause = Duration::from_micros(10);
        let mut answers = Vec::with_capacity(places.len());
        let threads = self.threads.chunks_mut(AT_ONCE);
        for (group, threads) in places.chunks(AT_ONCE).zip(threads) {
            // The words first: what is read after a word that is set is complete.
            let words = group.iter().map(|place| (place.header, 4));
            let bodies = group.iter().map(|place| (place.header, place.body_bytes()));
            let pieces = words.chain(bodies).collect::<Vec<_>>();
            let mut bytes = vec![0; pieces.iter().map(|piece| piece.1).sum()];
            loop {
                // Before the look: one that comes too late has still looked.
                let is_over = limit.is_over();
                let got = sys::vm::read_pieces(&process, &pieces, &mut bytes);
                let got =
                    got.map_err(|e| Error::of(process.pid(), "cannot read the blob's state", e))?;
                let (words, mut bodies) = bytes.split_at(4 * group.len());
                if got == bytes.len() && words.chunks(4).all(|word| word != [0; 4]) {
                    for place in group {
                        let (body, rest) = bodies.split_at(place.body_bytes());
                        answers.push(body.to_vec());
                        bodies = rest;
                    }
                    break;
                }
                if is_over {
                    let what = "a batch of calls did not end".to_owned();
                    return Err(Error::Astray {
                        tid: process.pid(),
                        what,
                    });
                }
                if pause == LONG_PAUSE {
                    // A stop cannot be blocked: it may have come in the middle.
                    threads.iter_mut().try_for_each(Thread::keep_going)?;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONG_PAUSE);
            }
        }
        Ok(answers)
    }

    /// Stops the parked threads. The leader's registers lead to unmapping the area and back, the
    /// others' are their own again.
    fn fetch_threads(&mut self, area: Span, places: &[Place]) -> Result<()> {
        let others = &mut self.threads[1..];
        for thread in &mut *others {
            thread.halt()?;
            inside(thread, area)?;
        }
        let has_others = !others.is_empty();
        for thread in others {
            thread.give_back()?;
        }
        if has_others {
            self.set_shared(places[0].header, false)?;
        }
        let leader = &mut self.threads[0];
        leader.halt()?;
        inside(leader, area)?;
        self.lead_to_unmap(area)
    }

    /// Has the leader's registers lead to unmapping the area and back.
    fn lead_to_unmap(&mut self, area: Span) -> Result<()> {
        let leader = &mut self.threads[0];
        let unmap = Call {
            at: self.stub.plus(arch::UNMAP_AT),
            number: arch::MUNMAP,
            args: [area.start.0, area.bytes(), 0, 0, 0, 0],
        };
        leader.borrow(&unmap.registers(leader.saved.registers))
    }

    /// The mapping that an injection added, to be left out of a dump.
    #[must_use]
    pub fn area(&self) -> Option<Span> {
        self.area
    }

    /// Takes the blob out again: unmaps the area, gives every thread its registers and signal mask
    /// and zeroes the stub.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn cure(mut self) -> Result<Vec<Thread>> {
        self.clean()?;
        Ok(std::mem::take(&mut self.threads))
    }

    fn clean(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.has_stub) {
            return Ok(());
        }
        let area = self.area.take();
        // They run when an injection has failed halfway.
        let stub = Span::new(self.stub, STUB_BYTES as u64);
        let areas = [area.unwrap_or(stub), stub];
        for thread in &mut self.threads {
            thread.recall(&areas)?;
        }
        if let Some(area) = area {
            self.lead_to_unmap(area)?;
            self.threads[0].run_call()?;
        }
        for thread in &mut self.threads {
            thread.give_back()?;
        }
        let memory = self.memory.as_ref().expect("given away at the end");
        let zeroed = memory.write_all_at(&self.covered, self.stub.0);
        zeroed.map_err(|e| Error::of(self.threads[0].tid, "cannot take the stub away", e))
    }

    /// The stopped threads, the leader first.
    #[must_use]
    pub fn threads(&self) -> &[Thread] {
        &self.threads
    }

    /// Leaves everything as it is, the process was killed, or goes on by its self-restore code;
    /// gives its memory's file.
    pub fn forget(mut self) -> File {
        self.has_stub = false;
        self.threads.drain(..).for_each(Thread::forget);
        self.memory.take().expect("given away once")
    }
}

impl Drop for Injection {
    fn drop(&mut self) {
        if let Err(error) = self.clean() {
            log::warn!(
                "cannot take the blob out of pid {}: {error}",
                self.threads[0].process.pid()
            );
        }
    }
}

const MAP_FIXED: u64 = libc::MAP_FIXED as u64;

/// The blob's code, and what the area is.
const CODE_BYTES: usize = 512;

/// The room for a thread's way back, in bytes.
const WAYS_BYTES: usize = {
    let most = [arch::WAY_BYTES, self_restore::LEN_BYTES];
    let most = if most[0] > most[1] { most[0] } else { most[1] };
    most.next_multiple_of(64)
};

/// The code for so many threads, in bytes.
fn code_bytes(threads: usize) -> usize {
    CODE_BYTES + threads * WAYS_BYTES
}

/// The bytes that tell which of so many threads are on their way back; none for one alone.
fn flags_bytes(threads: usize) -> usize {
    match threads {
        1 => 0,
        _ => threads.next_multiple_of(64),
    }
}

/// A thread's header, ops and data, in bytes.
fn part_bytes(batch: &dyn Batch) -> usize {
    Header::BYTES.next_multiple_of(64)
        + batch.ops_bytes().next_multiple_of(64)
        + batch.data_bytes().next_multiple_of(64)
}

fn too_large(tid: i32) -> Error {
    let what = "more questions than fit into 4 GiB".to_owned();
    Error::Astray { tid, what }
}

/// A thread that was parked must still be in the area when it is fetched.
fn inside(thread: &Thread, area: Span) -> Result<()> {
    let regs = sys::ptrace::registers(thread.tid);
    let regs = regs.map_err(|e| Error::of(thread.tid, "PTRACE_GETREGS", e))?;
    if area.contains(regs.at()) {
        return Ok(());
    }
    let what = "it went on before its answers were fetched".to_owned();
    Err(Error::Astray {
        tid: thread.tid,
        what,
    })
}

/// The last bytes of an executable mapping, if they are zero and so nobody's code, or a stub that
/// was left by an injection that was cut short.
pub(crate) fn padding(memory: &File, span: Span) -> Option<Addr> {
    let at = span.end.0.checked_sub(PADDING_BYTES as u64)?;
    if at < span.start.0 {
        return None;
    }
    let mut tail = [0; PADDING_BYTES];
    memory.read_exact_at(&mut tail, at).ok()?;
    padding_in(&tail, span.end)
}

/// Where a stub fits that is to end at `end`, given the last [`PADDING_BYTES`] of an executable
/// mapping before that.
#[must_use]
pub fn padding_in(tail: &[u8; PADDING_BYTES], end: Addr) -> Option<Addr> {
    let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let (margin, stub) = tail.split_at(MARGIN_BYTES);
    let free = zero(margin) && (zero(stub) || arch::is_stub(stub));
    free.then(|| Addr(end.0 - STUB_BYTES as u64))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    use abi::Op;
    use sys::process::Process;

    use super::*;
    use crate::testing::{cat, echo, memory, span_at, stop, vdso};

    /// How long something may take that takes moments.
    const SOON: Duration = Duration::from_secs(60);

    /// Has a tracer begin and end as one does that is killed: the kernel lets go of what a thread
    /// traces when it ends, and does nothing else.
    fn killed<T: Send>(tracer: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(tracer).join().expect("it does its work"))
    }

    struct Calls(Vec<Op>);

    impl Batch for Calls {
        fn ops_bytes(&self) -> usize {
            (self.0.len() + 1) * Op::BYTES
        }
        fn data_bytes(&self) -> usize {
            16
        }
        fn compile(&self, _: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
            let ops = self.0.iter().map(|op| {
                let mut op = *op;
                op.args[0] = if op.number == 318 { data.0 } else { op.args[0] };
                op.to_bytes()
            });
            (
                ops.chain([Op::end().to_bytes()]).flatten().collect(),
                vec![0; 16],
            )
        }
    }

    #[test]
    fn calls_are_made_inside_and_nothing_stays() {
        let (mut child, pid) = cat();
        let maps = || std::fs::read(format!("/proc/{pid}/maps")).expect("maps");
        let before = maps();
        let threads = stop(pid);
        let saved = threads[0].saved;
        let mut injection = Injection::new(threads, memory(pid), &[vdso(pid)]).expect("room");
        // getpid; getrandom(data, 16, 0); close(-1), which fails
        let mut close = Op::call(3, [u64::MAX, 0, 0, 0, 0, 0]);
        close.kind = abi::Kind::Call as u64;
        let calls = Calls(vec![
            Op::call(39, [0; 6]),
            Op::call(318, [0, 16, 0, 0, 0, 0]),
            close,
        ]);
        let outcome = injection.run(&[&calls], || ()).expect("runs").remove(0);
        assert_eq!(outcome.results, [i64::from(pid), 16, -9]);
        assert_eq!(outcome.failed, Some(2));
        assert_ne!(outcome.data, [0; 16]);
        let threads = injection.cure().expect("cured");
        assert_eq!(
            sys::ptrace::registers(pid).expect("registers"),
            saved.registers
        );
        assert_eq!(sys::ptrace::signal_mask(pid).expect("mask"), saved.mask);
        assert_eq!(maps(), before);
        drop(threads);
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Has the process forbid itself memory that it may write and run.
    fn deny_write_exec(pid: i32) -> bool {
        const PRCTL: u64 = 157;
        const SET_MDWE: u64 = 65;
        let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let calls = Calls(vec![Op::call(PRCTL, [SET_MDWE, 1, 0, 0, 0, 0])]);
        let outcome = injection.run(&[&calls], || ()).expect("runs").remove(0);
        drop(injection.cure().expect("cured"));
        outcome.results == [0]
    }

    #[test]
    fn a_process_that_may_not_run_what_it_writes_makes_calls() {
        let (mut child, pid) = cat();
        if !deny_write_exec(pid) {
            child.kill().expect("kill");
            child.wait().expect("wait");
            testkit::skip!("no PR_SET_MDWE");
        }
        let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        let before = maps();
        let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let calls = Calls(vec![Op::call(39, [0; 6])]);
        let outcome = injection.run(&[&calls], || ()).expect("runs").remove(0);
        assert_eq!(outcome.results, [i64::from(pid)]);
        let code = format!("{:x}-", injection.area().expect("an area").start.0);
        let line = maps()
            .lines()
            .find(|line| line.starts_with(&code))
            .map(str::to_owned);
        assert!(line.expect("code").contains(" r-xp "), "{}", maps());
        assert!(!maps().contains(" rwxp "), "{}", maps());
        drop(injection.cure().expect("cured"));
        assert_eq!(maps(), before);
        echo(&mut child);
        // A tracer that is killed when the area is mapped, and one with a batch under way.
        killed(|| {
            let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
            injection.map_area(&[&calls]).expect("an area");
            drop(injection.forget());
        });
        echo(&mut child);
        assert_eq!(maps(), before);
        killed(|| {
            let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
            injection.run(&[&calls], || ()).expect("runs");
            drop(injection.forget());
        });
        echo(&mut child);
        assert_eq!(maps(), before);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Injects into a program of three threads, one of which stops it while it is in the blob. With
    /// `goes_on`, it is told to continue before the injection ends.
    fn stop_in_a_batch(at: usize, goes_on: bool) {
        const PROGRAM: &str = "import sys,threading,time\n\
            for _ in range(2): threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()\n\
            for line in sys.stdin.buffer.raw: print(end='x', flush=True)";
        let mut command = Command::new("python3");
        let command = command.args(["-c", PROGRAM]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let pid = i32::try_from(child.id()).expect("a pid");
        let ask = |child: &mut Child| {
            let stdin = child.stdin.as_mut().expect("piped");
            stdin.write_all(b"x\n").expect("it reads");
            let stdout = child.stdout.as_mut().expect("piped");
            stdout.read_exact(&mut [0]).expect("it echoes");
        };
        ask(&mut child);
        let tids = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
        let number = |name: std::ffi::OsString| name.to_string_lossy().parse::<i32>();
        let mut tids = tids
            .map(|entry| number(entry.expect("an entry").file_name()).expect("a number"))
            .collect::<Vec<_>>();
        tids.sort_by_key(|tid| *tid != pid);
        let stop = |tid: &i32| {
            let seized = Thread::seize(*tid).expect("seize");
            seized.stopped(&Process::new(pid), None).expect("stopped")
        };
        let threads = tids.iter().map(stop).collect::<Vec<_>>();
        let mut injection = Injection::new(threads, memory(pid), &[vdso(pid)]).expect("room");
        let calls = Calls(vec![Op::call(186, [0; 6])]);
        // tgkill(pid, tid, SIGSTOP), to itself
        let stopping = Calls(vec![
            Op::call(234, [pid as u64, tids[at] as u64, 19, 0, 0, 0]),
            Op::call(186, [0; 6]),
        ]);
        let mut batches = [&calls as &dyn Batch; 3];
        batches[at] = &stopping;
        let outcomes = injection.run(&batches, || ()).expect("it runs on");
        assert_eq!(outcomes[at].results, [0, i64::from(tids[at])]);
        let to = rustix::process::Pid::from_raw(pid).expect("a pid");
        assert_eq!(
            injection.threads()[0].group_stop,
            Some(sys::ptrace::SIGSTOP)
        );
        if goes_on {
            rustix::process::kill_process(to, rustix::process::Signal::CONT).expect("it lives");
            drop(injection.cure().expect("cured"));
            ask(&mut child);
            child.kill().expect("kill");
            child.wait().expect("wait");
            return;
        }
        drop(injection.cure().expect("cured"));
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
            stat.rsplit(") ").next().map(|rest| rest.starts_with('T'))
        };
        let deadline = Instant::now() + SOON;
        while state() != Some(true) {
            assert!(Instant::now() < deadline, "the stop was lost");
            std::thread::yield_now();
        }
        rustix::process::kill_process(to, rustix::process::Signal::CONT).expect("it lives");
        ask(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_stop_in_the_middle_of_a_batch_waits_until_its_end() {
        stop_in_a_batch(0, false);
        stop_in_a_batch(1, false);
    }

    #[test]
    fn a_stop_that_was_taken_back_leaves_nothing() {
        stop_in_a_batch(0, true);
        stop_in_a_batch(1, true);
    }

    #[test]
    fn an_abandoned_process_finds_its_way_back() {
        let (mut child, pid) = cat();
        let area = killed(|| {
            let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
            injection
                .run(&[&Calls(vec![Op::call(39, [0; 6])])], || ())
                .expect("runs");
            let area = injection.area().expect("an area");
            drop(injection.forget());
            area
        });
        echo(&mut child);
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        assert!(!maps.contains(&format!("{:x}-", area.start.0)), "{maps}");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Sends the first `sent` of four threads into the blob and forgets them.
    fn abandon(sent: usize) {
        const PROGRAM: &str = "import sys,threading,time\n\
            sleep = lambda: time.sleep(1000)\n\
            for _ in range(3): threading.Thread(target=sleep, daemon=True).start()\n\
            answer = sys.stdout.buffer\n\
            for line in sys.stdin.buffer.raw: answer.write(line[:1]); answer.flush()";
        let mut command = Command::new("python3");
        let command = command.args(["-c", PROGRAM]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let pid = i32::try_from(child.id()).expect("a pid");
        let mut ask = || {
            child
                .stdin
                .as_mut()
                .expect("piped")
                .write_all(b"x\n")
                .expect("it reads");
            child
                .stdout
                .as_mut()
                .expect("piped")
                .read_exact(&mut [0])
                .expect("it echoes");
        };
        ask();
        let mut tids = std::fs::read_dir(format!("/proc/{pid}/task"))
            .expect("a list of threads")
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .parse()
            })
            .collect::<std::result::Result<Vec<i32>, _>>()
            .expect("numbers");
        tids.sort_by_key(|tid| *tid != pid);
        assert_eq!(tids.len(), 4);
        let stop = |tid: &i32| {
            let seized = Thread::seize(*tid).expect("seize");
            seized.stopped(&Process::new(pid), None).expect("stopped")
        };
        let calls = Calls(vec![Op::call(186, [0; 6])]);
        let area = killed(|| {
            let threads = tids.iter().map(stop).collect::<Vec<_>>();
            let mut injection = Injection::new(threads, memory(pid), &[vdso(pid)]).expect("room");
            let batches = [&calls as &dyn Batch; 4];
            let area = injection.map_area(&batches).expect("an area");
            let places = injection.fill(area, &batches).expect("filled");
            injection.start(&places[..sent]).expect("started");
            injection.wait_parked(&places[..sent]).expect("parked");
            drop(injection.forget());
            area
        });
        ask();
        let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        let start = format!("{:x}-", area.start.0);
        let deadline = Instant::now() + SOON;
        if sent > 1 {
            // It stays, and nothing in it may be written and run, until it is removed.
            while maps().contains(" rwxp ") {
                assert!(Instant::now() < deadline, "{}", maps());
                std::thread::yield_now();
            }
            loop {
                let threads = tids.iter().map(stop).collect::<Vec<_>>();
                let inside = |thread: &Thread| area.contains(thread.saved.registers.at());
                let code = span_at(pid, area.start);
                let all =
                    left_areas(&Process::new(pid), &[vdso(pid), code]).expect("they are read");
                let [left] = all[..] else { panic!("{all:?}") };
                assert_eq!(left.area, area);
                if !left.is_busy && !threads.iter().any(inside) {
                    let removed = Injection::remove(threads, memory(pid), &[vdso(pid)], area);
                    drop(removed.expect("removed"));
                    break;
                }
                assert!(Instant::now() < deadline, "they do not leave");
            }
        }
        while maps().contains(&start) {
            assert!(Instant::now() < deadline, "the blob is still there");
            std::thread::yield_now();
        }
        ask();
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn parked_threads_of_a_tracer_that_stands_still_stay() {
        let (mut child, pid) = cat();
        let mut injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let calls = Calls(vec![Op::call(39, [0; 6])]);
        injection.map_area(&[&calls]).expect("an area");
        let area = injection.area().expect("an area");
        let places = injection.fill(area, &[&calls]).expect("filled");
        injection.start(&places).expect("started");
        injection.wait_parked(&places).expect("parked");
        // It waits for the lock, and for nothing that ends by itself.
        let waits = || {
            let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it lives");
            call.starts_with(&format!(
                "202 {:#x} 0x6 ",
                places[0].header.0 + offset::OWNER as u64
            ))
        };
        let deadline = Instant::now() + SOON;
        while !waits() {
            assert!(Instant::now() < deadline, "it does not wait");
            std::thread::yield_now();
        }
        let answers = injection.wait_parked(&places).expect("parked");
        assert_eq!(answers.len(), 1);
        injection.fetch_threads(area, &places).expect("it is there");
        drop(injection.cure().expect("cured"));
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn threads_that_nobody_fetches_come_back() {
        abandon(4);
    }

    #[test]
    fn threads_that_were_sent_before_others_come_back() {
        abandon(1);
        abandon(3);
    }
}
