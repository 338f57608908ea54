//! Dumps and fills the memory of real tasks.
#![forbid(unsafe_code)]
#![allow(missing_docs)] // a test has no users

mod child;
mod dump;
mod live;
mod restore;
mod scan;
mod track;
