//! What keeps a tree from being saved is told all at once, before anything is touched; a dry run
//! tells it without a dump.
use std::fs;
use std::path::Path;

use testkit::facts::Facts;
use testkit::program::{Program, Spawned};
use testkit::subject::Subject;
use testkit::{needs_program, needs_root};

use crate::{assert_untouched, stillframe};

/// A root with a file lock, a file of another process, a connection and a part of a ring of
/// asynchronous I/O, and a child in another namespace.
const MANY: &str = r#"
import ctypes, fcntl, os, signal, socket, sys, time
folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
IO_SETUP, CLONE_NEWUTS = 206, 0x04000000
locked = open(folder + "/locked", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
child = os.fork()
if child == 0:
    locked.close()
    for one in (listener, client, server):
        one.close()
    if libc.unshare(CLONE_NEWUTS):
        sys.exit(1)
    os.mkdir(folder + "/unshared")
    signal.pause()
rings = ctypes.c_ulong(0)
ringless = libc.syscall(IO_SETUP, 1000, ctypes.byref(rings))
ringless = ringless or libc.munmap(rings, ctypes.c_size_t(4096))
status = os.open("/proc/1/status", os.O_RDONLY)
while not os.path.exists(folder + "/unshared"):
    time.sleep(0.01)
os.mkdir(folder + ("/ringless" if ringless else "/ring"))
with open(folder + "/numbers", "w") as numbers:
    numbers.write(f"{locked.fileno()} {client.fileno()} {server.fileno()} {status} {child}")
os.mkdir(folder + "/ready")
signal.pause()
"#;

fn many(folder: &Path) -> Spawned {
    let program = Program::new("/usr/bin/python3")
        .args(["-c", MANY])
        .arg(folder)
        .spawn();
    program.wait_file(&folder.join("ready"));
    program
}

/// How much of its vDSO a task has to itself: something, once it was made to call anything.
fn own_vdso_kb(pid: u32) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it lives");
    let vdso = smaps.split("[vdso]").nth(1).expect("it has one");
    let line = vdso.lines().find(|line| line.starts_with("Private_Dirty:"));
    let kb = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    kb.expect("a number")
}

#[test]
fn all_obstacles_are_told_at_once() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer tells the first one");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = many(folder.path());
    let pid = program.pid();
    let numbers = fs::read_to_string(folder.path().join("numbers")).expect("it is ready");
    let numbers = numbers.split(' ').collect::<Vec<_>>();
    let child: u32 = numbers[4].parse().expect("a pid");
    let mut wanted = vec![
        (pid, format!("fd {} (/", numbers[0]), Some("--file-locks")),
        (
            pid,
            format!("fd {} (socket:", numbers[1]),
            Some("--tcp-established"),
        ),
        (
            pid,
            format!("fd {} (socket:", numbers[2]),
            Some("--tcp-established"),
        ),
        (pid, format!("fd {} (", numbers[3]), None),
        (child, "its own uts namespace".to_owned(), None),
    ];
    if folder.path().join("ring").exists() {
        wanted.push((pid, "mapping 0x".to_owned(), None));
    }
    let before = Facts::moving(pid);
    for options in [&["--json"][..], &["--json", "-R"], &["--json", "--dry-run"]] {
        let outcome = stillframe.dump(pid, options).must_fail();
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        assert!(!outcome.output.contains("fd -1"), "{}", outcome.output);
        let json = outcome.output.lines().find(|line| line.starts_with('{'));
        let told: serde_json::Value = json
            .and_then(|json| serde_json::from_str(json).ok())
            .unwrap_or_else(|| panic!("no JSON in {}", outcome.output));
        let obstacles = told["error"]["obstacles"].as_array().expect("a list");
        assert_eq!(obstacles.len(), wanted.len(), "{told:#}");
        for (pid, what, allow) in &wanted {
            let is_it = |one: &&serde_json::Value| {
                let told = one["what"].as_str().expect("text");
                one["pid"] == *pid && told.starts_with(what) && one["allow"].as_str() == *allow
            };
            assert!(
                obstacles.iter().any(|one| is_it(&one)),
                "{what} in {told:#}"
            );
        }
    }
    let outcome = stillframe.dump(pid, &[]).must_fail();
    for (pid, what, _) in &wanted {
        let line = format!("  pid {pid} (python3): {what}");
        assert!(
            outcome.output.contains(&line),
            "{line} in {}",
            outcome.output
        );
    }
    assert!(!stillframe.images().join("manifest.img").exists());
    assert_eq!(
        (own_vdso_kb(pid), own_vdso_kb(child)),
        (0, 0),
        "nobody was made to call anything"
    );
    assert_untouched(&before, &Facts::moving(pid), "refused");
}

/// A child in a network of its own, with sockets that nobody here can ask the kernel of.
const ELSEWHERE: &str = r#"
import ctypes, os, signal, socket, sys
folder = sys.argv[1]
if os.fork() == 0:
    if ctypes.CDLL(None).unshare(0x40000000):
        sys.exit(1)
    pair = socket.socketpair()
    listener = socket.create_server(("0.0.0.0", 0))
    os.mkdir(folder + "/ready")
    signal.pause()
signal.pause()
"#;

#[test]
fn a_network_of_its_own_is_named_before_its_sockets() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", ELSEWHERE])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let pid = program.pid();
    let before = Facts::moving(pid);
    let outcome = stillframe.dump(pid, &[]).must_fail();
    if !stillframe.is_peer() {
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        outcome.names(&["its own net namespace"]);
    }
    assert_untouched(&before, &Facts::moving(pid), "refused");
}

#[test]
fn who_was_dumped_has_a_page_of_its_vdso() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer works in another way");
    }
    let subject = Subject::start("busy", &["1"]);
    assert_eq!(own_vdso_kb(subject.pid()), 0);
    stillframe.dump(subject.pid(), &["-R"]).must();
    assert!(
        own_vdso_kb(subject.pid()) > 0,
        "it tells who was made to call something"
    );
}

#[test]
fn a_dry_run_saves_nothing_and_lets_the_target_run() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no dry run");
    }
    let subject = Subject::start("tree", &["4"]);
    let pid = subject.pid().to_string();
    let images = stillframe.images().to_str().expect("a plain path");
    for options in [&[][..], &["--live"], &["--leave-stopped"], &["--json"]] {
        let mut command = stillframe.command(&["dump", "--dry-run", "-t", &pid, "-D", images]);
        let output = command.args(options).output().expect("it starts");
        let said = String::from_utf8(output.stdout).expect("text");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?}: {said}{told}");
        let wanted = match options {
            ["--json"] => "\"dry_run\":true",
            _ => "nothing is in the way",
        };
        assert!(said.contains(wanted), "{said}");
        assert!(!stillframe.images().exists(), "{options:?}");
        assert_eq!(subject.ask("check"), "right");
    }
    // What it said is so.
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_dry_run_plans_the_restore() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no dry run");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = crate::unrestorable::child_of_no_signal(folder.path());
    let outcome = stillframe.dump(program.pid(), &["--dry-run"]).must_fail();
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    outcome.names(&["could not be restored"]);
}
