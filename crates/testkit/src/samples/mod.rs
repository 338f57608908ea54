//! Values for states that the lists call kept: the storm sets these, reads them back, and compares.
//!
//! - [`own`]: states of a thread and of its process,
//! - [`made`]: descriptors that are made in a state.
//!
//! A test insists that each kept entry has a sample, or names what else makes it.

mod attributes;
pub mod made;
mod mapped;
mod rights;
mod sample;
mod scheduling;
mod signals;
mod timers;

pub use sample::{Owner, Place, Sample, Values};
pub use signals::{ALWAYS_BLOCKED, may_tell_of_stops};

#[cfg(test)]
mod tests;

/// All states of threads and processes.
pub fn own() -> impl Iterator<Item = &'static Sample> {
    let all = [
        attributes::ATTRIBUTES,
        mapped::MAPPED,
        rights::RIGHTS,
        scheduling::SCHEDULING,
        signals::SIGNALS,
        timers::TIMERS,
    ];
    all.into_iter().flatten()
}

/// The state of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Sample> {
    own().find(|sample| sample.name == name)
}
