//! The command killed at random instants: a dump leaves a target that goes on or a whole image, a
//! restore leaves a whole tree or nothing.
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use testkit::chance::Chance;
use testkit::facts::Facts;
use testkit::program::{Program, Spawned};
use testkit::stepper::{LINKAT, Run, kill_behind_fork, kill_from};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{assert_untouched, stillframe};

const KILLS_OF_BUSY: usize = 110;
const KILLS_OF_STILL: usize = 80;
const KILLS_OF_RESTORE: usize = 120;

/// How long a run takes, at most of a few.
fn usual(runs: impl Iterator<Item = Duration>) -> Duration {
    let longest = runs.max().expect("some runs");
    // Past its end too, where the last clean-up happens.
    longest + longest / 5
}

#[test]
fn a_killed_dump_lets_its_target_go_on() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its code in the target when it is killed");
    }
    let mut chance = Chance::of("a_killed_dump_lets_its_target_go_on");
    let subject = Subject::start("busy", &["8"]);
    let facts = Facts::moving(subject.pid());
    let dump = || {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["-R"]).must().elapsed
    };
    let window = usual((0..5).map(|_| dump()));
    let mut restored = 0;
    for round in 0..KILLS_OF_BUSY {
        stillframe.clear();
        let instant = chance.time(window);
        let command = stillframe.dump_command(subject.pid(), &[]);
        let ended = stillframe.kill_after(command, instant);
        let told = format!("round {round}, killed after {instant:?}, ended {ended:?}");
        settle(&stillframe, &[subject.pid()], &told);
        if subject.try_ask("count").is_err() {
            // It was past the point and its target dead or dying: then the image is whole.
            tree::wait_gone(&[subject.pid()]);
            stillframe.restore(&[]).must();
            restored += 1;
        }
        let count = subject.ask_number("count");
        wait_until(&format!("the target to count: {told}"), SOON, || {
            subject.ask_number("count") > count
        });
        assert_eq!(subject.ask("check"), "right", "{told}");
        let untouched = try_wait_for(SOON, || {
            let now = Facts::moving(subject.pid());
            facts.diff(&now).is_empty().then_some(())
        });
        if untouched.is_none() {
            assert_untouched(&facts, &Facts::moving(subject.pid()), &told);
        }
    }
    println!("{KILLS_OF_BUSY} kills within {window:?}, {restored} after the dump was done");
}

#[test]
fn a_target_cannot_tell_that_a_dump_was_killed() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its code in the target when it is killed");
    }
    let mut chance = Chance::of("a_target_cannot_tell_that_a_dump_was_killed");
    let subjects: Vec<Subject> = [
        ("tree", &["6", "still"][..]),
        ("fds", &[]),
        ("sigaltstack", &[]),
    ]
    .iter()
    .map(|(name, arguments)| Subject::start(name, arguments))
    .collect();
    for (number, subject) in subjects.iter().enumerate() {
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let dump = || {
            stillframe.clear();
            stillframe.dump(subject.pid(), &["-R"]).must().elapsed
        };
        let window = usual((0..5).map(|_| dump()));
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let facts = Facts::still(subject.pid());
        for round in 0..KILLS_OF_STILL / subjects.len() + 1 {
            stillframe.clear();
            let instant = chance.time(window);
            let command = stillframe.dump_command(subject.pid(), &["-R"]);
            let ended = stillframe.kill_after(command, instant);
            let told = format!("subject {number}, round {round}, {instant:?}, {ended:?}");
            settle(&stillframe, &subject.tree(), &told);
            // What the dump had begun in the target ends by itself.
            let untouched = try_wait_for(SOON, || {
                let now = Facts::still(subject.pid());
                differences(subject, &facts, &now).is_empty().then_some(())
            });
            if untouched.is_none() {
                let left = differences(subject, &facts, &Facts::still(subject.pid()));
                panic!("{told}:\n{}", left.join("\n"));
            }
        }
    }
    assert_eq!(subjects[0].ask("check"), "right");
    assert_eq!(subjects[1].ask("check"), "right");
    assert_eq!(subjects[2].ask("raise-second"), "on the alternate stack");
}

/// What differs, but for the end of the vDSO: a killed dump leaves code in its padding, which no
/// task executes and which the next dump overwrites.
fn differences(subject: &Subject, before: &Facts, after: &Facts) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", subject.pid()));
    let maps = maps.expect("the maps of the subject can be read");
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]"));
    let vdso = vdso.and_then(|line| line.split([' ', '-']).nth(1));
    let end = u64::from_str_radix(vdso.expect("there is a vDSO"), 16).expect("an address");
    let padding = format!(" page {:#x}: ", end - 4096);
    let mut differences = before.diff(after);
    differences.retain(|line| !line.contains(&padding));
    differences
}

