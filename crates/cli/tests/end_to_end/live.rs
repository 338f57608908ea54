//! Dumps of trees that go on: what they write meanwhile is not in the image, what they wrote before
//! is, and they cannot tell.
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::process::{Pid, Signal, kill_process};
use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::program::Program;
use testkit::slow_disk::SlowDisk;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::equal::pages_of;
use crate::{action_script, assert_restored, assert_untouched, stillframe};

/// Insists that all threads go on rightly for some rounds.
#[track_caller]
fn goes_on(subject: &Subject, others: bool) {
    for question in ["rounds", "others"].iter().take(1 + usize::from(others)) {
        let now = subject.ask_number(question);
        wait_until(&format!("{question} to go on"), SOON, || {
            subject.ask("check") != "right" || subject.ask_number(question) > now + 2
        });
    }
    assert_eq!(subject.ask("check"), "right");
}

fn is_protected(pid: u32) -> bool {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"));
    smaps.expect("its mappings").contains(" uw")
}

/// Dumps live some times, and restores the last image after the end of the original.
#[track_caller]
fn lives_on(stillframe: &Stillframe, arguments: &[&str], times: usize) {
    let subject = Subject::start("writers", arguments);
    let others = arguments.len() > 3;
    for _ in 0..times {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        assert!(
            !is_protected(subject.pid()),
            "nothing is left of the protection"
        );
        goes_on(&subject, others);
        let mut show = stillframe.command(&["show", "--stats"]);
        let shown = show.arg(stillframe.images()).output().expect("it starts");
        let shown = String::from_utf8_lossy(&shown.stdout);
        assert!(shown.contains(" live dump\n"), "{shown}");
    }
    let pids = subject.tree();
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    goes_on(&subject, others);
}

#[test]
fn memory_is_that_of_one_instant() {
    needs_root!();
    let stillframe = stillframe();
    lives_on(&stillframe, &["6", "3", "100"], 2);
}

#[test]
fn memory_written_here_and_there_is_that_of_one_instant() {
    needs_root!();
    let stillframe = stillframe();
    lives_on(&stillframe, &["12", "2", "5"], 2);
}

#[test]
fn memory_that_several_threads_protect_is_that_of_one_instant() {
    needs_root!();
    let stillframe = stillframe();
    lives_on(&stillframe, &["300", "2", "10"], 1);
}

#[test]
fn mappings_change_meanwhile() {
    needs_root!();
    let stillframe = stillframe();
    for other in ["discard", "guard", "unmap", "move", "grow", "fork", "read"] {
        lives_on(&stillframe, &["2", "1", "50", other], 1);
    }
    lives_on(
        &stillframe,
        &["4", "1", "50", "discard", "unmap", "move", "read"],
        3,
    );
}

