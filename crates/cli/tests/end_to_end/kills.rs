//! The command killed at random instants: a dump leaves a target that goes on or a whole image, a
//! restore leaves a whole tree or nothing.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_root, tree};

use crate::{assert_untouched, refusing_script, stillframe};

const KILLS_OF_BUSY: usize = 110;
const KILLS_OF_STILL: usize = 80;
const KILLS_OF_RESTORE: usize = 120;

/// How long a run takes, at most of a few.
fn usual(runs: impl Iterator<Item = Duration>) -> Duration {
    let longest = runs.max().expect("some runs");
    // Past its end too, where the last clean-up happens.
    longest + longest / 5
}

#[test]
fn a_killed_dump_lets_its_target_go_on() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its code in the target when it is killed");
    }
    let mut chance = Chance::of("a_killed_dump_lets_its_target_go_on");
    let subject = Subject::start("busy", &["8"]);
    let facts = Facts::moving(subject.pid());
    let dump = || {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["-R"]).must().elapsed
    };
    let longest = usual((0..5).map(|_| dump()));
    let mut restored = 0;
    for round in 0..KILLS_OF_BUSY {
        stillframe.clear();
        let instant = chance.time(longest);
        let command = stillframe.dump_command(subject.pid(), &[]);
        let ended = stillframe.kill_after(command, instant);
        let told = format!("round {round}, killed after {instant:?}, ended {ended:?}");
        wait_for_cleanup(&stillframe, &[subject.pid()], &told);
        if subject.try_ask("count").is_err() {
            // It was past the point and its target dead or dying: then the image is whole.
            tree::wait_gone(&[subject.pid()]);
            stillframe.restore(&[]).must();
            restored += 1;
        }
        let count = subject.ask_number("count");
        wait_until(&format!("the target to count: {told}"), SOON, || {
            subject.ask_number("count") > count
        });
        assert_eq!(subject.ask("check"), "right", "{told}");
        let untouched = try_wait_for(SOON, || {
            let now = Facts::moving(subject.pid());
            facts.diff(&now).is_empty().then_some(())
        });
        if untouched.is_none() {
            assert_untouched(&facts, &Facts::moving(subject.pid()), &told);
        }
    }
    println!("{KILLS_OF_BUSY} kills within {longest:?}, {restored} after the dump was done");
}

#[test]
fn a_target_cannot_tell_that_a_dump_was_killed() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its code in the target when it is killed");
    }
    let mut chance = Chance::of("a_target_cannot_tell_that_a_dump_was_killed");
    let subjects: Vec<Subject> = [
        ("tree", &["6", "still"][..]),
        ("fds", &[]),
        ("sigaltstack", &[]),
    ]
    .iter()
    .map(|(name, arguments)| Subject::start(name, arguments))
    .collect();
    for (number, subject) in subjects.iter().enumerate() {
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let dump = || {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["-R"]).must().elapsed
        };
        let longest = usual((0..5).map(|_| dump()));
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let facts = Facts::still(subject.pid());
        for round in 0..KILLS_OF_STILL / subjects.len() + 1 {
            stillframe.clear();
            let instant = chance.time(longest);
            let command = stillframe.dump_command(subject.pid(), &["-R"]);
            let ended = stillframe.kill_after(command, instant);
            let told = format!("subject {number}, round {round}, {instant:?}, {ended:?}");
            wait_for_cleanup(&stillframe, &subject.tree(), &told);
            // What the dump had begun in the target ends by itself.
            let untouched = try_wait_for(SOON, || {
                let now = Facts::still(subject.pid());
                differences(subject, &facts, &now).is_empty().then_some(())
            });
            if untouched.is_none() {
                let left = differences(subject, &facts, &Facts::still(subject.pid()));
                panic!("{told}:\n{}", left.join("\n"));
            }
        }
    }
    assert_eq!(subjects[0].ask("check"), "right");
    assert_eq!(subjects[1].ask("check"), "right");
    assert_eq!(subjects[2].ask("raise-second"), "on the alternate stack");
}

/// What differs, but for the end of the vDSO: a killed dump leaves code in its padding, which no
/// task executes and which the next dump overwrites.
fn differences(subject: &Subject, before: &Facts, after: &Facts) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", subject.pid()));
    let maps = maps.expect("the maps of the subject can be read");
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]"));
    let vdso = vdso.and_then(|line| line.split([' ', '-']).nth(1));
    let end = u64::from_str_radix(vdso.expect("there is a vDSO"), 16).expect("an address");
    let padding = format!(" page {:#x}: ", end - 4096);
    let mut differences = before.diff(after);
    differences.retain(|line| !line.contains(&padding));
    differences
}

/// Waits until nothing of the killed command is left and none of `pids` is traced or stopped.
#[track_caller]
pub fn wait_for_cleanup(stillframe: &Stillframe, pids: &[u32], told: &str) {
    wait_until(&format!("what was killed to be gone: {told}"), SOON, || {
        let helpers = stillframe.helpers();
        helpers.iter().for_each(|&pid| tree::reap(pid));
        pids.iter().for_each(|&pid| tree::reap(pid));
        helpers.is_empty()
            && pids.iter().all(|&pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.map_or(true, |status| {
                    status.contains("TracerPid:\t0") && !status.contains("State:\tT")
                })
            })
    });
}

