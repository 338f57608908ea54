//! Real programs in compressed images: dumped plainly, live and over rounds of pre-dump, freed and
//! merged, with each codec; what they have in memory is compared, byte by byte where they stand.
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::Signal;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::redis::{Client, load, run, start};
use crate::stillframe;

/// The other codec is for what comes of an image later.
const CODECS: [[&str; 2]; 2] = [["lz4", "zstd:1"], ["zstd", "lz4"]];

/// Starts children that share text with it, write text, noise and zeros of their own, and look at
/// all of it over and over, each counting in a page of a file.
const TREE: &str = r#"
import hashlib, json, mmap, os, sys, time
count, path = int(sys.argv[1]), sys.argv[2]
report = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(report, 8 * (count + 1))
counts = mmap.mmap(report, 8 * (count + 1))
def text(seed):
    rows = [{"id": seed * 1000 + n, "name": "row %d" % n, "tags": ["a", "b"]} for n in range(1000)]
    return json.dumps(rows).encode()
def map_with(contents):
    memory = mmap.mmap(-1, 1 << 18, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:len(contents)] = contents
    return memory
shared = map_with(text(0))
def live(number):
    own = text(number) + bytes(8192) + os.urandom(40000)
    own = map_with(own[:1 << 18])
    sums = [hashlib.sha1(memory).digest() for memory in (shared, own)]
    rounds = 0
    while True:
        assert sums == [hashlib.sha1(memory).digest() for memory in (shared, own)], "it changed"
        rounds += 1
        counts[8 * number:8 * number + 8] = rounds.to_bytes(8, sys.byteorder)
        time.sleep(0.3)
for number in range(1, count + 1):
    if os.fork() == 0:
        live(number)
while True:
    pid, status = os.waitpid(-1, os.WNOHANG)
    assert pid == 0, "a child has ended: %d" % status
    time.sleep(0.02)
"#;

/// A tree that runs, and where it counts.
struct Tree {
    program: Spawned,
    folder: tempfile::TempDir,
    children: usize,
}

impl Tree {
    fn start(children: usize) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-S", "-c", TREE, &children.to_string()])
            .arg(folder.path().join("counts"))
            .folder(folder.path())
            .output(&folder.path().join("log"))
            .spawn();
        let tree = Self {
            program,
            folder,
            children,
        };
        tree.goes_on();
        tree
    }

    /// How often each child has looked.
    fn counts(&self) -> Vec<u64> {
        let bytes = std::fs::read(self.folder.path().join("counts")).unwrap_or_default();
        let (words, _) = bytes.as_chunks();
        words
            .iter()
            .skip(1)
            .map(|word| u64::from_ne_bytes(*word))
            .collect()
    }

    /// Waits until every child has looked at its memory two times more.
    #[track_caller]
    fn goes_on(&self) {
        let mut before = self.counts();
        before.resize(self.children, 0);
        wait_until("all children to look at their memory", SOON, || {
            let log = std::fs::read_to_string(self.folder.path().join("log"));
            assert!(self.program.is_alive(), "{log:?}");
            let now = self.counts();
            now.len() == self.children && now.iter().zip(&before).all(|(now, then)| *now > then + 1)
        });
        assert_eq!(self.program.tree().len(), self.children + 1);
    }

    /// Stops all of it.
    fn stop(&self) {
        let pids = self.program.tree();
        for pid in &pids {
            assert!(tree::signal(*pid, Signal::STOP));
        }
        wait_until("all tasks to stop", SOON, || {
            pids.iter().all(|pid| tree::state(*pid) == Some('T'))
        });
    }

    fn go_on(&self) {
        for pid in self.program.tree() {
            assert!(tree::signal(pid, Signal::CONT));
        }
        self.goes_on();
    }

    fn kill(&self) {
        let pids = self.program.tree();
        self.program.kill();
        tree::wait_gone(&pids);
    }

    /// A number for the contents of each private mapping that can be written. The kernel writes to
    /// what a thread registered for restartable sequences, which is in a small one.
    fn memory(&self) -> BTreeMap<(u32, String), u64> {
        let mut all = BTreeMap::new();
        for pid in self.program.tree() {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
            let memory = File::open(format!("/proc/{pid}/mem")).expect("it lives");
            for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
                let place = line.split(' ').next().expect("a line has words");
                let (start, end) = place.split_once('-').expect("a range");
                let [start, end] =
                    [start, end].map(|at| u64::from_str_radix(at, 16).expect("an address"));
                if end - start < 64 << 10 {
                    continue;
                }
                let mut bytes = vec![0; (end - start) as usize];
                memory
                    .read_exact_at(&mut bytes, start)
                    .expect("it is mapped");
                let mut hasher = DefaultHasher::new();
                hasher.write(&bytes);
                all.insert((pid, place.to_owned()), hasher.finish());
            }
        }
        assert!(all.len() > self.children, "{all:?}");
        all
    }

    /// Restores an image of the stopped tree, which is gone, and insists that it is what it was.
    #[track_caller]
    fn comes_back(
        &self,
        stillframe: &Stillframe,
        place: &Path,
        memory: &BTreeMap<(u32, String), u64>,
    ) {
        run(stillframe, &["restore", "-d"], place);
        assert_eq!(self.memory(), *memory, "{}", place.display());
    }
}

