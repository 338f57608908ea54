//! `stillframe volume export` and `import`: restore(8) reads what is exported, level after level,
//! and what dump(8) has written becomes an image.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat, setxattr};
use testkit::volumes::{Loop, Mount, Tree, make, noise, populate, run, seen_by_kernel};
use testkit::wait::wait_until;

use super::{LIMIT, Place, refused, stillframe, succeed};

/// What restore(8) keeps in the directory that it restores to.
const TABLE: &[u8] = b"restoresymtable";

/// restore(8), told to add a stream to a directory. It calls its temporary files by the second of
/// the dump, so each one has a folder of its own for them: another one of that second would read
/// ours.
pub(super) fn restore_command(stream: &str, folder: &Path) -> (Command, tempfile::TempDir) {
    let own = tempfile::tempdir().unwrap();
    let mut command = Command::new("restore");
    command.args(["-r", "-f", stream]).current_dir(folder);
    command.arg("-T").arg(own.path());
    (command, own)
}

/// Has restore(8) add a stream to a directory.
fn restore(stream: &str, folder: &Path) -> Output {
    let (mut command, _own) = restore_command(stream, folder);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// What of a directory restore(8) can make: no names of 255 bytes, and not its own table.
fn restorable(folder: &Path) -> Tree {
    let mut tree = seen_by_kernel(folder);
    tree.retain(|path, _| {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap();
        name.len() < 255 && name != TABLE
    });
    tree
}

/// What is seen of these files beyond that: names of one file, holes, times as the format has them.
fn details(folder: &Path, tree: &Tree) -> Vec<(Vec<u8>, u64, bool, [i64; 4])> {
    let one = |path: &Vec<u8>| {
        let facts = fs::symlink_metadata(folder.join(OsStr::from_bytes(path))).unwrap();
        let links = if facts.is_dir() { 0 } else { facts.nlink() };
        // Clusters and attributes take blocks as they come.
        let has_holes = facts.is_file() && facts.len() > 1 << 30 && facts.blocks() < 1 << 10;
        let us = |ns: i64| ns / 1000;
        let times = [
            facts.mtime(),
            us(facts.mtime_nsec()),
            facts.atime(),
            us(facts.atime_nsec()),
        ];
        (path.clone(), links, has_holes, times)
    };
    tree.keys().map(one).collect()
}

/// An access control list as programs set it: of its owner, of user 4711, of its group and others.
fn list() -> Vec<u8> {
    let entry = |tag: u16, rights: u16, id: u32| {
        [
            &tag.to_le_bytes()[..],
            &rights.to_le_bytes(),
            &id.to_le_bytes(),
        ]
        .concat()
    };
    let all = [
        (1, 6, u32::MAX),
        (2, 4, 4711),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
    ];
    let all = all.map(|(tag, rights, id)| entry(tag, rights, id));
    [
        &2_u32.to_le_bytes()[..],
        &all.concat(),
        &entry(32, 0, u32::MAX),
    ]
    .concat()
}

/// Everything that the format can have, beside what [`populate`] makes.
fn add(point: &Path, large: usize) {
    let at = |name: &str| point.join(name);
    let set = |name: &str, attribute: &str, value: &[u8]| {
        setxattr(at(name), attribute, value, XattrFlags::empty()).unwrap();
    };
    set("tiny", "system.posix_acl_access", &list());
    // What restore(8) made in there would inherit it.
    fs::create_dir(at("inherited")).unwrap();
    set("inherited", "system.posix_acl_default", &list());
    set("tiny", "trusted.t", b"");
    set("odd", "user.large", &noise(large, 3));
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set("block", "security.capability", &capability);
    let mode = Mode::from_raw_mode(0o620);
    let number = rustix::fs::makedev(4095, 0x7_ffff);
    mknodat(CWD, at("terminal"), FileType::CharacterDevice, mode, number).unwrap();
    mknodat(CWD, at("socket"), FileType::Socket, mode, 0).unwrap();
    fs::write(at(&"n".repeat(254)), b"the longest").unwrap();
    let unwritten = File::create(at("unwritten")).unwrap();
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&unwritten, flags, 0, 8 << 20).unwrap();
    unwritten.write_all_at(b"in the middle", 5 << 20).unwrap();
    let beyond = File::create(at("blocks beyond the end")).unwrap();
    let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&beyond, flags, 0, 1 << 20).unwrap();
    beyond.write_all_at(&noise(5000, 6), 0).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_100_000_000_987_654_321);
    beyond.set_modified(time).unwrap();
}

