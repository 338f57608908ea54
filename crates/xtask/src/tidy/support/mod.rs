//! docs/support.md: what is kept and what is refused, made of what each kind says of itself.
//!
//! A file's `//!` documentation tells it ([`told`]), and what it quotes as words of a refusal must
//! be those of its code, all of them ([`refusals`]).
mod refusals;
mod render;
mod told;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use self::refusals::Code;
use self::render::render;
use self::told::Row;
use super::families;
use super::page::Page;
use super::tree::{read, rust_files};
use super::violation::Violation;
use crate::error::Result;

/// The page.
const PAGE: Page = Page {
    path: "docs/support.md",
    mark: "kinds",
    part: "the list of what is kept",
};
/// The crates that refuse.
const CRATES: &[&str] = &[
    "crates/resources/src",
    "crates/freeze/src",
    "crates/process/src",
];
/// Checks that every kind tells what is kept and refused, that the words are those of the code, and
/// that the page has it. `files` are the source tree's.
///
/// # Errors
/// When the page cannot be read.
pub fn check(root: &Path, files: &[(PathBuf, String)]) -> Result<Vec<Violation>> {
    if !PAGE.exists(root) {
        return Ok(Vec::new());
    }
    let files: Vec<_> = files.iter().filter(|(path, _)| refuses(path)).collect();
    let rows: Vec<Row> = files
        .iter()
        .flat_map(|(path, text)| told::rows(path, text))
        .collect();
    let mut broken = Vec::new();
    for row in &rows {
        if let Some(lacks) = row.lacks() {
            broken.push(Violation::new(&row.path, row.line, lacks));
        }
    }
    let tellers: BTreeSet<&Path> = rows.iter().map(|row| row.path.as_path()).collect();
    for (path, text) in &files {
        if families::is_kind(text) && !tellers.contains(path.as_path()) {
            let rule = "it does not tell what is kept: add `- Kept:`, `- Refused:` and \
                        `- CRIU 4.2:` to its `//!` documentation";
            broken.push(Violation::new(path, 1, rule));
        }
    }
    broken.extend(check_words(&files, &rows));
    broken.extend(PAGE.check(root, &render(rows))?);
    Ok(broken)
}

/// Writes the page's part again.
///
/// # Errors
/// When a file cannot be read or written.
pub fn fix(root: &Path) -> Result<()> {
    if !PAGE.exists(root) {
        return Ok(());
    }
    let mut rows = Vec::new();
    for path in rust_files(root)?.iter().filter(|path| refuses(path)) {
        rows.extend(told::rows(path, &read(root, path)?));
    }
    PAGE.fix(root, &render(rows))
}

/// Tells whether a file may refuse something; what only tests use does not.
fn refuses(path: &Path) -> bool {
    CRATES.iter().any(|folder| path.starts_with(folder)) && !path.ends_with("testing.rs")
}

/// Checks what the rows quote against the code of their files, both ways. A file without a row
/// belongs to the one of its folder, `FOLDER/mod.rs` or `FOLDER.rs`.
fn check_words(files: &[&(PathBuf, String)], rows: &[Row]) -> Vec<Violation> {
    let tells = |path: &Path| rows.iter().any(|row| row.path == path);
    let mut broken = Vec::new();
    let mut literals = BTreeSet::new();
    for (path, text) in files {
        let teller = teller(path, tells);
        let code = Code::new(path, text);
        let told = |words: &str| {
            let own = |row: &&Row| Some(&row.path) == teller.as_ref();
            rows.iter().filter(own).any(|row| {
                row.quoted().any(|one| one == words)
                    || (words.starts_with("--") && names(row, words))
            })
        };
        for (words, line) in code.refusals().iter().filter(|(words, _)| !told(words)) {
            let rule = format!("it does not tell that it refuses in the words \"{words}\"");
            broken.push(Violation::new(path, *line, rule));
        }
        if let Some(teller) = teller {
            literals.extend(code.literals().map(|words| (teller.clone(), words)));
        }
    }
    for row in rows {
        for words in row.quoted() {
            if !literals.contains(&(row.path.clone(), words.to_owned())) {
                let rule = format!("its code says nowhere \"{words}\"");
                broken.push(Violation::new(&row.path, row.line, rule));
            }
        }
    }
    broken
}

/// Tells whether a row names an option among its refusals.
fn names(row: &Row, option: &str) -> bool {
    let name = format!("`{option}`");
    row.refusals().iter().any(|text| text.contains(&name))
}

