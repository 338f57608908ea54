//! Memory policies of mappings (mbind(2)), on both sides of what is filled from outside.
use std::fs;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, stillframe};

/// Binds mappings of several sizes, and parts of one, to node 0 in several ways, fills them, and
/// makes a child that changes one of them and keeps the others; or says that the kernel cannot.
const BOUND: &str = r#"
import ctypes, mmap, os, signal, sys
MBIND = 237
libc = ctypes.CDLL(None)
def bind(start, bytes, mode, nodes):
    nodes = ctypes.c_ulong(nodes)
    args = [ctypes.c_ulong(number) for number in (start, bytes, mode)]
    return libc.syscall(MBIND, *args, ctypes.byref(nodes), ctypes.c_ulong(64), 0)
maps = [mmap.mmap(-1, bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for bytes in (4096, 1 << 20, 24 << 20)]
maps.append(mmap.mmap(-1, 1 << 16))
starts = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
failed = bind(starts[0], 4096, 2, 1)
bind(starts[1], 1 << 19, 1, 1)
bind(starts[1] + (1 << 19), 1 << 19, 4, 0)
bind(starts[2] + (8 << 20), 1 << 20, 3 | 1 << 15, 1)
bind(starts[3], 1 << 16, 2, 1)
for one in maps:
    for at in range(0, len(one), 4096):
        one[at:at + 8] = (at * 7 + 1).to_bytes(8, "little")
def check(*_):
    right = all(one[at:at + 8] == (at * 7 + 1).to_bytes(8, "little")
                for one in maps for at in range(0, len(one), 4096))
    open(f"{sys.argv[1]}/checked-{os.getpid()}", "w").write("right" if right else "wrong")
signal.signal(signal.SIGUSR1, check)
if os.fork() == 0:
    bind(starts[1], 1 << 19, 2, 1)
    os.mkdir(sys.argv[1] + ("/plain" if failed else "/bound"))
while True:
    signal.pause()
"#;

/// The policies that are not the default one, as the kernel tells them.
fn policies(program: &Spawned) -> Vec<String> {
    let tree = program.tree();
    let all = tree.iter().flat_map(|pid| {
        let text = fs::read_to_string(format!("/proc/{pid}/numa_maps")).expect("it is there");
        let lines = text.lines().filter_map(|line| {
            let mut words = line.split(' ');
            let (start, policy) = (words.next()?, words.next()?);
            (policy != "default").then(|| format!("{pid} {start} {policy}"))
        });
        lines.collect::<Vec<_>>()
    });
    all.collect()
}

#[test]
fn mappings_keep_their_memory_policies() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", BOUND])
        .arg(folder.path())
        .spawn();
    let made = |name: &str| folder.path().join(name).exists();
    program.wait_ready("its mappings", || made("plain") || made("bound"));
    if !made("bound") || stillframe.is_peer() {
        testkit::skip!("the kernel has no memory policies, or the peer stands in");
    }
    let before = (Facts::moving(program.pid()), policies(&program));
    // Five in each of the two, of which the child has one in another way.
    assert_eq!(before.1.len(), 10, "{:?}", before.1);
    for _ in 0..3 {
        stillframe.cycle(1, &program, &[]);
        assert_eq!(policies(&program), before.1);
    }
    assert_restored(
        &stillframe,
        &before.0,
        &Facts::moving(program.pid()),
        "thrice",
    );
    for pid in program.tree() {
        testkit::tree::signal(pid, rustix::process::Signal::USR1);
        let checked = folder.path().join(format!("checked-{pid}"));
        let told = || fs::read_to_string(&checked).unwrap_or_default();
        wait_until("its answer", SOON, || !told().is_empty());
        assert_eq!(told(), "right");
    }
}
