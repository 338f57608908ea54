//! Tasks with equal memory: it is stored once, and each gets a copy of its own back.
use std::fs;

use serde_json::Value;
use testkit::chance::Chance;
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
    let subject = Subject::start("equal-pages", &["3", &PAGES.to_string()]);
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

/// Dumps live and restores; gives the pages of the image by their fate.
#[track_caller]
fn live(stillframe: &Stillframe, subject: &Subject) -> Value {
    stillframe.clear();
    stillframe.dump(subject.pid(), &["--live"]).must();
    let pages = pages_of(stillframe);
    goes_on(subject);
    let tasks = subject.tree();
    subject.kill();
    tree::wait_gone(&tasks);
    stillframe.restore(&[]).must();
    goes_on(subject);
    pages
}

#[test]
fn equal_memory_is_stored_once_by_a_live_dump_too() {
    needs_root!();
    let subject = Subject::start("equal-pages", &["3", &PAGES.to_string()]);
    let stillframe = stillframe();
    let pages = live(&stillframe, &subject);
    assert!(pages["equal"].as_u64() >= Some(2 * PAGES), "{pages}");
    subject.ask("write 1 7");
    subject.ask("write 0 8");
    subject.ask("write 2 9");
    goes_on(&subject);
    let pages = live(&stillframe, &subject);
    assert!(pages["equal"].as_u64() < Some(PAGES), "{pages}");
}

#[test]
fn memory_that_is_equal_at_times_is_that_of_the_instant() {
    const PAGES: u64 = 512;
    const FILE_PAGES: u64 = 64;
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("changing-equal-pages", &["3", &PAGES.to_string()]);
    for _ in 0..3 {
        let pages = live(&stillframe, &subject);
        // What was written once is the same in all four.
        let least = 3 * (PAGES / 4 + FILE_PAGES);
        assert!(pages["equal"].as_u64() >= Some(least), "{pages}");
        // What always changes is not the same in any two, nor in any round.
        assert!(pages["stored"].as_u64() >= Some(4 * PAGES / 4), "{pages}");
    }
}

#[test]
fn a_killed_live_dump_leaves_a_whole_image_or_none() {
    const KILLS: usize = 10;
    needs_root!();
    let stillframe = stillframe();
    let mut chance = Chance::of("a_killed_live_dump_leaves_a_whole_image_or_none");
    let subject = Subject::start("changing-equal-pages", &["2", "1024"]);
    let whole = stillframe.dump(subject.pid(), &["--live"]).must().elapsed;
    for _ in 0..KILLS {
        stillframe.clear();
        let command = stillframe.dump_command(subject.pid(), &["--live"]);
        // Past its end, too.
        stillframe.kill_after(command, chance.time(whole + whole / 4));
        goes_on(&subject);
        if stillframe.images().join("manifest.img").exists() {
            let tasks = subject.tree();
            subject.kill();
            tree::wait_gone(&tasks);
            stillframe.restore(&[]).must();
            goes_on(&subject);
        }
    }
}

#[test]
fn equal_memory_takes_no_room_in_a_live_dump() {
    const PAGES: u64 = 2048;
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("equal-pages", &["3", &PAGES.to_string()]);
    let pages = live(&stillframe, &subject);
    assert!(pages["equal"].as_u64() >= Some(2 * PAGES), "{pages}");
    let files = fs::read_dir(stillframe.images()).expect("an image");
    let files = files.map(|file| file.expect("a file"));
    let files = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-"));
    let bytes = files.map(|file| file.metadata().expect("it is there").len());
    let in_files = bytes.sum::<u64>() / 4096;
    let stored = pages["stored"].as_u64().expect("a number");
    assert!(in_files < stored + PAGES, "{in_files}: {pages}");
}
