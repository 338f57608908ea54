//! Pages that parent and child share, in mappings that one of them has split since.
use std::fs;

use rustix::process::Signal;
use testkit::program::Program;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Fills mappings of two sizes and forks a child, which forks another one; then each of the three
/// makes a part of some of them read-only, so that the others have as one what it has as several.
const SPLIT: &str = r#"
import ctypes, mmap, os, signal, sys
libc = ctypes.CDLL(None)
maps = [mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for mib in (1, 1, 1, 12, 12, 12)]
for one in maps:
    for at in range(0, len(one), 4096):
        one[at:at + 8] = (at * 7 + 1).to_bytes(8, "little")
def check(*_):
    right = all(one[at:at + 8] == (at * 7 + 1).to_bytes(8, "little")
                for one in maps for at in range(0, len(one), 4096))
    with open(f"{sys.argv[1]}/draft-{os.getpid()}", "w") as draft:
        draft.write("right" if right else "wrong")
    os.rename(draft.name, f"{sys.argv[1]}/checked-{os.getpid()}")
signal.signal(signal.SIGUSR1, check)
generation = 0
while generation < 2 and os.fork() == 0:
    generation += 1
for one in (maps[generation], maps[generation + 3]):
    start = ctypes.addressof(ctypes.c_char.from_buffer(one))
    part = ctypes.c_void_p(start + len(one) // 4)
    assert libc.mprotect(part, len(one) // 4, mmap.PROT_READ) == 0
os.mkdir(f"{sys.argv[1]}/split-{generation}")
while True:
    signal.pause()
"#;

#[test]
fn pages_survive_in_mappings_that_parent_or_child_split() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", SPLIT])
        .arg(folder.path())
        .spawn();
    for generation in 0..3 {
        program.wait_file(&folder.path().join(format!("split-{generation}")));
    }
    assert_eq!(program.tree().len(), 3);
    for _ in 0..2 {
        stillframe.cycle(1, &program, &[]);
        for pid in program.tree() {
            let checked = folder.path().join(format!("checked-{pid}"));
            tree::signal(pid, Signal::USR1);
            wait_until("an answer", SOON, || checked.exists());
            assert_eq!(fs::read_to_string(&checked).expect("it is there"), "right");
            fs::remove_file(&checked).expect("it is there");
        }
    }
}
