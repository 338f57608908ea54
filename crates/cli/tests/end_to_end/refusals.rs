//! What cannot be done is refused by name, and leaves the world as it was.
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::program::{Program, free_port};
use testkit::subject::Subject;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{assert_untouched, refusing_script, stillframe};

#[test]
fn an_unsupported_descriptor_is_named_and_the_target_unharmed() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("refused", &["io_uring"]);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    let before = Facts::still(subject.pid());
    let pid = subject.pid().to_string();
    let outcome = stillframe.dump(subject.pid(), &[]).must_fail();
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    assert_untouched(&before, &Facts::still(subject.pid()), "refused");
    let outcome = outcome.names(&[&pid]);
    assert_eq!(subject.ask("count"), "1");
    if !stillframe.is_peer() {
        let fd = format!("fd {}", subject.ask("fd"));
        let outcome = outcome.names(&["io_uring", &fd]);
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    }
    stillframe.restore(&[]).must_fail();
}

#[test]
fn a_process_that_is_not_there_is_named() {
    needs_root!();
    let gone = {
        let program = Program::new("true").spawn();
        program.pid()
    };
    let outcome = stillframe().dump(gone, &[]).must_fail();
    outcome.names(&[&gone.to_string()]);
}

#[test]
fn a_process_that_has_ended_is_named_though_nobody_waited_for_it() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no --live");
    }
    let mut ended = Command::new("true").spawn().expect("it starts");
    let pid = ended.id();
    wait_until("it to end", SOON, || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.expect("it is a zombie").contains(") Z ")
    });
    for options in [&[][..], &["--leave-running"], &["--live"]] {
        let outcome = stillframe.dump(pid, options).must_fail();
        let outcome = outcome.names(&[&pid.to_string(), "has ended"]);
        assert_eq!(outcome.status.code(), Some(4), "{}", outcome.told());
        stillframe.restore(&[]).must_fail();
    }
    ended.wait().expect("it is ours");
}

#[test]
fn an_image_that_is_not_there_is_refused() {
    needs_root!();
    let stillframe = stillframe();
    fs::create_dir_all(stillframe.images()).expect("the folder can be made");
    stillframe.restore(&[]).must_fail();
}

#[test]
fn a_pid_that_is_taken_is_named_and_nothing_is_restored() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("sessions", &["plain"]);
    let pids = subject.tree();
    let ids = subject.ask("ids");
    let leader = ids
        .split(", ")
        .find_map(|role| role.strip_prefix("leader "));
    let leader = leader.and_then(|words| words.split(' ').next()?.parse().ok());
    let taken: u32 = leader.expect("one of them leads a session");
    stillframe.dump(subject.pid(), &[]).must();
    // All are taken: by the tree as it was restored once already.
    stillframe.restore(&[]).must();
    let outcome = stillframe.restore(&[]).must_fail();
    outcome.names(&[&pids[0].to_string()]);
    assert_eq!(subject.tree(), pids);
    assert_eq!(subject.ask("ids"), ids);
    // One in the middle is taken, by a process that has nothing to do with the others any more.
    let others: Vec<u32> = pids.iter().copied().filter(|&pid| pid != taken).collect();
    for &pid in &others {
        tree::signal(pid, rustix::process::Signal::KILL);
    }
    tree::wait_gone(&others);
    let outcome = stillframe.restore(&[]).must_fail();
    outcome.names(&[&taken.to_string()]);
    assert!(tree::is_alive(taken));
    tree::wait_gone(&others);
    assert!(tree::kill(&[taken]));
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("ids"), ids);
}

