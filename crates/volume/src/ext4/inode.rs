//! Inodes: what a file is, and the bytes that say so.

use super::checksum::crc32c;
use super::features::ro_compat;
use super::raw::{joined, u16_at, u32_at};
use super::superblock::Superblock;

/// Blocks are mapped by extents.
const EXTENTS: u32 = 0x8_0000;
const INLINE_DATA: u32 = 0x1000_0000;
const HUGE_FILE: u32 = 0x4_0000;
const ENCRYPTED: u32 = 0x800;
const CASEFOLD: u32 = 0x4000_0000;
const VERITY: u32 = 0x10_0000;
/// Without what is behind them, inodes end here.
const OLD_BYTES: usize = 128;
/// Offset of the words that map blocks.
const MAP_AT: usize = 0x28;
/// How many bytes they have.
pub const MAP_LEN: usize = 60;

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file with bytes.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A character device.
    Character,
    /// A block device.
    Block,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// No mode at all: one of the file system's own.
    Unknown,
}

/// A point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub s: i64,
    /// Nanoseconds of the second.
    pub ns: u32,
}

/// One inode.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Its number.
    pub number: u32,
    /// The block that it stands in.
    pub block: u64,
    raw: Vec<u8>,
    is_huge_counted: bool,
    block_bytes: u32,
}

impl Inode {
    /// Checks an inode that stands in `block`.
    ///
    /// # Errors
    /// What is wrong.
    pub fn decode(sb: &Superblock, number: u32, block: u64, raw: &[u8]) -> Result<Self, String> {
        let this = Self {
            number,
            block,
            raw: raw.to_vec(),
            is_huge_counted: sb.ro_compat & ro_compat::HUGE_FILE != 0,
            block_bytes: sb.block_bytes,
        };
        if sb.has_checksums() {
            this.check_sum(sb)?;
        }
        if raw.len() > OLD_BYTES {
            let extra = this.extra_bytes();
            if extra + OLD_BYTES > raw.len() || !extra.is_multiple_of(4) {
                return Err(format!("extra size {extra}"));
            }
        }
        Ok(this)
    }

    fn check_sum(&self, sb: &Superblock) -> Result<(), String> {
        let mut raw = self.raw.clone();
        raw[0x7c..0x7e].fill(0);
        let has_high = raw.len() > OLD_BYTES && u16_at(&raw, 0x80) >= 4;
        if has_high {
            raw[0x82..0x84].fill(0);
        }
        let sum = crc32c(self.seed(sb), &raw);
        let mut stored = u32::from(u16_at(&self.raw, 0x7c));
        let mut expected = sum & 0xffff;
        if has_high {
            stored |= u32::from(u16_at(&self.raw, 0x82)) << 16;
            expected = sum;
        }
        match stored == expected {
            true => Ok(()),
            false => Err("its checksum is wrong".into()),
        }
    }

    /// Returns the seed of the checksums of all that belongs to the inode.
    pub fn seed(&self, sb: &Superblock) -> u32 {
        let seed = crc32c(sb.seed, &self.number.to_le_bytes());
        crc32c(seed, &self.raw[0x64..0x68])
    }

    fn extra_bytes(&self) -> usize {
        match self.raw.len() > OLD_BYTES {
            true => u16_at(&self.raw, 0x80).into(),
            false => 0,
        }
    }

    /// Returns the bytes behind the fields: attributes.
    pub fn attribute_bytes(&self) -> &[u8] {
        match self.raw.len() > OLD_BYTES {
            true => &self.raw[OLD_BYTES + self.extra_bytes()..],
            false => &[],
        }
    }

    /// The words that map blocks, or what stands in their place.
    pub fn map(&self) -> &[u8] {
        &self.raw[MAP_AT..MAP_AT + MAP_LEN]
    }

    /// The bytes of the inode that say what it is, without when it was last read.
    pub fn identity(&self) -> Vec<u8> {
        let mut raw = self.raw.clone();
        raw[0x8..0xc].fill(0);
        raw[0x7c..0x7e].fill(0);
        if raw.len() > OLD_BYTES {
            raw[0x82..0x84].fill(0);
            raw[0x8c..0x90].fill(0);
        }
        raw
    }

    /// Its sort.
    pub fn kind(&self) -> Kind {
        match self.mode() >> 12 {
            1 => Kind::Fifo,
            2 => Kind::Character,
            4 => Kind::Directory,
            6 => Kind::Block,
            8 => Kind::Regular,
            10 => Kind::Link,
            12 => Kind::Socket,
            _ => Kind::Unknown,
        }
    }

