//! Stopped tasks, and stops that come while a tree is dumped or restored.
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;

use rustix::process::{Pid, Signal, kill_process};
use testkit::facts::Facts;
use testkit::program::Program;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{action_script, assert_cycles, assert_restored, assert_untouched, stillframe, ways};

/// What the parent of a stopped child knows of it.
#[track_caller]
fn check_child(subject: &Subject, arguments: &[&str]) {
    let unseen = arguments.contains(&"unseen");
    let signal = if arguments.contains(&"tstp") { 20 } else { 19 };
    // Who was traced stops again a moment after it was let go.
    wait_until("the child to be stopped", SOON, || {
        subject.ask("state") == "T"
    });
    // CLD_STOPPED
    let told = if unseen { "code 5" } else { "nothing" };
    assert_eq!(subject.ask("told"), told, "{arguments:?}");
    assert_eq!(subject.ask("told"), "nothing");
    let seen = format!("stopped by {signal}");
    let seen = if unseen { &seen } else { "nothing" };
    assert_eq!(subject.ask("poll"), seen, "{arguments:?}");
    assert_eq!(subject.ask("poll"), "nothing");
    assert_eq!(subject.ask("continue"), "Some(9) None");
}

const CHILDREN: [&[&str]; 4] = [&[], &["unseen"], &["tstp"], &["unseen", "tstp"]];

#[test]
fn a_parent_sees_the_stop_of_its_child_once() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer lets the parent see the stop again");
    }
    for arguments in CHILDREN {
        let subject = Subject::start("stopped", arguments);
        assert_cycles(&stillframe, 2, &subject, "a stopped child");
        check_child(&subject, arguments);
    }
}

const CONTINUED: [&[&str]; 3] = [
    &["continued"],
    &["continued", "taken"],
    &["unseen", "tstp", "continued", "taken"],
];

/// What the parent of a child knows of it that was continued.
#[track_caller]
fn check_continued(subject: &Subject, arguments: &[&str]) {
    let told = if arguments.contains(&"taken") {
        "nothing"
    } else {
        "code 6" // CLD_CONTINUED
    };
    assert_eq!(subject.ask("told"), told, "{arguments:?}");
    assert_eq!(subject.ask("poll"), "continued", "{arguments:?}");
    assert_eq!(subject.ask("poll"), "nothing", "{arguments:?}");
    assert_eq!(subject.ask("continue"), "Some(9) None");
}

#[test]
fn a_parent_sees_once_that_its_child_was_continued() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer forgets that a child was continued");
    }
    for arguments in CONTINUED {
        let subject = Subject::start("stopped", arguments);
        assert_cycles(&stillframe, 2, &subject, "a continued child");
        check_continued(&subject, arguments);
        let subject = Subject::start("stopped", arguments);
        ways::left_running(&stillframe, &subject, |_| ());
        check_continued(&subject, arguments);
        let subject = Subject::start("stopped", arguments);
        ways::over_pre_dump(&stillframe, &subject, |_| ());
        check_continued(&subject, arguments);
    }
}

#[test]
fn a_stopped_child_that_is_left_running_stays_stopped() {
    needs_root!();
    let stillframe = stillframe();
    for arguments in CHILDREN {
        let subject = Subject::start("stopped", arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        for _ in 0..2 {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["--leave-running"]).must();
        }
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_untouched(&before, &after, "a stopped child");
        check_child(&subject, arguments);
    }
}

fn send(subject: &Subject, signal: Signal) {
    let pid = i32::try_from(subject.pid()).expect("a pid");
    kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("it lives");
}

#[track_caller]
fn wait_stopped(subject: &Subject) {
    wait_until("the subject to be stopped", SOON, || {
        let threads = tree::threads(subject.pid());
        threads.iter().all(|tid| tree::state(*tid) == Some('T'))
    });
}

