//! Steps that change what a task and its threads have of their own, by the ledger's samples.
use std::collections::btree_map::Entry;

use crate::samples::made::made;
use crate::samples::{self, Owner, Place};

use super::descriptors::{DescriptorEnds, OpenDescriptor};
use super::side_thread::Helper;
use super::told::{line, may_read, of_thread};
use super::{StepResult, Task};
use crate::storm::step::{FileKind, HELPERS};
use crate::subjects::Failure;

impl Task {
    /// Changes a state of the task's first thread, or of a helper, which is started if need be.
    pub(super) fn change(&mut self, what: &str, first: usize, helper: Option<u8>) -> StepResult {
        let Some(sample) = samples::find(what).filter(|one| may_read(one, self.is_filtered)) else {
            return Ok(());
        };
        match (helper, sample.place) {
            (None, Place::Helpers) => Ok(()),
            (_, Place::Children) if self.number == 0 => Ok(()),
            // The C library knows nothing of who was made by clone(2).
            (Some(_), _) if self.numbered.is_cloned => Ok(()),
            (Some(number), _) if number < HELPERS => {
                if let Entry::Vacant(place) = self.helpers.entry(number) {
                    place.insert(Helper::start(number)?);
                }
                Ok(self.helpers[&number].change(sample, first)?)
            }
            (Some(_), _) => Ok(()),
            (None, _) => {
                // The kernel may not have it, or no other value.
                let _ = sample.change(first);
                Ok(())
            }
        }
    }

    /// Makes a descriptor in a state that the ledger's samples know.
    pub(super) fn make_known(&mut self, slot: u16, what: &str, number: u16) {
        let Some((at, sample)) = (0..).zip(made()).find(|(_, made)| made.name == what) else {
            return;
        };
        let values = sample.values.all();
        let value = values[usize::from(number) % values.len()];
        // The kernel or the host may not have it.
        let ends = (sample.make)(&self.path_of(slot), value).unwrap_or_default();
        for (slot, file) in (slot..).zip(ends) {
            let ends = DescriptorEnds {
                kind: FileKind::Made,
                origin: slot,
                out: None,
                into: None,
                made: Some(at),
            };
            self.held.insert(slot, OpenDescriptor { file, ends });
        }
    }

    /// Tells whether it has other threads than its first one.
    pub(super) fn has_threads(&self) -> bool {
        !self.waits.is_empty() || !self.helpers.is_empty()
    }

    /// What it has of its own, and what its helpers have, a line each.
    pub(super) fn describe_own(&self) -> Result<Vec<String>, Failure> {
        let process = samples::own().filter(|sample| sample.owner == Owner::Process);
        let process = process.filter(|sample| may_read(sample, self.is_filtered));
        let process = process.filter_map(|sample| line("process", sample));
        let mut told: Vec<String> = process.chain(of_thread(self.is_filtered)).collect();
        for (number, helper) in &self.helpers {
            let lines = helper.describe(self.is_filtered)?;
            told.extend(lines.iter().map(|line| format!("helper {number}: {line}")));
        }
        Ok(told)
    }
}
