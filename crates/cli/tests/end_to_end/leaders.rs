//! Processes whose first thread has ended while others run on.
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use testkit::facts::Facts;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::subjects::LEADERS_STATUS;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{assert_cycles, assert_untouched, lazy, states, stillframe, ways};

/// Stillframe, unless the peer stands in for it, which refuses such processes.
fn ours() -> Option<Stillframe> {
    let stillframe = stillframe();
    (!stillframe.is_peer()).then_some(stillframe)
}

/// The last field of /proc/PID/stat: how the first thread has ended.
fn exit_code(pid: u32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
    let field = stat.split_ascii_whitespace().last();
    field
        .and_then(|field| field.parse().ok())
        .expect("a number")
}

#[track_caller]
fn check_leader(pid: u32, told: &str) {
    assert_eq!(tree::state(pid), Some('Z'), "{told}");
    assert!(tree::is_alive(pid), "{told}");
    assert_eq!(exit_code(pid), LEADERS_STATUS << 8, "{told}");
}

#[test]
fn whatever_state_a_process_is_in_it_needs_no_first_thread() {
    needs_root!();
    let Some(stillframe) = ours() else {
        testkit::skip!("the peer refuses such processes");
    };
    for (name, arguments) in states::WAITING {
        let subject = Subject::start_without_leader(name, arguments);
        assert_cycles(&stillframe, 3, &subject, name);
        check_leader(subject.pid(), name);
        let before = Facts::still(subject.pid());
        let check = |how: &str| {
            wait_until("the subject to wait", SOON, || subject.is_waiting());
            let after = Facts::still(subject.pid());
            assert_untouched(&before, &after, &format!("{name} {how}"));
        };
        ways::left_running(&stillframe, &subject, check);
    }
}

#[test]
fn what_the_kernel_does_for_a_process_goes_on_without_its_first_thread() {
    needs_root!();
    testkit::needs_kernel_memory!();
    let Some(stillframe) = ours() else {
        testkit::skip!("the peer refuses such processes");
    };
    for name in ["aio", "message-queues", "threads-epoll"] {
        let subject = Subject::start_without_leader(name, &[]);
        for cycle in 0..3 {
            stillframe.cycle(1, &subject, &[]);
            assert_eq!(subject.ask("check"), "right", "{name} {cycle}");
            check_leader(subject.pid(), name);
        }
    }
}

#[test]
fn a_busy_process_without_a_first_thread_goes_on_in_every_way() {
    needs_root!();
    let Some(stillframe) = ours() else {
        testkit::skip!("the peer refuses such processes");
    };
    let subject = Subject::start_without_leader("busy", &["16"]);
    let check = |how: &str| {
        let now = subject.ask_number("count");
        wait_until("it to count on", SOON, || subject.ask_number("count") > now);
        assert_eq!(subject.ask("check"), "right", "{how}");
        check_leader(subject.pid(), how);
    };
    ways::left_running(&stillframe, &subject, check);
    ways::killed(&stillframe, &subject, check);
    ways::over_pre_dump(&stillframe, &subject, check);
    for cycle in 0..3 {
        stillframe.clear();
        stillframe.dump(subject.pid(), &[]).must();
        stillframe.restore(&["--lazy-pages"]).must();
        check(&format!("lazily, {cycle}"));
        lazy::wait_all_has_come(&stillframe, &subject.tree());
    }
}

#[test]
fn it_comes_back_stopped_and_its_end_is_still_known() {
    needs_root!();
    testkit::needs_kernel_memory!();
    let Some(stillframe) = ours() else {
        testkit::skip!("the peer refuses such processes");
    };
    let subject = Subject::start_without_leader("busy", &["1"]);
    let pid = Pid::from_raw(subject.pid().cast_signed()).expect("a pid");
    let halted = || {
        let threads = tree::threads(subject.pid());
        let others = threads.into_iter().filter(|tid| *tid != subject.pid());
        others.map(tree::state).all(|state| state == Some('T'))
    };
    kill_process(pid, Signal::STOP).expect("it lives");
    wait_until("it to be stopped", SOON, halted);
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&[]).must();
    wait_until("it to be stopped again", SOON, halted);
    kill_process(pid, Signal::CONT).expect("it lives");
    assert_eq!(subject.ask("check"), "right");
    check_leader(subject.pid(), "after a stop");
    stillframe.clear();
    stillframe.dump(subject.pid(), &["--leave-stopped"]).must();
    assert!(halted());
    kill_process(pid, Signal::CONT).expect("it lives");
    assert_eq!(subject.ask("check"), "right");
}

/// A tree of which two processes have lost their first threads: the root waits for one of them,
/// which has children that are to be told when it ends. Each reports what it counts; the file
/// `end` ends all threads of one, `exec` has another program take its place.
const TREE: &str = r#"
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
folder, PR_SET_PDEATHSIG = sys.argv[1], 1
def report(name, text):
    with open(f"{folder}/{name}.draft", "w") as draft: draft.write(text)
    os.rename(f"{folder}/{name}.draft", f"{folder}/{name}")
