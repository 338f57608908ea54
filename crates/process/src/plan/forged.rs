//! Plans of images whose checksums are right and whose runs and chunks are anything.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use image::forge::Sections;
use image::{Compression, Reader};
use resources::map::layout::DECODED_FILE;
use resources::script::Arg;
use store::Store;
use syscalls::Sysno;
use testkit::chance::Chance;

use super::{Plan, Setting, plan};
use crate::records::Saved;
use crate::sample;

/// Images for each codec and each way in which tasks get their pages.
const IMAGES: u64 = 1000;

/// The image's manifest with some bytes of spaces, runs or chunks changed.
fn forge(whole: &Sections, chance: &mut Chance) -> Vec<u8> {
    let mut forged = whole.clone();
    for _ in 0..=chance.below(2) {
        let bytes = &mut forged.bytes[chance.below(3) as usize];
        let at = chance.below(bytes.len() as u64) as usize;
        bytes[at] = match chance.below(3) {
            0 => bytes[at] ^ 1 << chance.below(8),
            _ => chance.below(256) as u8,
        };
    }
    forged.manifest()
}

/// Insists that a plan reads nothing but what the image has.
fn check(plan: &Plan, reader: &Reader) {
    let mut decoded_bytes = 0;
    for extent in &plan.decoded {
        assert_eq!(extent.at.0, decoded_bytes, "they follow each other");
        decoded_bytes += extent.bytes();
        pages::place(reader, &[*extent]).expect("it is in the image");
    }
    let described = reader.spaces().iter().map(|space| space.id);
    let described = described.flat_map(|space| reader.runs(space).collect::<Vec<_>>());
    let described: u64 = described.map(|run| run.len_bytes()).sum();
    assert!(decoded_bytes <= described, "{decoded_bytes} of {described}");
    let steps = plan
        .scripts
        .iter()
        .flat_map(|planned| &planned.script.steps);
    for step in steps.filter(|step| step.call == Sysno::preadv) {
        let [Arg::Pool(file), _, _, Arg::Value(offset_bytes), ..] = step.args else {
            panic!("{step:?}");
        };
        let Arg::Value(len_bytes) = step.extra else {
            panic!("{step:?}");
        };
        let file = plan.files[(file.0 - plan.descriptions) as usize];
        let all_bytes = match file {
            DECODED_FILE => decoded_bytes,
            file => reader.file(file).expect("it is open").len_bytes(),
        };
        let end = offset_bytes.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= all_bytes), "{step:?}");
    }
    for outside in &plan.outside {
        for stored in &outside.stored {
            assert!(stored.span.pages() <= described / abi::PAGE_BYTES);
        }
    }
}

#[test]
fn no_plan_reads_what_is_not_in_the_image() {
    let mut chance = Chance::of("no_plan_reads_what_is_not_in_the_image");
    for compression in [None, Some(Compression::Lz4), Some(Compression::Zstd(3))] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let store = store::Directory::open(scratch.path()).expect("it was just made");
        let store: Arc<dyn Store> = Arc::new(store);
        sample::image_in(&store, compression, sample::records(), &[]);
        let path = scratch.path().join(image::MANIFEST_NAME);
        let whole = Sections::read(&*store).expect("there is a manifest");
        let file = File::options().write(true).open(&path);
        let file = file.expect("it can be written");
        let planned = |outside_from_bytes| {
            let Ok(reader) = Reader::open(&*store) else {
                return false;
            };
            let Ok(saved) = Saved::read(&reader) else {
                return false;
            };
            let setting = Setting {
                outside_from_bytes,
                ..Setting::default()
            };
            let Ok(plan) = plan(&reader, &saved, &setting) else {
                return false;
            };
            check(&plan, &reader);
            // Whoever decodes it finds what is right, or says that it is not.
            let _ = reader.verify_all(1);
            true
        };
        assert!(planned(0) && planned(8 << 20));
        let mut right = 0;
        for _ in 0..IMAGES {
            let manifest = forge(&whole, &mut chance);
            // As long as before: a file that is made anew would be written to the disk.
            file.write_all_at(&manifest, 0).expect("it can be written");
            for outside_from_bytes in [0, 8 << 20] {
                right += u64::from(planned(outside_from_bytes));
            }
        }
        // Some changes make another image, most of them none.
        assert!((1..2 * IMAGES).contains(&right), "{right}");
    }
}
