//! Memory with huge pages of hugetlbfs, in every kind of dump and restore.
use testkit::facts::Facts;
use testkit::huge_pages::HugePages;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_root, skip};

use crate::{assert_restored, stillframe};

/// What the subject and its child take, and as many again.
const PAGES: u64 = 40;

fn waiting() -> Subject {
    let subject = Subject::start("huge-pages", &[]);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    subject
}

#[test]
fn huge_pages_survive() {
    needs_root!();
    let stillframe = stillframe();
    let Ok(_pages) = HugePages::reserve(PAGES) else {
        skip!("huge pages cannot be reserved");
    };
    let subject = waiting();
    for options in [&[][..], &["--compress=lz4"], &["--leave-running"]] {
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        stillframe.clear();
        stillframe.dump(subject.pid(), options).must();
        if options != ["--leave-running"] {
            tree::reap_orphans();
            stillframe.restore(&[]).must();
        }
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_restored(&stillframe, &before, &after, &format!("{options:?}"));
        assert_eq!(subject.ask("check"), "right", "{options:?}");
    }
    assert_eq!(subject.ask("write"), "right");
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn huge_pages_come_at_once_in_a_lazy_restore() {
    needs_root!();
    let stillframe = stillframe();
    let Ok(_pages) = HugePages::reserve(PAGES) else {
        skip!("huge pages cannot be reserved");
    };
    let subject = waiting();
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&["--lazy-pages"]).must();
    assert_eq!(subject.ask("check"), "right");
    assert_eq!(subject.ask("write"), "right");
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn huge_pages_of_a_live_dump_are_those_of_its_instant() {
    needs_root!();
    let stillframe = stillframe();
    let Ok(_pages) = HugePages::reserve(PAGES) else {
        skip!("huge pages cannot be reserved");
    };
    let subject = waiting();
    assert_eq!(subject.ask("write"), "right");
    stillframe.dump(subject.pid(), &["--live"]).must();
    assert_eq!(subject.ask("check"), "right");
    let pids = subject.tree();
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}
