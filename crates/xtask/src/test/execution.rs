//! A test program at work: its output is passed on, its tests are timed, and what it leaves running
//! is killed.
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::programs::Program;
use super::schedule::{ProgramResults, Schedule, TestList, TestResult, Verdict};
use crate::error::Result;
use crate::leftover::ProcessMarks;
use crate::repo;

/// How often a program that dies is run again for those of its tests that it had not begun.
const MOST_DEATHS: usize = 5;
/// How many tests run at a time, as libtest understands it.
const THREADS: &str = "RUST_TEST_THREADS";

/// Settings of all test programs.
#[derive(Debug)]
pub struct Setting {
    /// The command under test.
    pub binary: PathBuf,
    /// The file to which tests that cannot run add their names.
    pub skips: PathBuf,
    /// The file to which tests that start something add theirs.
    pub end_to_end: PathBuf,
}

/// The output of a program that was run, and its exit status.
struct ProgramOutput<T> {
    status: ExitStatus,
    read: T,
}

/// Runs these tests of a program, all that it lists, and once more those that were not begun where
/// it died.
///
/// # Errors
/// When it cannot be started.
pub fn run(
    program: &Program,
    setting: &Setting,
    tests: TestList,
    filter: Option<&str>,
) -> Result<Vec<TestResult>> {
    let mut ended = Vec::new();
    let threads = threads(tests.by_libtest);
    let mut names = tests.names;
    let mut arguments = filter.map(str::to_owned).into_iter().collect::<Vec<_>>();
    for death in 1.. {
        let mut command = program.command();
        command.args(&arguments);
        let closed = run_once(command, setting, names, threads)?;
        ended.extend(closed.ended);
        for name in &closed.interrupted {
            eprintln!("{}: the program died while {name} ran", program.name);
        }
        names = closed.not_begun;
        if names.is_empty() || death == MOST_DEATHS {
            break;
        }
        arguments = std::iter::once("--exact".to_owned())
            .chain(names.clone())
            .collect();
    }
    ended.extend(names.into_iter().map(|name| TestResult {
        name,
        verdict: Verdict::Failed,
        took: Duration::ZERO,
    }));
    Ok(ended)
}

/// Runs one test of a program alone.
///
/// # Errors
/// As [`run`].
pub fn run_alone(program: &Program, setting: &Setting, name: &str) -> Result<Vec<TestResult>> {
    let mut command = program.command();
    command.args(["--exact", name]);
    Ok(run_once(command, setting, vec![name.to_owned()], 2)?.ended)
}

/// Runs doc tests and adds up what their programs report.
///
/// # Errors
/// As [`run`].
pub fn run_doc_tests(command: Command, setting: &Setting) -> Result<super::Tally> {
    let printed = execute(command, setting, |stdout| {
        let mut tally = super::Tally::default();
        each_line(stdout, |line| {
            tally.add(line);
            None
        });
        tally
    })?;
    let mut tally = printed.read;
    if !printed.status.success() && tally.failed == 0 {
        eprintln!("the doc tests ended with {}", printed.status);
        tally.failed = 1;
    }
    Ok(tally)
}

fn threads(by_libtest: bool) -> usize {
    let asked = std::env::var(THREADS)
        .ok()
        .and_then(|number| number.parse().ok());
    let here = || std::thread::available_parallelism().map_or(1, usize::from);
    // Tests with a `main` of their own run one after the other.
    if by_libtest {
        asked.unwrap_or_else(here)
    } else {
        1
    }
}

fn run_once(
    mut command: Command,
    setting: &Setting,
    names: Vec<String>,
    threads: usize,
) -> Result<ProgramResults> {
    command.env(THREADS, threads.to_string());
    let begun = Instant::now();
    let printed = execute(command, setting, |stdout| {
        let mut schedule = Schedule::new(names, threads);
        each_line(stdout, |line| {
            let ended = schedule.take(line, begun.elapsed())?;
            Some(format!("  {:.2} s", ended.took.as_secs_f64()))
        });
        schedule.close(begun.elapsed())
    })?;
    if !printed.status.success() && !printed.read.interrupted.is_empty() {
        eprintln!("a test program ended with {}", printed.status);
    }
    Ok(printed.read)
}

/// Runs a command, has `read` read its output, and kills what is left of it when it has ended.
fn execute<T: Send>(
    mut command: Command,
    setting: &Setting,
    read: impl FnOnce(ChildStdout) -> T + Send,
) -> Result<ProgramOutput<T>> {
    command
        .env("STILLFRAME_BIN", &setting.binary)
        .env("STILLFRAME_SKIPS", &setting.skips)
        .env("STILLFRAME_END_TO_END", &setting.end_to_end)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|source| repo::start_error(&command, source))?;
    let stdout = child.stdout.take().expect("stdout was made a pipe above");
    let marks = ProcessMarks::new(
        "STILLFRAME_SKIPS",
        setting.skips.as_os_str(),
        stdout.as_fd(),
    );
    let marks = marks.map_err(repo::file_error("look at", Path::new("/proc/self/fd")))?;
    let (status, read) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(stdout));
        let status = child.wait();
        // A process that is left keeps the output open, which then does not end.
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
    Ok(ProgramOutput { status, read })
}

/// Passes each line on, with what `take` adds to it.
fn each_line(stdout: ChildStdout, mut take: impl FnMut(&str) -> Option<String>) {
    let mut out = std::io::stdout().lock();
    // A pipe that cannot be read any more has ended.
    for line in BufReader::new(stdout)
        .split(b'\n')
        .map_while(|line| line.ok())
    {
        let line = String::from_utf8_lossy(&line);
        let added = take(&line).unwrap_or_default();
        // A closed stdout must not hide how the tests ended.
        let _ = writeln!(out, "{line}{added}");
    }
}

/// The lines of a file that tests add to, each once.
pub fn noted(file: &Path) -> BTreeSet<String> {
    let notes = std::fs::read_to_string(file).unwrap_or_default();
    notes.lines().map(str::to_owned).collect()
}
