//! Where pages go.

mod object;

use abi::{Addr, Span};

pub use object::Object;

use crate::Result;

/// A sink of verified pages, from several threads at once.
pub trait Sink: Sync {
    /// Takes pages, at most 1,024 pieces in ascending order: whole pages for consecutive addresses.
    ///
    /// # Errors
    /// Fails unless all of them were taken, and names the place that was not filled.
    fn fill(&self, pieces: &[(Addr, &[u8])]) -> Result<()>;

    /// How many fills are wanted under way at a time, in ascending order, of a sink that waits for
    /// what it was given to be done: as long as one waits, others read and verify. None where a
    /// thread for each processor does most, and blocks are to be prepared.
    fn depth(&self) -> Option<usize> {
        None
    }

    /// Learns that all pages of `blocks`, which start and end on 2 MiB boundaries, will come next.
    ///
    /// # Errors
    /// Only what makes filling impossible.
    fn prepare(&self, blocks: &[Span]) -> Result<()> {
        let _ = blocks;
        Ok(())
    }
}
