//! Saves and rounds beside a guest that writes all the time, and notices nothing.

use super::*;

/// MiB that the guest writes over and over.
const WRITTEN: u64 = 60;

/// A machine of the base that writes.
fn writing(folder: &Path, name: &str) -> (Machines, Line) {
    let (machine, mut line) = restored(folder, &base().folder.join("image"), name);
    assert_eq!(line.ask(&format!("write {WRITTEN}")), "writing");
    passes(&mut line);
    (machine, line)
}

/// Waits until the guest has written everything again, and looks that every page was as the pass
/// before has left it.
#[track_caller]
pub(super) fn passes(line: &mut Line) {
    let mut written = || {
        let told = line.ask("written");
        let (passes, wrong) = told.split_once(' ').expect("two numbers");
        assert_eq!(wrong, "0", "pages that are of two instants");
        passes.parse::<u64>().expect("a number")
    };
    let before = written();
    wait_until("two passes", SOON, || written() >= before + 2);
}

/// Saves the machine that listens at `socket`, by words behind `vm`.
#[track_caller]
pub(super) fn saved(folder: &Path, socket: &str, words: &[&str]) -> Value {
    let told = run(folder, &[&["vm"], words, &["--qmp", socket]].concat());
    let told = told.as_object().expect("an object").values().next();
    told.expect("what was saved").clone()
}

pub(super) fn number(told: &Value, name: &str) -> u64 {
    told[name].as_u64().expect("a number")
}

/// Starts an image, and looks that it is of one instant.
#[track_caller]
fn check(folder: &Path, image: &str, name: &str) -> (Machines, Line) {
    let (machine, mut line) = restored(folder, &folder.join(image), name);
    passes(&mut line);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    (machine, line)
}

#[test]
fn a_live_save_is_of_one_instant() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, mut line) = writing(folder, "live");
    let socket = machine.qmp(0);
    assert_eq!(line.ask("note before"), "noted");
    let whole = saved(folder, socket, &["save", "--live", "-R", "-D", "whole"]);
    assert!(
        number(&whole, "stored_pages") > (30 + WRITTEN) << 8,
        "{whole}"
    );
    assert_eq!(line.ask("note after"), "noted");
    let over = ["--prev-images-dir", "../whole"];
    let words = [&["save", "--live", "-R", "-D", "layer"][..], &over].concat();
    let layer = saved(folder, socket, &words);
    assert!(number(&layer, "parent_pages") > 30 << 8, "{layer}");
    passes(&mut line);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    assert_eq!(qmp(socket, "query-status")["status"], "running");
    for (image, noted) in [("layer", "after"), ("whole", "before")] {
        let (_machine, mut line) = check(folder, image, image);
        assert_eq!(line.ask("recall"), noted);
    }
    let told = fail(
        folder,
        &["vm", "save", "--live", "-D", "x", "--qmp", socket],
        2,
    );
    assert!(told.contains("--leave-running"), "{told}");
}

#[test]
fn rounds_leave_little_to_a_save() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, mut line) = restored(folder, &base().folder.join("image"), "rounds");
    let socket = machine.qmp(0);
    let first = saved(folder, socket, &["pre-save", "-D", "1"]);
    assert!(number(&first, "stored_pages") > 30 << 8, "{first}");
    assert_eq!(line.ask("fill more 5 8"), "filled");
    let over = |parent| ["--prev-images-dir", parent];
    let words = [&["pre-save", "-D", "2"][..], &over("../1")].concat();
    let second = saved(folder, socket, &words);
    let stored = number(&second, "stored_pages");
    assert!((8 << 8..20 << 8).contains(&stored), "{second}");
    let told = fail(folder, &["vm", "restore", "-D", "2", "-o", "/dev/null"], 3);
    assert!(told.contains("round before a save"), "{told}");

    assert_eq!(line.ask("fill last 6 4"), "filled");
    // One that is over another image than the last round's has to be compared, and is as right.
    for (image, parent) in [("3", "../2"), ("4", "../3"), ("5", "../2")] {
        let words = [&["save", "-R", "-D", image][..], &over(parent)].concat();
        let told = saved(folder, socket, &words);
        assert!(number(&told, "stored_pages") < 20 << 8, "{told}");
        assert!(number(&told, "parent_pages") > 30 << 8, "{told}");
    }
    assert_eq!(line.ask("remove last"), "removed");
    for image in ["5", "3", "4"] {
        let (_machine, mut line) = restored(folder, &folder.join(image), image);
        for file in [FILE, "more 5 8", "last 6 4"] {
            assert_eq!(line.ask(&format!("check {file}")), "right", "{image}");
        }
    }
    // A live save ends the tracking, and the next round begins it anew.
    saved(folder, socket, &["save", "--live", "-R", "-D", "6"]);
    let words = [&["pre-save", "-D", "7"][..], &over("../6")].concat();
    saved(folder, socket, &words);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
}

#[test]
fn who_kills_live_saves_and_rounds_leaves_the_guest_running() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, mut line) = writing(folder, "live-shot-at");
    let socket = machine.qmp(0);
    let live = ["vm", "save", "--live", "-R", "-D", "live", "--qmp", socket];
    let round = ["vm", "pre-save", "-D", "round", "--qmp", socket];
    for words in [&live[..], &round] {
        let begun = Instant::now();
        run(folder, words);
        let whole = begun.elapsed();
        for at in 0..12 {
            let mut command = stillframe(folder, words);
            let mut child = command.stdout(Stdio::null()).spawn().expect("it starts");
            std::thread::sleep(whole * at / 11);
            let _ = child.kill();
            child.wait().expect("it ends");
            passes(&mut line);
        }
    }
    wait_until("the guest to be as it was", SOON, || {
        qmp(socket, "query-status")["status"] == "running"
    });
    let last = saved(folder, socket, &["save", "--live", "-R", "-D", "last"]);
    assert_eq!(number(&last, "pages"), u64::from(MIB) << 8);
    check(folder, "last", "last");
}

#[test]
fn a_machine_that_ends_while_it_is_saved_is_told_of() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, _line) = writing(folder, "ending");
    let socket = machine.qmp(0).to_owned();
    let words = [
        "vm",
        "save",
        "--live",
        "-R",
        "-D",
        "image",
        "-o",
        "/dev/null",
    ];
    let words = [&words[..], &["--qmp", &socket]].concat();
    let mut child = stillframe(folder, &words);
    let mut child = child.stderr(Stdio::null()).spawn().expect("it starts");
    // Its pages have no name before the seal.
    std::thread::sleep(Duration::from_millis(100));
    kill(machine.pid(0));
    let status = child.wait().expect("it ends");
    let is_whole = status.success();
    assert!(is_whole || status.code() == Some(4), "{status}");
    assert_eq!(folder.join("image/manifest.img").exists(), is_whole);
}
