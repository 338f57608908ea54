//! Trees that run before their memory has come (`restore --lazy-pages`).
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use testkit::chance::Chance;
use testkit::program::Program;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::redis::{self, Client, KEYS};
use crate::{Facts, assert_restored, stillframe, telling_status};

const STATUS_CORRUPT: Option<i32> = Some(5);
const LAZY: &[&str] = &["--lazy-pages"];

/// The servers of lazy pages that restores have left behind.
fn servers(stillframe: &Stillframe) -> Vec<u32> {
    let named = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.trim() == "stillframe-lazy")
    };
    stillframe.helpers().into_iter().filter(named).collect()
}

/// Waits until all has come: nobody serves any more, and nothing is left of it.
pub(crate) fn wait_whole(stillframe: &Stillframe) {
    wait_until("all pages", SOON, || servers(stillframe).is_empty());
}

/// Waits until the kernel has closed the userfaultfd of a server that has ended: it has lost its
/// name and its environment before.
pub(crate) fn wait_unregistered(pid: u32) {
    wait_until("the end of the userfaultfd", SOON, || {
        let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        !maps.is_empty()
            && !maps
                .lines()
                .any(|line| line.starts_with("VmFlags") && line.contains(" um"))
    });
}

/// Waits until nothing of a tree's memory is still to come, so that it can be dumped again.
pub(crate) fn wait_all_has_come(stillframe: &Stillframe, pids: &[u32]) {
    wait_whole(stillframe);
    let living = pids.iter().filter(|pid| tree::is_alive(**pid));
    living.for_each(|pid| wait_unregistered(tree::asked(*pid)));
}

#[test]
fn memory_that_moves_while_it_comes_is_right() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a server of its own");
    }
    let subject = Subject::start("moving", &["128"]);
    let mut chance = Chance::of("memory_that_moves_while_it_comes_is_right");
    for _ in 0..4 {
        stillframe.dump(subject.pid(), &[]).must();
        stillframe.restore(LAZY).must();
        let stir = format!("stir {} 600", chance.below(1 << 30));
        let told = || fs::read_to_string(subject.folder().join("output")).unwrap_or_default();
        assert_eq!(subject.ask(&stir), "right", "{}", told());
        assert_eq!(subject.ask("check"), "right");
        wait_whole(&stillframe);
        assert_eq!(subject.ask("check"), "right");
    }
    // What came lazily is memory as any other.
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_program_that_is_looked_at_after_all_has_come_is_what_it_was() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a server of its own");
    }
    for (name, arguments) in [("mmaps", &[][..]), ("patchwork", &["8"])] {
        let subject = Subject::start(name, arguments);
        let before = Facts::still(subject.pid());
        stillframe.dump(subject.pid(), &[]).must();
        stillframe.restore(LAZY).must();
        wait_whole(&stillframe);
        wait_unregistered(subject.pid());
        assert_restored(&stillframe, &before, &Facts::still(subject.pid()), name);
        assert_eq!(subject.ask("check"), "right", "{name}");
    }
}

#[test]
fn redis_answers_while_its_memory_comes() {
    needs_root!();
    needs_program!("redis-server");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a server of its own");
    }
    let (_folder, port, server, mut client) = redis::start();
    client.fill();
    // All keys, by a script of the server's own.
    let all = format!(
        "for i=1,{KEYS} do if redis.call('GET', 'key:'..i) ~= 'value '..i*7 then return i end end \
         return 'right'"
    );
    for _ in 0..2 {
        stillframe.dump(server.pid(), &["--tcp-established"]).must();
        let options = ["--tcp-established", "--lazy-pages"];
        stillframe.restore(&options).must();
        assert_eq!(client.ask(&["GET", "key:77777"]), "value 544439");
        // It forks, and its child goes through all of its memory.
        let saving = client.ask(&["BGSAVE"]);
        assert!(saving.starts_with("Background saving"), "{saving}");
        assert_eq!(client.ask(&["EVAL", &all, "0"]), "right");
        assert_eq!(client.ask(&["SET", "late", "1"]), "OK");
        assert_eq!(Client::connect(port).ask(&["DEL", "late"]), "1");
        let saved = || client.info("rdb_bgsave_in_progress") == 0;
        wait_until("a snapshot", SOON, saved);
        assert!(
            client
                .ask(&["INFO", "persistence"])
                .contains("rdb_last_bgsave_status:ok")
        );
        wait_whole(&stillframe);
        assert_eq!(client.ask(&["EVAL", &all, "0"]), "right");
    }
}

/// Twenty processes with 3 MiB of their own, memory that all share, and more that they have from
/// their parent; each adds to its words and to all of the shared ones for ever.
const TWENTY: &str = r#"
import mmap, os, signal, sys, time
folder = sys.argv[1]
shared = mmap.mmap(-1, 4 << 20)
theirs = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(theirs), 4096):
    theirs[at:at + 8] = at.to_bytes(8, "little")
def look(memory, add):
    return all(int.from_bytes(memory[at:at + 8], "little") == at + add for at in range(0, len(memory), 4096))
def child(number):
    own = mmap.mmap(-1, 3 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(own), 4096):
        own[at:at + 8] = (at + number).to_bytes(8, "little")
    rounds = 0
    while True:
        rounds += 1
        right = look(own, number) and look(theirs, 0)
        shared[number * 8:number * 8 + 8] = rounds.to_bytes(8, "little")
        right = right and int.from_bytes(shared[number * 8:number * 8 + 8], "little") == rounds
        with open(f"{folder}/{number}.draft", "w") as draft:
            draft.write(f"{rounds if right else 'wrong'}")
        os.rename(f"{folder}/{number}.draft", f"{folder}/{number}")
        time.sleep(0.02)
