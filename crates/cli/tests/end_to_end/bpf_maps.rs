//! Maps of BPF: our own subject's, one that bpftool(8) has made and a program counts in, and those
//! of bpftrace(8), whose programs have them as well.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::program::{Program, Spawned};
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{assert_cycles, stillframe, ways};

/// Whether the kernel may be looked into here, and it is not the peer that is tested, or return.
macro_rules! needs_bpf {
    () => {
        testkit::needs_kernel_memory!();
        if stillframe().is_peer() {
            testkit::skip!("the peer was built without libbpf");
        }
    };
}

#[test]
fn maps_survive() {
    needs_root!();
    needs_bpf!();
    let stillframe = stillframe();
    let subject = Subject::start("bpf-maps", &[]);
    let check = |told: &str| assert_eq!(subject.ask("check"), "right", "{told}");
    check("before");
    assert_cycles(&stillframe, 3, &subject, "maps");
    check("after three cycles");
    ways::left_running(&stillframe, &subject, check);
    ways::over_pre_dump(&stillframe, &subject, check);
}

/// Opens a pinned map and counts in it; tells the count and what it has read.
const COUNTS: &str = r#"
import ctypes, os, struct, sys, time
syscall = ctypes.CDLL(None, use_errno=True).syscall
BPF, LOOKUP, UPDATE, OBJ_GET = 321, 1, 2, 7
def bpf(command, *words):
    attributes = struct.pack("%dQ" % len(words), *words)
    done = syscall(BPF, command, attributes, len(attributes))
    if done < 0:
        raise OSError(ctypes.get_errno(), "bpf")
    return done
at = ctypes.addressof
path = ctypes.create_string_buffer(sys.argv[1].encode())
own = bpf(OBJ_GET, at(path), 0)
key, value = ctypes.c_uint32(7), ctypes.c_uint64(0)
report = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
count = 0
while True:
    count += 1
    value.value = count
    bpf(UPDATE, own, at(key), at(value), 0)
    value.value = 0
    bpf(LOOKUP, own, at(key), at(value), 0)
    os.pwrite(report, b"%20d%20d" % (count, value.value), 0)
    time.sleep(0.001)
"#;

/// A file system to pin in, mounted as long as this lives.
struct Pins(tempfile::TempDir);

impl Pins {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "bpf", "bpf"]).arg(folder.path()).status();
        mounted
            .is_ok_and(|status| status.success())
            .then_some(Self(folder))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("--lazy")
            .arg(self.0.path())
            .status();
    }
}

/// The count, and what was read of the map.
fn counts(report: &Path) -> [u64; 2] {
    let text = fs::read_to_string(report).unwrap_or_default();
    let mut words = text.split_ascii_whitespace().map(|word| word.parse());
    let mut word = || words.next().and_then(Result::ok).unwrap_or(0);
    [word(), word()]
}

#[track_caller]
fn must_count(program: &Spawned, report: &Path) {
    let before = counts(report);
    program.wait_ready("its counts", || {
        let now = counts(report);
        assert_eq!(now[0], now[1], "it reads what it wrote");
        now[0] > before[0]
    });
}

#[test]
fn a_map_of_bpftool_is_counted_in() {
    needs_root!();
    needs_bpf!();
    needs_program!("/usr/bin/python3");
    needs_program!("/usr/sbin/bpftool");
    let Some(pins) = Pins::mount() else {
        testkit::skip!("the bpf file system cannot be mounted");
    };
    let stillframe = stillframe();
    let pin = pins.at("counts");
    let mut bpftool = Command::new("/usr/sbin/bpftool");
    bpftool.args(["map", "create"]).arg(&pin);
    let options = "type hash key 4 value 8 entries 16 name counts";
    bpftool.args(options.split(' '));
    assert!(bpftool.status().expect("it is there").success());
    let folder = tempfile::tempdir().expect("a scratch folder");
    let report = folder.path().join("report");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", COUNTS])
        .arg(&pin)
        .arg(&report)
        .folder(folder.path())
        .spawn();
    program.wait_file(&report);
    must_count(&program, &report);
    let outcome = stillframe.dump(program.pid(), &[]);
    outcome
        .must_fail()
        .names(&["anon_inode:bpf-map", "it is pinned, or somebody outside"]);
    must_count(&program, &report);
    fs::remove_file(&pin).expect("it is ours");
    for _ in 0..3 {
        stillframe.cycle(1, &program, &[]);
        must_count(&program, &report);
    }
    let check = |_: &str| must_count(&program, &report);
    ways::left_running(&stillframe, &program, check);
    ways::killed(&stillframe, &program, check);
    ways::over_pre_dump(&stillframe, &program, check);
}

#[test]
fn maps_and_programs_of_bpftrace_are_named() {
    needs_root!();
    needs_bpf!();
    needs_program!("/usr/bin/bpftrace");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let output = folder.path().join("output");
    let script = "interval:ms:50 { @beats = count(); print(@beats); }";
    let program = Program::new("/usr/bin/bpftrace")
        .args(["-e", script])
        .output(&output)
        .folder(folder.path())
        .spawn();
    let beats = || {
        fs::read_to_string(&output)
            .unwrap_or_default()
            .matches("@beats")
            .count()
    };
    wait_until("it to beat, or to end", SOON, || {
        beats() > 2 || !program.is_alive()
    });
    if !program.is_alive() {
        testkit::skip!("bpftrace does not work here");
    }
    let stillframe = stillframe();
    // A live dump names the first thing that it meets: memory into which programs write.
    let all: &[&str] = &[
        "a program or another map uses it",
        "a BPF program, of which",
    ];
    for (how, names) in [
        (&[][..], all),
        (&["--leave-running"], all),
        (&["--live"], &["anon_inode:"]),
    ] {
        let outcome = stillframe.dump(program.pid(), how);
        outcome.must_fail().names(names);
        let before = beats();
        wait_until("it to beat on", SOON, || beats() > before + 2);
    }
}
