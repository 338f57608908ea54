//! The ledger of socket options in docs/sockets.md, made from the tables in the sources: each
//! number, its name and its fate, and how many there are of each.
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::page::Page;
use super::tree::read;
use super::violation::Violation;
use crate::error::Result;

/// The page.
const PAGE: Page = Page {
    path: "docs/sockets.md",
    mark: "ledger",
    part: "the ledger of socket options",
};
/// Where the tables are.
const FOLDER: &str = "crates/resources/src/fd/socket/ledger";
/// The files with tables, in the order of the page.
const FILES: &[&str] = &["socket.rs", "inet.rs", "transport.rs", "others.rs"];
/// The functions that make an entry, and what they say of it: `{}` is their reason.
const FATES: &[(&str, &str, &str)] = &[
    (
        "early",
        "kept",
        "kept, given back before it has its address",
    ),
    ("late", "kept", "kept"),
    ("recorded", "kept otherwise", "kept otherwise: {}"),
    ("alias", "other names", "the same state as {}"),
    ("refused", "refused", "refused: \"{}\""),
    ("stateless", "without state", "without state: {}"),
    ("renewed", "begin anew", "begins anew: {}"),
];

/// One entry of a table.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    level: String,
    number: i32,
    label: String,
    /// Which of [`FATES`].
    fate: usize,
    reason: String,
}

/// Checks that the page has what the tables have.
///
/// # Errors
/// When a file cannot be read.
pub fn check(root: &Path) -> Result<Vec<Violation>> {
    match PAGE.exists(root) {
        true => PAGE.check(root, &render(&entries(root)?)),
        false => Ok(Vec::new()),
    }
}

/// Writes the page's part again.
///
/// # Errors
/// When a file cannot be read or written.
pub fn fix(root: &Path) -> Result<()> {
    match PAGE.exists(root) {
        true => PAGE.fix(root, &render(&entries(root)?)),
        false => Ok(()),
    }
}

fn entries(root: &Path) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    for file in FILES {
        found.extend(parse(&read(root, &Path::new(FOLDER).join(file))?));
    }
    found.sort_by(|one, other| (&one.level, one.number).cmp(&(&other.level, other.number)));
    Ok(found)
}

/// The entries of a file: its calls of the functions in [`FATES`], one after the other.
fn parse(text: &str) -> Vec<Entry> {
    let words = constants(text);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("\n    ") {
        let line = &text[at + 5..];
        let Some((name, _)) = line.split_once('(') else {
            continue;
        };
        let fate = FATES.iter().position(|(function, ..)| *function == name);
        let Some(fate) = fate else {
            continue;
        };
        let arguments = arguments(&line[name.len() + 1..]);
        let [level, number, label, last, ..] = arguments.as_slice() else {
            continue;
        };
        let reason = unquoted(last).or_else(|| words.get(last).cloned());
        found.push(Entry {
            level: level.clone(),
            number: number.parse().unwrap_or(-1),
            label: unquoted(label).unwrap_or_default(),
            fate,
            reason: reason.unwrap_or_default(),
        });
    }
    found
}

/// The words that constants of a file stand for.
fn constants(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for piece in text.split("\nconst ").skip(1) {
        let Some((name, rest)) = piece.split_once(": &str =") else {
            continue;
        };
        let words = rest.split_once(';').and_then(|(words, _)| unquoted(words));
        if let Some(words) = words {
            found.insert(name.to_owned(), words);
        }
    }
    found
}

/// The arguments of a call, from behind its opening bracket on.
fn arguments(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let (mut quoted, mut depth) = (false, 0);
    for letter in text.chars() {
        match letter {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted && depth == 0 => break,
            ')' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                all.push(String::new());
                continue;
            }
            _ => {}
        }
        all.last_mut().expect("there is one").push(letter);
    }
    all.iter().map(|one| one.trim().to_owned()).collect()
}

/// The text of a literal, with continued lines joined.
fn unquoted(literal: &str) -> Option<String> {
    let inside = literal.trim().strip_prefix('"')?.strip_suffix('"')?;
    let pieces = inside.split("\\\n").enumerate();
    let pieces = pieces.map(|(index, piece)| match index {
        0 => piece,
        _ => piece.trim_start(),
    });
    Some(pieces.collect())
}

fn render(entries: &[Entry]) -> String {
    let mut page = String::new();
    let mut counts = BTreeMap::new();
    for entry in entries {
        *counts.entry(FATES[entry.fate].1).or_insert(0) += 1;
    }
    let counts = counts.iter().map(|(what, count)| format!("{count} {what}"));
    let counts = counts.collect::<Vec<_>>().join(", ");
    let _ = writeln!(page, "\n{} numbers: {counts}.", entries.len());
    let mut level = "";
    for entry in entries {
        if entry.level != level {
            level = &entry.level;
            let _ = writeln!(page, "\n## {level}\n\n| | | |\n| ---: | --- | --- |");
        }
        let fate = FATES[entry.fate].2.replace("{}", &entry.reason);
        let _ = writeln!(page, "| {} | `{}` | {fate} |", entry.number, entry.label);
    }
    page + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"
const KEYS: &str = "keys, or \
                    none";

pub(super) const ENTRIES: &[Entry] = &[
    early(SOL_TCP, 13, "TCP_CONGESTION", ANY_TCP, 16),
    recorded(SOL_TCP, 14, "TCP_MD5SIG", KEYS),
    refused(
        SOL_TCP,
        19,
        "TCP_REPAIR",
        "it is in repair mode (TCP_REPAIR), today",
    ),
];
"#;

    #[test]
    fn tables_are_read_as_they_are_formatted() {
        let found = parse(TABLE);
        let reasons = found.iter().map(|entry| (entry.number, &*entry.reason));
        let wanted = [
            (13, ""),
            (14, "keys, or none"),
            (19, "it is in repair mode (TCP_REPAIR), today"),
        ];
        assert!(reasons.eq(wanted), "{found:?}");
        let page = render(&found);
        assert!(page.starts_with("\n3 numbers: 1 kept, 1 kept otherwise, 1 refused.\n"));
        assert!(page.contains("| 14 | `TCP_MD5SIG` | kept otherwise: keys, or none |"));
    }
}
