//! The states of our own subjects, each restored.
use std::fs;

use testkit::facts::Facts;
use testkit::needs_root;
use testkit::program::Program;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

use crate::{assert_cycles, assert_restored, stillframe, ways};

/// Subjects that wait and change nothing by themselves.
pub const WAITING: &[(&str, &[&str])] = &[
    ("creds", &["root"]),
    ("fds", &[]),
    ("filters", &[]),
    ("filters", &["together"]),
    ("mmaps", &[]),
    ("patchwork", &["9"]),
    ("pending-signals", &[]),
    ("rlimits", &[]),
    ("sessions", &[]),
    ("sigaltstack", &[]),
    ("stopped", &[]),
    ("stopped", &["unseen", "tstp"]),
    ("task-files", &[]),
    ("tree", &["7", "still"]),
    ("zombies", &[]),
];

/// Of these, what criu cannot dump here or leaves changed: credentials without CAP_SYS_RESOURCE,
/// guard regions, a stopped child.
pub const NOT_BY_PEER: &[&str] = &["creds", "mmaps", "stopped"];

/// A subject that was dumped and restored, and about which nothing differs.
#[track_caller]
fn restored(name: &str, arguments: &[&str]) -> Subject {
    let stillframe = stillframe();
    let subject = Subject::start(name, arguments);
    assert_cycles(&stillframe, 1, &subject, name);
    subject
}

#[test]
fn descriptors_survive() {
    needs_root!();
    let subject = restored("fds", &[]);
    assert_eq!(subject.ask("check"), "right");
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn message_queues_survive() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("message-queues", &[]);
    assert_cycles(&stillframe, 1, &subject, "message queues");
    let check = |told: &str| assert_eq!(subject.ask("check"), "right", "{told}");
    check("after a cycle");
    ways::left_running(&stillframe, &subject, check);
    assert_eq!(subject.ask("take"), "3 taken");
    assert_eq!(subject.ask("give"), "1 before");
    wait_until("the thread to give it", SOON, || {
        subject.ask("give") == "2 after"
    });
    // As on a host that was started since.
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    for name in ["ordered", "empty", "full"] {
        let name = format!("stillframe-{name}-{}", subject.pid());
        let name = std::ffi::CString::new(name).expect("no NUL");
        sys::mqueue::unlink(&name).expect("it has outlived the tree");
    }
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
    assert_eq!(subject.ask("remove"), "removed");
}

#[test]
fn who_is_told_of_messages_is_told() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer refuses message queues");
    }
    let subject = Subject::start("told-queues", &[]);
    // What compares facts would interrupt the child's wait.
    stillframe.cycle(3, &subject, &[]);
    let check = |told: &str| {
        assert_eq!(subject.ask("quiet"), "right", "{told}");
        assert_eq!(subject.ask("check"), "right", "{told}");
    };
    check("after three cycles");
    ways::left_running(&stillframe, &subject, check);
    ways::over_pre_dump(&stillframe, &subject, check);
    assert_eq!(subject.ask("check"), "right", "once more");
    assert_eq!(subject.ask("remove"), "removed");
}

#[test]
fn namespaces_as_files_survive() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has others in its place");
    }
    let subject = Subject::start("namespaces", &[]);
    // Each restore makes a time namespace, and before the first one there is none.
    stillframe.cycle(3, &subject, &[]);
    let check = |told: &str| assert_eq!(subject.ask("check"), "right", "{told}");
    check("after three cycles");
    assert_eq!(subject.ask("flags"), "true true");
    ways::left_running(&stillframe, &subject, check);
    ways::killed(&stillframe, &subject, check);
    ways::over_pre_dump(&stillframe, &subject, check);
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&["--no-timens"]).must();
    assert_eq!(subject.ask("check"), "right", "with the host's clocks");
    assert_eq!(subject.ask("flags"), "true true");
}

