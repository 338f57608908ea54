//! Rules that one file keeps or breaks by itself: sizes, names, first sentence, `unsafe`, printing.
use std::path::{Path, PathBuf};

use super::mask::mask;
use super::violation::Violation;

/// Code lines in a file, without its tests.
const FILE_LINES: usize = 600;
/// Lines of a function, from its name to its closing brace.
const FUNCTION_LINES: usize = 70;
/// Characters in a line.
const COLUMNS: usize = 100;
/// Names that say nothing about what is inside.
const VAGUE: &[&str] = &[
    "util.rs",
    "utils.rs",
    "common.rs",
    "helpers.rs",
    "helper.rs",
    "misc.rs",
];
/// The folders that may contain `unsafe`.
const UNSAFE_FOLDERS: &[&str] = &["crates/sys", "crates/blob", "crates/testkit/src/calls"];
/// How the root of a crate without such a folder forbids `unsafe`.
const FORBIDS_UNSAFE: &str = "#![forbid(unsafe_code)]";
/// The same for a crate of which only a folder may contain it.
const DENIES_UNSAFE: &str = "#![deny(unsafe_code)]";
/// The crates that may print, read the environment and end the process: the command, and what only
/// developers run.
const SPEAKING_CRATES: &[&str] = &["cli", "testkit", "bench", "programs", "xtask"];
/// How a crate would print, read the environment or end the process.
const SPEECH: &[&str] = &[
    "println!",
    "print!",
    "eprintln!",
    "eprint!",
    "dbg!",
    "env::var",
    "env::var_os",
    "env::args",
    "process::exit",
];

/// Checks every rule on one file; `path` is relative to the repository's top folder.
pub fn check(path: &Path, text: &str) -> Vec<Violation> {
    let masked = mask(text);
    let lines: Vec<&str> = masked.lines().collect();
    let code = code_lines(path, &lines);
    let mut broken = Vec::new();
    let mut say = |line: usize, rule: String| broken.push(Violation::new(path, line, rule));

    if path
        .file_name()
        .is_some_and(|name| VAGUE.iter().any(|vague| name == *vague))
    {
        say(1, "name the file after what is inside".into());
    }
    if !text.starts_with("//! ") {
        say(1, "the file starts with no `//!` sentence".into());
    }
    if code > FILE_LINES {
        say(
            code,
            format!("{code} lines of code, {FILE_LINES} at the most"),
        );
    }
    for (number, line) in (1..).zip(text.lines()) {
        let columns = line.chars().count();
        if columns > COLUMNS && !(number > code && is_quoted(line, lines[number - 1])) {
            say(number, format!("{columns} columns, {COLUMNS} at the most"));
        }
    }
    for (number, name, length) in functions(&lines[..code]) {
        if length > FUNCTION_LINES {
            say(
                number,
                format!("`{name}` has {length} lines, {FUNCTION_LINES} at the most"),
            );
        }
    }
    let crate_name = crate_name(path);
    if !UNSAFE_FOLDERS.iter().any(|folder| path.starts_with(folder)) {
        for number in lines_with(&lines, "unsafe") {
            say(number, "`unsafe` outside the crates sys and blob".into());
        }
        let has_folder = |folder: &&str| Path::new(folder).starts_with(crate_folder(path));
        let lint = match UNSAFE_FOLDERS.iter().any(has_folder) {
            true => DENIES_UNSAFE,
            false => FORBIDS_UNSAFE,
        };
        if is_crate_root(path) && !masked.contains(lint) {
            say(1, format!("the crate's root has no `{lint}`"));
        }
    }
    if !SPEAKING_CRATES.contains(&crate_name) {
        for speech in SPEECH {
            for number in lines_with(&lines[..code], speech) {
                say(number, format!("`{speech}` outside the crate cli"));
            }
        }
    }
    broken
}

/// Tells whether a line stands inside a string literal: a snapshot is as wide as what is printed.
fn is_quoted(line: &str, masked: &str) -> bool {
    masked.trim().is_empty() && !line.trim_start().starts_with("//")
}

/// Returns the name of the crate's folder.
pub fn crate_name(path: &Path) -> &str {
    path.iter()
        .nth(1)
        .and_then(|part| part.to_str())
        .unwrap_or_default()
}

fn crate_folder(path: &Path) -> PathBuf {
    path.iter().take(2).collect()
}

fn is_crate_root(path: &Path) -> bool {
    let within: Vec<_> = path.iter().skip(2).collect();
    within == ["src", "lib.rs"] || within == ["src", "main.rs"]
}

/// Returns how many of the lines are code: those before the tests at the bottom, none in `tests/`.
pub fn code_lines(path: &Path, lines: &[&str]) -> usize {
    if path.iter().nth(2).is_some_and(|part| part == "tests") {
        return 0;
    }
    let tests = lines.windows(2).position(|pair| {
        pair[0].trim() == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].contains('{')
    });
    tests.unwrap_or(lines.len())
}

/// Returns the numbers of the lines that contain `words`, not as part of a longer word.
pub fn lines_with(lines: &[&str], words: &str) -> Vec<usize> {
    let numbered = (1..).zip(lines);
    numbered
        .filter(|(_, line)| has_word(line, words))
        .map(|(number, _)| number)
        .collect()
}

