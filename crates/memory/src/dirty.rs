//! Which pages a task has written since its soft-dirty bits were cleared: for kernels without
//! asynchronous write protection (before 6.7, see [`crate::track`]).
//!
//! The bits are one set for each memory, whoever asks. They are read by [`look`] and cleared by
//! [`forget`]; what is written between the two is lost, so the task must be stopped for both.
//! Mappings that are new count as written as a whole, and pages that moved are written.
use std::io;

use abi::{PAGE_BYTES, Span};
use sys::pagemap::{Entry, Pagemap};
use sys::process::Process;

use crate::scan::{Area, each_entry, look_at};
use crate::track::TrackResult;
use crate::{Error, Result};

/// Tells whether this kernel has soft-dirty bits.
///
/// # Errors
/// Those of looking at a page of this process.
pub fn are_there() -> io::Result<bool> {
    let fresh = vec![1_u8; 2 * PAGE_BYTES as usize];
    let addr = fresh.as_ptr().addr() as u64 + PAGE_BYTES;
    let mut entry = [Entry::default()];
    Pagemap::open(&Process::own())?.entries(abi::Addr(addr).page_start(), &mut entry)?;
    Ok(entry[0].is_soft_dirty())
}

/// Tells which pages of the stopped `process` may have changed since [`forget`], in each of
/// `areas`. 14 ms a GiB.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn scan(process: &Process, areas: &[Area]) -> Result<Vec<TrackResult>> {
    let scan = |map: &Pagemap, area: &Area| {
        let mut found = TrackResult {
            is_tracked: true,
            ..TrackResult::default()
        };
        each_entry(map, area.span, |page, entry| add(&mut found, page, entry))?;
        Ok(found)
    };
    look_at(process, areas, |area| area.span, scan)
}

fn add(found: &mut TrackResult, page: Span, entry: Entry) {
    if !entry.is_present() && !entry.is_swapped() || entry.is_file() {
        return;
    }
    let pages = if entry.is_guard() {
        &mut found.guards
    } else if entry.is_soft_dirty() || entry.is_present() && !entry.is_exclusive() {
        // Among the pages that others have as well is the kernel's page of zeros, which may have
        // taken the place of one that was given up.
        &mut found.written
    } else {
        &mut found.unwritten
    };
    pages.push(page);
}

/// Clears the bits of the stopped `process`: what it writes from now on is found by [`look`].
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn forget(process: &Process) -> Result<()> {
    const SOFT_DIRTY: &str = "4";
    let cleared = process
        .open_to_write("clear_refs")
        .and_then(|mut file| io::Write::write_all(&mut file, SOFT_DIRTY.as_bytes()));
    cleared.map_err(|source| Error::scan(process.pid(), abi::Addr(0), source))
}

#[cfg(test)]
mod tests {
    use abi::Addr;

    use super::*;

    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const FILE: u64 = 1 << 61;
    const GUARD: u64 = 1 << 58;
    const EXCLUSIVE: u64 = 1 << 56;
    const SOFT_DIRTY: u64 = 1 << 55;

    /// Returns the result for pages with these entries.
    fn found(entries: &[u64]) -> TrackResult {
        let mut found = TrackResult::default();
        for (number, entry) in entries.iter().enumerate() {
            let page = Span::new(Addr::of_page(number as u64), PAGE_BYTES);
            add(&mut found, page, Entry::from_bits(*entry));
        }
        found
    }

    fn pages(first: u64, count: u64) -> Span {
        Span::new(Addr::of_page(first), count * PAGE_BYTES)
    }

    #[test]
    fn bits_tell_written_pages() {
        let plain = PRESENT | EXCLUSIVE;
        let found = found(&[
            plain | SOFT_DIRTY,
            plain | SOFT_DIRTY,
            plain,
            0,
            // A mapping that is new, in which nothing is.
            SOFT_DIRTY,
            SWAPPED | SOFT_DIRTY,
            SWAPPED,
            plain | FILE | SOFT_DIRTY,
            SWAPPED | GUARD,
        ]);
        assert_eq!(found.written, [pages(0, 2), pages(5, 1)]);
        assert_eq!(found.unwritten, [pages(2, 1), pages(6, 1)]);
        assert_eq!(found.guards, [pages(8, 1)]);
    }

    #[test]
    fn what_others_have_as_well_is_read() {
        assert_eq!(found(&[PRESENT]).written, [pages(0, 1)]);
    }

    #[test]
    fn this_kernel_clears_what_it_has() {
        if !are_there().expect("a scan") {
            return eprintln!("this kernel has no soft-dirty bits");
        }
        let own = Process::own();
        let mut bytes = vec![1_u8; 20 * PAGE_BYTES as usize];
        let start = Addr(bytes.as_ptr().addr() as u64 + PAGE_BYTES).page_start();
        let area = Area {
            span: Span::new(start, 16 * PAGE_BYTES),
            file: false,
            apart: false,
        };
        assert_eq!(scan(&own, &[area]).expect("a scan")[0].written, [area.span]);
        forget(&own).expect("forgotten");
        bytes[6 * PAGE_BYTES as usize] = 2;
        let found = scan(&own, &[area]).expect("a scan");
        let written = Addr(bytes.as_ptr().addr() as u64 + 6 * PAGE_BYTES).page_start();
        assert_eq!(found[0].written, [Span::new(written, PAGE_BYTES)]);
        assert_eq!(bytes[6 * PAGE_BYTES as usize], 2);
    }
}
