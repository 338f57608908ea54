//! System V shared memory: found again or made again, and never taken from somebody else.
use std::fs;
use std::path::Path;

use testkit::huge_pages::HugePages;
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{Facts, assert_restored, stillframe};

/// Two processes that have two segments attached, one of them removed; the child counts in both.
const SHARERS: &str = r#"
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
def must(result):
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "shared memory")
    return result
kept = must(libc.shmget(0, 10000, 0o1600))
gone = must(libc.shmget(0, 4096, 0o1600))
at = [must(libc.shmat(number, None, 0)) for number in (kept, gone)]
read_only = must(libc.shmat(kept, None, 0o10000))
must(libc.shmctl(gone, 0, None))
report = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
words = [ctypes.c_long.from_address(place) for place in at]
seen = ctypes.c_long.from_address(read_only)
if os.fork() == 0:
    while True:
        for word in words:
            word.value += 1
        time.sleep(0.001)
while True:
    line = "%20d" * 4 % (kept, words[0].value, words[1].value, seen.value)
    os.pwrite(report, line.encode(), 0)
    time.sleep(0.001)
"#;

struct Sharers {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Sharers {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", SHARERS])
            .arg(Self::report_at(folder.path()))
            .folder(folder.path())
            .spawn();
        let report = || fs::read(Self::report_at(folder.path())).unwrap_or_default();
        program.wait_ready("its report", || !report().is_empty());
        Self { program, folder }
    }

    fn report_at(folder: &Path) -> std::path::PathBuf {
        folder.join("report")
    }

    /// The kept segment's number, the words in both, and the first through the other mapping.
    fn report(&self) -> [u64; 4] {
        let text = fs::read_to_string(Self::report_at(self.folder.path())).expect("a report");
        let words = text
            .split_whitespace()
            .map(|word| word.parse().expect("a number"));
        words.collect::<Vec<_>>().try_into().expect("four words")
    }

    fn number(&self) -> i32 {
        i32::try_from(self.report()[0]).expect("a number of a segment")
    }

    /// Waits until the child has written both segments and the parent has seen it.
    #[track_caller]
    fn must_go_on(&self, than: [u64; 4]) {
        self.program.wait_ready("its child's writes", || {
            let now = self.report();
            now[1..]
                .iter()
                .zip(&than[1..])
                .all(|(now, than)| now > than)
        });
    }
}

impl Drop for Sharers {
    fn drop(&mut self) {
        let number = self.number();
        self.program.kill();
        // It is gone where a test removed it.
        let _ = sys::shm::remove(number);
    }
}

#[test]
fn segments_are_found_again_and_made_again() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves segments only with their namespace");
    }
    let sharers = Sharers::start();
    let number = sharers.number();
    let facts = Facts::moving(sharers.program.pid());
    let before = sharers.report();
    stillframe.cycle(2, &sharers.program, &[]);
    let after = Facts::moving(sharers.program.pid());
    assert_restored(&stillframe, &facts, &after, "segments");
    sharers.must_go_on(before);
    // Each of the two has it twice.
    assert_eq!(sys::shm::stat(number).expect("it is there").attached, 4);
    // As after a boot: nothing is left of it.
    let tasks = sharers.program.tree();
    let before = sharers.report();
    stillframe.dump(sharers.program.pid(), &[]).must();
    tree::wait_gone(&tasks);
    let wanted = sys::shm::stat(number).expect("it outlives its users");
    sys::shm::remove(number).expect("nobody needs it");
    stillframe.restore(&[]).must();
    sharers.must_go_on(before);
    let now = sys::shm::stat(number).expect("it was made again");
    assert_eq!(
        (now.key, now.mode, now.bytes),
        (wanted.key, wanted.mode, wanted.bytes)
    );
    assert_eq!(now.attached, 4);
}

/// Waits until nobody else has the segment: whoever another test starts right now has what this
/// process has, until it runs its program.
fn wait_attached(number: i32, attached: u64) {
    wait_until("others to let it go", SOON, || {
        sys::shm::stat(number).is_ok_and(|stat| stat.attached == attached)
    });
}

#[test]
fn a_segment_that_others_use_is_named() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves segments only with their namespace");
    }
    let sharers = Sharers::start();
    let number = sharers.number();
    let other = sys::shm::Attached::new(number).expect("it is there");
    let outcome = stillframe.dump(sharers.program.pid(), &[]);
    let what = format!("System V shared memory {number}");
    outcome.must_fail().names(&[&what]);
    sharers.must_go_on(sharers.report());
    drop(other);
    wait_attached(number, 4);
    let tasks = sharers.program.tree();
    let before = sharers.report();
    stillframe.dump(sharers.program.pid(), &[]).must();
    tree::wait_gone(&tasks);
    let other = sys::shm::Attached::new(number).expect("it outlives its users");
    stillframe.restore(&[]).must_fail().names(&[&what]);
    drop(other);
    wait_attached(number, 0);
    stillframe.restore(&[]).must();
    sharers.must_go_on(before);
}

