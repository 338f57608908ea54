//! Which tests of a program run at a moment, and since when, as its output tells.
//!
//! libtest's own times are unstable options. It prints a line when a test has ended and begins the
//! next one of its list at that moment, so the list and these lines tell when each began.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should.
    Passed,
    /// It failed, or its program ended while it ran.
    Failed,
    /// It is marked `#[ignore]`.
    Ignored,
}

/// A test that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestResult {
    /// Its name in its program.
    pub name: String,
    /// How.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// The tests of one program while it runs.
#[derive(Debug)]
pub struct Schedule {
    waiting: VecDeque<String>,
    /// Those that run, with the time since the program's start at which each began.
    running: BTreeMap<String, Duration>,
    ended: Vec<TestResult>,
    /// The names under `failures:`.
    failures: BTreeSet<String>,
    names_failures: bool,
    /// True if the closing line says `ok`; `None` before that line.
    closing: Option<bool>,
}

/// The tests of a program that has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProgramResults {
    /// Those that have ended, and those that ran when the program died.
    pub ended: Vec<TestResult>,
    /// Those that a program that died had not begun.
    pub not_begun: Vec<String>,
    /// Those that ran when it died.
    pub interrupted: Vec<String>,
}

impl Schedule {
    /// The tests `names` in their order, of which `threads` run at a time.
    pub fn new(names: impl IntoIterator<Item = String>, threads: usize) -> Self {
        let mut schedule = Self {
            waiting: names.into_iter().collect(),
            running: BTreeMap::new(),
            ended: Vec::new(),
            failures: BTreeSet::new(),
            names_failures: false,
            closing: None,
        };
        for _ in 0..threads.max(1) {
            schedule.begin_next(Duration::ZERO);
        }
        schedule
    }

    fn begin_next(&mut self, at: Duration) {
        if let Some(name) = self.waiting.pop_front() {
            self.running.insert(name, at);
        }
    }

    /// Takes a line that was printed so long after the program's start; gives the test that it says
    /// has ended.
    pub fn take(&mut self, line: &str, at: Duration) -> Option<&TestResult> {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.closing = Some(counts.starts_with("ok"));
        }
        // The last list of this name is that of the names.
        if line == "failures:" {
            self.names_failures = true;
            self.failures.clear();
        } else if self.names_failures
            && let Some(name) = line.strip_prefix("    ")
        {
            self.failures.insert(name.to_owned());
        }
        let (name, verdict) = outcome(line)?;
        let begun = self.running.remove(name)?;
        self.begin_next(at);
        self.ended.push(TestResult {
            name: name.to_owned(),
            verdict,
            took: at.saturating_sub(begun),
        });
        self.ended.last()
    }

    /// Ends at that time; what a test that a program of its own interrupts in the middle of its
    /// line becomes is told by the closing lines.
    pub fn close(mut self, at: Duration) -> ProgramResults {
        let mut closed = ProgramResults::default();
        let died = self.closing.is_none();
        for (name, begun) in std::mem::take(&mut self.running) {
            let failed = died || self.closing == Some(false) && self.failures.contains(&name);
            if died {
                closed.interrupted.push(name.clone());
            }
            self.end(name, failed, at.saturating_sub(begun));
        }
        let waiting = std::mem::take(&mut self.waiting);
        if died {
            closed.not_begun.extend(waiting);
        } else {
            for name in waiting {
                let failed = self.failures.contains(&name);
                self.end(name, failed, Duration::ZERO);
            }
        }
        closed.ended = self.ended;
        closed
    }

    fn end(&mut self, name: String, failed: bool, took: Duration) {
        let verdict = match failed {
            true => Verdict::Failed,
            false => Verdict::Passed,
        };
        self.ended.push(TestResult {
            name,
            verdict,
            took,
        });
    }
}

/// The test and how it ended of a line `test NAME ... ok`, which another program's output may
/// precede.
fn outcome(line: &str) -> Option<(&str, Verdict)> {
    let mut starts = line.match_indices("test ");
    starts.find_map(|(at, word)| outcome_behind(&line[at + word.len()..]))
}

/// The same of a line from the name on, in which there is no space.
fn outcome_behind(line: &str) -> Option<(&str, Verdict)> {
    let (name, outcome) = line.split_once(" ... ")?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    let verdict = match outcome {
        "ok" => Verdict::Passed,
        _ if outcome.starts_with("FAILED") => Verdict::Failed,
        _ if outcome.starts_with("ignored") => Verdict::Ignored,
        _ => return None,
    };
    (!name.contains(' ')).then_some((name, verdict))
}

