//! The families of resources: every file is on its family's list, and rows below know none of them.
use std::path::Path;

use super::mask::mask;
use super::source::{code_lines, crate_name, lines_with};
use super::tree::{entries, read};
use super::violation::Violation;
use crate::error::Result;

/// The folders of `crates/resources/src` that hold one file per kind.
const FAMILIES: &[&str] = &["fd", "task", "map", "ns"];
/// The traits of what stands on the families' lists.
const TRAITS: &[&str] = &["Kind for ", "Part for "];
/// The crate that knows runs and records, but no kind of resource.
const IGNORANT_CRATE: &str = "image";
/// Kinds whose names are everyday words, which that crate may use in another sense.
const EVERYDAY: &[&str] = &[
    "anon",
    "dev",
    "directory",
    "file",
    "info",
    "kind",
    "limits",
    "locks",
    "memory",
    "names",
    "owner",
    "path",
    "place",
    "queue",
    "stack",
    "status",
    "table",
    "tags",
];

/// A crate that moves pages for whomever, and the words that it does without.
const NO_PROCESSES: (&str, &[&str]) = (
    "pages",
    &["pid", "Pid", "tid", "task", "Task", "process", "Process"],
);

/// Returns the names of all kinds: the families' files that implement what is listed.
pub fn kinds(root: &Path) -> Result<Vec<String>> {
    let mut kinds = Vec::new();
    for family in FAMILIES {
        for (kind, text) in files_of(root, family)? {
            if is_kind(&text) {
                kinds.push(kind);
            }
        }
    }
    Ok(kinds)
}

/// Tells whether a file implements what is listed.
pub fn is_kind(text: &str) -> bool {
    let masked = mask(text);
    let implements = |before: &str| {
        let mut traits = TRAITS.iter();
        traits.any(|name| masked.contains(&format!("{before}{name}")))
    };
    implements("impl ") || implements("::")
}

/// Checks that each file of a family is a module of it, and stands on the family's list where it
/// implements what is listed.
pub fn check_lists(root: &Path) -> Result<Vec<Violation>> {
    let mut broken = Vec::new();
    for family in FAMILIES {
        let path = Path::new("crates/resources/src")
            .join(family)
            .join("mod.rs");
        let kinds = files_of(root, family)?;
        if kinds.is_empty() {
            continue;
        }
        if !root.join(&path).exists() {
            broken.push(Violation::new(&path, 1, "the family has no mod.rs"));
            continue;
        }
        broken.extend(check_list(&path, &read(root, &path)?, &kinds));
    }
    Ok(broken)
}

/// Checks a family's `mod.rs` against its files, given by name with their text.
///
/// A list is a constant of type `&[&dyn TRAIT]` in one of them; each kind or part of the family
/// belongs on it.
fn check_list(path: &Path, text: &str, kinds: &[(String, String)]) -> Vec<Violation> {
    let masked = mask(text);
    let lines: Vec<&str> = masked.lines().collect();
    let code = &lines[..code_lines(path, &lines)];
    let list = kinds.iter().find_map(|(_, text)| list_of(text));
    let list = list_of(text).or(list);
    let mut broken = Vec::new();
    for (kind, text) in kinds {
        let declared = lines_with(code, &format!("mod {kind}"));
        let is_listed = |list: &String| list.contains(&format!("&{kind}::"));
        let is_missing = list.as_ref().is_some_and(|list| !is_listed(list));
        if declared.is_empty() {
            let rule = format!("{kind}.rs is no module of its family: add `mod {kind};`");
            broken.push(Violation::new(path, 1, rule));
        } else if is_missing && is_kind(text) {
            let rule = format!("`{kind}` does not stand on its family's list");
            broken.push(Violation::new(path, declared[0], rule));
        }
    }
    broken
}

/// The list in a file, if it has one.
fn list_of(text: &str) -> Option<String> {
    let masked = mask(text);
    let (_, list) = masked.split_once(": &[&dyn ")?;
    let (list, _) = list.split_once("];")?;
    Some(list.to_owned())
}

/// Checks that crates that shall not know resources or processes name none.
pub fn check_ignorance(path: &Path, text: &str, kinds: &[String]) -> Vec<Violation> {
    let own = crate_name(path);
    let kinds = || kinds.iter().map(String::as_str);
    let (unknown, words): (_, Vec<&str>) = match own {
        IGNORANT_CRATE => (
            "resources",
            kinds().filter(|kind| !EVERYDAY.contains(kind)).collect(),
        ),
        own if own == NO_PROCESSES.0 => ("processes", NO_PROCESSES.1.to_vec()),
        _ => return Vec::new(),
    };
    let masked = mask(text);
    let lines: Vec<&str> = masked.lines().collect();
    let code = &lines[..code_lines(path, &lines)];
    let mut broken = Vec::new();
    for word in words {
        for number in lines_with(code, word) {
            let rule = format!("`{own}` knows no {unknown}, but names `{word}`");
            broken.push(Violation::new(path, number, rule));
        }
    }
    broken
}

/// Returns each file of a family, and each folder's `mod.rs`: its name and its text.
fn files_of(root: &Path, family: &str) -> Result<Vec<(String, String)>> {
    let folder = Path::new("crates/resources/src").join(family);
    let mut files = Vec::new();
    if !root.join(&folder).exists() {
        return Ok(files);
    }
    for (path, is_folder) in entries(root, &folder)? {
        let stem = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let is_rust = path.extension().is_some_and(|ending| ending == "rs");
        let file = if is_folder { path.join("mod.rs") } else { path };
        if (is_folder || (is_rust && stem != "mod")) && root.join(&file).exists() {
            files.push((stem, read(root, &file)?));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_on_no_list_is_named() {
        let text = "//! a\nmod eventfd;\nmod facts;\nmod pipe;\n\
                    pub static KINDS: &[&dyn Kind] = &[\n&eventfd::EventFd,\n];\nuse pipe::Pipe;\n";
        let kind = |name: &str, text: &str| (name.to_string(), text.to_string());
        let kinds = [
            kind("epoll", ""),
            kind("eventfd", "impl Kind for EventFd {}"),
            kind("facts", "// impl Kind for nothing"),
            kind("pipe", "impl super::Kind for Pipe {}"),
        ];
        let rules: Vec<_> = check_list(Path::new("fd/mod.rs"), text, &kinds)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            rules,
            [
                "fd/mod.rs:1: epoll.rs is no module of its family: add `mod epoll;`",
                "fd/mod.rs:4: `pipe` does not stand on its family's list",
            ]
        );
    }

    #[test]
    fn image_names_no_resource() {
        let kinds = ["eventfd", "file"].map(String::from);
        let text = "//! eventfd\nfn file() {}\nfn eventfd() {}\n";
        let broken = check_ignorance(Path::new("crates/image/src/a.rs"), text, &kinds);
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].line, 3);
        assert!(check_ignorance(Path::new("crates/process/src/a.rs"), text, &kinds).is_empty());
    }

    #[test]
    fn pages_names_no_process() {
        let text = "//! pid\n// a task\nfn tasks(pid: i32) {}\nuse std::thread;\n";
        let broken = check_ignorance(Path::new("crates/pages/src/a.rs"), text, &[]);
        let lines: Vec<_> = broken.iter().map(|one| one.line).collect();
        assert_eq!(lines, [3]);
        assert!(check_ignorance(Path::new("crates/memory/src/a.rs"), text, &[]).is_empty());
    }
}
