//! Rounds of `pre-dump`, and dumps over them: only what was written is saved, and nothing is lost.
mod rounds;

use std::path::Path;
use std::process::Stdio;

use rounds::{Rounds, number, under_fire};
use serde_json::Value;
use testkit::chance::Chance;
use testkit::huge_pages::HugePages;
use testkit::needs_root;
use testkit::slow_disk::SlowDisk;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

/// How often pre-dumps, dump and restore under fire, unless [`CYCLES_VARIABLE`] says more: 200
/// rounds in each test.
const CYCLES: usize = 40;
const CYCLES_VARIABLE: &str = "STILLFRAME_FIRE_CYCLES";
/// Pre-dumps killed.
const KILLS: usize = 30;

/// The trackers of the tree under `pid`, by what their command line says of it.
fn trackers(folder: &Path) -> Vec<u32> {
    let of_folder = |pid: &u32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        comm.trim() == "stillframe-trk" && line.contains(&folder.display().to_string())
    };
    let all = std::fs::read_dir("/proc").expect("it is mounted");
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(of_folder).collect()
}

fn cycles() -> usize {
    let asked = std::env::var(CYCLES_VARIABLE).ok();
    asked.map_or(CYCLES, |cycles| cycles.parse().expect("a number"))
}

fn has(feature: &str) -> bool {
    let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_stillframe"));
    let check = check.args(["check", "--feature", feature]);
    check.output().expect("it starts").status.success()
}

macro_rules! needs_tracking {
    () => {
        if !["uffd_wp_async", "mem_dirty_track"].into_iter().any(has) {
            testkit::skip!("the kernel cannot track writes");
        }
    };
}

#[test]
fn only_what_was_written_is_saved_again() {
    needs_root!();
    needs_tracking!();
    let sleeper = Subject::start("mmaps", &["plain"]);
    let mut rounds = Rounds::new(sleeper.pid());
    let first = rounds.pre_dump();
    assert_eq!(number(&first, "parent_pages"), 0);
    let all = number(&first, "scanned_pages");
    for _ in 0..3 {
        let next = rounds.pre_dump();
        let (stored, parent) = (number(&next, "stored_pages"), number(&next, "parent_pages"));
        assert!(stored <= 8 && parent >= all - 16, "{first} {next}");
    }
    assert_eq!(trackers(rounds.folder.path()).len(), 1);
    let last = rounds.make("dump", &[]);
    assert!(number(&last, "parent_pages") >= all - 32, "{first} {last}");
    rounds.restore(&[]);
    assert_eq!(sleeper.ask("check"), "right");
    wait_until("the tracker's end", SOON, || {
        trackers(rounds.folder.path()).is_empty()
    });
}

#[test]
fn a_pid_that_another_task_has_now_keeps_nothing_of_the_old_ones() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("successor", &[]);
    let mut rounds = Rounds::new(subject.pid());
    for cycle in 0..3 {
        rounds.clear();
        rounds.pre_dump();
        let child = subject.ask("child");
        let mut parent_pages = number(&rounds.pre_dump(), "parent_pages");
        assert_eq!(subject.ask("replace"), child);
        parent_pages += number(&rounds.pre_dump(), "parent_pages");
        assert_eq!(subject.ask("replace"), child);
        let last = rounds.make("dump", &[]);
        assert!(parent_pages > 0, "{last}");
        rounds.restore(&[]);
        assert_eq!(subject.ask("check"), "right", "cycle {cycle}: {last}");
        assert_eq!(subject.ask("child"), child);
    }
}

#[test]
fn what_processes_share_may_change_between_rounds() {
    needs_root!();
    needs_tracking!();
    for (shape, leaves) in [
        ("child", 1),
        ("line", 2),
        ("siblings", 1),
        ("grandchild", 0),
        ("pairs", 5),
        ("mixed", 3),
    ] {
        let subject = Subject::start("sharing", &[shape]);
        let mut rounds = Rounds::new(subject.pid());
        for cycle in 0..3 {
            rounds.clear();
            rounds.pre_dump();
            if cycle == 1 {
                subject.ask(&format!("unshare {leaves}"));
            }
            let last = rounds.pre_dump();
            assert_eq!(subject.ask("check"), "right", "{shape} {cycle}: {last}");
            rounds.make("dump", &[]);
            rounds.restore(&[]);
            assert_eq!(subject.ask("check"), "right", "{shape} {cycle}: {last}");
        }
    }
}

#[test]
fn nothing_is_torn_or_stale_under_fire() {
    needs_root!();
    needs_tracking!();
    under_fire("forks", cycles());
}

#[test]
fn nothing_is_torn_or_stale_in_memory_that_moves() {
    needs_root!();
    needs_tracking!();
    under_fire("moves", cycles());
}

