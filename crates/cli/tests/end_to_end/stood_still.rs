//! A dump that stands still at any of its calls, or is killed there: its target is its own all the
//! time, whatever the dumper does, and finds everything as it was.
use std::process::Command;
use std::time::Duration;

use sys::arch::Registers;
use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::needs_root;
use testkit::stepper::{Run, hold_from, kill_from};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, try_wait_for, wait_until};

use crate::kills::wait_for_cleanup;
use crate::{assert_untouched, stillframe, vdso};

/// A way to save a target that goes on: a command and its options.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    options: &'static [&'static str],
    /// False for a pre-dump, which tracks memory from then on; true if nothing of it stays.
    is_over: bool,
}

/// All of them; what stays comes last.
const WAYS: [Way; 3] = [
    Way {
        name: "dump",
        options: &["-R"],
        is_over: true,
    },
    Way {
        name: "dump",
        options: &["--live"],
        is_over: true,
    },
    Way {
        name: "pre-dump",
        options: &[],
        is_over: false,
    },
];

impl Way {
    /// Its command line for a target.
    fn command(&self, stillframe: &Stillframe, target: &Target) -> Command {
        stillframe.clear();
        let mut command = stillframe.saving_command(self.name, target.subject.pid(), self.options);
        if self.is_over {
            command.env("TESTKIT_MARK", stillframe.mark());
        }
        command
    }
}

/// Longer than any patience that a thread of a target ever had.
const LONG: Duration = Duration::from_millis(2700);

/// True if a dumper is about to call ptrace(2): before that it has done nothing to its target.
fn traces(registers: &Registers) -> bool {
    const PTRACE: u64 = 101;
    registers.orig_rax == PTRACE
}

/// A subject, and a question whose answer grows as long as it goes on.
struct Target {
    subject: Subject,
    question: &'static str,
}

impl Target {
    /// Threads that wait for each other.
    fn threads() -> Self {
        Self {
            subject: Subject::start("threads-epoll", &["5"]),
            question: "laps",
        }
    }

    /// A thread that is in its vDSO nearly all the time.
    fn clock() -> Self {
        Self {
            subject: vdso::asking(),
            question: "rounds",
        }
    }

    /// A thread that handles what its own instructions bring about.
    fn traps(how: &[&str]) -> Self {
        Self {
            subject: Subject::start("traps", how),
            question: "rounds",
        }
    }

    /// Checks that it goes on, as it was where nothing stays of what was done.
    #[track_caller]
    fn assert_goes_on(&self, facts: &Facts, way: Way, told: &str) {
        let count = self.subject.ask_number(self.question);
        wait_until(&format!("it to go on: {told}"), SOON, || {
            self.subject.ask_number(self.question) > count
        });
        assert_eq!(self.subject.ask("check"), "right", "{told}");
        if !way.is_over {
            return;
        }
        let pid = self.subject.pid();
        let untouched = try_wait_for(SOON, || {
            let now = Facts::moving(pid);
            facts.diff(&now).is_empty().then_some(())
        });
        if untouched.is_none() {
            assert_untouched(facts, &Facts::moving(pid), told);
        }
    }
}

/// How many calls a run makes from the first on that traces, about.
fn calls(stillframe: &Stillframe, target: &Target, way: Way) -> usize {
    for at in (0..).step_by(40) {
        let command = way.command(stillframe, target);
        if let Run::Ended(status) = kill_from(&command, traces, at) {
            assert!(status.success(), "{way:?}: {status:?}");
            return at.saturating_sub(40);
        }
        wait_for_cleanup(stillframe, &[target.subject.pid()], "counting");
    }
    unreachable!("it ends")
}

#[test]
fn dumper_that_stands_still_leaves_its_target_alone() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it is about how stillframe stops a target");
    }
    let mut held = 0;
    let mut chance = Chance::of("dumper_that_stands_still_leaves_its_target_alone");
    for target in [Target::threads(), Target::clock()] {
        let facts = Facts::moving(target.subject.pid());
        for way in WAYS {
            let calls = calls(&stillframe, &target, way);
            for _ in 0..2 {
                let at = chance.below(calls as u64) as usize;
                let command = way.command(&stillframe, &target);
                let run = hold_from(&command, traces, at, LONG);
                let told = format!("{way:?} that stood still at call {at}: {run:?}");
                let (Run::Held(status) | Run::Ended(status)) = run else {
                    panic!("{told}");
                };
                held += usize::from(matches!(run, Run::Held(_)));
                assert!(status.success(), "{told}");
                target.assert_goes_on(&facts, way, &told);
            }
        }
    }
    assert!(held > 6, "{held} stood still");
}

#[test]
fn dump_killed_at_any_call_leaves_its_target_as_it_was() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its code in the target when it is killed");
    }
    // One call in so many, others in each run; all of them with 1.
    let stride = std::env::var("STILLFRAME_STRIDE").map_or(31, |stride| {
        stride
            .parse::<usize>()
            .expect("STILLFRAME_STRIDE is a number")
    });
    let mut chance = Chance::of("dump_killed_at_any_call_leaves_its_target_as_it_was");
    let mut killed = 0;
    for target in [Target::threads(), Target::clock()] {
        let facts = Facts::moving(target.subject.pid());
        for way in WAYS {
            let first = chance.below(stride as u64) as usize;
            for at in (first..).step_by(stride) {
                let command = way.command(&stillframe, &target);
                let run = kill_from(&command, traces, at);
                let told = format!("{way:?}, call {at}: {run:?}");
                wait_for_cleanup(&stillframe, &[target.subject.pid()], &told);
                target.assert_goes_on(&facts, way, &told);
                match run {
                    Run::Killed(_) => killed += 1,
                    Run::Ended(_) | Run::Held(_) => break,
                }
            }
        }
    }
    println!("{killed} kills");
    assert!(killed > 600 / stride, "{killed} kills");
}

/// Saves a target in each way, then three times with a restore; it never notices.
#[track_caller]
fn assert_unnoticed(target: &Target, ways: &[Way]) {
    let stillframe = stillframe();
    let facts = Facts::moving(target.subject.pid());
    for &way in ways {
        let told = format!("{way:?}");
        let mut command = way.command(&stillframe, target);
        let status = command.status().expect("it starts");
        assert!(status.success(), "{told}: {}", stillframe.logs());
        target.assert_goes_on(&facts, way, &told);
    }
    for cycle in 0..3 {
        stillframe.cycle(1, &target.subject, &[]);
        target.assert_goes_on(&facts, WAYS[0], &format!("cycle {cycle}"));
    }
}

#[test]
fn program_that_steps_itself_survives() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer's code runs with the trap flag");
    }
    assert_unnoticed(&Target::traps(&["steps"]), &WAYS);
}

#[test]
fn program_that_intercepts_its_calls_survives() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer's calls are intercepted");
    }
    assert_unnoticed(&Target::traps(&["intercepts"]), &WAYS);
    assert_unnoticed(&Target::traps(&["intercepts", "seldom"]), &WAYS);
}
