//! `cargo xtask ci`: what has to pass before a change lands.
use std::time::Instant;

use crate::error::Result;
use crate::{repo, test, tidy};

/// Runs tidy, fmt, clippy and the tests, and stops at the first that fails.
///
/// The tests come last, so that their closing line is the last line.
///
/// # Errors
/// The first that failed.
pub fn run() -> Result<()> {
    step("tidy", || tidy::run(&tidy::Arguments::default()))?;
    step("fmt", || {
        repo::run(&mut repo::cargo(&["fmt", "--all", "--check"]))
    })?;
    step("clippy", || {
        let arguments = [
            "clippy",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-targets",
        ];
        repo::run(repo::cargo(&arguments).args(["--", "--deny", "warnings"]))
    })?;
    test::run(&test::Arguments::default())
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("ci: {name}");
    let start = Instant::now();
    work()?;
    eprintln!(
        "ci: {name} passed in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
