//! The huge pages that an image's memory needs: the kernel has so many, and gives none but those.
use std::collections::BTreeMap;
use std::path::Path;

use crate::records::Saved;
use crate::{Error, Result};

/// Refuses what this host has too few huge pages for. Those of files are not counted: they are
/// taken when the files are made, before any task is.
///
/// # Errors
/// [`Error::Unfit`].
pub(crate) fn check(saved: &Saved<'_>) -> Result<()> {
    check_in(Path::new("/sys/kernel/mm/hugepages"), &wanted(saved))
}

/// How many bytes are wanted of each size of pages.
fn wanted(saved: &Saved<'_>) -> BTreeMap<u64, u64> {
    let mappings = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let mut wanted = BTreeMap::new();
    for map in mappings {
        if let Some(page_bytes) = map.huge_page_bytes() {
            *wanted.entry(page_bytes).or_default() += map.span().bytes();
        }
    }
    wanted
}

fn check_in(folder: &Path, wanted: &BTreeMap<u64, u64>) -> Result<()> {
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
        // Some are promised to others, and some can be made when they are asked for.
        let number = |name| number(name).unwrap_or_default();
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
        let check = |pages: u64| check_in(folder.path(), &[(2 << 20, pages * (2 << 20))].into());
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
        let error = check_in(folder.path(), &[(1 << 30, 1 << 30)].into());
        let error = error.expect_err("none of that size").to_string();
        assert!(error.contains("huge pages of 1048576 KiB"), "{error}");
    }
}
