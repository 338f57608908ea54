//! The memory of tasks: which pages there are, what was written, and how it is read and filled.
//!
//! [`scan()`] finds the pages that a task has for itself, [`track`] those that it has written,
//! [`CowSharing`] those that it has in common with another, and [`live`] copies those of one
//! instant while tasks run. [`TaskMemory`] is a source and [`sink`] has the sinks of the pipe in
//! `pages`.
//!
//! ```
//! use abi::{Addr, Span};
//! use memory::{PageMaps, TaskMemory, scan::{self, Area}};
//! use pages::{Extent, Source};
//! use sys::process::Process;
//!
//! // Four pages of this very process.
//! let own = Process::own();
//! let bytes = vec![7_u8; 5 * 4096];
//! let start = Addr(bytes.as_ptr() as u64 + 4095).page_start();
//! let area = Area { span: Span::new(start, 4 * 4096), file: false, apart: false };
//! let found = scan::scan(&own, &[area], &mut PageMaps::default())?;
//! assert_eq!(found[0].private, [area.span]);
//!
//! let extent = Extent { space: image::SpaceId(1), first_page: 0, at: start, pages: 4 };
//! let mut read = vec![0; 4 * 4096];
//! TaskMemory::new(&own).read(&[extent], &mut read)?;
//! assert!(read.iter().all(|byte| *byte == 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod dirty;
mod error;
pub mod live;
mod maps;
pub mod scan;
pub mod shared;
pub mod sink;
mod source;
mod states;
pub mod track;

pub use error::{Error, Result};
pub use maps::PageMaps;
pub use scan::scan;
pub use shared::{CowSharing, SharedPages};
pub use source::TaskMemory;
pub use states::{States, states};

// What one call of the kernel takes is what a source and a sink promise to.
const _: () = assert!(pages::PIECES_MAX <= sys::vm::PIECES_MAX);
