//! Trees in pid namespaces of their own: `restore --new-pid-ns`, and what is dumped of them.
use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use testkit::chance::Chance;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Stillframe; where the peer is tested, which has no such option, the test is skipped, and also
/// where there is nobody to dump.
macro_rules! ours {
    () => {{
        needs_root!();
        needs_program!("python3");
        needs_program!("unshare");
        let stillframe = stillframe();
        if stillframe.is_peer() {
            testkit::skip!("the peer has no such option");
        }
        stillframe
    }};
}

/// A process with a thread and a child. Each writes what it knows of its numbers to a file of its
/// own, over and over.
const NUMBERS: &str = r#"
import os, sys, threading, time
folder = sys.argv[1]
def tell(name):
    while True:
        pid, status = os.getpid(), open(f"/proc/{os.getpid()}/status").read()
        command = open(f"/proc/{pid}/cmdline").read().split("\0")[-2]
        seen = os.readlink("/proc/self"), command, status.split("NSpid:")[1].split("\n")[0].split()[-1]
        parent = os.getppid() if name == "child" else 0
        text = f"{pid} {parent} {os.getsid(0)} {os.getpgid(0)} {threading.get_native_id()} {seen}"
        with open(f"{folder}/{name}.new", "w") as file:
            file.write(text + "\n")
        try:
            os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
        except FileNotFoundError:
            pass # Another copy of this tree was faster.
        time.sleep(0.01)
if os.fork() == 0:
    tell("child")
threading.Thread(target=tell, args=("thread",), daemon=True).start()
tell("root")
"#;

const WRITERS: [&str; 3] = ["root", "thread", "child"];

/// The program, and its folder.
fn numbers() -> (Spawned, tempfile::TempDir) {
    numbers_by(Program::new("python3"))
}

fn numbers_by(program: Program) -> (Spawned, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = program.args(["-c", NUMBERS]).arg(folder.path()).spawn();
    WRITERS
        .iter()
        .for_each(|name| program.wait_file(&folder.path().join(name)));
    (program, folder)
}

/// The same as process 1 of a pid namespace, and its root by its number outside. Who has made the
/// namespace ends with it.
fn numbers_from_1() -> (Spawned, tempfile::TempDir, u32) {
    let unshare = ["--pid", "--fork", "--mount-proc", "setsid", "python3"];
    let (program, folder) = numbers_by(Program::new("unshare").args(unshare));
    let root = tree::children(program.pid())[0];
    assert_eq!(numbers_of(root), [root, 1]);
    (program, folder, root)
}

/// The processes in whose file `name` of /proc this text stands.
fn with_text(name: &str, text: &str) -> impl Iterator<Item = u32> {
    let has_text = move |pid: &u32| {
        let read = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&read).contains(text)
    };
    let all = fs::read_dir("/proc").expect("it is there").flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    all.filter(has_text)
}

/// Waits until nothing is left of a killed command: in the namespace as well, where process 1 takes
/// in its helpers.
#[track_caller]
fn wait_for_helpers(stillframe: &Stillframe) {
    let mark = format!("TESTKIT_MARK={}", stillframe.mark());
    wait_until("nothing to be left of the command", SOON, || {
        with_text("environ", &mark).next().is_none()
    });
}

/// The processes that write to this folder and are process 1 of a namespace.
fn firsts(folder: &Path) -> Vec<u32> {
    let writers = with_text("cmdline", folder.to_str().expect("text"));
    let firsts = writers.filter(|pid| numbers_of(*pid).get(1) == Some(&1));
    firsts
        .filter(|pid| !sys::ending::is_ending(pid.cast_signed()))
        .collect()
}

/// Kills process 1 of a namespace, and all in there with it.
#[track_caller]
fn end_first(root: u32) {
    assert!(tree::signal(root, Signal::KILL));
    wait_for_first(root);
}

/// Waits for the end of process 1 of a namespace, which stays until all in there are reaped: the
/// copy of a killed command is an orphan, and so a child of this process.
#[track_caller]
fn wait_for_first(root: u32) {
    wait_until("the end of the namespace", SOON, || {
        let ended = tree::children(std::process::id()).into_iter();
        let ended = ended.filter(|pid| !tree::is_alive(*pid) && numbers_of(*pid).len() > 1);
        ended.for_each(tree::reap);
        !tree::is_alive(root)
    });
}

/// The next text of each writer.
#[track_caller]
fn written(folder: &Path) -> [String; 3] {
    WRITERS.map(|name| {
        let path = folder.join(name);
        // It may be left of others.
        let _ = fs::remove_file(&path);
        wait_for(name, SOON, || fs::read_to_string(&path).ok())
    })
}

/// Restores the tree; the number of its root outside.
#[track_caller]
fn restore(stillframe: &Stillframe, options: &[&str]) -> u32 {
    let options = [&["--restore-detached", "--json"], options].concat();
    let restored = stillframe.restore(&options).must();
    let json: serde_json::Value = serde_json::from_str(restored.output.trim()).expect("JSON");
    let root = json["restore"]["root"].as_u64().expect("a number");
    u32::try_from(root).expect("a pid")
}

