//! What of a file system is to be saved, and what has changed since another time.

use std::ops::Range;

use image::PAGE_BYTES;
use xxhash_rust::xxh3::Xxh3;

use crate::bits::Bits;
use crate::ext4::{BAD_BLOCKS, FileSystem, Inode, Kind, Met, RESIZE, ROOT, Time};
use crate::{ReadAt, Result};

/// A change that comes so soon after another one may have the same time stamp: the kernel's clock
/// for them has steps of up to 10 ms.
const STEP_NS: u64 = 100_000_000;

/// What was found.
#[derive(Debug, Default)]
pub struct Survey {
    /// Blocks in use.
    pub used: Bits,
    /// Those whose bytes mean something.
    pub live: Bits,
    /// Inodes in use, by number, each with a checksum of what it says and which blocks it has.
    inodes: Vec<(u32, u64)>,
    /// When it was made.
    pub instant: Time,
    /// For each of the earlier surveys: live blocks that are as they were then.
    pub unchanged: Vec<Bits>,
}

impl Survey {
    /// Looks at the whole file system, of which nothing may change meanwhile. `instant` is the time
    /// before which everything has happened that it shows.
    ///
    /// # Errors
    /// [`crate::Error::Damaged`], [`crate::Error::Read`], [`crate::Error::Unfit`] where the journal
    /// is to be replayed.
    pub fn new<S: ReadAt>(fs: &FileSystem<S>, instant: Time, earlier: &[&Self]) -> Result<Self> {
        let mut dead = fs.empty_log()?;
        let layout = fs.layout()?;
        let mut written = Bits::default();
        let mut this = Self {
            used: layout.used,
            instant,
            unchanged: vec![Bits::default(); earlier.len()],
            ..Self::default()
        };
        let mut blocks = Vec::new();
        fs.walk_inodes(&mut |inode| {
            blocks.clear();
            let mut hash = Xxh3::new();
            hash.update(&inode.identity());
            if has_blocks(&inode) {
                fs.walk_blocks(&inode, &mut |met| {
                    note(&mut hash, met);
                    match met {
                        Met::Tree(block) => written.insert(block..block + 1),
                        Met::Blocks(mapped) if mapped.is_unwritten => dead.insert(mapped.range()),
                        Met::Blocks(mapped) => blocks.push(mapped.range()),
                    }
                    Ok(())
                })?;
            }
            let sum = hash.digest();
            this.inodes.push((inode.number, sum));
            let sb = fs.superblock();
            match inode.number {
                BAD_BLOCKS => blocks.iter().for_each(|range| dead.insert(range.clone())),
                number if number == sb.journal_inode => {}
                _ => blocks
                    .iter()
                    .for_each(|range| written.insert(range.clone())),
            }
            let is_ordinary = inode.number == ROOT || inode.number >= sb.first_inode;
            if is_ordinary && !sb.special_inodes.contains(&inode.number) {
                this.compare(&inode, sum, earlier, &blocks);
            }
            Ok(())
        })?;
        // Damage must not make anything vanish: what anybody has written counts.
        written.add(&layout.system);
        dead.add(&layout.meaningless);
        dead.subtract(&written);
        this.live = this.used.clone();
        this.live.subtract(&dead);
        for unchanged in &mut this.unchanged {
            unchanged.intersect(&this.live);
        }
        Ok(this)
    }

    /// Notes blocks of an inode that is as it was.
    fn compare(&mut self, inode: &Inode, sum: u64, earlier: &[&Self], blocks: &[Range<u64>]) {
        for (then, unchanged) in earlier.iter().zip(&mut self.unchanged) {
            let at = then.inodes.binary_search_by_key(&inode.number, |one| one.0);
            let is_same = at.is_ok_and(|at| then.inodes[at].1 == sum);
            // What was changed just before the other survey may have been changed after it as well,
            // and have the same time.
            if is_same && before(inode.changed(), inode.time_step_ns(), then.instant) {
                blocks
                    .iter()
                    .for_each(|range| unchanged.insert(range.clone()));
            }
        }
    }
}

/// Whether `time`, which has steps of its own, is before `instant` by more than the clock's step.
fn before(time: Time, step_ns: u64, instant: Time) -> bool {
    let ns = |time: Time| i128::from(time.s) * 1_000_000_000 + i128::from(time.ns);
    ns(time) + i128::from(step_ns + STEP_NS) < ns(instant)
}

/// Whether the words of an inode's map name blocks.
fn has_blocks(inode: &Inode) -> bool {
    let is_file = matches!(inode.kind(), Kind::Regular | Kind::Directory | Kind::Link);
    let is_short_link = inode.kind() == Kind::Link && inode.short_target().is_some();
    let is_own = inode.number == BAD_BLOCKS;
    (is_file || is_own) && !inode.is_inline() && !is_short_link && inode.number != RESIZE
}

fn note(hash: &mut Xxh3, met: Met) {
    let words = match met {
        Met::Tree(block) => [u64::MAX, block, 0, 0],
        Met::Blocks(one) => [
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

/// The pages that have any of these blocks.
pub fn pages_of(blocks: &Bits, block_bytes: u32) -> Bits {
    let (block, page) = (u64::from(block_bytes), PAGE_BYTES as u64);
    let mut pages = Bits::default();
    for range in blocks.ranges() {
        pages.insert(range.start * block / page..(range.end * block).div_ceil(page));
    }
    pages
}

/// The pages of which everything is as it was in an earlier survey: those of blocks that are
/// unchanged since, and have no others.
pub fn unchanged_pages(now: &Survey, then: &Survey, number: usize, block_bytes: u32) -> Bits {
    let mut changed = now.live.clone();
    changed.subtract(&now.unchanged[number]);
    let mut gone = then.live.clone();
    gone.subtract(&now.live);
    let mut pages = pages_of(&now.unchanged[number], block_bytes);
    pages.subtract(&pages_of(&changed, block_bytes));
    pages.subtract(&pages_of(&gone, block_bytes));
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_just_before_an_instant_may_not_be_all() {
        let time = |s, ns| Time { s, ns };
        let instant = time(100, 500_000_000);
        assert!(before(time(100, 300_000_000), 1, instant));
        assert!(!before(time(100, 450_000_000), 1, instant));
        assert!(!before(time(101, 0), 1, instant));
        // Of inodes without nanoseconds, all of the second is one.
        assert!(!before(time(100, 0), 1_000_000_000, instant));
        assert!(before(time(99, 0), 1_000_000_000, instant));
    }
}
