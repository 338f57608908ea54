//! The command on other kernels: what they lack is done another way, or refused by name.
//!
//! Linux 6.1 has soft-dirty bits and neither asynchronous write protection nor `PAGEMAP_SCAN`. The
//! tests in a module named as a kernel run on that kernel (`testkit::machine`).
mod rounds;

use std::path::PathBuf;

use rounds::{Rounds, number, under_fire};
use serde_json::Value;
use testkit::facts::Facts;
use testkit::machine::Verdict;
use testkit::machine::leg::{self, Stay};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

/// Cycles under fire: the emulator is slow.
const CYCLES: usize = 2;

/// The feature by which writes are tracked, if there is one.
const PROTECTION: &str = "uffd_wp_async";
const BITS: &str = "mem_dirty_track";

fn stillframe() -> Stillframe {
    Stillframe::new(env!("CARGO_BIN_EXE_stillframe"))
}

/// What `check` says of the kernel: release, and the names of the features that are there.
fn check() -> (String, Vec<String>) {
    let output = stillframe().command(&["check", "--json"]).output();
    let output = output.expect("it starts");
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{told}");
    let features = told["features"].as_array().expect("a list").iter();
    let there = features.filter(|feature| feature["supported"] == true);
    let names = there.map(|feature| feature["name"].as_str().expect("a name").to_owned());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    (release.expect("it is there"), names.collect())
}

/// Rounds of a tree whose children write only what they are told to: each saves what was written
/// since the last, and little else.
fn rounds_save_what_was_written() {
    const CHILDREN: u64 = 4;
    const PAGES: u64 = 500;
    // Stacks, what they look at each other by, and the image's own few.
    const FEW: u64 = 150;
    let subject = Subject::start("equal-pages", &["4", "500"]);
    let mut rounds = Rounds::new(subject.pid());
    let saved = |told: &Value| {
        let told = &told["statistics"];
        number(told, "pages_written") + number(told, "pages_equal")
    };
    let first = rounds.pre_dump();
    assert!(saved(&first) >= CHILDREN * PAGES, "{first}");
    assert_eq!(number(&first, "parent_pages"), 0, "{first}");
    for (round, wrote) in [0, 1, 3].into_iter().enumerate() {
        for child in 0..wrote {
            subject.ask(&format!("write {child} {}", 10 + round));
        }
        let is_last = round == 2;
        let told = match is_last {
            false => rounds.pre_dump(),
            true => rounds.make("dump", &["--track-mem"]),
        };
        let (saved, parent) = (saved(&told), number(&told, "parent_pages"));
        let fits = (wrote * PAGES..wrote * PAGES + FEW).contains(&saved);
        assert!(fits && parent >= (CHILDREN - wrote) * PAGES, "{told}");
    }
    rounds.restore(&[]);
    let seen = subject.ask_number("rounds");
    wait_until("the children to look at every page", SOON, || {
        subject.ask_number("rounds") > seen + 1
    });
    assert_eq!(subject.ask("check"), "right");
    // The images tell the same.
    let mut show = rounds.stillframe.command(&["show", "--stats", "--json"]);
    let shown = show.arg(rounds.place(4)).output().expect("it starts");
    let shown: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let layers = shown["layers"].as_array().expect("a list").iter();
    let known = layers.map(saved).collect::<Vec<_>>();
    let wrote = [3, 1, 0, CHILDREN].map(|children| children * PAGES);
    let fit = |(saved, wrote): (&u64, &u64)| (*wrote..wrote + 10 * FEW).contains(saved);
    assert!(
        known.len() == 4 && known.iter().zip(&wrote).all(fit),
        "{known:?}"
    );
}

/// Trees in all states that a test of this kernel's own kind looks at, through dump and restore.
fn trees_survive() {
    let stillframe = stillframe();
    for (name, arguments) in [
        ("creds", &["root"][..]),
        ("fds", &[]),
        ("filters", &[]),
        ("mmaps", &[]),
        ("pending-signals", &[]),
        ("sigaltstack", &[]),
        ("sessions", &[]),
        ("tree", &["7", "still"]),
    ] {
        println!("{name}");
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        if name == "creds" && is_refused_for_landlock(&stillframe, &subject) {
            continue;
        }
        stillframe.cycle(1, &subject, &[]);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let differences = before.diff(&Facts::still(subject.pid()));
        assert!(
            differences.is_empty(),
            "{name}:\n{}",
            differences.join("\n")
        );
        if ["fds", "mmaps", "tree"].contains(&name) {
            assert_eq!(subject.ask("check"), "right", "{name}");
        }
    }
    for name in ["posix-timers", "itimers"] {
        println!("{name}");
        let subject = Subject::start(name, &["ticking"]);
        stillframe.cycle(1, &subject, &[]);
        let ticks = subject.ask_number("ticks");
        wait_until("the timer to tick", SOON, || {
            subject.ask_number("ticks") > ticks + 2
        });
    }
}