for number in range(1, 20):
    if os.fork() == 0:
        child(number)
child(20)
"#;

#[test]
fn a_tree_of_twenty_with_shared_memory_goes_on() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a server of its own");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", TWENTY])
        .arg(folder.path())
        .spawn();
    let rounds = |number: usize| {
        let text = fs::read_to_string(folder.path().join(number.to_string())).unwrap_or_default();
        assert_ne!(text, "wrong", "process {number}");
        text.parse::<u64>().unwrap_or(0)
    };
    let wait_beyond = |than: &[u64]| {
        let go_on = || (1..=20).all(|number| rounds(number) > than[number - 1]);
        wait_until("all twenty", SOON, go_on);
    };
    wait_beyond(&[0; 20]);
    for _ in 0..2 {
        stillframe.dump(program.pid(), &[]).must();
        let before = (1..=20).map(rounds).collect::<Vec<_>>();
        stillframe.restore(LAZY).must();
        let beyond = before.iter().map(|rounds| rounds + 2).collect::<Vec<_>>();
        wait_beyond(&beyond);
        wait_whole(&stillframe);
    }
}

/// The files with pages of an image.
fn pages_files(images: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(images).expect("a dump makes its folder");
    let paths = files.map(|entry| entry.expect("the folder can be read").path());
    let pages = |path: &PathBuf| {
        let name = path.file_name().expect("it has a name").to_string_lossy();
        name.starts_with("pages")
    };
    paths.filter(pages).collect()
}

#[test]
fn a_damaged_page_kills_the_tree_and_says_so() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no checksums");
    }
    let subject = Subject::start("moving", &["16"]);
    stillframe.dump(subject.pid(), &[]).must();
    let path = pages_files(stillframe.images()).into_iter();
    let path = path.max_by_key(|path| path.metadata().expect("it is there").len());
    let path = path.expect("it has pages");
    let file = File::options().read(true).write(true).open(&path);
    let file = file.expect("the image can be written");
    let at = file.metadata().expect("it is there").len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("it can be read");
    file.write_all_at(&[byte[0] ^ 4], at)
        .expect("it can be written");
    // In the foreground: it waits for the tree, and says why that has ended.
    let mut command = stillframe.command(&["restore", "--lazy-pages", "-D"]);
    command.arg(stillframe.images()).stdin(Stdio::null());
    let output = command.output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), STATUS_CORRUPT, "{told}");
    let name = path
        .file_name()
        .expect("a file has a name")
        .to_string_lossy();
    assert!(told.contains(&*name), "{told}");
    assert!(!tree::is_alive(subject.pid()));
    wait_whole(&stillframe);
    file.write_all_at(&byte, at).expect("it can be written");
    stillframe.restore(LAZY).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn nobody_reads_a_wrong_page_when_the_server_is_killed() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer needs a server of its own");
    }
    let mut chance = Chance::of("nobody_reads_a_wrong_page_when_the_server_is_killed");
    let subject = Subject::start("moving", &["96"]);
    stillframe.dump(subject.pid(), &[]).must();
    let mut killed = 0;
    for _ in 0..12 {
        stillframe.restore(LAZY).must();
        let server = servers(&stillframe);
        std::thread::sleep(chance.time(std::time::Duration::from_millis(60)));
        // Not those below it: one of them is its watchdog.
        for pid in server {
            tree::signal(pid, rustix::process::Signal::KILL);
        }
        // Whatever it answers is right; if it does not, it was killed.
        match subject.try_ask("check") {
            Ok(answer) => {
                assert_eq!(answer, "right");
                wait_until("its helpers", SOON, || stillframe.helpers().is_empty());
                tree::kill(&[subject.pid()]);
            }
            Err(_) => killed += 1,
        }
        wait_until("its end", SOON, || !tree::is_alive(subject.pid()));
        tree::reap_orphans();
    }
    assert!(killed > 0, "all had come before any of the kills");
    stillframe.restore(LAZY).must();
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_server_of_its_own_serves_one_restore_after_the_other() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer ends after one");
    }
    let subject = Subject::start("moving", &["24"]);
    stillframe.dump(subject.pid(), &[]).must();
    let options = ["lazy-pages", "--stay", "--status-fd", "9", "-v4", "-D"];
    let mut command = stillframe.command(&options);
    command.arg(stillframe.images());
    let mut server = telling_status(&command).spawn().expect("it runs");
    let ready = server.stdout.as_mut().expect("piped").read_exact(&mut [0]);
    ready.expect("restores can connect");
    let socket = stillframe.images().join("lazy-pages.socket");
    // Somebody who stops in the middle of what he tells of a task.
    let address = SocketAddrUnix::new(&socket).expect("a short path");
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let stuck = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
    rustix::net::connect(&stuck, &address).expect("it listens");
    let (task, more) = ([1 << 3, 1], [6 << 3, 1]);
    rustix::net::send(&stuck, &[task, more].concat(), SendFlags::empty()).expect("it is heard");
    for round in 0..3 {
        stillframe.restore(LAZY).must();
        assert!(servers(&stillframe).is_empty(), "it is the standing one's");
        assert_eq!(subject.ask(&format!("stir {round} 200")), "right");
        assert_eq!(subject.ask("check"), "right");
        tree::kill(&[subject.pid()]);
        wait_until("its end", SOON, || !tree::is_alive(subject.pid()));
        tree::reap_orphans();
    }
    drop(stuck);
    tree::signal(server.id(), rustix::process::Signal::TERM);
    let ended = server.wait().expect("it is a child");
    assert!(ended.success(), "{ended}");
    assert!(!socket.exists());
    stillframe.restore(LAZY).must();
    assert_eq!(subject.ask("check"), "right");
}