/// Changes of all kinds that an increment has to have.
fn change(point: &Path, round: u8) {
    let at = |name: &str| point.join(name);
    let next = |name: &str| at(&format!("{name}{round}"));
    fs::create_dir_all(next("new").join("in/it")).unwrap();
    fs::write(next("new").join("in/it/file"), noise(70_000, round.into())).unwrap();
    fs::rename(at("few"), next("moved")).unwrap();
    fs::create_dir(at("few")).unwrap();
    fs::hard_link(at("odd"), at("few").join("odd again")).unwrap();
    fs::remove_file(at("tiny")).unwrap();
    fs::create_dir(at("tiny")).unwrap();
    fs::write(at("tiny").join("within"), [round; 9]).unwrap();
    fs::remove_dir_all(at("tiny")).unwrap();
    fs::write(at("tiny"), [round; 8]).unwrap();
    let file = File::options().write(true).open(at("extents")).unwrap();
    file.write_all_at(&[round; 100], 8192 * 350).unwrap();
    fs::remove_file(next("removed")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600 + u32::from(round));
    fs::set_permissions(at("block"), mode).unwrap();
}

/// What was changed just before an image is taken for changed after it.
fn let_the_clock_go_on(ms: u64) {
    let quiet = Instant::now() + Duration::from_millis(ms);
    wait_until("the clock has gone on", LIMIT, || Instant::now() > quiet);
}

#[test]
fn restore_reads_what_is_exported_level_after_level() {
    testkit::needs_root!();
    let kinds: [(&[&str], usize); 3] = [
        (&["-b", "4096", "-O", "ea_inode"], 3900),
        (&["-b", "1024", "-O", "inline_data", "-I", "512"], 300),
        (
            &["-b", "4096", "-O", "bigalloc,^has_journal", "-C", "16384"],
            2000,
        ),
    ];
    for (options, large) in kinds {
        let place = Place::new();
        make(&place.path("fs"), "160M", options, None);
        make(&place.path("copy"), "160M", &["-b", "4096"], None);
        let mount = Mount::new(&place.path("fs"), &place.path("mount"), "loop,noatime").unwrap();
        let copy = Mount::new(&place.path("copy"), &place.path("to"), "loop,noatime").unwrap();
        // restore(8) makes what the root has, and finds one there.
        fs::remove_dir(copy.point.join("lost+found")).unwrap();
        populate(&mount.point, true);
        add(&mount.point, large);
        for round in 1..3 {
            fs::write(mount.point.join(format!("removed{round}")), noise(9000, 1)).unwrap();
        }
        let point = mount.point.to_str().unwrap();
        for level in 0..3 {
            if level > 0 {
                change(&mount.point, level);
            }
            let (image, stream) = (place.name(&format!("{level}")), place.name("stream"));
            let before = format!("../{}", level.saturating_sub(1));
            let number = level.to_string();
            let mut dump = vec!["dump", "-D", &image, point];
            let mut export = vec!["export", "--format", "dump", "-D", &image, "-f", &stream];
            if level > 0 {
                dump.extend(["--prev-images-dir", &before]);
                export.extend(["--prev-images-dir", &before, "--level", &number]);
            }
            succeed(&dump);
            export.push("--json");
            let told = succeed(&export);
            let told = &told["volume_export"];
            let left_out = told["left_out"].as_array().unwrap();
            assert!(
                left_out
                    .iter()
                    .all(|one| one["what"] == "restore(8) makes no names of 255 bytes"),
                "{told}"
            );
            assert_eq!(left_out.len(), 300);
            // Of an increment, that is less than a part of it.
            assert!(level == 0 || told["files"].as_u64().unwrap() < 20, "{told}");
            assert_eq!(told["bytes"], fs::metadata(&stream).unwrap().len());
            restore(&stream, &copy.point);
            let (expected, seen) = (restorable(&mount.point), restorable(&copy.point));
            for (path, facts) in &expected {
                let path_text = String::from_utf8_lossy(path);
                assert_eq!(
                    seen.get(path),
                    Some(facts),
                    "{options:?}, {level}: {path_text}"
                );
            }
            assert_eq!(seen, expected, "{options:?}, level {level}");
            let seen = details(&copy.point, &seen);
            for (seen, expected) in seen.iter().zip(details(&mount.point, &expected)) {
                let path = String::from_utf8_lossy(&seen.0);
                assert_eq!(*seen, expected, "{options:?}, level {level}: {path}");
            }
            let_the_clock_go_on(150);
        }
    }
}

