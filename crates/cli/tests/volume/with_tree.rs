//! `dump --with-volume`: a data base and its program are saved of one instant, and come back so.

use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use testkit::chance::Chance;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::volumes::{Loop, Mount, is_mounted, make, run, unmount};
use testkit::wait::{SOON, wait_until};

use super::Place;

/// Commits numbers as fast as it can, and insists before each that the data base has those that it
/// knows to be committed, and no others. The last one is told by the name of a symbolic link, so
/// that nothing outside of the volume is open.
const BOOKKEEPER: &str = r#"
import os, sqlite3, sys
folder, told, journal = sys.argv[1:4]
def opened():
    db = sqlite3.connect(os.path.join(folder, "db"))
    db.execute("pragma journal_mode=" + journal)
    db.execute("pragma synchronous=normal")
    return db
def check(db):
    known = (last, last)
    assert db.execute("select count(*), coalesce(max(n), 0) from t").fetchone() == known, known
db = opened()
db.execute("create table t (n integer primary key, bytes blob)")
last = 0
while True:
    with db:
        db.execute("insert into t values (?, ?)", (last + 1, os.urandom(3000)))
    last += 1
    if last % 5 == 0:
        check(db)
    if last % 40 == 0:
        other = opened()
        check(other)
        assert other.execute("pragma integrity_check").fetchone() == ("ok",)
        other.close()
    try:
        os.symlink(str(last), f"{told}.{last}")
        os.rename(f"{told}.{last}", told)
    except OSError:
        pass # One that ran on after the instant did so, too.
    if last % 3000 == 0:
        with db:
            db.execute("delete from t")
        last = 0
"#;

/// A bookkeeper on a volume.
struct Books {
    place: Place,
    program: Spawned,
    mount: Option<Mount>,
    device: Option<Loop>,
}

impl Books {
    fn open(journal: &str) -> Self {
        let place = Place::new();
        make(&place.path("fs0"), "96M", &["-b", "4096"], None);
        let device = Loop::attach(&place.path("fs0"));
        let mount = Mount::new(&device.device, &place.path("mount"), "noatime,nosuid");
        let mount = mount.expect("an ordinary file system");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", BOOKKEEPER])
            .args([&mount.point, &place.path("told")])
            .arg(journal)
            .folder(&mount.point)
            .output(&place.path("complaints"))
            .spawn();
        let books = Self {
            place,
            program,
            device: Some(device),
            mount: Some(mount),
        };
        books.go_on();
        books
    }

    /// Insists that it writes and has found nothing wrong.
    fn go_on(&self) {
        let last = || {
            let told = fs::read_link(self.place.path("told")).ok()?;
            told.to_str()?.parse::<u64>().ok()
        };
        let before = last();
        let mut steps = 0;
        let mut seen = before;
        wait_until("the bookkeeper to go on", SOON, || {
            let complaints = fs::read_to_string(self.place.path("complaints")).unwrap_or_default();
            assert!(complaints.is_empty(), "{complaints}");
            steps += u32::from(last() != seen);
            seen = last();
            // All of it is checked every forty.
            steps > 10 && seen.is_some_and(|now| now.abs_diff(before.unwrap_or(0)) > 50)
        });
    }

    fn point(&self) -> PathBuf {
        self.place.path("mount")
    }

    /// Takes the volume away, and makes a device for another one, which is larger and has the same
    /// number: SQLite knows its files by that.
    fn move_to_new_disk(&mut self) -> String {
        self.mount = None;
        let device = self.device.as_ref().expect("there is one");
        let name = device.device.to_str().unwrap().to_owned();
        let file = fs::File::options().write(true).open(self.place.path("fs0"));
        let file = file.unwrap();
        file.set_len(0).unwrap();
        file.set_len(100 << 20).unwrap();
        run("losetup", &["-c", &name]);
        run("blockdev", &["--flushbufs", &name]);
        name
    }

