//! Which blocks a file has: extent trees, and the maps of older file systems.

use std::ops::Range;

use super::FileSystem;
use super::checksum::crc32c;
use super::inode::Inode;
use super::raw::{joined, u16_at, u32_at};
use crate::{Error, ReadAt, Result};

const MAGIC: u16 = 0xf30a;
/// Entries of a tree, and its header.
const ENTRY: usize = 12;
const DEPTH_MAX: u16 = 5;
/// Lengths above this are of extents that were never written.
const WRITTEN_MAX: u16 = 32_768;
/// Blocks that an inode can have.
const FILE_BLOCKS_MAX: u64 = 1 << 32;
/// Words of a map that name blocks of the file itself.
const DIRECT: usize = 12;

/// Consecutive blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// The first, counted from the beginning of the file.
    pub logical: u64,
    /// Its first block on the device.
    pub physical: u64,
    /// How many.
    pub blocks: u64,
    /// True if they were never written: they read as zeros, whatever is there.
    pub is_unwritten: bool,
}

impl FileExtent {
    /// The blocks of the device.
    pub fn range(&self) -> Range<u64> {
        self.physical..self.physical + self.blocks
    }
}

/// An item of a walk over a file's blocks.
#[derive(Clone, Copy, Debug)]
pub enum BlockItem {
    /// Blocks of the file, in ascending order.
    Blocks(FileExtent),
    /// A block of the tree or the map.
    Tree(u64),
}

/// Takes what is met.
pub type BlockVisitor<'a> = &'a mut dyn FnMut(BlockItem) -> Result<()>;

struct Walk<'a, S> {
    fs: &'a FileSystem<S>,
    inode: &'a Inode,
    seed: u32,
    each: BlockVisitor<'a>,
    /// How many more blocks it may meet: a file has no more than the file system.
    left: u64,
}

impl<S: ReadAt> FileSystem<S> {
    /// Walks the blocks of a file in the order in which it has them.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`], those of `each`.
    pub fn walk_blocks(&self, inode: &Inode, each: BlockVisitor<'_>) -> Result<()> {
        let mut walk = Walk {
            fs: self,
            inode,
            seed: inode.seed(&self.sb),
            each,
            left: self.sb.blocks,
        };
        match inode.has_extents() {
            true => walk.tree(inode.map(), inode.block, None, 0..FILE_BLOCKS_MAX),
            false => walk.words(),
        }
    }
}

