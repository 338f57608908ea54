//! Huge pages: whether the host has as many as are to come.
//!
//! A mapping of huge pages either has them reserved since it was made, or takes them as they come
//! (`MAP_NORESERVE`). Then the host may have none left, which the kernel tells by `EEXIST`, as if
//! the page were there (Linux 6.18).
use std::fmt;
use std::path::Path;

use abi::spans::{Spans, intersect, subtract};
use abi::{Addr, Span};
use image::{Granule, Reader};
use sys::pagemap::{Category, Pagemap, Query, Region as Found};

use crate::release::empty_parts;
use crate::session::Options;
use crate::{Error, Region, Result, Session};

/// The kernel's directory about pages of 2 MiB.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The host's pages of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    all: u64,
    free: u64,
    /// Of the free ones, those that are promised to mappings.
    reserved: u64,
    /// How many more the kernel may make.
    more: u64,
}

impl Pool {
    /// The pool as it is now; none if the kernel does not tell.
    pub fn now() -> Option<Self> {
        Self::at(Path::new(POOL))
    }

    fn at(folder: &Path) -> Option<Self> {
        let number = |name: &str| {
            let text = std::fs::read_to_string(folder.join(name)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        let surplus = number("surplus_hugepages")?;
        Some(Self {
            all: number("nr_hugepages")?,
            free: number("free_hugepages")?,
            reserved: number("resv_hugepages")?,
            more: number("nr_overcommit_hugepages")?.saturating_sub(surplus),
        })
    }

    /// How many who has none reserved can have.
    const fn available(self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.more
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            all,
            free,
            reserved,
            more,
        } = self;
        write!(
            f,
            "of {all} pages of 2 MiB the host has {free} free, {reserved} of them reserved, and \
             {more} more may be made"
        )
    }
}

/// Looks whether the host has the pages of 2 MiB that a target is going to need.
///
/// # Errors
/// [`Error::NoRoom`] where all are going to be brought in; otherwise the log is told.
pub(crate) fn check(pid: i32, regions: &[Region], image: &Reader, options: Options) -> Result<()> {
    let large = |region: &&Region| region.granule == Granule::Large;
    let Some(pool) = Pool::now().filter(|_| regions.iter().any(|region| large(&region))) else {
        return Ok(());
    };
    let Ok(smaps) = sys::procfs::read_text(format_args!("{pid}/smaps")) else {
        return Ok(());
    };
    let unreserved = unreserved(&smaps);
    let mut needed = 0;
    for region in regions.iter().filter(large) {
        let mut wanted = Spans::of([region.span()]);
        if options.unregister {
            let empty = empty_parts(image, region)?;
            let empty = empty.iter().map(|range| region.span_of(range));
            wanted = subtract(&wanted, &Spans::of(empty));
        }
        let wanted = intersect(&wanted, &unreserved);
        needed += wanted.iter().map(|span| span.bytes()).sum::<u64>() / region.granule_bytes();
    }
    if needed <= pool.available() {
        return Ok(());
    }
    let wanted = format!("{needed} pages of 2 MiB");
    if options.everything {
        let pool = pool.to_string();
        return Err(Error::NoRoom { pid, wanted, pool });
    }
    log::warn!("process {pid} may want {wanted}, and {pool}: it is ended where it gets none");
    Ok(())
}

/// The mappings that have no pages reserved, of what smaps tells.
fn unreserved(smaps: &str) -> Spans {
    let mut spans = Vec::new();
    let mut last = None;
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let is_unreserved = flags.split_whitespace().any(|flag| flag == "nr");
            spans.extend(last.take().filter(|_| is_unreserved));
        } else if let Some(span) = span_of(line) {
            last = Some(span);
        }
    }
    Spans::of(spans)
}

/// The addresses of a line that begins with some.
fn span_of(line: &str) -> Option<Span> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok().map(Addr);
    Some(Span {
        start: number(start)?,
        end: number(end)?,
    })
}

impl Session {
    /// True if a huge page is in memory at `span`, or is in the target's file and mapped from there
    /// now. Small pages need no look: of those `EEXIST` is true, as the kernel sees the entry of
    /// the page table, or the page in the file's cache.
    pub(crate) fn has_huge_page(&self, span: Span, protect: bool) -> Result<bool> {
        let query = Query {
            inverted: Category::empty(),
            all: Category::PRESENT,
            any: Category::empty(),
            told: Category::empty(),
        };
        let failed = |source| Error::call("look at", span, self.pid(), source);
        let map = Pagemap::open(&self.process).map_err(failed)?;
        let mut found = [Found::EMPTY; 1];
        let (count, _) = map
            .scan(span, &query, sys::pagemap::Action::empty(), &mut found)
            .map_err(failed)?;
        // In a shared mapping it may be in the file alone; the kernel maps it then, or says that
        // it is not there.
        Ok(count > 0 || self.uffd.map_cached(span, protect).is_ok())
    }

    /// Why a page does not come for which the host has no memory.
    pub(crate) fn no_room(&self, span: Span) -> Error {
        let pool = Pool::now().map(|pool| pool.to_string());
        Error::NoRoom {
            pid: self.pid(),
            wanted: format!("the page of 2 MiB at {span}"),
            pool: pool.unwrap_or_else(|| "the host has none".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_without_reserved_pages_are_told_by_their_flags() {
        let smaps = "1000-3000 rw-p 00000000 00:0f 1 /anon_hugepage (deleted)\nSize: 8 kB\n\
                     VmFlags: rd wr mr mw me nr ht sd\n4000-5000 rw-p 0 00:00 0\nRss: 4 kB\n\
                     VmFlags: rd wr mr mw me ac\n";
        let found = unreserved(smaps);
        assert_eq!(
            found.iter().copied().collect::<Vec<_>>(),
            [Span::new(Addr(0x1000), 0x2000)]
        );
    }

    #[test]
    fn reserved_pages_are_others_and_surplus_ones_may_be_made() {
        let folder = tempfile::tempdir().expect("a directory");
        for (name, number) in [
            ("nr_hugepages", "20\n"),
            ("free_hugepages", "9\n"),
            ("resv_hugepages", "4\n"),
            ("nr_overcommit_hugepages", "5\n"),
            ("surplus_hugepages", "3\n"),
        ] {
            std::fs::write(folder.path().join(name), number).expect("written");
        }
        let pool = Pool::at(folder.path()).expect("it is told");
        assert_eq!(pool.available(), 7);
        assert_eq!(
            pool.to_string(),
            "of 20 pages of 2 MiB the host has 9 free, 4 of them reserved, and 2 more may be made"
        );
        assert_eq!(Pool::at(&folder.path().join("none")), None);
    }
}