#[track_caller]
fn must_go_on(subject: &Subject) {
    let laps = subject.ask_number("laps");
    wait_until("laps", SOON, || subject.ask_number("laps") > laps + 10);
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn stopped_threads_go_on_when_they_are_told_to() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("threads-epoll", &["6"]);
    for _ in 0..3 {
        send(&subject, Signal::STOP);
        wait_stopped(&subject);
        let facts = Facts::moving(subject.pid());
        stillframe.cycle(1, &subject, &[]);
        wait_stopped(&subject);
        let restored = Facts::moving(subject.pid());
        assert_restored(&stillframe, &facts, &restored, "stopped threads");
        send(&subject, Signal::CONT);
        must_go_on(&subject);
    }
}

/// An action script that runs `commands` at one stage.
fn script(stillframe: &Stillframe, stage: &str, commands: &str) -> String {
    let folder = stillframe.images().parent().expect("its scratch folder");
    let only = format!("[ $CRTOOLS_SCRIPT_ACTION = {stage} ] || exit 0");
    action_script(
        folder,
        &format!("{only}\npid=$CRTOOLS_INIT_PID\n{commands}"),
    )
}

#[test]
fn a_stop_during_a_restore_takes_effect() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer's scripts run when the tasks are stopped in another way");
    }
    let subject = Subject::start("threads-epoll", &["6"]);
    for stage in ["post-restore", "pre-resume"] {
        for (commands, stops) in [
            ("kill -STOP $pid", true),
            ("kill -STOP $pid; kill -CONT $pid", false),
            ("kill -STOP $pid; kill -CONT $pid; kill -STOP $pid", true),
        ] {
            stillframe.clear();
            stillframe.dump(subject.pid(), &[]).must();
            let script = script(&stillframe, stage, commands);
            stillframe.restore(&["--action-script", &script]).must();
            if stops {
                wait_stopped(&subject);
                send(&subject, Signal::CONT);
            }
            must_go_on(&subject);
        }
    }
}

#[test]
fn a_stop_during_a_dump_takes_effect() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("threads-epoll", &["6"]);
    for (commands, stops) in [
        ("kill -STOP $pid", true),
        ("kill -STOP $pid; kill -CONT $pid", false),
    ] {
        stillframe.clear();
        let script = script(&stillframe, "post-dump", commands);
        let options = ["--leave-running", "--action-script", &script];
        stillframe.dump(subject.pid(), &options).must();
        if stops {
            wait_stopped(&subject);
            send(&subject, Signal::CONT);
        }
        must_go_on(&subject);
    }
}

/// Twelve tasks that never wait, of low priority, on one processor: each takes a while to stop.
const BUSY_TASKS: &str = r#"
import os, sys
os.nice(19)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(11):
    if os.fork() == 0:
        break
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
while True:
    pass
"#;

#[test]
fn every_thread_is_stopped_when_the_dump_says_so() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer says nothing of it");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", BUSY_TASKS])
        .arg(folder.path())
        .spawn();
    wait_until("twelve tasks", SOON, || {
        fs::read_dir(folder.path()).expect("it is there").count() == 12
    });
    let pids = program.tree();
    let stats = pids
        .iter()
        .map(|pid| fs::File::open(format!("/proc/{pid}/stat")));
    let stats = stats
        .map(|stat| stat.expect("it lives"))
        .collect::<Vec<_>>();
    for round in 0..12 {
        stillframe.clear();
        let options = ["--leave-stopped", "--status-fd", "9"];
        let dump = stillframe.dump_command(program.pid(), &options);
        let mut dump = crate::telling_status(&dump).spawn().expect("it starts");
        let mut done = [1];
        let told = dump.stdout.as_mut().expect("piped").read_exact(&mut done);
        let running = stats.iter().filter(|stat| {
            let mut text = [0; 128];
            let read = stat.read_at(&mut text, 0).expect("it lives");
            let text = String::from_utf8_lossy(&text[..read]).into_owned();
            !text
                .rsplit(')')
                .next()
                .is_some_and(|rest| rest.starts_with(" T"))
        });
        assert_eq!((running.count(), done), (0, [0]), "round {round}");
        told.expect("it is done");
        assert!(dump.wait().expect("a child").success());
        for pid in &pids {
            tree::signal(*pid, Signal::CONT);
        }
    }
}
