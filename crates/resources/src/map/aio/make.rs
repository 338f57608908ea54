//! Contexts are made anew, which only a process can do for itself.
//!
//! A stopped thread makes a context, whose ring the kernel puts somewhere: the place where it is to
//! come is taken meanwhile, by memory that has the requests in it which lead the context to where
//! the old one was ([`Way`]). Then the ring is moved there, which makes that the context's name.

use std::io;

use abi::{Addr, PAGE_BYTES};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sys::process::Process;
use syscalls::Sysno;

use super::reach::{Way, requests_for};
use super::{Context, events_in, place};
use crate::callers::{Callers, Unlimited, checked};
use crate::map::memory::{Mapping, Special};
use crate::{Error, Result};

const PROT_READ_WRITE: u64 = 3;
/// A request, `struct iocb`, that reads nothing.
const REQUEST_BYTES: u64 = 64;

/// For how many requests the contexts of a process, of which `mappings` are, must be made in all.
///
/// # Errors
/// [`Error::Kernel`].
fn wanted(contexts: &[Context], mappings: &[Mapping]) -> Result<u64> {
    let cpus = cpus()?;
    let each = contexts
        .iter()
        .filter_map(|context| requests(ring(mappings, context), context, cpus));
    Ok(each.map(u64::from).sum())
}

/// The size in pages of a ring that no number of requests gives a context on this host.
///
/// # Errors
/// [`Error::Kernel`].
fn without_size(contexts: &[Context], mappings: &[Mapping]) -> Result<Option<u64>> {
    let cpus = cpus()?;
    let mut rings = contexts
        .iter()
        .map(|context| (ring(mappings, context), context));
    let odd = rings.find(|(ring, context)| requests(ring, context, cpus).is_none());
    Ok(odd.map(|(ring, _)| ring.span().pages()))
}

/// How many more requests this host allows.
///
/// # Errors
/// [`Error::Kernel`].
fn allowed() -> Result<u64> {
    let number = |name: &str| {
        let path = sys::procfs::path(format_args!("sys/fs/{name}"));
        let failed = |error| Error::kernel(format!("cannot read {path}"), error);
        let text = std::fs::read_to_string(&path).map_err(failed)?;
        Ok::<u64, Error>(text.trim().parse().unwrap_or(u64::MAX))
    };
    Ok(number("aio-max-nr")?.saturating_sub(number("aio-nr")?))
}

/// Why this host has no room for the contexts of processes, each with its mappings, if so.
///
/// # Errors
/// [`Error::Kernel`], [`Error::Corrupt`].
pub fn check<'a>(
    all: impl Iterator<Item = (&'a [Context], &'a [Mapping])>,
) -> Result<Option<String>> {
    let mut needed = 0;
    for (contexts, mappings) in all.filter(|(contexts, _)| !contexts.is_empty()) {
        if let Some(pages) = without_size(contexts, mappings)? {
            return Ok(Some(format!(
                "a ring of {pages} pages cannot be made with as many processors as this host can \
                 have"
            )));
        }
        needed += wanted(contexts, mappings)?;
    }
    if needed == 0 {
        return Ok(None);
    }
    let more = allowed()?;
    Ok((needed > more).then(|| {
        format!(
            "the image needs {needed} requests of asynchronous I/O, and this host allows {more} \
             more (fs.aio-max-nr)"
        )
    }))
}

/// Has a process make its contexts, of which `mappings` are.
///
/// # Errors
/// [`Error::Kernel`].
pub fn make(
    process: &Process,
    contexts: &[Context],
    mappings: &[Mapping],
    callers: &mut dyn Callers,
) -> Result<()> {
    if contexts.is_empty() {
        return Ok(());
    }
    let cpus = cpus()?;
    let mut unlimited = Unlimited::make(process.pid());
    unlimited.add_descriptor()?;
    for context in contexts {
        let ring = ring(mappings, context);
        let mut making = Making {
            callers,
            process,
            ring,
            context,
        };
        match requests(ring, context, cpus) {
            Some(requests) => making.make(requests)?,
            None => return Err(making.failed(io::ErrorKind::Unsupported.into())),
        }
    }
    Ok(())
}

