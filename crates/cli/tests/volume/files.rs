//! `stillframe volume extract` and `diff`: files out of an image, with all that they are.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;
use testkit::volumes::{Loop, Mount, make, noise, populate, run, seen_by_kernel};

use super::{Place, refused, stillframe, succeed};

/// What is seen of files beyond contents and attributes: length and space, links, times in ns.
fn facts(folder: &Path) -> Vec<(PathBuf, u64, u64, [i64; 4])> {
    let mut all = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(inside) = folders.pop() {
        for entry in fs::read_dir(folder.join(&inside)).unwrap() {
            let name = inside.join(entry.unwrap().file_name());
            let facts = fs::symlink_metadata(folder.join(&name)).unwrap();
            if facts.is_dir() {
                folders.push(name.clone());
            }
            // Attributes and trees of extents take blocks as they come.
            let blocks = if facts.is_file() && facts.len() > 1 << 30 {
                facts.blocks()
            } else {
                0
            };
            let times = [
                facts.mtime(),
                facts.mtime_nsec(),
                facts.atime(),
                facts.atime_nsec(),
            ];
            let links = if facts.is_dir() { 0 } else { facts.nlink() };
            all.push((name, blocks, links, times));
        }
    }
    all.sort();
    all
}

/// A file system with one of everything, and what else attributes can be.
fn everything(place: &Place) -> (Loop, Mount) {
    make(
        &place.path("fs"),
        "160M",
        &["-b", "4096", "-O", "inline_data,ea_inode"],
        None,
    );
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    populate(&mount.point, false);
    let set = |name: &str, attribute: &str, value: &[u8]| {
        let set = rustix::fs::lsetxattr(
            mount.point.join(name),
            attribute,
            value,
            XattrFlags::empty(),
        );
        set.unwrap();
    };
    // cap_net_raw, permitted and effective.
    let capability = [
        1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    set("tiny", "security.capability", &capability);
    set("small", "user.large", &noise(40_000, 3));
    set("long link", "trusted.of-a-link", b"x");
    // Read for user 1001, by the words of posix_acl(5) as the kernel takes them.
    let entries = [
        (1_u16, 6_u16, u32::MAX),
        (2, 4, 1001),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
        (32, 0, u32::MAX),
    ];
    let entries = entries.map(|(tag, rights, id)| {
        [
            &tag.to_le_bytes()[..],
            &rights.to_le_bytes(),
            &id.to_le_bytes(),
        ]
        .concat()
    });
    let acl = [&2_u32.to_le_bytes()[..], &entries.concat()].concat();
    set("odd", "system.posix_acl_access", &acl);
    set("few", "system.posix_acl_default", &acl);
    fs::set_permissions(
        mount.point.join("small"),
        fs::Permissions::from_mode(0o6711),
    )
    .unwrap();
    (device, mount)
}

#[test]
fn extracted_files_are_what_they_were() {
    testkit::needs_root!();
    let place = Place::new();
    let (_device, mount) = everything(&place);
    let images = place.name("image");
    succeed(&["dump", "-D", &images, mount.point.to_str().unwrap()]);
    // Onto a file system that can have the same.
    let (out, into) = (place.path("out"), place.name("out/all"));
    make(
        &place.path("other"),
        "160M",
        &["-b", "4096", "-O", "ea_inode"],
        None,
    );
    let other = Mount::new(&place.path("other"), &out, "loop,noatime").unwrap();
    let told = succeed(&["extract", "-D", &images, "--into", &into, "--json"]);
    let left_out = &told["volume_extract"]["left_out"];
    assert_eq!(*left_out, serde_json::json!([]), "{told}");
    let into = Path::new(&into);
    fs::remove_dir_all(into.join("lost+found")).unwrap();
    let expected = seen_by_kernel(&mount.point);
    let seen = seen_by_kernel(into);
    for (path, facts) in &expected {
        let name = String::from_utf8_lossy(path);
        assert_eq!(seen.get(path), Some(facts), "{name}");
    }
    assert_eq!(seen.len(), expected.len());
    fs::remove_dir_all(mount.point.join("lost+found")).unwrap();
    assert_eq!(facts(into), facts(&mount.point));
    let number = |name: &str| fs::metadata(into.join(name)).unwrap().ino();
    assert_eq!(number("odd"), number("odd too"));
    drop(other);
}

#[test]
fn what_is_asked_for_is_extracted_and_nothing_is_replaced() {
    let place = Place::new();
    let tree = place.path("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(tree.join("a/b/file"), b"in it").unwrap();
    fs::write(tree.join("a/other"), b"beside").unwrap();
    symlink("/etc", tree.join("a/way")).unwrap();
    make(&place.path("fs"), "16M", &[], Some(&tree));
    let (images, into) = (place.name("image"), place.name("into"));
    succeed(&["dump", "-D", &images, &place.name("fs")]);
    let extract = ["extract", "-D", &images, "--into", &into, "/a/b", "a/way"];
    succeed(&extract);
    assert_eq!(fs::read(place.path("into/a/b/file")).unwrap(), b"in it");
    assert_eq!(
        fs::read_link(place.path("into/a/way")).unwrap(),
        Path::new("/etc")
    );
    assert!(!place.path("into/a/other").exists());
    let again = refused(&extract, 6);
    assert!(
        again.contains("cannot make") && again.contains("into/a/b"),
        "{again}"
    );
    // Nothing is made of what is not there, nor through a link that somebody has put in the way.
    let none = refused(
        &[
            "extract",
            "-D",
            &images,
            "--into",
            &place.name("none"),
            "a/none",
        ],
        4,
    );
    assert!(none.contains("there is no such file"), "{none}");
    assert!(!place.path("none").exists());
    fs::create_dir(place.path("trap")).unwrap();
    symlink(place.path("tree"), place.path("trap/a")).unwrap();
    refused(
        &[
            "extract",
            "-D",
            &images,
            "--into",
            &place.name("trap"),
            "a/b/file",
        ],
        6,
    );
    // A directory with two names would never end.
    let fs_name = place.name("fs");
    run("debugfs", &["-w", "-R", "ln a a/b/again", &fs_name]);
    succeed(&["dump", "-D", &images, &fs_name]);
    let twice = refused(
        &["extract", "-D", &images, "--into", &place.name("twice")],
        5,
    );
    assert!(twice.contains("a directory with two names"), "{twice}");
}

#[test]
fn differences_are_told() {
    testkit::needs_root!();
    let place = Place::new();
    let (_device, mount) = everything(&place);
    let at = |name: &str| mount.point.join(name);
    fs::write(at("same"), noise(50_000, 4)).unwrap();
    fs::write(at("bytes"), noise(3 << 20, 5)).unwrap();
    fs::write(at("sort"), b"a file").unwrap();
    let point = mount.point.to_str().unwrap();
    succeed(&["dump", "-D", &place.name("0"), point]);
    let times = fs::metadata(at("bytes")).unwrap();
    let file = File::options().write(true).open(at("bytes")).unwrap();
    file.write_all_at(b"x", (2 << 20) + 7).unwrap();
    // Back to its time: what has changed is the contents alone.
    file.set_modified(times.modified().unwrap()).unwrap();
    let sparse = File::options().write(true).open(at("sparse")).unwrap();
    sparse.write_all_at(b"in a hole", 3 << 30).unwrap();
    fs::set_permissions(at("tiny"), fs::Permissions::from_mode(0o600)).unwrap();
    let set = rustix::fs::setxattr(at("block"), "user.a", b"other", XattrFlags::empty());
    set.unwrap();
    fs::remove_file(at("sort")).unwrap();
    fs::create_dir(at("sort")).unwrap();
    fs::write(at("sort/inside"), b"").unwrap();
    fs::remove_dir_all(at("few")).unwrap();
    let options = ["--prev-images-dir", "../0", point];
    succeed(&[&["dump", "-D", &place.name("1")][..], &options].concat());
    let told = succeed(&[
        "diff",
        "-D",
        &place.name("1"),
        "--prev-images-dir",
        "../0",
        "--json",
    ]);
    let told = told["volume_diff"].as_array().unwrap().clone();
    let line = |path: &str| {
        let one = told.iter().find(|one| one["path"] == path);
        one.map(|one| {
            (
                one["fate"].as_str().unwrap().to_owned(),
                one["what"].to_string(),
            )
        })
    };
    let changed = |what: &str| Some(("changed".to_owned(), what.to_owned()));
    let gone = |what: &str| Some((what.to_owned(), "[]".to_owned()));
    assert_eq!(line("bytes"), changed(r#"["contents"]"#));
    assert_eq!(line("sparse"), changed(r#"["modified","contents"]"#));
    assert_eq!(line("tiny"), changed(r#"["mode"]"#));
    assert_eq!(line("block"), changed(r#"["attributes"]"#));
    assert_eq!(line("sort"), changed(r#"["sort"]"#));
    assert_eq!(line("sort/inside"), gone("added"));
    assert_eq!(line("few"), gone("removed"));
    assert_eq!(line("few/one"), gone("removed"));
    assert_eq!(line(""), changed(r#"["modified"]"#));
    assert_eq!(told.len(), 9, "{told:?}");
    let one = [
        "diff",
        "-D",
        &place.name("1"),
        "--prev-images-dir",
        "../0",
        "/tiny",
    ];
    let said = stillframe(&one);
    assert_eq!(said.stdout, b"changed /tiny: mode\n");
    let none = refused(
        &[
            "diff",
            "-D",
            &place.name("1"),
            "--prev-images-dir",
            "../0",
            "no",
        ],
        4,
    );
    assert!(none.contains("there is no such file"), "{none}");
}
