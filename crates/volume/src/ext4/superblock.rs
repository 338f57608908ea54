//! The superblock, checked before anything is believed of it.

use super::checksum::crc32c;
use super::features::{self, compat, incompat, ro_compat};
use super::raw::{joined, u16_at, u32_at};
use crate::{Error, ReadAt, Result};

/// Where it is, and how long.
pub const AT_BYTES: u64 = 1024;
/// How long it is.
pub const LEN: usize = 1024;

const MAGIC: u16 = 0xef53;
/// Groups of 128 MiB make 512 TiB of as many.
const GROUPS_MAX: u64 = 1 << 22;
/// Offset of its checksum, if it has one.
pub const CHECKSUM_AT: usize = 0x3fc;

/// Fields of the superblock, as far as they are needed.
#[derive(Clone, Debug)]
pub struct Superblock {
    /// Bytes of a block: 1,024 to 65,536.
    pub block_bytes: u32,
    /// Blocks of the file system.
    pub blocks: u64,
    /// The block from which groups are counted: 1 where blocks have 1,024 bytes, else 0.
    pub first_data_block: u64,
    /// Blocks of a group.
    pub blocks_per_group: u32,
    /// Blocks for each bit of a block bitmap.
    pub cluster_blocks: u32,
    /// Inodes of the file system.
    pub inodes: u32,
    /// Inodes of a group.
    pub inodes_per_group: u32,
    /// Bytes of an inode.
    pub inode_bytes: u32,
    /// The first inode that is not the file system's own.
    pub first_inode: u32,
    /// Bytes of a group descriptor.
    pub descriptor_bytes: u32,
    /// How many groups there are.
    pub groups: u32,
    /// Blocks kept for more group descriptors.
    pub reserved_descriptor_blocks: u32,
    /// The group of descriptor blocks from which on they are spread.
    pub first_meta_group: u32,
    /// The groups with backups, with `sparse_super2`.
    pub backup_groups: [u32; 2],
    /// Compatible features.
    pub compat: u32,
    /// Incompatible features.
    pub incompat: u32,
    /// Read-only compatible features.
    pub ro_compat: u32,
    /// Seed of all checksums.
    pub seed: u32,
    /// The file system's identity.
    pub uuid: [u8; 16],
    /// The volume's name.
    pub label: String,
    /// The inode of the journal; 0 where there is none in the file system.
    pub journal_inode: u32,
    /// True if it was unmounted, or checked, after it was written to last.
    pub was_unmounted: bool,
    /// Inodes whose blocks change without a trace in the inode: quota, orphans.
    pub special_inodes: Vec<u32>,
    /// The block that tells who has it mounted.
    pub mmp_block: u64,
}

/// A bit of the state: everything was written when it was unmounted.
const VALID_FS: u16 = 1;

/// Tells whether a superblock's bytes have a checksum.
pub fn has_checksum(bytes: &[u8]) -> bool {
    u32_at(bytes, 0x64) & ro_compat::METADATA_CSUM != 0
}

impl Superblock {
    /// Reads and checks it.
    ///
    /// # Errors
    /// [`Error::Unfit`] where there is none or it has unknown features; [`Error::Damaged`].
    pub fn read(source: &dyn ReadAt) -> Result<Self> {
        if source.len_bytes() < AT_BYTES + LEN as u64 {
            return Err(Error::Unfit("it is too short for a file system".into()));
        }
        let mut bytes = vec![0; LEN];
        source.read_at(AT_BYTES, &mut bytes)?;
        if u16_at(&bytes, 0x38) != MAGIC {
            return Err(Error::Unfit("there is no ext4 file system on it".into()));
        }
        let (compat, incompat, ro_compat) = (
            u32_at(&bytes, 0x5c),
            u32_at(&bytes, 0x60),
            u32_at(&bytes, 0x64),
        );
        features::check(incompat, ro_compat)?;
        if ro_compat & ro_compat::METADATA_CSUM != 0 {
            if bytes[0x175] != 1 {
                return Err(bad("checksum type", bytes[0x175]));
            }
            let sum = crc32c(u32::MAX, &bytes[..CHECKSUM_AT]);
            if sum != u32_at(&bytes, CHECKSUM_AT) {
                return Err(Error::damaged(0, "superblock", "its checksum is wrong"));
            }
        }
        let this = Self::decode(&bytes, compat, incompat, ro_compat)?;
        this.check(source.len_bytes())?;
        Ok(this)
    }