/// The list that a program prints with `--list`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestList {
    /// The names of its tests, in the order in which they begin.
    pub names: Vec<String>,
    /// True if libtest runs them, several at a time.
    pub by_libtest: bool,
}

impl TestList {
    /// Reads what the program printed.
    pub fn parse(output: &str) -> Self {
        let names = output
            .lines()
            .filter_map(|line| line.strip_suffix(": test"));
        let counts = |line: &str| line.contains(" tests, ") || line.contains(" test, ");
        Self {
            names: names.map(str::to_owned).collect(),
            by_libtest: output.lines().any(counts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn ended(name: &str, verdict: Verdict, took: Duration) -> TestResult {
        let name = name.to_owned();
        TestResult {
            name,
            verdict,
            took,
        }
    }

    #[test]
    fn test_that_waited_for_a_thread_is_timed_from_its_own_begin() {
        let mut schedule = Schedule::new(names(&["a", "b", "c", "d"]), 2);
        assert_eq!(schedule.take("running 4 tests", ms(0)), None);
        let b = ended("b", Verdict::Passed, ms(10));
        assert_eq!(schedule.take("test b ... ok", ms(10)), Some(&b));
        let c = ended("c", Verdict::Failed, ms(15));
        assert_eq!(
            schedule.take("noise of a child test c ... FAILED", ms(25)),
            Some(&c)
        );
        let a = ended("a", Verdict::Passed, ms(40));
        assert_eq!(
            schedule.take("test a - should panic ... ok", ms(40)),
            Some(&a)
        );
        let d = ended("d", Verdict::Ignored, ms(20));
        assert_eq!(
            schedule.take("test d ... ignored, not here", ms(45)),
            Some(&d)
        );
        schedule.take("test result: FAILED. 2 passed; 1 failed; 1 ignored", ms(45));
        let closed = schedule.close(ms(46));
        assert_eq!(closed.ended, [b, c, a, d]);
        assert!(closed.not_begun.is_empty() && closed.interrupted.is_empty());
    }

    #[test]
    fn outcome_is_found_in_a_line() {
        let passed = |name| Some((name, Verdict::Passed));
        assert_eq!(outcome("test of_the_test ... ok"), passed("of_the_test"));
        let line = "a test of noise test a::b ... ok";
        assert_eq!(outcome(line), passed("a::b"));
        assert_eq!(outcome("test a ... noise"), None);
        assert_eq!(outcome("the test ... ok"), None);
    }

    #[test]
    fn test_that_runs_long_has_not_ended() {
        let mut schedule = Schedule::new(names(&["a"]), 1);
        let line = "test a has been running for over 60 seconds";
        assert_eq!(schedule.take(line, ms(60_000)), None);
        assert_eq!(schedule.take("test b ... ok", ms(60_000)), None);
    }

    #[test]
    fn torn_line_is_made_up_for_by_the_closing_lines() {
        let mut schedule = Schedule::new(names(&["a", "b", "c"]), 1);
        for line in [
            "test a ... noise of a child",
            "failures:",
            "---- b stdout ----",
            "    c is indented in what b says",
            "failures:",
            "    b",
            "test result: FAILED. 2 passed; 1 failed",
        ] {
            assert_eq!(schedule.take(line, ms(1)), None);
        }
        let closed = schedule.close(ms(2));
        let verdicts = closed.ended.iter().map(|one| (&*one.name, one.verdict));
        let expected = [
            ("a", Verdict::Passed),
            ("b", Verdict::Failed),
            ("c", Verdict::Passed),
        ];
        assert_eq!(verdicts.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn tests_of_a_program_that_died_failed_or_are_left() {
        let mut schedule = Schedule::new(names(&["a", "b", "c", "d"]), 2);
        schedule.take("test a ... ok", ms(5));
        let closed = schedule.close(ms(9));
        assert_eq!(closed.interrupted, ["b", "c"]);
        assert_eq!(closed.not_begun, ["d"]);
        let failed = closed
            .ended
            .iter()
            .filter(|one| one.verdict == Verdict::Failed);
        assert_eq!(failed.count(), 2);
    }

    #[test]
    fn lists_of_libtest_and_others_are_told_apart() {
        let own = TestList::parse("a::b: test\nc: test\n\n2 tests, 0 benchmarks\n");
        assert_eq!(own.names, ["a::b", "c"]);
        assert!(own.by_libtest);
        assert!(TestList::parse("x: test\n\n1 test, 0 benchmarks\n").by_libtest);
        assert!(!TestList::parse("x: test\n").by_libtest);
    }
}
