//! `stillframe volume dump` of what cannot be read everywhere, and to a place that is full.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use testkit::volumes::{Mount, make, noise, run};

use super::{Place, stillframe, succeed};

/// A file system with one file of 3 MiB, and an image of it.
fn made() -> Place {
    let place = Place::new();
    fs::create_dir_all(place.path("tree/folder")).unwrap();
    fs::write(place.path("tree/folder/file"), noise(3 << 20, 6)).unwrap();
    fs::write(place.path("tree/other"), noise(3 << 20, 7)).unwrap();
    make(
        &place.path("fs"),
        "32M",
        &["-b", "4096"],
        Some(&place.path("tree")),
    );
    succeed(&["dump", "-D", &place.name("image"), &place.name("fs")]);
    place
}

/// A file by FUSE that fails where its image is damaged.
struct Failing(Child);

impl Failing {
    fn new(place: &Place) -> Self {
        let wanted = noise(3 << 20, 6);
        let wanted = &wanted[2 << 20..(2 << 20) + 4096];
        // Each thread that writes pages has a file of its own.
        let files = fs::read_dir(place.path("image")).unwrap();
        let mut files = files.map(|entry| entry.unwrap().path());
        let found = files.find_map(|path| {
            let bytes = fs::read(&path).ok()?;
            let at = bytes.chunks(4096).position(|page| page == wanted)?;
            Some((path, bytes, at))
        });
        let (pages, mut bytes, at) = found.unwrap();
        bytes[at * 4096] ^= 1;
        fs::write(&pages, bytes).unwrap();
        fs::create_dir(place.path("shown")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
        command.args(["volume", "mount", "--as-file", "-D", &place.name("image")]);
        command.arg(place.path("shown")).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut said).unwrap();
        assert!(said.starts_with("volume.img"), "{said}");
        Self(child)
    }
}

impl Drop for Failing {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

#[test]
fn blocks_that_cannot_be_read_are_named_and_can_be_skipped() {
    testkit::needs_root!();
    if !Path::new("/dev/fuse").exists() {
        testkit::skip!("no /dev/fuse");
    }
    let place = made();
    let failing = Failing::new(&place);
    let volume = place.name("shown/volume.img");
    for context in ["shared", "separate"] {
        let dump = [
            "dump",
            "-D",
            &place.name("copy"),
            "--io-context",
            context,
            &volume,
        ];
        let output = stillframe(&dump);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{complained}");
        assert!(complained.contains("cannot read block "), "{complained}");
        assert!(
            complained.contains("of /folder/file (inode "),
            "{complained}"
        );
        let told = succeed(&[&dump[..], &["--skip-bad", "--json"]].concat());
        let bad = told["volume_dump"]["bad_blocks"].as_array().unwrap();
        assert!(!bad.is_empty() && bad.len() <= 256, "{told}");
        let owner = |one: &serde_json::Value| one["owner"].as_str().unwrap().to_owned();
        assert!(
            bad.iter()
                .all(|one| owner(one).starts_with("of /folder/file")),
            "{told}"
        );
    }
    drop(failing);
    // What was skipped is zero, and the rest is there.
    let cat = |path: &str| stillframe(&["cat", "-D", &place.name("copy"), path]).stdout;
    assert!(cat("/other") == noise(3 << 20, 7));
    let (file, whole) = (cat("/folder/file"), noise(3 << 20, 6));
    let pages = file.chunks(4096).zip(whole.chunks(4096));
    let zero = pages
        .clone()
        .filter(|(ours, _)| ours.iter().all(|byte| *byte == 0));
    assert!((1..=256).contains(&zero.count()));
    let differs =
        |(ours, theirs): &(&[u8], &[u8])| ours != theirs && ours.iter().any(|byte| *byte != 0);
    assert_eq!(pages.filter(differs).count(), 0);
    // A volume that is well again is read where it was not.
    let more = ["--prev-images-dir", "../copy", "--json", &place.name("fs")];
    let told = succeed(&[&["dump", "-D", &place.name("next")][..], &more].concat());
    assert!(told["volume_dump"]["bad_blocks"].is_null(), "{told}");
    let whole_again = stillframe(&["cat", "-D", &place.name("next"), "/folder/file"]);
    assert!(whole_again.stdout == whole);
}

#[test]
fn what_is_full_is_told_and_left_as_it_was() {
    testkit::needs_root!();
    let place = made();
    make(&place.path("small"), "4M", &["-O", "^has_journal"], None);
    let mount = Mount::new(&place.path("small"), &place.path("full"), "loop").unwrap();
    fs::write(place.path("full/out"), b"as it was").unwrap();
    let image = place.name("full/image");
    for arguments in [
        ["dump", "-D", &image, &place.name("fs")],
        [
            "restore",
            "-D",
            &place.name("image"),
            &place.name("full/out"),
        ],
    ] {
        let output = stillframe(&arguments);
        let complained = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{complained}");
        assert!(complained.contains("No space left"), "{complained}");
    }
    assert_eq!(fs::read(place.path("full/out")).unwrap(), b"as it was");
    // Nothing is left of either.
    let used = run("du", &["-s", "-k", &place.name("full")]);
    let used = used
        .split_whitespace()
        .next()
        .unwrap()
        .parse::<u64>()
        .unwrap();
    assert!(used < 100, "{used} KiB");
    drop(mount);
}
