//! `stillframe volume dump` of what others write to meanwhile, or have left in a state of their
//! own: what is read, what is told of it, and where an image cannot go.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use testkit::volumes::{Loop, Mount, make, noise, run};
use testkit::wait::wait_until;

use super::{LIMIT, Place, refused, succeed};

const PAGE: usize = 4096;

/// A mounted volume with a file of noise in it.
fn with_file(place: &Place, bytes: usize) -> (Loop, Mount) {
    make(&place.path("fs"), "64M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    fs::write(mount.point.join("file"), noise(bytes, 5)).unwrap();
    (device, mount)
}

/// Waits until what was written before is older than the step of the clock for times of files.
fn settle(mount: &Mount) {
    rustix::fs::syncfs(File::open(&mount.point).unwrap()).unwrap();
    let quiet = Instant::now() + Duration::from_millis(300);
    wait_until("the clock has gone on", LIMIT, || Instant::now() > quiet);
}

#[test]
fn blocks_of_a_file_that_are_marked_free_are_in_the_image() {
    testkit::needs_root!();
    let place = Place::new();
    let (device, mount) = with_file(&place, 100 * PAGE);
    drop((mount, device));
    let fs = place.name("fs");
    let blocks = run("debugfs", &["-R", "blocks /file", &fs]);
    let first = blocks.split_whitespace().next().unwrap().to_owned();
    let free = format!("freeb {first} 50");
    run("debugfs", &["-w", "-R", &free, &fs]);
    let dump = |words: &[&str]| {
        let words = [&["dump", "--no-sync", "--json"], words, &[&fs]].concat();
        succeed(&words)["volume_dump"].clone()
    };
    assert_eq!(dump(&["-D", &place.name("0")])["marked_free_blocks"], 50);
    let over = dump(&["-D", &place.name("1"), "--prev-images-dir", "../0"]);
    assert_eq!(
        (&over["stored_pages"], &over["marked_free_blocks"]),
        (&0.into(), &50.into())
    );
    let restored = place.name("out");
    for image in ["0", "1"] {
        let from = place.name(image);
        succeed(&["restore", "--no-sync", "--verify", "-D", &from, &restored]);
        let read = Mount::new(Path::new(&restored), &place.path("read"), "ro").unwrap();
        let bytes = fs::read(read.point.join("file")).unwrap();
        assert!(bytes == noise(100 * PAGE, 5), "{image}");
        drop(read);
        fs::remove_file(&restored).unwrap();
    }
    // Nothing is told of a volume that is well.
    let repaired = Command::new("e2fsck")
        .args(["-fy", &fs])
        .stdout(Stdio::null())
        .status();
    assert_eq!(repaired.unwrap().code(), Some(1));
    let told = dump(&["-D", &place.name("2")]);
    assert!(told["marked_free_blocks"].is_null(), "{told}");
}

#[test]
fn image_that_would_be_in_the_volume_is_refused_before_anything_is_frozen() {
    testkit::needs_root!();
    let place = Place::new();
    let (_device, mount) = with_file(&place, PAGE);
    for name in ["upper", "work", "inner"] {
        fs::create_dir(mount.point.join(name)).unwrap();
    }
    for name in ["lower", "over"] {
        fs::create_dir(place.path(name)).unwrap();
    }
    let point = place.name("mount");
    let layers = format!(
        "lowerdir={},upperdir={point}/upper,workdir={point}/work",
        place.name("lower")
    );
    run(
        "mount",
        &["-t", "overlay", "-o", &layers, "none", &place.name("over")],
    );
    let over = Mount::found(place.path("over"));
    // A file system whose bytes are in a file of the volume.
    make(&mount.point.join("nested"), "16M", &[], None);
    let nested = Loop::attach(&mount.point.join("nested"));
    let inner = Mount::new(&nested.device, &mount.point.join("inner"), "noatime").unwrap();
    for (folder, how) in [
        (mount.point.join("image"), ""),
        (
            over.point.join("some/image"),
            ", by a file system that is over it",
        ),
        (
            inner.point.join("image"),
            ", by a device whose bytes are in a file there",
        ),
    ] {
        let folder = folder.to_str().unwrap();
        let told = refused(&["dump", "--no-sync", "-D", folder, &point], 3);
        let what = format!("{folder} is in the volume that is to be saved{how}, which");
        assert!(told.contains(&what), "{told}");
    }
    assert_eq!(fs::read_dir(&over.point).unwrap().count(), 0);
    // An overlay over another file system is none of it.
    drop(over);
    for name in ["upper", "work", "over"] {
        fs::create_dir_all(place.path(name)).unwrap();
    }
    let layers = format!(
        "lowerdir={point},upperdir={},workdir={}",
        place.name("upper"),
        place.name("work")
    );
    run(
        "mount",
        &["-t", "overlay", "-o", &layers, "none", &place.name("over")],
    );
    let over = Mount::found(place.path("over"));
    let folder = place.name("over/image");
    succeed(&["dump", "--no-sync", "--json", "-D", &folder, &point]);
    drop((over, inner, nested));
}

/// A volume in use with one file of 2000 pages, of which there is a dump.
fn dumped(place: &Place) -> (Loop, Mount) {
    let (device, mount) = with_file(place, 2000 * PAGE);
    settle(&mount);
    let (images, point) = (place.name("0"), place.name("mount"));
    succeed(&["dump", "--no-sync", "--json", "-D", &images, &point]);
    (device, mount)
}

#[test]
fn pages_that_an_increment_reads_are_counted_alike_in_use_and_not() {
    testkit::needs_root!();
    let place = Place::new();
    let (device, mount) = dumped(&place);
    let point = place.name("mount");
    let file = File::options().write(true).open(mount.point.join("file"));
    file.unwrap().write_all_at(b"X", 123_456).unwrap();
    settle(&mount);
    let dump = |name: &str, volume: &str| {
        let images = place.name(name);
        let words = ["dump", "--no-sync", "--json", "--prev-images-dir", "../0"];
        let told = succeed(&[&words[..], &["-D", &images, volume]].concat());
        let told = &told["volume_dump"];
        let count = |name: &str| told[name].as_u64().unwrap();
        (count("read_pages"), count("stored_pages"))
    };
    let in_use = dump("1", &point);
    drop((mount, device));
    let alone = dump("2", &place.name("fs"));
    for (read, stored) in [in_use, alone] {
        assert!(
            (2000..2500).contains(&read) && stored < 100,
            "{in_use:?}, {alone:?}"
        );
    }
}

#[test]
fn pages_that_are_written_during_a_verifying_dump_are_not_silent() {
    testkit::needs_root!();
    let place = Place::new();
    let (_device, mount) = dumped(&place);
    let point = place.name("mount");
    settle(&mount);
    let images = place.name("1");
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.args([
        "volume",
        "dump",
        "--no-sync",
        "--json",
        "--verify-unchanged",
    ]);
    command.args([
        "--rate-limit",
        "4M",
        "--prev-images-dir",
        "../0",
        "-D",
        &images,
        &point,
    ]);
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    // It reads for two seconds.
    wait_until("much of the file is read", LIMIT, || {
        let told = fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap();
        let read = told
            .lines()
            .find_map(|line| line.strip_prefix("read_bytes: "));
        read.unwrap().parse::<u64>().unwrap() > 5 << 20
    });
    let file = File::options()
        .write(true)
        .open(mount.point.join("file"))
        .unwrap();
    for page in 0..20 {
        let at = (1990 - 7 * page) * PAGE as u64;
        file.write_all_at(&noise(PAGE, page), at).unwrap();
    }
    file.sync_all().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let told = &told["volume_dump"];
    assert_eq!(told["silent_pages"], 0, "{told}");
    assert!(told["stored_pages"].as_u64().unwrap() >= 20, "{told}");
    // A write to the file below the mount leaves no trace in the inode: its page counts as silent.
    let blocks = run("debugfs", &["-R", "blocks /file", &place.name("fs")]);
    let block = blocks
        .split_whitespace()
        .nth(1000)
        .unwrap()
        .parse::<u64>()
        .unwrap();
    settle(&mount);
    let parent = place.name("2");
    succeed(&["dump", "--no-sync", "--json", "-D", &parent, &point]);
    let backing = File::options().write(true).open(place.path("fs")).unwrap();
    backing
        .write_all_at(&noise(PAGE, 77), block * PAGE as u64)
        .unwrap();
    backing.sync_all().unwrap();
    let words = [
        "dump",
        "--no-sync",
        "--json",
        "--verify-unchanged",
        "--prev-images-dir",
        "../2",
    ];
    let told = succeed(&[&words[..], &["-D", &place.name("3"), &point]].concat());
    assert_eq!(told["volume_dump"]["silent_pages"], 1, "{told}");
}
