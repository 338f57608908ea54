//! Rights of the dumper and of the restorer, limits of open files, process 1 of a pid namespace.
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use testkit::program::Program;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

#[test]
fn user_who_could_not_restore_does_not_kill() {
    needs_root!();
    needs_program!("setpriv");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer kills");
    }
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let folder = tempfile::tempdir().expect("a scratch folder");
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open).expect("it is this process's");
    let binary = folder.path().join("stillframe");
    std::fs::copy(stillframe.binary(), &binary).expect("it can be copied");
    let program = Program::new("setpriv")
        .args(user)
        .args(["sleep", "1000"])
        .spawn();
    wait_until("sleep", SOON, || {
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", program.pid()));
        comm.is_ok_and(|comm| comm == "sleep\n")
    });
    let dump = |options: &[&str]| {
        let pid = program.pid().to_string();
        let mut command = Command::new("setpriv");
        command
            .args(user)
            .arg(&binary)
            .args(["dump", "-t", &pid, "-D"]);
        command.arg(folder.path().join("image")).args(options);
        command.output().expect("it runs")
    };
    let output = dump(&[]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && told.contains("--unprivileged"),
        "{told}"
    );
    assert!(program.is_alive());
    for options in [&["--leave-running"][..], &["--unprivileged"]] {
        let output = dump(options);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?}: {told}");
    }
    wait_until("the end", SOON, || !program.is_alive());
}

/// Has nearly as many pipes as it may have files, and a child with some of them elsewhere.
const MANY: &str = r#"
import os, resource, sys
folder, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
kept = [os.pipe() for _ in range(count // 2)]
if os.fork() == 0:
    # The same, but for some that have each other's numbers.
    spare = os.dup(kept[0][0])
    os.dup2(kept[1][0], kept[0][0], inheritable=False)
    os.dup2(spare, kept[1][0])
    os.close(spare)
    kept[0], kept[1] = (kept[1][0], kept[0][1]), (kept[0][0], kept[1][1])
    folder += "/child"
    os.mkdir(folder)
os.mkfifo(folder + "/asked")
os.mkfifo(folder + "/answer")
os.mkdir(folder + "/ready")
def asked():
    file = os.open(folder + "/asked", os.O_RDONLY)
    os.read(file, 9)
    os.close(file)
while True:
    asked()
    for number, (_, writer) in enumerate(kept): os.write(writer, b"%d" % (number % 10))
    right = all(os.read(reader, 1) == b"%d" % (number % 10) for number, (reader, _) in enumerate(kept))
    inherited = [os.get_inheritable(kept[at][0]) for at in (0, 1)]
    file = os.open(folder + "/answer", os.O_WRONLY)
    os.write(file, f"{'right' if right else 'WRONG'} {inherited}".encode())
    os.close(file)
"#;

#[test]
fn tree_that_nearly_uses_up_its_limit_of_open_files_comes_back_under_it() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a higher limit");
    }
    // With three more, all but one.
    for count in [900, 996] {
        comes_back_under_its_limit(count);
    }
}

fn comes_back_under_its_limit(count: u64) {
    const LIMIT: u64 = 1000;
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", MANY])
        .arg(folder.path())
        .args([&count.to_string(), &LIMIT.to_string()])
        .spawn();
    let child = folder.path().join("child");
    program.wait_file(&folder.path().join("ready"));
    program.wait_file(&child.join("ready"));
    let ask = |folder: &std::path::Path| {
        std::fs::write(folder.join("asked"), "x").expect("it reads");
        std::fs::read_to_string(folder.join("answer")).expect("it answers")
    };
    let before = [ask(folder.path()), ask(&child)];
    assert!(
        before.iter().all(|answer| answer.contains("right")),
        "{before:?}"
    );
    stillframe.dump(program.pid(), &[]).must();
    tree::reap_orphans();
    let restore = |limit: u64| {
        let command = stillframe.restore_command(&[]);
        let shell = format!("ulimit -n {limit}; exec \"$@\"");
        let mut shelled = Command::new("sh");
        shelled
            .args(["-c", &shell, "sh"])
            .arg(command.get_program());
        shelled
            .args(command.get_args())
            .stdin(std::process::Stdio::null());
        shelled.output().expect("it runs")
    };
    let output = restore(900);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.contains(&format!("task {} needs ", program.pid()))
            && told.contains("the limit is 900 (RLIMIT_NOFILE)")
            && !output.status.success(),
        "{told}"
    );
    let output = restore(LIMIT);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!([ask(folder.path()), ask(&child)], before);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", program.pid()));
    assert!(
        limits
            .expect("it lives")
            .contains("Max open files            1000")
    );
}