#[test]
fn rare_sockets_survive() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer refuses vsock");
    }
    let subject = Subject::start("rare-sockets", &[]);
    if subject.ask_number("held") == 0 {
        testkit::skip!("neither UDP-Lite nor vsock");
    }
    assert_cycles(&stillframe, 3, &subject, "rare sockets");
    let check = |told: &str| assert_eq!(subject.ask("check"), "right", "{told}");
    check("after three cycles");
    ways::left_running(&stillframe, &subject, check);
    ways::killed(&stillframe, &subject, check);
    ways::over_pre_dump(&stillframe, &subject, check);
    if subject
        .try_ask("take")
        .is_ok_and(|text| text != "a datagram that was not read")
    {
        panic!("another datagram");
    }
}

#[test]
fn memory_deny_write_execute_survives() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer forgets it");
    }
    if sys::own::attribute(sys::own::Attribute::Mdwe).is_err() {
        testkit::skip!("no PR_SET_MDWE");
    }
    for arguments in [&[][..], &["alone"]] {
        let subject = Subject::start("deny-write-exec", arguments);
        assert_cycles(&stillframe, 3, &subject, "a process under PR_SET_MDWE");
        let check = |told: &str| assert_eq!(subject.ask("check"), "right", "{told}");
        check("after three cycles");
        ways::left_running(&stillframe, &subject, check);
        ways::killed(&stillframe, &subject, check);
        ways::over_pre_dump(&stillframe, &subject, check);
    }
}

#[test]
fn mappings_survive() {
    needs_root!();
    let kinds: &[&str] = if stillframe().is_peer() {
        &["plain"]
    } else {
        &[]
    };
    let subject = restored("mmaps", kinds);
    assert_eq!(subject.ask("check"), "right");
    assert_eq!(subject.ask("write"), "right");
}

/// Below and above the size from which on memory is filled from outside.
#[test]
fn neighbours_that_the_kernel_keeps_apart_survive() {
    needs_root!();
    for mib in ["1", "4", "17"] {
        let subject = restored("patchwork", &[mib]);
        assert_eq!(subject.ask("check"), "right");
    }
}

#[test]
fn pending_signals_survive_with_their_values() {
    needs_root!();
    let subject = restored("pending-signals", &[]);
    // SI_QUEUE is -1; the thread's own come first.
    assert_eq!(
        subject.ask("drain"),
        "40 -1 9, 10 -1 77, 40 -1 1, 40 -1 2, 40 -1 3"
    );
    assert_eq!(subject.ask("drain-second"), "50 -1 500");
    assert_eq!(subject.ask("unblock"), "1 88");
}

#[test]
fn limits_survive() {
    needs_root!();
    let subject = restored("rlimits", &[]);
    let limits = subject.ask("limits");
    assert!(limits.starts_with("Some(123)/Some(456)"), "{limits}");
}

#[test]
fn sessions_survive() {
    needs_root!();
    // criu forgets who is a child subreaper, and so whose child the orphan is.
    let kinds: &[&str] = if stillframe().is_peer() {
        &["plain"]
    } else {
        &[]
    };
    let subject = restored("sessions", kinds);
    let ids = subject.ask("ids");
    assert!(ids.starts_with("daemon "), "{ids}");
}

#[test]
fn seccomp_filters_survive() {
    needs_root!();
    let subject = Subject::start("filters", &[]);
    let judged = subject.ask("judged");
    drop(subject);
    let subject = restored("filters", &[]);
    assert_eq!(subject.ask("judged"), judged);
    assert!(
        judged.starts_with("500 501 38 503 | 500 38 38 38 | 500 501 502 38"),
        "{judged}"
    );
    assert_eq!(subject.ask("echo"), "right");
    assert_eq!(subject.ask("tell-all"), "refused");
}

/// The kernel takes a filter for all threads only where their filters are the same ones.
#[test]
fn filters_that_threads_share_are_shared_again() {
    needs_root!();
    let subject = restored("filters", &["together"]);
    assert_eq!(
        subject.ask("judged"),
        "500 501 38 38 | 500 501 38 38 | 500 501 38 38"
    );
    assert_eq!(subject.ask("tell-all"), "taken");
    assert!(subject.ask("judged").starts_with("504 "));
}

