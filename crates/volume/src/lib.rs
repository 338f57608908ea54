//! Volumes with ext4 as images.
//!
//! [`ext4::FileSystem`] reads a file system from whatever has its bytes ([`ReadAt`]): a device, a
//! file, an image. Nothing here knows of processes.
#![forbid(unsafe_code)]

mod bits;
mod error;
pub mod ext4;
mod read_at;
#[cfg(test)]
mod testing;

pub use bits::Bits;
pub use error::{Blame, Error, Result};
pub use read_at::{InImage, Opened, ReadAt};
