//! Counts of what is to go, each with a ceiling that only sinks.
//!
//! - In `freeze` and `process`, which drive and know no resource by name: lines of code with the
//!   tag of one's record (`tags::`), or with the name of a kind's module.
//! - In crates whose code may run in another world (`sys::world`): literals that begin with /proc,
//!   which is somebody else's there. Calls that a task makes for itself may have one.
//! - Circles of imports inside a crate.
//! - Types whose name is no noun, and functions that take a tuple.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::mask::mask;
use super::source::{code_lines, crate_name, lines_with};
use super::violation::Violation;
use super::{circles, names, tuples};

/// Where the ceilings are.
pub const OWN: &str = "crates/xtask/src/tidy/ceilings.rs";
/// The crates that drive.
const DRIVERS: &[&str] = &["freeze", "process"];
/// Lines of [`DRIVERS`] that name a tag.
const TAGS: usize = 17;
/// Lines of [`DRIVERS`] that name the module of a kind.
const KINDS: usize = 68;
/// The crates of which code may run in another world.
const TRAVELLERS: &[&str] = &["freeze", "memory", "process", "resources", "tracee"];
/// Lines of [`TRAVELLERS`] with a literal that begins with /proc.
const PROCFS: usize = 6;
/// Files that are in a circle of imports, a circle counted once, by crate; other crates have none.
const CIRCLES: &[(&str, usize)] = &[
    ("bench", 16),
    ("cli", 3),
    ("programs", 7),
    ("resources", 60),
    ("serve", 11),
    ("store", 1),
    ("sys", 8),
    ("testkit", 64),
    ("tracee", 3),
    ("vm", 17),
    ("volume", 3),
    ("xtask", 1),
];

/// Types whose name is no noun, by crate; other crates have none.
const NAMES: &[(&str, usize)] = &[
    ("freeze", 2),
    ("process", 63),
    ("resources", 59),
    ("sys", 21),
    ("testkit", 1),
    ("tracee", 8),
    ("vm", 8),
];
/// Functions that take a tuple, by crate; other crates have none.
const TUPLES: &[(&str, usize)] = &[
    ("freeze", 2),
    ("process", 46),
    ("resources", 47),
    ("sys", 5),
    ("testkit", 17),
    ("tracee", 3),
    ("vm", 2),
];

/// Checks the `files`, given with their text; `kinds` are the names of the resources' modules.
pub fn check(files: &[(PathBuf, String)], kinds: &[String]) -> Vec<Violation> {
    let mut broken = Vec::new();
    let own = files
        .iter()
        .filter(|(path, _)| DRIVERS.contains(&crate_name(path)));
    let (mut tags, mut named) = (Vec::new(), Vec::new());
    for (path, text) in own {
        let masked = mask(text);
        let lines: Vec<&str> = masked.lines().collect();
        let code = &lines[..code_lines(path, &lines)];
        let at = |numbers: Vec<usize>| numbers.into_iter().map(|number| (path.clone(), number));
        tags.extend(at(lines_with(code, "tags::")));
        let mut numbers = Vec::new();
        for kind in kinds {
            numbers.extend(lines_with(code, &format!("{kind}::")));
        }
        numbers.sort_unstable();
        numbers.dedup();
        named.extend(at(numbers));
    }
    let in_proc = files
        .iter()
        .filter(|(path, _)| TRAVELLERS.contains(&crate_name(path)))
        .map(|(path, text)| procfs_literals(path, text));
    let what = "lines with a literal of /proc";
    broken.extend(compare(what, PROCFS, in_proc.sum()));
    broken.extend(compare("lines that name a tag", TAGS, tags.len()));
    broken.extend(compare(
        "lines that name a kind's module",
        KINDS,
        named.len(),
    ));
    let crates: BTreeSet<&str> = files.iter().map(|(path, _)| crate_name(path)).collect();
    for name in crates {
        let mut limit =
            |what: &str, ceilings: &[(&str, usize)], found: Vec<Violation>| match ceilings
                .iter()
                .find(|(of, _)| *of == name)
            {
                None => broken.extend(found),
                Some((_, ceiling)) => {
                    let what = format!("{what} in {name}");
                    broken.extend(compare(&what, *ceiling, found.len()));
                }
            };
        limit("circles", CIRCLES, circles::of_crate(name, files));
        limit(
            "names of types that are no nouns",
            NAMES,
            names::broken(name, files),
        );
        limit(
            "functions that take a tuple",
            TUPLES,
            tuples::takers(name, files),
        );
    }
    broken
}

/// Counts lines of code with a literal that begins with /proc.
fn procfs_literals(path: &Path, text: &str) -> usize {
    let of_tests = ["testing.rs", "tests.rs", "tests"];
    if path
        .iter()
        .any(|part| of_tests.iter().any(|name| part == *name))
    {
        return 0;
    }
    let lines: Vec<&str> = text.lines().collect();
    let code = lines[..code_lines(path, &lines)].iter();
    let code = code.filter(|line| !line.trim_start().starts_with("//"));
    code.filter(|line| line.contains("\"/proc")).count()
}

/// Compares what was counted with its ceiling.
fn compare(what: &str, ceiling: usize, count: usize) -> Option<Violation> {
    let rule = match count.cmp(&ceiling) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => format!("{count} {what}, and {ceiling} are the most"),
        std::cmp::Ordering::Less => format!("{count} {what}: the ceiling, {ceiling}, is to sink"),
    };
    Some(Violation::new(Path::new(OWN), 1, rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_is_not_its_ceiling_is_told() {
        let rule = |count| compare("lines", 3, count).map(|one| one.rule);
        assert_eq!(rule(3), None);
        assert_eq!(rule(4).as_deref(), Some("4 lines, and 3 are the most"));
        assert_eq!(
            rule(2).as_deref(),
            Some("2 lines: the ceiling, 3, is to sink")
        );
    }

    #[test]
    fn literals_of_proc_in_code_are_counted() {
        let text = "// \"/proc/x\"\nfn f() {\n    read(\"/proc/self/maps\");\n}\n\
                    #[cfg(test)]\nmod tests {\n\
                    const A: &str = \"/proc\";\n}\n";
        assert_eq!(
            procfs_literals(Path::new("crates/process/src/a.rs"), text),
            1
        );
    }

    #[test]
    fn tags_and_kinds_of_the_driver_are_counted_and_its_tests_are_not() {
        let text = "//! tags::TCP\nuse resources::fd::tcp::lock;\nfn f(tag: u16) -> bool {\n\
                    tag == tags::TCP || tcp::is_one(tag) // tcp::lock\n}\n#[cfg(test)]\nmod tests {\n\
                    use resources::fd::tcp::b;\n}\n";
        let files = |of: &str| {
            [(
                PathBuf::from(format!("crates/{of}/src/a.rs")),
                text.to_owned(),
            )]
        };
        let kinds = ["tcp".to_owned()];
        let rules = |of| {
            let broken = check(&files(of), &kinds);
            let rules = broken.into_iter().map(|one| one.rule);
            rules
                .filter(|rule| rule.contains(" name "))
                .collect::<Vec<_>>()
        };
        let told = rules("process");
        assert!(told[0].starts_with("1 lines that name a tag"), "{told:?}");
        assert!(
            told[1].starts_with("2 lines that name a kind's module"),
            "{told:?}"
        );
        assert!(rules("volume")[0].starts_with("0 lines"));
    }
}