#[test]
fn files_of_tasks_survive() {
    needs_root!();
    let subject = restored("task-files", &[]);
    assert_eq!(subject.ask("check"), "right");
    assert_eq!(subject.ask("end"), "[feedbeef] Some(9)");
}

#[test]
fn leases_survive() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("task-files", &["lease"]);
    let outcome = stillframe.dump(subject.pid(), &[]);
    outcome.must_fail().names(&["--file-locks"]);
    stillframe.cycle(2, &subject, &["--file-locks"]);
    let unavailable = "Resource temporarily unavailable (os error 11)";
    assert_eq!(subject.ask("lease"), unavailable);
}

#[test]
fn alternate_stacks_survive() {
    needs_root!();
    let subject = restored("sigaltstack", &[]);
    assert_eq!(subject.ask("raise"), "on the alternate stack");
    assert_eq!(subject.ask("raise-second"), "on the alternate stack");
}

#[test]
fn zombies_keep_how_they_ended() {
    needs_root!();
    let subject = restored("zombies", &[]);
    if !stillframe().is_peer() {
        let who = "Uid: 4711 4711 4711 4711 Gid: 4712 4712 4712 4712 Groups:";
        assert_eq!(subject.ask("who"), who);
    }
    let ends = "status 0, status 7, signal 9, status 3";
    assert_eq!(subject.ask("reap"), ends);
}

#[test]
fn credentials_survive() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer cannot read the limits of another user's tasks here");
    }
    for arguments in [&["root"][..], &[]] {
        let ids = Subject::start("creds", arguments).ask("ids");
        let subject = restored("creds", arguments);
        assert_eq!(subject.ask("ids"), ids);
    }
}

#[test]
fn interval_timers_go_on() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("itimers", &[]);
    let before = times(&subject.ask("left"));
    stillframe.cycle(1, &subject, &[]);
    let after = times(&subject.ask("left"));
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before[1], after[1], "intervals in {before:?} {after:?}");
        let passed_us = before[0] as i64 - after[0] as i64;
        // A virtual timer may be rounded by a tick.
        assert!((-10_000..60_000_000).contains(&passed_us), "{passed_us}");
    }
    drop(subject);
    let subject = Subject::start("itimers", &["ticking"]);
    stillframe.cycle(1, &subject, &[]);
    let now = subject.ask_number("ticks");
    wait_until("the timer to tick", SOON, || {
        subject.ask_number("ticks") > now + 5
    });
}

#[test]
fn posix_timers_go_on_under_their_numbers() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("posix-timers", &[]);
    let before = times(&subject.ask("left"));
    let facts = Facts::moving(subject.pid());
    stillframe.cycle(1, &subject, &[]);
    let after = times(&subject.ask("left"));
    let restored = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &restored, "posix timers");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(
            (before[0], before[2]),
            (after[0], after[2]),
            "number and interval"
        );
    }
    assert_eq!([before[0][0], before[1][0], before[2][0]], [0, 2, 3]);
    let passed_ms = before[0][1] as i64 - after[0][1] as i64;
    assert!((0..60_000).contains(&passed_ms), "{passed_ms}");
    let now = subject.ask_number("ticks");
    wait_until("the timer to tick", SOON, || {
        subject.ask_number("ticks") > now + 5
    });
    assert_eq!(subject.ask_number("value"), 0xbeef);
}

#[test]
fn timers_go_on_by_the_processor_time_of_their_threads() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has them go by the first thread's");
    }
    let subject = Subject::start("thread-timers", &[]);
    let ticks = || times(&subject.ask("ticks"))[0].clone();
    let go_on = || {
        for turn in [0, 1] {
            subject.ask(&format!("turn {turn}"));
            // What was on its way by then has come.
            let before = ticks();
            wait_until("its thread's timer", SOON, || {
                ticks()[turn] > before[turn] + 20
            });
            let others = ticks()[1 - turn] - before[1 - turn];
            assert!(others <= 2, "{others} of the thread that waits");
        }
    };
    go_on();
    for way in ["--leave-running", "--live"] {
        stillframe.clear();
        stillframe.dump(subject.pid(), &[way]).must();
        go_on();
    }
    for _ in 0..3 {
        stillframe.cycle(1, &subject, &[]);
        go_on();
    }
}

