//! Processes that share their memory by clone(2), with or without their signal handlers,
//! descriptors and directories: one sees what another does, and nobody else.
use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use sys::kcmp::{self, Shared};
use sys::process::Process;
use testkit::chance::Chance;
use testkit::program::Program;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::kills::wait_for_cleanup;
use crate::{lazy, stillframe};

const SHAPES: [&str; 8] = [
    "child", "handlers", "files", "line", "threads", "copies", "siblings", "alone",
];
const CYCLES: usize = 3;

/// The command, unless that is the peer's.
macro_rules! stillframe_here {
    () => {{
        needs_root!();
        let stillframe = stillframe();
        if stillframe.is_peer() {
            testkit::skip!("it refuses memory that processes share");
        }
        stillframe
    }};
}

#[track_caller]
fn check(subject: &Subject, told: &str) {
    assert_eq!(subject.ask("check"), "right", "{told}");
}

#[test]
fn what_one_does_to_memory_is_seen_by_who_shares_it() {
    let stillframe = stillframe_here!();
    for shape in SHAPES {
        let subject = Subject::start("one-memory", &[shape]);
        check(&subject, shape);
        for cycle in 0..CYCLES {
            stillframe.dump(subject.pid(), &[]).must();
            let how: &[&str] = if cycle == 1 { &["--lazy-pages"] } else { &[] };
            stillframe.restore(how).must();
            check(&subject, &format!("{shape} {cycle}"));
            lazy::wait_all_has_come(&stillframe, &subject.tree());
            stillframe.clear();
        }
    }
}

#[test]
fn a_tree_with_one_memory_goes_on_beside_its_images() {
    let stillframe = stillframe_here!();
    for shape in SHAPES {
        for how in ["-R", "--live"] {
            let subject = Subject::start("one-memory", &[shape]);
            for cycle in 0..CYCLES {
                let told = format!("{shape} {how} {cycle}");
                stillframe.dump(subject.pid(), &[how]).must();
                check(&subject, &told);
                subject.kill();
                stillframe.restore(&[]).must();
                check(&subject, &told);
                stillframe.clear();
            }
        }
    }
}

#[test]
fn one_memory_is_saved_in_layers() {
    let stillframe = stillframe_here!();
    let folder = stillframe.images().parent().expect("a folder").to_owned();
    for shape in SHAPES {
        let subject = Subject::start("one-memory", &[shape]);
        for cycle in 0..CYCLES {
            let told = format!("{shape} {cycle}");
            let mut over = Vec::new();
            for layer in ["first", "second"] {
                stillframe.pre_dump(subject.pid(), &over).must();
                check(&subject, &told);
                fs::rename(stillframe.images(), folder.join(layer)).expect("it is free");
                over = match layer {
                    "first" => vec!["--prev-images-dir", "../first"],
                    _ => vec!["--prev-images-dir", "../second"],
                };
            }
            stillframe.dump(subject.pid(), &over).must();
            stillframe.restore(&[]).must();
            check(&subject, &told);
            stillframe.clear();
            for layer in ["first", "second"] {
                fs::remove_dir_all(folder.join(layer)).expect("it was made just now");
            }
        }
    }
}

/// The pids of a subject's processes and threads, by their numbers.
fn pids(subject: &Subject) -> Vec<u32> {
    let pids = subject.ask("pids");
    let pids = pids.split(' ').map(|pid| pid.parse().expect("a number"));
    pids.collect()
}

#[test]
fn the_end_of_one_leaves_the_memory_to_the_others() {
    let stillframe = stillframe_here!();
    for shape in ["child", "handlers", "files", "line"] {
        let subject = Subject::start("one-memory", &[shape]);
        let pids = pids(&subject);
        for number in (1..pids.len()).rev() {
            stillframe.dump(subject.pid(), &[]).must();
            stillframe.restore(&[]).must();
            let told = format!("{shape}, without {number}");
            subject.ask(&format!("end {number}"));
            wait_until(&told, SOON, || !tree::is_alive(pids[number]));
            check(&subject, &told);
            stillframe.clear();
        }
    }
}

#[test]
fn who_has_it_first_may_end_first() {
    let stillframe = stillframe_here!();
    let subject = Subject::start("one-memory", &["line"]);
    let pids = pids(&subject);
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&[]).must();
    let maps = |pid: u32| fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let before = maps(pids[3]);
    assert_eq!(before, maps(pids[0]));
    assert!(tree::signal(pids[0], Signal::KILL));
    wait_until("the end of the first", SOON, || !tree::is_alive(pids[0]));
    for pid in &pids[1..] {
        assert!(tree::is_alive(*pid), "{pid} of {pids:?}");
        assert_eq!(maps(*pid), before, "{pid} of {pids:?}");
    }
    assert!(tree::kill(&pids[1..]));
}

/// How often each is killed.
const KILLS: usize = 40;

fn longest(times: impl Iterator<Item = Duration>) -> Duration {
    times.max().expect("some")
}