    fn decode(bytes: &[u8], compat: u32, incompat: u32, ro_compat: u32) -> Result<Self> {
        let u32_at = |at| u32_at(bytes, at);
        let log_block = u32_at(0x18);
        let log_cluster = u32_at(0x1c);
        if log_block > 6 {
            return Err(bad("block size", log_block));
        }
        let bigalloc = ro_compat & ro_compat::BIGALLOC != 0;
        if bigalloc && (log_cluster < log_block || log_cluster > log_block + 16) {
            return Err(bad("cluster size", log_cluster));
        }
        let wide = incompat & incompat::WIDE != 0;
        let high = |at| if wide { u32_at(at) } else { 0 };
        let uuid: [u8; 16] = bytes[0x68..0x78].try_into().expect("sixteen bytes");
        let is_dynamic = u32_at(0x4c) > 0;
        let label = bytes[0x78..0x88].split(|byte| *byte == 0).next();
        let mut special = vec![u32_at(0x240), u32_at(0x244), u32_at(0x26c), u32_at(0x280)];
        special.retain(|inode| *inode != 0);
        let mut this = Self {
            block_bytes: 1024 << log_block,
            blocks: joined(u32_at(0x4), high(0x150)),
            first_data_block: u64::from(u32_at(0x14)),
            blocks_per_group: u32_at(0x20),
            cluster_blocks: if bigalloc {
                1 << (log_cluster - log_block)
            } else {
                1
            },
            inodes: u32_at(0x0),
            inodes_per_group: u32_at(0x28),
            inode_bytes: if is_dynamic {
                u16_at(bytes, 0x58).into()
            } else {
                128
            },
            first_inode: if is_dynamic { u32_at(0x54) } else { 11 },
            descriptor_bytes: if wide { u16_at(bytes, 0xfe).into() } else { 32 },
            groups: 0,
            reserved_descriptor_blocks: u16_at(bytes, 0xce).into(),
            first_meta_group: u32_at(0x104),
            backup_groups: [u32_at(0x24c), u32_at(0x250)],
            compat,
            incompat,
            ro_compat,
            seed: match incompat & incompat::CSUM_SEED {
                0 => crc32c(u32::MAX, &uuid),
                _ => u32_at(0x270),
            },
            uuid,
            label: String::from_utf8_lossy(label.unwrap_or_default()).into_owned(),
            journal_inode: match compat & compat::HAS_JOURNAL {
                0 => 0,
                _ => u32_at(0xe0),
            },
            was_unmounted: u16_at(bytes, 0x3a) & VALID_FS != 0,
            special_inodes: special,
            mmp_block: joined(u32_at(0x168), u32_at(0x16c)),
        };
        this.groups = this.count_groups()?;
        Ok(this)
    }

    fn count_groups(&self) -> Result<u32> {
        let per_group = u64::from(self.blocks_per_group);
        let bits = u64::from(self.block_bytes) * 8;
        let clusters = per_group / u64::from(self.cluster_blocks);
        let is_whole = per_group.is_multiple_of(u64::from(self.cluster_blocks));
        if clusters == 0 || clusters > bits || !clusters.is_multiple_of(8) || !is_whole {
            return Err(bad("blocks per group", per_group));
        }
        let first = if self.block_bytes == 1024 && self.cluster_blocks == 1 {
            1
        } else {
            0
        };
        // mke2fs of file systems with clusters of 1 KiB blocks begins at block 0 or 1.
        let is_first = self.first_data_block == first
            || (self.block_bytes == 1024 && self.first_data_block <= 1);
        if !is_first || self.blocks <= self.first_data_block {
            return Err(bad("first data block", self.first_data_block));
        }
        let groups = (self.blocks - self.first_data_block).div_ceil(per_group);
        if groups > GROUPS_MAX {
            return Err(bad("number of groups", groups));
        }
        Ok(groups as u32)
    }

