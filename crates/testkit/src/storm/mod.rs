//! Subjects that nobody thought of: made from a seed, dumped, restored, compared, shrunk.
//!
//! A seed becomes a list of [`step::Step`]s ([`generate::steps`]), plain data that can be kept as
//! text. The subject `storm` makes them ([`crate::subjects`]), each task knowing what its memory
//! must hold and what its descriptors must answer. A [`trial::Trial`] has it dumped and restored
//! at every pause, and [`shrink::shrink`] finds the steps of a failing list that matter.
pub mod generate;
mod ledger;
mod memory;
pub mod shrink;
pub mod step;
mod task;
pub mod trial;
pub mod workers;

pub(crate) use task::serve;
