//! `stillframe volume`: what is saved comes back, of every kind of file system, in use or not.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use testkit::volumes::{Loop, Mount, make, noise, populate, run, seen_by_kernel};
use testkit::wait::wait_until;

use super::{LIMIT, Place, refused, stillframe, succeed};

/// How much space files take, and when their inodes were changed, by path.
fn space(folder: &Path) -> Vec<(PathBuf, u64, (i64, i64, i64))> {
    let mut all = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let facts = fs::symlink_metadata(&path).unwrap();
            if facts.is_dir() {
                folders.push(path.clone());
            }
            let times = (facts.ctime(), facts.ctime_nsec(), facts.mtime_nsec());
            all.push((path, facts.blocks(), times));
        }
    }
    all.sort();
    all
}

/// Kinds of file systems, and whether they have only what older ones can.
const KINDS: [(&str, &[&str], bool); 12] = [
    ("blocks of 4 KiB", &["-b", "4096"], false),
    ("blocks of 1 KiB", &["-b", "1024"], false),
    (
        "small inodes",
        &["-I", "128", "-b", "1024", "-t", "ext2"],
        true,
    ),
    ("ext3", &["-t", "ext3", "-b", "4096"], true),
    (
        "bigalloc",
        &["-O", "bigalloc", "-C", "16384", "-b", "4096"],
        false,
    ),
    (
        "inline_data",
        &["-O", "inline_data", "-I", "512", "-b", "4096"],
        false,
    ),
    ("ea_inode", &["-O", "ea_inode,large_dir"], false),
    (
        "meta_bg",
        &["-O", "meta_bg,^resize_inode", "-b", "1024"],
        false,
    ),
    (
        "no journal, 32 bits",
        &["-O", "^has_journal,^64bit,^metadata_csum"],
        false,
    ),
    ("orphan_file", &["-O", "orphan_file,fast_commit"], false),
    (
        "quota",
        &["-O", "quota,project", "-E", "quotatype=usrquota:grpquota"],
        false,
    ),
    ("casefold", &["-O", "casefold"], false),
];

/// Leaves blocks with old bytes that a file is given and never writes to.
fn add_unwritten(point: &Path) {
    let old = point.join("old");
    fs::write(&old, vec![0xaa; 8 << 20]).unwrap();
    run("sync", &["-f", point.to_str().unwrap()]);
    fs::remove_file(&old).unwrap();
    run("sync", &["-f", point.to_str().unwrap()]);
    let file = File::create(point.join("unwritten")).unwrap();
    let flags = rustix::fs::FallocateFlags::empty();
    // Where there are no extents, there are no such blocks.
    let _ = rustix::fs::fallocate(&file, flags, 0, 8 << 20);
    file.write_all_at(b"in the middle", 5 << 20).unwrap();
    let file = File::create(point.join("blocks beyond the end")).unwrap();
    file.write_all_at(&noise(5000, 6), 0).unwrap();
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    let _ = rustix::fs::fallocate(&file, flags, 0, 1 << 20);
}

