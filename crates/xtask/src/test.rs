//! `cargo xtask test`: every test of the workspace, and one closing line that counts them.
//!
//! An end-to-end test that failed is tried once more, alone, when all others are done.
//! docs/testing.md says which tests those are.
mod execution;
mod flaky;
mod programs;
mod schedule;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::{emulators, kernels, packages, programs_32, repo};
use execution::Setting;
use flaky::{FlakyStatus, Memory};
use programs::Program;
use schedule::Verdict;

/// How many tests are listed with their times at the end.
const SLOWEST: usize = 30;
/// No more failed tests than these are tried again: if there are more, something is broken.
const MOST_RETRIED: usize = 20;

/// What is run.
#[derive(clap::Args, Default)]
pub struct Arguments {
    /// Only tests of these packages.
    #[arg(long, short)]
    package: Vec<String>,
    /// Only tests whose names contain this.
    filter: Option<String>,
}

/// The sums over all tests.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// A test that was run.
#[derive(Clone, Debug)]
struct TestRun<'a> {
    program: &'a Program,
    /// Its name in its program.
    name: String,
    verdict: Verdict,
    took: Duration,
}

/// Results of all tests.
#[derive(Debug, Default)]
struct Results<'a> {
    tests: Vec<TestRun<'a>>,
    /// The doc tests, and one failed test for each program that could not be run.
    others: Tally,
    /// The full names of those that failed at first and passed alone.
    flaky: BTreeSet<String>,
}

/// Causes that fail a run besides tests that failed.
#[derive(Clone, Copy, Debug, Default)]
struct RunFaults {
    /// Tests that were flaky again and are not explained.
    tests: usize,
    /// Rows of the page that are about no test.
    rows: usize,
}

/// Installs what is missing, builds the release binary, runs the tests and prints the closing line.
///
/// # Errors
/// When the build or any test fails.
pub fn run(arguments: &Arguments) -> Result<()> {
    sys::dispositions::pass_on_defaults();
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
    let setting = Setting {
        binary,
        skips: scratch.path().join("skips"),
        end_to_end: scratch.path().join("end-to-end"),
    };
    let memory = Memory::read()?;
    let known = programs::packages()?;
    let programs = match programs::build(&arguments.package, &known) {
        Ok(programs) => programs,
        Err(error) => return Err(unbuilt(&error)),
    };
    let mut results = Results::default();
    results.run(&programs, arguments, &setting);
    if let Some(mut doc_tests) = programs::doc_tests(&arguments.package, &known) {
        doc_tests.args(&arguments.filter);
        let tally = execution::run_doc_tests(doc_tests, &setting)?;
        results.others.join(&tally);
    }
    results.retry(&setting);
    let skips = execution::noted(&setting.skips);
    results.tell(&skips);
    let is_whole = arguments.package.is_empty() && arguments.filter.is_none();
    let broken = results.judge_flaky(&memory, is_whole)?;
    eprintln!(
        "tests took {:.1} s with the build",
        start.elapsed().as_secs_f64()
    );
    let tally = results.tally(skips.len(), broken);
    println!(
        "{} passed, {} failed, {} skipped",
        tally.passed, tally.failed, tally.skipped
    );
    match tally.failed {
        0 => Ok(()),
        failed => Err(Error::Tests { failed }),
    }
}

/// Tells that the tests could not be built, as one failed test.
fn unbuilt(error: &Error) -> Error {
    eprintln!("{error}: the tests were not built");
    println!("0 passed, 1 failed, 0 skipped");
    Error::Tests { failed: 1 }
}

