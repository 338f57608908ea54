//! Journals that debugfs writes, replayed by us and by e2fsck.

use std::fs::{self, File};
use std::path::Path;

use testkit::volumes::{make, noise, run};

use super::*;
use crate::OpenFile;

fn open(path: &Path) -> FileSystem<OpenFile> {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    FileSystem::open(OpenFile::new(file, len)).unwrap()
}

/// A file system with a journal of three transactions.
struct SampleVolume {
    folder: tempfile::TempDir,
    block_bytes: usize,
}

impl SampleVolume {
    /// Makes one; `checksums` is what debugfs is told of them.
    fn new(options: &[&str], checksums: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        make(&at("fs"), "32M", options, None);
        let block_bytes = open(&at("fs")).sb.block_bytes as usize;
        let mut first = noise(3 * block_bytes, 1);
        // What looks like a block of the journal is written in another way.
        first[block_bytes..block_bytes + 4].copy_from_slice(&log::MAGIC.to_be_bytes());
        fs::write(at("first"), first).unwrap();
        fs::write(at("second"), noise(2 * block_bytes, 2)).unwrap();
        fs::write(at("third"), noise(block_bytes, 3)).unwrap();
        let name = |name: &str| at(name).to_str().unwrap().to_owned();
        let commands = [
            format!("jo {}", checksums.join(" ")),
            format!("jw -b 5000,5001,5002 {}", name("first")),
            // 5001 is given up: what was written to it before must not come back.
            "jw -r 5001".to_owned(),
            format!("jw -b 5000,6000 {}", name("second")),
            format!("jw -r 5002 -b 7000 {}", name("third")),
            "jc".to_owned(),
        ];
        let script = name("script");
        fs::write(&script, commands.join("\n")).unwrap();
        let said = run("debugfs", &["-w", "-f", &script, &name("fs")]);
        assert!(!said.contains("Usage"), "{said}");
        Self {
            folder,
            block_bytes,
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("fs")
    }

    /// Returns a copy after e2fsck has replayed its journal.
    fn replayed_by_e2fsck(&self) -> Vec<u8> {
        let copy = self.folder.path().join("copy");
        fs::copy(self.path(), &copy).unwrap();
        let mut command = std::process::Command::new("e2fsck");
        command.args(["-fy", "-E", "journal_only"]).arg(&copy);
        let output = command.output().unwrap();
        assert!(output.status.code().unwrap() < 4, "{output:?}");
        fs::read(copy).unwrap()
    }

    /// The error that a byte makes that has changed in a block of the log.
    fn error(&self, block: u64, at: usize) -> Option<String> {
        let mut bytes = fs::read(self.path()).unwrap();
        let journal = open(&self.path()).log().unwrap().unwrap().superblock_at;
        bytes[(journal + block) as usize * self.block_bytes + at] ^= 1;
        let patches = FileSystem::open(bytes).and_then(|fs| fs.patches());
        patches.err().map(|error| error.to_string())
    }
}

/// What is tried: the file system, and the journal's checksums. Those of older journals, one for
/// each transaction, debugfs makes in a way that e2fsck does not believe: the kernel makes them in
/// the tests of the command.
const KINDS: [(&[&str], &[&str]); 5] = [
    (&["-O", "^metadata_csum,^64bit"], &[]),
    (&["-O", "^metadata_csum,64bit", "-b", "1024"], &[]),
    (&["-O", "metadata_csum,64bit"], &["-c", "-v", "2"]),
    (&["-O", "metadata_csum,64bit"], &["-c", "-v", "3"]),
    (
        &["-O", "metadata_csum,^64bit", "-b", "1024"],
        &["-c", "-v", "3"],
    ),
];

#[test]
fn every_kind_of_journal_is_replayed_as_e2fsck_does() {
    for (options, checksums) in KINDS {
        let made = SampleVolume::new(options, checksums);
        let before = open(&made.path());
        let patches = before.patches().unwrap();
        let log = before.log().unwrap().unwrap();
        let (superblock_at, blocks) = (log.superblock_at, log.blocks());
        drop(log);
        let len_bytes = before.source().len_bytes();
        let replayed = ReplayedSource::new(before.source, patches);
        assert!(replayed.count() >= 5, "{options:?}: {}", replayed.count());
        let mut ours = vec![0; len_bytes as usize];
        replayed.read_at(0, &mut ours).unwrap();
        let theirs = made.replayed_by_e2fsck();
        let size = made.block_bytes;
        let superblock = 1024 / size as u64;
        for (block, (ours, theirs)) in (0..).zip(ours.chunks(size).zip(theirs.chunks(size))) {
            // What stands in the log is of no use any more, and e2fsck notes the time.
            let is_known = block == superblock || block == superblock_at || blocks.contains(block);
            assert!(
                is_known || ours == theirs,
                "{options:?} {checksums:?}: {block}"
            );
        }
        assert_eq!(ours[5000 * size..5001 * size], noise(2 * size, 2)[..size]);
        assert!(ours[5001 * size..5002 * size].iter().all(|byte| *byte == 0));
        let after = FileSystem::open(ours).unwrap();
        assert!(after.patches().unwrap().is_empty(), "{options:?}");
        assert!(after.empty_log().unwrap().count() > 500, "{options:?}");
    }
}

#[test]
fn what_is_not_whole_is_not_replayed() {
    let made = SampleVolume::new(&["-O", "^metadata_csum"], &[]);
    let mut bytes = fs::read(made.path()).unwrap();
    let fs = open(&made.path());
    let whole = fs.patches().unwrap().count();
    let log = fs.log().unwrap().unwrap().superblock_at;
    // Descriptor, three blocks, commit; revokes, commit; the third ends with its commit block.
    let commit = (log + 1 + 5 + 2 + 3) as usize * made.block_bytes;
    assert_eq!(bytes[commit + 7], 2);
    bytes[commit..commit + 4].fill(0);
    let cut = FileSystem::open(bytes).unwrap().patches().unwrap().count();
    // 6000 and 7000 are missing, and 5002 is there: it is not given up any more.
    assert_eq!(cut + 2, whole + 1);
}

#[test]
fn damage_in_the_journal_is_named() {
    let made = SampleVolume::new(&["-O", "metadata_csum"], &["-c", "-v", "3"]);
    let error = |block, at| made.error(block, at).unwrap_or_default();
    let superblock = error(0, 0x10);
    assert!(
        superblock.contains("journal, checksum: it is wrong"),
        "{superblock}"
    );
    let descriptor = error(1, 20);
    assert!(
        descriptor.contains("journal, block 1: its checksum is wrong"),
        "{descriptor}"
    );
    let data = error(2, 77);
    assert!(
        data.contains("journal, block 2: its checksum is wrong"),
        "{data}"
    );
    let commit = error(5, 0x100);
    assert!(commit.contains("checksum of the transaction"), "{commit}");
    assert_eq!(made.error(200, 0), None);
    let older = SampleVolume::new(&["-O", "^metadata_csum"], &["-c", "-v", "1"]);
    let data = older.error(2, 77).unwrap_or_default();
    assert!(data.contains("checksum of the transaction"), "{data}");
}

#[test]
fn what_is_not_replayed_here_is_refused_by_name() {
    let made = SampleVolume::new(&["-O", "^metadata_csum"], &[]);
    let bytes = fs::read(made.path()).unwrap();
    let fs = open(&made.path());
    let log = fs.log().unwrap().unwrap();
    let start = log.superblock_at as usize * made.block_bytes;
    let sequence = log.read().unwrap().next_sequence;
    let end = log.blocks().count() as usize + 1;
    let refused = |feature: u8, head: Option<u32>| {
        let mut bytes = bytes.clone();
        bytes[start + log::at::INCOMPAT + 3] |= feature;
        bytes[start + log::at::FAST_BLOCKS + 3] = 10;
        if let Some(sequence) = head {
            let at = start + (end - 10 + 1) * made.block_bytes;
            bytes[at..at + 4].copy_from_slice(&[9, 0, 8, 0]);
            bytes[at + 8..at + 12].copy_from_slice(&sequence.to_le_bytes());
        }
        let patches = FileSystem::open(bytes).unwrap().patches();
        patches
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    assert!(refused(0x40, None).contains("features that are not known here (0x40"));
    assert_eq!(refused(0x20, None), "");
    assert_eq!(refused(0x20, Some(sequence - 1)), "");
    let fast = refused(0x20, Some(sequence));
    assert!(
        fast.contains("has fast commits (feature fast_commit)"),
        "{fast}"
    );
}
