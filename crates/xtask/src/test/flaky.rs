//! Tests that failed and passed when they were tried again: which are known, and which were so in
//! the run before.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::repo;

/// Where what was found about each stands, relative to the top folder.
pub const PAGE: &str = "docs/flaky.md";

/// The standing of a test that was flaky in this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlakyStatus {
    /// The page says what was found about it.
    Explained,
    /// It was not so in the run before.
    Once,
    /// It was so in the run before, too, and the page says nothing.
    Again,
}

/// The tests that were flaky in the run before on this machine, and those that the page explains.
#[derive(Debug)]
pub struct Memory {
    file: PathBuf,
    explained: BTreeSet<String>,
    last: BTreeSet<String>,
}

impl Memory {
    /// Reads the page, and what the last run of this checkout has left.
    ///
    /// # Errors
    /// When the page cannot be read.
    pub fn read() -> Result<Self> {
        let page = repo::root().join(PAGE);
        let text = std::fs::read_to_string(&page).map_err(repo::file_error("read", &page))?;
        let file = repo::target_folder().join("flaky.last");
        // Without one, as on a fresh machine, nothing was flaky.
        let last = std::fs::read_to_string(&file).unwrap_or_default();
        Ok(Self {
            file,
            explained: explained(&text),
            last: last.lines().map(str::to_owned).collect(),
        })
    }

    /// The names that the page explains.
    pub fn explained(&self) -> &BTreeSet<String> {
        &self.explained
    }

    /// The standing of `name`, which was flaky in this run.
    pub fn standing(&self, name: &str) -> FlakyStatus {
        match (self.explained.contains(name), self.last.contains(name)) {
            (true, _) => FlakyStatus::Explained,
            (false, false) => FlakyStatus::Once,
            (false, true) => FlakyStatus::Again,
        }
    }

    /// Writes for the next run which of the tests that `ran` were flaky; what did not run stays as
    /// it was.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, ran: &BTreeSet<String>, flaky: &BTreeSet<String>) -> Result<()> {
        let text = next(&self.last, ran, flaky);
        write(&self.file, &text)
    }
}

/// The names in the first column of the page's table.
fn explained(page: &str) -> BTreeSet<String> {
    let names = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    let explained = names.filter(|(_, found)| !found.trim_matches([' ', '|']).is_empty());
    explained.map(|(name, _)| name.to_owned()).collect()
}

/// The names that the next run is to know, one a line.
fn next(last: &BTreeSet<String>, ran: &BTreeSet<String>, flaky: &BTreeSet<String>) -> String {
    let kept = last.difference(ran).chain(flaky).collect::<BTreeSet<_>>();
    kept.into_iter().map(|name| format!("{name}\n")).collect()
}

/// Puts a whole file in the place of another.
fn write(file: &Path, text: &str) -> Result<()> {
    let draft = file.with_extension(format!("last.{}", std::process::id()));
    std::fs::write(&draft, text).map_err(repo::file_error("write", &draft))?;
    std::fs::rename(&draft, file).map_err(repo::file_error("write", file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn memory(explained: &[&str], last: &[&str]) -> Memory {
        Memory {
            file: PathBuf::new(),
            explained: set(explained),
            last: set(last),
        }
    }

    #[test]
    fn test_flaky_twice_in_a_row_is_told_from_once() {
        let memory = memory(&["known"], &["known", "again"]);
        assert_eq!(memory.standing("known"), FlakyStatus::Explained);
        assert_eq!(memory.standing("again"), FlakyStatus::Again);
        assert_eq!(memory.standing("new"), FlakyStatus::Once);
    }

    #[test]
    fn test_that_did_not_run_is_remembered() {
        let last = set(&["elsewhere", "well again", "still"]);
        let ran = set(&["well again", "still", "new", "well"]);
        let text = next(&last, &ran, &set(&["still", "new"]));
        assert_eq!(text, "elsewhere\nnew\nstill\n");
    }

    #[test]
    fn row_without_a_finding_explains_nothing() {
        let page = "| test | found |\n| --- | --- |\n| `a b::c` | it waits 5 s |\n| `d e` | |\n";
        assert_eq!(explained(page), set(&["a b::c"]));
    }

    #[test]
    fn page_of_this_repository_is_read() {
        Memory::read().expect("the page is there");
    }
}
