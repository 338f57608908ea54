//! Timers on the processor time of threads and processes that have ended.
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// Has a timer on the clock of the one that it is told, and tells what the kernel says of it.
const TIMERS: &str = r#"
import ctypes, errno, os, signal, struct, sys, threading
folder, kind = sys.argv[1:]
CREATE, SETTIME, GETTIME = 222, 223, 224
C = ctypes.CDLL(None, use_errno=True)
def clock_of(number, thread): return (~number << 3) | (6 if thread else 2)
def create(clock):
    event = ctypes.create_string_buffer(struct.pack("QiiQ", 0, 0, 1, 0) + bytes(48))
    timer = ctypes.c_int(-1)
    assert C.syscall(CREATE, clock, event, ctypes.byref(timer)) == 0, ctypes.get_errno()
    return timer.value
def settime(timer, value, interval):
    times = ctypes.create_string_buffer(struct.pack("qqqq", interval, 0, value, 0))
    return ctypes.get_errno() if C.syscall(SETTIME, timer, 0, times, None) else 0
def gettime(timer):
    times = ctypes.create_string_buffer(b"\xff" * 32)
    assert C.syscall(GETTIME, timer, times) == 0, ctypes.get_errno()
    return struct.unpack("qqqq", times.raw[:32])
timers = []
def of_thread(own):
    def make():
        started.set()
        if own:
            # CLOCK_THREAD_CPUTIME_ID
            timers.append(create(3))
        over.wait()
    started, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=make)
    thread.start()
    started.wait()
    if not own:
        timers.append(create(clock_of(thread.native_id, True)))
    while not timers: pass
    over.set()
    thread.join()
def of_child():
    child = os.fork()
    if child == 0: signal.pause()
    timers.append(create(clock_of(child, False)))
    timers.append(create(clock_of(child, False)))
    # It is armed when its process ends, and periodic.
    assert settime(timers[-1], 1000, 5) == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
if kind == "thread": of_thread(False)
elif kind == "own": of_thread(True)
elif kind == "child": of_child()
elif kind == "outside": timers.append(create(clock_of(os.getppid(), False)))
os.mkfifo(folder + "/asked")
os.mkfifo(folder + "/answer")
os.mkdir(folder + "/ready")
while True:
    with open(folder + "/asked") as asked: asked.read()
    with open(folder + "/answer", "w") as answer:
        for timer in timers:
            # The interval stays whoever ends.
            what = gettime(timer)
            answer.write(f"{timer}: {what} {errno.errorcode.get(settime(timer, 7, what[0]), 'set')}\n")
"#;

fn start(folder: &Path, kind: &str) -> Spawned {
    let program = Program::new("/usr/bin/python3")
        .args(["-c", TIMERS])
        .arg(folder)
        .arg(kind)
        .spawn();
    program.wait_file(&folder.join("ready"));
    program
}

fn ask(folder: &Path) -> String {
    std::fs::write(folder.join("asked"), "x").expect("it reads");
    std::fs::read_to_string(folder.join("answer")).expect("it answers")
}

#[test]
fn timers_of_ended_threads_and_processes_stay_dead() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer cannot restore such timers");
    }
    for kind in ["thread", "own", "child"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = start(folder.path(), kind);
        let before = ask(folder.path());
        assert!(before.contains("ESRCH"), "{kind}: {before}");
        stillframe.clear();
        stillframe.cycle(2, &program, &[]);
        assert_eq!(ask(folder.path()), before, "{kind}");
        let threads = std::fs::read_dir(format!("/proc/{}/task", program.pid()));
        assert_eq!(threads.expect("it lives").count(), 1, "{kind}");
        assert_eq!(program.tree().len(), 1, "{kind}");
    }
}

#[test]
fn timer_of_a_process_outside_of_the_tree_is_refused_before_the_kill() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer cannot restore such timers");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = start(folder.path(), "outside");
    let outcome = stillframe.dump(program.pid(), &[]).must_fail();
    outcome.names(&[
        "a timer on the processor time of process",
        "outside of the tree",
    ]);
    assert!(ask(folder.path()).contains("set"));
}