#[test]
fn what_the_format_or_restore_cannot_have_is_told_by_name() {
    testkit::needs_root!();
    let place = Place::new();
    make(
        &place.path("fs"),
        "32M",
        &["-b", "4096", "-O", "ea_inode"],
        None,
    );
    let mount = Mount::new(&place.path("fs"), &place.path("mount"), "loop,noatime").unwrap();
    let at = |name: &str| mount.point.join(name);
    let long = "d".repeat(60);
    fs::create_dir_all(at(&long).join(&long)).unwrap();
    let (mode, socket) = (Mode::RUSR, FileType::Socket);
    mknodat(CWD, at(&long).join(&long).join("socket"), socket, mode, 0).unwrap();
    let number = rustix::fs::makedev(4, 0x8_0000);
    mknodat(CWD, at("device"), FileType::BlockDevice, mode, number).unwrap();
    fs::write(at("late"), b"late").unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 32);
    File::open(at("late")).unwrap().set_modified(time).unwrap();
    fs::write(at("twice"), b"twice").unwrap();
    let large = noise(5000, 1);
    setxattr(at("twice"), "user.large", &large, XattrFlags::empty()).unwrap();
    fs::write(at("zero"), b"behind it").unwrap();
    fs::hard_link(at("twice"), at(&"n".repeat(255))).unwrap();
    let (image, point) = (place.name("image"), mount.point.to_str().unwrap());
    succeed(&["dump", "-D", &image, point]);
    let output = stillframe(&["export", "--format", "dump", "-D", &image, "-f", "-"]);
    assert!(output.status.success(), "{output:?}");
    let complained = String::from_utf8_lossy(&output.stderr);
    for what in [
        "/socket: restore(8) makes no sockets with paths of more than 107 bytes",
        "/device: restore(8) makes no device 4:524288",
        "/late: a time before 1901 or after 2038 is the nearest one within",
        "nnn: restore(8) makes no names of 255 bytes",
        "/twice: attribute user.large: it is longer than restore(8) takes",
    ] {
        assert!(complained.contains(what), "{what}: {complained}");
    }
    assert_eq!(complained.matches("warning").count(), 5, "{complained}");
    fs::write(place.path("stream"), &output.stdout).unwrap();
    fs::create_dir(place.path("to")).unwrap();
    let (mut command, _own) = restore_command(&place.name("stream"), &place.path("to"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    for (name, contents) in [("twice", &b"twice"[..]), ("zero", b"behind it")] {
        let restored = fs::read(place.path("to").join(name));
        assert!(
            restored.is_ok_and(|bytes| bytes == contents),
            "{name}: {said}"
        );
    }
    assert!(place.path("to").join(&long).join(&long).exists());
    let late = fs::metadata(place.path("to/late")).unwrap();
    assert_eq!(late.mtime(), i64::from(i32::MAX));
}

/// Has dump(8) save a device that nobody has mounted, of a level.
fn dump(level: &str, device: &Path, place: &Place, options: &[&str]) -> String {
    let stream = place.name(&format!("stream{level}"));
    let mut command = Command::new("dump");
    command.args([level, "-u", "-D", &place.name("dumpdates"), "-f", &stream]);
    let output = command.args(options).arg(device).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    stream
}

#[test]
fn what_dump_has_written_becomes_an_image() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "160M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mounted = || Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    let mount = mounted();
    populate(&mount.point, true);
    fs::write(mount.point.join("removed1"), b"").unwrap();
    let (all_names, device_file) = (mount.point.join("names"), mount.point.join("device"));
    setxattr(
        mount.point.join("tiny"),
        "system.posix_acl_access",
        &list(),
        XattrFlags::empty(),
    )
    .unwrap();
    drop(mount);
    let streams = [dump("-0", &device.device, &place, &[])];
    let_the_clock_go_on(1100);
    let mount = mounted();
    change(&mount.point, 1);
    drop(mount);
    let streams = [&streams[0], &dump("-1", &device.device, &place, &[])];
    let image = place.name("image");
    let mut import = vec!["import", "--format", "dump", "-D", &image, "--json"];
    import.extend(["-f", streams[0], "-f", streams[1]]);
    let told = succeed(&import);
    let told = told["volume_import"]["left_out"].as_array().unwrap();
    let told = told
        .iter()
        .map(|one| (one["path"].as_str().unwrap(), one["what"].as_str().unwrap()));
    let mut told = told.collect::<Vec<_>>();
    told.sort_unstable();
    let [(device, no_number), (names, lost)] = told[..] else {
        panic!("{told:?}");
    };
    assert_eq!((device, names), ("device", "names"));
    assert_eq!(
        no_number,
        "its device is 0:0, or one whose number dump(8) has lost"
    );
    assert!(lost.ends_with(" names of 255 bytes in it"), "{lost}");
    succeed(&["restore", "-D", &image, &place.name("out")]);
    run("e2fsck", &["-fn", &place.name("out")]);
    let mount = mounted();
    fs::remove_dir_all(all_names).unwrap();
    fs::remove_file(device_file).unwrap();
    let restored = Mount::new(&place.path("out"), &place.path("to"), "loop,noatime").unwrap();
    fs::remove_dir_all(restored.point.join("names")).unwrap();
    fs::remove_file(restored.point.join("device")).unwrap();
    assert_eq!(
        seen_by_kernel(&restored.point),
        seen_by_kernel(&mount.point)
    );
    let links = |folder: &Path| fs::metadata(folder.join("odd")).unwrap().nlink();
    assert_eq!(links(&restored.point), 3);
}

