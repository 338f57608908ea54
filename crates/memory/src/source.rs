//! The memory of a task, read from outside.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use abi::spans::Ranges;
use abi::{Addr, PAGE_BYTES};
use pages::{Extent, Source};
use rustix::io::Errno;
use sys::process::Process;
use sys::vm;

use crate::{Error, Result};

/// The memory of a task, which the caller must be allowed to trace.
///
/// Mappings without read permission are read as well. An extent's `at` is an address of the task.
#[derive(Debug)]
pub struct TaskMemory {
    process: Process,
    /// /proc/PID/mem, opened where it is needed.
    file: OnceLock<File>,
    quiet: bool,
    running: bool,
}

impl TaskMemory {
    /// The memory of a process.
    #[must_use]
    pub fn new(process: &Process) -> Self {
        Self {
            process: process.clone(),
            file: OnceLock::new(),
            quiet: false,
            running: false,
        }
    }

    /// The memory of a process, read so that pages stay shared which it has by copy-on-write.
    ///
    /// `process_vm_readv` pins what it reads, and the kernel gives a task its own copy of a page
    /// before it is pinned; /proc/PID/mem does not pin, but takes twice as long.
    #[must_use]
    pub fn quiet(process: &Process) -> Self {
        Self {
            quiet: true,
            ..Self::new(process)
        }
    }

    /// The same memory while the task runs: pages may vanish before they are read, and the task may
    /// end. What is read of a page that is written meanwhile may be of before and after.
    #[must_use]
    pub fn while_it_runs(self) -> Self {
        Self {
            running: true,
            ..self
        }
    }

    /// Reads pages from `addr` on that only /proc/PID/mem gives out, until one that it does not.
    fn read_forced(&self, addr: Addr, buffer: &mut [u8]) -> Result<usize> {
        let failed = |source| Error::read(self.process.pid(), addr, source);
        if self.file.get().is_none() {
            let file = self.process.open("mem").map_err(failed)?;
            // Another thread may have been faster; then its file serves.
            let _ = self.file.set(file);
        }
        let file = self.file.get().expect("set above");
        match file.read_at(buffer, addr.0).map_err(failed)? {
            // So the file answers once the task's memory is gone.
            0 => Err(Error::Gone {
                pid: self.process.pid(),
            }),
            bytes => Ok(bytes),
        }
    }
}

impl Source for TaskMemory {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> pages::Result<()> {
        let mut pieces = pieces(extents);
        let mut pieces = &mut pieces[..];
        let mut rest = buffer;
        while !pieces.is_empty() {
            let read = self.read_some(pieces, rest)?;
            pieces = advance(pieces, read);
            rest = &mut rest[read..];
        }
        Ok(())
    }

    fn read_there(
        &self,
        extents: &[Extent],
        buffer: &mut [u8],
        lost: &mut Ranges<usize>,
    ) -> pages::Result<()> {
        if !self.running {
            return self.read(extents, buffer);
        }
        let mut pieces = pieces(extents);
        let mut pieces = &mut pieces[..];
        let page_bytes = PAGE_BYTES as usize;
        let pages = buffer.len() / page_bytes;
        let mut done = 0;
        while !pieces.is_empty() {
            let read = match self.read_some(pieces, &mut buffer[done * page_bytes..]) {
                // A part of a page is read again: its rest may be another page's.
                Ok(bytes) if bytes >= page_bytes => bytes / page_bytes,
                Ok(_) | Err(Error::Read { .. }) => {
                    lost.push(done..done + 1);
                    1
                }
                Err(Error::Gone { .. }) => {
                    lost.push(done..pages);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            pieces = advance(pieces, read * page_bytes);
            done += read;
        }
        Ok(())
    }
}

impl TaskMemory {
    /// Reads the first bytes of `pieces` and gives how many those are.
    fn read_some(&self, pieces: &[(Addr, usize)], buffer: &mut [u8]) -> Result<usize> {
        let (addr, bytes) = pieces[0];
        let read = if self.quiet {
            Ok(0)
        } else {
            vm::read_pieces(&self.process, pieces, buffer)
        };
        let read = match read {
            Ok(read) => read,
            Err(error) if needs_force(&error) => 0,
            Err(error) => return Err(Error::read(self.process.pid(), addr, error)),
        };
        match read {
            0 => self.read_forced(addr, &mut buffer[..bytes]),
            read => Ok(read),
        }
    }
}

fn pieces(extents: &[Extent]) -> Vec<(Addr, usize)> {
    let piece = |extent: &Extent| (extent.at, extent.bytes() as usize);
    extents.iter().map(piece).collect()
}

/// Tells whether /proc/PID/mem may read or write memory that `process_vm_readv` and
/// `process_vm_writev` did not.
pub(crate) fn needs_force(error: &io::Error) -> bool {
    let may = [Errno::FAULT, Errno::NOSYS].map(Errno::raw_os_error);
    error
        .raw_os_error()
        .is_some_and(|errno| may.contains(&errno))
}

/// Takes the first `bytes` bytes off `pieces`.
fn advance(mut pieces: &mut [(Addr, usize)], mut bytes: usize) -> &mut [(Addr, usize)] {
    while let [first, ..] = pieces {
        if bytes < first.1 {
            *first = (first.0.plus(bytes as u64), first.1 - bytes);
            break;
        }
        bytes -= first.1;
        pieces = &mut pieces[1..];
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_taken_off_from_the_front() {
        let mut pieces = [(Addr(0x1000), 0x1000), (Addr(0x5000), 0x2000)];
        assert_eq!(advance(&mut pieces.clone(), 0), pieces);
        assert_eq!(
            advance(&mut pieces.clone(), 0x1000),
            [(Addr(0x5000), 0x2000)]
        );
        assert_eq!(
            advance(&mut pieces.clone(), 0x2000),
            [(Addr(0x6000), 0x1000)]
        );
        assert!(advance(&mut pieces, 0x3000).is_empty());
    }
}