#[test]
fn every_kind_of_file_system_comes_back() {
    testkit::needs_root!();
    for (name, options, is_old) in KINDS {
        let place = Place::new();
        let (file, out) = (place.path("fs"), place.path("out"));
        make(&file, "160M", options, None);
        let device = Loop::attach(&file);
        let Some(mount) = Mount::new(&device.device, &place.path("mount"), "noatime") else {
            eprintln!("skipped: this kernel does not mount {name}");
            continue;
        };
        populate(&mount.point, is_old);
        add_unwritten(&mount.point);
        let set = |value: &[u8]| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(mount.point.join("block"), "user.large", value, flags)
        };
        assert!(name != "ea_inode" || set(&noise(40_000, 3)).is_ok());
        let (images, images_name) = (place.path("image"), place.name("image"));
        let point = mount.point.to_str().unwrap();
        let told = succeed(&["dump", "-D", &images_name, "--json", point]);
        assert!(
            told["volume_dump"]["frozen_us"].as_u64().unwrap() > 0,
            "{name}"
        );
        let expected = (seen_by_kernel(&mount.point), space(&mount.point));
        drop(mount);
        // The bytes that the unwritten blocks have are in no image.
        let stored = fs::read_dir(&images).unwrap().map(|entry| {
            let bytes = fs::read(entry.unwrap().path()).unwrap();
            let pages = bytes
                .chunks(4096)
                .filter(|page| page.iter().all(|byte| *byte == 0xaa));
            pages.count()
        });
        let old = if options.contains(&"-t") { 2048 } else { 0 };
        assert!(stored.sum::<usize>() <= old, "{name}");
        let unmounted = place.name("unmounted");
        succeed(&["dump", "-D", &unmounted, device.device.to_str().unwrap()]);
        for images in [&images_name, &unmounted] {
            succeed(&["restore", "-D", images, "--verify", out.to_str().unwrap()]);
            run("e2fsck", &["-fn", out.to_str().unwrap()]);
            // Mounted where the original was, it must look the same.
            let mount = Mount::new(&out, &place.path("mount"), "loop,noatime").unwrap();
            let seen = (seen_by_kernel(&mount.point), space(&mount.point));
            for (path, facts) in &expected.0 {
                let text = String::from_utf8_lossy(path);
                assert_eq!(seen.0.get(path), Some(facts), "{name}: {text}");
            }
            assert_eq!(seen, expected, "{name}");
        }
    }
}

#[test]
fn increments_have_what_has_changed() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "160M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    populate(&mount.point, false);
    fs::write(mount.point.join("large"), noise(30 << 20, 8)).unwrap();
    fs::write(mount.point.join("rewritten"), noise(8 << 20, 9)).unwrap();
    let point = mount.point.to_str().unwrap().to_owned();
    let whole = succeed(&["dump", "-D", &place.name("0"), "--json", &point]);
    // What was changed just before an image is read for the next one.
    let quiet = Instant::now() + Duration::from_millis(150);
    wait_until("the clock has gone on", LIMIT, || Instant::now() > quiet);
    let file = File::options()
        .write(true)
        .open(mount.point.join("rewritten"))
        .unwrap();
    file.write_all_at(&noise(100_000, 77), 3 << 20).unwrap();
    drop(file);
    fs::write(mount.point.join("few/two"), b"2").unwrap();
    fs::remove_file(mount.point.join("odd too")).unwrap();
    let options = ["--json", "--prev-images-dir", "../0", &point];
    let more = succeed(&[&["dump", "-D", &place.name("1")], &options[..]].concat());
    let count = |told: &serde_json::Value, what: &str| told["volume_dump"][what].as_u64().unwrap();
    assert!(count(&whole, "stored_pages") > 9000, "{whole}");
    assert!(count(&more, "stored_pages") < 200, "{more}");
    let expected = seen_by_kernel(&mount.point);
    drop(mount);
    // Bytes that change without a trace in any inode are found when they are looked for.
    let bytes = fs::read(place.path("fs")).unwrap();
    let old = noise(30 << 20, 8);
    let at = bytes
        .chunks(4096)
        .position(|page| page == &old[4096 * 50..4096 * 51])
        .unwrap();
    drop(device);
    let file = File::options().write(true).open(place.path("fs")).unwrap();
    file.write_all_at(b"rot", at as u64 * 4096 + 7).unwrap();
    for (name, silent) in [("2", 0), ("3", 1)] {
        let (images, volume) = (place.name(name), place.name("fs"));
        let mut arguments = vec!["dump", "-D", &images, "--json", "--prev-images-dir", "../1"];
        if silent > 0 {
            arguments.push("--verify-unchanged");
        }
        arguments.push(&volume);
        let told = succeed(&arguments);
        assert_eq!(count(&told, "silent_pages"), silent, "{told}");
    }
    succeed(&["restore", "-D", &place.name("2"), &place.name("out")]);
    run("e2fsck", &["-fn", &place.name("out")]);
    let mount = Mount::new(&place.path("out"), &place.path("mount"), "loop,noatime").unwrap();
    assert_eq!(seen_by_kernel(&mount.point), expected);
}