#[test]
fn streams_that_cannot_be_read_are_refused_by_name() {
    testkit::needs_root!();
    let place = Place::new();
    fs::create_dir_all(place.path("tree/folder")).unwrap();
    fs::write(place.path("tree/folder/file"), noise(3_000_000, 4)).unwrap();
    make(&place.path("fs"), "32M", &[], Some(&place.path("tree")));
    let device = Loop::attach(&place.path("fs"));
    let image = place.name("image");
    let refused = |stream: &str, options: &[&str], status: i32, what: &str| {
        let arguments = ["import", "--format", "dump", "-D", &image, "-f", stream];
        let said = refused(&[&arguments[..], options].concat(), status);
        assert!(said.contains(what), "{what}: {said}");
        assert!(!place.path("image/manifest.img").exists());
    };
    let whole = dump("-0", &device.device, &place, &[]);
    let_the_clock_go_on(1100);
    let packed = dump("-2", &device.device, &place, &["-z1"]);
    refused(&packed, &[], 3, "it is compressed by dump(8)");
    let more = dump("-3", &device.device, &place, &[]);
    refused(
        &more,
        &[],
        3,
        "is of level 3 and has what has changed since",
    );
    refused(
        &whole,
        &["-f", &more],
        3,
        "is not the date of the one before",
    );
    refused(&whole, &["--size", "2M"], 6, "No space left on device");
    refused(
        &whole,
        &["--size", "1"],
        3,
        "mkfs.ext4 makes no file system of ",
    );
    let bytes = fs::read(&whole).unwrap();
    let other = place.name("other");
    let damaged = |bytes: &[u8], status: i32, what: &str| {
        fs::write(&other, bytes).unwrap();
        refused(&other, &[], status, what);
    };
    damaged(&noise(20_000, 5), 3, "it is not what dump(8) writes");
    damaged(&bytes[..bytes.len() / 2], 5, "the stream ends there");
    damaged(&bytes[..bytes.len() / 2 + 77], 5, "the stream ends there");
    // The header of the first directory, behind the maps.
    let is_inode = |record: &[u8]| record[..4] == [2, 0, 0, 0] && record[24..26] == bytes[24..26];
    let first = bytes.chunks(1024).position(is_inode).unwrap();
    let mut flipped = bytes.clone();
    flipped[first * 1024 + 700] ^= 1;
    damaged(
        &flipped,
        5,
        &format!("record {first}: its checksum is wrong"),
    );
    let mut second = bytes[..first * 1024].to_vec();
    second.extend(&bytes[..1024]);
    damaged(&second, 5, "another volume begins");
    let missing = place.name("missing");
    refused(&missing, &[], 6, "No such file or directory");
}

#[test]
fn times_before_1970_are_told() {
    let place = Place::new();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    for (name, s) in [("old", -100_000), ("new", 100_000)] {
        fs::write(tree.join(name), name).unwrap();
        let time = rustix::fs::Timespec {
            tv_sec: s,
            tv_nsec: 0,
        };
        let times = rustix::fs::Timestamps {
            last_access: time,
            last_modification: time,
        };
        rustix::fs::futimens(File::open(tree.join(name)).unwrap(), &times).unwrap();
    }
    make(&place.path("fs"), "16M", &[], Some(&tree));
    succeed(&[
        "dump",
        "--no-sync",
        "-D",
        &place.name("0"),
        &place.name("fs"),
    ]);
    let stream = place.name("stream");
    let format = ["export", "--format", "dump", "--json", "-f", &stream];
    let told = succeed(&[&format[..], &["-D", &place.name("0")]].concat());
    let left_out = told["volume_export"]["left_out"].as_array().unwrap();
    let paths = left_out.iter().map(|one| one["path"].as_str().unwrap());
    assert_eq!(paths.collect::<Vec<_>>(), ["old"], "{told}");
    let what = left_out[0]["what"].as_str().unwrap();
    assert!(what.starts_with("a time before 1970"), "{what}");
}
