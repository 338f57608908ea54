//! Rings of io_uring(7), with programs that wait for them and real ones that work with them.
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use testkit::program::{Program, Spawned};
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// Whether there is nothing to be tested: no rings are allowed here, or nobody may look into them.
macro_rules! needs_rings {
    () => {
        needs_root!();
        if stillframe().is_peer() {
            testkit::skip!("the peer saves no io_uring");
        }
        if testkit::calls::io_uring().is_err() {
            testkit::skip!("no io_uring is allowed");
        }
        testkit::needs_kernel_memory!();
    };
}

/// Insists that all that a subject has in its rings survives, however it is dumped and restored.
pub(crate) fn assert_survives(name: &str, kind: &str) {
    let stillframe = stillframe();
    let subject = Subject::start(name, &[kind]);
    // A target that is left running notices nothing.
    for _ in 0..3 {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["--leave-running"]).must();
    }
    assert_eq!(subject.ask("check"), "right", "{kind}");
    assert_eq!(subject.ask("wake"), "1", "{kind}");
    for time in 2..5 {
        stillframe.cycle(1, &subject, &[]);
        assert_eq!(subject.ask("check"), "right", "{kind}");
        assert_eq!(subject.ask("wake"), time.to_string(), "{kind}");
    }
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    testkit::tree::reap_orphans();
    stillframe.restore(&["--lazy-pages"]).must();
    assert_eq!(subject.ask("check"), "right", "{kind}");
    assert_eq!(subject.ask("wake"), "5", "{kind}");
}

/// Insists that who tracks writes refuses a subject with rings, which the kernel writes to.
pub(crate) fn assert_not_tracked(subject: &Subject, ring: &str) {
    let stillframe = stillframe();
    for options in [&["--live"][..], &["--track-mem", "--leave-running"]] {
        let refused = stillframe.dump(subject.pid(), options).must_fail();
        let refused = refused.names(&[ring, "is not seen by who tracks writes"]);
        assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
    }
    assert_eq!(subject.ask("check"), "right");
}

/// Insists that a file comes back as long as requests under way have made it.
pub(crate) fn assert_growing_file_survives(engine: &str) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("data");
    let fio = Program::new("fio")
        .args(["--name=job", "--rw=write", "--bs=16k", "--size=30g"])
        .args(["--direct=1", "--iodepth=64", "--fallocate=none"])
        // A disk is filled slowly enough.
        .args(["--rate=60m", &format!("--ioengine={engine}")])
        .arg(format!("--filename={}", file.display()))
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    let stillframe = stillframe();
    let mut before = 0;
    for _ in 0..15 {
        let len = || fs::metadata(&file).map_or(0, |data| data.len());
        wait_until("the file to grow", SOON, || len() > before + (1 << 20));
        stillframe.cycle(1, &fio, &[]);
        before = len();
    }
}

#[test]
fn all_that_stands_in_a_ring_survives() {
    needs_rings!();
    for kind in ["plain", "single", "bare", "wide"] {
        assert_survives("rings", kind);
    }
}

#[test]
fn requests_that_wait_survive() {
    needs_rings!();
    let stillframe = stillframe();
    let options = &["--tcp-established"];
    for kind in ["plain", "single", "bare", "wide"] {
        let subject = Subject::start("requests", &[kind]);
        for _ in 0..2 {
            for _ in 0..3 {
                stillframe.clear();
                let options = ["--leave-running", "--tcp-established"];
                stillframe.dump(subject.pid(), &options).must();
            }
            assert_eq!(subject.ask("check"), "right", "{kind}");
        }
        // One that is refused, as it has connections, is not noticed either.
        stillframe.clear();
        stillframe.dump(subject.pid(), &[]).must_fail();
        assert_eq!(subject.ask("check"), "right", "{kind}");
        for _ in 0..3 {
            stillframe.cycle(1, &subject, options);
            // Once more: requests that were submitted again are those of any program.
            stillframe.cycle(1, &subject, options);
            assert_eq!(subject.ask("check"), "right", "{kind}");
        }
        stillframe.clear();
        stillframe.dump(subject.pid(), options).must();
        testkit::tree::reap_orphans();
        let lazily = ["--lazy-pages", "--tcp-established"];
        stillframe.restore(&lazily).must();
        assert_eq!(subject.ask("check"), "right", "{kind}");
    }
}