    fn check(&self, len_bytes: u64) -> Result<()> {
        let have = self.blocks.checked_mul(u64::from(self.block_bytes));
        if have.is_none_or(|have| have > len_bytes) {
            let what = format!(
                "the file system has {} blocks of {} bytes, of which the device has only {} bytes",
                self.blocks, self.block_bytes, len_bytes
            );
            return Err(Error::Unfit(what));
        }
        let (inode, block) = (self.inode_bytes, self.block_bytes);
        if !(128..=block).contains(&inode) || !inode.is_power_of_two() {
            return Err(bad("inode size", inode));
        }
        let (descriptor, wide) = (self.descriptor_bytes, self.incompat & incompat::WIDE != 0);
        let fits = (64..=1024.min(block)).contains(&descriptor) && descriptor.is_power_of_two();
        if wide && !fits {
            return Err(bad("group descriptor size", descriptor));
        }
        let per_group = self.inodes_per_group;
        if per_group < block / inode && per_group != self.inodes || per_group > block * 8 {
            return Err(bad("inodes per group", per_group));
        }
        if per_group == 0 || !per_group.is_multiple_of(8) {
            return Err(bad("inodes per group", per_group));
        }
        if u64::from(self.inodes) != u64::from(per_group) * u64::from(self.groups) {
            return Err(bad("number of inodes", self.inodes));
        }
        if self.first_inode < 11 || self.first_inode > self.inodes {
            return Err(bad("first inode", self.first_inode));
        }
        if self.journal_inode > self.inodes {
            return Err(bad("journal inode", self.journal_inode));
        }
        if self.reserved_descriptor_blocks > block / 4 {
            return Err(bad(
                "reserved descriptor blocks",
                self.reserved_descriptor_blocks,
            ));
        }
        Ok(())
    }

    /// Tells whether metadata has checksums.
    pub fn has_checksums(&self) -> bool {
        self.ro_compat & ro_compat::METADATA_CSUM != 0
    }

    /// Tells whether flags of group descriptors count.
    pub fn has_group_flags(&self) -> bool {
        self.ro_compat & (ro_compat::METADATA_CSUM | ro_compat::GDT_CSUM) != 0
    }

    /// Tells whether the journal is to be replayed.
    pub fn needs_recovery(&self) -> bool {
        self.incompat & incompat::RECOVER != 0
    }

    /// Bytes of the file system.
    pub fn len_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// The first block of a group.
    pub fn group_start(&self, group: u32) -> u64 {
        self.first_data_block + u64::from(group) * u64::from(self.blocks_per_group)
    }

    /// The block after a group's last.
    pub fn group_end(&self, group: u32) -> u64 {
        self.blocks
            .min(self.group_start(group) + u64::from(self.blocks_per_group))
    }

    /// Tells whether a group has the superblock or a backup of it.
    pub fn has_superblock(&self, group: u32) -> bool {
        if group == 0 {
            return true;
        }
        if self.compat & compat::SPARSE_SUPER2 != 0 {
            return self.backup_groups.contains(&group);
        }
        if group == 1 || self.ro_compat & ro_compat::SPARSE_SUPER == 0 {
            return true;
        }
        [3_u64, 5, 7].iter().any(|base| {
            let mut power = *base;
            while power < u64::from(group) {
                power *= base;
            }
            power == u64::from(group)
        })
    }
}

fn bad(field: &str, value: impl std::fmt::Display) -> Error {
    Error::damaged(0, format!("superblock, {field}"), format!("{value}"))
}
