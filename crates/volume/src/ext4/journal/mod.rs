//! The journal: whether anything is in it that is not in its place yet, and what.

mod log;
mod replay;
#[cfg(test)]
mod tests;

use abi::bits::Bits;

use super::features::incompat;
use super::raw::u32_at;
use super::{BlockItem, FileSystem};
use crate::{Error, ReadAt, Result};

pub use replay::{Patches, ReplayedSource};

use log::Log;

/// Magic number of the block that tells who has the file system mounted.
const MMP_MAGIC: u32 = 0x004d_4d50;
const MMP_CLEAN: u32 = 0xff4d_4d50;

impl<S: ReadAt> FileSystem<S> {
    /// Refuses a file system that says by itself that somebody has it mounted: a copy would say so,
    /// too.
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
        let Some(log) = self.log()? else {
            return Ok(Bits::default());
        };
        match log.is_empty() {
            true => Ok(log.blocks()),
            // The file system says that there is nothing in it; the log itself is kept then.
            false => Ok(Bits::default()),
        }
    }

    /// What is in the journal and not in its place: all blocks that are to be read from elsewhere,
    /// so that the file system is what it would be after the journal was replayed. None where there
    /// is nothing to replay.
    ///
    /// # Errors
    /// [`Error::Unfit`] where the journal is elsewhere or has what is not replayed here,
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn patches(&self) -> Result<Patches> {
        self.refuse_in_use()?;
        if !self.sb.needs_recovery() {
            return Ok(Patches::default());
        }
        let Some(log) = self.log()? else {
            let what = "the file system was not unmounted, and its journal, which is to be \
                        replayed, is on another device: mount it once, or run `e2fsck -p`";
            return Err(Error::Unfit(what.into()));
        };
        replay::patches(self, &log)
    }

    /// The journal of this file system, where it is in it.
    fn log(&self) -> Result<Option<Log<'_, S>>> {
        if self.sb.journal_inode == 0 {
            return Ok(None);
        }
        let journal = self.inode(self.sb.journal_inode, 0)?;
        let mut mapped = Vec::new();
        self.walk_blocks(&journal, &mut |met| {
            if let BlockItem::Blocks(one) = met {
                mapped.push(one);
            }
            Ok(())
        })?;
        Log::open(self, journal.block, mapped).map(Some)
    }
}
