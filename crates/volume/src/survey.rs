//! What of a file system is to be saved, and what has changed since another time.

use std::ops::Range;
use std::sync::Arc;

use abi::bits::Bits;
use image::PAGE_BYTES;

use crate::ext4::{FileSystem, Layout, Time};
use crate::tables::{Part, Piece, Pieces, to_ns};
use crate::{ReadAt, Result, shares};

/// A change that comes so soon after another one may have the same time stamp: the kernel's clock
/// for them has steps of up to 10 ms.
const STEP_NS: i64 = 100_000_000;

/// The survey of a file system.
#[derive(Debug, Default)]
pub struct Survey {
    /// Blocks in use.
    pub used: Bits,
    /// Those whose bytes mean something.
    pub live: Bits,
    /// Those of the file system's own, in places that follow from the superblock and descriptors.
    pub system: Bits,
    /// How many blocks of inodes the bitmaps say are free; they are in use all the same.
    pub marked_free: u64,
    /// Checksums of the inodes.
    pub pieces: Pieces,
    /// When it was made.
    pub instant: Time,
    /// For each of the earlier surveys: live blocks that are as they were then.
    pub unchanged: Vec<Bits>,
}

impl Survey {
    /// Looks at the whole file system, of which nothing may change meanwhile. `instant` is the time
    /// before which everything has happened that it shows; `known` is what inodes of this file
    /// system said a little earlier.
    ///
    /// # Errors
    /// [`crate::Error::Damaged`], [`crate::Error::Read`], [`crate::Error::Unfit`] where the journal
    /// is to be replayed.
    pub fn new<S: ReadAt>(
        fs: &FileSystem<S>,
        instant: Time,
        earlier: &[&Self],
        known: &Pieces,
    ) -> Result<Self> {
        let mut dead = fs.empty_log()?;
        let new = || PartialSurvey::new(earlier.len());
        let add = |share: &mut PartialSurvey, groups| share.add(fs, groups, earlier, known);
        let mut shares = shares::of_groups(fs, !known.is_empty(), new, add)?.into_iter();
        let mut all = shares.next().unwrap_or_else(new);
        shares.for_each(|share| all.join(share));
        let (mut layout, mut written) = (all.layout, all.written);
        // A bitmap may be older than what it is about, as after a crash without a journal: what an
        // inode has is read through that, and e2fsck(8) mends the bitmap.
        let marked_free = layout.note_owned(&all.owned);
        let mut this = Self {
            instant,
            marked_free,
            unchanged: all.unchanged,
            pieces: Pieces::of(all.pieces),
            ..Self::default()
        };
        layout.finish();
        // Damage must not make anything vanish: what anybody has written counts.
        written.add(&layout.system);
        dead.add(&all.dead);
        dead.add(&layout.meaningless);
        dead.subtract(&written);
        this.live = layout.used.clone();
        this.live.subtract(&dead);
        for unchanged in &mut this.unchanged {
            unchanged.intersect(&this.live);
        }
        this.used = layout.used;
        this.system = layout.system;
        Ok(this)
    }
}

/// The survey of some groups.
#[derive(Default)]
struct PartialSurvey {
    layout: Layout,
    /// Blocks that inodes have.
    owned: Bits,
    /// Those that somebody has written.
    written: Bits,
    /// Those of inodes without bytes that mean something.
    dead: Bits,
    pieces: Vec<Arc<Piece>>,
    /// As [`Survey::unchanged`].
    unchanged: Vec<Bits>,
}

impl PartialSurvey {
    fn new(earlier: usize) -> Self {
        Self {
            unchanged: vec![Bits::default(); earlier],
            ..Self::default()
        }
    }

    /// Adds what another one has.
    fn join(&mut self, other: Self) {
        self.layout.used.add(&other.layout.used);
        self.layout.system.add(&other.layout.system);
        self.layout.meaningless.add(&other.layout.meaningless);
        self.owned.add(&other.owned);
        self.written.add(&other.written);
        self.dead.add(&other.dead);
        self.pieces.extend(other.pieces);
        for (own, unchanged) in self.unchanged.iter_mut().zip(&other.unchanged) {
            own.add(unchanged);
        }
    }

    /// Adds what some groups have.
    fn add<S: ReadAt>(
        &mut self,
        fs: &FileSystem<S>,
        groups: Range<u32>,
        earlier: &[&Survey],
        known: &Pieces,
    ) -> Result<()> {
        fs.add_layout(groups.clone(), &mut self.layout)?;
        fs.walk_tables(groups, &mut |table| {
            let piece = Piece::of(fs, table, known.find(table.first))?;
            for (range, part) in piece.extents() {
                self.owned.insert(range.clone());
                match part {
                    Part::Data | Part::Tree => self.written.insert(range.clone()),
                    Part::Meaningless => self.dead.insert(range.clone()),
                    Part::Log => {}
                }
            }
            for (then, unchanged) in earlier.iter().zip(&mut self.unchanged) {
                let was = then.pieces.find(table.first);
                let before = settled_ns(then.instant);
                if let Some((was, before)) = was.zip(before) {
                    piece.unchanged(was, before, &mut |range| unchanged.insert(range));
                }
            }
            self.pieces.push(piece);
            Ok(())
        })
    }
}

/// When what an instant shows of an inode must have been its last change: what was changed just
/// before the instant may have been changed after it as well, and have the same time.
pub fn settled_ns(instant: Time) -> Option<i64> {
    to_ns(instant)?.checked_sub(STEP_NS)
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
    use testkit::volumes::{make, populate, run};

    use super::*;

    #[test]
    fn changes_just_before_an_instant_may_not_be_all() {
        let time = |s, ns| Time { s, ns };
        let settled = settled_ns(time(100, 500_000_000)).unwrap();
        assert!(to_ns(time(100, 300_000_000)).unwrap() < settled);
        assert!(to_ns(time(100, 450_000_000)).unwrap() > settled);
        assert_eq!(to_ns(time(1 << 34, 0)), None);
    }

    #[test]
    fn what_is_known_saves_nothing_but_work() {
        let folder = tempfile::tempdir().unwrap();
        let (tree, file) = (folder.path().join("tree"), folder.path().join("fs"));
        std::fs::create_dir(&tree).unwrap();
        populate(&tree, false);
        make(&file, "64M", &[], Some(&tree));
        let open = || FileSystem::open(std::fs::read(&file).unwrap()).unwrap();
        let instant = Time {
            s: 9_000_000_000,
            ns: 0,
        };
        let nothing = Pieces::default();
        let first = Survey::new(&open(), instant, &[], &nothing).unwrap();
        // A file is gone, and another one has other blocks.
        let name = file.to_str().unwrap();
        for command in ["rm few/one", "rm odd", "write /etc/passwd other"] {
            run("debugfs", &["-w", "-R", command, name]);
        }
        let alone = Survey::new(&open(), instant, &[&first], &nothing).unwrap();
        let helped = Survey::new(&open(), instant, &[&first], &first.pieces).unwrap();
        assert_eq!(alone.used, helped.used);
        assert_eq!(alone.live, helped.live);
        assert_eq!(alone.unchanged, helped.unchanged);
        assert!(helped.unchanged[0].count() > 700);
        assert_ne!(first.live, helped.live);
    }
}
