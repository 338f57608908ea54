//! Names of types are nouns: no pronoun, conjunction or participle.

use std::path::{Path, PathBuf};

use super::mask::mask;
use super::source::{code_lines, crate_name};
use super::violation::Violation;

/// Words that are no part of speech for a thing: neither the first nor the last word of a name.
const FUNCTION_WORDS: &[&str] = &[
    "After",
    "Again",
    "Ahead",
    "All",
    "Alone",
    "Always",
    "Anew",
    "Any",
    "Around",
    "As",
    "Because",
    "Before",
    "Beside",
    "Besides",
    "By",
    "Each",
    "Early",
    "For",
    "How",
    "Is",
    "Itself",
    "Just",
    "Late",
    "Meanwhile",
    "Never",
    "Nobody",
    "Nothing",
    "Of",
    "On",
    "One",
    "Only",
    "Other",
    "Others",
    "Over",
    "Some",
    "Somebody",
    "Still",
    "Straight",
    "Themselves",
    "Too",
    "What",
    "When",
    "Where",
    "Whether",
    "Which",
    "While",
    "Who",
    "Whom",
    "Whose",
    "Why",
    "With",
    "Without",
];
/// Verbs and participles that do not tell themselves by their ending: never the last word.
const VERBS: &[&str] = &[
    "Begun", "Done", "Found", "Given", "Gone", "Held", "Holds", "Kept", "Known", "Lacks", "Left",
    "Listens", "Made", "Met", "Ran", "Said", "Seen", "Shown", "Shows", "Taken", "Told", "Took",
    "Untold",
];
/// Nouns that end as participles do.
const NOUNS: &[&str] = &[
    "Backing",
    "Feed",
    "Greeting",
    "Listing",
    "Mapping",
    "Need",
    "Numbering",
    "Ring",
    "Scheduling",
    "Seed",
    "Setting",
    "Sharing",
    "Speed",
    "String",
    "Timing",
    "Uring",
];
/// Names that traits of the standard library give.
const STANDARD: &[&str] = &["IntoIter"];
/// What declares a type.
const KEYWORDS: &[&str] = &["struct", "enum", "trait", "type", "union"];

/// Names of types in the code of `files` that are of crate `of`, and break the rule.
pub fn broken(of: &str, files: &[(PathBuf, String)]) -> Vec<Violation> {
    let own = files.iter().filter(|(path, _)| crate_name(path) == of);
    own.flat_map(|(path, text)| of_file(path, text)).collect()
}

fn of_file(path: &Path, text: &str) -> Vec<Violation> {
    let masked = mask(text);
    let lines: Vec<&str> = masked.lines().collect();
    let mut broken = Vec::new();
    for (number, line) in (1..).zip(&lines[..code_lines(path, &lines)]) {
        let mut words = line.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'));
        if words.any(|word| KEYWORDS.contains(&word))
            && let Some(name) = words.next()
            && !is_noun(name)
        {
            let rule = format!("`{name}` names no thing: a type has the name of a noun");
            broken.push(Violation::new(path, number, rule));
        }
    }
    broken
}

fn is_noun(name: &str) -> bool {
    let words = words(name);
    let (Some(first), Some(last)) = (words.first(), words.last()) else {
        return true;
    };
    let is_participle = |word: &str| {
        VERBS.contains(&word)
            || (word.ends_with("ed") || word.ends_with("ing")) && !NOUNS.contains(&word)
    };
    STANDARD.contains(&name)
        || !FUNCTION_WORDS.contains(first) && !FUNCTION_WORDS.contains(last) && !is_participle(last)
}

/// The words of a name in camel case; none of another one.
fn words(name: &str) -> Vec<&str> {
    let starts = name.match_indices(|letter: char| letter.is_ascii_uppercase());
    let starts: Vec<usize> = starts.map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([name.len()]);
    let ranges = starts.iter().zip(ends);
    ranges.map(|(start, end)| &name[*start..end]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_pass_and_other_words_are_named() {
        for noun in [
            "RingState",
            "SavedPages",
            "IoUring",
            "MissingPages",
            "Seed",
            "IntoIter",
            "K",
            "Setting",
        ] {
            assert!(is_noun(noun), "{noun}");
        }
        for other in [
            "Seen",
            "Told",
            "What",
            "Itself",
            "WhetherClosed",
            "SavedWith",
            "QemuTold",
            "OfRegion",
            "Restoring",
            "Mapped",
            "PeekedOver",
        ] {
            assert!(!is_noun(other), "{other}");
        }
    }

    #[test]
    fn declarations_in_code_count_and_those_in_tests_do_not() {
        let text = "//! a\n// struct Seen;\npub(crate) enum What {\n    Told,\n}\ntype Made = u8;\n\
                    #[cfg(test)]\nmod tests {\nstruct Found;\n}\n";
        let file = |of: &str| {
            (
                PathBuf::from(format!("crates/{of}/src/a.rs")),
                text.to_owned(),
            )
        };
        let lines = broken("vm", &[file("vm"), file("sys")]);
        let lines: Vec<_> = lines.iter().map(|one| one.line).collect();
        assert_eq!(lines, [3, 6]);
    }
}