#[test]
fn files_are_read_straight_out_of_an_image() {
    let place = Place::new();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    populate(&tree, false);
    make(
        &place.path("fs"),
        "160M",
        &["-b", "4096", "-O", "inline_data"],
        Some(&tree),
    );
    let images = place.name("image");
    succeed(&["dump", "-D", &images, &place.name("fs")]);
    for name in ["empty", "tiny", "small", "odd too", "extents", "few/one"] {
        let told = stillframe(&["cat", "-D", &images, name]);
        assert!(told.status.success(), "{told:?}");
        assert!(told.stdout == fs::read(tree.join(name)).unwrap(), "{name}");
    }
    let told = succeed(&["ls", "-D", &images, "--json"]);
    let listed = told["volume_ls"].as_array().unwrap();
    assert_eq!(listed.len(), fs::read_dir(&tree).unwrap().count() + 1);
    let long = listed
        .iter()
        .find(|one| one["name"] == "long link")
        .unwrap();
    assert_eq!(long["target"], "x/".repeat(400));
    let names = succeed(&["ls", "-D", &images, "/names", "--json"]);
    assert_eq!(names["volume_ls"].as_array().unwrap().len(), 300);
    for (path, what) in [
        ("none", "there is no such file"),
        ("short link/x", "leads through a symbolic link"),
        ("few", "no regular file"),
    ] {
        let complained = refused(&["cat", "-D", &images, path], 4);
        assert!(complained.contains(what), "{complained}");
    }
}

#[test]
fn what_is_in_the_way_is_refused_by_name() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "32M", &[], None);
    make(&place.path("small"), "16M", &[], None);
    let (fs_name, images) = (place.name("fs"), place.name("image"));
    let other = refused(&["dump", "-D", &images, "/dev/null"], 3);
    assert!(other.contains("no device, file or directory"), "{other}");
    let device = Loop::attach(&place.path("fs"));
    let attached = refused(&["dump", "-D", &images, &fs_name], 3);
    assert!(attached.contains("is attached to /dev/loop"), "{attached}");
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    let inside = place.name("mount/image");
    let frozen = refused(&["dump", "-D", &inside, mount.point.to_str().unwrap()], 3);
    assert!(
        frozen.contains("is in the volume that is to be saved"),
        "{frozen}"
    );
    succeed(&["dump", "-D", &images, mount.point.to_str().unwrap()]);
    let name = device.device.to_str().unwrap();
    let mounted = refused(&["restore", "-D", &images, name], 3);
    assert!(mounted.contains("is in use"), "{mounted}");
    drop(mount);
    let small = Loop::attach(&place.path("small"));
    let short = refused(
        &["restore", "-D", &images, small.device.to_str().unwrap()],
        3,
    );
    assert!(short.contains("bytes, and the volume"), "{short}");
    // Onto a device with other bytes, which has room for more.
    drop(small);
    fs::write(place.path("small"), vec![0x55; 40 << 20]).unwrap();
    let large = Loop::attach(&place.path("small"));
    succeed(&[
        "restore",
        "-D",
        &images,
        "--verify",
        large.device.to_str().unwrap(),
    ]);
    run("e2fsck", &["-fn", large.device.to_str().unwrap()]);
}

#[test]
fn the_last_page_of_a_volume_need_not_be_whole() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "10001K", &["-b", "1024"], None);
    let fs_name = place.name("fs");
    run("debugfs", &["-w", "-R", "setb 10000", &fs_name]);
    let file = File::options().write(true).open(&fs_name).unwrap();
    file.write_all_at(b"in use", 10_000 << 10).unwrap();
    let images = place.name("image");
    succeed(&["dump", "-D", &images, &fs_name]);
    // The device has other bytes behind the volume's end.
    fs::write(place.path("large"), vec![0x55; 12 << 20]).unwrap();
    let large = Loop::attach(&place.path("large"));
    let name = large.device.to_str().unwrap();
    succeed(&["restore", "-D", &images, "--verify", name]);
    drop(large);
    let restored = fs::read(place.path("large")).unwrap();
    assert_eq!(&restored[10_000 << 10..][..6], b"in use");
    assert!(restored[10_001 << 10..].iter().all(|byte| *byte == 0x55));
}

