//! Registered buffers that are the memory of their task no more: it was unmapped, or replaced.
//!
//! The kernel keeps the pages that it found when a buffer was registered, whatever the task does
//! with its addresses since. They are compared with those that it has there now, by their numbers:
//! the kernel's descriptions of pages (`struct page`) stand in one array, in the order of these.
//! Where that begins is told by a page of the ring itself, of which both are known.
//!
//! - What: registered buffers of rings of io_uring
//! - Kept: memory that can be written, also where it comes later (`restore --lazy-pages`).
//! - Refused: "fd …, an io_uring: its buffer …", as "its memory cannot be written".
//! - CRIU 4.2: refuses rings altogether.

use abi::spans::subtract;
use abi::{Addr, PAGE_BYTES, Span};
use sys::pagemap::{Entry, Pagemap};
use sys::process::Process;
use sys::ring::RingMemory;

use super::record::Record;
use super::seen::{Buffer, Seen};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// The address of the first buffer that is not what the process has there.
pub(super) fn find_lost(
    kernel: &Kernel,
    process: &Process,
    queues: &RingMemory,
    seen: &Seen,
) -> std::io::Result<Option<u64>> {
    let buffers = || seen.buffers.iter().flatten().map(|slot| &slot.what);
    if buffers().next().is_none() {
        return Ok(None);
    }
    let page_bytes = kernel.size("page")?;
    let own = Pagemap::open(&Process::own())?;
    let known = frames(&own, queues.address(), 1)?[0].unwrap_or(0);
    let array = seen.first_page.wrapping_sub(known.wrapping_mul(page_bytes));
    let theirs = Pagemap::open(process)?;
    for buffer in buffers() {
        let kept = kept(buffer, |page| page.wrapping_sub(array) / page_bytes);
        let now = frames(&theirs, buffer.address, kept.len())?;
        if !kept.into_iter().map(Some).eq(now) {
            return Ok(Some(buffer.address));
        }
    }
    Ok(None)
}

/// Refuses buffers of a ring, which a process has as `fd`, that cannot be registered again.
pub(super) fn check(record: &Record, (pid, fd): (i32, i32), written: &[Span]) -> Result<()> {
    let slots = record.buffers.iter().filter(|slot| slot.address != 0);
    for buffer in slots.map(|slot| Span::new(Addr(slot.address), slot.len_bytes)) {
        if !subtract(&[buffer], written).is_empty() {
            let what = format!("fd {fd}, an io_uring: its buffer {buffer}");
            let refused = Error::unsupported(pid, what);
            return Err(refused.because("its memory cannot be written"));
        }
    }
    Ok(())
}

/// The numbers of the pages that the kernel keeps for a buffer.
fn kept(buffer: &Buffer, number: impl Fn(u64) -> u64) -> Vec<u64> {
    let mut kept = Vec::new();
    for segment in &buffer.segments {
        let (first, end) = (segment.offset, segment.offset + segment.len_bytes);
        let pages = first / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        kept.extend(pages.map(|page| number(segment.page) + page));
    }
    kept
}

/// The numbers of the pages that a task has at consecutive addresses.
fn frames(map: &Pagemap, address: u64, count: usize) -> std::io::Result<Vec<Option<u64>>> {
    let mut entries = vec![Entry::default(); count];
    let got = map.entries(Addr(address), &mut entries)?;
    let frames = entries[..got].iter().map(|entry| entry.frame());
    Ok(frames.collect())
}
