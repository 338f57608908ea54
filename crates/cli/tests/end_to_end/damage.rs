//! Damaged images: every one is refused, with its file named, and nothing is restored.
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use testkit::chance::Chance;
use testkit::subject::Subject;
use testkit::{needs_root, tree};

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
