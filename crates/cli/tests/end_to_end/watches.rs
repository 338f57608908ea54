//! tail(1), which follows a file by watching it.
use std::fs::File;
use std::io::Write;

use testkit::program::Program;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

#[test]
fn a_log_is_followed_on() {
    needs_root!();
    needs_program!("tail");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not find the path of every watch");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (log, shown) = (folder.path().join("log"), folder.path().join("shown"));
    let mut writer = File::create(&log).expect("a new file");
    writer.write_all(b"first\n").expect("room");
    let tail = Program::new("tail")
        .arg("-f")
        .arg(&log)
        .output(&shown)
        .spawn();
    let mut text = "first\n".to_owned();
    for line in ["second\n", "third\n", "fourth\n"] {
        wait_until("the line to be shown", SOON, || {
            std::fs::read_to_string(&shown).is_ok_and(|shown| shown == text)
        });
        // Once it waits it has read all events.
        wait_until("it to wait", SOON, || tree::is_waiting(tail.pid()));
        stillframe.cycle(1, &tail, &[]);
        text += line;
        writer.write_all(line.as_bytes()).expect("room");
    }
    wait_until("the last line to be shown", SOON, || {
        std::fs::read_to_string(&shown).is_ok_and(|shown| shown == text)
    });
    let maps = std::fs::read_dir(format!("/proc/{}/fdinfo", tail.pid())).expect("it lives");
    let watches = maps.filter(|entry| {
        let path = entry.as_ref().expect("an entry").path();
        std::fs::read_to_string(path).is_ok_and(|text| text.contains("inotify wd:1 "))
    });
    assert_eq!(
        watches.count(),
        1,
        "it does not watch, or as another number"
    );
}
