//! Volumes with ext4 as images.
//!
//! [`ext4::FileSystem`] reads a file system from whatever has its bytes ([`ReadAt`]): a device, a
//! file, an image. [`dump()`] makes an image of what is in use, of one instant also where the file
//! system is mounted, [`restore()`] writes it back, [`Files`]
//! reads files straight out of it. Nothing here knows of processes.
#![forbid(unsafe_code)]

mod attach;
mod bad;
mod beside;
mod bytes;
mod device;
mod diff;
mod dump;
mod dumpdates;
mod error;
pub mod ext4;
mod extract;
mod files;
mod grow;
mod inside;
mod metadata;
mod mount;
mod mounted;
mod pace;
mod place;
mod read_at;
mod records;
mod restore;
mod seen;
mod shares;
mod source;
mod survey;
mod tables;
mod tape;
#[cfg(test)]
mod testing;

pub use attach::{Attached, attach};
pub use bad::Bad;
pub use beside::{Beside, UnderWay};
pub use diff::{Difference, Fate, diff};
pub use dump::{DumpOptions, Dumped, Progress, Stops, dump};
pub use dumpdates::Level;
pub use error::{Error, Result};
pub use extract::{Extracted, LeftOut, extract};
pub use files::{Files, Listed};
pub use grow::grow;
pub use mount::{Mounted, mount};
pub use place::has_volume;
pub use read_at::{InImage, Opened, ReadAt};
pub use restore::{RestoreOptions, Restored, restore};
pub use source::IoContext;
pub use store::Images;
pub use tape::{ExportOptions, Exported, ImportOptions, Imported, export, export_to_file, import};

/// The permissions of files with a volume's contents, which has secrets.
const FILE_MODE: u32 = 0o600;
