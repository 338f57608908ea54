//! The group descriptors: where each group's bitmaps and inodes are.

use std::ops::Range;

use super::checksum::{crc16, crc32c};
use super::features::{incompat, ro_compat};
use super::raw::{joined, u16_at, u32_at};
use super::superblock::Superblock;
use crate::{Error, ReadAt, Result};

/// Offset of a descriptor's checksum.
const CHECKSUM_AT: usize = 0x1e;
const INODE_UNINIT: u16 = 1;
const BLOCK_UNINIT: u16 = 2;

#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// The block with its block bitmap.
    pub block_bitmap: u64,
    /// The block with its inode bitmap.
    pub inode_bitmap: u64,
    /// The first block of its inodes.
    pub inode_table: u64,
    /// Its block bitmap was never written: nothing but the file system's own blocks is in use.
    pub has_no_block_bitmap: bool,
    /// How many of its inodes may be in use.
    pub inodes: u32,
    /// The checksum of the block bitmap.
    pub block_bitmap_sum: u32,
    /// The checksum of the inode bitmap.
    pub inode_bitmap_sum: u32,
}

/// The groups, and where their descriptors are.
#[derive(Debug)]
pub struct Groups {
    /// By number.
    pub all: Vec<Group>,
    /// The blocks of the descriptors that are in use.
    pub descriptor_blocks: Vec<u64>,
}

impl Groups {
    /// Reads and checks all descriptors.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn read(source: &dyn ReadAt, sb: &Superblock) -> Result<Self> {
        let per_block = sb.block_bytes / sb.descriptor_bytes;
        let mut all = Vec::new();
        let mut descriptor_blocks = Vec::new();
        let mut bytes = vec![0; sb.block_bytes as usize];
        for number in 0..sb.groups.div_ceil(per_block) {
            let block = descriptor_block(sb, number, per_block);
            if block >= sb.blocks {
                let what = "it is behind the end".to_owned();
                return Err(Error::damaged(block, "group descriptors", what));
            }
            source.read_at(block * u64::from(sb.block_bytes), &mut bytes)?;
            descriptor_blocks.push(block);
            let first = number * per_block;
            let descriptors = bytes.chunks_exact(sb.descriptor_bytes as usize);
            for (group, raw) in (first..sb.groups).zip(descriptors) {
                let read = decode(sb, group, raw);
                all.push(read.map_err(|what| {
                    Error::damaged(block, format!("descriptor of group {group}"), what)
                })?);
            }
        }
        Ok(Self {
            all,
            descriptor_blocks,
        })
    }
}

/// Returns the `number`-th block of descriptors.
fn descriptor_block(sb: &Superblock, number: u32, per_block: u32) -> u64 {
    if sb.incompat & incompat::META_BG == 0 || number < sb.first_meta_group {
        let superblock = if sb.block_bytes == 1024 { 1 } else { 0 };
        return superblock + 1 + u64::from(number);
    }
    // Wide arithmetic: what is behind the end is refused by the caller.
    let group = u64::from(number) * u64::from(per_block);
    let start = sb.first_data_block + group * u64::from(sb.blocks_per_group);
    let mut skip = u64::from(sb.has_superblock(group as u32));
    if sb.block_bytes == 1024 && number == 0 && sb.first_data_block == 0 {
        skip += 1;
    }
    start + skip
}

fn decode(sb: &Superblock, number: u32, raw: &[u8]) -> Result<Group, String> {
    let is_wide = raw.len() >= 64;
    let high32 = |at| if is_wide { u32_at(raw, at) } else { 0 };
    let high16 = |at| if is_wide { u16_at(raw, at) } else { 0 };
    let both = |low, high| u32::from(u16_at(raw, low)) | u32::from(high16(high)) << 16;
    check_sum(sb, number, raw)?;
    let flags = if sb.has_group_flags() {
        u16_at(raw, 0x12)
    } else {
        0
    };
    let unused = if sb.has_group_flags() {
        both(0x1c, 0x32)
    } else {
        0
    };
    if unused > sb.inodes_per_group {
        return Err(format!("{unused} unused inodes"));
    }
    let group = Group {
        block_bitmap: joined(u32_at(raw, 0x0), high32(0x20)),
        inode_bitmap: joined(u32_at(raw, 0x4), high32(0x24)),
        inode_table: joined(u32_at(raw, 0x8), high32(0x28)),
        has_no_block_bitmap: flags & BLOCK_UNINIT != 0,
        inodes: match flags & INODE_UNINIT {
            0 => sb.inodes_per_group - unused,
            _ => 0,
        },
        block_bitmap_sum: both(0x18, 0x38),
        inode_bitmap_sum: both(0x1a, 0x3a),
    };
    let table = group.inode_table.checked_add(table_blocks(sb));
    let places = [
        (
            "block bitmap",
            group.block_bitmap,
            group.block_bitmap.checked_add(1),
        ),
        (
            "inode bitmap",
            group.inode_bitmap,
            group.inode_bitmap.checked_add(1),
        ),
        ("inode table", group.inode_table, table),
    ];
    for (name, start, end) in places {
        if start <= sb.first_data_block || end.is_none_or(|end| end > sb.blocks) {
            return Err(format!("its {name} is at block {start}"));
        }
    }
    Ok(group)
}

fn check_sum(sb: &Superblock, number: u32, raw: &[u8]) -> Result<(), String> {
    let number = number.to_le_bytes();
    let (before, after) = (&raw[..CHECKSUM_AT], &raw[CHECKSUM_AT + 2..]);
    let expected = if sb.has_checksums() {
        let sum = crc32c(crc32c(sb.seed, &number), before);
        crc32c(crc32c(sum, &[0; 2]), after) as u16
    } else if sb.ro_compat & ro_compat::GDT_CSUM != 0 {
        let after = if sb.incompat & incompat::WIDE != 0 {
            after
        } else {
            &[]
        };
        crc16(&[&sb.uuid, &number, before, after])
    } else {
        return Ok(());
    };
    match u16_at(raw, CHECKSUM_AT) == expected {
        true => Ok(()),
        false => Err("its checksum is wrong".into()),
    }
}

/// Blocks of a group's inodes.
pub fn table_blocks(sb: &Superblock) -> u64 {
    let bytes = u64::from(sb.inodes_per_group) * u64::from(sb.inode_bytes);
    bytes.div_ceil(u64::from(sb.block_bytes))
}

/// The blocks at the beginning of a group that have the superblock and descriptors, or backups.
pub fn base_blocks(sb: &Superblock, number: u32) -> Range<u64> {
    let per_block = sb.block_bytes / sb.descriptor_bytes;
    let has_superblock = sb.has_superblock(number);
    let is_meta = sb.incompat & incompat::META_BG != 0;
    let meta_group = number / per_block;
    let blocks = if !is_meta || meta_group < sb.first_meta_group {
        let descriptors = match is_meta {
            true => sb.first_meta_group,
            false => sb.groups.div_ceil(per_block),
        };
        match has_superblock {
            true => 1 + u64::from(descriptors) + u64::from(sb.reserved_descriptor_blocks),
            false => 0,
        }
    } else {
        let at = number % per_block;
        let has_descriptors = at == 0 || at == 1 || at == per_block - 1;
        u64::from(has_superblock) + u64::from(has_descriptors)
    };
    let start = sb.group_start(number);
    start..(start + blocks).min(sb.blocks)
}