#[test]
fn a_session_that_somebody_is_still_in_is_named() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    let mut program = Program::new("sh").args(["-c", "sleep 1000 & wait"]).spawn();
    wait_until("the child", SOON, || program.tree().len() == 2);
    let tree = program.tree();
    let (root, orphan) = (tree[0], tree[1]);
    program.adopt(&[orphan]);
    stillframe.dump(root, &["--leave-running"]).must();
    tree::signal(root, rustix::process::Signal::KILL);
    tree::wait_gone(&[root]);
    let restore = stillframe
        .restore_command(&[])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn();
    let mut restore = restore.expect("the command can be started");
    let ended = try_wait_for(SOON, || {
        restore.try_wait().expect("a child can be waited for")
    });
    if ended.is_none() {
        let _ = restore.kill();
        let _ = restore.wait();
        panic!("the restore waits for ever");
    }
    let outcome = stillframe.restore(&[]).must_fail();
    let outcome = outcome.names(&[&root.to_string()]);
    if !stillframe.is_peer() {
        let member = format!("taken by the session of process {orphan} (sleep)");
        outcome.names(&[&member]);
    }
    assert!(tree::is_alive(orphan) && !tree::exists(root));
    // One that ends meanwhile is waited for.
    tree::signal(orphan, rustix::process::Signal::KILL);
    tree::wait_gone(&[orphan]);
    stillframe.restore(&[]).must();
    assert_eq!(program.tree(), tree);
}

/// Dumps a tree, has the number of its last task be taken by one that has ended, and frees it when
/// a restore has tried once. Like a busy init, this asks nobody else how it ended.
const FIRST_TRY: &str = r"
import ctypes, os, subprocess, sys, time
stillframe, images = sys.argv[1:]
ctypes.CDLL(None).prctl(36, 1)
script = 'for i in 1 2 3 4; do sleep 1000 & done; setsid sleep 1000 & wait'
root = subprocess.Popen(['sh', '-c', script], start_new_session=True)
until = time.monotonic() + 30
def wait(what):
    while not what():
        if time.monotonic() > until:
            sys.exit('waited in vain')
        time.sleep(0.001)
def children():
    with open(f'/proc/{root.pid}/task/{root.pid}/children') as file:
        return sorted(map(int, file.read().split()))
def alone(pid):
    return os.getsid(pid) == pid
wait(lambda: len(children()) == 5 and any(map(alone, children())))
tree = children()
last = next(filter(alone, tree))
others = [root.pid] + [pid for pid in tree if pid != last]
log = ['-D', images, '-v4']
subprocess.run([stillframe, 'dump', '-R', '-t', str(root.pid)] + log, check=True)
for pid in others + [last]:
    os.kill(pid, 9)
for pid in others:
    os.waitpid(pid, 0)
os.waitid(os.P_PID, last, os.WEXITED | os.WNOWAIT)
restore = subprocess.Popen([stillframe, 'restore', '-d'] + log)
there = lambda: os.path.exists(f'/proc/{root.pid}')
wait(there)
wait(lambda: not there() or restore.poll() is not None)
os.waitpid(last, 0)
status = restore.wait()
if status == 0:
    for pid in others + [last]:
        os.kill(pid, 9)
sys.exit(status)
";

#[test]
fn what_a_first_try_made_is_not_in_the_way_of_the_next() {
    needs_root!();
    needs_program!("sh");
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer tries once");
    }
    fs::create_dir_all(stillframe.images()).expect("the folder can be made");
    let mut python = Command::new("python3");
    python.args(["-c", FIRST_TRY]).arg(stillframe.binary());
    let done = python
        .arg(stillframe.images())
        .output()
        .expect("it is there");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}\n{}", stillframe.logs());
    assert!(
        stillframe.logs().contains("once more"),
        "{}",
        stillframe.logs()
    );
}

/// Listens at the port that is its argument, and takes connections on.
const LISTEN: &str = "
import os, socket, sys
os.setsid()
listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))
while True:
    try:
        listener.accept()[0].sendall(b'!')
    except OSError:
        pass
";

