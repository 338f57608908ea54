//! Performance events: our own subject's, those of a program in Python, and those by which perf(1)
//! counts what it starts.
use std::fs;
use std::path::Path;

use testkit::facts::Facts;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{assert_untouched, stillframe};

const KEPT: &[&str] = &["--perf-events"];

/// Whether there are events here that can be looked up, and it is not the peer that is tested, or
/// return.
macro_rules! needs_events {
    () => {
        needs_root!();
        testkit::needs_kernel_memory!();
        if stillframe().is_peer() {
            testkit::skip!("the peer refuses performance events");
        }
        let attr = sys::perf_event::software(2);
        let watched = sys::perf_event::Watched { tid: 0, cpu: -1 };
        if sys::perf_event::open(&attr, watched, None).is_err() {
            testkit::skip!("no performance events");
        }
    };
}

/// What the events of the subject have counted.
fn counts(subject: &Subject) -> Vec<u64> {
    let told = subject.ask("counts");
    let counts = told.split(' ').map(|word| word.parse());
    counts.collect::<Result<_, _>>().expect("numbers")
}

/// Insists that it has counted on since it had counted `before`, or has begun anew.
#[track_caller]
fn assert_counted(subject: &Subject, before: &[u64], goes_on: bool, told: &str) {
    let now = counts(subject);
    let mut pairs = before.iter().zip(&now);
    let is_right = pairs.all(|(before, now)| goes_on == (now >= before));
    assert!(is_right, "{before:?} became {now:?} {told}");
    assert_eq!(subject.ask("check"), "right", "{told}");
}

/// A subject that has counted more than it will by a check alone.
fn counted() -> Subject {
    let subject = Subject::start("perf-events", &[]);
    (0..5).for_each(|_| assert_eq!(subject.ask("check"), "right"));
    subject
}

#[test]
fn events_count_from_nothing_on() {
    needs_events!();
    let stillframe = stillframe();
    let subject = counted();
    for round in 1..=3 {
        let before = counts(&subject);
        stillframe.cycle(1, &subject, KEPT);
        assert_counted(&subject, &before, false, &format!("after cycle {round}"));
        (0..4).for_each(|_| assert_eq!(subject.ask("check"), "right"));
    }
}

#[test]
fn who_is_left_running_counts_on() {
    needs_events!();
    let stillframe = stillframe();
    let subject = counted();
    for how in ["--leave-running", "--live"] {
        let before = counts(&subject);
        stillframe.clear();
        stillframe.dump(subject.pid(), &[how, KEPT[0]]).must();
        assert_counted(&subject, &before, true, how);
    }
    let (before, pids) = (counts(&subject), subject.tree());
    subject.kill();
    tree::wait_free(&pids);
    stillframe.restore(KEPT).must();
    assert_counted(&subject, &before, false, "of a live image");
}

#[test]
fn events_are_kept_over_a_pre_dump() {
    needs_events!();
    let stillframe = stillframe();
    let subject = counted();
    let before = counts(&subject);
    stillframe.pre_dump(subject.pid(), KEPT).must();
    assert_counted(&subject, &before, true, "after a pre-dump");
    let first = stillframe.images().with_file_name("first");
    fs::rename(stillframe.images(), &first).expect("they are on one file system");
    let over = ["--prev-images-dir", "../first", KEPT[0]];
    stillframe.dump(subject.pid(), &over).must();
    stillframe.restore(KEPT).must();
    assert_counted(&subject, &before, false, "over a pre-dump");
}

#[test]
fn without_the_option_they_are_refused_by_name() {
    needs_events!();
    let stillframe = stillframe();
    let subject = counted();
    let had = counts(&subject);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    let before = Facts::still(subject.pid());
    let outcome = stillframe.dump(subject.pid(), &[]).must_fail();
    let why = "its count would begin at 0 again (use --perf-events to allow it)";
    let outcome = outcome.names(&["anon_inode:[perf_event]", why]);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    assert_untouched(&before, &Facts::still(subject.pid()), "refused");
    assert_counted(&subject, &had, true, "after a dump that was refused");
    stillframe.dump(subject.pid(), KEPT).must();
    let outcome = stillframe.restore(&[]).must_fail();
    outcome.names(&[
        "a performance event of",
        "(use --perf-events to restore it)",
    ]);
    stillframe.restore(KEPT).must();
    assert_eq!(subject.ask("check"), "right");
}

/// Counts its page faults, where it is told to with a thread that inherits the event or with a ring
/// of records, and tells how many there were while it touched a hundred pages.
const COUNTS: &str = r#"
import ctypes, mmap, os, struct, sys, threading, time
syscall = ctypes.CDLL(None, use_errno=True).syscall
INHERIT = 2
def opened(flags):
    attr = bytearray(112)
    struct.pack_into("=IIQQQQQ", attr, 0, 1, 112, 2, 0, 0, 0, flags)
    fd = syscall(298, (ctypes.c_char * 112).from_buffer(attr), 0, -1, -1, 8)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    return fd
