//! What inodes say, piece by piece of their tables: what follows from bytes that are as they were
//! is not worked out again.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::ext4::{BAD_BLOCKS, BlockItem, FileSystem, Inode, Kind, RESIZE, ROOT, Table, Time};
use crate::{ReadAt, Result};

/// Consecutive inodes.
#[derive(Debug)]
pub struct Piece {
    /// The number of the first that might be in use.
    first: u32,
    /// A checksum of the bytes from which all this follows.
    sum: u64,
    /// True if it follows from other blocks as well.
    has_trees: bool,
    inodes: Vec<UsedInode>,
    extents: Vec<(Range<u64>, Part)>,
}

/// An inode in use.
#[derive(Debug)]
struct UsedInode {
    number: u32,
    /// How many of the extents are its own and of those before.
    extents_end: u32,
    /// A checksum of what it says and which blocks it has.
    sum: u64,
    /// From when on it has not changed, in nanoseconds since 1970, by the steps of its clock. None
    /// where that is unknown.
    still_since_ns: Option<i64>,
}

/// Use of an inode's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bytes of a file, a directory, a link.
    Data,
    Tree,
    /// Without any that mean something.
    Meaningless,
    /// The journal's.
    Log,
}

/// All pieces of a file system, in the order of their inodes.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    all: Vec<Arc<Piece>>,
    /// The first inode of each, where they are found without a look at them.
    firsts: Vec<u32>,
}

impl Pieces {
    /// Looks at the inodes of a file system that may change meanwhile: what cannot be true is left
    /// out, and the rest helps a survey only as far as its bytes are the same then.
    pub fn ahead<S: ReadAt>(fs: &FileSystem<S>, known: &Self) -> Result<Self> {
        let mut all = Vec::new();
        fs.walk_tables(0..fs.groups(), &mut |table| {
            all.extend(Piece::of(fs, table, known.find(table.first)));
            Ok(())
        })?;
        Ok(Self::of(all))
    }

    /// All pieces, which come in whatever order.
    pub fn of(mut all: Vec<Arc<Piece>>) -> Self {
        all.sort_unstable_by_key(|piece| piece.first);
        let firsts = all.iter().map(|piece| piece.first).collect();
        Self { all, firsts }
    }

    /// Tells whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The piece that begins with an inode.
    pub fn find(&self, first: u32) -> Option<&Arc<Piece>> {
        let at = self.firsts.binary_search(&first);
        at.ok().map(|at| &self.all[at])
    }
}

impl Piece {
    /// Looks at inodes; `known` is what was found at the same place before.
    pub fn of<S: ReadAt>(
        fs: &FileSystem<S>,
        table: &Table<'_>,
        known: Option<&Arc<Self>>,
    ) -> Result<Arc<Self>> {
        let sum = xxh3_64_with_seed(table.raw, table.used.into());
        if let Some(known) = known.filter(|known| known.sum == sum && !known.has_trees) {
            return Ok(Arc::clone(known));
        }
        let mut this = Self {
            first: table.first,
            sum,
            has_trees: false,
            inodes: Vec::with_capacity(table.used.count_ones() as usize),
            extents: Vec::new(),
        };
        fs.inodes_of(table, &mut |inode| this.add(fs, &inode))?;
        Ok(Arc::new(this))
    }

    fn add<S: ReadAt>(&mut self, fs: &FileSystem<S>, inode: &Inode) -> Result<()> {
        let sb = fs.superblock();
        let own = match inode.number {
            BAD_BLOCKS => Part::Meaningless,
            number if number == sb.journal_inode => Part::Log,
            _ => Part::Data,
        };
        let mut hash = Xxh3::new();
        hash.update(&inode.identity());
        if has_blocks(inode) {
            fs.walk_blocks(inode, &mut |met| {
                note(&mut hash, met);
                let (range, part) = match met {
                    BlockItem::Tree(block) => (block..block + 1, Part::Tree),
                    BlockItem::Blocks(mapped) if mapped.is_unwritten => {
                        (mapped.range(), Part::Meaningless)
                    }
                    BlockItem::Blocks(mapped) => (mapped.range(), own),
                };
                self.has_trees |= part == Part::Tree;
                self.extents.push((range, part));
                Ok(())
            })?;
        }
        // What else is in the file system's own inodes changes without a trace in them.
        let is_ordinary = inode.number == ROOT || inode.number >= sb.first_inode;
        let is_ordinary = is_ordinary && !sb.special_inodes.contains(&inode.number);
        self.inodes.push(UsedInode {
            number: inode.number,
            extents_end: self.extents.len() as u32,
            sum: hash.digest(),
            still_since_ns: still_since_ns(inode).filter(|_| is_ordinary),
        });
        Ok(())
    }

    /// All blocks that its inodes have.
    pub fn extents(&self) -> &[(Range<u64>, Part)] {
        &self.extents
    }

    /// Gives the blocks of inodes that say what they said in `then`, and were last changed before
    /// `before_ns`.
    pub fn unchanged(&self, then: &Self, before_ns: i64, each: &mut dyn FnMut(Range<u64>)) {
        let is_same = std::ptr::eq(self, then);
        let mut start = 0;
        for found in &self.inodes {
            let extents = &self.extents[start..found.extents_end as usize];
            start = found.extents_end as usize;
            let is_old = found.still_since_ns.is_some_and(|since| since < before_ns);
            let was = || then.inodes.iter().find(|one| one.number == found.number);
            if is_old && (is_same || was().is_some_and(|was| was.sum == found.sum)) {
                let data = extents.iter().filter(|extent| extent.1 == Part::Data);
                data.for_each(|extent| each(extent.0.clone()));
            }
        }
    }
}

/// A point in time in nanoseconds, if it is between 1677 and 2262.
pub fn to_ns(time: Time) -> Option<i64> {
    let ns = time.s.checked_mul(1_000_000_000)?;
    ns.checked_add(time.ns.into())
}

/// From when on an inode has not changed, by the steps of its clock.
pub fn still_since_ns(inode: &Inode) -> Option<i64> {
    let step_ns = i64::try_from(inode.time_step_ns()).ok()?;
    to_ns(inode.changed())?.checked_add(step_ns)
}

/// Tells whether the words of an inode's map name blocks.
fn has_blocks(inode: &Inode) -> bool {
    let is_file = matches!(inode.kind(), Kind::Regular | Kind::Directory | Kind::Link);
    let is_short_link = inode.kind() == Kind::Link && inode.short_target().is_some();
    let is_own = inode.number == BAD_BLOCKS;
    (is_file || is_own) && !inode.is_inline() && !is_short_link && inode.number != RESIZE
}

fn note(hash: &mut Xxh3, met: BlockItem) {
    let words = match met {
        BlockItem::Tree(block) => [u64::MAX, block, 0, 0],
        BlockItem::Blocks(one) => [
            one.logical,
            one.physical,
            one.blocks,
            one.is_unwritten.into(),
        ],
    };
    words
        .iter()
        .for_each(|word| hash.update(&word.to_le_bytes()));
}
