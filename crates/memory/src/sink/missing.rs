//! The fresh memory of a task, filled through its userfaultfd before anything touches it.
use std::io;
use std::time::{Duration, Instant};

use abi::{Addr, Span};
use pages::Sink;
use rustix::io::Errno;
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

use crate::{Error, Result};
use abi::spans::Spans;

/// How long the kernel may say that the task's mappings are about to change; the task is stopped.
const CHANGING: Duration = Duration::from_secs(5);

/// Missing pages of a stopped task's anonymous or shared memory.
///
/// The fastest way for small pages: the kernel allocates and copies without a fault, for several
/// threads at once. A page that is there already is overwritten. Dropping it hands the ranges back
/// to the task.
#[derive(Debug)]
pub struct MissingPages {
    process: Process,
    uffd: Uffd,
    registered: Vec<Span>,
    /// The mappings, in ascending order.
    mappings: Vec<Span>,
    /// For pages that are there already.
    memory: super::Memory,
}

impl MissingPages {
    /// Opens the conversation with `uffd`, which was created in `process` and not used yet, and
    /// registers `mappings`, each of which is one mapping of the task or a part of one. Those that
    /// touch are registered together.
    ///
    /// # Errors
    /// [`Error::Register`] with `EINVAL` for a mapping of another kind, such as a private mapping
    /// of a file; [`Error::Gone`].
    pub fn new(process: &Process, uffd: Uffd, mappings: &[Span]) -> Result<Self> {
        let pid = process.pid();
        let first = mappings.first().copied().unwrap_or_default();
        uffd.api(Features::empty())
            .map_err(register_failed(pid, first))?;
        let mut mappings = mappings.to_vec();
        mappings.sort_unstable();
        let spans = Spans::of(mappings.iter().copied());
        let mut missing = Self {
            process: process.clone(),
            uffd,
            registered: Vec::with_capacity(spans.len()),
            mappings,
            memory: super::Memory::new(process),
        };
        for span in &spans {
            missing
                .uffd
                .register(*span, Modes::MISSING)
                .map_err(register_failed(pid, *span))?;
            missing.registered.push(*span);
        }
        Ok(missing)
    }

    /// Fills consecutive pages.
    fn fill_piece(&self, mut addr: Addr, mut bytes: &[u8]) -> Result<()> {
        let start = Instant::now();
        while !bytes.is_empty() {
            let part = &bytes[..self.in_one_mapping(addr, bytes.len())];
            let filled = match self.uffd.copy(addr, part, false) {
                Ok(filled) => filled,
                Err(error) => self.cope(addr, part, error, start)?,
            };
            addr = addr.plus(filled as u64);
            bytes = &bytes[filled..];
        }
        Ok(())
    }

    /// How many of `len` bytes from `addr` on one call may fill. The kernel copies into one mapping
    /// only, and keeps neighbours apart that differ in anything: in their protection, name, or in
    /// whether they count as committed memory.
    fn in_one_mapping(&self, addr: Addr, len: usize) -> usize {
        let after = self.mappings.partition_point(|map| map.end <= addr);
        let inside = self.mappings.get(after).filter(|map| map.start <= addr);
        let left = inside.map_or(u64::MAX, |map| map.end.0 - addr.0);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }

    /// Does what can be done after a failure, and returns how many bytes were filled by that.
    fn cope(&self, addr: Addr, bytes: &[u8], error: io::Error, start: Instant) -> Result<usize> {
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::AGAIN) if start.elapsed() < CHANGING => {
                std::thread::yield_now();
                Ok(0)
            }
            Some(Errno::EXIST) => {
                let page = &bytes[..abi::PAGE_BYTES as usize];
                self.memory.fill(&[(addr, page)])?;
                Ok(page.len())
            }
            // Says "no such mapping", so it is not how a missing task is told.
            Some(Errno::NOENT) => Err(Error::Write {
                pid: self.process.pid(),
                addr,
                source: error,
            }),
            _ => Err(Error::write(self.process.pid(), addr, error)),
        }
    }
}

impl Sink for MissingPages {
    fn fill(&self, pieces: &[(Addr, &[u8])]) -> pages::Result<()> {
        let mut pieces = pieces.iter();
        Ok(pieces.try_for_each(|(addr, bytes)| self.fill_piece(*addr, bytes))?)
    }
}

impl Drop for MissingPages {
    fn drop(&mut self) {
        for span in &self.registered {
            // Fails only when the task or the mapping is gone, and the registration with it.
            let _ = self.uffd.unregister(*span);
        }
    }
}

fn register_failed(pid: i32, span: Span) -> impl Fn(io::Error) -> Error {
    move |source| match source.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::SRCH) => Error::Gone { pid },
        _ => Error::Register { pid, span, source },
    }
}