def value():
    return struct.unpack("Q", os.read(event, 8))[0]
event = opened(0 if sys.argv[2] == "mapped" else INHERIT)
if sys.argv[2] == "inherited":
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if sys.argv[2] == "mapped":
    ring = mmap.mmap(event, 3 * 4096)
rounds = 0
while True:
    before = value()
    memory = mmap.mmap(-1, 100 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(100):
        memory[page * 4096] = 1
    counted = value() - before
    memory.close()
    rounds += 1
    with open(sys.argv[1] + ".new", "w") as report:
        report.write("%d %d %d" % (rounds, counted, before))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.001)
"#;

fn python(folder: &Path, how: &str) -> Spawned {
    let report = folder.join("report");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", COUNTS])
        .arg(&report)
        .args([how])
        .folder(folder)
        .output(&folder.join("log"))
        .spawn();
    program.wait_file(&report);
    program
}

/// How often it has counted, how much at last, and what stood there before that.
///
/// What it has counted at last is below zero where its count began anew meanwhile.
fn told(folder: &Path) -> [i64; 3] {
    let text = fs::read_to_string(folder.join("report")).expect("a report is always there");
    let mut words = text.split(' ').map(|word| word.parse().expect("a number"));
    [(); 3].map(|()| words.next().expect("three of them"))
}

#[track_caller]
fn must_count(program: &Spawned, folder: &Path) {
    let before = told(folder);
    program.wait_ready("its counts", || told(folder)[0] > before[0] + 1);
    let counted = told(folder)[1];
    assert!((100..150).contains(&counted), "it has counted {counted}");
}

#[test]
fn a_python_program_counts_on() {
    needs_events!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = python(folder.path(), "alone");
    for _ in 0..3 {
        program.wait_ready("a large count", || told(folder.path())[2] > 5000);
        stillframe.dump(program.pid(), KEPT).must();
        stillframe.restore(KEPT).must();
        must_count(&program, folder.path());
        let [.., now] = told(folder.path());
        assert!(now < 5000, "it began at {now}");
    }
}

/// Insists that a program is refused for all of `whys`, and counts on.
#[track_caller]
fn assert_refused(how: &str, whys: &[&str]) {
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = python(folder.path(), how);
    let outcome = stillframe.dump(program.pid(), KEPT).must_fail();
    let outcome = outcome.names(&["anon_inode:[perf_event]"]).names(whys);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    must_count(&program, folder.path());
}

#[test]
fn one_that_a_thread_has_inherited_is_refused_by_name() {
    needs_events!();
    needs_program!("/usr/bin/python3");
    let why = "it counts for tasks that its own has made since, too";
    assert_refused("inherited", &[why]);
}

#[test]
fn one_with_a_ring_is_refused_by_name() {
    needs_events!();
    needs_program!("/usr/bin/python3");
    let ring = "it is a ring of a performance event";
    assert_refused("mapped", &[ring, "its records go to a ring in memory"]);
}

/// The lines that perf has written, of page faults: when, and how many.
fn intervals(report: &Path) -> Vec<u64> {
    let text = fs::read_to_string(report).unwrap_or_default();
    let mut whole = text.lines();
    if !text.ends_with('\n') {
        whole.next_back();
    }
    let faults = whole.filter(|line| line.contains("page-faults"));
    let counts = faults.filter_map(|line| line.split(',').nth(1)?.parse().ok());
    counts.collect()
}

fn perf_counts(stillframe: &Stillframe, rounds: usize) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (report, own) = (folder.path().join("counts"), folder.path().join("report"));
    let events = "page-faults,task-clock,context-switches,cpu-clock";
    let program = Program::new("/usr/bin/perf")
        .args(["stat", "-I", "50", "-x,", "-e", events, "-o"])
        .arg(&report)
        .args(["--", "/usr/bin/python3", "-c", COUNTS])
        .arg(&own)
        .args(["alone"])
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    program.wait_file(&own);
    for round in 0..=rounds {
        if round > 0 {
            stillframe.dump(program.pid(), KEPT).must();
            stillframe.restore(KEPT).must();
        }
        must_count(&program, folder.path());
        let before = intervals(&report).len();
        program.wait_ready("intervals", || intervals(&report).len() > before + 3);
        // Of the first one, what was counted before the dump is taken.
        let last = intervals(&report).split_off(before + 1);
        let is_right = last.iter().all(|count| *count < 1_000_000);
        let is_right = is_right && last.iter().sum::<u64>() >= 100;
        assert!(is_right, "round {round}: {last:?}");
    }
}

#[test]
fn perf_counts_what_it_has_started() {
    needs_events!();
    needs_program!("/usr/bin/perf");
    needs_program!("/usr/bin/python3");
    perf_counts(&stillframe(), 3);
}
