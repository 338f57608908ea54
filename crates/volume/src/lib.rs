//! Volumes with ext4 as images.
//!
//! [`ext4::FileSystem`] reads a file system from whatever has its bytes ([`ReadAt`]): a device, a
//! file, an image. [`dump()`] makes an image of what is in use, of one instant also where the file
//! system is mounted, [`restore()`] writes it back, [`Files`]
//! reads files straight out of it. Nothing here knows of processes.
#![forbid(unsafe_code)]

mod attach;
mod bad_pages;
mod bytes;
mod companion;
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
mod page_sums;
mod place;
mod read_at;
mod records;
mod restore;
mod shares;
mod source;
mod survey;
mod tables;
mod tape;
#[cfg(test)]
mod testing;

pub use attach::{AttachedVolume, attach};
pub use bad_pages::BadBlock;
pub use companion::{CompanionDump, CompanionVolume};
pub use diff::{Difference, Fate, diff};
pub use dump::{DumpOptions, DumpSummary, Progress, Stops, dump};
pub use dumpdates::Level;
pub use error::{Error, Result};
pub use extract::{ExtractSummary, Omission, extract};
pub use files::{FileEntry, Files};
pub use grow::grow;
pub use mount::{MountedImage, mount};
pub use place::has_volume;
pub use read_at::{ImageSpace, OpenFile, ReadAt};
pub use restore::{RestoreOptions, RestoreSummary, restore};
pub use source::IoContext;
pub use store::Images;
pub use tape::{
    ExportOptions, ExportSummary, ImportOptions, ImportSummary, export, export_to_file, import,
};

/// The permissions of files with a volume's contents, which has secrets.
const FILE_MODE: u32 = 0o600;