/// The numbers of a process in all pid namespaces, from ours inwards.
fn numbers_of(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let words = line.unwrap_or_default().split_whitespace();
    words.map(|word| word.parse().expect("a number")).collect()
}

/// Kills the tree of `root`, whose namespace ends then.
#[track_caller]
fn end(root: u32) {
    let init = tree::parent(root).expect("it is a child of process 1 there");
    assert_eq!(numbers_of(init)[1..], [1]);
    assert!(tree::signal(root, Signal::KILL));
    wait_until("the end of the namespace", SOON, || {
        // Its children become those of process 1.
        for child in tree::children(init) {
            tree::signal(child, Signal::KILL);
        }
        !tree::is_alive(init)
    });
}

#[test]
fn trees_have_the_same_numbers_in_three_namespaces_at_once() {
    let stillframe = ours!();
    let (program, folder) = numbers();
    let (pid, child) = (program.pid(), tree::children(program.pid())[0]);
    let before = written(folder.path());
    stillframe.dump(pid, &[]).must();
    let pidfile = folder.path().join("root.pid");
    let pidfile = pidfile.to_str().expect("a path is text");
    let first = restore(&stillframe, &["--new-pid-ns", "--pidfile", pidfile]);
    let told = fs::read_to_string(pidfile).expect("it is written");
    assert_eq!(told, first.to_string());
    let others = [(); 2].map(|()| restore(&stillframe, &["--new-pid-ns"]));
    for root in others.into_iter().chain([first]) {
        assert_eq!(numbers_of(root), [root, pid]);
        assert_eq!(numbers_of(tree::children(root)[0])[1..], [child]);
    }
    others.into_iter().for_each(end);
    assert_eq!(written(folder.path()), before);
    end(first);
}

#[test]
fn tree_in_a_namespace_goes_through_all_dumps_and_comes_back_in_one() {
    let stillframe = ours!();
    let (program, folder) = numbers();
    let (pid, before) = (program.pid(), written(folder.path()));
    stillframe.dump(pid, &[]).must();
    let mut root = restore(&stillframe, &["--new-pid-ns"]);
    for round in 0..3 {
        stillframe.clear();
        stillframe.dump(root, &["--live"]).must();
        stillframe.clear();
        let tried = stillframe.dump_command(root, &["--dry-run"]).status();
        assert!(tried.expect("it runs").success());
        stillframe.dump(root, &["--leave-running"]).must();
        assert_eq!(written(folder.path()), before, "round {round}");
        stillframe.clear();
        stillframe.dump(root, &[]).must();
        wait_until("the end of the tree", SOON, || !tree::is_alive(root));
        // Without the option.
        root = restore(&stillframe, &[]);
        assert_eq!(numbers_of(root), [root, pid]);
        assert_eq!(written(folder.path()), before, "round {round}");
    }
    end(root);
}

#[test]
fn rounds_of_a_tree_in_a_namespace_follow_each_other() {
    let stillframe = ours!();
    let (program, folder) = numbers();
    let (pid, before) = (program.pid(), written(folder.path()));
    stillframe.dump(pid, &[]).must();
    let root = restore(&stillframe, &["--new-pid-ns"]);
    let rounds = Stillframe::new(stillframe.binary()).images_at(folder.path().join("1"));
    rounds.pre_dump(root, &[]).must();
    let last = Stillframe::new(stillframe.binary()).images_at(folder.path().join("2"));
    last.dump(root, &["--prev-images-dir", "../1"]).must();
    let root = restore(&last, &[]);
    assert_eq!(written(folder.path()), before);
    end(root);
}

#[test]
fn restorer_that_waits_ends_with_the_tree() {
    let stillframe = ours!();
    let (program, folder) = numbers();
    stillframe.dump(program.pid(), &[]).must();
    let pidfile = folder.path().join("root.pid");
    let images = stillframe.images().to_str().expect("text");
    let pidfile_option = pidfile.to_str().expect("text");
    let options = [
        "restore",
        "-D",
        images,
        "--new-pid-ns",
        "--pidfile",
        pidfile_option,
    ];
    let mut restorer = stillframe.command(&options).spawn().expect("it runs");
    let root = wait_for("the pidfile", SOON, || {
        fs::read_to_string(&pidfile).ok()?.parse::<u32>().ok()
    });
    written(folder.path());
    assert!(restorer.try_wait().expect("a child").is_none());
    end(root);
    assert!(restorer.wait().expect("a child").success());
}

#[test]
fn killed_restore_leaves_a_whole_tree_or_nothing() {
    let stillframe = ours!();
    let (program, folder) = numbers();
    stillframe.dump(program.pid(), &[]).must();
    let mut chance = Chance::of("killed_restore_leaves_a_whole_tree_or_nothing");
    for _ in 0..20 {
        let command = stillframe.restore_command(&["--new-pid-ns", "--restore-detached"]);
        stillframe.kill_after(command, Duration::from_micros(chance.below(60_000)));
        // The first process of the namespace is one of them as long as the tree lives.
        let runs = || {
            let helpers = stillframe.helpers();
            let named = helpers.iter().find(|pid| {
                fs::read_to_string(format!("/proc/{pid}/comm"))
                    .is_ok_and(|name| name == "stillframe-init\n")
            });
            match named {
                Some(init) => Some(Some(*init)),
                None => helpers.is_empty().then_some(None),
            }
        };
        if let Some(init) = wait_for("a tree or nothing", SOON, runs) {
            written(folder.path());
            let roots = tree::children(init);
            assert_eq!(roots.len(), 1, "{roots:?}");
            end(roots[0]);
        }
        wait_until("nothing to be left", SOON, || {
            stillframe.helpers().is_empty()
        });
    }
}

