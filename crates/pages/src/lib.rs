//! Pages from a source through one pipe to a sink.
//!
//! [`scan()`] finds the pages that a task has for itself, [`drain()`] reads them from a [`Source`],
//! drops those that are zero and stores the others in an image, and [`fill()`] brings verified
//! pages from an image to a [`Sink`]. What the pages belong to is the caller's business: here they
//! are [`Extent`]s, consecutive pages of a space and the address at which a source or sink has
//! them.
//!
//! ```
//! use std::sync::Arc;
//! use abi::Addr;
//! use image::{Reader, Seal, SpaceId, Writer};
//! use pages::{Extent, TaskMemory};
//!
//! // Four pages of this very process, the third of them zero.
//! let mut memory = vec![7_u8; 5 * 4096];
//! let start = Addr(memory.as_ptr() as u64 + 4095).page_start();
//! let first = (start.0 - memory.as_ptr() as u64) as usize;
//! memory[first + 2 * 4096..first + 3 * 4096].fill(0);
//!
//! let extent = Extent { space: SpaceId(1), first_page: start.page(), at: start, pages: 4 };
//! let source = TaskMemory::new(std::process::id() as i32);
//! let store = Arc::new(store::Memory::default());
//! let writer = Writer::create(store.clone())?;
//! let drained = pages::drain(&source, &[extent], &writer, &|_| ())?;
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
mod crew;
pub mod dirty;
mod drain;
mod equal;
mod error;
mod extent;
mod fill;
pub mod live;
mod maps;
mod place;
pub mod scan;
pub mod shared;
pub mod sink;
mod source;
pub mod track;
mod unite;

pub use crew::threads;
pub use drain::{Drained, drain, drain_all, drain_apart, drain_beside, drain_once};
pub use equal::Equals;
pub use error::{Error, Result};
pub use extent::Extent;
pub use fill::{Filled, fill};
pub use maps::PageMaps;
pub use place::{Placed, place};
pub use scan::scan;
pub use shared::{Kin, Shared};
pub use sink::Sink;
pub use source::{Source, TaskMemory};
pub use unite::{United, unite, wanted_bytes};
