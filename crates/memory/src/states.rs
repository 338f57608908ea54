//! What stands at each page of memory that is registered with a userfaultfd.

use abi::Span;
use abi::spans::Spans;
use rustix::io::Errno;
use sys::pagemap::{Category, Mark, Pagemap, Query};
use sys::process::Process;

use crate::scan::{each_entry, each_found, is};
use crate::{Error, Result};

/// Pages found in one range of addresses, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct States {
    /// Pages that are there, in memory or swapped out: also the kernel's page of zeros, and pages
    /// of files.
    pub present: Spans,
    /// Pages that are write-protected by a userfaultfd, whether they are there or not.
    pub protected: Spans,
    /// Pages that are lost (`UFFDIO_POISON`); of hugetlbfs, it is not told.
    pub lost: Spans,
}

/// Looks at each page of `span` of `process`. The caller must have `CAP_SYS_ADMIN`.
///
/// # Errors
/// [`Error::Scan`], [`Error::Gone`].
pub fn states(process: &Process, span: Span) -> Result<States> {
    let pid = process.pid();
    let failed = |source| Error::scan(pid, span.start, source);
    let map = Pagemap::open(process).map_err(failed)?;
    let mut states = States::default();
    for some in occupied(&map, span).map_err(failed)? {
        each_entry(&map, some, |page, entry| {
            let mark = entry.mark();
            let is_there = entry.is_present() || entry.is_swapped();
            match mark {
                Some(Mark::Guard) => return,
                Some(Mark::Poison) => states.lost.push(page),
                None if is_there => states.present.push(page),
                Some(Mark::Protection) | None => {}
            }
            if entry.is_protected() {
                states.protected.push(page);
            }
        })
        .map_err(failed)?;
    }
    Ok(states)
}

/// Returns the occupied part; all of it where the kernel cannot search.
fn occupied(map: &Pagemap, span: Span) -> std::io::Result<Spans> {
    let query = Query {
        inverted: Category::empty(),
        all: Category::empty(),
        any: Category::PRESENT | Category::SWAPPED,
        told: Category::PRESENT,
    };
    let mut found = Spans::new();
    let looked = each_found(map, span, &query, |region| {
        found.push(region.span().intersect(span));
    });
    match looked {
        Err(error) if is(&error, Errno::NOTTY) => Ok(Spans::of([span])),
        looked => looked.map(|()| found),
    }
}

#[cfg(test)]
mod tests {
    use abi::{Addr, PAGE_BYTES};
    use sys::uffd::{Features, Modes, Uffd};
    use sys::words::Words;

    use super::*;

    #[test]
    fn pages_that_are_there_protected_and_lost_are_told_apart() {
        let Ok(uffd) = Uffd::create() else {
            return eprintln!("skipped: userfaultfd needs privileges here");
        };
        let wanted = Features::WP | Features::WP_UNPOPULATED | Features::POISON;
        if uffd.api(wanted).is_err() {
            return eprintln!("skipped: this kernel cannot protect what is not there");
        }
        let room = Words::own(16 * 512).expect("memory");
        let start = Addr(room.as_ptr().addr() as u64);
        let span = Span::new(start, 16 * PAGE_BYTES);
        let page = |at: u64, count: u64| Span::new(start.plus(at * PAGE_BYTES), count * PAGE_BYTES);
        uffd.register(span, Modes::MISSING | Modes::WP)
            .expect("registered");
        uffd.copy(page(1, 1).start, &[7; 4096], true)
            .expect("a page");
        uffd.zero(page(2, 2), true).expect("zeros");
        uffd.poison(page(6, 1), true).expect("a lost page");
        uffd.write_protect(page(3, 2), true).expect("protected");
        let found = states(&Process::own(), span).expect("a look");
        assert_eq!(found.present, [page(1, 3)]);
        assert_eq!(found.protected, [page(3, 2)]);
        assert_eq!(found.lost, [page(6, 1)]);
    }
}
