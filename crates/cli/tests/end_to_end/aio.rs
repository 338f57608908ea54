//! Contexts of asynchronous I/O (io_setup(2)), with programs that use them.
use std::fs;

use testkit::program::Spawned;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::rings::{assert_growing_file_survives, assert_not_tracked, assert_survives, fio};
use crate::stillframe;

/// Whether there is nothing to be tested: nobody may look into the kernel.
macro_rules! needs_contexts {
    () => {
        needs_root!();
        if stillframe().is_peer() {
            testkit::skip!("the peer does not look whether requests are under way");
        }
        if let Err(error) = testkit::calls::aio::Context::new(1).and_then(|context| context.end()) {
            testkit::skip!("no asynchronous I/O is allowed: {error}");
        }
        if let Err(error) = sys::per_cpu::PerCpuMap::make() {
            testkit::skip!("the kernel may not be looked into: {error}");
        }
    };
}

#[test]
fn contexts_in_all_states_survive() {
    needs_contexts!();
    for seed in 0..6 {
        assert_survives("aio", &seed.to_string());
    }
}

#[test]
fn a_wait_for_several_events_goes_on_with_those_that_are_there() {
    needs_contexts!();
    let stillframe = stillframe();
    let subject = Subject::start("aio", &["7"]);
    for round in 1..4 {
        for _ in 0..2 {
            subject.ask("one");
            stillframe.clear();
            stillframe.dump(subject.pid(), &["--leave-running"]).must();
            stillframe.cycle(1, &subject, &[]);
        }
        subject.ask("one");
        let wanted = (3 * round).to_string();
        wait_until("three events", SOON, || subject.ask("threes") == wanted);
    }
}

#[test]
fn reads_under_way_are_waited_for() {
    needs_contexts!();
    let stillframe = stillframe();
    let subject = Subject::start("aio", &["1", "disk"]);
    let reads = || subject.ask("reads").parse::<u64>().expect("a number");
    let mut before = 0;
    for _ in 0..10 {
        wait_until("reads", SOON, || reads() > before + 100);
        stillframe.cycle(1, &subject, &[]);
        before = reads();
    }
    wait_until("reads", SOON, || reads() > before + 100);
}

#[test]
fn what_may_never_end_is_named_and_the_target_unharmed() {
    needs_contexts!();
    for (how, why) in [
        ("poll", "a request is under way that may never end (a poll)"),
        ("unmapped", "a part of it was unmapped, moved or protected"),
        ("forked", "it belongs to no context of this process"),
    ] {
        let stillframe = stillframe();
        let subject = Subject::start("aio", &["2", how]);
        let refused = stillframe.dump(subject.pid(), &[]).must_fail();
        let refused = refused.names(&["mapping", "/[aio] (deleted)", why]);
        assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
        assert_eq!(subject.ask("check"), "right", "{how}");
        assert_eq!(subject.ask("wake"), "1", "{how}");
        if how == "poll" {
            subject.ask("write");
            stillframe.cycle(1, &subject, &[]);
            assert_eq!(subject.ask("wake"), "2");
        }
    }
}

#[test]
fn rings_are_not_tracked() {
    needs_contexts!();
    assert_not_tracked(&Subject::start("aio", &["3"]), "[aio]");
}

#[test]
fn a_file_that_requests_make_longer_has_its_length() {
    needs_contexts!();
    needs_program!("fio");
    assert_growing_file_survives("libaio");
}

#[test]
fn too_few_requests_on_this_host_are_named_before_anything_is_made() {
    needs_contexts!();
    const MOST: &str = "/proc/sys/fs/aio-max-nr";
    /// Has the limit be what it was.
    struct Limit(String);
    impl Drop for Limit {
        fn drop(&mut self) {
            fs::write(MOST, &self.0).expect("it can be written");
        }
    }
    let stillframe = stillframe();
    let subject = Subject::start("aio", &["4"]);
    stillframe.dump(subject.pid(), &[]).must();
    let limit = Limit(fs::read_to_string(MOST).expect("it can be read"));
    if fs::write(MOST, "0").is_err() {
        testkit::skip!("fs.aio-max-nr cannot be set");
    }
    let refused = stillframe.restore(&[]).must_fail();
    refused.names(&["requests of asynchronous I/O", "fs.aio-max-nr"]);
    drop(limit);
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

/// How many bytes a tree has had read and written since its processes began.
fn moved_bytes(fio: &Spawned) -> u64 {
    let mut all = 0;
    for pid in fio.tree() {
        let text = fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        for name in ["read_bytes: ", "write_bytes: "] {
            let number = text.lines().find_map(|line| line.strip_prefix(name));
            all += number.map_or(0, |number| number.parse().expect("a number"));
        }
    }
    all
}

#[test]
fn a_disk_benchmark_goes_on() {
    needs_contexts!();
    needs_program!("fio");
    for options in [
        &["--iodepth=64", "--direct=1"][..],
        &["--iodepth=16", "--direct=1", "--userspace_reap", "--thread"],
        &["--iodepth=8", "--direct=0"],
    ] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let stillframe = stillframe();
        let options = [&["--ioengine=libaio"], options].concat();
        let fio = fio(folder.path(), &options);
        for _ in 0..10 {
            wait_until("it to work", SOON, || moved_bytes(&fio) > 1 << 20);
            stillframe.cycle(1, &fio, &[]);
        }
        wait_until("it to work", SOON, || moved_bytes(&fio) > 1 << 20);
        let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
        assert!(!log.contains("verify:") && !log.contains("err="), "{log}");
    }
}