impl<S: ReadAt> Walk<'_, S> {
    fn bad(&self, block: u64, field: &str, what: impl std::fmt::Display) -> Error {
        let field = format!("inode {}, {field}", self.inode.number);
        Error::damaged(block, field, format!("{what}"))
    }

    /// Counts blocks that are met.
    fn meet(&mut self, block: u64, blocks: u64) -> Result<()> {
        let left = self.left.checked_sub(blocks);
        self.left =
            left.ok_or_else(|| self.bad(block, "blocks", "it has more than the file system"))?;
        Ok(())
    }

    /// Walks one node, which stands in `block` and may map only `within`.
    fn tree(
        &mut self,
        node: &[u8],
        block: u64,
        depth: Option<u16>,
        within: Range<u64>,
    ) -> Result<()> {
        let own = u16_at(node, 6);
        let (entries, most) = (usize::from(u16_at(node, 2)), usize::from(u16_at(node, 4)));
        if u16_at(node, 0) != MAGIC {
            return Err(self.bad(block, "extent header", "it has no magic number"));
        }
        if own > DEPTH_MAX || depth.is_some_and(|depth| own != depth) {
            return Err(self.bad(block, "extent header, depth", own));
        }
        if entries > most || (most + 1) * ENTRY > node.len() {
            let what = format!("{entries} of {most}");
            return Err(self.bad(block, "extent header, entries", what));
        }
        // The root stands in the inode, whose checksum covers it.
        let tail = (most + 1) * ENTRY;
        if depth.is_some() && self.fs.sb.has_checksums() && tail + 4 <= node.len() {
            let sum = crc32c(self.seed, &node[..tail]);
            if sum != u32_at(node, tail) {
                return Err(self.bad(block, "extents", "their checksum is wrong"));
            }
        }
        let entries = || node[ENTRY..].chunks_exact(ENTRY).take(entries);
        let mut next = within.start;
        let mut starts = entries().skip(1).map(|entry| u64::from(u32_at(entry, 0)));
        for entry in entries() {
            let first = u64::from(u32_at(entry, 0));
            let end = starts.next().unwrap_or(within.end);
            if first < next || end <= first || end > within.end {
                return Err(self.bad(block, "extent, first block", first));
            }
            next = match own {
                0 => self.extent(entry, block, end)?,
                _ => {
                    let leaf = joined(u32_at(entry, 4), u16_at(entry, 8).into());
                    let bytes = self.node(leaf, block)?;
                    self.tree(&bytes, leaf, Some(own - 1), first..end)?;
                    end
                }
            };
        }
        Ok(())
    }

    /// Meets an extent that may not reach `limit`; gives the block after its last.
    fn extent(&mut self, entry: &[u8], block: u64, limit: u64) -> Result<u64> {
        let logical = u64::from(u32_at(entry, 0));
        let len = u16_at(entry, 4);
        let is_unwritten = len > WRITTEN_MAX;
        let blocks = u64::from(if is_unwritten { len - WRITTEN_MAX } else { len });
        let physical = joined(u32_at(entry, 8), u16_at(entry, 6).into());
        if blocks == 0 || logical + blocks > limit {
            return Err(self.bad(block, "extent, length", blocks));
        }
        self.check_place(block, physical, blocks)?;
        (self.each)(BlockItem::Blocks(FileExtent {
            logical,
            physical,
            blocks,
            is_unwritten,
        }))?;
        Ok(logical + blocks)
    }

    fn check_place(&mut self, block: u64, physical: u64, blocks: u64) -> Result<()> {
        let end = physical.checked_add(blocks);
        if physical <= self.fs.sb.first_data_block || end.is_none_or(|end| end > self.fs.sb.blocks)
        {
            return Err(self.bad(block, "place of blocks", physical));
        }
        self.meet(block, blocks)
    }

    /// Reads a block of the tree or the map that `from` names.
    fn node(&mut self, block: u64, from: u64) -> Result<Vec<u8>> {
        self.check_place(from, block, 1)?;
        (self.each)(BlockItem::Tree(block))?;
        self.fs.block(block)
    }

    /// Walks a map of words: 12 of blocks, and 3 of maps of one to three levels.
    fn words(&mut self) -> Result<()> {
        let map = self.inode.map().to_vec();
        let per_block = u64::from(self.fs.sb.block_bytes) / 4;
        let mut run = None;
        for (logical, word) in (0..).zip(map.chunks_exact(4).take(DIRECT)) {
            self.word(u32_at(word, 0).into(), self.inode.block, logical, &mut run)?;
        }
        let mut logical = DIRECT as u64;
        for (level, word) in (1..).zip(map.chunks_exact(4).skip(DIRECT)) {
            self.level(
                u32_at(word, 0).into(),
                self.inode.block,
                level,
                logical,
                &mut run,
            )?;
            logical += per_block.pow(level);
        }
        self.flush(&mut run)
    }

    /// Walks the map in `block`, if there is one.
    fn level(
        &mut self,
        block: u64,
        from: u64,
        level: u32,
        logical: u64,
        run: &mut Option<FileExtent>,
    ) -> Result<()> {
        if block == 0 {
            return Ok(());
        }
        let bytes = self.node(block, from)?;
        let per_word = (bytes.len() as u64 / 4).pow(level - 1);
        for (number, word) in (0..).zip(bytes.chunks_exact(4)) {
            let (word, logical) = (u64::from(u32_at(word, 0)), logical + number * per_word);
            match level {
                1 => self.word(word, block, logical, run)?,
                _ => self.level(word, block, level - 1, logical, run)?,
            }
        }
        Ok(())
    }

    /// Meets one block of the file, if it is there.
    fn word(
        &mut self,
        physical: u64,
        from: u64,
        logical: u64,
        run: &mut Option<FileExtent>,
    ) -> Result<()> {
        if physical == 0 {
            return Ok(());
        }
        self.check_place(from, physical, 1)?;
        match run {
            Some(run)
                if run.physical + run.blocks == physical && run.logical + run.blocks == logical =>
            {
                run.blocks += 1;
            }
            _ => {
                self.flush(run)?;
                *run = Some(FileExtent {
                    logical,
                    physical,
                    blocks: 1,
                    is_unwritten: false,
                });
            }
        }
        Ok(())
    }

    fn flush(&mut self, run: &mut Option<FileExtent>) -> Result<()> {
        run.take()
            .map_or(Ok(()), |run| (self.each)(BlockItem::Blocks(run)))
    }
}
