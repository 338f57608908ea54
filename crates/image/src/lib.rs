//! The image: a manifest, records and page runs, written once and checked before anything of it is
//! used.
//!
//! A [`Writer`] puts an image into a [`store::Store`]: objects with pages as they are appended,
//! and, last, a manifest with everything else. A [`Reader`] checks all that can be checked without
//! reading pages when it opens an image, and a chunk's checksum whenever it reads one.
//! docs/format.md says what the bytes are. This crate knows no resources: a [`Record`]'s payload is
//! opaque here, and of a space it knows what kind it is and how large.
//!
//! ```
//! use std::sync::Arc;
//! use image::{Facts, NewRun, Reader, Run, RunKind, Seal, SpaceId, Writer, PAGE_BYTES};
//!
//! let store = Arc::new(store::Memory::default());
//! let space = SpaceId(7);
//! let writer = Writer::create(store.clone())?;
//! writer.append(&[1; 2 * PAGE_BYTES], &[NewRun { space, first_page: 16, pages: 2 }])?;
//! writer.mark(Run { space, first_page: 18, pages: 100, kind: RunKind::Zero });
//! let id = writer.seal(Seal { durable: false, facts: Facts::default() })?;
//!
//! let reader = Reader::open(&*store)?;
//! assert_eq!(reader.id(), id);
//! let mut pages = [0; 3 * PAGE_BYTES];
//! reader.read_pages(space, 16, &mut pages)?;
//! assert_eq!((pages[0], pages[2 * PAGE_BYTES]), (1, 0));
//! # Ok::<(), image::Error>(())
//! ```
#![forbid(unsafe_code)]

mod amend;
mod ancestors;
mod base;
mod cache;
mod checksum;
mod chunk;
mod clear;
mod codec;
mod compact;
mod companion;
mod dedup;
mod draft;
mod error;
#[cfg(any(test, feature = "forge"))]
pub mod forge;
#[cfg(test)]
mod forged;
mod header;
mod index;
mod manifest;
mod marks;
mod merge;
mod order;
mod page;
mod parent;
mod parts;
mod places;
mod raw;
mod reader;
mod resolver;
mod run;
mod spaces;
mod stored;
pub mod strict;
mod table;
mod unused;
mod verify;
mod writer;

use std::fmt;

pub use amend::amend;
pub use ancestors::{Ancestor, current, join};
pub use base::Base;
pub use cache::Cache;
pub use chunk::{CHUNK_MAX_PAGES, CHUNK_PAGES, ChunkId};
pub use clear::remove;
pub use codec::{Codec, Compression};
pub use companion::{Companion, CompanionError};
pub use dedup::{DedupSummary, check_dedup, dedup};
pub use error::{Blame, Error, Result};
pub use manifest::{Facts, Record};
pub use marks::children;
pub use merge::{MergeSummary, merge};
pub use parent::Link;
pub use parts::{ANCESTORS_MAX, PARTS_MAX};
pub use reader::{Reader, Space};
pub use resolver::RawExtent;
pub use run::{Location, NewRun, PAGE_BYTES, Part, Run, RunKind, SPACE_MAX_PAGES, SpaceId};
pub use spaces::{Granule, NewSpace, SpaceKind};
pub use writer::{Seal, Writer};

/// The format version that is written, and the newest that is read.
pub const FORMAT_VERSION: u32 = 2;

/// The name of the object that makes a store an image.
pub const MANIFEST_NAME: &str = "manifest.img";

/// An image's identity: 128 random bits, printed as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageId(pub [u8; 16]);

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageId({self})")
    }
}