/// The file that tells what `path` refuses.
fn teller(path: &Path, tells: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    if tells(path) {
        return Some(path.to_path_buf());
    }
    let folders = path.ancestors().skip(1);
    let all = folders.flat_map(|folder| [folder.join("mod.rs"), folder.with_extension("rs")]);
    all.into_iter().find(|one| tells(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: &str = "crates/resources/src/fd/pipe.rs";
    const SOURCE: &str = r#"//! Pipes.
//!
//! - Kept: data.
//! - Refused: "it is full" (try again); "it is a|b" (`--more`).
//! - At a restore: "it is gone".
//! - CRIU 4.2: the same.
impl Kind for Pipe {
    const NAME: &'static str = "pipe";
    fn dump(open: &Open) -> Result<()> {
        open.unsupported("it is full", None)?;
        who.mismatch(self, "it is gone")?;
        open.unsupported("it is a|b", Some("--more"))
    }
}
"#;

    /// Checks a tree with these files, and what its page says after it was written.
    fn checked(files: &[(&str, &str)]) -> (Vec<String>, String) {
        let tree = tempfile::tempdir().unwrap();
        let mut read = Vec::new();
        for (path, text) in files {
            let place = tree.path().join(path);
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            std::fs::write(place, text).unwrap();
            read.push((PathBuf::from(path), (*text).to_owned()));
        }
        std::fs::create_dir_all(tree.path().join("docs")).unwrap();
        let place = tree.path().join(PAGE.path);
        std::fs::write(
            &place,
            "a\n<!-- kinds:begin -->\nold\n<!-- kinds:end -->\nb\n",
        )
        .unwrap();
        let broken = check(tree.path(), &read).unwrap();
        fix(tree.path()).unwrap();
        assert!(check(tree.path(), &read).unwrap().len() < broken.len());
        let broken = broken.iter().map(ToString::to_string).collect();
        (broken, std::fs::read_to_string(place).unwrap())
    }

    #[test]
    fn the_page_is_made_of_what_kinds_tell() {
        let (broken, page) = checked(&[(PLACE, SOURCE)]);
        let old =
            "docs/support.md:3: the list of what is kept is old: run `cargo xtask tidy --fix`";
        assert_eq!(broken, [old]);
        let want = "a\n<!-- kinds:begin -->\n\n## Descriptors\n\n\
            | | kept | refused | CRIU 4.2 |\n| --- | --- | --- | --- |\n\
            | [pipe](../crates/resources/src/fd/pipe.rs) | data | \"it is full\" (try again)<br>\
            \"it is a\\|b\" (`--more`)<br>*at a restore:* \"it is gone\" | the same |\n\n\
            <!-- kinds:end -->\nb\n";
        assert_eq!(page, want);
    }

    #[test]
    fn kinds_that_tell_nothing_and_other_words_are_named() {
        let silent = "//! Sockets.\nimpl Kind for Socket {}\n";
        let other = SOURCE.replace("open.unsupported(\"it is full\"", "f(\"it is\"");
        let other = other.replace("\"it is a|b\", Some", "\"it is old\", Some");
        let files = [
            ("crates/resources/src/fd/socket.rs", silent),
            (PLACE, &other),
        ];
        let (broken, _) = checked(&files);
        let rules: Vec<_> = broken
            .iter()
            .filter(|one| !one.contains("is old:"))
            .collect();
        assert!(rules[0].starts_with("crates/resources/src/fd/socket.rs:1: it does not tell"));
        let want = [
            "12: it does not tell that it refuses in the words \"it is old\"",
            "3: its code says nowhere \"it is full\"",
            "3: its code says nowhere \"it is a|b\"",
        ];
        assert_eq!(
            rules[1..],
            want.map(|rule| format!("{PLACE}:{rule}")).each_ref()[..]
        );
    }

    #[test]
    fn a_folder_tells_what_its_files_refuse() {
        let parent = "//! A.\n//! - What: trees.\n//! - Refused: \"it is full\".\n\
                      //! - CRIU 4.2: not known.\n";
        let child = "//! B.\nfn a() { unsupported(1, \"it is full\") }\n";
        for folder in ["collect/mod.rs", "collect.rs"] {
            let parent = (format!("crates/process/src/{folder}"), parent);
            let files = [
                (parent.0.as_str(), parent.1),
                ("crates/process/src/collect/b.rs", child),
            ];
            let (broken, page) = checked(&files);
            assert_eq!(broken.len(), 1, "{broken:?}");
            assert!(page.contains("## The tree\n"), "{page}");
        }
    }
}