/// Splits "1 2 3, 4 5 6".
fn times(answer: &str) -> Vec<Vec<u64>> {
    let group = |group: &str| {
        let numbers = group.split(' ').map(|word| word.parse().expect("a number"));
        numbers.collect()
    };
    answer.split(", ").map(group).collect()
}

#[test]
fn threads_on_epoll_go_on() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("threads-epoll", &["6"]);
    let facts = Facts::moving(subject.pid());
    for _ in 0..3 {
        let (laps, ticks) = (subject.ask_number("laps"), subject.ask_number("ticks"));
        stillframe.cycle(1, &subject, &[]);
        wait_until("laps", SOON, || subject.ask_number("laps") > laps + 10);
        // criu disarms a periodic timerfd that expired while it was frozen.
        if !stillframe.is_peer() {
            wait_until("ticks", SOON, || subject.ask_number("ticks") > ticks + 10);
        }
        assert_eq!(subject.ask("check"), "right");
    }
    let restored = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &restored, "threads");
}

#[test]
fn a_tree_of_fifty_goes_on() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["50"]);
    wait_until("fifty tasks", SOON, || {
        let counts = subject.ask("counts");
        counts.split(' ').skip(1).all(|count| count != "0")
    });
    let before = subject.ask_number("total");
    let facts = Facts::moving(subject.pid());
    stillframe.cycle(1, &subject, &[]);
    assert_eq!(subject.tree().len(), 50);
    assert!(subject.ask_number("total") >= before);
    let counts = |subject: &Subject| -> Vec<u64> {
        let counts = subject.ask("counts");
        counts
            .split(' ')
            .map(|count| count.parse().expect("a number"))
            .collect()
    };
    let restored = counts(&subject);
    wait_until("every task to count", SOON, || {
        let now = counts(&subject);
        now.iter()
            .zip(&restored)
            .skip(1)
            .all(|(now, before)| now > before)
    });
    assert_eq!(subject.ask("check"), "right");
    let restored = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &restored, "a tree of 50");
}

#[test]
fn interrupted_calls_go_on() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer lets calls with a time limit return EINTR");
    }
    interrupted(&stillframe, |subject| stillframe.cycle(1, subject, &[]));
}

#[test]
fn interrupted_calls_of_a_task_left_running_go_on() {
    needs_root!();
    let stillframe = stillframe();
    interrupted(&stillframe, |subject| {
        for _ in 0..3 {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["--leave-running"]).must();
        }
    });
}

#[test]
fn interrupted_calls_of_a_task_that_is_pre_dumped_go_on() {
    needs_root!();
    let stillframe = stillframe();
    interrupted(&stillframe, |subject| {
        for _ in 0..3 {
            stillframe.clear();
            stillframe.pre_dump(subject.pid(), &[]).must();
        }
    });
}

#[test]
fn interrupted_calls_of_a_task_that_is_dumped_live_go_on() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no live dumps");
    }
    interrupted(&stillframe, |subject| {
        for _ in 0..2 {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["--live"]).must();
        }
    });
}

