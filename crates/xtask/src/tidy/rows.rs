//! The rows of ARCHITECTURE.md: a crate uses only rows below its own.
use std::path::Path;

use super::tree::{entries, read};
use super::violation::Violation;
use crate::error::Result;

/// Each row's crates, lowest first. `abi` has only words, which the rest of the lowest row may use.
const ROWS: &[&[&str]] = &[
    &["abi"],
    &["sys"],
    &["guard", "store"],
    &["blob", "image"],
    &["tracee", "pages"],
    &["memory", "resources"],
    &["freeze", "serve"],
    &["process", "volume"],
    &["vm"],
    &["cli"],
];
/// Crates that only developers build; they may use every row, and no row uses them but to test.
const DEVELOPERS: &[&str] = &["testkit", "bench", "programs", "xtask"];
/// What a crate may not use although it lies below, and why.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("resources", "store", "`resources` never opens a store"),
    ("pages", "sys", "`pages` knows no processes"),
    ("pages", "store", "`pages` never opens a store"),
    ("image", "resources", "`image` knows no resources"),
];

/// Checks the dependencies that each crate's Cargo.toml names.
pub fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut broken = Vec::new();
    for (folder, is_folder) in entries(root, Path::new("crates"))? {
        let manifest = folder.join("Cargo.toml");
        if is_folder && root.join(&manifest).exists() {
            broken.extend(check_manifest(&manifest, &read(root, &manifest)?));
        }
    }
    Ok(broken)
}

fn check_manifest(path: &Path, text: &str) -> Vec<Violation> {
    let own = super::source::crate_name(path);
    let mut broken = Vec::new();
    let mut say = |line, rule: String| broken.push(Violation::new(path, line, rule));
    if DEVELOPERS.contains(&own) {
        return broken;
    }
    let Some(own_row) = row(own) else {
        say(1, format!("the crate {own} stands in no row"));
        return broken;
    };
    let mut section = "";
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(name) = line.trim().strip_prefix('[') {
            section = name.trim_end_matches(']');
        }
        if !matches!(section, "dependencies" | "build-dependencies") {
            continue;
        }
        let end =
            line.find(|character: char| !character.is_alphanumeric() && !"-_".contains(character));
        let used = &line[..end.unwrap_or(line.len())];
        if DEVELOPERS.contains(&used) {
            say(
                number,
                format!("{used} is for tests: name it in dev-dependencies"),
            );
        }
        if row(used).is_some_and(|used_row| used_row >= own_row) {
            say(
                number,
                format!("{own} (row {own_row}) may only use rows below its own, not {used}"),
            );
        }
        for (_, _, why) in FORBIDDEN
            .iter()
            .filter(|rule| rule.0 == own && rule.1 == used)
        {
            say(number, (*why).to_string());
        }
    }
    broken
}

fn row(name: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(name: &str, text: &str) -> Vec<String> {
        let path = Path::new("crates").join(name).join("Cargo.toml");
        check_manifest(&path, text)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn rows_below_are_allowed() {
        let text = "[package]\nname = \"cli\"\n[dependencies]\nsys.workspace = true\n\
                    process = { path = \"../process\" }\nclap = \"4\"\n\
                    [dev-dependencies]\ntestkit.workspace = true\ncli.workspace = true\n";
        assert_eq!(rules("cli", text), Vec::<String>::new());
    }

    #[test]
    fn rows_above_and_beside_are_not() {
        let text = "[dependencies]\nprocess.workspace = true\nblob.workspace = true\n";
        let place = "crates/image/Cargo.toml";
        let want = [
            format!("{place}:2: image (row 3) may only use rows below its own, not process"),
            format!("{place}:3: image (row 3) may only use rows below its own, not blob"),
        ];
        assert_eq!(rules("image", text), want);
    }

    #[test]
    fn pages_uses_nothing_about_processes() {
        let text = "[dependencies]\nsys.workspace = true\nmemory.workspace = true\n";
        let want = [
            "crates/pages/Cargo.toml:2: `pages` knows no processes",
            "crates/pages/Cargo.toml:3: pages (row 4) may only use rows below its own, not memory",
        ];
        assert_eq!(rules("pages", text), want);
    }

    #[test]
    fn what_is_forbidden_by_name_is_found() {
        let text = "[dependencies]\nstore.workspace = true\ntestkit.workspace = true\n";
        let want = [
            "crates/resources/Cargo.toml:2: `resources` never opens a store",
            "crates/resources/Cargo.toml:3: testkit is for tests: name it in dev-dependencies",
        ];
        assert_eq!(rules("resources", text), want);
        assert_eq!(
            rules("new", ""),
            ["crates/new/Cargo.toml:1: the crate new stands in no row"]
        );
    }
}
