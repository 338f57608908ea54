//! `stillframe volume dump` of a file system whose machine has crashed: what the journal has is in
//! the image, and the source is as it was.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use testkit::volumes::{Loop, Mount, make, noise, populate, run, seen_by_kernel};
use testkit::wait::wait_until;

use super::{LIMIT, Place, stillframe, succeed};

/// The machine crashes, for a file system: nothing more reaches its device (ioctl_ext4(2)).
fn crash(point: &Path) {
    let shutdown = "import fcntl, os, struct, sys\n\
                    folder = os.open(sys.argv[1], os.O_RDONLY)\n\
                    fcntl.ioctl(folder, 0x8004587d, struct.pack('I', 2))\n";
    run("python3", &["-c", shutdown, point.to_str().unwrap()]);
}

/// Writes as programs do, until nothing more can be written.
fn write_on(point: &Path, done: &AtomicU64, stop: &AtomicBool) -> std::io::Result<()> {
    let mut log = File::create(point.join("log"))?;
    let unnamed = File::create(point.join("unnamed"))?;
    fs::remove_file(point.join("unnamed"))?;
    for number in 0_u64.. {
        if stop.load(Relaxed) {
            return Ok(());
        }
        log.write_all(format!("{number}\n").as_bytes())?;
        unnamed.write_all_at(&noise(5000, number), number % 64 * 5000)?;
        let folder = point.join(format!("folder{}", number % 7));
        fs::create_dir_all(&folder)?;
        let file = folder.join(format!("file{}", number % 50));
        fs::write(&file, noise((number % 9) as usize * 3000, number))?;
        if number % 11 == 3 {
            // Blocks of a directory are given up, and become those of a file.
            fs::remove_dir_all(&folder)?;
            fs::write(point.join("reused"), noise(60_000, number))?;
        }
        if number % 5 == 0 {
            log.sync_all()?;
        }
        done.store(number, Relaxed);
    }
    Ok(())
}

/// What is tried: how the file system is made, and how mounted.
const KINDS: [(&[&str], &str); 6] = [
    (&["-b", "4096"], "noatime"),
    (&["-b", "1024", "-O", "orphan_file"], "noatime"),
    (&["-O", "^metadata_csum,^64bit", "-b", "4096"], "noatime"),
    (&["-O", "^metadata_csum"], "noatime,journal_checksum"),
    (&["-O", "^metadata_csum"], "noatime,journal_async_commit"),
    (
        &["-O", "bigalloc,quota", "-b", "4096"],
        "noatime,data=journal",
    ),
];

/// A file system that has crashed under a writer; none where this kernel does not mount it.
fn crashed(place: &Place, options: &[&str], mount_options: &str, writes: u64) -> Option<PathBuf> {
    let file = place.path("fs");
    let _ = fs::remove_file(&file);
    make(&file, "64M", options, None);
    let device = Loop::attach(&file);
    let mount = Mount::new(&device.device, &place.path("mount"), mount_options)?;
    fs::create_dir(mount.point.join("before")).unwrap();
    populate(&mount.point.join("before"), false);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_on(&mount.point, &done, &stop));
        wait_until("the writer goes on", LIMIT, || {
            done.load(Relaxed) > writes || writer.is_finished()
        });
        crash(&mount.point);
        stop.store(true, Relaxed);
        let _ = writer.join().unwrap();
    });
    Some(file)
}

#[test]
fn what_a_crash_left_in_the_journal_is_replayed_in_the_image() {
    testkit::needs_root!();
    let mut replayed = 0;
    for (number, (options, mount_options)) in (0..).zip(KINDS) {
        let place = Place::new();
        for writes in [30, 200 + number * 37] {
            let Some(file) = crashed(&place, options, mount_options, writes) else {
                eprintln!("skipped: this kernel does not mount {options:?}, {mount_options}");
                continue;
            };
            let source = fs::read(&file).unwrap();
            let told = succeed(&[
                "dump",
                "-D",
                &place.name("image"),
                "--json",
                &place.name("fs"),
            ]);
            replayed += told["volume_dump"]["replayed_blocks"].as_u64().unwrap();
            assert!(
                fs::read(&file).unwrap() == source,
                "the source was written to"
            );
            succeed(&[
                "restore",
                "-D",
                &place.name("image"),
                "--verify",
                &place.name("out"),
            ]);
            // What needs no replay but the list of files without a name.
            let journal = Command::new("dumpe2fs")
                .arg("-h")
                .arg(place.path("out"))
                .output();
            let journal = String::from_utf8(journal.unwrap().stdout).unwrap();
            assert!(!journal.contains("needs_recovery"), "{journal}");
            let seen = ["fs", "out"].map(|name| {
                // The kernel replays what it has to, and deletes files without a name.
                let mount = Mount::new(&place.path(name), &place.path("mount"), "loop,noatime");
                let seen = seen_by_kernel(&mount.as_ref().unwrap().point);
                drop(mount);
                run("e2fsck", &["-fn", &place.name(name)]);
                seen
            });
            for (path, facts) in &seen[0] {
                let name = String::from_utf8_lossy(path);
                assert_eq!(seen[1].get(path), Some(facts), "{options:?}: {name}");
            }
            assert!(seen[0] == seen[1], "{options:?}");
        }
    }
    assert!(replayed > 100, "{replayed}");
}

#[test]
fn fast_commits_are_refused_by_name() {
    testkit::needs_root!();
    let place = Place::new();
    let options = ["-O", "fast_commit", "-b", "4096"];
    make(&place.path("fs"), "64M", &options, None);
    let device = Loop::attach(&place.path("fs"));
    let Some(mount) = Mount::new(&device.device, &place.path("mount"), "noatime") else {
        testkit::skip!("this kernel does not mount fast_commit");
    };
    let file = File::create(mount.point.join("file")).unwrap();
    file.sync_all().unwrap();
    run("sync", &["-f", mount.point.to_str().unwrap()]);
    for number in 0..5 {
        file.write_all_at(&noise(5000, number), number * 5000)
            .unwrap();
        file.sync_all().unwrap();
    }
    let info = fs::read_dir("/proc/fs/ext4").unwrap().find_map(|entry| {
        let name = device.device.file_name().unwrap();
        let entry = entry.unwrap();
        (entry.file_name() == name).then(|| entry.path().join("fc_info"))
    });
    let said = info.and_then(|info| fs::read_to_string(info).ok());
    let made_none = said.is_some_and(|said| said.contains("\n0 commits"));
    crash(&mount.point);
    drop(file);
    drop(mount);
    let name = device.device.to_str().unwrap();
    let output = stillframe(&["dump", "-D", &place.name("image"), name]);
    let complained = String::from_utf8_lossy(&output.stderr);
    if output.status.success() && made_none {
        testkit::skip!("this kernel made no fast commits");
    }
    assert_eq!(output.status.code(), Some(3), "{complained}");
    assert!(complained.contains("feature fast_commit"), "{complained}");
}