#[test]
fn timeouts_go_on_with_the_time_that_remains() {
    needs_rings!();
    let (stillframe, options) = (stillframe(), &["--tcp-established"]);
    let subject = Subject::start("requests", &[]);
    let begun = Instant::now();
    assert_eq!(subject.ask("set 4000"), "set");
    while begun.elapsed() < Duration::from_millis(2500) {
        stillframe.clear();
        let options = ["--leave-running", "--tcp-established"];
        stillframe.dump(subject.pid(), &options).must();
    }
    stillframe.cycle(1, &subject, options);
    let took_ms = subject.ask_number("time");
    assert!((4000..6000).contains(&took_ms), "{took_ms} ms");
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_file_that_a_worker_opens_while_the_tree_is_stopped_survives() {
    needs_rings!();
    let stillframe = stillframe();
    let subject = Subject::start("rings", &["plain"]);
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("fifo");
    let (owner, kind) = (Mode::RUSR | Mode::WUSR, FileType::Fifo);
    mknodat(CWD, &fifo, kind, owner, 0).expect("a fifo");
    let asked = format!("open {}", fifo.display());
    assert_eq!(subject.ask(&asked), "begun");
    stillframe.clear();
    let mut command = stillframe.dump_command(subject.pid(), &["--timeout", "60"]);
    let mut dump = command.spawn().expect("it starts");
    // It pauses between two looks at the request; the descriptors are listed by then.
    let shown = |pid, file| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let is_stopped = || shown(subject.pid(), "stat").contains(") t ");
    let pauses = || shown(dump.id(), "wchan") == "hrtimer_nanosleep";
    wait_until("the dump to wait for the request", SOON, || {
        is_stopped() && pauses() && is_stopped()
    });
    let writer = File::options().write(true).open(&fifo).expect("a writer");
    assert!(dump.wait().expect("it ends").success());
    testkit::tree::reap_orphans();
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("opened"), "right");
    drop(writer);
}

#[test]
fn memory_that_the_kernel_writes_to_is_not_tracked() {
    needs_rings!();
    assert_not_tracked(&Subject::start("rings", &[]), "io_uring");
}

#[test]
fn a_file_that_requests_make_longer_has_its_length() {
    needs_rings!();
    needs_program!("fio");
    assert_growing_file_survives("io_uring");
}

/// fio reads and writes a file at random places, and checks what it reads.
pub(crate) fn fio(folder: &Path, options: &[&str]) -> Spawned {
    let file = folder.join("data");
    let program = Program::new("fio")
        .args([
            "--name=job",
            "--rw=randrw",
            "--bs=4k",
            "--size=4m",
            "--time_based",
        ])
        .args([
            "--runtime=1000",
            "--verify=crc32c",
            "--verify_backlog=64",
            "--fallocate=none",
        ])
        .args(options)
        .arg(format!("--filename={}", file.display()))
        .folder(folder)
        .output(&folder.join("log"));
    let fio = program.spawn();
    wait_until("its file", SOON, || {
        fs::metadata(&file).is_ok_and(|data| data.len() > 0)
    });
    fio
}

/// How many requests the tree's rings have taken, and which.
fn taken(fio: &Spawned) -> u64 {
    let mut all = 0;
    for pid in fio.tree() {
        for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            let taken = text
                .lines()
                .find_map(|line| line.strip_prefix("CachedSqHead:"));
            all += taken
                .and_then(|taken| taken.trim().parse().ok())
                .unwrap_or(0);
        }
    }
    all
}

#[test]
fn a_disk_benchmark_goes_on() {
    needs_rings!();
    needs_program!("fio");
    for options in [
        &[
            "--ioengine=io_uring",
            "--iodepth=64",
            "--direct=1",
            "--rate_iops=2000",
        ][..],
        &[
            "--ioengine=io_uring",
            "--iodepth=8",
            "--fixedbufs",
            "--registerfiles",
            "--thread",
            "--rate_iops=2000",
        ],
    ] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let stillframe = stillframe();
        let fio = fio(folder.path(), options);
        let mut before = 0;
        for _ in 0..3 {
            wait_until("it to work", SOON, || taken(&fio) > before + 100);
            before = taken(&fio);
            stillframe.cycle(1, &fio, &[]);
        }
        wait_until("it to work", SOON, || taken(&fio) > before + 100);
        let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
        assert!(!log.contains("verify:") && !log.contains("err="), "{log}");
    }
}