#[test]
fn a_task_cannot_tell_that_it_was_dumped_live() {
    needs_root!();
    let stillframe = stillframe();
    for (name, arguments) in crate::states::WAITING {
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        if *name == "creds" && !std::path::Path::new("/dev/userfaultfd").exists() {
            // It has given up its rights, and nothing can be handed to it.
            let outcome = stillframe.dump(subject.pid(), &["--live"]);
            outcome.must_fail().names(&["may not use userfaultfd"]);
            continue;
        }
        let before = Facts::still(subject.pid());
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        wait_until("the subject to wait again", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_untouched(&before, &after, name);
    }
}

#[test]
fn a_killed_live_dump_lets_its_target_go_on() {
    const KILLS: usize = 6;
    needs_root!();
    let stillframe = stillframe();
    let mut chance = Chance::of("a_killed_live_dump_lets_its_target_go_on");
    let subject = Subject::start("writers", &["2", "1", "30", "discard"]);
    let whole = stillframe.dump(subject.pid(), &["--live"]).must();
    for _ in 0..KILLS {
        stillframe.clear();
        let command = stillframe.dump_command(subject.pid(), &["--live"]);
        stillframe.kill_after(command, chance.time(whole.elapsed));
        wait_until("the protection to end", SOON, || {
            !is_protected(subject.pid())
        });
        goes_on(&subject, true);
    }
}

/// Programs that want the processors all the time, in the session of the dump.
struct BusyLoops(Vec<Child>);

impl BusyLoops {
    fn start(count: usize) -> Self {
        let start = |_| {
            Command::new("sh")
                .args(["-c", "while :; do :; done"])
                .spawn()
        };
        Self((0..count).map(|at| start(at).expect("sh starts")).collect())
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Who is asked to stop inside a system call that writes to a protected page tries that over and
/// over, and needs the processor for it that another one needs to lift the protection.
#[test]
fn many_short_waits_beside_busy_loops_are_stopped_only_for_moments() {
    const DUMPS: usize = 20;
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("short-waits", &["30"]);
    let _loops = BusyLoops::start(4);
    for _ in 0..DUMPS {
        stillframe.clear();
        let outcome = stillframe.dump(subject.pid(), &["--live", "--timeout", "10"]);
        let outcome = outcome.must();
        assert!(outcome.elapsed < SOON / 10, "{:?}", outcome.elapsed);
        let before = subject.ask_number("rounds");
        wait_until("more rounds", SOON, || {
            subject.ask_number("rounds") > before
        });
    }
    assert_eq!(subject.ask("ended"), "");
    let pids = subject.tree();
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    let before = subject.ask_number("rounds");
    wait_until("more rounds", SOON, || {
        subject.ask_number("rounds") > before
    });
    assert_eq!(subject.ask("ended"), "");
}

#[test]
fn a_task_that_runs_one_program_after_another_is_dumped_between_two() {
    needs_root!();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = folder.path().join("again");
    fs::write(&script, "exec /bin/sh \"$0\"\n").expect("a script");
    let program = Program::new("sh").arg(&script).spawn();
    // It runs one for a millisecond or two: the first try alone fails more often than not.
    for _ in 0..6 {
        stillframe.clear();
        stillframe
            .dump(program.pid(), &["--live", "--timeout", "30"])
            .must();
        assert!(program.is_alive());
    }
}

#[test]
fn who_tracks_the_memory_is_named() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["2"]);
    stillframe.pre_dump(subject.pid(), &[]).must();
    let tracker = || -> String {
        let told = stillframe
            .dump(subject.pid(), &["--live"])
            .must_fail()
            .told();
        let pid = told
            .split("stillframe-trk, pid ")
            .nth(1)
            .unwrap_or_default();
        pid.split(',').next().unwrap_or_default().to_owned()
    };
    let pid = tracker();
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    assert_eq!(name, "stillframe-trk\n", "{pid}");
    let pid = pid.parse().ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, Signal::TERM).expect("it lives");
    wait_until("the end of the tracking", SOON, || {
        !is_protected(subject.pid())
    });
    stillframe.clear();
    stillframe.dump(subject.pid(), &["--live"]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_live_dump_leaves_nothing_stopped() {
    let outcome = stillframe().dump(std::process::id(), &["--live", "--leave-stopped"]);
    outcome.must_fail().names(&["--live", "--leave-stopped"]);
}

/// Counts in memory that system calls write to as well, and reports it.
const UNPRIVILEGED: &str = r#"
import os, sys
pages = bytearray(16 << 20)
zero = open("/dev/zero", "rb", buffering=0)
report = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
count = 0
while True:
    count += 1
    at = count * 4096 % len(pages)
    zero.readinto(memoryview(pages)[at:at + 4096])
    pages[at:at + 8] = count.to_bytes(8, "little")
    if count % 100 == 0:
        os.pwrite(report, b"%20d" % count, 0)
"#;

#[test]
fn a_task_without_privileges_is_dumped_live() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("setpriv");
    let stillframe = stillframe();
    if !Path::new("/dev/userfaultfd").exists() {
        testkit::skip!("there is no /dev/userfaultfd");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let anyone = fs::Permissions::from_mode(0o777);
    fs::set_permissions(folder.path(), anyone).expect("the folder is ours");
    let report = folder.path().join("report");
    let program = Program::new("setpriv")
        .args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
        ])
        .args(["/usr/bin/python3", "-c", UNPRIVILEGED])
        .arg(&report)
        .folder(folder.path())
        .spawn();
    program.wait_text(&report, "00");
    let count = || -> u64 {
        let text = fs::read_to_string(&report).expect("a report");
        text.trim().parse().expect("a number")
    };
    let pid = program.pid();
    let facts = Facts::moving(pid);
    for _ in 0..3 {
        stillframe.clear();
        stillframe.dump(pid, &["--live"]).must();
        assert_untouched(&facts, &Facts::moving(pid), "a task without privileges");
        let before = count();
        program.wait_ready("a higher count", || count() > before);
    }
    let tasks = program.tree();
    tree::kill(&tasks);
    tree::wait_gone(&tasks);
    let before = count();
    stillframe.restore(&[]).must();
    assert_restored(
        &stillframe,
        &facts,
        &Facts::moving(pid),
        "a task without privileges",
    );
    // It was saved when it had counted less.
    program.wait_ready("a higher count", || count() > before);
}

#[test]
fn a_tree_is_dumped_live_and_restored() {
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("tree", &["6"]);
    let facts = Facts::moving(subject.pid());
    stillframe.dump(subject.pid(), &["--live"]).must();
    // The tasks write to two blocks of 16 pages at most, and the others are the root's.
    let pages = pages_of(&stillframe);
    assert!(pages["shared"].as_u64() >= Some(5 * 32), "{pages}");
    let pids = subject.tree();
    assert_eq!(subject.ask("check"), "right");
    subject.kill();
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
    let after = Facts::moving(subject.pid());
    assert_restored(&stillframe, &facts, &after, "a tree");
}