    /// What was mounted by a restore is unmounted with the rest.
    fn is_mounted(&mut self) {
        let point = self.point();
        self.mount = Some(Mount::found(point));
    }
}

impl Drop for Books {
    fn drop(&mut self) {
        self.program.kill();
    }
}

fn stillframe() -> Stillframe {
    Stillframe::new(env!("CARGO_BIN_EXE_stillframe"))
}

#[test]
fn a_data_base_and_its_program_are_of_one_instant() {
    testkit::needs_root!();
    testkit::needs_program!("/usr/bin/python3");
    for journal in ["wal", "delete"] {
        let mut books = Books::open(journal);
        let stillframe = stillframe();
        let pid = books.program.pid();
        let point = books.place.name("mount");
        for how in [&[][..], &["--live"], &["-R"]] {
            stillframe.clear();
            let options = [&["--with-volume", &point, "--file-locks"][..], how].concat();
            stillframe.dump(pid, &options).must();
            if how.is_empty() {
                wait_until("the program to end", SOON, || !books.program.is_alive());
            } else {
                // What it writes from now on is not to be seen again.
                books.go_on();
                books.program.kill();
            }
            let device = books.move_to_new_disk();
            let told = stillframe
                .restore(&["--with-volume", &device, "--file-locks"])
                .must();
            assert!(is_mounted(&books.point()), "{}", told.told());
            assert!(!told.told().contains("on device"), "{}", told.told());
            books.is_mounted();
            let options = run("findmnt", &["-n", "-o", "OPTIONS", &point]);
            assert!(
                options.contains("noatime") && options.contains("nosuid"),
                "{options}"
            );
            books.go_on();
        }
        books.program.kill();
        books.mount = None;
        let device = books.device.as_ref().unwrap().device.to_str().unwrap();
        run("e2fsck", &["-fn", device]);
    }
}

#[test]
fn both_come_back_or_neither() {
    testkit::needs_root!();
    testkit::needs_program!("/usr/bin/python3");
    let mut books = Books::open("wal");
    let stillframe = stillframe();
    let pid = books.program.pid();
    let point = books.place.name("mount");
    // The image and the log must not be in what is frozen.
    let inside = books.place.name("mount/image");
    let elsewhere = stillframe.command(&["dump", "-t", &pid.to_string(), "-D", &inside]);
    let refused = { elsewhere }
        .args(["--with-volume", &point])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(3));
    let refused = stillframe.dump(pid, &["--with-volume", "/proc"]);
    refused.must_fail().names(&["proc"]);
    stillframe.clear();
    // What cannot be read in time leaves nothing.
    let hasty = stillframe.dump(
        pid,
        &["--with-volume", &point, "--file-locks", "--max-frozen", "1"],
    );
    hasty.must_fail().names(&["--max-frozen"]);
    books.go_on();
    stillframe.clear();
    stillframe
        .dump(pid, &["--with-volume", &point, "--file-locks"])
        .must();
    // It is mounted, too small, and no device.
    let own = books
        .device
        .as_ref()
        .unwrap()
        .device
        .to_str()
        .unwrap()
        .to_owned();
    stillframe
        .restore(&["--with-volume", &own])
        .must_fail()
        .names(&["mounted"]);
    let device = books.move_to_new_disk();
    let small = books.place.path("small");
    fs::File::create(&small).unwrap().set_len(1 << 20).unwrap();
    let too_small = Loop::attach(&small);
    let name = too_small.device.to_str().unwrap();
    stillframe
        .restore(&["--with-volume", name])
        .must_fail()
        .names(&["has 1048576 bytes"]);
    let file = small.to_str().unwrap();
    stillframe
        .restore(&["--with-volume", file])
        .must_fail()
        .names(&["not a block device"]);
    assert!(!is_mounted(&books.point()));
    // A restore that fails unmounts what it has mounted.
    let taken = books.place.path("no");
    fs::write(
        &taken,
        "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION != post-restore ]\n",
    )
    .unwrap();
    run("chmod", &["755", taken.to_str().unwrap()]);
    // On another device files have other numbers, which is said.
    let other = books.place.path("other");
    fs::File::create(&other)
        .unwrap()
        .set_len(100 << 20)
        .unwrap();
    let other = Loop::attach(&other);
    let veto = [
        "--with-volume",
        other.device.to_str().unwrap(),
        "--action-script",
        taken.to_str().unwrap(),
    ];
    let begun = Instant::now();
    let told = stillframe.restore(&veto).must_fail();
    told.names(&["the volume was on device 7:"]);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "nothing is left to wait for"
    );
    assert!(!is_mounted(&books.point()));
    stillframe
        .restore(&["--with-volume", &device, "--file-locks"])
        .must();
    books.is_mounted();
    books.go_on();
}

