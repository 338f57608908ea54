//! Our own reader of ext2, ext3 and ext4: read-only, and every field is a claim until it is
//! checked.
//!
//! [`FileSystem::open`] reads superblock and group descriptors; everything else is read when it is
//! asked for. Nothing is believed without its checksum where there are checksums, nothing is larger
//! in memory than what it is read from, and every walk ends: trees have a depth and blocks that
//! ascend, maps no more blocks than the file system.

mod attributes;
mod blocks;
mod checksum;
mod directory;
mod features;
mod groups;
mod inode;
mod journal;
pub(crate) mod raw;
mod superblock;

use std::ops::Range;

pub use attributes::Attribute;
pub(crate) use attributes::{StoredAttribute, seen};
pub use blocks::{BlockItem, FileExtent};
pub use directory::Entry;
pub use inode::{Inode, Kind, Time};
pub use journal::{Patches, ReplayedSource};
pub use superblock::Superblock;

use abi::bits::Bits;
use checksum::crc32c;
use groups::{Group, Groups, base_blocks, table_blocks};

use crate::{Error, ReadAt, Result};

/// The inode of the root directory.
pub const ROOT: u32 = 2;
/// The inode of blocks that cannot be used.
pub const BAD_BLOCKS: u32 = 1;
/// The inode that holds blocks for more group descriptors.
pub const RESIZE: u32 = 7;

/// How much of a table of inodes is read at a time, and how many inodes are looked at together.
const TABLE_BYTES: u32 = 1 << 20;
const TABLE_INODES: u32 = 32;

/// A file system that is read from `S`.
pub struct FileSystem<S> {
    source: S,
    sb: Superblock,
    groups: Groups,
}

/// Consecutive inodes in a table.
#[derive(Debug)]
pub struct Table<'a> {
    /// The number of the first.
    pub first: u32,
    /// Which are in use: a bit for each.
    pub used: u32,
    /// Where they are.
    pub at_bytes: u64,
    /// Their bytes.
    pub raw: &'a [u8],
}

/// Blocks of the file system itself.
#[derive(Debug, Default)]
pub struct Layout {
    /// All blocks in use.
    pub used: Bits,
    /// Those of the file system itself: superblocks, descriptors, bitmaps, inodes.
    pub system: Bits,
    /// Those of them whose bytes mean nothing: bitmaps and tables that were never written.
    pub meaningless: Bits,
}

impl Layout {
    /// Has blocks of inodes in use, whatever the bitmaps say; how many of them those say are free.
    pub fn note_owned(&mut self, owned: &Bits) -> u64 {
        let mut free = owned.clone();
        free.subtract(&self.used);
        self.used.add(&free);
        free.count()
    }

    /// Works out what follows from all groups together.
    pub fn finish(&mut self) {
        self.used.add(&self.system);
        self.system.subtract(&self.meaningless);
    }
}

impl<S: ReadAt> FileSystem<S> {
    /// Reads what everything else follows from.
    ///
    /// # Errors
    /// [`Error::Unfit`], [`Error::Damaged`], [`Error::Read`].
    pub fn open(source: S) -> Result<Self> {
        let sb = Superblock::read(&source)?;
        let groups = Groups::read(&source, &sb)?;
        Ok(Self { source, sb, groups })
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.sb
    }

