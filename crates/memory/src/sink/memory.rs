//! The memory of a task, written from outside whatever is mapped there.
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use abi::{Addr, PAGE_BYTES, Span};
use pages::Sink;
use sys::process::Process;
use sys::vm;

use crate::source::needs_force;
use crate::{Error, Result};

/// Bytes of a huge page.
const BLOCK_BYTES: u64 = 2 << 20;
/// Longer than this for a huge page, and the kernel is moving other pages out of the way.
const SLOW: Duration = Duration::from_millis(1);
/// After so many blocks that were slow or refused no more huge pages are asked for.
const PATIENCE_BLOCKS: u32 = 32;

/// The memory of a task, which the caller must be allowed to trace.
///
/// Takes pages for any private mapping, read-only ones included, and for shared ones that are
/// writable. The kernel faults each page in and zeroes it first: for much anonymous memory
/// [`super::MissingPages`] is faster, unless huge pages are allowed here.
#[derive(Debug)]
pub struct Memory {
    process: Process,
    /// The process, where huge pages may be made.
    huge: Option<OwnedFd>,
    /// Blocks that were slow or refused.
    failed_blocks: AtomicU32,
    /// /proc/PID/mem, opened where it is needed.
    file: OnceLock<File>,
}

impl Memory {
    /// The memory of a process.
    #[must_use]
    pub fn new(process: &Process) -> Self {
        let failed_blocks = AtomicU32::new(0);
        Self {
            process: process.clone(),
            huge: None,
            failed_blocks,
            file: OnceLock::new(),
        }
    }

    /// The memory of a process, behind `pidfd`, with a huge page for each aligned 2 MiB of
    /// which all pages are filled, as long as the kernel has them at hand.
    ///
    /// The pages take no more memory than small ones, and the process sees no difference; mappings
    /// that refuse huge pages get none.
    #[must_use]
    pub fn with_huge_pages(process: &Process, pidfd: OwnedFd) -> Self {
        let failed_blocks = AtomicU32::new(0);
        Self {
            process: process.clone(),
            huge: Some(pidfd),
            failed_blocks,
            file: OnceLock::new(),
        }
    }

    /// Writes through the mapping's protection, until a page that refuses even that.
    fn write_forced(&self, addr: Addr, bytes: &[u8]) -> Result<usize> {
        let failed = |source| Error::write(self.process.pid(), addr, source);
        if self.file.get().is_none() {
            let file = self.process.open_to_write("mem").map_err(failed)?;
            // Another thread may have been faster; then its file serves.
            let _ = self.file.set(file);
        }
        let file = self.file.get().expect("set above");
        match file.write_at(bytes, addr.0).map_err(failed)? {
            // So the file answers once the task's memory is gone.
            0 => Err(Error::Gone {
                pid: self.process.pid(),
            }),
            bytes => Ok(bytes),
        }
    }
}

impl Sink for Memory {
    fn fill(&self, pieces: &[(Addr, &[u8])]) -> pages::Result<()> {
        let mut pieces = pieces.to_vec();
        let mut pieces = &mut pieces[..];
        while let Some(&(addr, bytes)) = pieces.first() {
            let written = match vm::write_pieces(&self.process, pieces) {
                Ok(written) => written,
                Err(error) if needs_force(&error) => 0,
                Err(error) => return Err(Error::write(self.process.pid(), addr, error).into()),
            };
            let written = match written {
                0 => self.write_forced(addr, bytes)?,
                written => written,
            };
            pieces = advance(pieces, written);
        }
        Ok(())
    }

    fn prepare(&self, blocks: &[Span]) -> pages::Result<()> {
        let Some(pidfd) = &self.huge else {
            return Ok(());
        };
        for span in blocks {
            if self.failed_blocks.load(Relaxed) > PATIENCE_BLOCKS {
                return Ok(());
            }
            let count = (span.bytes() / BLOCK_BYTES) as u32;
            // A block with no page at all is not made huge: the first page of each comes first.
            let zero = [0; PAGE_BYTES as usize];
            let firsts: Vec<(Addr, &[u8])> = (0..u64::from(count))
                .map(|block| (span.start.plus(block * BLOCK_BYTES), &zero[..]))
                .collect();
            self.fill(&firsts)?;
            let start = Instant::now();
            let refused = vm::collapse(pidfd.as_fd(), *span).is_err();
            if refused || start.elapsed() > SLOW * count {
                self.failed_blocks.fetch_add(count, Relaxed);
            }
        }
        Ok(())
    }
}

/// Takes the first `bytes` bytes off `pieces`.
fn advance<'a, 'b>(
    mut pieces: &'a mut [(Addr, &'b [u8])],
    mut bytes: usize,
) -> &'a mut [(Addr, &'b [u8])] {
    while let [first, ..] = pieces {
        if bytes < first.1.len() {
            *first = (first.0.plus(bytes as u64), &first.1[bytes..]);
            break;
        }
        bytes -= first.1.len();
        pieces = &mut pieces[1..];
    }
    pieces
}