#[test]
fn nobody_connects_to_a_tree_whose_pid_is_not_free_yet() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not wait");
    }
    let port = free_port();
    let connect = || TcpStream::connect(("127.0.0.1", port));
    let mut python = Command::new("python3");
    python.args(["-c", LISTEN, &port.to_string()]);
    python.stdin(Stdio::null());
    let mut server = python.spawn().expect("it is there");
    let root = server.id();
    // Who answers before it leads a session is somebody else.
    let leads = || tree::session(root) == Some(root);
    wait_until("the server to listen", SOON, || {
        leads() && connect().is_ok()
    });
    let dumped = stillframe.dump_command(root, &["--tcp-close"]).status();
    assert!(
        dumped.expect("it starts").success(),
        "{}",
        stillframe.logs()
    );
    // It has ended, and nobody has seen that.
    let mut restore = stillframe.restore_command(&["--tcp-close"]);
    let mut restore = restore.spawn().expect("it starts");
    // Until it sleeps (clock_nanosleep) between two looks at the pid.
    let call = format!("/proc/{}/syscall", restore.id());
    while !fs::read_to_string(&call).is_ok_and(|call| call.starts_with("230 ")) {
        // Where nobody listens, a socket can come to connect to itself.
        let early = connect().is_ok_and(|one| one.local_addr().ok() != one.peer_addr().ok());
        assert!(!early, "a listener of a try that could not succeed");
    }
    server.wait().expect("it has ended");
    let restored = restore.wait().expect("it ends");
    assert!(restored.success(), "{}", stillframe.logs());
    let mut answer = [0];
    let mut client = connect().expect("it listens again");
    let read = client.read_exact(&mut answer);
    tree::signal(root, Signal::KILL);
    read.expect("it goes on");
}

#[test]
fn a_missing_file_is_named_and_nothing_is_restored() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("fds", &[]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    let file = subject.folder().join("zoo-file");
    let aside = subject.folder().join("aside");
    fs::rename(&file, &aside).expect("the file is there");
    let outcome = stillframe.restore(&[]).must_fail();
    // The name as criu says it: relative to the root.
    outcome.names(&[&file.display().to_string()[1..]]);
    tree::wait_gone(&pids);
    fs::rename(&aside, &file).expect("the file is there");
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

/// A tmpfs of few bytes, unmounted on drop.
pub(super) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    pub(super) fn of(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(folder.path())
            .status();
        status
            .is_ok_and(|status| status.success())
            .then_some(Self(folder))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Nothing can be done about a mount that stays.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_full_disk_fails_the_dump_and_the_target_goes_on() {
    needs_root!();
    needs_program!("mount");
    for size in ["16k", "300k", "6m"] {
        let Some(disk) = SmallDisk::of(size) else {
            testkit::skip!("no tmpfs can be mounted");
        };
        let stillframe = stillframe().images_at(disk.path().join("images"));
        let subject = Subject::start("busy", &["16"]);
        // It answers when it has written its memory: before, that would not be too much.
        assert_eq!(subject.ask("check"), "right");
        let facts = Facts::moving(subject.pid());
        stillframe.dump(subject.pid(), &[]).must_fail();
        let count = subject.ask_number("count");
        wait_until("the target to count", SOON, || {
            subject.ask_number("count") > count
        });
        assert_eq!(subject.ask("check"), "right");
        assert_untouched(&facts, &Facts::moving(subject.pid()), size);
        stillframe.restore(&[]).must_fail();
        assert!(subject.is_alive());
    }
}

#[test]
fn a_target_that_dies_on_the_way_fails_the_dump_and_frees_the_others() {
    needs_root!();
    let stillframe = stillframe();
    let mut chance = Chance::of("a_target_that_dies_on_the_way");
    let subject = Subject::start("tree", &["12"]);
    let usual = stillframe.dump(subject.pid(), &["-R"]).must().elapsed;
    drop(subject);
    for _ in 0..25 {
        let subject = Subject::start("tree", &["12"]);
        let pids = subject.tree();
        let victim = pids[chance.below(pids.len() as u64) as usize];
        let output = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        let mut dump = stillframe
            .dump_command(subject.pid(), &["-R"])
            .stderr(output.reopen().expect("the file was just made"))
            .spawn()
            .expect("the command can be started");
        // The moment is what is being tested.
        std::thread::sleep(chance.time(usual));
        tree::signal(victim, rustix::process::Signal::KILL);
        let ended = try_wait_for(SOON, || dump.try_wait().expect("a child can be waited for"));
        let Some(ended) = ended else {
            let _ = dump.kill();
            panic!("the dump hangs when {victim} of {pids:?} dies");
        };
        let told = fs::read_to_string(output.path()).unwrap_or_default();
        let in_order = ended.code().is_some() && !told.contains("panicked");
        assert!(in_order, "{ended}: {told}");
        // Whether it was done before or failed: nobody stays stopped or traced.
        for &pid in pids.iter().filter(|&&pid| pid != victim) {
            wait_until(&format!("{pid} to run"), SOON, || {
                tree::reap(pid);
                runs_untraced(pid)
            });
        }
        if victim != pids[0] {
            subject.ask_number("total");
        }
    }
}

/// Whether a task is neither stopped nor traced.
fn runs_untraced(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|value| value.trim().to_owned())
            .unwrap_or_default()
    };
    let state = value("State:");
    value("TracerPid:") == "0" && !state.starts_with(['t', 'T', 'X'])
}

