//! `cargo xtask tidy`: the invariants of the source tree; each violation is `path:line: rule`.
mod ceilings;
mod circles;
mod commits;
mod families;
mod format;
mod ledger;
mod mask;
mod page;
mod rows;
mod sockets;
mod source;
mod support;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::repo;

/// One broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    /// Relative to the repository's top folder.
    path: PathBuf,
    /// From 1.
    line: usize,
    rule: String,
}

impl Violation {
    fn new(path: &Path, line: usize, rule: impl Into<String>) -> Self {
        Self {
            path: path.to_path_buf(),
            line,
            rule: rule.into(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}", self.path.display(), self.line, self.rule)
    }
}

/// What is done about broken rules.
#[derive(clap::Args, Default)]
pub struct Arguments {
    /// First write again what is made from the sources.
    #[arg(long)]
    fix: bool,
}

/// Checks every rule and prints what breaks it.
///
/// # Errors
/// When a rule is broken, or a file cannot be read.
pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.fix {
        format::fix(repo::root())?;
        ledger::fix(repo::root())?;
        sockets::fix(repo::root())?;
        support::fix(repo::root())?;
    }
    let mut violations = check(repo::root())?;
    violations.sort();
    violations.dedup();
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => Ok(()),
        count => Err(Error::Tidy { count }),
    }
}

/// Checks every rule on the tree below `root`.
fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut violations = rows::check(root)?;
    let kinds = families::kinds(root)?;
    let mut files = Vec::new();
    for path in rust_files(root)? {
        let text = read(root, &path)?;
        violations.extend(source::check(&path, &text));
        violations.extend(families::check_ignorance(&path, &text, &kinds));
        files.push((path, text));
    }
    // The ceilings are those of the tree that has them.
    if root.join(ceilings::OWN).exists() {
        violations.extend(ceilings::check(&files, &kinds));
    }
    violations.extend(commits::check(root));
    violations.extend(families::check_lists(root)?);
    violations.extend(format::check(root)?);
    violations.extend(ledger::check(root)?);
    violations.extend(sockets::check(root)?);
    violations.extend(support::check(root, &files)?);
    Ok(violations)
}

/// Lists the `.rs` files below `crates/`, relative to `root`, sorted.
fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from("crates")];
    while let Some(folder) = folders.pop() {
        for (path, is_folder) in entries(root, &folder)? {
            match is_folder {
                true if path.file_name().is_some_and(|name| name == "target") => {}
                true => folders.push(path),
                false if path.extension().is_some_and(|ending| ending == "rs") => files.push(path),
                false => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Lists a folder's entries, relative to `root`, sorted, each with whether it is a folder.
fn entries(root: &Path, folder: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let list = || -> std::io::Result<Vec<(PathBuf, bool)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(root.join(folder))? {
            let entry = entry?;
            found.push((folder.join(entry.file_name()), entry.file_type()?.is_dir()));
        }
        found.sort();
        Ok(found)
    };
    list().map_err(repo::file_error("list", &root.join(folder)))
}

fn read(root: &Path, path: &Path) -> Result<String> {
    std::fs::read_to_string(root.join(path)).map_err(repo::file_error("read", &root.join(path)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn each_part_of_a_tree_is_looked_at() {
        let tree = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "crates/image/Cargo.toml",
            "[dependencies]\nprocess.workspace = true\n",
        );
        write(
            "crates/image/src/lib.rs",
            "//! a\n#![forbid(unsafe_code)]\nfn eventfd() {}\n",
        );
        write("crates/resources/src/fd/mod.rs", "//! a\n");
        write(
            "crates/resources/src/fd/eventfd.rs",
            "impl Kind for EventFd {}\n",
        );
        let paths: Vec<_> = super::check(tree.path())
            .unwrap()
            .iter()
            .map(|violation| violation.path.to_string_lossy().into_owned())
            .collect();
        for part in [
            "crates/image/Cargo.toml",
            "crates/image/src/lib.rs",
            "crates/resources/src/fd/mod.rs",
            "crates/resources/src/fd/eventfd.rs",
        ] {
            assert!(
                paths.iter().any(|path| Path::new(path) == Path::new(part)),
                "{part}"
            );
        }
        assert_eq!(paths.len(), 4);
    }
}
