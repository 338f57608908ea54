//! Trees of several generations, as shells and other programs make them: every task gets its own
//! address space back, and nothing of what its ancestors have.
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::tree;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, stillframe};

/// How shells leave processes behind: each keeps what it has of the one before, or executes
/// something.
const SHAPES: [(&str, &str); 7] = [
    ("subshell", "( sleep infinity & wait; true ) & wait; true"),
    (
        "pipeline",
        "{ sleep infinity; true; } | { cat; true; } | cat; true",
    ),
    ("function", "f() { sleep infinity; true; }; f & wait; true"),
    (
        "nested",
        "( ( ( sleep infinity; true ) & wait; true ) & wait; true ) & wait; true",
    ),
    ("substitution", "x=$(sleep infinity; true); true"),
    (
        "two of a kind",
        "( sleep infinity; true ) & ( sleep infinity & wait; true ) & wait; true",
    ),
    (
        "in the middle",
        "( ( sleep infinity; true ) | cat; true ) & y=$(cat /dev/null); wait; true",
    ),
];

/// Starts a shell that runs `text` and then leaves a file.
fn start(shell: &str, text: &str, folder: &Path) -> Spawned {
    let text = format!("{text}; echo done > over");
    let spawned = Program::new(shell)
        .args(["-c", &text])
        .folder(folder)
        .spawn();
    wait_waiting(&spawned);
    spawned
}

/// Waits until all tasks wait, and those that are to sleep do.
fn wait_waiting(spawned: &Spawned) {
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    wait_until("all tasks to wait", SOON, || {
        let tasks = spawned.tree();
        let names = tasks.iter().filter_map(|pid| name(pid).ok());
        names.filter(|name| name == "sleep\n").count() > 0
            && tasks.iter().all(|pid| tree::is_waiting(*pid))
            && tasks == spawned.tree()
    });
}

/// Dumps and restores it twice, and compares all of it.
fn cycled(spawned: &Spawned, what: &str) {
    let stillframe = stillframe();
    let before = Facts::still(spawned.pid());
    for _ in 0..2 {
        stillframe.cycle(1, spawned, &[]);
        wait_waiting(spawned);
        assert_restored(&stillframe, &before, &Facts::still(spawned.pid()), what);
    }
}

#[test]
fn shells_come_back_in_every_shape() {
    needs_root!();
    for shell in ["bash", "dash"] {
        needs_program!(shell);
        for (name, text) in SHAPES {
            let folder = tempfile::tempdir().expect("a scratch folder");
            let spawned = start(shell, text, folder.path());
            cycled(&spawned, &format!("{shell}: {name}"));
            // All that wait for the sleepers go on to their ends.
            for pid in spawned.tree() {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
                if name.is_ok_and(|name| name == "sleep\n") {
                    assert!(tree::kill(&[pid]), "a sleeper survives");
                }
            }
            let over = folder.path().join("over");
            wait_until("the shell to be over", SOON, || {
                std::fs::read_to_string(&over).is_ok_and(|text| text == "done\n")
            });
        }
    }
}

/// Forks three generations, each of which has unmapped, mapped, hidden from forks or kept what it
/// started with, has said which, and waits.
const GENERATIONS: &str = r#"
import ctypes, mmap, os, signal, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = libc.madvise.argtypes
libc.munmap.argtypes = libc.madvise.argtypes[:2]
BASE, EACH = 0x600000000000, 0x10000
with open("secret", "wb") as secret:
    secret.write(b"SECRET" * 20000)
secret = os.open("secret", os.O_RDWR)
def anonymous(at, flags=0x32, prot=3):
    assert libc.mmap(at, EACH, prot, flags, -1, 0) == at
def file(at, flags):
    assert libc.mmap(at, EACH, 3, flags | 0x10, secret, 0) == at
places = [BASE + 2 * EACH * number for number in range(8)]
anonymous(places[0], prot=0)
file(places[1], 1)
anonymous(places[2])
file(places[3], 2)
anonymous(places[4], 0x132)
anonymous(places[5], 0x4032)
anonymous(places[6])
anonymous(places[7])
os.close(secret)
for number in (2, 3, 4, 5, 6):
    ctypes.memset(places[number], 65 + number, EACH // 2)
libc.madvise(places[6] + EACH // 2, 4096, 102)
there, hidden = set(places), set()
def unmap():
    for at in places:
        libc.munmap(at, EACH)
    there.clear()
    hidden.clear()
def again():
    unmap()
    for at in places[::2]:
        anonymous(at)
        ctypes.memset(at, 90, 4096)
        there.add(at)
def hide():
    for at in places[::2]:
        if libc.madvise(at, EACH, 10) == 0:
            hidden.add(at)
    libc.madvise(places[7], EACH, 18)
def write():
    for number in (2, 3, 4, 6):
        if places[number] in there:
            ctypes.memset(places[number], 97 * (number != 3), 4096)
deeds = [lambda: None, unmap, again, hide, write]
def forked(deed, then):
    done, tell = os.pipe()
    if os.fork() == 0:
        there.difference_update(hidden)
        hidden.clear()
        deed()
        then()
        os.write(tell, b"x")
        os.close(tell)
        os.close(done)
        while True:
            signal.pause()
    os.close(tell)
    assert os.read(done, 1) == b"x"
    os.close(done)
def last():
    for deed in deeds:
        forked(deed, lambda: None)
for deed in deeds:
    forked(deed, last)
# What the children still have in one piece is in three here.
for number in (2, 4):
    libc.mprotect(places[number] + 4096, 4096, 1)
open("ready", "w").close()
while True:
    signal.pause()
"#;

#[test]
fn grandchildren_get_nothing_back_that_they_gave_up() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", GENERATIONS])
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    wait_until("all tasks to wait", SOON, || {
        program.tree().iter().all(|pid| tree::is_waiting(*pid))
    });
    assert_eq!(program.tree().len(), 1 + 5 + 25);
    let before = Facts::still(program.pid());
    for _ in 0..3 {
        stillframe.cycle(1, &program, &[]);
        assert_restored(
            &stillframe,
            &before,
            &Facts::still(program.pid()),
            "generations",
        );
    }
}

/// A pool of workers, each of which has a pool of its own.
const POOLS: &str = r#"
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
context = multiprocessing.get_context("fork")
def square(number):
    return number * number
def begin():
    global inner
    inner = context.Pool(2)
def many(number):
    return sum(inner.map(square, range(number)))
done = 0
with ProcessPoolExecutor(2, mp_context=context, initializer=begin) as pool:
    while True:
        assert list(pool.map(many, [50, 100])) == [40425, 328350]
        done += 1
        with open("draft", "w") as draft:
            draft.write(str(done))
        os.rename("draft", "done")
"#;

#[test]
fn pools_of_processes_go_on_working() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", POOLS])
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    let done = || {
        let text = std::fs::read_to_string(folder.path().join("done"));
        text.map_or(0, |text| text.parse::<u64>().expect("a number"))
    };
    wait_until("the first round", SOON, || done() > 0);
    for _ in 0..3 {
        stillframe.cycle(1, &program, &[]);
        let before = done();
        wait_until("two more rounds", SOON, || {
            let log = std::fs::read_to_string(folder.path().join("log"));
            assert!(program.is_alive(), "{}", log.unwrap_or_default());
            done() > before + 1
        });
    }
}
