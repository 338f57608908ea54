//! The log of jbd2: its superblock, and the blocks of whole transactions.
//!
//! All numbers in it are big-endian.

use std::collections::HashMap;

use abi::bits::Bits;
use crc::{CRC_32_MPEG_2, Crc};

use crate::ext4::checksum::crc32c;
use crate::ext4::{FileExtent, FileSystem};
use crate::{Error, ReadAt, Result};

/// Magic number of each block of a journal that is not data.
pub const MAGIC: u32 = 0xc03b_3998;
/// Bytes of their header: magic number, kind, transaction.
const HEADER: usize = 12;

/// Sorts of blocks.
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const SUPERBLOCKS: [u32; 2] = [3, 4];
const REVOKE: u32 = 5;

/// Offsets in the journal's superblock.
pub mod at {
    pub const BLOCK_BYTES: usize = 0x0c;
    pub const BLOCKS: usize = 0x10;
    pub const FIRST: usize = 0x14;
    pub const SEQUENCE: usize = 0x18;
    /// At which block the log starts; 0 where it is empty.
    pub const START: usize = 0x1c;
    pub const COMPAT: usize = 0x24;
    pub const INCOMPAT: usize = 0x28;
    pub const RO_COMPAT: usize = 0x2c;
    pub const UUID: usize = 0x30;
    pub const FAST_BLOCKS: usize = 0x54;
    pub const CHECKSUM: usize = 0xfc;
    /// How long it is.
    pub const END: usize = 0x400;
}

/// Transactions have a checksum in their commit block.
const COMPAT_CHECKSUM: u32 = 0x1;
/// Block numbers have 64 bits.
const WIDE: u32 = 0x2;
/// Checksums of the journal's own blocks, and of each block of data in 16 bits, or in 32.
const CHECKSUM_2: u32 = 0x8;
const CHECKSUM_3: u32 = 0x10;
pub const FAST_COMMIT: u32 = 0x20;
/// Features that are known: also records of what is not to be replayed, and commits that do not
/// wait for their data.
const KNOWN: u32 = 0x1 | WIDE | 0x4 | CHECKSUM_2 | CHECKSUM_3 | FAST_COMMIT;

/// How many blocks fast commits have where the superblock does not say.
const FAST_BLOCKS: u32 = 256;

/// Flag of a block of data.
const ESCAPED: u32 = 1;
const SAME_UUID: u32 = 2;
const LAST: u32 = 8;
const UUID_LEN: usize = 16;

/// Offsets of a commit block's checksum and time.
const COMMIT_CHECKSUM_AT: usize = 0x10;
const COMMIT_TIME_AT: usize = 0x30;

static CRC32: Crc<u32> = Crc::<u32>::new(&CRC_32_MPEG_2);

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The journal of a file system.
pub struct Log<'a, S> {
    fs: &'a FileSystem<S>,
    /// Its blocks, in ascending order.
    mapped: Vec<FileExtent>,
    /// Its superblock, and where that is.
    pub superblock: Vec<u8>,
    pub superblock_at: u64,
    /// The blocks that it goes round in.
    first: u32,
    end: u32,
    seed: u32,
}

/// A block of data in the log.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// Its place in the file system.
    pub block: u64,
    pub at: u64,
    /// Its first four bytes are not those that they were: it would look like one of the journal's
    /// own.
    pub is_escaped: bool,
    /// Of which transaction.
    sequence: u32,
}

/// Blocks of complete transactions.
#[derive(Debug, Default)]
pub struct Transactions {
    /// Blocks of data in the order in which they were written.
    pub copies: Vec<Copy>,
    /// Blocks that were given up, and in which transaction at last.
    revoked: HashMap<u64, u32>,
    /// The number of the first transaction that is not whole.
    pub next_sequence: u32,
}

/// A transaction that is being read.
#[derive(Default)]
struct OpenTransaction {
    copies: Vec<Copy>,
    revoked: Vec<u64>,
    /// A block of the journal whose checksum is wrong.
    doubtful: Option<u32>,
    /// The checksum of older journals.
    sum: Option<crc::Digest<'static, u32>>,
}

impl Transactions {
    /// Returns the last copy of each block that was not revoked later.
    pub fn to_replay(&self) -> impl Iterator<Item = &Copy> {
        let is_later = |one: u32, other: u32| one.wrapping_sub(other).cast_signed() > 0;
        self.copies.iter().filter(move |copy| {
            let revoked = self.revoked.get(&copy.block);
            revoked.is_none_or(|revoked| is_later(copy.sequence, *revoked))
        })
    }
}

