//! Damaged images: every one is refused, with its file named, and nothing is restored.
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use testkit::chance::Chance;
use testkit::program::Program;
use testkit::subject::Subject;
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

const FLIPS: usize = 24;
const CUTS: usize = 12;
const STATUS_CORRUPT: Option<i32> = Some(5);

#[test]
fn flipped_and_cut_images_are_refused_by_name() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no checksums");
    }
    let mut chance = Chance::of("flipped_and_cut_images_are_refused_by_name");
    let subject = Subject::start("busy", &[]);
    stillframe.dump(subject.pid(), &[]).must();
    let files: Vec<PathBuf> = fs::read_dir(stillframe.images())
        .expect("a dump makes its folder")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_none_or(|extension| extension != "log"))
        .collect();
    assert!(!files.is_empty());
    for round in 0..FLIPS + CUTS {
        let path = &files[round % files.len()];
        let whole = fs::read(path).expect("the image can be read");
        let at = chance.below(whole.len() as u64);
        let file = File::options()
            .write(true)
            .open(path)
            .expect("the image can be written");
        if round < FLIPS {
            let flipped = whole[at as usize] ^ 1 << chance.below(8);
            file.write_all_at(&[flipped], at)
                .expect("the image can be written");
        } else {
            file.set_len(at).expect("the image can be cut");
        }
        let told = format!("{} of {} bytes, at {at}", path.display(), whole.len());
        let outcome = stillframe.restore(&[]);
        assert_eq!(
            outcome.status.code(),
            STATUS_CORRUPT,
            "{told}: {}",
            outcome.told()
        );
        let name = path
            .file_name()
            .expect("a file has a name")
            .to_string_lossy();
        outcome.names(&[&name]);
        assert!(!tree::exists(subject.pid()), "{told}");
        fs::write(path, &whole).expect("the image can be written");
    }
    stillframe.restore(&[]).must();
    assert_eq!(subject.ask("check"), "right");
}

/// Has contents of its own in a memfd, in shared memory and in a deleted file.
const CONTENTS: &str = r#"
import mmap, os, signal, sys
def contents(word):
    return word * (65536 // len(word))
memfd = os.memfd_create("contents")
os.write(memfd, contents(b"in-memfd"))
shared = mmap.mmap(-1, 65536)
shared.write(contents(b"inshared"))
deleted = open(sys.argv[1] + "/deleted", "wb+", buffering=0)
deleted.write(contents(b"indelete"))
os.unlink(sys.argv[1] + "/deleted")
os.mkdir(sys.argv[1] + "/ready")
signal.pause()
"#;

#[test]
fn damaged_contents_of_files_are_told_from_failures() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no checksums");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", CONTENTS])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    stillframe.dump(program.pid(), &[]).must();
    for word in ["in-memfd", "inshared", "indelete"] {
        // The program's text has the word as well, but not many of them in a row.
        let many = word.repeat(512);
        let files = fs::read_dir(stillframe.images()).expect("a dump makes its folder");
        let paths = files.map(|entry| entry.expect("the folder can be read").path());
        let found = paths.into_iter().find_map(|path| {
            let whole = fs::read(&path).expect("the image can be read");
            let mut places = whole.windows(many.len());
            let at = places.position(|place| place == many.as_bytes())?;
            Some((path, whole, at as u64))
        });
        let (path, whole, at) = found.expect("the contents are in the image");
        let file = File::options().write(true).open(&path).expect("the image");
        file.write_all_at(b"X", at)
            .expect("the image can be written");
        let outcome = stillframe.restore(&[]).must_fail();
        assert_eq!(
            outcome.status.code(),
            STATUS_CORRUPT,
            "{word}: {}",
            outcome.told()
        );
        fs::write(&path, whole).expect("the image can be written");
    }
    stillframe.restore(&[]).must();
}
