//! File systems that mke2fs makes, read and damaged.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;

use super::*;
use crate::OpenFile;
use crate::testing::seen_by_us;
use testkit::volumes::{make, populate, run, seen_by_kernel};

fn open(path: &Path) -> FileSystem<OpenFile> {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    FileSystem::open(OpenFile::new(file, len)).unwrap()
}

/// Arguments of mke2fs, by test case.
const KINDS: [(&str, &[&str]); 15] = [
    ("blocks of 4 KiB", &["-b", "4096"]),
    ("blocks of 1 KiB", &["-b", "1024"]),
    (
        "blocks of 2 KiB, small inodes",
        &["-b", "2048", "-I", "128"],
    ),
    ("ext2", &["-t", "ext2"]),
    ("ext2, 1 KiB", &["-t", "ext2", "-b", "1024", "-I", "128"]),
    ("ext3", &["-t", "ext3"]),
    ("uninit_bg", &["-O", "^metadata_csum,uninit_bg"]),
    ("32 bits", &["-O", "^64bit"]),
    ("meta_bg", &["-O", "meta_bg,^resize_inode", "-b", "1024"]),
    ("bigalloc", &["-O", "bigalloc", "-C", "65536", "-b", "4096"]),
    ("inline_data", &["-O", "inline_data", "-I", "512"]),
    (
        "sparse_super2",
        &["-O", "sparse_super2,^resize_inode", "-E", "num_backup_sb=1"],
    ),
    ("no flex_bg", &["-O", "^flex_bg,large_dir,ea_inode,quota"]),
    ("no journal", &["-O", "^has_journal,metadata_csum_seed"]),
    ("orphan_file", &["-O", "orphan_file,fast_commit,project"]),
];

#[test]
fn everything_is_read_of_every_kind_of_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let trees = ["new", "old"].map(|name| {
        let tree = folder.path().join(name);
        std::fs::create_dir(&tree).unwrap();
        populate(&tree, name == "old");
        let seen = seen_by_kernel(&tree);
        (tree, seen)
    });
    let file = folder.path().join("fs");
    for (name, options) in KINDS {
        let _ = std::fs::remove_file(&file);
        let is_old = options.contains(&"128") || options.contains(&"-t");
        let (tree, expected) = &trees[usize::from(is_old)];
        make(&file, "64M", options, Some(tree));
        let fs = open(&file);
        let seen = seen_by_us(&fs).unwrap();
        for (path, facts) in expected {
            let path_text = String::from_utf8_lossy(path);
            assert_eq!(seen.get(path), Some(facts), "{name}: {path_text}");
        }
        assert_eq!(seen.len(), expected.len(), "{name}");
        // What the file system says is free, and what we do not count as used, is as much.
        let said = run("dumpe2fs", &["-h", file.to_str().unwrap()]);
        let number = |field: &str| {
            let line = said.lines().find(|line| line.starts_with(field)).unwrap();
            line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
        };
        let layout = fs.layout().unwrap();
        let sb = fs.superblock();
        let free = number("Free blocks:");
        let used = layout.used.count() - sb.first_data_block;
        let clusters = u64::from(sb.cluster_blocks);
        let all = number("Block count:") - sb.first_data_block;
        assert!(
            all - used <= free && all - used + clusters > free,
            "{name}: {free}, {used}"
        );
        let mut inodes = 0;
        fs.walk_inodes(&mut |inode| {
            inodes += u32::from(inode.links() > 0 && inode.number > 10);
            Ok(())
        })
        .unwrap();
        assert!(inodes as usize >= seen.len() - 1, "{name}");
    }
}

