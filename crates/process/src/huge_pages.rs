//! The huge pages that an image's memory needs: the kernel has so many, and gives none but those.
use std::collections::BTreeMap;
use std::path::Path;

use abi::{Addr, Span};
use image::{Reader, RunKind, SpaceId};
use resources::fd::SharedMemory;

use crate::records::Saved;
use crate::{Error, Result};

const FOLDER: &str = "/sys/kernel/mm/hugepages";

/// Refuses what this host has too few free huge pages for, in private memory and in shared, before
/// anything is made.
///
/// # Errors
/// [`Error::Unfit`].
pub(crate) fn check(saved: &Saved<'_>, reader: &Reader) -> Result<()> {
    check_in(
        &sys::host::path(FOLDER),
        &wanted(saved, reader)?,
        Which::Free,
    )
}

/// Refuses what this host has too few huge pages for even if all of them are free: those of the
/// tree that the image is of will be.
///
/// # Errors
/// [`Error::Unfit`].
pub(crate) fn check_in_all(saved: &Saved<'_>, reader: &Reader) -> Result<()> {
    check_in(
        &sys::host::path(FOLDER),
        &wanted(saved, reader)?,
        Which::All,
    )
}

/// Which of a host's huge pages count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    Free,
    All,
}

/// How many bytes are wanted of each size of pages.
fn wanted(saved: &Saved<'_>, reader: &Reader) -> Result<BTreeMap<u64, u64>> {
    let mappings = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let mut wanted = BTreeMap::new();
    for map in mappings {
        if let Some(page_bytes) = map.huge_page_bytes() {
            *wanted.entry(page_bytes).or_default() += map.span().bytes();
        }
    }
    for (id, description) in (0u32..).zip(&saved.descriptions) {
        let memory = description.memory()?;
        let memory = memory.filter(|memory| memory.first == id && !memory.is_there);
        if let Some((memory, page_bytes)) = memory.and_then(|it| Some((it, it.huge_page_bytes?))) {
            let mapped = mapped(saved, memory);
            *wanted.entry(page_bytes).or_default() +=
                taken_bytes(memory, page_bytes, mapped, reader);
        }
    }
    Ok(wanted)
}

/// The parts of shared memory that the tasks have mapped: the kernel sets pages aside for them.
fn mapped(saved: &Saved<'_>, memory: SharedMemory) -> Vec<Span> {
    let is_of_it = |id: u32| {
        let other = saved.descriptions[id as usize].memory().ok().flatten();
        other.is_some_and(|other| (other.tag, other.first) == (memory.tag, memory.first))
    };
    let maps = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    // A mapping without a reservation (`MAP_NORESERVE`) takes pages when a task touches it.
    let maps = maps.filter(|map| !map.is_unreserved() && map.file.is_some_and(is_of_it));
    let parts = maps.map(|map| Span::new(Addr(map.offset), map.span().bytes()));
    parts.collect()
}

/// How many bytes of pages of this size some shared memory takes: where it is `mapped`, and where
/// it has pages.
pub(crate) fn taken_bytes(
    memory: SharedMemory,
    page_bytes: u64,
    mapped: Vec<Span>,
    reader: &Reader,
) -> u64 {
    if memory.takes_all {
        return memory.bytes.next_multiple_of(page_bytes);
    }
    let runs = memory
        .space
        .into_iter()
        .flat_map(|space| reader.runs(SpaceId(space)));
    let runs = runs.filter(|run| run.kind != RunKind::Zero);
    let runs = runs.map(|run| {
        let start = Addr::of_page(run.first_page);
        Span::new(start, u64::from(run.pages) * abi::PAGE_BYTES)
    });
    let mut all = runs.chain(mapped).collect::<Vec<_>>();
    all.sort_unstable();
    let (mut bytes, mut end) = (0, 0);
    for span in all {
        let from = (span.start.0 / page_bytes * page_bytes).max(end);
        end = span.end.0.next_multiple_of(page_bytes).max(end);
        bytes += end.saturating_sub(from);
    }
    bytes
}

fn check_in(folder: &Path, wanted: &BTreeMap<u64, u64>, which: Which) -> Result<()> {
    for (page_bytes, bytes) in wanted {
        let (kib, pages) = (page_bytes / 1024, bytes / page_bytes);
        let folder = folder.join(format!("hugepages-{kib}kB"));
        let number = |name: &str| {
            let text = std::fs::read_to_string(folder.join(name));
            text.ok().and_then(|text| text.trim().parse::<u64>().ok())
        };
        let Some(free) = number("free_hugepages") else {
            let what = format!("the image has huge pages of {kib} KiB, which this kernel lacks");
            return Err(Error::Unfit(what));
        };
        let number = |name| number(name).unwrap_or_default();
        if which == Which::All {
            let all = number("nr_hugepages") + number("nr_overcommit_hugepages");
            if all < pages {
                return Err(Error::Unfit(format!(
                    "the image needs {pages} huge pages of {kib} KiB, and this host has {all} \
                     (vm.nr_hugepages)"
                )));
            }
            continue;
        }
        // Some are promised to others, and some can be made when they are asked for.
        let surplus = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
        let there = (free + surplus).saturating_sub(number("resv_hugepages"));
        if there < pages {
            return Err(Error::Unfit(format!(
                "the image needs {pages} free huge pages of {kib} KiB, and this host has {there} \
                 (vm.nr_hugepages)"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_promised_are_not_free() {
        let folder = tempfile::tempdir().expect("a folder");
        let pages = folder.path().join("hugepages-2048kB");
        std::fs::create_dir(&pages).expect("a folder");
        let set = |name: &str, number: u64| {
            std::fs::write(pages.join(name), format!("{number}\n")).expect("written");
        };
        let check_as = |pages: u64, which| {
            check_in(folder.path(), &[(2 << 20, pages * (2 << 20))].into(), which)
        };
        let check = |pages: u64| check_as(pages, Which::Free);
        set("free_hugepages", 5);
        set("resv_hugepages", 2);
        check(3).expect("three are there");
        let error = check(4).expect_err("there is none more").to_string();
        assert!(
            error.contains("4 free huge pages of 2048 KiB, and this host has 3"),
            "{error}"
        );
        set("nr_overcommit_hugepages", 4);
        set("surplus_hugepages", 1);
        check(6).expect("the kernel makes three more");
        set("nr_hugepages", 7);
        check_as(11, Which::All).expect("when they are free");
        let error = check_as(12, Which::All).expect_err("there are not so many");
        let error = error.to_string();
        assert!(
            error.contains("12 huge pages of 2048 KiB, and this host has 11"),
            "{error}"
        );
        let error = check_in(folder.path(), &[(1 << 30, 1 << 30)].into(), Which::Free);
        let error = error.expect_err("none of that size").to_string();
        assert!(error.contains("huge pages of 1048576 KiB"), "{error}");
    }
}