#[test]
fn flipped_bytes_of_the_image_are_noticed() {
    let place = Place::new();
    fs::create_dir(place.path("tree")).unwrap();
    fs::write(place.path("tree/file"), noise(1 << 20, 4)).unwrap();
    make(&place.path("fs"), "32M", &[], Some(&place.path("tree")));
    let images = place.path("image");
    succeed(&["dump", "-D", &place.name("image"), &place.name("fs")]);
    for entry in fs::read_dir(&images).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for part in 0..12 {
            let at = bytes.len() * part / 12 + part;
            let mut damaged = bytes.clone();
            damaged[at.min(bytes.len() - 1)] ^= 4;
            fs::write(&path, &damaged).unwrap();
            let complained = refused(
                &["restore", "-D", &place.name("image"), &place.name("out")],
                5,
            );
            assert!(complained.contains(".img"), "{complained}");
            assert!(!place.path("out").exists());
        }
        fs::write(&path, &bytes).unwrap();
    }
    succeed(&["restore", "-D", &place.name("image"), &place.name("out")]);
}

/// What writers do to a mounted file system, until they are told to stop.
fn write_on(point: &Path, stop: &AtomicBool, done: &AtomicU64) {
    let data = File::create(point.join("data")).unwrap();
    let mut log = File::create(point.join("log")).unwrap();
    let holes = File::create(point.join("holes")).unwrap();
    for number in 1_u64.. {
        if stop.load(Relaxed) {
            return;
        }
        // A write-ahead log: what is in the data was in the log before.
        let slot = number % 64;
        log.write_all(&[number.to_le_bytes(), slot.to_le_bytes()].concat())
            .unwrap();
        if number.is_multiple_of(16) {
            log.sync_data().unwrap();
        }
        data.write_all_at(&number.to_le_bytes(), slot * 8192)
            .unwrap();
        data.write_all_at(&number.to_le_bytes(), slot * 8192 + 4096)
            .unwrap();
        // A file is replaced by a whole one.
        let new = point.join("state.new");
        fs::write(&new, number.to_string().repeat(2000)).unwrap();
        fs::rename(&new, point.join("state")).unwrap();
        let at = number % 32 * 65_536;
        holes.write_all_at(&noise(65_536, number), at).unwrap();
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&holes, punch, (at + 5 * 65_536) % (32 * 65_536), 65_536).unwrap();
        if number.is_multiple_of(50) {
            let flags = rustix::fs::FallocateFlags::empty();
            rustix::fs::fallocate(&holes, flags, 0, 40 * 65_536).unwrap();
            holes.set_len(32 * 65_536).unwrap();
        }
        let appended = File::options()
            .append(true)
            .create(true)
            .open(point.join("append"));
        // In one call, so that no instant has a part of it.
        let line = format!("line {number}\n");
        appended.unwrap().write_all(line.as_bytes()).unwrap();
        done.store(number, Relaxed);
    }
}