#[test]
fn a_killed_dump_leaves_one_memory_to_all() {
    let stillframe = stillframe_here!();
    let mut chance = Chance::of("a_killed_dump_leaves_one_memory_to_all");
    for shape in ["files", "threads"] {
        let subject = Subject::start("one-memory", &[shape]);
        let dump = || {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["-R"]).must().elapsed
        };
        let longest = longest((0..3).map(|_| dump()));
        for round in 0..KILLS {
            stillframe.clear();
            let instant = chance.time(longest);
            let command = stillframe.dump_command(subject.pid(), &["-R"]);
            let ended = stillframe.kill_after(command, instant);
            let told = format!("{shape}, round {round}: {instant:?}, {ended:?}");
            wait_for_cleanup(&stillframe, &subject.tree(), &told);
            check(&subject, &told);
        }
    }
}

#[test]
fn a_killed_restore_leaves_all_who_share_memory_or_none() {
    let stillframe = stillframe_here!();
    let mut chance = Chance::of("a_killed_restore_leaves_all_who_share_memory_or_none");
    for shape in ["files", "threads"] {
        let subject = Subject::start("one-memory", &[shape]);
        let processes = subject.tree();
        let restore = |stillframe: &Stillframe| {
            stillframe.clear();
            stillframe.dump(subject.pid(), &[]).must();
            stillframe.restore(&[]).must().elapsed
        };
        let longest = longest((0..3).map(|_| restore(&stillframe)));
        for round in 0..KILLS {
            stillframe.clear();
            stillframe.dump(subject.pid(), &[]).must();
            let instant = chance.time(longest);
            let ended = stillframe.kill_after(stillframe.restore_command(&[]), instant);
            let told = format!("{shape}, round {round}: {instant:?}, {ended:?}");
            wait_for_cleanup(&stillframe, &processes, &told);
            let living = || processes.iter().filter(|pid| tree::is_alive(**pid)).count();
            // Who is being killed looks alive for a moment.
            wait_until(&format!("all or none: {told}"), SOON, || {
                processes.iter().for_each(|&pid| tree::reap(pid));
                [0, processes.len()].contains(&living())
            });
            if subject.try_ask("check").is_err() {
                tree::wait_gone(&processes);
                stillframe.restore(&[]).must();
            }
            check(&subject, &told);
        }
    }
}

/// A python program that makes a child by clone(2) with flags, which waits in libc's pause, and
/// writes its number before and, once more, after that to a file.
const CLONING: &str = r#"
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
flags, path = int(sys.argv[1], 0), sys.argv[2]
stack = mmap.mmap(-1, 1 << 20)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
SIGCHLD = 17
open(path, "w").close()
child = libc.clone(pause, ctypes.c_void_p(top), flags | SIGCHLD, None)
with open(path + ".made", "w") as made:
    print(child, file=made)
number = 0
while True:
    number += 1
    with open(path, "w") as out:
        print(number, file=out)
    time.sleep(0.01)
"#;

const VFORK: &str = "0x4100";

#[test]
fn a_program_goes_on_with_a_child_that_has_its_memory() {
    let stillframe = stillframe_here!();
    needs_program!("/usr/bin/python3");
    for flags in ["0x100", "0x900", "0xf00"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (out, made) = (folder.path().join("out"), folder.path().join("out.made"));
        let program = Program::new("/usr/bin/python3")
            .args(["-c", CLONING, flags])
            .arg(&out)
            .spawn();
        let number = || {
            let text = fs::read_to_string(&out).unwrap_or_default();
            text.trim().parse::<u64>().unwrap_or(0)
        };
        wait_until("its first numbers", SOON, || number() > 2);
        let child = fs::read_to_string(&made).expect("it is made");
        let child = child.trim().parse::<i32>().expect("a pid");
        for cycle in 0..CYCLES {
            stillframe.clear();
            stillframe.dump(program.pid(), &[]).must();
            stillframe.restore(&[]).must();
            let before = number();
            wait_until("more numbers", SOON, || number() > before);
            for (flag, what) in [(0x100, Shared::Memory), (0x800, Shared::Actions)] {
                let flags = i64::from_str_radix(&flags[2..], 16).expect("a number");
                let [one, other] = [program.pid().cast_signed(), child].map(Process::new);
                let shares = kcmp::compare(&one, &other, what);
                let shares = shares.expect("they live").is_eq();
                assert_eq!(shares, flags & flag != 0, "{cycle}: {what:?} of {flags:#x}");
            }
        }
    }
}

#[test]
fn who_waits_for_the_child_of_a_vfork_is_named() {
    let stillframe = stillframe_here!();
    needs_program!("/usr/bin/python3");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (out, made) = (folder.path().join("out"), folder.path().join("out.made"));
    let program = Program::new("/usr/bin/python3")
        .args(["-c", CLONING, VFORK])
        .arg(&out)
        .spawn();
    wait_until("its child", SOON, || program.tree().len() == 2);
    let child = program.tree()[1];
    let pid = program.pid().to_string();
    for how in [&["--timeout", "1"][..], &["--timeout", "1", "--live"]] {
        let refused = stillframe.dump(program.pid(), how).must_fail();
        refused.names(&[&pid]);
        assert!(program.tree().len() == 2 && !made.exists(), "{how:?}");
        stillframe.clear();
    }
    assert!(tree::signal(child, Signal::KILL));
    wait_until("it goes on", SOON, || made.exists());
    stillframe.dump(program.pid(), &[]).must();
    stillframe.restore(&[]).must();
}
