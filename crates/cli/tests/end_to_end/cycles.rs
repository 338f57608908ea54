//! Dump and kill, leave running, many cycles in a row, one image restored twice.
use testkit::facts::Facts;
use testkit::needs_root;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

use crate::{assert_cycles, assert_restored, assert_untouched, stillframe};

#[track_caller]
fn advances(subject: &Subject, question: &str) {
    let now = subject.ask_number(question);
    wait_until(&format!("{question} to advance"), SOON, || {
        subject.ask_number(question) > now
    });
}

#[test]
fn a_busy_task_is_dumped_killed_and_restored() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("busy", &["4"]);
    let before = subject.ask_number("count");
    let facts = Facts::moving(subject.pid());
    stillframe.dump(subject.pid(), &[]).must();
    assert!(!tree::exists(subject.pid()), "a dump kills its target");
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
    assert!(
        subject.ask_number("count") > before,
        "it does not start anew"
    );
    let after = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &after, "a busy task");
    advances(&subject, "count");
}

#[test]
fn a_task_left_running_cannot_tell() {
    needs_root!();
    let stillframe = stillframe();
    for (name, arguments) in crate::states::WAITING {
        if stillframe.is_peer() && crate::states::NOT_BY_PEER.contains(name) {
            continue;
        }
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--leave-running"]).must();
        wait_until("the subject to wait again", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_untouched(&before, &after, name);
    }
}

#[test]
fn a_busy_task_left_running_counts_on() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("busy", &["1"]);
    for _ in 0..5 {
        let facts = Facts::moving(subject.pid());
        stillframe.clear();
        stillframe.dump(subject.pid(), &["-R"]).must();
        advances(&subject, "count");
        assert_eq!(subject.ask("check"), "right");
        assert_untouched(&facts, &Facts::moving(subject.pid()), "a busy task");
    }
}

#[test]
fn ten_cycles_in_a_row() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["5"]);
    let facts = Facts::moving(subject.pid());
    for _ in 0..10 {
        let before = subject.ask_number("total");
        stillframe.cycle(1, &subject, &[]);
        assert!(subject.ask_number("total") >= before);
        advances(&subject, "total");
        assert_eq!(subject.ask("check"), "right");
    }
    let after = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &after, "a small tree");
}

#[test]
fn ten_cycles_of_a_waiting_task_change_nothing() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("fds", &[]);
    assert_cycles(&stillframe, 10, &subject, "descriptors");
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn one_image_is_restored_twice() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["5", "still"]);
    wait_until("the tree to wait", SOON, || subject.is_waiting());
    let counts = subject.ask("counts");
    stillframe.dump(subject.pid(), &[]).must();
    for _ in 0..2 {
        stillframe.restore(&[]).must();
        assert_eq!(
            subject.ask("counts"),
            counts,
            "each restore starts at the dump"
        );
        subject.ask("wake");
        wait_until("every task to count", SOON, || {
            subject.ask_number("total") == 2 * 4
        });
        assert_eq!(subject.ask("check"), "right");
        subject.kill();
    }
}
