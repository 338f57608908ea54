//! File systems with features that chance puts together, changed by chance, saved mounted and not,
//! whole and as increments: whatever they are, they come back, and e2fsck finds nothing.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::fs::{Advice, FallocateFlags, XattrFlags, fadvise, fallocate, lsetxattr};
use testkit::volumes::{Loop, Mount, Tree, make, noise, run, seen_by_kernel};

use super::{Place, stillframe, succeed};

/// Features that go with each other, or nearly: what mke2fs or this kernel does not take together
/// is another case.
const FEATURES: [&str; 22] = [
    "^64bit",
    "^metadata_csum",
    "uninit_bg",
    "^has_journal",
    "^flex_bg",
    "^resize_inode",
    "^dir_index",
    "^extent",
    "^huge_file",
    "^sparse_super",
    "sparse_super2",
    "meta_bg",
    "bigalloc",
    "inline_data",
    "ea_inode",
    "large_dir",
    "metadata_csum_seed",
    "orphan_file",
    "fast_commit",
    "quota",
    "project",
    "encrypt",
];

/// A change: what, of which file, and numbers.
type Step = (u8, usize, u32, u32);

#[derive(Clone, Debug)]
struct Case {
    features: Vec<&'static str>,
    block_bytes: u32,
    inode_bytes: u32,
    rounds: Vec<(bool, Vec<Step>)>,
}

fn cases() -> impl Strategy<Value = Case> {
    let features = prop::sample::subsequence(FEATURES.to_vec(), 0..6);
    let sizes = (
        prop::sample::select(vec![1024, 2048, 4096]),
        prop::sample::select(vec![128, 256, 512, 1024]),
    );
    let step = (0_u8..11, 0_usize..40, any::<u32>(), any::<u32>());
    let round = (any::<bool>(), prop::collection::vec(step, 5..80));
    let rounds = prop::collection::vec(round, 1..4);
    (features, sizes, rounds).prop_map(|(features, (block_bytes, inode_bytes), rounds)| Case {
        features,
        block_bytes,
        inode_bytes,
        rounds,
    })
}

/// Makes the file system; whether there is one.
fn made(file: &Path, case: &Case) -> bool {
    let mut command = std::process::Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", &case.block_bytes.to_string()]);
    command.args(["-I", &case.inode_bytes.to_string()]);
    if !case.features.is_empty() {
        command.args(["-O", &case.features.join(",")]);
    }
    let output = command.arg(file).arg("48M").output().unwrap();
    output.status.success()
}

/// Changes one file. What does not go, or not here, does not matter.
fn change(point: &Path, (what, number, a, b): Step) -> std::io::Result<()> {
    let folder = point.join(format!("folder{}", number % 4));
    let path = folder.join(format!("file{number}"));
    let open = || {
        File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
    };
    let at = u64::from(a % 300) * 3000;
    match what {
        0 | 1 => {
            fs::create_dir_all(&folder)?;
            open()?.write_all_at(&noise(b as usize % 30_000, a.into()), at)
        }
        2 => fs::write(&path, noise(b as usize % 200, a.into())),
        3 => open()?.set_len(at),
        4 => Ok(fallocate(
            open()?,
            FallocateFlags::KEEP_SIZE,
            at,
            u64::from(b % 90_000) + 1,
        )?),
        5 => {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(open()?, how, at, u64::from(b % 90_000) + 1)?)
        }
        6 => fs::remove_file(&path),
        7 => fs::rename(&path, point.join(format!("renamed{}", a % 9))),
        8 => fs::hard_link(
            &path,
            folder.join(format!("link{}-{}", a % 5, "l".repeat(240))),
        ),
        9 => symlink(
            "t".repeat(b as usize % 500 + 1),
            folder.join(format!("to{}", a % 7)),
        ),
        _ => {
            let name = format!("user.name{}", a % 6);
            let value = noise(b as usize % 3000, a.into());
            Ok(lsetxattr(&path, name, &value, XattrFlags::empty())?)
        }
    }
}

/// All that is seen of a directory that was written out, and what space its files take.
fn seen(point: &Path) -> (Tree, Vec<u64>) {
    // Of a file that a change of its length makes too long for its inode, Linux 6.18 shows zeros
    // instead of what it has on disk, until it is read from there.
    let tree = seen_by_kernel(point);
    for (path, facts) in &tree {
        if facts.mode >> 12 == 8 {
            let file = File::open(point.join(OsStr::from_bytes(path))).unwrap();
            fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        }
    }
    let tree = seen_by_kernel(point);
    let of = |path: &Vec<u8>| {
        let path = point.join(OsStr::from_bytes(path));
        fs::symlink_metadata(path).unwrap().blocks()
    };
    let blocks = tree.keys().map(of).collect();
    (tree, blocks)
}

