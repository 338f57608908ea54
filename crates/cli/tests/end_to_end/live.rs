//! Dumps of trees that go on: what they write meanwhile is not in the image, what they wrote before
//! is, and they cannot tell.
use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::needs_root;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

use crate::{assert_restored, assert_untouched, stillframe};

/// Insists that all threads go on rightly for some rounds.
#[track_caller]
fn goes_on(subject: &Subject, others: bool) {
    for question in ["rounds", "others"].iter().take(1 + usize::from(others)) {
        let now = subject.ask_number(question);
        wait_until(&format!("{question} to go on"), SOON, || {
            subject.ask("check") != "right" || subject.ask_number(question) > now + 2
        });
    }
    assert_eq!(subject.ask("check"), "right");
}

fn is_protected(pid: u32) -> bool {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"));
    smaps.expect("its mappings").contains(" uw")
}

/// Dumps live some times, and restores the last image after the end of the original.
#[track_caller]
fn lives_on(stillframe: &Stillframe, arguments: &[&str], times: usize) {
    let subject = Subject::start("writers", arguments);
    let others = arguments.len() > 3;
    for _ in 0..times {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        assert!(
            !is_protected(subject.pid()),
            "nothing is left of the protection"
        );
        goes_on(&subject, others);
        let mut show = stillframe.command(&["show", "--stats"]);
        let shown = show.arg(stillframe.images()).output().expect("it starts");
        let shown = String::from_utf8_lossy(&shown.stdout);
        assert!(shown.contains(" live dump\n"), "{shown}");
    }
    let pids = subject.tree();
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    goes_on(&subject, others);
}

#[test]
fn memory_is_that_of_one_instant() {
    needs_root!();
    let stillframe = stillframe();
    lives_on(&stillframe, &["6", "3", "100"], 2);
}

#[test]
fn memory_written_here_and_there_is_that_of_one_instant() {
    needs_root!();
    let stillframe = stillframe();
    lives_on(&stillframe, &["12", "2", "5"], 2);
}

#[test]
fn mappings_change_meanwhile() {
    needs_root!();
    let stillframe = stillframe();
    for other in ["discard", "unmap", "move", "grow", "fork", "read"] {
        lives_on(&stillframe, &["2", "1", "50", other], 1);
    }
    lives_on(
        &stillframe,
        &["4", "1", "50", "discard", "unmap", "move", "read"],
        3,
    );
}

#[test]
fn a_task_cannot_tell_that_it_was_dumped_live() {
    needs_root!();
    let stillframe = stillframe();
    for (name, arguments) in crate::states::WAITING {
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        if *name == "creds" {
            // It has given up its rights.
            let outcome = stillframe.dump(subject.pid(), &["--live"]);
            outcome.must_fail().names(&["may not use userfaultfd"]);
            continue;
        }
        let before = Facts::still(subject.pid());
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        wait_until("the subject to wait again", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_untouched(&before, &after, name);
    }
}

#[test]
fn a_killed_live_dump_lets_its_target_go_on() {
    const KILLS: usize = 6;
    needs_root!();
    let stillframe = stillframe();
    let mut chance = Chance::of("a_killed_live_dump_lets_its_target_go_on");
    let subject = Subject::start("writers", &["2", "1", "30", "discard"]);
    let whole = stillframe.dump(subject.pid(), &["--live"]).must();
    for _ in 0..KILLS {
        stillframe.clear();
        let command = stillframe.dump_command(subject.pid(), &["--live"]);
        stillframe.kill_after(command, chance.time(whole.elapsed));
        wait_until("the protection to end", SOON, || {
            !is_protected(subject.pid())
        });
        goes_on(&subject, true);
    }
}

#[test]
fn a_live_dump_leaves_nothing_stopped() {
    let outcome = stillframe().dump(std::process::id(), &["--live", "--leave-stopped"]);
    outcome.must_fail().names(&["--live", "--leave-stopped"]);
}

#[test]
fn a_tree_is_dumped_live_and_restored() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["6"]);
    let facts = Facts::moving(subject.pid());
    stillframe.dump(subject.pid(), &["--live"]).must();
    let pids = subject.tree();
    assert_eq!(subject.ask("check"), "right");
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
    let after = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &after, "a tree");
}
