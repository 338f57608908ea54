//! docs/ledger.md: what the kernel is known to have for a process, and what becomes of it.
//!
//! It is made of the lists of `sys::ledger` and `resources::ledger`, which stand there one entry a
//! line: `kept("rd", "protection").at(1),`.

use std::fmt::Write as _;
use std::path::Path;

use super::page::Page;
use super::tree::read;
use super::violation::Violation;
use crate::error::Result;

/// The page.
const PAGE: Page = Page {
    path: "docs/ledger.md",
    mark: "lists",
    part: "the ledger",
};
/// The files that have lists, in the order of the page.
const FILES: [&str; 5] = [
    "crates/sys/src/ledger.rs",
    "crates/resources/src/ledger/process.rs",
    "crates/resources/src/ledger/memory.rs",
    "crates/resources/src/ledger/fdinfo.rs",
    "crates/resources/src/ledger/calls.rs",
];
/// The fates, as entries and the page call them.
const FATES: [(&str, &str); 4] = [
    ("kept", "kept"),
    ("refused", "refused"),
    ("stateless", "no state"),
    ("lost", "lost"),
];

/// A list as it stands in a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct RecordedList {
    title: String,
    source: String,
    entries: Vec<Entry>,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    fate: usize,
    name: String,
    why: String,
}

/// Checks that the page has the lists.
///
/// # Errors
/// When a file cannot be read.
pub fn check(root: &Path) -> Result<Vec<Violation>> {
    match PAGE.exists(root) {
        true => PAGE.check(root, &render(&all(root)?)),
        false => Ok(Vec::new()),
    }
}

/// Writes the page's part again.
///
/// # Errors
/// When a file cannot be read or written.
pub fn fix(root: &Path) -> Result<()> {
    match PAGE.exists(root) {
        true => PAGE.fix(root, &render(&all(root)?)),
        false => Ok(()),
    }
}

fn all(root: &Path) -> Result<Vec<RecordedList>> {
    let mut lists = Vec::new();
    for file in FILES {
        lists.extend(parse(&read(root, Path::new(file))?));
    }
    Ok(lists)
}

/// The lists of a file, up to its tests.
fn parse(text: &str) -> Vec<RecordedList> {
    let mut lists: Vec<RecordedList> = Vec::new();
    for line in text.lines().take_while(|line| *line != "#[cfg(test)]") {
        let line = line.trim();
        if let Some(title) = line.strip_prefix("title: ") {
            let title = literals(title).remove(0);
            lists.push(RecordedList {
                title,
                ..RecordedList::default()
            });
        }
        let Some(list) = lists.last_mut() else {
            continue;
        };
        if let Some(source) = line.strip_prefix("source: ") {
            list.source = literals(source).remove(0);
        }
        list.entries.extend(entry(line));
    }
    lists
}

fn entry(line: &str) -> Option<Entry> {
    let (word, rest) = line.split_once('(')?;
    let fate = FATES.iter().position(|(name, _)| *name == word)?;
    let [name, why] = literals(rest).try_into().ok()?;
    Some(Entry { fate, name, why })
}

/// The texts in quotation marks, none of which has one inside.
fn literals(text: &str) -> Vec<String> {
    let parts = text.split('"').skip(1).step_by(2);
    parts.map(str::to_owned).collect()
}

fn render(lists: &[RecordedList]) -> String {
    let mut page = String::new();
    for list in lists {
        let counts = FATES.iter().enumerate().map(|(fate, (_, name))| {
            let count = list
                .entries
                .iter()
                .filter(|entry| entry.fate == fate)
                .count();
            (count, *name)
        });
        let counts = counts.filter(|(count, _)| *count > 0);
        let counts = counts.map(|(count, name)| format!("{count} {name}"));
        let counts = counts.collect::<Vec<_>>().join(", ");
        let (title, source) = (capital(&list.title), &list.source);
        let _ = write!(page, "\n## {title}\n\n{source}: {counts}.\n\n");
        page.push_str("| | | |\n| --- | --- | --- |\n");
        for Entry { fate, name, why } in &list.entries {
            let _ = writeln!(page, "| `{name}` | {} | {why} |", FATES[*fate].1);
        }
    }
    page.push('\n');
    page
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
pub static FLAGS: List = List {
    title: "flags of x",
    source: "x.h",
    entries: &[
        kept("A", "").at(1),
        lost("B", "why (so)").at(2),
        refused("C", "named"),
    ],
};
#[cfg(test)]
        kept("D", ""),
"#;

    #[test]
    fn lists_are_read_and_counted() {
        let lists = parse(SOURCE);
        let page = render(&lists);
        let want = "\n## Flags of x\n\nx.h: 1 kept, 1 refused, 1 lost.\n\n\
            | | | |\n| --- | --- | --- |\n| `A` | kept |  |\n| `B` | lost | why (so) |\n\
            | `C` | refused | named |\n\n";
        assert_eq!(page, want);
    }

    #[test]
    fn every_list_of_the_sources_is_read_whole() {
        let root = crate::repo::root();
        for file in FILES {
            let text = read(root, Path::new(file)).expect("it is there");
            let code = text.split("#[cfg(test)]").next().expect("the code");
            let lists = parse(&text);
            assert_eq!(
                lists.len(),
                code.matches(": List = List {").count(),
                "{file}"
            );
            let entries = lists.iter().map(|list| list.entries.len()).sum::<usize>();
            let starts = FATES.map(|(name, _)| format!("        {name}(\""));
            let written = code
                .lines()
                .filter(|line| starts.iter().any(|one| line.starts_with(one)));
            assert_eq!(entries, written.count(), "{file}");
        }
    }
}
