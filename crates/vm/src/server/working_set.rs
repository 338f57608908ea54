//! What machines wanted, kept in the image that they are resumed from.

use std::sync::Mutex;

use image::Record;
use serve::PageRange;

use super::{SharedState, lock};
use crate::Result;
use crate::records::{WorkingSet, tag};

/// The working set of an image that is served.
#[derive(Debug)]
pub(crate) struct ServedWorkingSet(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    set: WorkingSet,
    /// How many want the image's manifest to stay as it is.
    held: usize,
    /// True if the image is to have what is not in it yet.
    waits: bool,
}

/// Keeps this server from changing the image's manifest: that is done when the last one goes.
pub(crate) struct ManifestHold<'a>(&'a SharedState);

impl Drop for ManifestHold<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.working_set.0);
        state.held -= 1;
        if state.held == 0 && std::mem::take(&mut state.waits) {
            keep(self.0, &state.set);
        }
    }
}

impl ServedWorkingSet {
    /// Takes the image's working set.
    pub fn new(set: Option<WorkingSet>) -> Self {
        Self(Mutex::new(State {
            set: set.unwrap_or_default(),
            ..State::default()
        }))
    }

    /// Returns the pages that machines wanted, in order.
    pub fn wanted(&self) -> Vec<PageRange> {
        lock(&self.0).set.wanted()
    }

    /// Keeps the image's manifest as it is for a while; `shared` is the server that this is of.
    pub fn hold<'a>(&self, shared: &'a SharedState) -> ManifestHold<'a> {
        lock(&self.0).held += 1;
        ManifestHold(shared)
    }

    /// Adds what another machine wanted, and puts it into the image.
    pub fn add(&self, shared: &SharedState, wanted: &[PageRange]) {
        let mut state = lock(&self.0);
        if !state.set.merge(wanted) {
            return;
        }
        match state.held {
            0 => keep(shared, &state.set),
            _ => state.waits = true,
        }
    }
}

fn keep(shared: &SharedState, set: &WorkingSet) {
    match store(shared, set) {
        Ok(()) => log::info!("{} ranges are wanted", set.pages.len()),
        Err(error) => log::warn!("what is wanted is not kept: {}", sys::causes::line(&error)),
    }
}

fn store(shared: &SharedState, set: &WorkingSet) -> Result<()> {
    let store = shared.options.images.open().map_err(image::Error::Place)?;
    image::amend(
        &*store,
        shared.image.id(),
        false,
        |mut records: Vec<Record>| {
            records.retain(|record| record.tag != tag::WORKING_SET);
            records.push(set.record());
            records
        },
    )?;
    Ok(())
}