/// Waits until nothing of the killed command is left and none of `pids` is traced or stopped.
#[track_caller]
fn settle(stillframe: &Stillframe, pids: &[u32], told: &str) {
    wait_until(&format!("what was killed to be gone: {told}"), SOON, || {
        let helpers = stillframe.helpers();
        helpers.iter().for_each(|&pid| tree::reap(pid));
        pids.iter().for_each(|&pid| tree::reap(pid));
        helpers.is_empty()
            && pids.iter().all(|&pid| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.map_or(true, |status| {
                    status.contains("TracerPid:\t0") && !status.contains("State:\tT")
                })
            })
    });
}

#[test]
fn a_killed_restore_leaves_all_or_nothing() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves half a tree when its restore is killed");
    }
    let mut chance = Chance::of("a_killed_restore_leaves_all_or_nothing");
    let subject = Subject::start("tree", &["8"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    let restore = || {
        let elapsed = stillframe.restore(&[]).must().elapsed;
        subject.kill();
        tree::wait_gone(&pids);
        elapsed
    };
    let window = usual((0..5).map(|_| restore()));
    let mut whole = 0;
    for round in 0..KILLS_OF_RESTORE {
        let instant = chance.time(window);
        let ended = stillframe.kill_after(stillframe.restore_command(&[]), instant);
        let told = format!("round {round}, killed after {instant:?}, ended {ended:?}");
        settle(&stillframe, &pids, &told);
        // Tasks that are being killed look alive for a moment.
        let is_whole = try_wait_for(SOON, || {
            pids.iter().for_each(|&pid| tree::reap(pid));
            let alive = pids.iter().filter(|&&pid| tree::is_alive(pid)).count();
            if alive == pids.len() && subject.try_ask("total").is_ok() {
                return Some(true);
            }
            (alive == 0).then_some(false)
        });
        let Some(is_whole) = is_whole else {
            let states = pids
                .iter()
                .map(|&pid| (pid, tree::state(pid), tree::parent(pid)));
            panic!(
                "neither all nor nothing: {told}: {:?}",
                states.collect::<Vec<_>>()
            );
        };
        let done = ended.is_some_and(|status| status.success());
        assert!(is_whole || !done, "{told}");
        if is_whole {
            whole += 1;
            let counts = || -> Vec<u64> {
                let counts = subject.ask("counts");
                counts
                    .split(' ')
                    .map(|count| count.parse().expect("a number"))
                    .collect()
            };
            let before = counts();
            wait_until(&format!("every task to count: {told}"), SOON, || {
                let now = counts();
                now.iter()
                    .zip(&before)
                    .skip(1)
                    .all(|(now, before)| now > before)
            });
            assert_eq!(subject.ask("check"), "right", "{told}");
            subject.kill();
        }
        tree::wait_gone(&pids);
    }
    println!("{KILLS_OF_RESTORE} kills within {window:?}, {whole} after the restore was done");
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_failed_restore_returns_when_its_tasks_are_gone() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not wait for the tasks of a failed restore");
    }
    let subject = Subject::start("tree", &["30", "still"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let script = scratch.path().join("refuse");
    let text = "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != \"$STAGE\" ]\n";
    std::fs::write(&script, text).expect("the folder can be written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).expect("the file is ours");
    let script = script.to_str().expect("a plain path");
    for stage in ["post-restore", "pre-resume"].repeat(10) {
        let mut command = stillframe.restore_command(&["--action-script", script]);
        let status = command.env("STAGE", stage).status().expect("it starts");
        assert_eq!(status.code(), Some(1), "{stage}");
        let left = pids.iter().filter(|&&pid| tree::state(pid).is_some());
        let left = left.map(|&pid| (pid, tree::state(pid))).collect::<Vec<_>>();
        assert_eq!(left, [], "{stage}");
    }
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_restore_waits_for_tasks_that_are_being_killed() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not wait for pids");
    }
    let subject = Subject::start("tree", &["30", "still"]);
    let pids = subject.tree();
    stillframe.dump(subject.pid(), &[]).must();
    for round in 0..20 {
        stillframe.restore(&[]).must();
        assert_eq!(subject.ask("check"), "right", "round {round}");
        for &pid in pids.iter().rev() {
            tree::signal(pid, rustix::process::Signal::KILL);
        }
        // They are this process's children when they have ended: somebody must wait for them.
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    pids.iter().for_each(|&pid| tree::reap(pid));
                    thread::yield_now();
                }
            });
            let outcome = stillframe.restore(&[]);
            is_done.store(true, Relaxed);
            outcome
        })
        .must();
        subject.kill();
        tree::wait_gone(&pids);
    }
}