#[test]
fn a_tree_that_runs_on_is_tracked_from_dump_to_dump() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("churn", &["2", "300"]);
    let mut rounds = Rounds::new(subject.pid());
    for _ in 0..4 {
        rounds.make("dump", &["--track-mem", "--leave-running"]);
    }
    let last = rounds.make("dump", &["--track-mem"]);
    assert!(number(&last, "parent_pages") > 0, "{last}");
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_round_that_fails_loses_no_writes() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("churn", &["2", "300"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.pre_dump();
    rounds.pre_dump();
    // No file may grow above 64 KiB: as good as a disk that is full.
    let failing = rounds.next("pre-dump", &[]);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$0\" \"$@\""]);
    shell.arg(failing.get_program()).args(failing.get_args());
    let status = shell.stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert!(!status.expect("it starts").success());
    assert!(!rounds.place(rounds.count).join("manifest.img").exists());
    // The next one is over the last that was whole, and cannot believe it.
    rounds.count -= 1;
    let next = rounds.pre_dump();
    assert_eq!(number(&next, "parent_pages"), 0, "{next}");
    let last = rounds.make("dump", &[]);
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right", "{last}");
}

#[test]
fn killed_rounds_and_trackers_lose_no_writes() {
    needs_root!();
    needs_tracking!();
    let mut chance = Chance::of("killed_rounds_and_trackers_lose_no_writes");
    let subject = Subject::start("churn", &["2", "300"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.pre_dump();
    let begun = std::time::Instant::now();
    rounds.pre_dump();
    let longest = begun.elapsed() + begun.elapsed() / 5;
    for round in 0..KILLS {
        let line = rounds.next("pre-dump", &[]);
        let instant = chance.time(longest);
        rounds.stillframe.kill_after(line, instant);
        if !rounds.place(rounds.count).join("manifest.img").exists() {
            rounds.count -= 1;
        }
        if round % 7 == 3 {
            for tracker in trackers(rounds.folder.path()) {
                let pid = rustix::process::Pid::from_raw(tracker.cast_signed()).expect("a pid");
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        if round % 5 == 4 {
            let told = rounds.make("dump", &[]);
            rounds.restore(&[]);
            assert_eq!(subject.ask("check"), "right", "round {round}, {told}");
            rounds.clear();
            rounds.pre_dump();
        }
    }
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_tracker_goes_with_its_target_and_after_its_time() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("mmaps", &["plain"]);
    let mut rounds = Rounds::new(subject.pid());
    let gone = |rounds: &Rounds| trackers(rounds.folder.path()).is_empty();
    rounds.make("pre-dump", &["--track-time", "0"]);
    wait_until("the tracker's time to be over", SOON, || gone(&rounds));
    // What nobody holds any more is not tracked.
    let next = rounds.pre_dump();
    assert_eq!(number(&next, "parent_pages"), 0);
    assert_eq!(trackers(rounds.folder.path()).len(), 1);
    subject.kill();
    wait_until("the tracker to go with its target", SOON, || gone(&rounds));
    let mut late = rounds.next("pre-dump", &[]);
    let status = late.stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert_eq!(status.expect("it starts").code(), Some(4));
}

#[test]
fn rounds_may_differ_in_how_they_are_compressed() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("churn", &["2", "300"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.make("pre-dump", &["--compress"]);
    rounds.pre_dump();
    rounds.make("pre-dump", &["--compress=zstd:1", "--auto-dedup"]);
    let last = rounds.make("dump", &["--compress=lz4"]);
    assert!(number(&last, "parent_pages") > 0, "{last}");
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right");
    let tasks = subject.tree();
    subject.kill();
    tree::wait_gone(&tasks);
    // Freed and squashed, one after the other, it is still the same.
    let run = |words: &[&str]| {
        let mut line = rounds.stillframe.command(words);
        let status = line.arg(rounds.place(rounds.count)).status();
        assert!(status.expect("it starts").success(), "{words:?}");
    };
    for words in [
        &["dedup"][..],
        &["merge", "--compress=zstd"],
        &["merge", "--compress"],
        &["merge"],
    ] {
        run(words);
        rounds.restore(&[]);
        assert_eq!(subject.ask("check"), "right", "{words:?}");
        let tasks = subject.tree();
        subject.kill();
        tree::wait_gone(&tasks);
    }
}

#[test]
fn a_round_cannot_be_restored_and_says_so() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("mmaps", &["plain"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.pre_dump();
    let mut line = rounds.stillframe.command(&["restore", "-o", "-"]);
    let outcome = line
        .arg("-D")
        .arg(rounds.place(1))
        .output()
        .expect("it starts");
    let told = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert_eq!(outcome.status.code(), Some(3), "{told}");
    assert!(told.contains("pre-dump"), "{told}");
    let mut show = rounds.stillframe.command(&["show", "--json"]);
    let outcome = show.arg(rounds.place(1)).output().expect("it starts");
    let told: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    assert!(
        told["statistics"]["pages_written"].as_u64() > Some(0),
        "{told}"
    );
    assert_eq!(told["tasks"].as_array().map(Vec::len), Some(0));
}

#[test]
fn every_layer_tells_what_its_dump_did() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("mmaps", &["plain"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.pre_dump();
    rounds.pre_dump();
    let told = rounds.make("dump", &[]);
    let mut show = rounds.stillframe.command(&["show", "--stats", "--json"]);
    let shown = show.arg(rounds.place(3)).output().expect("it starts");
    let shown: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let layers = shown["layers"].as_array().expect("a list");
    let kinds = layers.iter().map(|layer| &layer["statistics"]["kind"]);
    assert_eq!(kinds.collect::<Vec<_>>(), ["dump", "pre-dump", "pre-dump"]);
    let mut held = 0;
    for layer in layers {
        let (known, pages) = (&layer["statistics"], &layer["pages"]);
        assert_eq!(known["pages_written"], pages["stored"], "{layer}");
        let fates = [
            "written",
            "zero",
            "skipped_parent",
            "shared",
            "equal",
            "lost",
        ];
        let fates = fates.map(|fate| number(known, &format!("pages_{fate}")));
        assert_eq!(
            fates.iter().sum::<u64>(),
            number(known, "pages_scanned"),
            "{layer}"
        );
        assert_eq!(number(known, "tasks"), 1);
        assert!(
            number(known, "frozen_time") >= number(known, "freezing_time"),
            "{layer}"
        );
        assert!(
            number(known, "memdump_time") >= number(known, "memwrite_time"),
            "{layer}"
        );
        held += number(layer, "held_pages");
    }
    let pages = &layers[0]["pages"];
    assert_eq!(held, number(pages, "stored") + number(pages, "parent"));
    assert!(number(pages, "parent") > 0, "{shown}");
    // The image tells what the dump told, but for the last moments.
    let mut same = told["statistics"].clone();
    same["frozen_time"] = layers[0]["statistics"]["frozen_time"].clone();
    assert_eq!(same, layers[0]["statistics"]);
}

/// Whether parts of files can be freed in the folder.
fn can_free(folder: &Path) -> bool {
    use store::Store;
    let store = store::Directory::open(folder).expect("it is there");
    let new = store.create("part").expect("a file");
    new.write_at(&[1; 8192], 0).expect("room");
    new.commit(false).expect("a name");
    let freed = store.free("part", std::slice::from_ref(&(0..4096)));
    store.remove("part").expect("it is there");
    freed.is_ok()
}

#[test]
fn what_later_dumps_replace_is_freed_and_told() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("churn", &["2", "200"]);
    let mut rounds = Rounds::new(subject.pid());
    if !can_free(rounds.folder.path()) {
        testkit::skip!("the file system cannot free parts of files");
    }
    let go_on = [&["--track-mem", "--leave-running"][..], &["--auto-dedup"]].concat();
    for _ in 0..3 {
        rounds.make("dump", &go_on);
        let count = subject.ask_number("count");
        wait_until("the subject to write", SOON, || {
            subject.ask_number("count") > count + 2000
        });
    }
    rounds.make("dump", &["--auto-dedup"]);
    let layers = |rounds: &Rounds| {
        let mut show = rounds.stillframe.command(&["show", "--json"]);
        let shown = show.arg(rounds.place(4)).output().expect("it starts");
        let image: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        image["layers"].as_array().expect("a list").clone()
    };
    let told = layers(&rounds);
    assert_eq!((told.len(), &told[0]["freed_by"]), (4, &Value::Null));
    // The last two are not whole any more, and name the one that has replaced their pages.
    for (older, newer) in [(1, 0), (2, 1)] {
        assert_eq!(told[older]["freed_by"], told[newer]["image"], "{told:?}");
    }
    let mut line = rounds.stillframe.command(&["restore", "-o", "-", "-D"]);
    let outcome = line.arg(rounds.place(2)).output().expect("it starts");
    let refusal = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert_eq!(outcome.status.code(), Some(4), "{refusal}");
    assert!(
        refusal.contains("freed by auto-dedup of image"),
        "{refusal}"
    );
    // All is freed already, and what another image needs stays.
    let dedup = |place: &Path| {
        let mut line = rounds.stillframe.command(&["dedup", "--json", "-D"]);
        line.arg(place).output().expect("it starts")
    };
    let outcome = dedup(&rounds.place(4));
    let again: Value = serde_json::from_slice(&outcome.stdout).expect("JSON");
    assert_eq!(again["dedup"]["freed_bytes"], 0, "{again}");
    assert!(
        !dedup(&rounds.place(3)).status.success(),
        "image 4 needs it"
    );
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn auto_dedup_spares_what_another_image_needs() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("mmaps", &["plain"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.make("dump", &["--track-mem", "--leave-running"]);
    rounds.make("dump", &["--track-mem", "--leave-running"]);
    // Another one over the first.
    rounds.count += 1;
    let mut line = rounds.stillframe.command(&["dump", "--auto-dedup", "-t"]);
    line.arg(subject.pid().to_string())
        .arg("-D")
        .arg(rounds.place(3));
    let outcome = line
        .args(["--prev-images-dir", "../1"])
        .output()
        .expect("it starts");
    let refusal = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(
        !outcome.status.success() && refusal.contains("is needed by image"),
        "{refusal}"
    );
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn a_plain_dump_of_a_tracked_tree_is_like_any_other() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("churn", &["2", "200"]);
    let mut rounds = Rounds::new(subject.pid());
    rounds.pre_dump();
    rounds.count = 0;
    let told = rounds.make("dump", &["--leave-running"]);
    assert_eq!(number(&told, "parent_pages"), 0);
    // It neither ends the tracking nor does the next round miss anything.
    rounds.count = 1;
    assert_eq!(trackers(rounds.folder.path()).len(), 1);
    rounds.pre_dump();
    rounds.make("dump", &[]);
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn two_chains_of_one_task_do_not_spoil_each_other() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("equal-pages", &["2", "64"]);
    let child = tree::children(subject.pid())[0];
    let mut of_tree = Rounds::new(subject.pid());
    let mut of_child = Rounds::new(child);
    of_tree.pre_dump();
    of_child.pre_dump();
    // What the second chain has seen, the first one has not.
    for number in 0..2 {
        subject.ask(&format!("write {number} 7"));
    }
    of_child.pre_dump();
    let next = of_tree.pre_dump();
    let told = &next["statistics"];
    let saved = number(told, "pages_written") + number(told, "pages_equal");
    assert!(saved >= 2 * 64, "{next}");
    for number in 0..2 {
        subject.ask(&format!("write {number} 8"));
    }
    of_child.pre_dump();
    let last = of_tree.make("dump", &[]);
    of_tree.restore(&[]);
    let seen = subject.ask_number("rounds");
    wait_until("the children to look", SOON, || {
        subject.ask_number("rounds") > seen + 1
    });
    assert_eq!(subject.ask("check"), "right", "{last}");
}

/// Tracking does not tell on a subject: what a patient observer sees of it is as before.
#[test]
fn a_target_has_no_descriptor_or_mapping_of_ours() {
    needs_root!();
    needs_tracking!();
    let subject = Subject::start("mmaps", &["plain"]);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    let look = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", subject.pid()));
        let fds = std::fs::read_dir(format!("/proc/{}/fd", subject.pid()));
        (maps.expect("maps"), fds.expect("descriptors").count())
    };
    let before = look();
    let mut rounds = Rounds::new(subject.pid());
    for _ in 0..3 {
        rounds.pre_dump();
        assert_eq!(look(), before);
    }
    assert_eq!(subject.ask("check"), "right");
}

#[test]
fn huge_pages_are_read_by_every_round() {
    needs_root!();
    needs_tracking!();
    let Ok(_pages) = HugePages::reserve(40) else {
        testkit::skip!("huge pages cannot be reserved");
    };
    let subject = Subject::start("huge-pages", &[]);
    let mut rounds = Rounds::new(subject.pid());
    for _ in 0..2 {
        rounds.pre_dump();
        assert_eq!(subject.ask("write"), "right");
        rounds.pre_dump();
        assert_eq!(subject.ask("write"), "right");
        rounds.make("dump", &[]);
        tree::reap_orphans();
        rounds.restore(&[]);
        assert_eq!(subject.ask("check"), "right");
        rounds.clear();
    }
}

#[test]
fn what_disks_write_to_memory_is_not_stale() {
    needs_root!();
    needs_tracking!();
    let Ok(disk) = SlowDisk::mount() else {
        testkit::skip!("FUSE cannot be mounted");
    };
    let file = disk.file();
    let subject = Subject::start("direct-reads", &[file.to_str().expect("a name")]);
    let mut rounds = Rounds::new(subject.pid());
    for _ in 0..6 {
        rounds.pre_dump();
        let reads = subject.ask_number("reads");
        wait_until("reads", SOON, || subject.ask_number("reads") > reads + 40);
    }
    rounds.make("dump", &[]);
    rounds.restore(&[]);
    assert_eq!(subject.ask("check"), "right");
}