/// A process that has parts of a segment: one without a page in its middle, where memory of its own
/// is, and a page that can only be read; and one without its first and last page, of which a child
/// has another page less. With a second word, the segment has pages of 2 MiB.
const PARTS: &str = r#"
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = libc.mmap.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def must(result):
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "shared memory")
    return result
huge = len(sys.argv) > 2
page = 2 << 20 if huge else 4096
number = must(libc.shmget(0, 5 * page, 0o1600 | (0o4000 if huge else 0)))
one, two = [must(libc.shmat(number, None, 0)) for _ in range(2)]
must(libc.shmctl(number, 0, None))
word = lambda at: ctypes.c_long.from_address(at)
for turn in range(5):
    word(one + turn * page).value = 100 + turn
must(libc.munmap(one + page, page))
private = 0x02 | 0x10 | 0x20
must(libc.mmap(one + page, 4096, 3, private, -1, 0))
word(one + page).value = 7
must(libc.mprotect(one + 3 * page, page, 1))
must(libc.munmap(two, page))
must(libc.munmap(two + 4 * page, page))
report = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if os.fork() == 0:
    must(libc.munmap(two + 2 * page, page))
    while True:
        word(two + page).value += 1
        time.sleep(0.001)
while True:
    through = [word(two + page).value, word(one + 3 * page).value, word(one + page).value]
    same = word(one).value == 100 and word(two + 2 * page).value == 102
    line = "%20d" * 4 % (through[0], through[1], through[2], same)
    os.pwrite(report, line.encode(), 0)
    time.sleep(0.001)
"#;

/// Has a process with parts of a segment go through cycles.
fn parts_come_back(kind: &[&str]) {
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves segments only with their namespace");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let report = Sharers::report_at(folder.path());
    let program = Program::new("/usr/bin/python3")
        .args(["-c", PARTS])
        .arg(&report)
        .args(kind.iter().copied())
        .folder(folder.path())
        .spawn();
    let words = || {
        let text = fs::read_to_string(&report).unwrap_or_default();
        let words = text.split_whitespace().map(str::parse::<u64>);
        words.collect::<Result<Vec<_>, _>>().expect("numbers")
    };
    program.wait_ready("its report", || words().len() == 4);
    let facts = Facts::moving(program.pid());
    for ways in [&["--leave-running"][..], &["--live"], &[]] {
        let before = words();
        stillframe.dump(program.pid(), ways).must();
        if ways.is_empty() {
            tree::wait_gone(&program.tree());
            stillframe.restore(&[]).must();
        }
        program.wait_ready("its child's writes", || words()[0] > before[0]);
        assert_eq!(words()[1..], [103, 7, 1], "{ways:?}");
    }
    stillframe.cycle(2, &program, &[]);
    let after = Facts::moving(program.pid());
    assert_restored(&stillframe, &facts, &after, "parts of segments");
    program.wait_ready("its child's writes", || words()[1..] == [103, 7, 1]);
    program.kill();
}

#[test]
fn parts_of_segments_come_back() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    parts_come_back(&[]);
}

#[test]
fn parts_of_segments_of_huge_pages_come_back() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let Ok(_pages) = HugePages::reserve(12) else {
        testkit::skip!("no room for huge pages (vm.nr_hugepages)");
    };
    parts_come_back(&["huge"]);
}

/// A segment of one page that is mapped for two.
const BEYOND: &str = r#"
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
number = libc.shmget(0, 4096, 0o1600)
at = libc.shmat(number, None, 0)
libc.shmctl(number, 0, None)
if libc.mremap(at, 4096, 8192, 1) != 2**64 - 1:
    os.mkdir(sys.argv[1])
signal.pause()
"#;

#[test]
fn what_is_mapped_beyond_a_segment_is_named() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let ready = folder.path().join("ready");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", BEYOND])
        .arg(&ready)
        .spawn();
    program.wait_file(&ready);
    let outcome = stillframe.dump(program.pid(), &[]).must_fail();
    if !stillframe.is_peer() {
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        outcome.names(&["beyond its end (mremap)"]);
    }
    program.kill();
}
