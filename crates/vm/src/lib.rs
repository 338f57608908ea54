//! Virtual machines and their memory as images.
//!
//! [`qemu`] saves machines that run under QEMU, and starts them again. Of other monitors,
//! [`import()`] makes an image, or a layer over one, of a snapshot's memory file, [`export()`]
//! makes the file of an image again, [`serve()`] serves an image to monitors. The memory is one
//! space of the kind [`image::SpaceKind::Block`], whose pages have the numbers that they have in
//! the file; what the monitor saved besides is a record that nobody here looks into.
#![forbid(unsafe_code)]

mod error;
mod export;
mod import;
mod mapping;
mod place;
pub mod qemu;
mod records;
mod server;
mod sparse;

pub use error::{Error, Result};
pub use export::{ExportOptions, ExportSummary, export};
pub use import::{ImportOptions, ImportSummary, import};
pub use server::{ErrorPolicy, ExitPolicy, Otlp, Prefetch, ServeOptions, serve};