/// Plays a case; none where there is no such file system.
fn play(case: &Case) -> Option<()> {
    let place = Place::new();
    if !made(&place.path("fs"), case) {
        return None;
    }
    let device = Loop::attach(&place.path("fs"));
    let mounted = || Mount::new(&device.device, &place.path("mount"), "noatime");
    drop(mounted()?);
    for (number, (is_mounted, steps)) in case.rounds.iter().enumerate() {
        let mut mount = mounted();
        let point = mount.as_ref().unwrap().point.clone();
        for step in steps {
            let _ = change(&point, *step);
        }
        // How much space files take is known when they are written out.
        if rustix::fs::syncfs(File::open(&point).unwrap()).is_err() {
            return None;
        }
        let expected = seen(&point);
        if !is_mounted {
            drop(mount.take());
        }
        let (images, parent) = (
            place.name(&number.to_string()),
            format!("../{}", number.wrapping_sub(1)),
        );
        let mut dump = vec!["dump", "--no-sync", "-D", &images];
        dump.push(device.device.to_str().unwrap());
        if number > 0 {
            dump.extend(["--prev-images-dir", &parent]);
        }
        succeed(&dump);
        drop(mount);
        let out = place.name("out");
        succeed(&["restore", "--no-sync", "-D", &images, "--verify", &out]);
        run("e2fsck", &["-fn", &out]);
        let copy = Mount::new(&place.path("out"), &place.path("mount"), "loop,noatime").unwrap();
        let seen = seen(&copy.point);
        for ((path, facts), (_, is)) in expected.0.iter().zip(&seen.0) {
            let path = String::from_utf8_lossy(path);
            assert_eq!(is, facts, "round {number}: {path}");
        }
        assert_eq!(seen.1, expected.1, "round {number}");
        // The same out of the image, by our reader.
        for (path, facts) in &expected.0 {
            let path = String::from_utf8_lossy(path).into_owned();
            if facts.mode >> 12 == 8 && path.starts_with("renamed") {
                let told = stillframe(&["cat", "-D", &images, &path]);
                assert!(told.stdout == fs::read(copy.point.join(path)).unwrap());
            }
        }
    }
    Some(())
}

#[test]
fn whatever_it_is_it_comes_back() {
    testkit::needs_root!();
    let cycles = std::env::var("STILLFRAME_FIRE_CYCLES");
    let cases_wanted = cycles.map_or(12, |cycles| cycles.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        max_shrink_iters: 40,
        max_global_rejects: 20_000,
        ..Config::with_cases(cases_wanted)
    });
    let played = runner.run(&cases(), |case| {
        prop_assume!(play(&case).is_some());
        Ok(())
    });
    played.unwrap();
}

#[test]
fn verity_and_casefold_come_back_as_they_are() {
    let place = Place::new();
    fs::create_dir_all(place.path("tree/Folder")).unwrap();
    fs::write(place.path("tree/Folder/Name"), b"in it").unwrap();
    // What the kernel puts behind a file that it protects: hashes and a descriptor, from the next
    // 64 KiB on.
    fs::write(place.path("tree/protected"), noise(200_000, 3)).unwrap();
    let options = ["-b", "4096", "-O", "verity,casefold", "-E", "encoding=utf8"];
    make(
        &place.path("fs"),
        "32M",
        &options,
        Some(&place.path("tree")),
    );
    let fs_name = place.name("fs");
    let debugfs = |command: &str| run("debugfs", &["-w", "-R", command, &fs_name]);
    debugfs("set_inode_field Folder flags 0x40080000");
    debugfs("set_inode_field protected flags 0x180000");
    debugfs("set_inode_field protected size 100000");
    run("e2fsck", &["-fn", &fs_name]);
    let stat = |name: &str| run("debugfs", &["-R", "stat protected", name]);
    let before = stat(&fs_name);
    let image = place.name("image");
    succeed(&["dump", "-D", &image, &fs_name]);
    succeed(&["restore", "-D", &image, "--verify", &place.name("out")]);
    run("e2fsck", &["-fn", &place.name("out")]);
    assert_eq!(stat(&place.name("out")), before);
    // Every block of it is there, also those behind its end.
    let blocks = |name: &str| {
        run(
            "debugfs",
            &["-w", "-R", "set_inode_field protected size 200000", name],
        );
        let to = place.name("blocks");
        run("debugfs", &["-R", &format!("dump protected {to}"), name]);
        fs::read(to).unwrap()
    };
    assert!(blocks(&place.name("out")) == noise(200_000, 3));
    let cat = |path: &str| stillframe(&["cat", "-D", &image, path]).stdout;
    assert_eq!(cat("Folder/Name"), b"in it");
    assert!(cat("protected") == noise(100_000, 3));
    let output = stillframe(&[
        "export",
        "--format",
        "dump",
        "-D",
        &image,
        "-f",
        &place.name("stream"),
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    for what in ["/Folder: ", "/protected: "] {
        assert!(said.contains(what), "{said}");
    }
}
