//! The memory of tasks, filled from outside.
mod memory;
mod missing;

pub use memory::Memory;
pub use missing::MissingPages;