#[test]
fn a_restore_that_is_stopped_at_the_last_moment_leaves_nothing() {
    needs_root!();
    needs_program!("/bin/sh");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = refusing_script(folder.path(), "pre-resume");
    let subject = Subject::start("threads-epoll", &["3"]);
    let tree = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    stillframe
        .restore(&["--action-script", &script])
        .must_fail();
    tree::wait_gone(&tree);
    stillframe.restore(&[]).must();
}

#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no --json");
    }
    let subject = Subject::start("busy", &["1"]);
    for options in [
        &["-R", "--json"][..],
        &["-R", "--display-stats"],
        &["--dry-run"],
    ] {
        let full = fs::File::options()
            .write(true)
            .open("/dev/full")
            .expect("/dev/full");
        let mut dump = stillframe.dump_command(subject.pid(), options);
        let output = dump
            .stdout(full)
            .stderr(std::process::Stdio::piped())
            .output();
        let output = output.expect("it starts");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{options:?}: {told}");
        assert!(told.contains("standard output"), "{told}");
    }
    assert_eq!(subject.ask("check"), "right");
}

/// Has a child that has one end of a pair of unix sockets and of a TCP connection; itself it has
/// the others.
const HALF: &str = r#"
import os, signal, socket, sys
one, other = socket.socketpair()
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
listener.close()
child = os.fork()
if child == 0:
    other.close(); server.close()
    one.send(b"c")
    signal.pause()
one.close(); client.close()
other.recv(1)
open(sys.argv[1] + "/draft", "w").write(str(child))
os.rename(sys.argv[1] + "/draft", sys.argv[1] + "/child")
signal.pause()
"#;

#[test]
fn who_has_the_other_end_of_a_socket_is_named() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer names nobody");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", HALF])
        .arg(folder.path())
        .spawn();
    let child = folder.path().join("child");
    program.wait_file(&child);
    let child = fs::read_to_string(&child).expect("its number");
    let pid = child.parse().expect("a number");
    let outcome = stillframe.dump(pid, &["--tcp-established"]).must_fail();
    let comm = fs::read_to_string(format!("/proc/{}/comm", program.pid())).expect("it runs");
    let who = format!("pid {} ({})", program.pid(), comm.trim_end());
    let unix = format!("its peer (unnamed, {who}) is outside of the tree");
    outcome.names(&["a unix stream socket", &unix]);
}

/// Has the directory of a process that has ended as its own, and a file of it open.
const OF_A_DEAD_PROCESS: &str = r#"
import os, signal, sys
child = os.fork()
if child == 0:
    signal.pause()
os.chdir(f"/proc/{child}")
status = os.open("status", os.O_RDONLY)
os.kill(child, 9)
os.wait()
os.mkdir(sys.argv[1] + "/ready")
signal.pause()
"#;

#[test]
fn what_is_left_of_a_dead_process_is_named() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer says it in other words");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", OF_A_DEAD_PROCESS])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let outcome = stillframe.dump(program.pid(), &[]).must_fail();
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    outcome.names(&[
        "its working directory (/proc/",
        "/status) is not",
        "is gone",
    ]);
}
