//! `cargo xtask tidy`: the invariants of the source tree; each violation is `path:line: rule`.
mod ceilings;
mod circles;
mod commits;
mod families;
mod format;
mod ledger;
mod mask;
mod names;
mod page;
mod rows;
mod sockets;
mod source;
mod support;
mod tree;
mod tuples;
mod violation;

use std::path::Path;

use self::tree::{read, rust_files};
use self::violation::Violation;
use crate::error::{Error, Result};
use crate::repo;

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