fn has_word(line: &str, words: &str) -> bool {
    let in_word = |character: char| character.is_alphanumeric() || character == '_';
    line.match_indices(words).any(|(at, _)| {
        let begins = !line[..at].ends_with(in_word);
        let ends = !words.ends_with(in_word) || !line[at + words.len()..].starts_with(in_word);
        begins && ends
    })
}

/// Returns line, name and number of lines of each function that has a body.
fn functions(lines: &[&str]) -> Vec<(usize, String, usize)> {
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        for (at, _) in line.match_indices("fn ") {
            if line[..at]
                .ends_with(|character: char| character.is_alphanumeric() || character == '_')
            {
                continue;
            }
            let name: String = line[at + 3..]
                .chars()
                .take_while(|character| character.is_alphanumeric() || *character == '_')
                .collect();
            if name.is_empty() {
                continue;
            }
            if let Some(length) = body_lines(&lines[index..], at) {
                found.push((index + 1, name, length));
            }
        }
    }
    found
}

/// Counts the lines from a function's name to its closing brace; nothing for one without a body.
fn body_lines(lines: &[&str], start: usize) -> Option<usize> {
    let mut braces = 0usize;
    let mut brackets = 0usize;
    for (index, line) in lines.iter().enumerate() {
        let skip = if index == 0 { start } else { 0 };
        for character in line[skip..].chars() {
            match character {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets = brackets.saturating_sub(1),
                ';' if braces == 0 && brackets == 0 => return None,
                '{' => braces += 1,
                '}' => {
                    braces = braces.saturating_sub(1);
                    if braces == 0 {
                        return Some(index + 1);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<String> {
        check(Path::new(path), text)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn a_tidy_file_breaks_nothing() {
        let text = "//! Sentence.\n#![forbid(unsafe_code)]\nfn f() {}\n";
        assert_eq!(rules("crates/image/src/lib.rs", text), Vec::<String>::new());
    }

    #[test]
    fn unsafe_is_found_in_code_only() {
        let text = "//! unsafe\n// unsafe\nfn f() { let s = \"unsafe\"; unsafe { g() } }\n";
        let want = ["crates/image/src/a.rs:3: `unsafe` outside the crates sys and blob"];
        assert_eq!(rules("crates/image/src/a.rs", text), want);
        assert_eq!(rules("crates/sys/src/a.rs", text), Vec::<String>::new());
        let calls = "crates/testkit/src/calls/a.rs";
        assert_eq!(rules(calls, text), Vec::<String>::new());
        let want = ["crates/testkit/src/lib.rs:1: the crate's root has no `#![deny(unsafe_code)]`"];
        assert_eq!(rules("crates/testkit/src/lib.rs", "//! a\n"), want);
    }

    #[test]
    fn printing_belongs_to_the_command() {
        let text = "//! a\nfn f() { println!(\"x\"); }\n\
                    #[cfg(test)]\nmod tests { fn g() { print!(); } }\n";
        let want = ["crates/pages/src/a.rs:2: `println!` outside the crate cli"];
        assert_eq!(rules("crates/pages/src/a.rs", text), want);
        assert_eq!(rules("crates/cli/src/a.rs", text), Vec::<String>::new());
    }

    #[test]
    fn sizes_are_counted_without_tests() {
        let long = format!(
            "//! a\nfn long(a: [u8; 2])\n{{\n{}}}\n",
            "    f();\n".repeat(68)
        );
        assert_eq!(
            rules("crates/pages/src/a.rs", &long),
            ["crates/pages/src/a.rs:2: `long` has 71 lines, 70 at the most"]
        );
        let tested = format!(
            "//! a\n#[cfg(test)]\nmod tests {{\n{}}}\n",
            "// b\n".repeat(700)
        );
        assert_eq!(
            rules("crates/pages/src/a.rs", &tested),
            Vec::<String>::new()
        );
        let big = format!("//! a\n{}", "// b\n".repeat(600));
        assert_eq!(
            rules("crates/pages/src/a.rs", &big),
            ["crates/pages/src/a.rs:601: 601 lines of code, 600 at the most"]
        );
    }

    #[test]
    fn names_first_lines_and_columns() {
        let wide = format!("// {}\n", "é".repeat(98));
        assert_eq!(
            rules("crates/pages/src/util.rs", &wide),
            [
                "crates/pages/src/util.rs:1: name the file after what is inside",
                "crates/pages/src/util.rs:1: the file starts with no `//!` sentence",
                "crates/pages/src/util.rs:1: 101 columns, 100 at the most",
            ]
        );
    }

    #[test]
    fn snapshots_in_tests_may_be_wide() {
        let wide = "x".repeat(101);
        let snapshot = format!("const S: &str = \"\n{wide}\n\";\n");
        let tested = format!("//! a\n#[cfg(test)]\nmod tests {{\n{snapshot}// {wide}\n}}\n");
        let rule = "columns, 100 at the most";
        assert_eq!(
            rules("crates/pages/src/a.rs", &tested),
            [format!("crates/pages/src/a.rs:7: 104 {rule}")]
        );
        let code = format!("//! a\n{snapshot}");
        assert_eq!(
            rules("crates/pages/src/a.rs", &code),
            [format!("crates/pages/src/a.rs:3: 101 {rule}")]
        );
    }
}
