//! Addresses and page spans of another process: types that cannot be dereferenced.

use core::fmt;
use core::ops::Range;

/// The size of a page in bytes.
pub const PAGE_BYTES: u64 = 4096;

/// An address in some task's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Addr(pub u64);

impl Addr {
    /// The address `bytes` further on; `None` past the end of the address space.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// The address `bytes` further on.
    ///
    /// # Panics
    /// Past the end of the address space: for addresses that were checked before.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        match self.checked_add(bytes) {
            Some(sum) => sum,
            None => panic!("address past the end of the address space"),
        }
    }

    /// Whether the address is a multiple of the page size.
    #[must_use]
    pub const fn is_aligned(self) -> bool {
        self.0.is_multiple_of(PAGE_BYTES)
    }

    /// The start of the page that holds the address.
    #[must_use]
    pub const fn page_start(self) -> Self {
        Self(self.0 & !(PAGE_BYTES - 1))
    }

    /// The number of the page that holds the address.
    #[must_use]
    pub const fn page(self) -> u64 {
        self.0 / PAGE_BYTES
    }

    /// The first address of page `number`.
    #[must_use]
    pub const fn of_page(number: u64) -> Self {
        Self(number * PAGE_BYTES)
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of addresses, `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The first address.
    pub start: Addr,
    /// The address after the last.
    pub end: Addr,
}

impl Span {
    /// The span of `bytes` bytes at `start`.
    ///
    /// # Panics
    /// When it leaves the address space: for values that were checked before.
    #[must_use]
    pub const fn new(start: Addr, bytes: u64) -> Self {
        Self {
            start,
            end: start.plus(bytes),
        }
    }

    /// The span of the pages with these numbers.
    #[must_use]
    pub const fn of_pages(pages: Range<u64>) -> Self {
        Self {
            start: Addr::of_page(pages.start),
            end: Addr::of_page(pages.end),
        }
    }

    /// The length in bytes; 0 when `end` is before `start`.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// The length in whole pages.
    #[must_use]
    pub const fn pages(self) -> u64 {
        self.bytes() / PAGE_BYTES
    }

    /// Whether the span holds no address.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.bytes() == 0
    }

    /// Whether `addr` lies inside.
    #[must_use]
    pub const fn contains(self, addr: Addr) -> bool {
        self.start.0 <= addr.0 && addr.0 < self.end.0
    }

    /// Whether the two spans share an address.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end.0 && other.start.0 < self.end.0
    }

    /// The part that both spans have; empty when they share none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self {
            start,
            end: self.end.min(other.end).max(start),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start.0, self.end.0)
    }
}