/// True if a dump is refused by name because this kernel does not tell if a thread that cannot gain
/// privileges is in a Landlock domain (docs/limits.md). The subject goes on then.
fn is_refused_for_landlock(stillframe: &Stillframe, subject: &Subject) -> bool {
    let outcome = stillframe.dump(subject.pid(), &["-R"]);
    if outcome.status.success() {
        return false;
    }
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    let _ = outcome.names(&["a Landlock domain, which it may be in,"]);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    true
}

/// Has a tree go from stay to stay, in each for so many seconds.
#[track_caller]
fn go_round(stays: &[Stay], seconds: u32) {
    testkit::needs_root!();
    testkit::needs_program!("unshare");
    let stillframe = PathBuf::from(env!("CARGO_BIN_EXE_stillframe"));
    let scratch = tempfile::tempdir().expect("the folder for temporary files can be written");
    let mut from = None;
    for (number, stay) in stays.iter().enumerate() {
        let to = scratch.path().join(number.to_string());
        match leg::run(&stillframe, *stay, from.as_deref(), seconds, &to) {
            Verdict::Passed => println!("{number}: {stay:?}"),
            Verdict::Left(why) => testkit::skip!("{why}"),
            Verdict::Failed(told) => panic!("stay {number}, {stay:?}: {told}"),
        }
        from = Some(to);
    }
}

const fn machine(suite: &'static str, processor: &'static str) -> Stay {
    Stay::Machine { suite, processor }
}

/// A processor without what the emulator's best has: its extended state is smaller.
const SMALL: &str = "SandyBridge";
const LARGE: &str = "max";

#[test]
#[ignore = "takes a minute: cargo xtask kernels"]
fn a_tree_comes_from_a_small_processor_to_this_one_and_goes_to_a_third() {
    let stays = [
        machine("bookworm", SMALL),
        Stay::Here,
        machine("bookworm", LARGE),
    ];
    go_round(&stays, 2);
}

#[test]
#[ignore = "takes many minutes: cargo xtask kernels"]
fn a_tree_goes_round_all_kernels_and_processors() {
    let stays = [
        machine("bookworm", SMALL),
        machine("trixie", LARGE),
        machine("sid", SMALL),
        Stay::Here,
        machine("bookworm", LARGE),
        machine("trixie", SMALL),
        machine("sid", LARGE),
        Stay::Here,
        machine("sid", SMALL),
        machine("bookworm", SMALL),
        Stay::Here,
    ];
    go_round(&stays, 5);
}

mod linux_6_1 {
    use super::*;

    #[test]
    fn check_tells_what_is_missing() {
        testkit::on_kernel!("linux_6_1");
        let (release, features) = check();
        assert!(release.starts_with("6.1."), "{release}");
        let has = |name: &str| features.iter().any(|feature| feature == name);
        assert!(has(BITS) && has("uffd") && has("ptrace"), "{features:?}");
        assert!(!has(PROTECTION) && !has("pagemap_scan"), "{features:?}");
    }

    #[test]
    fn rounds_save_what_soft_dirty_bits_tell() {
        testkit::on_kernel!("linux_6_1");
        rounds_save_what_was_written();
    }

    #[test]
    fn trees_survive() {
        testkit::on_kernel!("linux_6_1");
        super::trees_survive();
    }

    #[test]
    fn a_live_dump_is_refused_by_name() {
        testkit::on_kernel!("linux_6_1");
        let stillframe = stillframe();
        let subject = Subject::start("writers", &["1", "2", "50"]);
        let outcome = stillframe.dump(subject.pid(), &["--live"]);
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        let name = "a live dump on a kernel without PAGEMAP_SCAN (before Linux 6.7)";
        let _ = outcome.names(&[name]);
        let left = std::fs::read_dir(stillframe.images()).expect("it is there");
        let left = left.map(|file| file.expect("its name").file_name());
        let images = left.filter(|name| name.to_string_lossy().ends_with(".img"));
        assert_eq!(images.collect::<Vec<_>>(), Vec::<std::ffi::OsString>::new());
        let rounds = subject.ask_number("rounds");
        wait_until("the threads to go on", SOON, || {
            subject.ask_number("rounds") > rounds + 1
        });
        assert_eq!(subject.ask("check"), "right");
    }

    #[test]
    fn nothing_is_torn_or_stale_under_fire() {
        testkit::on_kernel!("linux_6_1");
        under_fire("forks", CYCLES);
    }

    #[test]
    fn nothing_is_torn_or_stale_in_memory_that_moves() {
        testkit::on_kernel!("linux_6_1");
        under_fire("moves", CYCLES);
    }
}