/// Stops the writers, also where a check fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Checks what the writers promise, of a copy that is of one instant; gives how far they were.
fn check(point: &Path, written_before: u64) -> u64 {
    let log = fs::read(point.join("log")).unwrap();
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let logged = log
        .chunks_exact(16)
        .map(|entry| (word(&entry[..8]), word(&entry[8..])));
    let logged = logged.collect::<Vec<_>>();
    assert!(
        logged
            .iter()
            .zip(1..)
            .all(|(entry, number)| *entry == (number, number % 64))
    );
    let last = logged.len() as u64;
    assert!(last >= written_before, "{last} of {written_before}");
    let data = File::open(point.join("data")).unwrap();
    for slot in 0..64 {
        let read = |at| {
            let mut bytes = [0; 8];
            data.read_exact_at(&mut bytes, slot * 8192 + at)
                .map_or(0, |()| word(&bytes))
        };
        let (first, second) = (read(0), read(4096));
        let newest = (1..=last)
            .rev()
            .find(|number| number % 64 == slot)
            .unwrap_or(0);
        // The last entry of the log may not be done.
        let is_last = newest == last;
        let before = newest.saturating_sub(64);
        assert!(
            first == newest || is_last && first == before,
            "{slot}: {first} of {newest}"
        );
        assert!(
            second == newest || is_last && second == before,
            "{slot}: {second} of {newest}"
        );
        assert!(first >= second);
    }
    if let Ok(state) = fs::read_to_string(point.join("state")) {
        let number = state[..state.len() / 2000].to_owned();
        assert_eq!(state, number.repeat(2000));
        assert!(number.parse::<u64>().unwrap() + 1 >= last);
    }
    let appended = fs::read_to_string(point.join("append")).unwrap_or_default();
    assert!(
        appended
            .lines()
            .zip(1..)
            .all(|(line, number)| line == format!("line {number}"))
    );
    assert!(appended.lines().count() as u64 + 1 >= last);
    if let Ok(holes) = fs::read(point.join("holes")) {
        for (slot, bytes) in (0..).zip(holes.chunks(65_536)) {
            let newest = (1..=last).rev().find(|number| number % 32 == slot);
            let is_zero = bytes.iter().all(|byte| *byte == 0);
            // A write of several pages may be half done at that instant, at the last number alone.
            let is_whole =
                newest.is_some_and(|number| bytes == &noise(65_536, number)[..bytes.len()]);
            assert!(is_zero || is_whole || newest == Some(last), "{slot}");
        }
    }
    last
}

#[test]
fn a_file_system_in_use_is_saved_as_of_one_instant() {
    testkit::needs_root!();
    for options in [["-b", "1024"], ["-b", "4096"]] {
        let place = Place::new();
        make(&place.path("fs"), "64M", &options, None);
        let device = Loop::attach(&place.path("fs"));
        let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
        fs::write(mount.point.join("large"), noise(20 << 20, 5)).unwrap();
        let point = mount.point.to_str().unwrap();
        let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
        let cycles = std::env::var("STILLFRAME_FIRE_CYCLES");
        let cycles = cycles.map_or(5, |cycles| cycles.parse::<u64>().unwrap() / 4);
        std::thread::scope(|scope| {
            scope.spawn(|| write_on(&mount.point, &stop, &done));
            let _stop = Stop(&stop);
            for cycle in 0..cycles {
                let before = done.load(Relaxed);
                wait_until("the writers go on", LIMIT, || {
                    done.load(Relaxed) > before + 20
                });
                let before = done.load(Relaxed);
                let images = place.name(&format!("image{cycle}"));
                let parent = format!("../image{}", cycle.wrapping_sub(1));
                let mut arguments = vec!["dump", "-D", &images, "--json", "--no-sync", point];
                if cycle > 0 {
                    arguments.extend(["--prev-images-dir", &parent]);
                }
                let told = succeed(&arguments);
                let stored = told["volume_dump"]["stored_pages"].as_u64().unwrap();
                assert!(cycle == 0 || stored < 3000, "{told}");
                succeed(&["restore", "-D", &images, "--no-sync", &place.name("out")]);
                run("e2fsck", &["-fn", &place.name("out")]);
                let copy = Mount::new(&place.path("out"), &place.path("copy"), "loop,ro").unwrap();
                check(&copy.point, before);
                assert_eq!(
                    fs::read(copy.point.join("large")).unwrap(),
                    noise(20 << 20, 5)
                );
            }
        });
    }
}

