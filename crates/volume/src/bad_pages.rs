//! What of a volume cannot be read: which blocks, and whose they are.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use abi::bits::Bits;
use image::PAGE_BYTES;

use crate::ext4::{BlockItem, FileSystem, Kind, ROOT};
use crate::{Error, ReadAt, Result};

/// Pages that cannot be read.
#[derive(Debug, Default)]
pub struct BadPages {
    /// True if they are taken for zeros, and not for a failure.
    pub skip: bool,
    found: Mutex<Bits>,
}

/// A block that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadBlock {
    /// Its number.
    pub block: u64,
    /// Its owner.
    pub owner: String,
}

impl BadPages {
    /// Takes pages for zeros or not.
    pub fn new(skip: bool) -> Self {
        Self {
            skip,
            ..Self::default()
        }
    }

    /// Notes one.
    pub fn add(&self, page: u64) {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.insert(page..page + 1);
    }

    pub fn pages(&self) -> Bits {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.clone()
    }
}

/// Says whose each block of some pages is, as far as that can be read.
pub fn owners<S: ReadAt>(fs: &FileSystem<S>, pages: &Bits) -> Vec<BadBlock> {
    let block_bytes = u64::from(fs.superblock().block_bytes);
    let page_bytes = PAGE_BYTES as u64;
    let mut blocks = Bits::default();
    for range in pages.ranges() {
        let end = (range.end * page_bytes).div_ceil(block_bytes);
        blocks.insert(range.start * page_bytes / block_bytes..end);
    }
    if blocks.count() == 0 {
        return Vec::new();
    }
    let mut inodes = HashMap::new();
    // What cannot be read here either has no name.
    let _ = fs.walk_inodes(&mut |inode| {
        let is_file = matches!(inode.kind(), Kind::Regular | Kind::Directory | Kind::Link);
        if is_file && !inode.is_inline() && inode.short_target().is_none() {
            let _ = fs.walk_blocks(&inode, &mut |met| {
                let range = match met {
                    BlockItem::Tree(block) => block..block + 1,
                    BlockItem::Blocks(mapped) => mapped.range(),
                };
                let own = range.filter(|block| blocks.contains(*block));
                inodes.extend(own.map(|block| (block, inode.number)));
                Ok(())
            });
        }
        Ok(())
    });
    let paths = paths(fs, inodes.values().copied().collect());
    let bad = blocks.ranges().into_iter().flatten().map(|block| {
        let owner = match inodes.get(&block) {
            None => "the file system's own".to_owned(),
            Some(inode) => match paths.get(inode) {
                None => format!("of inode {inode}"),
                Some(path) => format!("of {path} (inode {inode})"),
            },
        };
        BadBlock { block, owner }
    });
    bad.collect()
}

/// Finds a path of each inode.
fn paths<S: ReadAt>(fs: &FileSystem<S>, wanted: Vec<u32>) -> HashMap<u32, String> {
    let mut left = std::collections::HashSet::<u32>::from_iter(wanted);
    let mut seen = std::collections::HashSet::from([ROOT]);
    let mut found = HashMap::new();
    let mut folders = vec![(ROOT, String::new())];
    while let Some((number, path)) = folders.pop() {
        if left.remove(&number) {
            found.insert(number, format!("{path}/"));
        }
        if left.is_empty() {
            break;
        }
        let Ok(folder) = fs.inode(number, 0) else {
            continue;
        };
        let mut entries = Vec::new();
        let _ = fs.walk_entries(&folder, &mut |entry| {
            entries.push(entry);
            Ok(())
        });
        for entry in entries {
            let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
            let inode = fs.inode(entry.inode, entry.block);
            if inode.is_ok_and(|inode| inode.kind() == Kind::Directory) {
                if seen.insert(entry.inode) {
                    folders.push((entry.inode, path));
                }
            } else if left.remove(&entry.inode) {
                found.insert(entry.inode, path);
            }
        }
    }
    found
}

/// Says of an error of reading whose block it is about.
pub fn named<S: ReadAt>(error: Error, open: impl FnOnce() -> Result<FileSystem<S>>) -> Error {
    let Error::Pages(pages::Error::Other(inner)) = &error else {
        return error;
    };
    let Some(Error::Read {
        at_bytes, source, ..
    }) = inner.downcast_ref::<Error>()
    else {
        return error;
    };
    let page = at_bytes / PAGE_BYTES as u64;
    let mut pages = Bits::default();
    pages.insert(page..page + 1);
    let owners = open().map(|fs| owners(&fs, &pages)).unwrap_or_default();
    let Some(bad) = owners.into_iter().next() else {
        return error;
    };
    let source = match source.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => source.kind().into(),
    };
    Error::Unreadable {
        block: bad.block,
        owner: bad.owner,
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use testkit::volumes::{make, noise};

    use super::*;

    #[test]
    fn blocks_have_owners() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("tree/deep")).unwrap();
        std::fs::write(at("tree/deep/file"), noise(100_000, 1)).unwrap();
        make(&at("fs"), "16M", &["-b", "1024"], Some(&at("tree")));
        let bytes = std::fs::read(at("fs")).unwrap();
        let file = noise(100_000, 1);
        let page = bytes
            .chunks(4096)
            .position(|page| page == &file[8192..12288]);
        // Of a file system with small blocks, a page may begin in the middle of a file.
        let page = page.unwrap_or_else(|| {
            let block = bytes.chunks(1024).position(|one| one == &file[8192..9216]);
            block.unwrap() / 4
        });
        let fs = FileSystem::open(bytes).unwrap();
        let mut pages = Bits::default();
        pages.insert(0..1);
        pages.insert(page as u64..page as u64 + 1);
        let bad = owners(&fs, &pages);
        assert_eq!(bad.len(), 8);
        assert_eq!(bad[0].owner, "the file system's own");
        assert!(bad[7].owner.starts_with("of /deep/file (inode "), "{bad:?}");
        assert_eq!(owners(&fs, &Bits::default()), []);
        let error = Error::Unfit("other".into());
        let named = named(error, || {
            FileSystem::open(std::fs::read(Path::new("/none")).unwrap())
        });
        assert!(matches!(named, Error::Unfit(_)));
    }
}
