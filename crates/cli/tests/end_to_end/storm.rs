//! Subjects made from seeds, and the steps that failed once: see docs/testing.md.
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::needs_root;
use testkit::subject::{binary, built};

use crate::stillframe;

/// Has the program try what `arguments` say, in namespaces of its own: the other tests do not
/// disturb it, nor it them.
fn try_all(arguments: &[&str], files: &[PathBuf]) {
    let _ = binary();
    let output = Command::new(built("storm"))
        .args(arguments)
        .args(files)
        .arg("--stillframe")
        .arg(stillframe().binary())
        .arg("--keep")
        .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("storm"))
        .output()
        .expect("it was just built");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn what_failed_once_comes_back() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer saves less");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/storm");
    let files = std::fs::read_dir(folder).expect("the steps are there");
    let files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    try_all(&["--steps"], &files);
}

/// Each in one of the ways that kill nothing, through three pauses.
#[test]
fn small_subjects_about_one_thing_each_come_back() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer saves less");
    }
    try_all(&["--states"], &[]);
}

#[test]
fn fifty_seeds_come_back() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer saves less");
    }
    try_all(&["--seeds", "50"], &[]);
}
