//! Encrypted directories: the key is in no image, and who has it reads what was saved.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use testkit::volumes::{Mount, Tree, make, noise, run, seen_by_kernel};

use super::tape::restore_command;
use super::{Place, stillframe, succeed};

/// Gives a file system a key (fscrypt), and a directory that is to be made, if one is named, the
/// policy to be encrypted by it.
const GIVE_KEY: &str = "
import fcntl, os, struct, sys
point = os.open(sys.argv[1], os.O_RDONLY)
key = bytearray(struct.pack('II32sII32s', 2, 0, b'', 64, 0, b'') + bytes(range(64)))
fcntl.ioctl(point, 0xc0506617, key)
for vault in sys.argv[2:]:
    os.mkdir(vault)
    policy = struct.pack('BBBBBBBB16s', 2, 1, 4, 3, 0, 0, 0, 0, bytes(key[8:24]))
    fcntl.ioctl(os.open(vault, os.O_RDONLY), 0x800c6613, policy)
";

/// Whether this kernel can.
fn give_key(point: &Path, vault: Option<&Path>) -> bool {
    let mut command = Command::new("python3");
    command.args(["-c", GIVE_KEY]).arg(point).args(vault);
    command.output().unwrap().status.success()
}

/// Names without the key, and the lengths of what they are of.
fn without_key(folder: &Path) -> BTreeMap<std::ffi::OsString, u64> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let facts = entries.map(|entry| {
        (
            entry.file_name(),
            fs::symlink_metadata(entry.path()).unwrap(),
        )
    });
    facts.map(|(name, facts)| (name, facts.len())).collect()
}

#[test]
fn encrypted_files_are_saved_as_they_are() {
    testkit::needs_root!();
    if !Path::new("/sys/fs/ext4/features/encryption").exists() {
        testkit::skip!("this kernel has no fscrypt");
    }
    let place = Place::new();
    make(
        &place.path("fs"),
        "64M",
        &["-b", "4096", "-O", "encrypt"],
        None,
    );
    let mounted =
        |name: &str| Mount::new(&place.path(name), &place.path("at"), "loop,noatime").unwrap();
    let mount = mounted("fs");
    let vault = mount.point.join("vault");
    if !give_key(&mount.point, Some(&vault)) {
        testkit::skip!("this kernel has no cipher for fscrypt");
    }
    fs::create_dir(vault.join("in it")).unwrap();
    fs::write(vault.join("in it/file"), noise(300_000, 3)).unwrap();
    fs::write(vault.join("n".repeat(255)), b"short").unwrap();
    fs::hard_link(vault.join("in it/file"), vault.join("also")).unwrap();
    symlink("in it/file", vault.join("link")).unwrap();
    fs::write(mount.point.join("plain"), b"plain").unwrap();
    let (image, point) = (place.name("image"), mount.point.to_str().unwrap());
    succeed(&["dump", "-D", &image, point]);
    let expected: Tree = seen_by_kernel(&mount.point);
    // Increments, too, with more in it.
    fs::write(vault.join("later"), noise(5000, 4)).unwrap();
    let newer = place.name("newer");
    succeed(&["dump", "-D", &newer, "--prev-images-dir", "../image", point]);
    let newer_expected = seen_by_kernel(&mount.point);
    drop(mount);
    for (image, expected) in [(&image, &expected), (&newer, &newer_expected)] {
        succeed(&["restore", "-D", image, &place.name("out")]);
        run("e2fsck", &["-fn", &place.name("out")]);
        let copy = mounted("out");
        let names = without_key(&copy.point.join("vault"));
        assert!(
            names.keys().all(|name| name != "in it" && name != "link"),
            "{names:?}"
        );
        drop(copy);
        if *image == newer {
            let original = mounted("fs");
            assert_eq!(names, without_key(&original.point.join("vault")));
        }
        let copy = mounted("out");
        assert!(give_key(&copy.point, None));
        assert_eq!(seen_by_kernel(&copy.point), *expected);
    }
    // Who takes files out of it hears what is not among them.
    let told = succeed(&[
        "extract",
        "-D",
        &image,
        "--into",
        &place.name("files"),
        "--json",
    ]);
    assert_eq!(
        told["volume_extract"]["left_out"][0]["path"], "vault",
        "{told}"
    );
    let stream = stillframe(&["export", "--format", "dump", "-D", &image, "-f", "-"]);
    let complained = String::from_utf8_lossy(&stream.stderr).into_owned();
    assert!(
        complained.contains("warning: /vault: it is encrypted"),
        "{complained}"
    );
    fs::write(place.path("stream"), stream.stdout).unwrap();
    fs::create_dir(place.path("restored")).unwrap();
    let (mut restore, _own) = restore_command(&place.name("stream"), &place.path("restored"));
    assert!(restore.output().unwrap().status.success());
    for folder in ["files", "restored"] {
        assert_eq!(
            fs::read(place.path(folder).join("plain")).unwrap(),
            b"plain"
        );
        assert!(!place.path(folder).join("vault").exists());
    }
}
