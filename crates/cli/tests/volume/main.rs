//! `stillframe volume` on real file systems: what is saved comes back, of every kind, in use or
//! not, also where something fails.
#![allow(clippy::unwrap_used)]

mod crash;
mod encrypted;
mod files;
mod in_use;
mod levels;
mod mount;
mod random;
mod tape;
mod unreadable;
mod whole;
mod with_tree;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

/// Nothing that is waited for takes longer.
const LIMIT: Duration = Duration::from_secs(60);

fn stillframe(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.arg("volume").args(arguments).output().unwrap()
}

/// Runs it, which must succeed; gives what it told as JSON, if it did.
fn succeed(arguments: &[&str]) -> serde_json::Value {
    let output = stillframe(arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}{complained}");
    serde_json::from_str(&said).unwrap_or_default()
}

/// Runs it, which must fail so; gives what it said of that.
fn refused(arguments: &[&str], status: i32) -> String {
    let output = stillframe(arguments);
    let complained = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(status),
        "{arguments:?}: {complained}"
    );
    complained
}

/// A folder and names in it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}
