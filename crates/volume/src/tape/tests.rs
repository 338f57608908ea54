//! Streams that nobody should believe.

use std::io::Cursor;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use image::Blame;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::volumes::{make, noise, populate, seen_by_kernel};

use super::record::{Header, RECORD_BYTES, RecordKind, StreamLabel};
use super::stream::Stream;
use super::tree_builder::TreeBuilder;
use super::{ExportOptions, export};
use crate::dump::{DumpOptions, dump};
use crate::source::IoContext;
use crate::{Error, Result};

/// A stream of level 0 of a small file system.
fn stream(folder: &Path) -> Vec<u8> {
    let at = |name: &str| folder.join(name);
    std::fs::create_dir(at("tree")).unwrap();
    populate(&at("tree"), true);
    for name in ["sparse", "extents"] {
        std::fs::remove_file(at("tree").join(name)).unwrap();
    }
    std::fs::remove_dir_all(at("tree/names")).unwrap();
    std::fs::write(at("tree/few/more"), noise(700_000, 5)).unwrap();
    make(&at("fs"), "64M", &["-N", "64"], Some(&at("tree")));
    let options = DumpOptions {
        images: at("image").into(),
        volume: at("fs"),
        parent: None,
        verify_unchanged: false,
        max_frozen: std::time::Duration::from_secs(1),
        context: IoContext::Shared,
        rate_bytes_per_s: None,
        skip_bad: false,
        compress: None,
        sync: false,
    };
    dump(&options, image::Facts::default(), &|_, _| ()).unwrap();
    let options = ExportOptions {
        images: at("image").into(),
        parent: None,
        level: 0,
    };
    let mut stream = Vec::new();
    export(&options, &mut stream, Path::new("memory"), &|_, _| ()).unwrap();
    stream
}

/// Makes the files of a stream in a directory of its own; gives that.
fn read(stream: Vec<u8>) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let root = std::fs::File::open(folder.path()).unwrap();
    let stream = Stream::open(Box::new(Cursor::new(stream)), PathBuf::from("memory"))?;
    let mut made = TreeBuilder::new(root.as_fd())?;
    made.add(stream, &|_, _| ())?;
    made.finish()?;
    Ok(folder)
}

#[test]
fn streams_come_back_and_nonsense_is_an_error() {
    testkit::needs_root!();
    let folder = tempfile::tempdir().unwrap();
    let whole = stream(folder.path());
    let expected = seen_by_kernel(&folder.path().join("tree"));
    let seen = seen_by_kernel(read(whole.clone()).unwrap().path());
    assert_eq!(
        seen.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>()
    );
    let records = whole.len() / RECORD_BYTES;
    let mut runner = TestRunner::new(Config::with_cases(200));
    let record = prop::sample::select((0..records).collect::<Vec<_>>());
    // Headers are made right again, so that what they say is believed.
    let changes = prop::collection::vec((record, 0..RECORD_BYTES, any::<u8>()), 1..4);
    let cut = prop::option::weighted(0.2, 0..whole.len());
    runner
        .run(&(changes, cut), |(changes, cut)| {
            let mut bytes = whole.clone();
            for (record, at, byte) in changes {
                let record = &mut bytes[record * RECORD_BYTES..][..RECORD_BYTES];
                let is_header = record[24..26] == whole[24..26];
                record[at] = byte;
                if is_header && !(24..32).contains(&at) {
                    mend(record);
                }
            }
            bytes.truncate(cut.unwrap_or(whole.len()));
            if let Err(error) = read(bytes) {
                // What it says may be nothing that this kernel makes.
                let blame = [Blame::Corrupt, Blame::Unsupported, Blame::Store];
                prop_assert!(blame.contains(&error.blame()), "{error}");
            }
            Ok(())
        })
        .unwrap();
}

/// Gives a header the checksum of what it says.
fn mend(record: &mut [u8]) {
    record[28..32].fill(0);
    let words = record.chunks_exact(4);
    let words = words.map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let sum = 84_446_u32.wrapping_sub(words.fold(0, u32::wrapping_add));
    record[28..32].copy_from_slice(&sum.to_le_bytes());
}

/// A stream of these directories, each with its entries, and of nothing else.
fn of_folders(folders: &[(u32, &[(&str, u32)])]) -> Vec<u8> {
    let about = StreamLabel::default();
    let mut stream = Vec::new();
    let mut map = vec![0; RECORD_BYTES];
    folders
        .iter()
        .for_each(|(number, _)| map[0] |= 1 << (number - 1));
    stream.extend(Header::new(RecordKind::Tape, 0).encode(&about, 0));
    for sort in [RecordKind::Used, RecordKind::Dumped] {
        let mut header = Header::new(sort, 0);
        header.count = 1;
        stream.extend(header.encode(&about, 0));
        stream.extend(&map);
    }
    for (number, entries) in folders {
        let entries = entries
            .iter()
            .map(|(name, inode)| super::folder::DirectoryEntry {
                inode: *inode,
                sort: 4,
                name: name.as_bytes().to_vec(),
            });
        let dots = [".", ".."].map(|name| super::folder::DirectoryEntry {
            inode: *number,
            sort: 4,
            name: name.as_bytes().to_vec(),
        });
        let mut bytes = super::folder::encode(&dots.into_iter().chain(entries).collect::<Vec<_>>());
        let mut header = Header::new(RecordKind::Inode, *number);
        header.facts.mode = 0o40_755;
        header.facts.size_bytes = bytes.len() as u64;
        header.count = 1;
        header.flags[0] = true;
        stream.extend(header.encode(&about, 0));
        bytes.resize(RECORD_BYTES, 0);
        stream.extend(bytes);
    }
    stream.extend(Header::new(RecordKind::End, 0).encode(&about, 0));
    stream
}

#[test]
fn directories_are_a_tree_below_the_root() {
    testkit::needs_root!();
    let made = read(of_folders(&[
        (2, &[("a", 3)]),
        (3, &[("numbers", 4)]),
        (4, &[]),
    ]))
    .unwrap();
    assert!(made.path().join("a/numbers").is_dir());
    let made = read(of_folders(&[
        (2, &[("numbers", 3), ("numbers+", 4)]),
        (3, &[]),
        (4, &[]),
    ]));
    let made = made.unwrap();
    assert_eq!(std::fs::read_dir(made.path()).unwrap().count(), 2);
    for wrong in [
        of_folders(&[(3, &[])]),
        of_folders(&[(2, &[("a", 3), ("b", 3)]), (3, &[])]),
        of_folders(&[(2, &[("a", 3)]), (3, &[("a", 4)]), (4, &[("a", 3)])]),
        of_folders(&[(2, &[("root", 2)])]),
    ] {
        let error = read(wrong).unwrap_err();
        assert!(matches!(error, Error::Unfit(_)), "{error}");
    }
    let mut alone = of_folders(&[(2, &[])]);
    let flags = &mut alone[5 * RECORD_BYTES..][888..892];
    flags.copy_from_slice(&0x102_u32.to_le_bytes());
    mend(&mut alone[5 * RECORD_BYTES..][..RECORD_BYTES]);
    let error = read(alone).unwrap_err();
    assert!(error.to_string().contains("dump -m"), "{error}");
    // A ring that nothing leads to is nowhere.
    let made = read(of_folders(&[(2, &[]), (3, &[("a", 4)]), (4, &[("a", 3)])])).unwrap();
    assert_eq!(std::fs::read_dir(made.path()).unwrap().count(), 0);
}
