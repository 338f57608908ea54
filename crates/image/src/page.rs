//! The unit of an image.

/// The size of a page, the unit of every run.
pub const PAGE_BYTES: usize = 4096;
