//! `cargo xtask test`: every test of the workspace, and one closing line that counts them.
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{ChildStdout, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::leftover::Marks;
use crate::{emulators, kernels, packages, programs_32, repo};

/// What is run.
#[derive(clap::Args, Default)]
pub struct Arguments {
    /// Only tests of these packages.
    #[arg(long, short)]
    package: Vec<String>,
    /// Only tests whose names contain this.
    filter: Option<String>,
}

/// The sums over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// Installs what is missing, builds the release binary, runs the tests and prints the closing line.
///
/// # Errors
/// When the build or any test fails.
pub fn run(arguments: &Arguments) -> Result<()> {
    packages::install(packages::FOR_TESTS)?;
    kernels::fetch();
    emulators::fetch();
    programs_32::fetch();
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: tests that need it are left out; they are listed at the end");
    }
    let start = Instant::now();
    let binary = repo::build_stillframe()?;
    eprintln!(
        "built {} in {:.1} s",
        binary.display(),
        start.elapsed().as_secs_f64()
    );

    let scratch = tempfile::tempdir().map_err(repo::file_error(
        "make a scratch folder in",
        &std::env::temp_dir(),
    ))?;
    let skips = scratch.path().join("skips");
    let mut tally = run_tests(arguments, &binary, &skips)?;
    let notes = std::fs::read_to_string(&skips).unwrap_or_default();
    for note in notes.lines() {
        println!("SKIP {note}");
    }
    let noted = notes.lines().count();
    tally.skipped += noted;
    tally.passed = tally.passed.saturating_sub(noted);
    eprintln!(
        "tests took {:.1} s with the build",
        start.elapsed().as_secs_f64()
    );
    println!(
        "{} passed, {} failed, {} skipped",
        tally.passed, tally.failed, tally.skipped
    );
    match tally.failed {
        0 => Ok(()),
        failed => Err(Error::Tests { failed }),
    }
}

/// Runs `cargo test` once, passes its output on and adds up what its programs report.
fn run_tests(arguments: &Arguments, binary: &Path, skips: &Path) -> Result<Tally> {
    let mut command = repo::cargo(&["test", "--locked", "--no-fail-fast"]);
    if arguments.package.is_empty() {
        command.arg("--workspace");
    }
    for package in &arguments.package {
        command.args(["--package", package]);
    }
    command.args(&arguments.filter);
    command
        .env("STILLFRAME_SKIPS", skips)
        .env("STILLFRAME_BIN", binary);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|source| repo::start_error(&command, source))?;
    let stdout = child.stdout.take().expect("stdout was made a pipe above");
    let marks = Marks::new("STILLFRAME_SKIPS", skips.as_os_str(), stdout.as_fd());
    let marks = marks.map_err(repo::file_error("look at", Path::new("/proc/self/fd")))?;
    let (status, tally) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_output(stdout));
        let status = child.wait();
        // What is left has the output open, which then does not end.
        loop {
            for one in marks.kill_all() {
                eprintln!("left running by a test, and killed: {one}");
            }
            if reader.is_finished() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        (status, reader.join().expect("it does not panic"))
    });
    let status = status.map_err(|source| repo::start_error(&command, source))?;
    let mut tally = tally?;
    if !status.success() && tally.failed == 0 {
        eprintln!("cargo test ended with {status}: something was not built, or a program died");
        tally.failed = 1;
    }
    Ok(tally)
}

/// Passes on what tests write and adds up what they report.
fn read_output(stdout: ChildStdout) -> Result<Tally> {
    let mut tally = Tally::default();
    let mut out = std::io::stdout().lock();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.map_err(repo::file_error(
            "read the output of",
            Path::new("cargo test"),
        ))?;
        let line = String::from_utf8_lossy(&line);
        // A closed stdout must not hide the exit status of the tests.
        let _ = writeln!(out, "{line}");
        tally.add(&line);
    }
    Ok(tally)
}

impl Tally {
    /// Adds a line `test result: ok. 3 passed; 0 failed; 1 ignored; …`, and nothing for others.
    fn add(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result: ") else {
            return;
        };
        let counts = counts
            .split_once(". ")
            .map_or("", |(_verdict, counts)| counts);
        for part in counts.split("; ") {
            let Some((number, what)) = part.split_once(' ') else {
                continue;
            };
            let Ok(number) = number.parse::<usize>() else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_several_programs_add_up() {
        let mut tally = Tally::default();
        tally.add("running 3 tests");
        tally.add(
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; \
             finished in 0.00s",
        );
        tally
            .add("test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 4 filtered out");
        assert_eq!(
            tally,
            Tally {
                passed: 13,
                failed: 2,
                skipped: 1
            }
        );
    }
}
