//! What stands behind each page of a task: `PAGEMAP_SCAN` and /proc/PID/pagemap.
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use abi::{Addr, Span};
use bitflags::bitflags;
use linux_raw_sys::general as raw;

use crate::process::Process;

/// The number of `PAGEMAP_SCAN`, which no crate defines: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: rustix::ioctl::Opcode =
    rustix::ioctl::opcode::read_write::<raw::pm_scan_arg>(b'f', 16);

bitflags! {
    /// What is known of a page.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Category: u64 {
        /// The mapping is tracked by asynchronous write protection.
        const WP_ALLOWED = raw::PAGE_IS_WPALLOWED as u64;
        /// Written since it was write-protected last.
        const WRITTEN = raw::PAGE_IS_WRITTEN as u64;
        /// Belongs to a file or to shared memory; absent on a private copy.
        const FILE = raw::PAGE_IS_FILE as u64;
        /// In memory.
        const PRESENT = raw::PAGE_IS_PRESENT as u64;
        /// Swapped out, migrating, or a marker such as a guard page.
        const SWAPPED = raw::PAGE_IS_SWAPPED as u64;
        /// The kernel's shared page of zeros.
        const ZERO = raw::PAGE_IS_PFNZERO as u64;
        /// Part of a huge page.
        const HUGE = raw::PAGE_IS_HUGE as u64;
        /// Written since the soft-dirty bits were cleared, where the kernel has them.
        const SOFT_DIRTY = raw::PAGE_IS_SOFT_DIRTY as u64;
        /// A guard page (`MADV_GUARD_INSTALL`); always together with [`Self::SWAPPED`].
        const GUARD = raw::PAGE_IS_GUARD as u64;
    }
}

bitflags! {
    /// What a scan does besides looking.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Action: u64 {
        /// Write-protects the pages found, so that the next scan finds those written since.
        const PROTECT = raw::PM_SCAN_WP_MATCHING as u64;
        /// Fails with `EPERM` at a mapping that is not tracked, instead of passing over it.
        const CHECK_TRACKED = raw::PM_SCAN_CHECK_WPASYNC as u64;
    }
}

/// Which pages a scan finds.
///
/// A page is found when, after the categories in `inverted` were flipped, it has all of `all` and,
/// unless `any` is empty, at least one of `any`.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// Categories that are flipped before the test: asks for pages that have them not.
    pub inverted: Category,
    /// Categories that a page must all have.
    pub all: Category,
    /// Categories of which a page must have one; none when empty.
    pub any: Category,
    /// Categories that the answer tells, which also divide the regions.
    pub told: Category,
}

/// Consecutive pages with the same categories, as the kernel writes them.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Region(raw::page_region);

impl Region {
    /// A region without pages: what a buffer for answers is filled with.
    pub const EMPTY: Self = Self(raw::page_region {
        start: 0,
        end: 0,
        categories: 0,
    });

    /// The addresses of the pages.
    #[must_use]
    pub const fn span(&self) -> Span {
        Span {
            start: Addr(self.0.start),
            end: Addr(self.0.end),
        }
    }

    /// The categories asked for that the pages have.
    #[must_use]
    pub const fn categories(&self) -> Category {
        Category::from_bits_retain(self.0.categories)
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.span(), self.categories())
    }
}

/// One word of /proc/PID/pagemap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Entry(u64);

impl Entry {
    /// The entry of that value.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The page is in memory.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0 >> 63 & 1 == 1
    }

    /// The page is swapped out, migrating, or a marker such as a guard page.
    #[must_use]
    pub const fn is_swapped(self) -> bool {
        self.0 >> 62 & 1 == 1
    }

    /// The page belongs to a file or to shared memory.
    #[must_use]
    pub const fn is_file(self) -> bool {
        self.0 >> 61 & 1 == 1
    }

    /// The page is write-protected by a userfaultfd, whether it is there or not.
    #[must_use]
    pub const fn is_protected(self) -> bool {
        self.0 >> 57 & 1 == 1
    }

    /// Nothing is there but a mark of the kernel's: what stands in the place of a swapped page is
    /// no place in a swap. Told to callers with `CAP_SYS_ADMIN`.
    #[must_use]
    pub const fn mark(self) -> Option<Mark> {
        /// The last of the types of what may stand for a page; others are swap files and the like.
        const MARKS: u64 = 31;
        const POISONED: u64 = 2;
        if !self.is_swapped() || self.0 & 31 != MARKS {
            return None;
        }
        if self.is_guard() {
            Some(Mark::Guard)
        } else if self.0 >> 5 & POISONED != 0 {
            Some(Mark::Poison)
        } else {
            Some(Mark::Protection)
        }
    }

    /// The page is a guard page; older kernels do not tell.
    #[must_use]
    pub const fn is_guard(self) -> bool {
        self.0 >> 58 & 1 == 1
    }

    /// Written since the soft-dirty bits were cleared, or in a mapping that is newer than that;
    /// never where the kernel has no such bits.
    #[must_use]
    pub const fn is_soft_dirty(self) -> bool {
        self.0 >> 55 & 1 == 1
    }

    /// Only one mapping has the page.
    #[must_use]
    pub const fn is_exclusive(self) -> bool {
        self.0 >> 56 & 1 == 1
    }

    /// The number of the physical page; `None` when there is none or the kernel hides it from
    /// callers without `CAP_SYS_ADMIN`.
    #[must_use]
    pub const fn frame(self) -> Option<u64> {
        let frame = self.0 & ((1 << 55) - 1);
        if self.is_present() && frame != 0 {
            Some(frame)
        } else {
            None
        }
    }
}

/// What the kernel may note where no page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A guard page (`MADV_GUARD_INSTALL`).
    Guard,
    /// A page that is lost: who touches it gets `SIGBUS` (`UFFDIO_POISON`).
    Poison,
    /// Write protection of what comes there.
    Protection,
}