#[test]
fn a_killed_dump_leaves_nothing_frozen() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "64M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    fs::write(mount.point.join("large"), noise(20 << 20, 5)).unwrap();
    let begun = Instant::now();
    let arguments = |images: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
        command
            .args(["volume", "dump", "--no-sync", "-D", images])
            .arg(&mount.point);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    assert!(arguments(&place.name("whole")).status().unwrap().success());
    let whole = begun.elapsed();
    for number in 0..25_u32 {
        let mut child = arguments(&place.name("killed")).spawn().unwrap();
        let end = Instant::now() + whole * number / 20;
        wait_until("the moment has come", LIMIT, || Instant::now() >= end);
        let _ = child.kill();
        child.wait().unwrap();
        // If it were frozen, this would wait for ever: somebody else sees that.
        let file = mount.point.join("written");
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            fs::write(file, number.to_string()).unwrap();
            let _ = send.send(());
        });
        let written = receive.recv_timeout(Duration::from_secs(20));
        if written.is_err() {
            let _ = Command::new("fsfreeze")
                .arg("-u")
                .arg(&mount.point)
                .status();
            panic!("killed after {number}/20 of a dump, it left the file system frozen");
        }
    }
    let left = fs::read_dir(place.path("killed")).unwrap();
    let left = left
        .map(|entry| entry.unwrap().file_name())
        .collect::<Vec<_>>();
    assert!(
        left.iter()
            .all(|name| name.to_str().unwrap().ends_with(".img")),
        "{left:?}"
    );
}

#[test]
fn a_killed_restore_leaves_nothing() {
    let place = Place::new();
    fs::create_dir_all(place.path("tree")).unwrap();
    fs::create_dir_all(place.path("to")).unwrap();
    fs::write(place.path("tree/large"), noise(40 << 20, 5)).unwrap();
    make(&place.path("fs"), "64M", &[], Some(&place.path("tree")));
    succeed(&["dump", "-D", &place.name("image"), &place.name("fs")]);
    let begun = Instant::now();
    let restore = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
        command.args(["volume", "restore", "--no-sync", "-D", &place.name("image")]);
        command.arg(place.path("to/out")).stdout(Stdio::null());
        command
    };
    assert!(restore().status().unwrap().success());
    let whole = begun.elapsed();
    let names = || fs::read_dir(place.path("to")).unwrap().count();
    for number in 0..20_u32 {
        let mut child = restore().spawn().unwrap();
        let end = Instant::now() + whole * number / 20;
        wait_until("the moment has come", LIMIT, || Instant::now() >= end);
        let _ = child.kill();
        child.wait().unwrap();
        assert_eq!(names(), 1, "killed after {number}/20 of a restore");
    }
    assert!(fs::read(place.path("to/out")).unwrap() == fs::read(place.path("fs")).unwrap());
}

#[test]
fn a_larger_target_is_used() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "32M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    populate(&mount.point, false);
    // One that is open and has no name: the file system is whole after a repair only.
    let unnamed = File::create(mount.point.join("unnamed")).unwrap();
    unnamed.write_all_at(&noise(50_000, 1), 0).unwrap();
    fs::remove_file(mount.point.join("unnamed")).unwrap();
    let point = mount.point.to_str().unwrap();
    succeed(&["dump", "-D", &place.name("image"), point]);
    let seen = seen_by_kernel(&mount.point);
    drop((unnamed, mount, device));
    let out = place.name("out");
    let refused = refused(&["restore", "-D", &place.name("image"), "--grow", &out], 2);
    assert!(refused.contains("--grow=SIZE"), "{refused}");
    let told = succeed(&[
        "restore",
        "-D",
        &place.name("image"),
        "--json",
        "--grow=80M",
        &out,
    ]);
    assert_eq!(told["volume_restore"]["grown_bytes"], 80 << 20);
    fs::write(place.path("larger"), b"").unwrap();
    File::options()
        .write(true)
        .open(place.path("larger"))
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    let larger = Loop::attach(&place.path("larger"));
    let name = larger.device.to_str().unwrap();
    let told = succeed(&[
        "restore",
        "-D",
        &place.name("image"),
        "--json",
        "--verify",
        "--grow",
        name,
    ]);
    assert_eq!(told["volume_restore"]["grown_bytes"], 64 << 20);
    drop(larger);
    for name in ["out", "larger"] {
        run("e2fsck", &["-fn", &place.name(name)]);
        let mount = Mount::new(&place.path(name), &place.path("mount"), "loop,noatime").unwrap();
        assert!(seen_by_kernel(&mount.point) == seen, "{name}");
    }
}