impl<'a> Results<'a> {
    /// Runs the programs one after the other.
    fn run(&mut self, programs: &'a [Program], arguments: &Arguments, setting: &Setting) {
        let filter = arguments.filter.as_deref();
        for program in programs {
            let shown = program.executable().strip_prefix(repo::root());
            let shown = shown.unwrap_or(program.executable()).display();
            eprintln!("     Running {} ({shown})", program.name);
            let ended = programs::list(program, filter)
                .and_then(|tests| execution::run(program, setting, tests, filter));
            match ended {
                Ok(ended) => self.add(program, ended),
                Err(error) => {
                    eprintln!("{}: {error}", program.name);
                    self.others.failed += 1;
                }
            }
        }
    }

    fn add(&mut self, program: &'a Program, ended: Vec<schedule::TestResult>) {
        self.tests.extend(ended.into_iter().map(|one| TestRun {
            program,
            name: one.name,
            verdict: one.verdict,
            took: one.took,
        }));
    }

    /// Tries the end-to-end tests that failed once more, each alone.
    fn retry(&mut self, setting: &Setting) {
        let noted = execution::noted(&setting.end_to_end);
        let failed = self.tests.iter_mut().filter(|test| test.is_retried(&noted));
        let failed = failed.collect::<Vec<_>>();
        if failed.len() > MOST_RETRIED {
            eprintln!(
                "{} end-to-end tests failed: none is tried again",
                failed.len()
            );
            return;
        }
        for test in failed {
            eprintln!("     Trying {} again, alone", test.full_name());
            let ended = execution::run_alone(test.program, setting, &test.name);
            let passes = |ended: &[schedule::TestResult]| match ended {
                [one] => one.verdict == Verdict::Passed,
                _ => false,
            };
            match ended {
                Ok(ended) if passes(&ended) => {
                    test.verdict = Verdict::Passed;
                    self.flaky.insert(test.full_name());
                }
                Ok(_) => {}
                Err(error) => eprintln!("{}: {error}", test.full_name()),
            }
        }
    }

    /// Lists what could not run, what took long and what failed.
    fn tell(&self, skips: &BTreeSet<String>) {
        for note in skips {
            println!("SKIP {note}");
        }
        for line in slowest(&self.tests) {
            println!("{line}");
        }
        let failed = |test: &&TestRun<'_>| test.verdict == Verdict::Failed;
        for test in self.tests.iter().filter(failed) {
            println!("FAILED {}", test.full_name());
        }
    }

    /// Lists the flaky tests and remembers them for the next run; how many fail this one. So do the
    /// rows of the page that are about no test, in a whole run.
    ///
    /// # Errors
    /// When they cannot be remembered.
    fn judge_flaky(&self, memory: &Memory, is_whole: bool) -> Result<RunFaults> {
        let ran = self
            .tests
            .iter()
            .map(TestRun::full_name)
            .collect::<BTreeSet<_>>();
        let mut broken = RunFaults::default();
        for name in memory.explained().difference(&ran).filter(|_| is_whole) {
            println!("FAILED {}: there is no test {name}", flaky::PAGE);
            broken.rows += 1;
        }
        for name in &self.flaky {
            let standing = memory.standing(name);
            println!("flaky: {name}: {}", told(standing));
            broken.tests += usize::from(standing == FlakyStatus::Again);
        }
        memory.write(&ran, &self.flaky)?;
        Ok(broken)
    }

    /// Counts. Of what passed, `skips` only said that they cannot run.
    fn tally(&self, skips: usize, broken: RunFaults) -> Tally {
        let count = |verdict| {
            let tests = self.tests.iter().filter(|test| test.verdict == verdict);
            tests.count()
        };
        let mut tally = Tally {
            passed: count(Verdict::Passed).saturating_sub(broken.tests),
            failed: count(Verdict::Failed) + broken.tests + broken.rows,
            skipped: count(Verdict::Ignored) + skips,
        };
        tally.join(&self.others);
        tally.passed = tally.passed.saturating_sub(skips);
        tally
    }
}