/// Four tasks, each with pipes of its own that are full of its data; one signals that it works.
const FOUR: &str = r#"
import os, resource, signal, sys, time
folder, count = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
for _ in range(3):
    if os.fork() == 0: break
kept = [os.pipe() for _ in range(count // 2)]
word = lambda number: b"%d %d" % (os.getpid(), number)
for number, (_, writer) in enumerate(kept): os.write(writer, word(number))
def check(*_):
    right = all(os.read(reader, len(word(number))) == word(number) for number, (reader, _) in enumerate(kept))
    for number, (_, writer) in enumerate(kept): os.write(writer, word(number))
    os.mkdir(f"{folder}/{'right' if right else 'WRONG'}-{os.getpid()}-{len(os.listdir(folder))}")
signal.signal(signal.SIGUSR1, check)
os.mkdir(f"{folder}/ready-{os.getpid()}")
while True: signal.pause()
"#;

#[test]
fn tasks_with_more_descriptors_together_than_a_restorer_may_have_come_back() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a higher limit");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", FOUR])
        .arg(folder.path())
        .arg("380")
        .spawn();
    let named = |name: &str| {
        let all = std::fs::read_dir(folder.path()).expect("it is there");
        let all = all.map(|entry| entry.expect("it is there").file_name());
        all.filter(|found| found.to_string_lossy().starts_with(name))
            .count()
    };
    wait_until("four tasks", SOON, || named("ready") == 4);
    for _ in 0..2 {
        let tasks = tree::members(program.pid());
        assert_eq!(tasks.len(), 4);
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        tree::reap_orphans();
        tree::wait_gone(&tasks);
        let command = stillframe.restore_command(&[]);
        let mut shelled = Command::new("sh");
        shelled
            .args(["-c", "ulimit -n 400; exec \"$@\"", "sh"])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(std::process::Stdio::null());
        let output = shelled.output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        let before = named("right");
        for task in &tasks {
            assert!(
                tree::signal(*task, rustix::process::Signal::USR1),
                "it lives"
            );
        }
        wait_until("four answers", SOON, || named("right") == before + 4);
        assert_eq!(named("WRONG"), 0);
    }
}

#[test]
fn process_1_of_a_pid_namespace_stays_with_the_tree() {
    needs_root!();
    needs_program!("unshare");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer ends, and the tree with it");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [ready, go] = ["ready", "go"].map(|name| folder.path().join(name));
    // The last task to end is a child of the root's.
    let text = "mkdir \"$1\"; while ! [ -e \"$2\" ]; do sleep 0.1; done; exit 7";
    let program = Program::new("sh")
        .args(["-c", text, "sh"])
        .args([&ready, &go])
        .spawn();
    program.wait_file(&ready);
    stillframe.dump(program.pid(), &[]).must();
    let restore = stillframe.restore_command(&[]);
    let mut command = Command::new("unshare");
    command
        .args(["-pf", "--mount-proc"])
        .arg(restore.get_program());
    command
        .args(restore.get_args())
        .stdin(std::process::Stdio::null());
    let mut restored = command.process_group(0).spawn().expect("it runs");
    // It runs for as long as the tree does.
    wait_until("the tree", SOON, || tree::members(restored.id()).len() > 2);
    assert!(restored.try_wait().expect("it can be asked").is_none());
    std::fs::write(&go, "").expect("the folder is writable");
    assert_eq!(restored.wait().expect("it ends").code(), Some(7));
}
