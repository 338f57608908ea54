//! Pages from a source through one pipe to a sink.
//!
//! [`drain()`] reads pages from a [`Source`], drops those that are zero and stores the others in an
//! image, and [`fill()`] brings verified pages from an image to a [`Sink`]. What the pages belong
//! to is the caller's business, be it a task, a virtual machine or a disk: here they are
//! [`Extent`]s, consecutive pages of a space and the address at which a source or sink has them.
//!
//! ```
//! use std::sync::Arc;
//! use abi::Addr;
//! use image::{Reader, Seal, SpaceId, Writer};
//! use pages::Extent;
//! use pages::source::Bytes;
//!
//! // Four pages, the third of them zero.
//! let mut bytes = vec![7_u8; 4 * 4096];
//! bytes[2 * 4096..3 * 4096].fill(0);
//!
//! let extent = Extent { space: SpaceId(1), first_page: 0, at: Addr(0), pages: 4 };
//! let store = Arc::new(store::Memory::default());
//! let writer = Writer::create(store.clone())?;
//! let drained = pages::drain(&Bytes(bytes), &[extent], &writer, &|_| ())?;
//! assert_eq!((drained.stored_pages, drained.zero_pages), (3, 1));
//! writer.seal(Seal::default())?;
//!
//! let reader = Reader::open(&*store)?;
//! let placed = pages::place(&reader, &[extent])?;
//! assert_eq!(placed.iter().map(|piece| piece.pages).sum::<u32>(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod buffer;
mod changed;
mod drain;
mod equal;
mod error;
mod extent;
mod fill;
mod find_equal;
mod place;
mod readahead;
pub mod sink;
pub mod source;
pub mod workers;

pub use buffer::Buffer;
pub use changed::changed;
pub use drain::{Drain, DrainSummary, drain, drain_all, drain_to_runs, sort_out};
pub use equal::EqualIndex;
pub use error::{Error, Result};
pub use extent::Extent;
pub use fill::{FillSummary, fill};
pub use find_equal::{EqualPages, find_equal, wanted_bytes};
pub use place::{Placement, place};
pub use sink::Sink;
pub use source::Source;
pub use workers::threads;

/// The most pieces that a source reads, or a sink takes, with one call.
pub const PIECES_MAX: usize = 1024;
