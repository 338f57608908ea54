//! Volumes with ext4 as images.
//!
//! [`ext4::FileSystem`] reads a file system from whatever has its bytes ([`ReadAt`]): a device, a
//! file, an image. [`dump()`] makes an image of what is in use, of one instant also where the file
//! system is mounted, [`restore()`] writes it back, [`Files`]
//! reads files straight out of it. Nothing here knows of processes.
#![forbid(unsafe_code)]

mod bad;
mod bits;
mod device;
mod diff;
mod dump;
mod error;
pub mod ext4;
mod extract;
mod files;
mod mount;
mod mounted;
mod pace;
mod place;
mod read_at;
mod records;
mod restore;
mod source;
mod survey;
mod tables;
#[cfg(test)]
mod testing;

pub use bad::Bad;
pub use bits::Bits;
pub use diff::{Difference, Fate, diff};
pub use dump::{DumpOptions, Dumped, Progress, Stops, dump};
pub use error::{Blame, Error, Result};
pub use extract::{Extracted, LeftOut, extract};
pub use files::{Files, Listed};
pub use mount::{Mounted, mount};
pub use read_at::{InImage, Opened, ReadAt};
pub use restore::{RestoreOptions, Restored, restore};
pub use source::IoContext;