/// How many processors this host can have.
fn cpus() -> Result<u64> {
    let possible = sys::per_cpu::possible();
    let failed = |error| Error::kernel("cannot read which processors there can be", error);
    Ok(possible.map_err(failed)?.len() as u64)
}

fn ring<'a>(mappings: &'a [Mapping], context: &Context) -> &'a Mapping {
    let mut rings = mappings.iter();
    let ring = rings.find(|map| map.special() == Special::Aio && map.start == context.address);
    ring.expect("checked when read")
}

/// For how many requests a context must be made.
fn requests(ring: &Mapping, context: &Context, cpus: u64) -> Option<u32> {
    requests_for(ring.span().pages(), context.max_requests, cpus)
}

/// A context that is being made.
struct Making<'a> {
    callers: &'a mut dyn Callers,
    process: &'a Process,
    ring: &'a Mapping,
    context: &'a Context,
}

impl Making<'_> {
    fn make(&mut self, requests: u32) -> Result<()> {
        const MAP_PRIVATE: u64 = libc::MAP_PRIVATE as u64;
        const MAP_ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;
        const MAP_FIXED_NOREPLACE: u64 = libc::MAP_FIXED_NOREPLACE as u64;
        const MREMAP_MAYMOVE_FIXED: u64 = 3;
        let (start, bytes) = (self.ring.start, self.ring.span().bytes());
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        let args = [start, bytes, PROT_READ_WRITE, flags, u64::MAX, 0];
        self.call(Sysno::mmap, args)?;
        let made = self.made(requests)?;
        let events = events_in(self.ring.span().pages()) as u32;
        if self.word(made + place::EVENTS as u64)? != events {
            let what = "the kernel arranges it in another way".to_owned();
            return Err(self.failed(io::Error::other(what)));
        }
        let way = Way::to(
            self.context.head(events),
            self.context.tail,
            self.ring.span().pages(),
        );
        if way.fetched > 0 || way.unfetched > 0 {
            self.go(made, way)?;
        }
        let args = [made, bytes, bytes, MREMAP_MAYMOVE_FIXED, start, 0];
        self.call(Sysno::mremap, args)?;
        if self.word(start + place::TAIL as u64)? != self.context.tail {
            let what = "the kernel does not count its events as before".to_owned();
            return Err(self.failed(io::Error::other(what)));
        }
        // All but its number in the kernel's table, which is another one.
        let mut contents = self.context.contents.clone();
        contents.resize(usize::try_from(bytes).expect("it is mapped"), 0);
        self.write(start + 4, &contents[4..])?;
        let prot = u64::from(self.ring.prot);
        if prot != PROT_READ_WRITE {
            self.call(Sysno::mprotect, [start, bytes, prot, 0, 0, 0])?;
        }
        for advice in &self.ring.advice {
            let args = [start, bytes, u64::from(*advice), 0, 0, 0];
            self.call(Sysno::madvise, args)?;
        }
        Ok(())
    }

    /// Makes it somewhere; gives its name.
    fn made(&mut self, requests: u32) -> Result<u64> {
        let args = [
            Some(requests.into()),
            None,
            Some(0),
            Some(0),
            Some(0),
            Some(0),
        ];
        self.make_call(Sysno::io_setup, args, &[0; 8])?;
        let mut name = [0; 8];
        self.read(self.callers.scratch().0, &mut name)?;
        Ok(u64::from_le_bytes(name))
    }

    /// Has the new context, whose name is `made`, go its way.
    fn go(&mut self, made: u64, way: Way) -> Result<()> {
        let args = [None, Some(0), Some(0), Some(0), Some(0), Some(0)];
        let file = self.make_call(Sysno::memfd_create, args, &[0; 8])?;
        let _there = way.on_one_cpu.then(|| OnOneCpu::keep(self.process.pid()));
        let most = way.fetched.max(way.unfetched);
        self.prepare(file as u32, most)?;
        let mut posted = 0;
        let mut is_stuck = false;
        while posted < way.fetched {
            let done = self.submit(made, way.fetched - posted)?;
            if done == 0 && is_stuck {
                return Err(self.no_room(way.fetched - posted));
            }
            is_stuck = done == 0;
            posted += done;
            self.write(made + place::HEAD as u64, &posted.to_le_bytes())?;
        }
        let mut left = way.unfetched;
        while left > 0 {
            let done = self.submit(made, left)?;
            left -= done;
            if done == 0 {
                // So much room no processor ever has, on this host: it need not be counted.
                let head = (way.fetched + left) % self.word(made + place::EVENTS as u64)?;
                self.write(made + place::HEAD as u64, &head.to_le_bytes())?;
                left -= self.submit(made, left)?;
                if left > 0 {
                    return Err(self.no_room(left));
                }
            }
        }
        self.call(Sysno::close, [file, 0, 0, 0, 0, 0]).map(drop)
    }

    /// Writes `count` requests to where the ring is to come: one, and as many pointers to it.
    fn prepare(&self, file: u32, count: u32) -> Result<()> {
        let start = self.ring.start;
        let mut bytes = vec![0; REQUEST_BYTES as usize];
        bytes[20..24].copy_from_slice(&file.to_le_bytes());
        for _ in 0..count {
            bytes.extend_from_slice(&start.to_le_bytes());
        }
        self.write(start, &bytes)
    }

    /// Submits up to `count` requests; gives how many there was room for.
    fn submit(&mut self, made: u64, count: u32) -> Result<u32> {
        const EAGAIN: i64 = -(libc::EAGAIN as i64);
        let pointers = self.ring.start + REQUEST_BYTES;
        let args = [made, count.into(), pointers, 0, 0, 0];
        let done = self
            .callers
            .call(self.process.pid(), Sysno::io_submit, args.map(Some), &[])?;
        match done {
            EAGAIN => Ok(0),
            done => self.checked(Sysno::io_submit, done).map(|done| done as u32),
        }
    }

    fn call(&mut self, call: Sysno, args: [u64; 6]) -> Result<u64> {
        self.make_call(call, args.map(Some), &[])
    }

    /// Has the thread make a call that must succeed.
    fn make_call(&mut self, call: Sysno, args: [Option<u64>; 6], data: &[u8]) -> Result<u64> {
        let result = self.callers.call(self.process.pid(), call, args, data)?;
        self.checked(call, result)
    }

    fn checked(&self, call: Sysno, result: i64) -> Result<u64> {
        let (pid, at) = (self.process.pid(), self.context.address);
        checked(result, || {
            format!(
                "{} for the asynchronous I/O of {pid} at {at:#x}",
                call.name()
            )
        })
    }

    fn no_room(&self, events: u32) -> Error {
        self.failed(io::Error::other(format!("{events} events find no room")))
    }

    fn failed(&self, source: io::Error) -> Error {
        let (pid, at) = (self.process.pid(), self.context.address);
        Error::kernel(
            format!("cannot make the asynchronous I/O of {pid} at {at:#x}"),
            source,
        )
    }

    fn word(&self, at: u64) -> Result<u32> {
        let mut word = [0; 4];
        self.read(at, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        sys::vm::read_exact(self.process, Addr(at), bytes).map_err(|error| self.failed(error))
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        sys::vm::write(self.process, Addr(at), bytes).map_err(|error| self.failed(error))
    }
}

/// A thread that is kept on one processor; dropping this lets it move again.
struct OnOneCpu {
    pid: Pid,
    before: Option<CpuSet>,
}

impl OnOneCpu {
    fn keep(pid: i32) -> Self {
        let pid = Pid::from_raw(pid).expect("checked when read");
        let keep = || {
            let before = sched_getaffinity(Some(pid))?;
            let mut one = CpuSet::new();
            let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu));
            one.set(first.unwrap_or(0));
            sched_setaffinity(Some(pid), &one).map(|()| before)
        };
        let before = keep();
        if let Err(error) = &before {
            log::debug!("{pid:?} is not kept on one processor: {error}");
        }
        Self {
            pid,
            before: before.ok(),
        }
    }
}

impl Drop for OnOneCpu {
    fn drop(&mut self) {
        let moves = self
            .before
            .map(|before| sched_setaffinity(Some(self.pid), &before));
        if let Some(Err(error)) = moves {
            log::warn!("{:?} stays on one processor: {error}", self.pid);
        }
    }
}

const _: () = assert!(
    PAGE_BYTES >= REQUEST_BYTES + 8 * 127,
    "the requests fit into a ring"
);