    /// Sort and permissions.
    pub fn mode(&self) -> u16 {
        u16_at(&self.raw, 0x0)
    }

    /// Permissions, set-user-id and the like.
    pub fn permissions(&self) -> u32 {
        u32::from(self.mode()) & 0o7777
    }

    /// The owner.
    pub fn uid(&self) -> u32 {
        u32::from(u16_at(&self.raw, 0x2)) | u32::from(u16_at(&self.raw, 0x78)) << 16
    }

    /// The group.
    pub fn gid(&self) -> u32 {
        u32::from(u16_at(&self.raw, 0x18)) | u32::from(u16_at(&self.raw, 0x7a)) << 16
    }

    /// The length in bytes.
    pub fn size_bytes(&self) -> u64 {
        joined(u32_at(&self.raw, 0x4), u32_at(&self.raw, 0x6c))
    }

    /// How many names it has.
    pub fn links(&self) -> u32 {
        u16_at(&self.raw, 0x1a).into()
    }

    /// How much space it takes, in units of 512 bytes.
    pub fn sectors(&self) -> u64 {
        let low = u32_at(&self.raw, 0x1c);
        if !self.is_huge_counted {
            return low.into();
        }
        let count = joined(low, u16_at(&self.raw, 0x74).into());
        match self.flags() & HUGE_FILE {
            0 => count,
            _ => count.saturating_mul(u64::from(self.block_bytes / 512)),
        }
    }

    /// Flags, also those of chattr(1).
    pub fn flags(&self) -> u32 {
        u32_at(&self.raw, 0x20)
    }

    /// Returns the generation: it differs from that of others that had its number.
    pub fn generation(&self) -> u32 {
        u32_at(&self.raw, 0x64)
    }

    /// Tells whether its contents are protected by fs-verity.
    pub fn is_verity(&self) -> bool {
        self.flags() & VERITY != 0
    }

    /// Tells whether it is a directory that ignores case.
    pub fn ignores_case(&self) -> bool {
        self.flags() & CASEFOLD != 0
    }

    /// Tells whether blocks are mapped by extents.
    pub fn has_extents(&self) -> bool {
        self.flags() & EXTENTS != 0
    }

    /// Tells whether the contents stand in the inode.
    pub fn is_inline(&self) -> bool {
        self.flags() & INLINE_DATA != 0
    }

    /// Tells whether contents or names are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.flags() & ENCRYPTED != 0
    }

    /// Tells whether names stand with hashes behind them.
    pub fn has_hashes(&self) -> bool {
        self.flags() & (ENCRYPTED | CASEFOLD) == ENCRYPTED | CASEFOLD
    }

    /// The block with attributes; 0 where there is none.
    pub fn attribute_block(&self) -> u64 {
        joined(u32_at(&self.raw, 0x68), u16_at(&self.raw, 0x76).into())
    }

    /// When it was last changed in any way.
    pub fn changed(&self) -> Time {
        self.time(0xc, 0x84)
    }

    /// How far apart two times of it are at least, if they are not the same.
    pub fn time_step_ns(&self) -> u64 {
        match OLD_BYTES + self.extra_bytes() >= 0x88 {
            true => 1,
            false => 1_000_000_000,
        }
    }

    /// When its contents were last changed.
    pub fn modified(&self) -> Time {
        self.time(0x10, 0x88)
    }

    /// When it was last read.
    pub fn accessed(&self) -> Time {
        self.time(0x8, 0x8c)
    }

    fn time(&self, at: usize, extra_at: usize) -> Time {
        let low = u32_at(&self.raw, at).cast_signed();
        let extra = match OLD_BYTES + self.extra_bytes() >= extra_at + 4 {
            true => u32_at(&self.raw, extra_at),
            false => 0,
        };
        Time {
            s: i64::from(low) + (i64::from(extra & 3) << 32),
            ns: extra >> 2,
        }
    }

    /// The numbers of a device: major, minor.
    pub fn device(&self) -> (u32, u32) {
        let (old, new) = (u32_at(self.map(), 0), u32_at(self.map(), 4));
        match old {
            0 => ((new & 0xf_ff00) >> 8, new & 0xff | (new >> 12) & 0xf_ff00),
            _ => ((old >> 8) & 0xff, old & 0xff),
        }
    }

    /// The target of a symbolic link that stands in the inode.
    pub fn short_target(&self) -> Option<&[u8]> {
        let size = self.size_bytes() as usize;
        let is_short = size < MAP_LEN && !self.has_extents() && !self.is_inline();
        is_short.then(|| &self.map()[..size])
    }
}