/// /proc/PID/pagemap of one task, open.
#[derive(Debug)]
pub struct Pagemap(File);

impl From<Pagemap> for OwnedFd {
    fn from(map: Pagemap) -> Self {
        map.0.into()
    }
}

impl Pagemap {
    /// Opens the page map of `process`; the caller must be allowed to trace it.
    ///
    /// # Errors
    /// `ENOENT` when there is no such task, `EACCES`. A file opened for a task that has died
    /// answers as if nothing were mapped.
    pub fn open(process: &Process) -> io::Result<Self> {
        process.open("pagemap").map(Self)
    }

    /// Finds pages of `span`, writes them to `regions` in ascending order and returns how many
    /// regions those are and the address up to which was looked: `span.end`, or less when
    /// `regions` was full.
    ///
    /// # Errors
    /// `ENOTTY` where the kernel has no `PAGEMAP_SCAN` (before 6.7) and `EINVAL` for a category it
    /// does not know; `EPERM` for [`Action::CHECK_TRACKED`]. See
    /// Documentation/admin-guide/mm/pagemap.rst.
    pub fn scan(
        &self,
        span: Span,
        query: &Query,
        action: Action,
        regions: &mut [Region],
    ) -> io::Result<(usize, Addr)> {
        let mut argument = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: action.bits(),
            start: span.start.0,
            end: span.end.0,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: query.inverted.bits(),
            category_mask: query.all.bits(),
            category_anyof_mask: query.any.bits(),
            return_mask: query.told.bits(),
        };
        // SAFETY: the argument is what the number stands for, and `vec` and `vec_len` describe a
        // slice of `page_region`s that is borrowed for writing during the call.
        let found =
            unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN.into(), &raw mut argument) };
        match usize::try_from(found) {
            Ok(found) => Ok((found.min(regions.len()), Addr(argument.walk_end))),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    /// Reads the entries of consecutive pages, the first of which starts at `start`, and returns
    /// how many there were: less than asked for at the end of the address space.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn entries(&self, start: Addr, entries: &mut [Entry]) -> io::Result<usize> {
        let offset_bytes = start.page() * size_of::<Entry>() as u64;
        // SAFETY: an `Entry` is eight plain bytes of which every pattern is valid, and the slice
        // is borrowed for writing as long as its bytes are.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                entries.as_mut_ptr().cast::<u8>(),
                size_of_val::<[Entry]>(entries),
            )
        };
        Ok(self.0.read_at(bytes, offset_bytes)? / size_of::<Entry>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Pagemap {
        Pagemap::open(&Process::own()).expect("the own page map")
    }

    /// Whether the kernel has no `PAGEMAP_SCAN`.
    fn skip<T>(outcome: &io::Result<T>) -> bool {
        let missing = outcome
            .as_ref()
            .is_err_and(|e| e.raw_os_error() == Some(libc::ENOTTY));
        if missing {
            eprintln!("skipped: this kernel has no PAGEMAP_SCAN");
        }
        missing
    }

    const PRIVATE: Query = Query {
        inverted: Category::FILE.union(Category::ZERO),
        all: Category::FILE.union(Category::ZERO),
        any: Category::PRESENT.union(Category::SWAPPED),
        told: Category::PRESENT.union(Category::GUARD),
    };

    /// Three pages inside `bytes`, which must be larger.
    fn three_pages(bytes: &[u8]) -> Span {
        let start = Addr(bytes.as_ptr().addr() as u64 + 4095).page_start();
        Span::new(start, 3 * 4096)
    }

    #[test]
    fn scan_number_is_that_of_the_header() {
        assert_eq!(PAGEMAP_SCAN, 0xc060_6610);
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/fs.h") else {
            return;
        };
        if let Some(line) = header
            .lines()
            .find(|line| line.starts_with("#define PAGEMAP_SCAN"))
        {
            assert!(
                line.ends_with("_IOWR(PROCFS_IOCTL_MAGIC, 16, struct pm_scan_arg)"),
                "{line}"
            );
        }
    }

    #[test]
    fn written_pages_are_found() {
        let bytes = vec![1_u8; 5 * 4096];
        let span = three_pages(&bytes);
        let mut regions = [Region::EMPTY; 8];
        let outcome = own().scan(span, &PRIVATE, Action::empty(), &mut regions);
        if skip(&outcome) {
            return;
        }
        let (found, end) = outcome.expect("a scan");
        assert_eq!(end, span.end);
        assert_eq!(regions[0].span().start, span.start);
        assert_eq!(regions[found - 1].span().end, span.end);
        assert!(
            regions[..found]
                .iter()
                .all(|region| region.categories() == Category::PRESENT)
        );
    }

    #[test]
    fn a_full_buffer_says_how_far_it_came() {
        let everything = Span {
            start: Addr(0),
            end: Addr(0x7fff_ffff_f000),
        };
        let mut one = [Region::EMPTY];
        let outcome = own().scan(everything, &PRIVATE, Action::empty(), &mut one);
        if skip(&outcome) {
            return;
        }
        let (found, end) = outcome.expect("a scan");
        assert_eq!(found, 1);
        assert!(end >= one[0].span().end && end < everything.end);
    }

    #[test]
    fn entries_tell_present_pages() {
        let bytes = vec![1_u8; 5 * 4096];
        let mut entries = [Entry::default(); 3];
        let read = own().entries(three_pages(&bytes).start, &mut entries);
        assert_eq!(read.expect("entries"), 3);
        assert!(
            entries
                .iter()
                .all(|entry| entry.is_present() && !entry.is_file())
        );
        assert!(entries.iter().all(|entry| !entry.is_guard()));
    }
}
