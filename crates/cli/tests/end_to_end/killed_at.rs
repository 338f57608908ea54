//! The command killed before each of its system calls, one after the other.
use testkit::program::{Program, Spawned};
use testkit::stepper::{LINKAT, Run, kill_behind_fork, kill_from};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::kills::wait_for_cleanup;
use crate::stillframe;

/// A root and three children that all wait for signals: each one makes a file `seen` as soon as it
/// hears that another one is gone, and the root makes a folder `alive` when it is asked, for which
/// it has nothing open at any moment.
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
        if not os.path.exists(folder + "/alive"):
            os.mkdir(folder + "/alive")
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
    fn wait_for_outcome(&self, stillframe: &Stillframe, told: &str) -> bool {
        wait_for_cleanup(stillframe, &self.pids, told);
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
        std::fs::remove_dir(self.folder.path().join("alive")).is_ok()
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
        if !witnesses.wait_for_outcome(&stillframe, &told) {
            images += 1;
            tree::wait_gone(&witnesses.pids);
            stillframe.restore(&[]).must();
        }
        witnesses.answer(&told);
        match run {
            Run::Killed(_) => killed += 1,
            Run::Ended(_) | Run::Held(_) => break,
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
        let _ = std::fs::remove_dir(witnesses.folder.path().join("alive"));
        let mut restore = stillframe.restore_command(&[]);
        restore.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_behind_fork(&restore, at);
        let told = format!("call {at}: {run:?}");
        wait_for_cleanup(&stillframe, &witnesses.pids, &told);
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
                tree::wait_gone(&witnesses.pids);
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
    // How many calls there are on either side changes with the restore; none on one side would mean
    // that trying every call missed the moment that it is about.
    assert!(again > 3 && went_on > 3);
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
    if not os.path.exists("alive"):
        os.mkdir("alive")
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
        wait_for_cleanup(&stillframe, &[program.pid()], &told);
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
            Some(false) => {
                tree::wait_gone(&[program.pid()]);
                stillframe.restore(&[]).must();
            }
            None => panic!("neither alive nor gone: {told}"),
        }
        let _ = std::fs::remove_dir(&alive);
        assert_eq!(links(), 0, "{told}");
        if matches!(run, Run::Ended(_)) {
            break;
        }
    }
    assert!(went_on > 3, "{went_on} went on");
}

/// Has a file and a folder open that were deleted.
const DELETED: &str = r#"
import os, signal, sys
os.chdir(sys.argv[1])
os.mkdir("folder")
held = open("file", "w"), os.open("folder", os.O_RDONLY)
os.unlink("file")
os.rmdir("folder")
open("ready", "w").close()
while True:
    signal.pause()
"#;

#[test]
fn a_killed_restore_leaves_no_file_that_was_deleted() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves them");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", DELETED])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let open = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", program.pid())).expect("it lives");
        let link = |fd: std::io::Result<std::fs::DirEntry>| {
            let path = std::fs::read_link(fd.ok()?.path()).ok()?;
            path.starts_with(folder.path()).then_some(path)
        };
        let mut links = fds.filter_map(link).collect::<Vec<_>>();
        links.sort();
        links
    };
    let before = open();
    assert_eq!(before.len(), 2);
    stillframe.dump(program.pid(), &[]).must();
    // From where it makes something under a name, or a process that does.
    let makes = |registers: &sys::arch::Registers| {
        const OPEN: u64 = 2;
        const O_EXCL: u64 = 0o200;
        const CLONE: u64 = 56;
        let creates = registers.orig_rax == OPEN && registers.rsi & O_EXCL != 0;
        creates || registers.orig_rax == CLONE
    };
    for at in 0..24 {
        let mut restore = stillframe.restore_command(&[]);
        restore.env("TESTKIT_MARK", stillframe.mark());
        let run = kill_from(&restore, makes, at);
        assert!(matches!(run, Run::Killed(_)), "call {at}: {run:?}");
        let told = format!("call {at}: {run:?}");
        wait_for_cleanup(&stillframe, &[program.pid()], &told);
        let names = std::fs::read_dir(folder.path()).expect("it is there");
        assert_eq!(names.count(), 1, "{told}");
    }
    stillframe.restore(&[]).must();
    assert_eq!(open(), before);
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
    let sets_it = |registers: &sys::arch::Registers| {
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
        wait_for_cleanup(
            &stillframe,
            &[program.pid()],
            &format!("call {at}: {run:?}"),
        );
        assert_eq!(ask(), before, "call {at}");
    }
    assert_eq!(before, "-1\n3\n");
}
