//! CPython: threads, an asyncio loop with timers, a subprocess and a pipe with data in flight.
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{Facts, assert_restored, stillframe};

/// Counts in two threads, an asyncio timer and by numbers that go through a subprocess and back,
/// many of them in flight; reports all of it over and over.
const EVERYTHING: &str = r#"
import asyncio, os, subprocess, sys, threading, time
report = sys.argv[1]
state = {"thread-0": 0, "thread-1": 0, "timer": 0, "echoed": 0, "sent": 0, "late_ms": 0}
lock = threading.Lock()
def count(name):
    while True:
        with lock:
            state[name] += 1
        time.sleep(0.001)
for number in range(2):
    threading.Thread(target=count, args=(f"thread-{number}",), daemon=True).start()
echo = subprocess.Popen(["/usr/bin/python3", "-c", '''
import sys, time
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(b"%d\\n" % (int(line) * 3))
    sys.stdout.buffer.flush()
    time.sleep(0.002)
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def feed():
    while True:
        state["sent"] += 1
        echo.stdin.write(b"%d\n" % state["sent"])
        echo.stdin.flush()
threading.Thread(target=feed, daemon=True).start()
def drain():
    for line in echo.stdout:
        state["echoed"] += 1
        assert int(line) == state["echoed"] * 3, "a number was lost"
threading.Thread(target=drain, daemon=True).start()
async def tick():
    while True:
        await asyncio.sleep(0.01)
        state["timer"] += 1
async def tell():
    while True:
        with open(report + ".draft", "w") as draft:
            draft.write(" ".join(str(value) for value in state.values()))
        os.rename(report + ".draft", report)
        await asyncio.sleep(0.02)
async def main():
    once = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(1.0, once.set_result, None)
    await asyncio.gather(tick(), tell(), once)
asyncio.run(main())
"#;

fn start(folder: &Path) -> Spawned {
    Program::new("/usr/bin/python3")
        .args(["-c", EVERYTHING])
        .arg(folder.join("report"))
        .folder(folder)
        .output(&folder.join("log"))
        .spawn()
}

fn counts(folder: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(folder.join("report")).expect("a report is always there");
    text.split(' ')
        .map(|word| word.parse().expect("a number"))
        .collect()
}

#[test]
fn threads_timers_and_a_pipe_in_flight_go_on() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start(folder.path());
    program.wait_file(&folder.path().join("report"));
    let log = || std::fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    // The sender is far ahead: both pipes are full.
    program.wait_ready("data in flight", || {
        let now = counts(folder.path());
        now[3] > 0 && now[4] > now[3] + 1000
    });
    let facts = Facts::moving(program.pid());
    for _ in 0..3 {
        let before = counts(folder.path());
        stillframe.cycle(1, &program, &[]);
        wait_until("all counters to advance", SOON, || {
            assert!(program.is_alive(), "{}", log());
            let now = counts(folder.path());
            now.iter()
                .zip(&before)
                .take(4)
                .all(|(now, before)| now > before)
        });
    }
    assert_eq!(log(), "", "an assertion failed on the way");
    // A thread has its report open now and then, as the first free number.
    let changing = &["map ", "fd 8"];
    let after = Facts::moving(program.pid()).without(changing);
    assert_restored(&stillframe, &facts.without(changing), &after, "python");
}

/// Starts `program`, which prints "ready" when it is, and then waits.
fn start_waiting(program: &str, folder: &Path) -> Spawned {
    let log = folder.join("log");
    let spawned = Program::new("/usr/bin/python3")
        .args(["-c", program])
        .output(&log)
        .spawn();
    spawned.wait_ready("the program", || {
        std::fs::read_to_string(&log).is_ok_and(|log| log == "ready\n")
    });
    spawned
}

#[test]
fn memory_with_holes_stays_in_one_mapping() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    const PROGRAM: &str = r#"
import mmap, signal
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 64 << 20, 16384): memory[at] = 1
print("ready", flush=True)
signal.pause()
"#;
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start_waiting(PROGRAM, folder.path());
    let before = Facts::still(program.pid());
    stillframe.cycle(1, &program, &[]);
    let after = Facts::still(program.pid());
    assert_restored(&stillframe, &before, &after, "holes");
}

#[test]
fn locked_memory_of_threads_survives() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    // The stacks' guards are locked too, and cannot be filled.
    const PROGRAM: &str = r#"
import ctypes, signal, threading
assert ctypes.CDLL(None).mlockall(3) == 0
threading.Thread(target=threading.Event().wait, daemon=True).start()
def locked_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])
def more(*_):
    import mmap
    before = locked_kib()
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    print(locked_kib() - before, flush=True)
signal.signal(signal.SIGUSR1, more)
print("ready", flush=True)
while True: signal.pause()
"#;
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not ask whether later mappings are locked");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start_waiting(PROGRAM, folder.path());
    let before = Facts::still(program.pid());
    stillframe.cycle(1, &program, &[]);
    let after = Facts::still(program.pid());
    assert_restored(&stillframe, &before, &after, "locked");
    assert_answer(&program, folder.path(), "ready\n1024\n");
}

#[test]
fn a_task_with_thousands_of_descriptors_is_saved_from_a_shell_with_few() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("bash");
    const PROGRAM: &str = r#"
import resource, signal, socket
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
count = 5000 if hard == resource.RLIM_INFINITY else min(5000, hard - 500)
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
for number, one in enumerate(sockets):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, number % 7)
def check(*_):
    found = [one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for one in sockets]
    print(found == [number % 7 for number in range(count)], flush=True)
signal.signal(signal.SIGUSR1, check)
print("ready", flush=True)
while True: signal.pause()
"#;
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start_waiting(PROGRAM, folder.path());
    let tasks = tree::members(program.pid());
    limited(&stillframe.dump_command(program.pid(), &[]), "-Sn 256");
    tree::wait_gone(&tasks);
    limited(&stillframe.restore_command(&[]), "-Sn 256");
    assert_answer(&program, folder.path(), "ready\nTrue\n");
}

#[test]
fn descriptors_at_the_end_of_the_hard_limit_survive() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("bash");
    // As a program does that wants to be out of the way of another one in its process.
    const PROGRAM: &str = r#"
import os, resource, signal
limit = 1024
files = [os.memfd_create(str(number)) for number in range(40)]
for number, one in enumerate(files):
    os.write(one, b"x" * number)
high = [os.dup2(one, limit - 1 - number * (1 + number // 20)) for number, one in enumerate(files)]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
def check(*_):
    sizes = [os.fstat(one).st_size for one in high]
    print(sizes == list(range(40)), len(os.listdir("/proc/self/fd")), flush=True)
signal.signal(signal.SIGUSR1, check)
print("ready", flush=True)
while True: signal.pause()
"#;
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start_waiting(PROGRAM, folder.path());
    let tasks = tree::members(program.pid());
    let mut shown = "ready\n".to_owned();
    for _ in 0..3 {
        stillframe.clear();
        limited(&stillframe.dump_command(program.pid(), &[]), "-n 1024");
        tree::wait_gone(&tasks);
        limited(&stillframe.restore_command(&[]), "-n 1024");
        shown += "True 84\n";
        assert_answer(&program, folder.path(), &shown);
    }
}

/// Signals a program to look at itself, and waits until its log in `folder` is `log`.
#[track_caller]
fn assert_answer(program: &Spawned, folder: &Path, log: &str) {
    assert!(tree::signal(program.pid(), Signal::USR1), "it lives");
    wait_until("the program's answer", SOON, || {
        std::fs::read_to_string(folder.join("log")).is_ok_and(|found| found == log)
    });
}

/// Runs a command under the limits of descriptors that bash's `ulimit` sets; it must succeed.
fn limited(command: &Command, limits: &str) {
    let outcome = Command::new("bash")
        .args(["-c", &format!("ulimit {limits} && exec \"$0\" \"$@\"")])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null())
        .output();
    let outcome = outcome.expect("bash starts");
    let words = String::from_utf8_lossy(&outcome.stderr);
    assert!(outcome.status.success(), "{command:?}: {words}");
}
