//! The journal: whether anything is in it that is not in its place yet.

use super::features::incompat;
use super::raw::u32_at;
use super::{FileSystem, Met};
use crate::bits::Bits;
use crate::{Error, ReadAt, Result};

/// What each block of a journal that is not data begins with.
const MAGIC: u32 = 0xc03b_3998;
/// Where its superblock says at which block the log starts; 0 where it is empty.
const START_AT: usize = 0x1c;
/// Kinds of superblocks.
const KINDS: [u32; 2] = [3, 4];

/// What the block begins with that tells who has the file system mounted, and its state if nobody.
const MMP_MAGIC: u32 = 0x004d_4d50;
const MMP_CLEAN: u32 = 0xff4d_4d50;

impl<S: ReadAt> FileSystem<S> {
    /// Refuses a file system that says by itself that somebody has it mounted: a copy would say so,
    /// too.
    ///
    /// # Errors
    /// [`Error::Unfit`], [`Error::Read`].
    fn refuse_in_use(&self) -> Result<()> {
        if self.sb.incompat & incompat::MMP == 0 {
            return Ok(());
        }
        let bytes = self.block(self.sb.mmp_block)?;
        match (u32_at(&bytes, 0), u32_at(&bytes, 4)) {
            (MMP_MAGIC, MMP_CLEAN) => Ok(()),
            _ => Err(Error::Unfit(format!(
                "the file system is in use, says block {} (feature mmp): unmount it to save it",
                self.sb.mmp_block
            ))),
        }
    }

    /// Refuses a file system whose journal is to be replayed, or is elsewhere and may be; gives the
    /// blocks of the log, whose bytes mean nothing.
    ///
    /// # Errors
    /// [`Error::Unfit`], [`Error::Damaged`], [`Error::Read`].
    pub fn empty_log(&self) -> Result<Bits> {
        self.refuse_in_use()?;
        if self.sb.needs_recovery() {
            let what = "the file system was not unmounted: its journal is to be replayed, which \
                        mounting it once, or `e2fsck -p`, does";
            return Err(Error::Unfit(what.into()));
        }
        let mut log = Bits::default();
        if self.sb.journal_inode == 0 {
            return Ok(log);
        }
        let journal = self.inode(self.sb.journal_inode, 0)?;
        let mut first = None;
        self.walk_blocks(&journal, &mut |met| {
            if let Met::Blocks(mapped) = met {
                first.get_or_insert(mapped);
                log.insert(mapped.range());
            }
            Ok(())
        })?;
        let bad = |block, what: &str| Error::damaged(block, "superblock of the journal", what);
        let Some(first) = first.filter(|first| first.logical == 0) else {
            return Err(bad(journal.block, "there is none"));
        };
        log.remove(first.physical..first.physical + 1);
        let bytes = self.block(first.physical)?;
        let word =
            |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if word(0) != MAGIC || !KINDS.contains(&word(4)) {
            return Err(bad(first.physical, "it has no magic number"));
        }
        if word(START_AT) != 0 {
            // The file system says that there is nothing in it; the log itself is kept then.
            return Ok(Bits::default());
        }
        Ok(log)
    }
}
