//! What machines wanted, kept in the image that they are resumed from.

use std::sync::{Mutex, MutexGuard};

use image::Record;
use serve::Wanted;

use super::{Shared, lock};
use crate::records::{WorkingSet, tag};
use crate::{Error, Result};

/// The working set of an image that is served.
#[derive(Debug)]
pub(crate) struct Kept(Mutex<WorkingSet>);

impl Kept {
    /// What the image has of it.
    pub fn new(set: Option<WorkingSet>) -> Self {
        Self(Mutex::new(set.unwrap_or_default()))
    }

    /// What machines wanted, in order.
    pub fn wanted(&self) -> Vec<Wanted> {
        lock(&self.0).wanted()
    }

    /// Keeps the image's manifest from being changed by this server.
    pub fn lock(&self) -> MutexGuard<'_, WorkingSet> {
        lock(&self.0)
    }

    /// Adds what another machine wanted, and puts it into the image.
    pub fn add(&self, shared: &Shared, wanted: &[Wanted]) {
        let mut set = self.lock();
        if !set.merge(wanted) {
            return;
        }
        match store(shared, &set) {
            Ok(()) => log::info!("{} ranges are wanted", set.pages.len()),
            Err(error) => log::warn!("what is wanted is not kept: {}", super::live::told(&error)),
        }
    }
}

fn store(shared: &Shared, set: &WorkingSet) -> Result<()> {
    let store = shared.options.images.open().map_err(Error::Store)?;
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
