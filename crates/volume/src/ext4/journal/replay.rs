//! A file system as it is after its journal was replayed, without a write to it.

use std::collections::BTreeMap;

use super::log::{FAST_COMMIT, Log, MAGIC, at};
use crate::ext4::FileSystem;
use crate::ext4::checksum::crc32c;
use crate::ext4::features::incompat;
use crate::ext4::superblock;
use crate::{Error, ReadAt, Result};

/// Replacement of a block's bytes.
#[derive(Clone, Debug)]
enum Patch {
    /// In the journal, perhaps without the four bytes that they begin with.
    Copy { at: u64, is_escaped: bool },
    /// Here.
    Bytes(Vec<u8>),
}

/// Blocks that are to be read from elsewhere.
#[derive(Clone, Debug, Default)]
pub struct Patches {
    block_bytes: u32,
    blocks: BTreeMap<u64, Patch>,
}

impl Patches {
    /// Tells whether there is nothing to replay.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// How many blocks.
    pub(super) fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Puts what belongs there into `bytes` that were read from `at_bytes` on.
    fn apply(&self, source: &dyn ReadAt, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let size = u64::from(self.block_bytes);
        let end_bytes = at_bytes + bytes.len() as u64;
        for (block, patch) in self.blocks.range(at_bytes / size..end_bytes.div_ceil(size)) {
            let own = self.bytes(source, patch)?;
            let start = (block * size).max(at_bytes);
            let end = ((block + 1) * size).min(end_bytes);
            let part = &own[(start - block * size) as usize..(end - block * size) as usize];
            bytes[(start - at_bytes) as usize..(end - at_bytes) as usize].copy_from_slice(part);
        }
        Ok(())
    }

    fn bytes(&self, source: &dyn ReadAt, patch: &Patch) -> Result<Vec<u8>> {
        match patch {
            Patch::Bytes(bytes) => Ok(bytes.clone()),
            Patch::Copy { at, is_escaped } => {
                let mut bytes = vec![0; self.block_bytes as usize];
                source.read_at(at * u64::from(self.block_bytes), &mut bytes)?;
                if *is_escaped {
                    bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
                }
                Ok(bytes)
            }
        }
    }

    /// Changes a block.
    fn edit<S: ReadAt>(
        &mut self,
        fs: &FileSystem<S>,
        block: u64,
        edit: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut bytes = match self.blocks.get(&block) {
            Some(patch) => self.bytes(fs.source(), patch)?,
            None => fs.block(block)?,
        };
        edit(&mut bytes);
        self.blocks.insert(block, Patch::Bytes(bytes));
        Ok(())
    }
}

/// Returns the journal's blocks of a file system that was not unmounted.
///
/// # Errors
/// Those of [`Log::read`].
pub fn patches<S: ReadAt>(fs: &FileSystem<S>, log: &Log<'_, S>) -> Result<Patches> {
    let whole = log.read()?;
    log.refuse_fast_commits(whole.next_sequence)?;
    let mut patches = Patches {
        block_bytes: fs.superblock().block_bytes,
        blocks: BTreeMap::new(),
    };
    for copy in whole.to_replay() {
        if copy.block >= fs.superblock().blocks {
            let what = format!("a copy of block {}, which there is not", copy.block);
            return Err(Error::damaged(copy.at, "journal", what));
        }
        let patch = Patch::Copy {
            at: copy.at,
            is_escaped: copy.is_escaped,
        };
        patches.blocks.insert(copy.block, patch);
    }
    log::info!(
        "the journal is replayed: {} blocks, up to transaction {}",
        patches.count(),
        whole.next_sequence
    );
    let in_block = |at_bytes: u64| {
        let size = u64::from(patches.block_bytes);
        (at_bytes / size, (at_bytes % size) as usize)
    };
    let (block, start) = in_block(superblock::AT_BYTES);
    patches.edit(fs, block, |bytes| {
        mark_replayed(&mut bytes[start..start + superblock::LEN]);
    })?;
    let sequence = whole.next_sequence.wrapping_add(1);
    patches.edit(fs, log.superblock_at, |bytes| {
        mark_empty(bytes, sequence, log.has_checksums());
    })?;
    Ok(patches)
}

/// Has the superblock say that there is nothing to replay.
fn mark_replayed(superblock: &mut [u8]) {
    const INCOMPAT_AT: usize = 0x60;
    superblock[INCOMPAT_AT] &= !(incompat::RECOVER as u8);
    if superblock::has_checksum(superblock) {
        let sum = crc32c(u32::MAX, &superblock[..superblock::CHECKSUM_AT]);
        superblock[superblock::CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Has the journal's superblock say that it is empty, and which transaction is the next.
fn mark_empty(superblock: &mut [u8], sequence: u32, has_checksum: bool) {
    let mut put = |at: usize, value: u32| {
        superblock[at..at + 4].copy_from_slice(&value.to_be_bytes());
    };
    put(at::START, 0);
    put(at::SEQUENCE, sequence);
    if has_checksum {
        put(at::CHECKSUM, 0);
    }
    // Fast commits were looked for; the kernel sets this again before it makes any.
    superblock[at::INCOMPAT + 3] &= !(FAST_COMMIT as u8);
    if has_checksum {
        let sum = crc32c(u32::MAX, &superblock[..at::END]);
        superblock[at::CHECKSUM..at::CHECKSUM + 4].copy_from_slice(&sum.to_be_bytes());
    }
}

/// A source of bytes, some of which are replaced.
#[derive(Debug)]
pub struct ReplayedSource<S> {
    source: S,
    patches: Patches,
}

impl<S: ReadAt> ReplayedSource<S> {
    /// Reads `source` with the blocks of its journal in their places.
    pub const fn new(source: S, patches: Patches) -> Self {
        Self { source, patches }
    }

    /// How many blocks are read from elsewhere.
    pub fn count(&self) -> u64 {
        self.patches.count()
    }

    /// Puts them into bytes that were read from `at_bytes` on.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn patch(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.patches.apply(&self.source, at_bytes, bytes)
    }
}

impl<S: ReadAt> ReadAt for ReplayedSource<S> {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read_at(&self, at_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        self.source.read_at(at_bytes, bytes)?;
        self.patch(at_bytes, bytes)
    }
}
