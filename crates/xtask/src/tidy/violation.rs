//! A place where a rule is broken.

use std::fmt;
use std::path::{Path, PathBuf};

/// One broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Relative to the repository's top folder.
    pub path: PathBuf,
    /// From 1.
    pub line: usize,
    pub rule: String,
}

impl Violation {
    pub fn new(path: &Path, line: usize, rule: impl Into<String>) -> Self {
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
