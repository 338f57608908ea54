//! The bytes of a file, and where they are.

use std::ops::Range;

use crate::ext4::{BlockItem, FileExtent, FileSystem, Inode};
use crate::{ReadAt, Result};

/// The bytes of one file.
pub struct Bytes<'a, S> {
    fs: &'a FileSystem<S>,
    /// How many it has, with those of holes.
    pub size: u64,
    inline: Option<Vec<u8>>,
    mapped: Vec<FileExtent>,
}

impl<'a, S: ReadAt> Bytes<'a, S> {
    /// Finds out where they are.
    pub fn of(fs: &'a FileSystem<S>, inode: &Inode) -> Result<Self> {
        let mut this = Self {
            fs,
            size: inode.size_bytes(),
            inline: None,
            mapped: Vec::new(),
        };
        if inode.is_inline() {
            this.inline = Some(fs.inline_data(inode)?);
            return Ok(this);
        }
        fs.walk_blocks(inode, &mut |met| {
            if let BlockItem::Blocks(mapped) = met {
                this.mapped.extend((!mapped.is_unwritten).then_some(mapped));
            }
            Ok(())
        })?;
        Ok(this)
    }

    fn block_bytes(&self) -> u64 {
        self.fs.superblock().block_bytes.into()
    }

    /// The extents that end behind a place.
    fn from(&self, at: u64) -> &[FileExtent] {
        let block = at / self.block_bytes();
        let first = self
            .mapped
            .partition_point(|one| one.logical + one.blocks <= block);
        &self.mapped[first..]
    }

    /// The first place from `at` on that has bytes.
    pub fn next(&self, at: u64) -> Option<u64> {
        let start = match &self.inline {
            Some(_) => Some(at),
            None => self
                .from(at)
                .first()
                .map(|one| (one.logical * self.block_bytes()).max(at)),
        };
        start.filter(|start| *start < self.size)
    }

    /// Returns the ranges with bytes within a range; the others are zero.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let end = range.end.min(self.size);
        let inline = self.inline.iter().map(|_| 0..self.size);
        let mapped = self.from(range.start).iter().map(|one| {
            let start = one.logical * self.block_bytes();
            start..start + one.blocks * self.block_bytes()
        });
        let all = inline.chain(mapped);
        let cut = all.map(move |one| one.start.max(range.start)..one.end.min(end));
        cut.take_while(|one| !one.is_empty())
    }

    /// Fills `bytes` with those from `at` on; holes, and what is behind the end, are zero.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        if let Some(inline) = &self.inline {
            let there = inline.get(at as usize..).unwrap_or_default();
            let len = there.len().min(bytes.len());
            bytes[..len].copy_from_slice(&there[..len]);
            return Ok(());
        }
        let end = at + bytes.len() as u64;
        for one in self.from(at) {
            let first = one.logical * self.block_bytes();
            let start = first.max(at);
            let stop = (first + one.blocks * self.block_bytes()).min(end);
            if start >= stop {
                break;
            }
            let part = &mut bytes[(start - at) as usize..(stop - at) as usize];
            let from = one.physical * self.block_bytes() + (start - first);
            self.fs.source().read_at(from, part)?;
        }
        Ok(())
    }
}
