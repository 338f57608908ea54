//! A limit of file size (`ulimit -f`) is an error like a full disk, and no task's own matter.

use std::fs;
use std::process::Command;

use testkit::program::Program;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::stillframe;

const SIGXFSZ: u64 = 25;

/// Disposition of `SIGXFSZ` in `pid`: if the signal is ignored, and if it is handled.
fn what_is_done(pid: u32) -> (bool, bool) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let has = |name: &str| {
        let set = status.lines().find_map(|line| line.strip_prefix(name));
        let set = set.expect("the kernel tells it").trim();
        let set = u64::from_str_radix(set, 16).expect("a set of signals");
        set >> (SIGXFSZ - 1) & 1 == 1
    };
    (has("SigIgn:"), has("SigCgt:"))
}

#[test]
fn file_size_limit_fails_a_dump_by_name() {
    needs_root!();
    needs_program!("prlimit");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer is killed");
    }
    let program = Program::new("sleep").arg("1000").spawn();
    for limit in [0, 4096, 65536] {
        for how in [&["-R"][..], &["--live"], &[]] {
            stillframe.clear();
            fs::create_dir_all(stillframe.images()).expect("the test's own");
            let dump = stillframe.dump_command(program.pid(), how);
            let mut limited = Command::new("prlimit");
            limited.arg(format!("--fsize={limit}:{limit}"));
            limited.arg(dump.get_program()).args(dump.get_args());
            let output = limited.output().expect("it starts");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(6), "{limit} {how:?}: {said}");
            assert!(said.contains("File too large"), "{limit} {how:?}: {said}");
            assert!(program.is_alive());
        }
    }
}

#[test]
fn restored_task_has_its_own_way_with_file_size_limits() {
    needs_root!();
    let stillframe = stillframe();
    let program = Program::new("sleep").arg("1000").spawn();
    wait_until("its sleep", SOON, || {
        testkit::tree::is_waiting(program.pid())
    });
    assert_eq!(what_is_done(program.pid()), (false, false));
    stillframe.cycle(1, &program, &[]);
    assert_eq!(what_is_done(program.pid()), (false, false));
}