/// A root and three children that all wait for signals: each one makes a file `seen` as soon as it
/// hears that another one is gone, and the root makes `alive` when it is asked.
const WITNESSES: &str = r#"
import ctypes, os, signal, sys
folder = sys.argv[1]
told = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, told)
PR_SET_PDEATHSIG = 1
for number in range(3):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        break
open(f"{folder}/{os.getpid()}", "w").close()
CLD_STOPPED, CLD_CONTINUED = 5, 6
while True:
    heard = signal.sigwaitinfo(told)
    if heard.si_signo == signal.SIGUSR2:
        open(folder + "/alive", "w").close()
    elif heard.si_signo == signal.SIGUSR1 or heard.si_code not in (CLD_STOPPED, CLD_CONTINUED):
        with open(folder + "/seen", "a") as seen:
            print(os.getpid(), heard, file=seen)
"#;

struct Witnesses {
    program: Spawned,
    pids: Vec<u32>,
    folder: tempfile::TempDir,
}

impl Witnesses {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", WITNESSES])
            .arg(folder.path())
            .spawn();
        let files = || std::fs::read_dir(folder.path()).expect("it is there");
        wait_until("four tasks", SOON, || files().count() == 4);
        let pids = program.tree();
        assert_eq!(pids.len(), 4);
        Self {
            program,
            pids,
            folder,
        }
    }

    /// Waits until all of the tree goes on, or is gone; tells whether it goes on.
    #[track_caller]
    fn settle(&self, stillframe: &Stillframe, told: &str) -> bool {
        settle(stillframe, &self.pids, told);
        let has_image = stillframe.images().join("manifest.img").exists();
        // Who is being killed looks alive for a moment.
        let wanted = if has_image { 0 } else { self.pids.len() };
        wait_until(&format!("{wanted} tasks: {told}"), SOON, || {
            self.pids.iter().for_each(|&pid| tree::reap(pid));
            let living = self.pids.iter().filter(|&&pid| tree::is_alive(pid));
            living.count() == wanted
        });
        self.assert_unseen(told);
        !has_image
    }

    #[track_caller]
    fn assert_unseen(&self, told: &str) {
        let seen = std::fs::read_to_string(self.folder.path().join("seen"));
        assert!(seen.is_err(), "{told}: {seen:?}");
    }

    /// Has the root tell that it lives.
    #[track_caller]
    fn answer(&self, told: &str) {
        wait_until(&format!("an answer: {told}"), SOON, || self.answers());
        self.assert_unseen(told);
    }

    /// Asks the root whether it lives; its answer may come to the next question.
    fn answers(&self) -> bool {
        tree::signal(self.program.pid(), rustix::process::Signal::USR2);
        std::fs::remove_file(self.folder.path().join("alive")).is_ok()
    }
}

#[test]
fn a_dump_that_is_killed_at_any_call_leaves_the_tree_or_its_image() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves half a tree when its dump is killed");
    }
    let witnesses = Witnesses::start();
    let (mut killed, mut images) = (0, 0);
    // From the call on that gives the first file of the image its name.
    for at in 0.. {
        stillframe.clear();
        let mut dump = stillframe.dump_command(witnesses.program.pid(), &[]);
        dump.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_from(&dump, |registers| registers.orig_rax == LINKAT, at);
        let told = format!("call {at}: {run:?}");
        if !witnesses.settle(&stillframe, &told) {
            images += 1;
            tree::wait_gone(&witnesses.pids);
            stillframe.restore(&[]).must();
        }
        witnesses.answer(&told);
        match run {
            Run::Killed(_) => killed += 1,
            Run::Ended(_) => break,
        }
    }
    println!("{killed} kills, {images} images");
    assert!(killed > 10 && images > 2, "{killed} kills, {images} images");
}

#[test]
fn a_restore_that_is_killed_at_any_call_lets_all_of_the_tree_go_on_or_none() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves half a tree when its restore is killed");
    }
    let witnesses = Witnesses::start();
    let (mut again, mut went_on) = (0, 0);
    for at in 0.. {
        stillframe.clear();
        stillframe.dump(witnesses.program.pid(), &[]).must();
        // It may have been asked more than once.
        let _ = std::fs::remove_file(witnesses.folder.path().join("alive"));
        let mut restore = stillframe.restore_command(&[]);
        restore.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_behind_fork(&restore, at);
        let told = format!("call {at}: {run:?}");
        settle(&stillframe, &witnesses.pids, &told);
        let living = || witnesses.pids.iter().filter(|pid| tree::is_alive(**pid));
        // Who is being killed looks alive for a moment.
        let whole = try_wait_for(SOON, || {
            witnesses.pids.iter().for_each(|&pid| tree::reap(pid));
            let answers = living().count() == 4 && witnesses.answers();
            (answers || living().count() == 0).then_some(answers)
        });
        match whole {
            Some(true) => went_on += 1,
            Some(false) => {
                again += 1;
                stillframe.restore(&[]).must();
            }
            None => panic!("half a tree: {told}"),
        }
        witnesses.answer(&told);
        if matches!(run, Run::Ended(_)) {
            break;
        }
    }
    println!("{again} restored again, {went_on} went on");
    assert!(again > 10 && went_on > 10);
}