impl TestRun<'_> {
    /// Its name in the workspace.
    fn full_name(&self) -> String {
        format!("{} {}", self.program.name, self.name)
    }

    /// True if it failed and may be tried again: it is an end-to-end test by its program, or has
    /// said that it starts something.
    fn is_retried(&self, noted: &BTreeSet<String>) -> bool {
        let note = format!("{} {}", self.program.package, self.name);
        let is_end_to_end = self.program.is_end_to_end || noted.contains(&note);
        self.verdict == Verdict::Failed && is_end_to_end
    }
}

/// The slowest tests, a line each, the slowest first.
fn slowest(tests: &[TestRun<'_>]) -> Vec<String> {
    let mut tests = tests.iter().collect::<Vec<_>>();
    tests.sort_by_key(|test| std::cmp::Reverse(test.took));
    let line =
        |test: &&TestRun<'_>| format!("{:8.2} s  {}", test.took.as_secs_f64(), test.full_name());
    let lines = tests.iter().take(SLOWEST).map(line);
    let title = format!("the slowest {} tests:", tests.len().min(SLOWEST));
    std::iter::once(title).chain(lines).collect()
}

/// The message about a flaky test, for the output of the run.
fn told(standing: FlakyStatus) -> String {
    let page = flaky::PAGE;
    match standing {
        FlakyStatus::Explained => format!("it passed alone; {page} says what is known"),
        FlakyStatus::Once => {
            format!("it passed alone; no row in {page}: the next time in a row fails the run")
        }
        FlakyStatus::Again => format!("twice in a row, without a row in {page}: FAILED"),
    }
}

impl Tally {
    fn join(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

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

    fn program(name: &str, is_end_to_end: bool) -> Program {
        Program::named(name, is_end_to_end)
    }

    fn ran<'a>(program: &'a Program, name: &str, verdict: Verdict, ms: u64) -> TestRun<'a> {
        TestRun {
            program,
            name: name.to_owned(),
            verdict,
            took: Duration::from_millis(ms),
        }
    }

    #[test]
    fn only_end_to_end_tests_that_failed_are_retried() {
        let (unit, whole) = (program("a", false), program("b/whole", true));
        let noted = ["a x::starts", "b x::pure"].map(str::to_owned).into();
        for (test, is_retried) in [
            (ran(&whole, "x", Verdict::Failed, 0), true),
            (ran(&whole, "x", Verdict::Passed, 0), false),
            (ran(&unit, "x::starts", Verdict::Failed, 0), true),
            (ran(&unit, "x::starts", Verdict::Passed, 0), false),
            (ran(&unit, "x::pure", Verdict::Failed, 0), false),
        ] {
            assert_eq!(test.is_retried(&noted), is_retried, "{test:?}");
        }
    }

    #[test]
    fn slowest_come_first_and_are_thirty() {
        let unit = program("a", false);
        let tests = (0..40).map(|n| ran(&unit, &n.to_string(), Verdict::Passed, n * 100));
        let lines = slowest(&tests.collect::<Vec<_>>());
        assert_eq!(lines.len(), SLOWEST + 1);
        assert_eq!(lines[0], "the slowest 30 tests:");
        assert_eq!(lines[1].trim(), "3.90 s  a 39");
    }

    #[test]
    fn flaky_tests_count_as_passed_unless_they_are_so_again() {
        let unit = program("a", false);
        let verdicts = [
            Verdict::Passed,
            Verdict::Passed,
            Verdict::Passed,
            Verdict::Failed,
            Verdict::Ignored,
        ];
        let tests = verdicts.map(|verdict| ran(&unit, "x", verdict, 0)).to_vec();
        let results = Results {
            tests,
            others: Tally {
                passed: 10,
                failed: 0,
                skipped: 1,
            },
            ..Results::default()
        };
        let tally = |passed, failed, skipped| Tally {
            passed,
            failed,
            skipped,
        };
        assert_eq!(results.tally(2, RunFaults::default()), tally(11, 1, 4));
        let broken = RunFaults { tests: 1, rows: 1 };
        assert_eq!(results.tally(2, broken), tally(10, 3, 4));
    }

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