    /// Returns the source.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Reads a block.
    ///
    /// # Errors
    /// [`Error::Read`], also for one behind the end.
    pub(crate) fn block(&self, block: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.sb.block_bytes as usize];
        let at_bytes = block.saturating_mul(self.sb.block_bytes.into());
        self.source.read_at(at_bytes, &mut bytes)?;
        Ok(bytes)
    }

    /// Finds out which blocks are in use.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn layout(&self) -> Result<Layout> {
        let mut layout = Layout::default();
        self.add_layout(0..self.groups(), &mut layout)?;
        layout.finish();
        Ok(layout)
    }

    /// Adds what some groups have to a layout, which is to be finished when all are in it.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn add_layout(&self, groups: Range<u32>, layout: &mut Layout) -> Result<()> {
        let (system, meaningless) = (&mut layout.system, &mut layout.meaningless);
        if groups.start == 0 {
            // What stands before the first group belongs to who boots.
            system.insert(0..self.sb.first_data_block);
            for block in &self.groups.descriptor_blocks {
                system.insert(*block..block + 1);
            }
        }
        for number in groups {
            let group = &self.groups.all[number as usize];
            if group.has_no_block_bitmap {
                meaningless.insert(group.block_bitmap..group.block_bitmap + 1);
            } else {
                self.add_used(number, group, &mut layout.used)?;
            }
            system.insert(base_blocks(&self.sb, number));
            system.insert(group.block_bitmap..group.block_bitmap + 1);
            system.insert(group.inode_bitmap..group.inode_bitmap + 1);
            let table = group.inode_table..group.inode_table + table_blocks(&self.sb);
            system.insert(table.clone());
            if group.inodes == 0 {
                meaningless.insert(group.inode_bitmap..group.inode_bitmap + 1);
            }
            meaningless.insert(self.written_table(group).end..table.end);
        }
        Ok(())
    }

    /// The blocks of a group's inodes that may be in use.
    fn written_table(&self, group: &Group) -> Range<u64> {
        let bytes = u64::from(group.inodes) * u64::from(self.sb.inode_bytes);
        let written = bytes.div_ceil(self.sb.block_bytes.into());
        group.inode_table..group.inode_table + written
    }

    /// How many groups there are.
    pub fn groups(&self) -> u32 {
        self.sb.groups
    }

    /// Has the blocks read ahead that a survey reads of every group: many at a time, in the order
    /// of the disk.
    pub fn read_ahead(&self) {
        let mut blocks = Bits::default();
        for group in &self.groups.all {
            if !group.has_no_block_bitmap {
                blocks.insert(group.block_bitmap..group.block_bitmap + 1);
            }
            if group.inodes > 0 {
                blocks.insert(group.inode_bitmap..group.inode_bitmap + 1);
                blocks.insert(self.written_table(group));
            }
        }
        let size = u64::from(self.sb.block_bytes);
        for range in blocks.ranges() {
            let len = (range.end - range.start) * size;
            self.source.read_ahead(range.start * size, len);
        }
    }

    fn add_used(&self, number: u32, group: &Group, used: &mut Bits) -> Result<()> {
        let bitmap = self.block(group.block_bitmap)?;
        let per_cluster = u64::from(self.sb.cluster_blocks);
        let clusters = (u64::from(self.sb.blocks_per_group) / per_cluster) as usize;
        if self.sb.has_checksums() {
            let sum = crc32c(self.sb.seed, &bitmap[..clusters / 8]);
            self.check_bitmap(sum, group.block_bitmap_sum)
                .map_err(|what| {
                    let field = format!("block bitmap of group {number}");
                    Error::damaged(group.block_bitmap, field, what)
                })?;
        }
        let (start, end) = (self.sb.group_start(number), self.sb.group_end(number));
        for range in ones(&bitmap, clusters) {
            let first = start + range.start * per_cluster;
            let last = (start + range.end * per_cluster).min(end);
            used.insert(first.min(end)..last);
        }
        Ok(())
    }

    fn check_bitmap(&self, sum: u32, stored: u32) -> Result<(), String> {
        let mask = if self.sb.descriptor_bytes >= 64 {
            u32::MAX
        } else {
            0xffff
        };
        match sum & mask == stored {
            true => Ok(()),
            false => Err("its checksum is wrong".into()),
        }
    }

    /// Walks all inodes in use, by number.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`], those of `each`.
    pub fn walk_inodes(&self, each: &mut dyn FnMut(Inode) -> Result<()>) -> Result<()> {
        self.walk_tables(0..self.groups(), &mut |table| self.inodes_of(table, each))
    }

    /// Gives the inodes in use of a part of a table.
    ///
    /// # Errors
    /// [`Error::Damaged`], those of `each`.
    pub fn inodes_of(
        &self,
        table: &Table<'_>,
        each: &mut dyn FnMut(Inode) -> Result<()>,
    ) -> Result<()> {
        let len = self.sb.inode_bytes as usize;
        for index in (0..TABLE_INODES).filter(|index| table.used & (1 << index) != 0) {
            let at = index as usize * len;
            let raw = &table.raw[at..at + len];
            // Those that the file system keeps for itself and has no use for.
            if raw.iter().all(|byte| *byte == 0) {
                continue;
            }
            each(self.decode_inode(table.first + index, table.at_bytes + at as u64, raw)?)?;
        }
        Ok(())
    }

    /// Walks the parts of some groups' tables that have inodes in use.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`], those of `each`.
    pub fn walk_tables(
        &self,
        groups: Range<u32>,
        each: &mut dyn FnMut(&Table<'_>) -> Result<()>,
    ) -> Result<()> {
        for number in groups {
            let group = &self.groups.all[number as usize];
            if group.inodes > 0 {
                self.walk_group(number, group, each)?;
            }
        }
        Ok(())
    }

    fn walk_group(
        &self,
        number: u32,
        group: &Group,
        each: &mut dyn FnMut(&Table<'_>) -> Result<()>,
    ) -> Result<()> {
        let bitmap = self.block(group.inode_bitmap)?;
        let per_group = self.sb.inodes_per_group as usize;
        if self.sb.has_checksums() {
            let sum = crc32c(self.sb.seed, &bitmap[..per_group / 8]);
            self.check_bitmap(sum, group.inode_bitmap_sum)
                .map_err(|what| {
                    let field = format!("inode bitmap of group {number}");
                    Error::damaged(group.inode_bitmap, field, what)
                })?;
        }
        let inode_bytes = u64::from(self.sb.inode_bytes);
        let per_read = (TABLE_BYTES / self.sb.inode_bytes).max(TABLE_INODES);
        let table_bytes = group.inode_table * u64::from(self.sb.block_bytes);
        let mut bytes = Vec::new();
        let mut window = 0..0;
        for start in (0..group.inodes).step_by(TABLE_INODES as usize) {
            let inodes = TABLE_INODES.min(group.inodes - start);
            let used = used_of(&bitmap, start, inodes);
            if used == 0 {
                continue;
            }
            if !window.contains(&start) {
                let first = start / per_read * per_read;
                window = first..(first + per_read).min(group.inodes);
                bytes.resize(
                    (window.end - window.start) as usize * inode_bytes as usize,
                    0,
                );
                let at_bytes = table_bytes + u64::from(first) * inode_bytes;
                self.source.read_at(at_bytes, &mut bytes)?;
            }
            let at = (start - window.start) as usize * inode_bytes as usize;
            each(&Table {
                first: number * self.sb.inodes_per_group + start + 1,
                used,
                at_bytes: table_bytes + u64::from(start) * inode_bytes,
                raw: &bytes[at..at + inodes as usize * inode_bytes as usize],
            })?;
        }
        Ok(())
    }

    fn decode_inode(&self, number: u32, at_bytes: u64, raw: &[u8]) -> Result<Inode> {
        let block = at_bytes / u64::from(self.sb.block_bytes);
        Inode::decode(&self.sb, number, block, raw)
            .map_err(|what| Error::damaged(block, format!("inode {number}"), what))
    }

    /// Reads one inode; `from` is the block that names it.
    ///
    /// # Errors
    /// [`Error::Damaged`], also where there is no such inode; [`Error::Read`].
    pub fn inode(&self, number: u32, from: u64) -> Result<Inode> {
        let index = number.wrapping_sub(1);
        let group = self
            .groups
            .all
            .get((index / self.sb.inodes_per_group) as usize);
        let group = group.filter(|_| number > 0 && number <= self.sb.inodes);
        let group =
            group.ok_or_else(|| Error::damaged(from, "number of an inode", number.to_string()))?;
        let inode_bytes = u64::from(self.sb.inode_bytes);
        let at = u64::from(index % self.sb.inodes_per_group) * inode_bytes;
        let at_bytes = group.inode_table * u64::from(self.sb.block_bytes) + at;
        let mut raw = vec![0; inode_bytes as usize];
        self.source.read_at(at_bytes, &mut raw)?;
        self.decode_inode(number, at_bytes, &raw)
    }

    /// Fills `bytes` with a file's contents from `at_bytes` on, and gives how many there are; holes
    /// and what was never written are zero.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn read_file(&self, inode: &Inode, at_bytes: u64, bytes: &mut [u8]) -> Result<usize> {
        let size = inode.size_bytes();
        let len = size.saturating_sub(at_bytes).min(bytes.len() as u64) as usize;
        let bytes = &mut bytes[..len];
        bytes.fill(0);
        if inode.is_inline() {
            let inline = self.inline_data(inode)?;
            let from = inline.get(at_bytes as usize..).unwrap_or_default();
            let len = from.len().min(bytes.len());
            bytes[..len].copy_from_slice(&from[..len]);
            return Ok(bytes.len());
        }
        let block_bytes = u64::from(self.sb.block_bytes);
        let end_bytes = at_bytes + len as u64;
        self.walk_blocks(inode, &mut |met| {
            let BlockItem::Blocks(mapped) = met else {
                return Ok(());
            };
            let first = mapped.logical * block_bytes;
            let start = first.max(at_bytes);
            let end = (first + mapped.blocks * block_bytes).min(end_bytes);
            if mapped.is_unwritten || start >= end {
                return Ok(());
            }
            let part = &mut bytes[(start - at_bytes) as usize..(end - at_bytes) as usize];
            self.source
                .read_at(mapped.physical * block_bytes + (start - first), part)
        })?;
        Ok(len)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn link_target(&self, inode: &Inode) -> Result<Vec<u8>> {
        if let Some(target) = inode.short_target() {
            return Ok(target.to_vec());
        }
        let size = inode.size_bytes();
        if size > u64::from(self.sb.block_bytes) {
            let field = format!("inode {}, length of a link", inode.number);
            return Err(Error::damaged(inode.block, field, size.to_string()));
        }
        let mut target = vec![0; size as usize];
        self.read_file(inode, 0, &mut target)?;
        Ok(target)
    }
}

/// The bits of a bitmap from `start` on, which is a multiple of 8.
fn used_of(bitmap: &[u8], start: u32, inodes: u32) -> u32 {
    let bytes = &bitmap[start as usize / 8..(start + inodes).div_ceil(8) as usize];
    let mut word = [0; 4];
    word[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(word) & (u32::MAX >> (TABLE_INODES - inodes))
}

/// The ranges of ones among the first `len` bits of a bitmap.
fn ones(bitmap: &[u8], len: usize) -> impl Iterator<Item = Range<u64>> + '_ {
    let is_set = |at: usize| bitmap[at / 8] & (1 << (at % 8)) != 0;
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < len && !is_set(at) {
            at += if at.is_multiple_of(8) && bitmap[at / 8] == 0 {
                8
            } else {
                1
            };
        }
        let start = at;
        while at < len && is_set(at) {
            at += if at.is_multiple_of(8) && bitmap[at / 8] == 0xff {
                8
            } else {
                1
            };
        }
        at = at.min(len);
        (start < at).then_some(start as u64..at as u64)
    })
}

#[cfg(test)]
mod tests;