/// Has a file open by a name that it has no more, though it has another one.
const RENAMED: &str = r#"
import os, signal, sys
os.chdir(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
file = open("one", "w")
os.link("one", "other")
os.unlink("one")
open("ready", "w").close()
while True:
    signal.sigwait({signal.SIGUSR2})
    open("alive", "w").close()
"#;

#[test]
fn a_restore_that_is_killed_at_any_call_leaves_links_to_the_next_one_or_none() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves its links");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", RENAMED])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let links = || {
        let names = std::fs::read_dir(folder.path()).expect("it is there");
        let names = names.map(|entry| entry.expect("it is there").file_name());
        let links = names.filter(|name| name.to_string_lossy().starts_with("link_remap"));
        links.count()
    };
    let alive = folder.path().join("alive");
    let mut went_on = 0;
    for at in 0.. {
        stillframe.clear();
        stillframe.dump(program.pid(), &["--link-remap"]).must();
        assert_eq!(links(), 1);
        let mut restore = stillframe.restore_command(&[]);
        restore.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_behind_fork(&restore, at);
        let told = format!("call {at}: {run:?}");
        settle(&stillframe, &[program.pid()], &told);
        let goes_on = try_wait_for(SOON, || {
            tree::reap(program.pid());
            if !tree::is_alive(program.pid()) {
                return Some(false);
            }
            tree::signal(program.pid(), rustix::process::Signal::USR2);
            alive.exists().then_some(true)
        });
        match goes_on {
            Some(true) => went_on += 1,
            Some(false) => drop(stillframe.restore(&[]).must()),
            None => panic!("neither alive nor gone: {told}"),
        }
        let _ = std::fs::remove_file(&alive);
        assert_eq!(links(), 0, "{told}");
        if matches!(run, Run::Ended(_)) {
            break;
        }
    }
    assert!(went_on > 3, "{went_on} went on");
}

/// Has messages waiting in sockets of two kinds, and tells where it peeks from when it is asked.
const PEEKED: &str = r#"
import os, signal, socket, sys
SO_PEEK_OFF = 42
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
datagrams, packets = [socket.socketpair(socket.AF_UNIX, kind)
                      for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]
packets[1].setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 3)
for word in (b"one", b"two", b"three"):
    datagrams[0].send(word)
    packets[0].send(word)
open(sys.argv[1] + "/ready", "w").close()
while True:
    signal.sigwait({signal.SIGUSR2})
    with open(sys.argv[1] + "/draft", "w") as draft:
        for one in datagrams[1], packets[1]:
            print(one.getsockopt(socket.SOL_SOCKET, SO_PEEK_OFF), file=draft)
    os.rename(sys.argv[1] + "/draft", sys.argv[1] + "/told")
"#;

#[test]
fn a_killed_dump_leaves_where_sockets_peek_from() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves it changed");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", PEEKED])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let told = folder.path().join("told");
    let ask = || {
        tree::signal(program.pid(), rustix::process::Signal::USR2);
        wait_until("an answer", SOON, || told.exists());
        let text = std::fs::read_to_string(&told).expect("it is there");
        std::fs::remove_file(&told).expect("it is there");
        text
    };
    let before = ask();
    let sets_it = |registers: &sys::ptrace::Registers| {
        const SETSOCKOPT: u64 = 54;
        const SO_PEEK_OFF: u64 = 42;
        registers.orig_rax == SETSOCKOPT && registers.rsi == 1 && registers.rdx == SO_PEEK_OFF
    };
    // Each message is looked at after one such call, and the last one takes it back.
    for at in 0..16 {
        stillframe.clear();
        let mut dump = stillframe.dump_command(program.pid(), &["-R"]);
        dump.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_from(&dump, sets_it, at);
        assert!(matches!(run, Run::Killed(_)), "call {at}: {run:?}");
        settle(
            &stillframe,
            &[program.pid()],
            &format!("call {at}: {run:?}"),
        );
        assert_eq!(ask(), before, "call {at}");
    }
    assert_eq!(before, "-1\n3\n");
}
