//! Memory that the kernel promised step by step, more than it promises at once.
use std::collections::BTreeSet;
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Has memory of the kind that it is told, and tells whether what it wrote is still there.
const GROWN: &str = r#"
import ctypes, mmap, os, signal, sys
folder, kind = sys.argv[1:]
NONE, READ, BOTH = 0, 1, 3
SHARED, PRIVATE, ANONYMOUS, NORESERVE = 1, 2, 0x20, 0x4000
GIB = 1 << 30
C = ctypes.CDLL(None, use_errno=True)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
C.madvise.argtypes = C.mprotect.argtypes
def new(bytes, prot, flags):
    at = C.mmap(None, bytes, prot, flags | ANONYMOUS, -1, 0)
    assert at not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    return at
def protect(at, bytes, prot):
    assert C.mprotect(at, bytes, prot) == 0, ctypes.get_errno()
ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
gibs = ram * 2 // GIB + 2
wrote = {}
def write(at, value):
    wrote[at] = value
    ctypes.memset(at, value, 16)
def grow(at, first, last):
    for gib in range(first, last):
        protect(at + gib * GIB, GIB, BOTH)
        write(at + gib * GIB + (gib % 99) * 4096, 1 + gib % 99)
def right():
    return all(ctypes.string_at(at, 16) == bytes([value]) * 16 for at, value in wrote.items())
if kind in ("steps", "readonly", "child", "shares"):
    at = new(gibs * GIB, NONE, PRIVATE)
    half = gibs // 4
    grow(at, 0, half)
    if kind == "child":
        # It keeps what it has, and its parent's memory grows beyond what a fork may copy.
        pair = os.pipe()
        if os.fork() == 0:
            kind = "of child"
            os.write(pair[1], b"x")
        else:
            os.read(pair[0], 1)
    if kind != "of child":
        grow(at, half, gibs)
    if kind == "readonly":
        protect(at, gibs * GIB, READ)
elif kind == "shared":
    at = new(gibs * GIB, BOTH, SHARED | NORESERVE)
    write(at, 1)
    write(at + gibs * GIB - 4096, 2)
elif kind == "kept":
    # What counts as promised and has no page that was written to.
    at = new(1 << 20, BOTH, PRIVATE)
    ctypes.memset(at, 7, 1 << 20)
    assert C.madvise(at, 1 << 20, 4) == 0
    protect(at, 1 << 19, NONE)
    protect(at + (1 << 19), 1 << 19, READ)
    # The same without a promise, and a mapping of a file.
    other = new(1 << 20, NONE, PRIVATE)
    protect(other, 1 << 19, READ)
    with open(sys.executable, "rb") as file:
        of_file = C.mmap(None, 8192, BOTH, PRIVATE, file.fileno(), 0)
    protect(of_file, 8192, READ)
if kind == "of child":
    folder += "/child"
    os.mkdir(folder)
os.mkfifo(folder + "/asked")
os.mkfifo(folder + "/answer")
os.mkdir(folder + "/ready")
while True:
    with open(folder + "/asked") as asked:
        asked.read()
    with open(folder + "/answer", "w") as answer:
        answer.write("right" if right() else "wrong")
"#;

struct Grown {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Grown {
    fn start(kind: &str) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", GROWN])
            .arg(folder.path())
            .arg(kind)
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        if kind == "child" {
            program.wait_file(&folder.path().join("child/ready"));
        }
        Self { program, folder }
    }

    #[track_caller]
    fn must_be_right(&self) {
        let folder = self.folder.path();
        let child = folder.join("child");
        let all = [folder, &child];
        for folder in all.into_iter().filter(|folder| folder.is_dir()) {
            assert_eq!(ask(folder), "right", "{}", folder.display());
        }
    }

    /// All mappings with their flags, by process.
    fn mappings(&self) -> Vec<(u32, BTreeSet<String>)> {
        let pids = self.program.tree().into_iter();
        pids.map(|pid| (pid, mappings(pid))).collect()
    }
}

fn ask(folder: &Path) -> String {
    std::fs::write(folder.join("asked"), "x").expect("it reads");
    std::fs::read_to_string(folder.join("answer")).expect("it answers")
}

/// Addresses and flags of mappings, without what tells whether they were written to lately, and
/// whether pages are still to come of a lazy restore.
fn mappings(pid: u32) -> BTreeSet<String> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it lives");
    let mut header = String::new();
    let mut all = BTreeSet::new();
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let flags = flags.split_whitespace();
            let flags = flags.filter(|flag| !["sd", "um"].contains(flag));
            all.insert(format!("{header} {}", flags.collect::<Vec<_>>().join(" ")));
        } else if line
            .split(' ')
            .next()
            .is_some_and(|word| word.contains('-'))
        {
            let words = line.split_whitespace().take(2);
            header = words.collect::<Vec<_>>().join(" ");
        }
    }
    all
}

#[track_caller]
fn must_come_back(stillframe: &Stillframe, kind: &str, dump: &[&str], restore: &[&str]) {
    let grown = Grown::start(kind);
    grown.must_be_right();
    let before = grown.mappings();
    stillframe.clear();
    stillframe.dump(grown.program.pid(), dump).must();
    if !dump.is_empty() {
        let pids = grown.program.tree();
        grown.program.kill();
        tree::wait_gone(&pids);
    }
    tree::reap_orphans();
    stillframe.restore(restore).must();
    let after = grown.mappings();
    grown.must_be_right();
    for ((pid, before), (_, after)) in before.iter().zip(&after) {
        let lost = before.difference(after).collect::<Vec<_>>();
        let new = after.difference(before).collect::<Vec<_>>();
        assert!(
            lost.is_empty() && new.is_empty(),
            "{kind}: {pid}: lost {lost:#?}, new {new:#?}"
        );
    }
    assert_eq!(before.len(), after.len());
}

/// True if the host overcommits by its heuristic: memory can grow step by step only there.
fn by_heuristic() -> bool {
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
    mode.is_ok_and(|mode| mode.trim() == "0")
}

#[test]
fn memory_that_grew_beyond_the_machines_comes_back() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() || !by_heuristic() {
        testkit::skip!("memory cannot grow so here, or the peer cannot restore it");
    }
    for kind in ["steps", "readonly", "shared"] {
        must_come_back(&stillframe, kind, &[], &[]);
    }
    must_come_back(&stillframe, "steps", &[], &["--lazy-pages"]);
    must_come_back(&stillframe, "steps", &["--live"], &[]);
}

#[test]
fn memory_that_grew_after_a_fork_comes_back_shared() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() || !by_heuristic() {
        testkit::skip!("memory cannot grow so here, or the peer cannot restore it");
    }
    must_come_back(&stillframe, "child", &[], &[]);
}

#[test]
fn promise_outlasts_the_right_to_write() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer does not keep promises of memory");
    }
    must_come_back(&stillframe, "kept", &[], &[]);
}