/// Every call with a limit of two seconds times out after those, however often interrupted, and
/// the read goes on waiting.
fn interrupted(stillframe: &Stillframe, interrupt: impl Fn(&Subject)) {
    const LIMIT_MS: u64 = 2000;
    let subject = Subject::start("interrupted", &[&LIMIT_MS.to_string()]);
    wait_until("the threads to wait", SOON, || subject.is_waiting());
    assert_eq!(subject.ask("results"), "", "none has ended yet");
    let start = std::time::Instant::now();
    interrupt(&subject);
    let gone_ms = start.elapsed().as_millis() as u64;
    if gone_ms >= LIMIT_MS {
        testkit::skip!("the machine is too busy to prove anything: {gone_ms} ms");
    }
    const CALLS: usize = 9;
    wait_until("the calls to return", SOON, || {
        subject.ask("results").lines().count() == CALLS
    });
    for line in subject.ask("results").lines() {
        // criu lets them return early, epoll_wait even the kernel itself: signal(7).
        if stillframe.is_peer() && line.contains(" interrupted after ") {
            continue;
        }
        let (call, after_ms) = line.split_once(" timeout after ").unwrap_or((line, "0"));
        let after_ms: u64 = after_ms.parse().expect("a number");
        // No earlier. How late beyond that is the machine's business; the times that remain are
        // compared where they are saved, in `resources::task::interrupted`.
        assert!(after_ms >= LIMIT_MS, "{call}: {line}, gone {gone_ms}");
    }
    subject.ask("write");
    wait_until("the read to return", SOON, || {
        subject.ask("results").contains("read 1 byte 33")
    });
}

/// Takes its memory from node 0 alone, and says whether the kernel can do that.
const BOUND: &str = r#"
import ctypes, os, signal, sys
nodes = ctypes.c_ulong(1)
MPOL_BIND, MPOL_F_STATIC_NODES = 2, 1 << 15
failed = ctypes.CDLL(None).syscall(238, MPOL_BIND | MPOL_F_STATIC_NODES, ctypes.byref(nodes), 64)
os.mkdir(sys.argv[1] + ("/plain" if failed else "/bound"))
os.mkdir(sys.argv[1] + "/ready")
signal.pause()
"#;

#[test]
fn where_memory_comes_from_and_goes_survives() {
    needs_root!();
    testkit::needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer forgets them");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", BOUND])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let path = |file: &str| format!("/proc/{}/{file}", program.pid());
    let read = |file: &str| fs::read_to_string(path(file)).unwrap_or_default();
    fs::write(path("coredump_filter"), "0x7f").expect("root may");
    let grouped = read("autogroup").ends_with(" nice 0\n");
    if grouped {
        fs::write(path("autogroup"), "5").expect("root may");
    }
    let before = Facts::moving(program.pid());
    stillframe.cycle(2, &program, &[]);
    let after = Facts::moving(program.pid());
    assert_restored(&stillframe, &before, &after, "choices");
    assert_eq!(read("coredump_filter"), "0000007f\n");
    assert!(!grouped || read("autogroup").ends_with(" nice 5\n"));
    if folder.path().join("bound").exists() {
        let maps = read("numa_maps");
        let stack = maps.lines().find(|line| line.contains(" stack "));
        assert!(
            stack.is_some_and(|line| line.contains(" bind=static:0 ")),
            "{maps}"
        );
    }
}

/// Has a timer that tells a thread which has ended.
const TIMER_OF_NOBODY: &str = r#"
import ctypes, os, signal, sys, threading
CREATE, SET = 222, 223
call = ctypes.CDLL(None, use_errno=True).syscall
def make():
    event = (ctypes.c_int * 16)(0, 0, signal.SIGUSR1, 4, threading.get_native_id())
    timer = ctypes.c_int()
    assert call(CREATE, 1, event, ctypes.byref(timer)) == 0, os.strerror(ctypes.get_errno())
    assert call(SET, timer, 0, (ctypes.c_long * 4)(0, 0, 1000, 0), None) == 0
thread = threading.Thread(target=make)
thread.start()
thread.join()
while len(os.listdir("/proc/self/task")) > 1: pass
os.mkdir(sys.argv[1] + "/ready")
signal.pause()
"#;

#[test]
fn a_timer_whose_thread_has_ended_survives() {
    needs_root!();
    testkit::needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer cannot make it again");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", TIMER_OF_NOBODY])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    stillframe.cycle(2, &program, &[]);
    let timers = fs::read_to_string(format!("/proc/{}/timers", program.pid())).expect("a list");
    assert!(timers.starts_with("ID: 0\n"), "{timers}");
}