#[test]
fn a_killed_restore_leaves_all_or_nothing() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves half a tree when its restore is killed");
    }
    let mut chance = Chance::of("a_killed_restore_leaves_all_or_nothing");
    let subject = Subject::start("tree", &["8"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    let restore = || {
        let elapsed = stillframe.restore(&[]).must().elapsed;
        subject.kill();
        tree::wait_gone(&pids);
        elapsed
    };
    let longest = usual((0..5).map(|_| restore()));
    let mut whole = 0;
    for round in 0..KILLS_OF_RESTORE {
        let instant = chance.time(longest);
        let ended = stillframe.kill_after(stillframe.restore_command(&[]), instant);
        let told = format!("round {round}, killed after {instant:?}, ended {ended:?}");
        wait_for_cleanup(&stillframe, &pids, &told);
        // Tasks that are being killed look alive for a moment.
        let is_whole = try_wait_for(SOON, || {
            pids.iter().for_each(|&pid| tree::reap(pid));
            let alive = pids.iter().filter(|&&pid| tree::is_alive(pid)).count();
            if alive == pids.len() && subject.try_ask("total").is_ok() {
                return Some(true);
            }
            (alive == 0).then_some(false)
        });
        let Some(is_whole) = is_whole else {
            let states = pids
                .iter()
                .map(|&pid| (pid, tree::state(pid), tree::parent(pid)));
            panic!(
                "neither all nor nothing: {told}: {:?}",
                states.collect::<Vec<_>>()
            );
        };
        let done = ended.is_some_and(|status| status.success());
        assert!(is_whole || !done, "{told}");
        if is_whole {
            whole += 1;
            let counts = || -> Vec<u64> {
                let counts = subject.ask("counts");
                counts
                    .split(' ')
                    .map(|count| count.parse().expect("a number"))
                    .collect()
            };
            let before = counts();
            wait_until(&format!("every task to count: {told}"), SOON, || {
                let now = counts();
                now.iter()
                    .zip(&before)
                    .skip(1)
                    .all(|(now, before)| now > before)
            });
            assert_eq!(subject.ask("check"), "right", "{told}");
            subject.kill();
        }
        tree::wait_gone(&pids);
    }
    println!("{KILLS_OF_RESTORE} kills within {longest:?}, {whole} after the restore was done");
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_failed_restore_returns_when_its_tasks_are_gone() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not wait for the tasks of a failed restore");
    }
    let subject = Subject::start("tree", &["30", "still"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let script = refusing_script(scratch.path(), "\"$STAGE\"");
    for stage in ["post-restore", "pre-resume"].repeat(10) {
        let mut command = stillframe.restore_command(&["--action-script", &script]);
        let status = command.env("STAGE", stage).status().expect("it starts");
        assert_eq!(status.code(), Some(1), "{stage}");
        let left = pids.iter().filter(|&&pid| tree::state(pid).is_some());
        let left = left.map(|&pid| (pid, tree::state(pid))).collect::<Vec<_>>();
        assert_eq!(left, [], "{stage}");
    }
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_restore_waits_for_tasks_that_are_being_killed() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not wait for pids");
    }
    let subject = Subject::start("tree", &["30", "still"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    for round in 0..20 {
        stillframe.restore(&[]).must();
        assert_eq!(subject.ask("check"), "right", "round {round}");
        for &pid in pids.iter().rev() {
            tree::signal(pid, rustix::process::Signal::KILL);
        }
        // They are this process's children when they have ended: somebody must wait for them.
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    pids.iter().for_each(|&pid| tree::reap(pid));
                    thread::yield_now();
                }
            });
            let outcome = stillframe.restore(&[]);
            is_done.store(true, Relaxed);
            outcome
        })
        .must();
        subject.kill();
        tree::wait_gone(&pids);
    }
}

/// Kills the watchdog of a dump once it is there, and counts it; whether the dump succeeded.
fn without_watchdog(stillframe: &Stillframe, subject: &Subject, killed: &mut u32) -> bool {
    let mut dump = stillframe.dump_command(subject.pid(), &[]);
    let mut dump = dump.spawn().expect("it starts");
    loop {
        for pid in tree::children(dump.id()) {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            if name.is_ok_and(|name| name == "stillframe-wdog\n") {
                *killed += u32::from(tree::signal(pid, Signal::KILL));
            }
        }
        if let Some(status) = dump.try_wait().expect("a child") {
            return status.success();
        }
    }
}

#[test]
fn a_dump_whose_watchdog_is_killed_leaves_no_image_beside_the_target() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no watchdog");
    }
    let subject = Subject::start("busy", &["2"]);
    let mut killed = 0;
    for _ in 0..10 {
        stillframe.clear();
        if without_watchdog(&stillframe, &subject, &mut killed) {
            tree::wait_gone(&[subject.pid()]);
            stillframe.restore(&[]).must();
        } else {
            let mut shown = stillframe.command(&["show", "-D"]);
            let shown = shown.arg(stillframe.images()).output().expect("it runs");
            assert!(!shown.status.success(), "an image of a tree that goes on");
        }
        assert_eq!(subject.ask("check"), "right");
    }
    assert!(killed > 0, "no watchdog was there when it was looked for");
}
