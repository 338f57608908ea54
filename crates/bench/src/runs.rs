//! Where the numbers of runs are kept: a folder for each day and machine, and nothing overwritten.
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::error::{Error, Result, file_error};
use crate::machine::Machine;

/// Keeps the numbers of a run of the bench `name` below `folder`, where the page is; tells where.
///
/// # Errors
/// When the file cannot be written.
pub fn keep(
    folder: &Path,
    machine: &Machine,
    name: &str,
    numbers: &impl Serialize,
) -> Result<PathBuf> {
    let today = SystemTime::now().duration_since(UNIX_EPOCH);
    let today = date(today.unwrap_or_default().as_secs() / 86_400);
    let runs = format!("benchmarks/runs/{today}-{}", machine.short_name());
    let runs = folder.join(runs);
    std::fs::create_dir_all(&runs).map_err(file_error("make", &runs))?;
    let path = free(&runs, name);
    let text = serde_json::to_string_pretty(numbers);
    let mut text = text.map_err(|source| Error::Numbers {
        path: path.clone(),
        source,
    })?;
    text.push('\n');
    std::fs::write(&path, text).map_err(file_error("write", &path))?;
    Ok(path)
}

/// A name that no earlier run has.
fn free(runs: &Path, name: &str) -> PathBuf {
    let first = runs.join(format!("{name}.json"));
    let others = (2..).map(|number: u32| runs.join(format!("{name}-{number}.json")));
    let mut all = std::iter::once(first).chain(others);
    all.find(|path| !path.exists()).expect("there is no end")
}

/// How a page beside which `path` lies links to it.
pub fn link(folder: &Path, path: &Path) -> String {
    let path = path.strip_prefix(folder).unwrap_or(path);
    format!("[every number of this run]({})", path.display())
}

/// The date of a day since 1970, as `YYYY-MM-DD`.
fn date(mut day: u64) -> String {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        let days = [0, 58, 59, 789, 790, 20_779, 11_016, 11_017];
        assert_eq!(
            days.map(date),
            [
                "1970-01-01",
                "1970-02-28",
                "1970-03-01",
                "1972-02-29",
                "1972-03-01",
                "2026-11-22",
                "2000-02-29",
                "2000-03-01"
            ]
        );
    }

    #[test]
    fn nothing_is_overwritten() {
        let folder = tempfile::tempdir().expect("a folder");
        let machine = Machine::this(folder.path());
        let keep =
            |number: u32| keep(folder.path(), &machine, "some", &number).expect("it is kept");
        let (one, two) = (keep(1), keep(2));
        assert!(one.ends_with("some.json") && two.ends_with("some-2.json"));
        assert_eq!(std::fs::read_to_string(&one).expect("it is there"), "1\n");
        let link = link(folder.path(), &two);
        assert!(link.contains("(benchmarks/runs/20") && link.ends_with("/some-2.json)"));
    }
}
