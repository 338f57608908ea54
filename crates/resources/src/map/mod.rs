//! The family of mappings: what a range of addresses refers to.
//!
//! - [`listing`]: what the kernel says of them,
//! - [`memory`]: a process's address space in an image,
//! - [`pages`]: where its pages come from,
//! - [`layout`]: the calls that lay it out again,
//! - [`inherit`]: what is left out of them, as a parent made it,
//! - [`neighbours`]: which of them are mapped by one call,
//! - [`policy`]: from which nodes its memory comes,
//! - [`promise`]: how much memory the kernel promises at once, and for what it does,
//! - [`read`]: those of them that read pages,
//! - [`attach`]: those of them that attach System V shared memory,
//! - [`registered`]: what userfaultfds of the tree are told of it,
//! - [`placed`]: those of them that the kernel places or writes to by itself,
//! - [`room`]: addresses that are free between them,
//! - [`aio`]: rings of asynchronous I/O, and the contexts that they belong to,
//! - [`vdso`]: the kernel's code in it, and how another kernel's is replaced.

pub mod aio;
mod attach;
pub mod inherit;
pub mod layout;
pub mod listing;
pub mod memory;
mod neighbours;
pub mod pages;
pub mod placed;
pub mod policy;
mod promise;
mod read;
pub mod registered;
mod room;
pub mod vdso;
