//! Sets of pages in memory that another process may go on from.
use std::sync::Arc;

use abi::bits::{AtomicBits, words_of};
use sys::words::Words;

/// A set of the numbers of pages below a limit.
pub(crate) type Bits = AtomicBits<Arc<Words>>;

/// No number of `0..limit`, in memory of its own.
///
/// # Panics
/// Where there is none.
pub(crate) fn none(limit: u64) -> Bits {
    let words = Words::own(words_of(limit).max(1)).expect("there is memory");
    Bits::new(Arc::new(words), 0, limit)
}