impl<'a, S: ReadAt> Log<'a, S> {
    /// Reads and checks the journal's superblock; `from` is the block that names the journal.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn open(fs: &'a FileSystem<S>, from: u64, mapped: Vec<FileExtent>) -> Result<Self> {
        let bad = |block, what: &str| Error::damaged(block, "superblock of the journal", what);
        let Some(start) = mapped.first().filter(|first| first.logical == 0) else {
            return Err(bad(from, "there is none"));
        };
        let superblock_at = start.physical;
        let superblock = fs.block(superblock_at)?;
        let word = |at: usize| be32(&superblock, at);
        if word(0) != MAGIC || !SUPERBLOCKS.contains(&word(4)) {
            return Err(bad(superblock_at, "it has no magic number"));
        }
        let mut this = Self {
            fs,
            mapped,
            first: word(at::FIRST),
            end: word(at::BLOCKS),
            seed: crc32c(u32::MAX, &superblock[at::UUID..at::UUID + UUID_LEN]),
            superblock,
            superblock_at,
        };
        if this.incompat() & FAST_COMMIT != 0 {
            this.end = this.end.saturating_sub(this.fast_blocks());
        }
        Ok(this)
    }

    /// Tells whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        be32(&self.superblock, at::START) == 0
    }

    /// All its blocks but its superblock.
    pub fn blocks(&self) -> Bits {
        let mut blocks = Bits::default();
        let ranges = self.mapped.iter().map(FileExtent::range);
        ranges.for_each(|range| blocks.insert(range));
        blocks.remove(self.superblock_at..self.superblock_at + 1);
        blocks
    }

    fn features(&self, at: usize) -> u32 {
        // The older superblock has none.
        match be32(&self.superblock, 4) == SUPERBLOCKS[1] {
            true => be32(&self.superblock, at),
            false => 0,
        }
    }

    pub fn incompat(&self) -> u32 {
        self.features(at::INCOMPAT)
    }

    fn fast_blocks(&self) -> u32 {
        match be32(&self.superblock, at::FAST_BLOCKS) {
            0 => FAST_BLOCKS,
            blocks => blocks,
        }
    }

    pub fn has_checksums(&self) -> bool {
        self.incompat() & (CHECKSUM_2 | CHECKSUM_3) != 0
    }

    /// An error in a block of the log.
    fn bad(&self, block: u32, what: impl Into<String>) -> Error {
        let at = self.place(block).unwrap_or_default();
        Error::damaged(at, format!("journal, block {block}"), what)
    }

    /// Returns the place of a block of the log.
    fn place(&self, block: u32) -> Result<u64> {
        let block = u64::from(block);
        let next = self.mapped.partition_point(|one| one.logical <= block);
        let mapped = next.checked_sub(1).map(|at| self.mapped[at]);
        let mapped = mapped.filter(|one| block < one.logical + one.blocks && !one.is_unwritten);
        mapped
            .map(|one| one.physical + (block - one.logical))
            .ok_or_else(|| {
                let what = format!("block {block} of it is nowhere");
                Error::damaged(self.superblock_at, "journal", what)
            })
    }

    fn block(&self, block: u32) -> Result<Vec<u8>> {
        self.fs.block(self.place(block)?)
    }

    /// Checks what the superblock says before anything is replayed.
    fn check(&self) -> Result<()> {
        let bad = |field: &str, what: String| {
            let field = format!("superblock of the journal, {field}");
            Error::damaged(self.superblock_at, field, what)
        };
        let word = |at| be32(&self.superblock, at);
        if self.has_checksums() {
            let mut copy = self.superblock[..at::END].to_vec();
            copy[at::CHECKSUM..at::CHECKSUM + 4].fill(0);
            if crc32c(u32::MAX, &copy) != word(at::CHECKSUM) {
                return Err(bad("checksum", "it is wrong".into()));
            }
        }
        let unknown = self.incompat() & !KNOWN;
        if unknown | self.features(at::RO_COMPAT) != 0 {
            return Err(Error::Unfit(format!(
                "the journal, which is to be replayed, has features that are not known here \
                 ({unknown:#x}, {:#x}): mount it once, or run `e2fsck -p`",
                self.features(at::RO_COMPAT)
            )));
        }
        if word(at::BLOCK_BYTES) != self.fs.sb.block_bytes {
            return Err(bad("block size", word(at::BLOCK_BYTES).to_string()));
        }
        if self.first == 0 || self.first >= self.end {
            let what = format!("{} of {}", self.first, self.end);
            return Err(bad("first block", what));
        }
        let start = word(at::START);
        if start != 0 && !(self.first..self.end).contains(&start) {
            return Err(bad("start", start.to_string()));
        }
        Ok(())
    }

    /// Reads the log to its end: all transactions that are whole.
    ///
    /// # Errors
    /// [`Error::Unfit`], [`Error::Damaged`], [`Error::Read`].
    pub fn read(&self) -> Result<Transactions> {
        self.check()?;
        let mut whole = Transactions {
            next_sequence: be32(&self.superblock, at::SEQUENCE),
            ..Transactions::default()
        };
        if self.is_empty() {
            return Ok(whole);
        }
        let mut cursor = be32(&self.superblock, at::START);
        let mut open = OpenTransaction::default();
        let mut last_time = 0;
        // It cannot go round more than once.
        let mut left = self.end - self.first;
        while left > 0 {
            let at = cursor;
            let bytes = self.block(at)?;
            if be32(&bytes, 0) != MAGIC || be32(&bytes, 8) != whole.next_sequence {
                break;
            }
            let before = open.copies.len();
            match be32(&bytes, 4) {
                DESCRIPTOR => self.descriptor(at, &bytes, whole.next_sequence, &mut open)?,
                REVOKE => self.revokes(at, &bytes, &mut open)?,
                COMMIT => {
                    let time = be64(&bytes, COMMIT_TIME_AT);
                    if !self.is_committed(at, &bytes, &open, time, last_time)? {
                        break;
                    }
                    last_time = time;
                    self.close(std::mem::take(&mut open), &mut whole);
                }
                _ => break,
            }
            let used = 1 + (open.copies.len().saturating_sub(before)) as u32;
            left = left.saturating_sub(used);
            cursor = self.wrapped(at, used);
        }
        Ok(whole)
    }

    /// The block so many after another one, in the round.
    fn wrapped(&self, block: u32, skip: u32) -> u32 {
        let len = u64::from(self.end - self.first);
        let at = u64::from(block - self.first) + u64::from(skip);
        self.first + (at % len) as u32
    }

    fn close(&self, open: OpenTransaction, whole: &mut Transactions) {
        whole.copies.extend(open.copies);
        for block in open.revoked {
            whole.revoked.insert(block, whole.next_sequence);
        }
        whole.next_sequence = whole.next_sequence.wrapping_add(1);
    }

    /// Tells whether the last bytes of a block of the journal's own are its checksum.
    fn is_right(&self, bytes: &[u8]) -> bool {
        let tail = bytes.len() - 4;
        let sum = crc32c(crc32c(self.seed, &bytes[..tail]), &[0; 4]);
        !self.has_checksums() || sum == be32(bytes, tail)
    }

    /// Notes the blocks of data that follow a descriptor.
    fn descriptor(
        &self,
        at: u32,
        bytes: &[u8],
        sequence: u32,
        open: &mut OpenTransaction,
    ) -> Result<()> {
        if !self.is_right(bytes) {
            open.doubtful.get_or_insert(at);
        }
        let mut sum = open.sum.take().unwrap_or_else(|| CRC32.digest());
        let is_summed = self.features(at::COMPAT) & COMPAT_CHECKSUM != 0;
        if is_summed {
            sum.update(bytes);
        }
        let (is_wide, is_3) = (
            self.incompat() & WIDE != 0,
            self.incompat() & CHECKSUM_3 != 0,
        );
        let is_2 = self.incompat() & CHECKSUM_2 != 0;
        let tag_len = match (is_3, is_wide) {
            (true, _) => 16,
            (false, true) => 12 + if is_2 { 2 } else { 0 },
            (false, false) => 8 + if is_2 { 2 } else { 0 },
        };
        let end = bytes.len() - if self.has_checksums() { 4 } else { 0 };
        let mut tag_at = HEADER;
        let first = open.copies.len();
        while tag_at + tag_len <= end {
            let flags = match is_3 {
                true => be32(bytes, tag_at + 4),
                false => be32(bytes, tag_at + 4) & 0xffff,
            };
            let high = if is_wide { be32(bytes, tag_at + 8) } else { 0 };
            let block = u64::from(high) << 32 | u64::from(be32(bytes, tag_at));
            let skip = 1 + (open.copies.len() - first) as u32;
            if skip >= self.end - self.first {
                return Err(self.bad(at, "it has more blocks than the journal"));
            }
            let place = self.wrapped(at, skip);
            let copy = Copy {
                block,
                at: self.place(place)?,
                is_escaped: flags & ESCAPED != 0,
                sequence,
            };
            if is_summed || is_2 || is_3 {
                let data = self.fs.block(copy.at)?;
                sum.update(&data);
                let own = crc32c(crc32c(self.seed, &sequence.to_be_bytes()), &data);
                let is_wrong = is_3 && own != be32(bytes, tag_at + 12)
                    || is_2 && own & 0xffff != be32(bytes, tag_at + 4) >> 16;
                if is_wrong {
                    open.doubtful.get_or_insert(place);
                }
            }
            open.copies.push(copy);
            tag_at += tag_len + if flags & SAME_UUID == 0 { UUID_LEN } else { 0 };
            if flags & LAST != 0 {
                break;
            }
        }
        open.sum = Some(sum);
        Ok(())
    }

    /// Notes blocks that were given up: what was written to them before is not to be replayed.
    fn revokes(&self, at: u32, bytes: &[u8], open: &mut OpenTransaction) -> Result<()> {
        if !self.is_right(bytes) {
            open.doubtful.get_or_insert(at);
            return Ok(());
        }
        let len = if self.incompat() & WIDE != 0 { 8 } else { 4 };
        let end = be32(bytes, HEADER) as usize;
        let most = bytes.len() - if self.has_checksums() { 4 } else { 0 };
        if !(HEADER + 4..=most).contains(&end) {
            return Err(self.bad(at, format!("{end} bytes of blocks that were given up")));
        }
        for record in bytes[HEADER + 4..end].chunks_exact(len) {
            open.revoked.push(match len {
                8 => be64(record, 0),
                _ => be32(record, 0).into(),
            });
        }
        Ok(())
    }

    /// Tells whether a commit block ends a transaction that is whole; not where the log ends before
    /// it, and what follows is of an older round.
    ///
    /// # Errors
    /// [`Error::Damaged`] where blocks of it are not what they were.
    fn is_committed(
        &self,
        at: u32,
        bytes: &[u8],
        open: &OpenTransaction,
        time: u64,
        last_time: u64,
    ) -> Result<bool> {
        let stored = be32(bytes, COMMIT_CHECKSUM_AT);
        let is_right = if self.has_checksums() {
            let sum = crc32c(self.seed, &bytes[..COMMIT_CHECKSUM_AT]);
            let sum = crc32c(sum, &[0; 4]);
            crc32c(sum, &bytes[COMMIT_CHECKSUM_AT + 4..]) == stored
        } else if self.features(at::COMPAT) & COMPAT_CHECKSUM != 0 {
            let sum = open.sum.clone().unwrap_or_else(|| CRC32.digest());
            let sort = (bytes[HEADER], bytes[HEADER + 1]);
            sort == (1, 4) && sum.finalize() == stored || (sort, stored) == ((0, 0), 0)
        } else {
            true
        };
        if is_right && open.doubtful.is_none() {
            return Ok(true);
        }
        // Left from an earlier round.
        if time < last_time {
            return Ok(false);
        }
        if let Some(block) = open.doubtful {
            return Err(self.bad(block, "its checksum is wrong"));
        }
        // The last one may have been cut off in the middle of the block.
        let next = self.block(self.wrapped(at, 1))?;
        match be32(&next, 0) == MAGIC && be32(&next, 8) == be32(bytes, 8).wrapping_add(1) {
            true => Err(self.bad(at, "the checksum of the transaction is wrong")),
            false => Ok(false),
        }
    }

    /// Refuses fast commits that follow the last whole transaction: they are not replayed here.
    ///
    /// # Errors
    /// [`Error::Unfit`], [`Error::Read`].
    pub fn refuse_fast_commits(&self, next_sequence: u32) -> Result<()> {
        /// First bytes of the first of them: its kind and length, features and transaction.
        const HEAD: [u8; 4] = [9, 0, 8, 0];
        if self.incompat() & FAST_COMMIT == 0 {
            return Ok(());
        }
        // The kernel leaves one block between the round and theirs.
        let bytes = self.block(self.end + 1)?;
        let sequence = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
        match bytes[..4] == HEAD && sequence == next_sequence {
            false => Ok(()),
            true => Err(Error::Unfit(
                "the file system was not unmounted, and its journal has fast commits (feature \
                 fast_commit), which are not replayed here: mount it once, which does that, and \
                 then run `e2fsck -f`"
                    .into(),
            )),
        }
    }
}
