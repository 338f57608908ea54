//! A kind of descriptors: the states in which it is made, and how these are read.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use crate::samples::sample::Values;

/// A kind of descriptors, with the states in which it is made.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its name in steps, once each.
    pub name: &'static str,
    /// The entries of the ledger that it is about.
    pub entries: &'static [&'static str],
    /// The states by number.
    pub values: Values,
    /// Makes it, with a path that nobody else has: one descriptor or the two ends.
    pub make: fn(&Path, u64) -> io::Result<Vec<OwnedFd>>,
    /// Reads its state.
    pub read: fn(BorrowedFd<'_>) -> io::Result<String>,
}

impl Kind {
    pub(super) const fn new(
        name: &'static str,
        values: Values,
        make: fn(&Path, u64) -> io::Result<Vec<OwnedFd>>,
        read: fn(BorrowedFd<'_>) -> io::Result<String>,
    ) -> Self {
        let entries = &[];
        Self {
            name,
            entries,
            values,
            make,
            read,
        }
    }

    pub(super) const fn about(self, entries: &'static [&'static str]) -> Self {
        Self { entries, ..self }
    }

    /// Its state, in words; the error's where it cannot be read. For tests.
    #[must_use]
    pub fn told(&self, own: BorrowedFd<'_>) -> String {
        (self.read)(own).unwrap_or_else(|error| error.to_string())
    }
}

/// The lines of a descriptor's fdinfo that begin with one of `names`, up to `end`.
pub(super) fn info(own: BorrowedFd<'_>, names: &[&str], end: &str) -> io::Result<String> {
    let path = format!("/proc/thread-self/fdinfo/{}", own.as_raw_fd());
    let text = std::fs::read_to_string(path)?;
    let wanted = |line: &&str| names.iter().any(|name| line.starts_with(name));
    let lines = text.lines().filter(wanted);
    let cut = |line: &str| match end.is_empty() {
        true => line.to_owned(),
        false => line.split(end).next().unwrap_or_default().to_owned(),
    };
    let mut lines: Vec<String> = lines.map(cut).collect();
    lines.sort();
    Ok(lines.join("; "))
}