#[test]
fn unwritten_extents_are_told_from_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fs");
    make(&file, "16M", &[], None);
    let path = file.to_str().unwrap();
    run("debugfs", &["-w", "-R", "write /dev/null f", path]);
    run("debugfs", &["-w", "-R", "fallocate f 0 99", path]);
    let fs = open(&file);
    let mut found = None;
    let root = fs.inode(ROOT, 0).unwrap();
    fs.walk_entries(&root, &mut |entry| {
        if entry.name == b"f" {
            found = Some(entry.inode);
        }
        Ok(())
    })
    .unwrap();
    let inode = fs.inode(found.unwrap(), 0).unwrap();
    let mut unwritten = 0;
    fs.walk_blocks(&inode, &mut |met| {
        if let BlockItem::Blocks(mapped) = met {
            assert!(mapped.is_unwritten);
            unwritten += mapped.blocks;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(unwritten, 100);
}

#[test]
fn a_journal_that_is_to_be_replayed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fs");
    make(&file, "16M", &["-O", "^metadata_csum"], None);
    assert!(open(&file).empty_log().unwrap().count() > 500);
    run(
        "debugfs",
        &["-w", "-R", "feature needs_recovery", file.to_str().unwrap()],
    );
    let error = open(&file).empty_log().unwrap_err().to_string();
    assert!(error.contains("its journal is to be replayed"), "{error}");
}

#[test]
fn damage_is_named_by_block_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fs");
    make(&file, "8M", &["-b", "1024"], None);
    let bytes = std::fs::read(&file).unwrap();
    let error = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        let fs = FileSystem::open(bytes);
        let read = fs.and_then(|fs| {
            fs.layout()?;
            fs.walk_inodes(&mut |_| Ok(()))?;
            fs.walk_entries(&fs.inode(ROOT, 0)?, &mut |_| Ok(()))
        });
        read.unwrap_err().to_string()
    };
    let fs = FileSystem::open(bytes.clone()).unwrap();
    assert!(error(1024 + 0x4).contains("block 0, superblock: its checksum is wrong"));
    assert!(error(2048 + 0x10).contains("block 2, descriptor of group 0"));
    let group = fs.groups.all[0];
    let at = |block: u64| block as usize * 1024;
    let bitmap = format!("block {}, block bitmap of group 0", group.block_bitmap);
    assert!(error(at(group.block_bitmap) + 3).contains(&bitmap));
    let inode = error(at(group.inode_table) + 256 + 4);
    assert!(
        inode.contains(&format!("block {}, inode 2", group.inode_table)),
        "{inode}"
    );
    let short = FileSystem::open(bytes[..4 << 20].to_vec())
        .err()
        .unwrap()
        .to_string();
    assert!(short.contains("of which the device has only"), "{short}");
}

/// Counts what is read of an image.
struct CountingSource {
    bytes: Vec<u8>,
    read: AtomicU64,
}

impl ReadAt for CountingSource {
    fn len_bytes(&self) -> u64 {
        self.bytes.len_bytes()
    }

    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.read.fetch_add(bytes.len() as u64, Relaxed);
        self.bytes.read_at(at_bytes, bytes)
    }
}

/// Small file systems with everything in them; without checksums, so that forged fields are met.
fn small() -> &'static [Vec<u8>] {
    static SMALL: std::sync::OnceLock<Vec<Vec<u8>>> = std::sync::OnceLock::new();
    SMALL.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        populate(&tree, true);
        std::fs::remove_dir_all(tree.join("names")).unwrap();
        let file = folder.path().join("fs");
        let kinds: [&[&str]; 4] = [
            &[
                "-b",
                "1024",
                "-O",
                "^metadata_csum,^has_journal,inline_data",
            ],
            &["-t", "ext2", "-b", "1024", "-I", "128"],
            &[
                "-b",
                "4096",
                "-O",
                "^metadata_csum,^has_journal,bigalloc,ea_inode",
            ],
            &["-b", "1024", "-O", "^has_journal,meta_bg,^resize_inode"],
        ];
        let make_one = |options: &&[&str]| {
            let _ = std::fs::remove_file(&file);
            make(&file, "8M", options, Some(&tree));
            std::fs::read(&file).unwrap()
        };
        kinds.iter().map(make_one).collect()
    })
}

/// Reads everything there is; gives how many bytes of the image that took.
fn read_all(bytes: Vec<u8>) -> u64 {
    let counted = CountingSource {
        bytes,
        read: AtomicU64::new(0),
    };
    let Ok(fs) = FileSystem::open(counted) else {
        return 0;
    };
    let _ = fs.layout();
    let _ = fs.empty_log();
    let _ = seen_by_us(&fs);
    let _ = fs.walk_inodes(&mut |inode| {
        let _ = fs.walk_blocks(&inode, &mut |_| Ok(()));
        let _ = fs.attributes(&inode);
        let _ = fs.link_target(&inode);
        let _ = fs.walk_entries(&inode, &mut |_| Ok(()));
        Ok(())
    });
    fs.source.read.into_inner()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn damaged_metadata_neither_panics_nor_goes_on_for_ever(
        which in 0_usize..4,
        flips in prop::collection::vec((0_usize..600, 0_usize..1024, any::<u8>(), 0..4), 1..12),
        cut in prop::option::weighted(0.1, 0_usize..8 << 20),
    ) {
        let mut bytes = small()[which].clone();
        let whole = read_all(bytes.clone());
        for (block, at, value, how) in flips {
            // Superblock and descriptors often, the rest of the metadata as well.
            let block = if how == 0 { block % 4 } else { block };
            let place = block * 1024 + if how == 1 { at & !3 } else { at };
            match how {
                1 => bytes[place..place + 4].fill(value),
                2 => bytes[place] ^= 1 << (value % 8),
                _ => bytes[place] = value,
            }
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let read = read_all(bytes);
        prop_assert!(read < whole * 50 + (256 << 20), "{read} instead of {whole} bytes");
    }
}