#[test]
fn a_dump_with_a_volume_that_is_killed_leaves_both_as_they_were() {
    testkit::needs_root!();
    testkit::needs_program!("/usr/bin/python3");
    let mut books = Books::open("wal");
    let stillframe = stillframe();
    let pid = books.program.pid();
    let point = books.place.name("mount");
    let options = ["--with-volume", &point, "--file-locks", "-R"];
    let begun = Instant::now();
    stillframe.dump(pid, &options).must();
    let usual = begun.elapsed() + Duration::from_millis(20);
    let mut chance = Chance::of("a_dump_with_a_volume_that_is_killed");
    for _ in 0..5 {
        stillframe.clear();
        let command = stillframe.dump_command(pid, &options);
        stillframe.kill_after(command, chance.time(usual));
        books.go_on();
    }
    // What the last one has left is not in the way.
    stillframe.clear();
    stillframe
        .dump(pid, &["--with-volume", &point, "--file-locks"])
        .must();
    let device = books.move_to_new_disk();
    for _ in 0..3 {
        let command = stillframe.restore_command(&["--with-volume", &device, "--file-locks"]);
        stillframe.kill_after(command, chance.time(usual));
        if books.program.is_alive() && is_mounted(&books.point()) {
            books.program.kill();
        }
        testkit::tree::wait_gone(&[pid]);
        if is_mounted(&books.point()) {
            // It was killed when the tree was there: that is not left half done.
            unmount(&books.point());
        }
        // What the killed one had mounted nowhere yet goes a moment after it.
        wait_until("the device to be free", SOON, || {
            let exclusively = i32::try_from(OFlags::EXCL.bits()).unwrap();
            let opened = fs::File::options()
                .read(true)
                .custom_flags(exclusively)
                .open(&device);
            opened.is_ok()
        });
    }
    stillframe
        .restore(&["--with-volume", &device, "--file-locks"])
        .must();
    books.is_mounted();
    books.go_on();
}

#[test]
fn part_of_a_volume_is_refused_and_the_tree_goes_on() {
    testkit::needs_root!();
    let books = Books::open("wal");
    let point = books.point();
    fs::create_dir(point.join("part")).expect("a directory");
    let part = books.place.path("part");
    fs::create_dir(&part).expect("a directory");
    let name = |path: &PathBuf| path.to_str().expect("a name").to_owned();
    run(
        "mount",
        &["--bind", &name(&point.join("part")), &name(&part)],
    );
    let shown = Mount::found(part.clone());
    let pid = books.program.pid().to_string();
    let images = books.place.name("image");
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.args([
        "dump",
        "-t",
        &pid,
        "-D",
        &images,
        "--with-volume",
        &name(&part),
    ]);
    let output = command.output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains("shows only /part of the volume"), "{told}");
    assert!(fs::metadata(format!("/proc/{pid}/exe")).is_ok());
    // All of it is saved by itself.
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.args(["volume", "dump", "--no-sync", "-D", &images, &name(&part)]);
    let output = command.output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    drop(shown);
}
