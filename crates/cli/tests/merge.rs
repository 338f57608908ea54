//! `stillframe merge` on chains of images.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::{Link, NewRun, PAGE_BYTES, Reader, Record, Seal, SpaceId, Writer};
use store::Directory;

const SPACE: SpaceId = SpaceId(7);
const PAGES: u64 = 600;
const LAYERS: u64 = 5;

fn layer(dir: &Path, number: u64) -> PathBuf {
    dir.join(number.to_string())
}

/// The first word of a page as a layer has it: layer n writes every n-th page, layer 0 all.
fn word(number: u64, page: u64) -> u64 {
    let writers = (0..=number).rev();
    let last = writers
        .into_iter()
        .find(|&n| n == 0 || page.is_multiple_of(n + 1));
    last.unwrap() << 32 | page
}

fn open(path: &Path) -> Reader {
    Reader::open(&Directory::open(path).unwrap()).unwrap()
}

/// Writes a chain of layers `0`, `1`, … in `dir`.
fn chain(dir: &Path) {
    for number in 0..LAYERS {
        let path = layer(dir, number);
        let store = Arc::new(Directory::create(&path).unwrap());
        let writer = match number.checked_sub(1) {
            None => Writer::create(store).unwrap(),
            Some(parent) => {
                let parent = layer(dir, parent);
                let link = Link {
                    to_parent: store::way(&path, &parent).unwrap(),
                    to_child: store::way(&parent, &path).unwrap(),
                };
                Writer::create_layer(store, Arc::new(open(&parent)), link).unwrap()
            }
        };
        for page in 0..PAGES {
            if word(number, page) >> 32 == number {
                let mut bytes = [0x5a; PAGE_BYTES];
                bytes[..8].copy_from_slice(&word(number, page).to_le_bytes());
                let run = NewRun {
                    space: SPACE,
                    first_page: page,
                    pages: 1,
                };
                writer.append(&bytes, &[run]).unwrap();
            } else {
                writer.inherit(SPACE, page, 1).unwrap();
            }
        }
        writer.record(Record {
            tag: 9,
            version: 1,
            id: 3,
            payload: number.to_le_bytes().into(),
        });
        writer.seal(Seal::default()).unwrap();
    }
}

/// Checks that the image in `path` is what layer `number` was.
fn check(path: &Path, number: u64) -> Reader {
    let reader = open(path);
    reader.verify_all(1).unwrap();
    let mut bytes = vec![0; PAGES as usize * PAGE_BYTES];
    reader.read_pages(SPACE, 0, &mut bytes).unwrap();
    for (page, bytes) in (0..).zip(bytes.chunks(PAGE_BYTES)) {
        assert_eq!(bytes[..8], word(number, page).to_le_bytes(), "page {page}");
        assert_eq!(bytes[8..], [0x5a; PAGE_BYTES - 8]);
    }
    assert_eq!(reader.records()[0].payload, number.to_le_bytes());
    reader
}

fn command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.arg("merge").args(arguments).current_dir(dir);
    command
}

fn merge(dir: &Path, arguments: &[&str]) -> Output {
    command(dir, arguments).output().unwrap()
}

#[track_caller]
fn must(output: &Output) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
}

#[track_caller]
fn refused(output: &Output, what: &str) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains(what), "{told}");
}

#[test]
fn a_chain_becomes_one_image_in_its_place() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    chain(dir);
    must(&merge(dir, &["4"]));
    for number in 0..LAYERS - 1 {
        std::fs::remove_dir_all(layer(dir, number)).unwrap();
    }
    let reader = check(&layer(dir, 4), 4);
    assert!(reader.parent().is_none() && reader.ancestors().is_empty());
    let names = std::fs::read_dir(layer(dir, 4)).unwrap();
    assert_eq!(names.count(), 2, "the manifest and the pages");
}

#[test]
fn a_part_of_a_chain_becomes_one_image() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    chain(dir);
    let output = merge(dir, &["4", "--until=1", "--json"]);
    must(&output);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains(r#""ancestors":2,"#), "{told}");
    assert!(told.contains(r#""ancestors_before":4,"#), "{told}");
    assert_eq!(
        std::fs::read_link(layer(dir, 4).join("parent")).unwrap(),
        Path::new("../1")
    );
    for number in 2..4 {
        std::fs::remove_dir_all(layer(dir, number)).unwrap();
    }
    check(&layer(dir, 4), 4);
    // The image that is still needed cannot be replaced, the chain's newest can.
    refused(&merge(dir, &["1"]), "is needed by image");
    must(&merge(dir, &["4", "--output", "new"]));
    assert!(check(&layer(dir, 4), 4).parent().is_some());
    assert!(check(&dir.join("new"), 4).parent().is_none());
}

#[test]
fn a_merge_in_the_middle_of_a_chain_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    chain(dir);
    refused(&merge(dir, &["2"]), "is needed by image");
    refused(
        &merge(dir, &["2", "--until", "3", "--output", "new"]),
        "none that the image in 2",
    );
    refused(&merge(dir, &["2", "--until=2"]), "none that the image in 2");
    refused(&merge(dir, &["2", "--output", "3"]), "is needed by image");
    refused(&merge(dir, &["nothing"]), "cannot use the image directory");
    check(&layer(dir, 4), 4);
    must(&merge(dir, &["2", "--output", "new"]));
    check(&dir.join("new"), 2);
    std::fs::remove_dir_all(layer(dir, 0)).unwrap();
    refused(&merge(dir, &["4"]), "cannot be opened");
}

/// Kills a merge at some moment; whatever moment it was, the image is whole.
fn kill_at(mut child: Child, after: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < after && child.try_wait().unwrap().is_none() {
        std::hint::spin_loop();
    }
    let _ = child.kill();
    child.wait().unwrap();
}

#[test]
fn a_killed_merge_leaves_the_old_image_or_the_new_one() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    chain(dir);
    let begun = Instant::now();
    must(&merge(dir, &["4", "--output", "new"]));
    let usual = begun.elapsed();
    for round in 0..15_u32 {
        let until = format!("--until={}", (round / 5) % 3);
        let mut command = command(dir, &["4", &until]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        kill_at(child.unwrap(), usual * (round % 15) / 12);
        check(&layer(dir, 4), 4);
        let lower = (round / 5) % 3;
        if lower > 0 && open(&layer(dir, 4)).parent().unwrap().1 != "../3" {
            // It came to its end: begin with the whole chain again.
            std::fs::remove_dir_all(layer(dir, 4)).unwrap();
            for number in 0..LAYERS - 1 {
                std::fs::remove_dir_all(layer(dir, number)).unwrap();
            }
            chain(dir);
        }
    }
    must(&merge(dir, &["4"]));
    assert!(check(&layer(dir, 4), 4).parent().is_none());
}