/// Dumps a tree in each way with one codec, and brings it back each time.
fn save_in_each_way(stillframe: &Stillframe, tree: &Tree, [codec, other]: [&str; 2]) {
    let images = tempfile::tempdir().expect("a scratch folder");
    let place = |name: &str| images.path().join(name);
    let pid = tree.program.pid().to_string();
    let [compress, others] = [codec, other].map(|codec| format!("--compress={codec}"));
    // A live dump of the tree as it runs, and what comes of it later.
    run(
        stillframe,
        &["dump", "--live", "-t", &pid, &compress],
        &place("running"),
    );
    tree.goes_on();
    tree.kill();
    run(stillframe, &["restore", "-d"], &place("running"));
    tree.goes_on();
    // Rounds while it runs, and a dump over them, with one codec or the other.
    run(
        stillframe,
        &["pre-dump", "-t", &pid, &compress],
        &place("1"),
    );
    tree.goes_on();
    let over = ["pre-dump", "-t", &pid, &others, "--prev-images-dir", "../1"];
    run(stillframe, &over, &place("2"));
    tree.stop();
    let memory = tree.memory();
    let over = ["dump", "-t", &pid, &compress, "--prev-images-dir", "../2"];
    let pids = tree.program.tree();
    run(stillframe, &over, &place("3"));
    tree::wait_gone(&pids);
    tree.comes_back(stillframe, &place("3"), &memory);
    for words in [&["dedup"][..], &["merge", &others], &["merge", &compress]] {
        tree.kill();
        let mut command = stillframe.command(words);
        let status = command.arg(place("3")).status();
        assert!(status.expect("it starts").success(), "{words:?}");
        tree.comes_back(stillframe, &place("3"), &memory);
    }
    // As it stands: live, and plainly.
    run(
        stillframe,
        &["dump", "--live", "-t", &pid, &compress],
        &place("live"),
    );
    tree.kill();
    tree.comes_back(stillframe, &place("live"), &memory);
    let pids = tree.program.tree();
    run(
        stillframe,
        &["dump", "-t", &pid, &compress],
        &place("plain"),
    );
    tree::wait_gone(&pids);
    tree.comes_back(stillframe, &place("plain"), &memory);
    tree.go_on();
}

#[test]
fn a_python_tree_of_fifty_comes_back_from_every_compressed_image() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has other options");
    }
    let tree = Tree::start(49);
    for codecs in CODECS {
        save_in_each_way(&stillframe, &tree, codecs);
    }
}

/// Has all of its keys' values looked at by the server itself.
#[track_caller]
fn assert_values(client: &mut Client) {
    let script = "for i=1,20000 do \
        if redis.call('GET', 'text:'..i) ~= string.rep('value '..i..' ', 60) then \
        return 'key '..i..' is another' end end return 'right'";
    assert_eq!(client.ask(&["EVAL", script, "0"]), "right");
}

#[test]
fn a_redis_under_load_comes_back_from_every_compressed_image() {
    needs_root!();
    needs_program!("redis-server");
    needs_program!("redis-benchmark");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has other options");
    }
    let (folder, port, server, mut client) = start();
    // Of 11 to 13 bytes, 60 times: 14 MiB.
    let script = "for i=1,20000 do redis.call('SET', 'text:'..i, \
        string.rep('value '..i..' ', 60)) end return 'OK'";
    assert_eq!(client.ask(&["EVAL", script, "0"]), "OK");
    let load = load(port, &folder.path().join("load"), &mut client);
    let images = tempfile::tempdir().expect("a scratch folder");
    let place = |name: &str| images.path().join(name);
    let pid = server.pid().to_string();
    for [codec, other] in CODECS {
        let [compress, others] = [codec, other].map(|codec| format!("--compress={codec}"));
        let live = ["dump", "--live", "-t", &pid, "--tcp-established", &compress];
        run(&stillframe, &live, &place(&format!("live-{codec}")));
        let first = place(&format!("first-{codec}"));
        run(&stillframe, &["pre-dump", "-t", &pid, &others], &first);
        let before = client.info("total_commands_processed");
        wait_until("the load to go on", SOON, || {
            client.info("total_commands_processed") > before + 500
        });
        let prev = format!("../first-{codec}");
        let over = ["dump", "-t", &pid, "--tcp-established", &compress];
        let over = [&over[..], &["--prev-images-dir", &prev]].concat();
        let last = place(&format!("last-{codec}"));
        run(&stillframe, &over, &last);
        tree::wait_gone(&[server.pid()]);
        let merge = ["merge", &others, &last.display().to_string()];
        let status = stillframe.command(&merge).status();
        assert!(status.expect("it starts").success());
        run(&stillframe, &["restore", "-d", "--tcp-established"], &last);
        // On the connection that it had.
        assert_values(&mut client);
        let before = client.info("total_commands_processed");
        wait_until("the load to go on", SOON, || {
            assert!(load.is_alive(), "the load has ended");
            client.info("total_commands_processed") > before + 500
        });
    }
    drop((client, load));
    for [codec, _] in CODECS {
        server.kill();
        tree::wait_gone(&[server.pid()]);
        let place = place(&format!("live-{codec}"));
        run(&stillframe, &["restore", "-d", "--tcp-close"], &place);
        assert_values(&mut Client::connect(port));
    }
}
