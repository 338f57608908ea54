//! `stillframe volume mount`: an image as a directory, which goes with who shows it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use testkit::volumes::{
    Loop, Mount, Tree, attached, make, noise, populate, run, seen_by_kernel, unmount,
};
use testkit::wait::wait_until;

use super::{LIMIT, Place};

impl Place {
    /// Whether something is mounted on a directory.
    fn is_mounted(&self, name: &str) -> bool {
        let own = fs::metadata(self.0.path()).unwrap().dev();
        fs::metadata(self.path(name)).is_ok_and(|facts| facts.dev() != own)
    }
}

/// An image, a layer over it, and what is in each.
fn images() -> (Place, Tree, Tree) {
    let place = Place::new();
    make(
        &place.path("fs"),
        "160M",
        &["-b", "4096", "-O", "inline_data"],
        None,
    );
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    populate(&mount.point, false);
    let point = mount.point.to_str().unwrap();
    let dump = |arguments: &[&str]| {
        let stillframe = env!("CARGO_BIN_EXE_stillframe");
        run(
            stillframe,
            &[&["volume", "dump", point], arguments].concat(),
        );
    };
    dump(&["-D", &place.name("0")]);
    let before = seen_by_kernel(&mount.point);
    fs::write(mount.point.join("later"), noise(100_000, 9)).unwrap();
    dump(&["-D", &place.name("1"), "--prev-images-dir", "../0"]);
    let after = seen_by_kernel(&mount.point);
    drop(mount);
    fs::create_dir(place.path("shown")).unwrap();
    (place, before, after)
}

/// Shows an image, and waits until it is there.
fn show(place: &Place, image: &str, options: &[&str]) -> (Child, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command
        .args(["volume", "mount", "-D", &place.name(image)])
        .args(options);
    command.arg(place.path("shown")).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = String::new();
    let stdout = child.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut said).unwrap();
    (child, said)
}

fn signal(child: &Child, signal: &str) {
    run("kill", &["-s", signal, &child.id().to_string()]);
}

#[test]
fn an_image_is_shown_as_long_as_somebody_shows_it() {
    testkit::needs_root!();
    if !Path::new("/dev/fuse").exists() {
        testkit::skip!("no /dev/fuse");
    }
    let (place, before, after) = images();
    for how in ["TERM", "KILL", "umount"] {
        for (image, expected) in [("0", &before), ("1", &after)] {
            let (mut child, said) = show(&place, image, &[]);
            assert!(said.starts_with("files of the image"), "{said}");
            assert!(
                seen_by_kernel(&place.path("shown")) == *expected,
                "{how}, {image}"
            );
            let write = fs::write(place.path("shown/new"), b"x").unwrap_err();
            assert_eq!(write.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
            match how {
                "umount" => unmount(&place.path("shown")),
                _ => signal(&child, how),
            }
            let status = child.wait().unwrap();
            assert!(status.success() || how == "KILL", "{how}: {status}");
            wait_until("nothing is mounted", LIMIT, || !place.is_mounted("shown"));
            wait_until("no device is left", LIMIT, || {
                !attached().any(|file| file.ends_with("volume.img"))
            });
        }
    }
}

#[test]
fn a_volume_is_shown_as_a_file() {
    testkit::needs_root!();
    if !Path::new("/dev/fuse").exists() {
        testkit::skip!("no /dev/fuse");
    }
    let (place, ..) = images();
    let stillframe = env!("CARGO_BIN_EXE_stillframe");
    run(
        stillframe,
        &[
            "volume",
            "restore",
            "-D",
            &place.name("1"),
            &place.name("out"),
        ],
    );
    for signal_name in ["INT", "umount", "KILL"] {
        let (mut child, said) = show(&place, "1", &["--as-file"]);
        assert!(said.starts_with("volume.img of the image"), "{said}");
        let names = fs::read_dir(place.path("shown")).unwrap();
        let names = names
            .map(|entry| entry.unwrap().file_name())
            .collect::<Vec<_>>();
        assert_eq!(names, ["volume.img"]);
        let shown = fs::read(place.path("shown/volume.img")).unwrap();
        assert!(shown == fs::read(place.path("out")).unwrap());
        match signal_name {
            "umount" => unmount(&place.path("shown")),
            _ => signal(&child, signal_name),
        }
        let status = child.wait().unwrap();
        assert!(status.success() || signal_name == "KILL", "{status}");
        wait_until("nothing is mounted", LIMIT, || !place.is_mounted("shown"));
    }
    // What is damaged is an error of the file, and of nothing else.
    let pages = fs::read_dir(place.path("0"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let pages = pages
        .max_by_key(|path| fs::metadata(path).unwrap().len())
        .unwrap();
    let mut bytes = fs::read(&pages).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&pages, bytes).unwrap();
    let (mut child, _) = show(&place, "1", &["--as-file"]);
    assert!(fs::read(place.path("shown/volume.img")).is_err());
    assert!(place.is_mounted("shown"));
    signal(&child, "TERM");
    assert!(child.wait().unwrap().success());
}

/// True if a process has a file of this name open.
fn has_open(pid: u32, name: &str) -> bool {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let mut links = links
        .flatten()
        .filter_map(|link| fs::read_link(link.path()).ok());
    links.any(|link| link.ends_with(name))
}

#[test]
fn mount_killed_while_it_has_its_own_file_open_ends() {
    testkit::needs_root!();
    if !Path::new("/dev/fuse").exists() {
        testkit::skip!("no /dev/fuse");
    }
    let place = Place::new();
    make(&place.path("fs"), "32M", &[], None);
    let stillframe = env!("CARGO_BIN_EXE_stillframe");
    let arguments = ["volume", "dump", "--no-sync", "-D"];
    run(
        stillframe,
        &[&arguments[..], &[&place.name("0"), &place.name("fs")]].concat(),
    );
    fs::create_dir(place.path("shown")).unwrap();
    for _ in 0..20 {
        let mut command = Command::new(stillframe);
        command.args(["volume", "mount", "-D", &place.name("0")]);
        let mut child = command
            .arg(place.path("shown"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // It goes on as it likes: each time, the kill meets it somewhere else behind that.
        wait_until("the file is open, or seen", LIMIT, || {
            has_open(child.id(), "volume.img") || place.is_mounted("shown")
        });
        child.kill().unwrap();
        wait_until("its end", LIMIT, || child.try_wait().unwrap().is_some());
        wait_until("nothing is mounted", LIMIT, || !place.is_mounted("shown"));
        wait_until("no device is left", LIMIT, || {
            !attached().any(|file| file.ends_with("volume.img"))
        });
    }
}
