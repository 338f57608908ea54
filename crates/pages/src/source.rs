//! Where pages come from.
mod bytes;
mod object;

use abi::spans::Ranges;

pub use bytes::Bytes;
pub use object::{Object, allocated};

use crate::{Buffer, Extent, Result};

/// Pages that can be read, by several threads at once.
///
/// Pages must not change while they are read, or the caller must know that they may.
pub trait Source: Sync {
    /// Fills `buffer` with the pages of `extents`, at most 1,024 of them, back to back.
    ///
    /// # Errors
    /// Fails unless all of them were read, and names the page that was not.
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> Result<()>;

    /// Like [`Source::read`], but notes pages that are not there any more in `lost`, in ascending
    /// order, as numbers of pages from the start of `buffer`, where they leave anything.
    fn read_there(
        &self,
        extents: &[Extent],
        buffer: &mut [u8],
        lost: &mut Ranges<usize>,
    ) -> Result<()> {
        let _ = lost;
        self.read(extents, buffer)
    }

    /// A queue of reads, where the source can have many under way; it is used by one thread.
    fn queue(&self) -> Option<Box<dyn Queue + Send + '_>> {
        None
    }
}

/// Reads of a source that are under way.
pub trait Queue {
    /// How many may be under way, at least one.
    fn depth(&self) -> usize;

    /// Starts to fill a buffer with the pages of `extents`, at most 1,024 of them, back to back.
    ///
    /// # Errors
    /// Only where nothing can be read at all.
    fn start(&mut self, number: usize, extents: &[Extent], buffer: Buffer) -> Result<()>;

    /// Waits for one of those that were started, whichever comes first: its number, the buffer, and
    /// whether all of it was read. What was not is to be read by [`Source::read`], which tells why.
    ///
    /// # Errors
    /// Only where nothing can be read at all.
    fn finish(&mut self) -> Result<(usize, Buffer, bool)>;
}
