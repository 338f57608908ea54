//! What of a file system is to be saved, and what has changed since another time.

use crate::bits::Bits;
use crate::ext4::{FileSystem, Time};
use crate::tables::{Cursor, Part, Piece, Pieces, to_ns};
use crate::{ReadAt, Result};
use image::PAGE_BYTES;

/// A change that comes so soon after another one may have the same time stamp: the kernel's clock
/// for them has steps of up to 10 ms.
const STEP_NS: i64 = 100_000_000;

/// What was found.
#[derive(Debug, Default)]
pub struct Survey {
    /// Blocks in use.
    pub used: Bits,
    /// Those whose bytes mean something.
    pub live: Bits,
    /// What the inodes say.
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
        let layout = fs.layout()?;
        let mut written = Bits::default();
        let mut this = Self {
            used: layout.used,
            instant,
            unchanged: vec![Bits::default(); earlier.len()],
            ..Self::default()
        };
        let mut at = Cursor::default();
        let cursors = earlier.iter().map(|_| Cursor::default());
        let mut cursors = cursors.collect::<Vec<_>>();
        fs.walk_tables(&mut |table| {
            let piece = Piece::of(fs, table, known.find(table.first, &mut at))?;
            for (range, part) in piece.extents() {
                match part {
                    Part::Data | Part::Tree => written.insert(range.clone()),
                    Part::Meaningless => dead.insert(range.clone()),
                    Part::Log => {}
                }
            }
            let all = earlier.iter().zip(&mut this.unchanged).zip(&mut cursors);
            for ((then, unchanged), cursor) in all {
                let was = then.pieces.find(table.first, cursor);
                let before = settled_ns(then.instant);
                if let Some((was, before)) = was.zip(before) {
                    piece.unchanged(was, before, &mut |range| unchanged.insert(range));
                }
            }
            this.pieces.push(piece);
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
}

/// When what an instant shows of an inode must have been its last change: what was changed just
/// before the instant may have been changed after it as well, and have the same time.
fn settled_ns(instant: Time) -> Option<i64> {
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
