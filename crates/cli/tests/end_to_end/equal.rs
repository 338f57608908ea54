//! Tasks with equal memory: it is stored once, and each gets a copy of its own back.
use serde_json::Value;
use testkit::needs_root;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

use crate::stillframe;

/// The pages of each child, more than are moved at once.
const PAGES: u64 = 300;

/// Insists that every child has looked at its pages and found them right.
#[track_caller]
fn goes_on(subject: &Subject) {
    let now = subject.ask_number("rounds");
    wait_until("the children to go on", SOON, || {
        subject.ask_number("rounds") > now + 1
    });
    assert_eq!(subject.ask("check"), "right");
}

pub(crate) fn pages_of(stillframe: &Stillframe) -> Value {
    let mut show = stillframe.command(&["show", "--json"]);
    let shown = show.arg(stillframe.images()).output().expect("it starts");
    let mut image: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    image["pages"].take()
}

#[test]
fn equal_memory_of_children_is_stored_once_and_is_their_own_again() {
    needs_root!();
    let subject = Subject::start("twins", &["3", &PAGES.to_string()]);
    let (stillframe, tasks) = (stillframe(), subject.tree());
    stillframe.dump(subject.pid(), &[]).must();
    let pages = pages_of(&stillframe);
    let equal = pages["equal"].as_u64().expect("a number");
    assert!(equal >= 2 * PAGES, "{pages}");
    tree::wait_gone(&tasks);
    stillframe.restore(&[]).must();
    goes_on(&subject);
    // What one writes, no other sees.
    subject.ask("write 1 7");
    goes_on(&subject);
    subject.ask("write 0 8");
    subject.ask("write 2 9");
    goes_on(&subject);
    // They differ now.
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    tree::wait_gone(&tasks);
    let pages = pages_of(&stillframe);
    assert!(pages["equal"].as_u64() < Some(PAGES), "{pages}");
    stillframe.restore(&[]).must();
    goes_on(&subject);
}