#[test]
fn options_about_processes_outside_are_refused() {
    let stillframe = ours!();
    let program = Program::new("sleep").arg("1000").spawn();
    stillframe.dump(program.pid(), &["--leave-running"]).must();
    for option in ["--shell-job", "--lazy-pages", "--leave-stopped"] {
        let refused = stillframe.restore(&["--new-pid-ns", "--restore-detached", option]);
        let why = format!("a tree with namespaces of its own goes without {option}");
        refused.must_fail().names(&[&why]);
    }
}

#[test]
fn tree_of_process_1_goes_through_all_dumps() {
    let stillframe = ours!();
    let (_maker, folder, mut root) = numbers_from_1();
    let before = written(folder.path());
    for round in 0..3 {
        stillframe.clear();
        stillframe.dump(root, &["--live"]).must();
        stillframe.clear();
        stillframe.dump(root, &["--leave-running"]).must();
        assert_eq!(written(folder.path()), before, "round {round}");
        let refused = stillframe.pre_dump(root, &[]);
        refused
            .must_fail()
            .names(&["process 1 of its pid namespace"]);
        stillframe.clear();
        stillframe.dump(root, &[]).must();
        assert!(!tree::is_alive(root), "the dump waits for its end");
        root = restore(&stillframe, &[]);
        assert_eq!(numbers_of(root), [root, 1]);
        assert_eq!(numbers_of(tree::children(root)[0])[1..], [2]);
        assert_eq!(written(folder.path()), before, "round {round}");
    }
    end_first(root);
}

#[test]
fn trees_of_process_1_run_side_by_side() {
    let stillframe = ours!();
    let (_maker, folder, root) = numbers_from_1();
    let before = written(folder.path());
    stillframe.dump(root, &[]).must();
    let roots = [(); 3].map(|()| restore(&stillframe, &[]));
    for root in roots {
        assert_eq!(numbers_of(root), [root, 1]);
    }
    for root in &roots[1..] {
        end_first(*root);
    }
    assert_eq!(written(folder.path()), before);
    // The restorer is not among them.
    let in_it = numbers_of(roots[0]);
    assert_eq!(firsts(folder.path()), in_it[..1]);
    end_first(roots[0]);
}

#[test]
fn restorer_that_waits_ends_with_process_1() {
    let stillframe = ours!();
    let (_maker, folder, root) = numbers_from_1();
    stillframe.dump(root, &[]).must();
    let mut restorer = stillframe.command(&["restore", "-D"]);
    let restorer = restorer.arg(stillframe.images()).spawn();
    let (mut restorer, path) = (restorer.expect("it runs"), folder.path());
    let root = wait_for("a tree", SOON, || firsts(path).first().copied());
    written(path);
    assert!(restorer.try_wait().expect("a child").is_none());
    assert_eq!(tree::parent(root), Some(restorer.id()));
    end_first(root);
    assert!(restorer.wait().expect("a child").success());
}

#[test]
fn killed_dump_of_process_1_leaves_the_tree_or_an_image() {
    let stillframe = ours!();
    let mut chance = Chance::of("killed_dump_of_process_1_leaves_the_tree_or_an_image");
    for _ in 0..15 {
        stillframe.clear();
        let (_maker, folder, root) = numbers_from_1();
        let command = stillframe.dump_command(root, &[]);
        stillframe.kill_after(command, Duration::from_micros(chance.below(60_000)));
        wait_for_helpers(&stillframe);
        let mut check = stillframe.command(&["show", "-D"]);
        let is_whole = check.arg(stillframe.images()).output();
        let root = match is_whole.expect("it runs").status.success() {
            false => root,
            true => {
                wait_for_first(root);
                restore(&stillframe, &[])
            }
        };
        written(folder.path());
        end_first(root);
    }
}

#[test]
fn killed_restore_of_process_1_leaves_a_whole_tree_or_nothing() {
    let stillframe = ours!();
    let (_maker, folder, root) = numbers_from_1();
    stillframe.dump(root, &[]).must();
    let mut chance = Chance::of("killed_restore_of_process_1_leaves_a_whole_tree_or_nothing");
    for _ in 0..20 {
        let command = stillframe.restore_command(&[]);
        stillframe.kill_after(command, Duration::from_micros(chance.below(60_000)));
        wait_for_helpers(&stillframe);
        if let Some(root) = firsts(folder.path()).first() {
            written(folder.path());
            end_first(*root);
        }
        assert_eq!(firsts(folder.path()), [0; 0]);
    }
}
