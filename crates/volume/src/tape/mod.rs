//! The stream that dump(8) writes and restore(8) reads.
//!
//! Records of 1 KiB: a header of the dump; two maps of inodes, those in use (by which restore(8)
//! learns what is gone) and those that are in the stream; then, by number, all directories and
//! after them all other files, each a header with up to 512 flags, which say whether a KiB of the
//! file follows or is a hole, and those KiB; headers that continue a file; extended attributes as
//! files of their own behind theirs; at the end, headers that say so. Every header has a checksum;
//! contents have none.

mod attributes;
mod export;
mod folder;
mod import;
mod record;
mod stream;
mod tree;
mod tree_builder;

pub use export::{ExportOptions, ExportSummary, export, export_to_file};
pub use import::{ImportOptions, ImportSummary, import};

#[cfg(test)]
mod tests;