#[test]
fn what_children_have_of_their_parent_is_stored_once_until_one_of_them_writes() {
    const BLOCKS: u64 = 1024;
    needs_root!();
    let stillframe = stillframe();
    for _ in 0..3 {
        // In the first second there is always more to be written for the first time.
        let subject = Subject::start("cow-memory", &["2", &BLOCKS.to_string()]);
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        goes_on(&subject, false);
        let pids = subject.tree();
        subject.kill();
        tree::wait_gone(&pids);
        stillframe.restore(&[]).must();
        goes_on(&subject, false);
    }
}

/// Adds rows to a data base, ten in a transaction, and knows how many there must be.
const DATA_BASE: &str = r#"
import os, sqlite3, sys
folder = sys.argv[1]
os.mkdir(folder + "/db")
data = sqlite3.connect(folder + "/db/data", isolation_level=None)
data.execute("pragma synchronous = off")
data.execute("create table rows (number integer primary key, text text)")
count = 0
os.mkdir(folder + "/ready")
while True:
    data.execute("begin")
    for _ in range(10):
        data.execute("insert into rows values (?, ?)", (count, "x" * 100))
        count += 1
    data.execute("commit")
    if os.path.exists(folder + "/ask"):
        os.unlink(folder + "/ask")
        rows, = data.execute("select count(*) from rows").fetchone()
        check, = data.execute("pragma integrity_check").fetchone()
        with open(folder + "/draft", "w") as draft:
            draft.write(f"{rows == count} {check} {rows}")
        os.rename(folder + "/draft", folder + "/answer")
"#;

/// Copies the data base while the target stands still.
const COPIES: &str = r#"[ "$CRTOOLS_SCRIPT_ACTION" = post-freeze ] || exit 0
rm -rf FOLDER/copy && cp -a FOLDER/db FOLDER/copy
grep -h State /proc/$CRTOOLS_INIT_PID/task/*/status > FOLDER/states
"#;

/// Gives the files in `db` the contents that they have in `copy`: SQLite wants them to be the very
/// same files.
fn put_back(copy: &Path, db: &Path) {
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).expect("it is there");
        let names = entries.map(|entry| entry.expect("a name").file_name());
        names.collect::<Vec<_>>()
    };
    for name in names(db) {
        if !copy.join(&name).exists() {
            fs::remove_file(db.join(name)).expect("it is there");
        }
    }
    for name in names(copy) {
        let contents = fs::read(copy.join(&name)).expect("it was copied");
        fs::write(db.join(name), contents).expect("it can be written");
    }
}

#[test]
fn a_data_base_is_copied_at_the_instant() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no such stage");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let at = |name: &str| folder.path().join(name);
    let place = folder.path().display().to_string();
    let script = action_script(folder.path(), &COPIES.replace("FOLDER", &place));
    let program = Program::new("/usr/bin/python3")
        .args(["-c", DATA_BASE])
        .arg(folder.path())
        .spawn();
    program.wait_file(&at("ready"));
    let ask = || -> u64 {
        std::fs::write(at("ask"), "").expect("the folder is writable");
        program.wait_file(&at("answer"));
        let answer = std::fs::read_to_string(at("answer")).expect("it answered");
        std::fs::remove_file(at("answer")).expect("it is there");
        let rows = answer.strip_prefix("True ok ");
        rows.and_then(|rows| rows.parse().ok())
            .unwrap_or_else(|| panic!("the rows are not those that it knows of: {answer}"))
    };
    for options in [&["--live"][..], &["-R"], &["--live"], &[]] {
        let before = ask();
        let options = [options, &["--file-locks", "--action-script", &script]].concat();
        stillframe.dump(program.pid(), &options).must();
        let states = std::fs::read_to_string(at("states")).expect("it was called");
        assert!(
            states.lines().all(|line| line.contains("t (tracing stop)")),
            "{states}"
        );
        if tree::is_alive(program.pid()) {
            // It writes on, to files that the image knows nothing of.
            assert!(ask() > before);
            program.kill();
        }
        tree::wait_gone(&[program.pid()]);
        put_back(&at("copy"), &at("db"));
        stillframe.restore(&["--file-locks"]).must();
        assert!(ask() >= before, "{options:?}");
    }
}

#[test]
fn what_disks_write_to_memory_is_of_the_instant() {
    needs_root!();
    let stillframe = stillframe();
    let Ok(disk) = SlowDisk::mount() else {
        testkit::skip!("FUSE cannot be mounted");
    };
    let file = disk.file();
    let subject = Subject::start("direct-reads", &[file.to_str().expect("a name")]);
    for _ in 0..3 {
        let reads = subject.ask_number("reads");
        wait_until("reads", SOON, || subject.ask_number("reads") > reads + 500);
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--live"]).must();
        let pids = subject.tree();
        subject.kill();
        tree::wait_gone(&pids);
        stillframe.restore(&[]).must();
        assert_eq!(subject.ask("check"), "right");
    }
}
