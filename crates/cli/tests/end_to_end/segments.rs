//! System V shared memory: found again or made again, and never taken from somebody else.
use std::fs;
use std::path::Path;

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
