//! The family of mappings: what a range of addresses refers to.
//!
//! - [`listing`]: what the kernel says of them,
//! - [`memory`]: a process's address space in an image,
//! - [`layout`]: the calls that lay it out again,
//! - [`vdso`]: the kernel's code in it, and how another kernel's is replaced.

pub mod layout;
pub mod listing;
pub mod memory;
pub mod vdso;