def count(name, pause):
    number, file = 0, os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT)
    while not os.path.exists(f"{folder}/end"):
        number += 1
        os.pwrite(file, b"%020d %020d" % (number, os.getppid()), 0)
        time.sleep(pause)
    libc.syscall(60, 4)
def work(name):
    for number in range(3):
        thread = threading.Thread(target=count, args=(f"{name}-{number}", 0.002), daemon=True)
        thread.start()
def child_of_a_thread(parent):
    # Told of each thread that was its parent in turn, also while it is still being told.
    def on_end(*_): open(f"{folder}/told", "w").close()
    signal.signal(signal.SIGUSR1, on_end)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    report("child", str(os.getpid()))
    while os.getppid() == parent or not os.path.exists(f"{folder}/told"): time.sleep(0.01)
    os._exit(0)
def fork_and_rest():
    parent = os.getpid()
    if os.fork() == 0: child_of_a_thread(parent)
    while not os.path.exists(f"{folder}/end"): time.sleep(0.01)
    libc.syscall(60, 4)
def become():
    while not os.path.exists(f"{folder}/exec"): time.sleep(0.01)
    os.execv("/bin/sleep", ["sleep", "1000"])
waited = os.fork()
if waited == 0:
    work("waited")
    threading.Thread(target=fork_and_rest, daemon=True).start()
    while not os.path.exists(f"{folder}/child"): time.sleep(0.001)
    libc.syscall(60, 9)
if os.fork() == 0:
    threading.Thread(target=become, daemon=True).start()
    work("other")
    report("other", str(os.getpid()))
    libc.syscall(60, 5)
_, status = os.waitpid(waited, 0)
report("status", str(os.waitstatus_to_exitcode(status)))
while True: time.sleep(1000)
"#;

/// The text of a report of the tree.
fn report(folder: &Path, name: &str) -> Option<String> {
    std::fs::read_to_string(folder.join(name)).ok()
}

/// Waits until all six counters have counted on, with the parents that they had.
#[track_caller]
fn check_counters(folder: &Path, program: &Spawned, how: &str) {
    let root = program.pid();
    for name in [
        "waited-0", "waited-1", "waited-2", "other-0", "other-1", "other-2",
    ] {
        let read = || {
            let text = report(folder, name)?;
            let (number, parent) = text.split_once(' ')?;
            Some((number.parse::<u64>().ok()?, parent.parse::<u32>().ok()?))
        };
        let before = read().map_or(0, |(number, _)| number);
        wait_until(&format!("{name} to count on {how}"), SOON, || {
            read().is_some_and(|(number, parent)| number > before && parent == root)
        });
    }
    let told = report(folder, "told");
    assert_eq!(told, None, "{how}: nobody has ended");
}

#[test]
fn a_tree_of_processes_without_first_threads_goes_on() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let Some(stillframe) = ours() else {
        testkit::skip!("the peer refuses such processes");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", TREE])
        .arg(folder.path())
        .spawn();
    let children = || tree::members(program.pid());
    let ended = |pid: &u32| tree::state(*pid) == Some('Z');
    program.wait_ready("two first threads to end", || {
        children().iter().filter(|pid| ended(pid)).count() == 2
    });
    let check = |how: &str| check_counters(folder.path(), &program, how);
    check("at first");
    let pids = children();
    for cycle in 0..3 {
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        stillframe.restore(&[]).must();
        check(&format!("after cycle {cycle}"));
    }
    ways::left_running(&stillframe, &program, check);
    ways::killed(&stillframe, &program, check);
    ways::over_pre_dump(&stillframe, &program, check);
    assert_eq!(children(), pids);
    // One of its threads becomes another program, and the process's first thread with that.
    let other = report(folder.path(), "other").and_then(|pid| pid.parse().ok());
    let other: u32 = other.expect("it has told its pid");
    std::fs::write(folder.path().join("exec"), "").expect("a file");
    wait_until("another program", SOON, || {
        let name = std::fs::read_to_string(format!("/proc/{other}/comm"));
        name.is_ok_and(|name| name == "sleep\n") && tree::threads(other) == [other]
    });
    // All that are left end one by one, and the process with the status of the last.
    std::fs::write(folder.path().join("end"), "").expect("a file");
    wait_until("its parent to hear of it", SOON, || {
        report(folder.path(), "status").is_some_and(|status| status == "4")
    });
    let child = report(folder.path(), "child").and_then(|pid| pid.parse().ok());
    let child: u32 = child.expect("it has told its pid");
    wait_until("the child to hear of it, and end", SOON, || {
        report(folder.path(), "told").is_some() && !tree::is_alive(child)
    });
}
