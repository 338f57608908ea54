//! One file per kind of kernel object: how it is stored, dumped, planned and tested.
//!
//! - [`fd`][mod@fd]: open file descriptions ([`fd::Kind`]),
//! - [`task`][mod@task]: state of processes and threads ([`task::Part`]),
//! - [`map`][mod@map]: mappings,
//! - [`cgroup`][mod@cgroup]: control groups,
//! - [`ns`][mod@ns]: namespaces that a tree has of its own ([`ns::Kind`]),
//! - [`ledger`][mod@ledger]: what else the kernel has, entry by entry,
//! - [`script`][mod@script]: the lists of system calls that they plan,
//! - [`arch`]: what of them is the processor's,
//! - [`kernel`]: what is looked up in the kernel's memory,
//! - [`callers`]: threads of a restored tree that make calls for others,
//! - [`cache`]: facts of a host that are kept.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arch;
pub mod cache;
pub mod callers;
pub mod cgroup;
mod error;
pub mod fd;
mod inherited;
pub mod kernel;
pub mod ledger;
pub mod map;
pub mod ns;
mod options;
pub mod script;
pub mod task;
#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use inherited::Inherited;
pub use options::{
    Allow, DEFAULT_GHOST_LIMIT_BYTES, ExternalMount, ExternalNamespace, ExternalPipes,
    FileValidation, NamespaceOptions,
};
