//! States of tasks and threads that the ledger says are kept, by its samples: a new one is in the
//! storm at once.
use crate::samples::made::{Kind, made};
use crate::samples::{self, Owner, Place, Sample};

use super::Generator;
use super::descriptors::End;
use super::state::{State, add, fork};
use crate::storm::step::{Action, FileKind};

/// How many threads of a task seeds start for what only such can have.
const HELPERS: u64 = 2;

impl Generator {
    /// Changes any state of a task's that lets it go on, or one of a helper's.
    pub(super) fn change_own(&mut self, task: u8) {
        let can_help = !self.known(task).is_cloned && self.tasks.len() >= self.tasks_wanted;
        let by_helper = can_help && self.chance.once_in(2);
        let mut wanted: Vec<&Sample> = samples::own().collect();
        wanted.retain(|sample| match sample.place {
            Place::Helpers => by_helper,
            Place::Children => task != 0,
            Place::Anywhere => sample.is_mild,
        });
        let sample = self.chance.pick(&wanted);
        let helper = by_helper.then(|| self.chance.below(HELPERS) as u8);
        if by_helper {
            self.known(task).threads += 1;
        }
        let first = self.chance.below(1 << 16) as u16;
        self.change(task, sample, first, helper);
    }

    /// Makes any descriptor in any state that the samples know.
    pub(super) fn make_any(&mut self, task: u8) {
        let all: Vec<&Kind> = made().collect();
        let sample = self.chance.pick(&all);
        let number = self.chance.below(sample.values.all().len() as u64) as u16;
        self.make(task, sample, number);
    }

    fn make(&mut self, task: u8, sample: &Kind, number: u16) {
        let Some(slot) = self.new_slots(2) else {
            return;
        };
        // What is about a task stays with it: in flight it is refused.
        let kind = match sample.name {
            "pidfd" => FileKind::OfTask,
            "bpf-map" => FileKind::Map,
            _ => FileKind::Made,
        };
        let end = End {
            kind,
            origin: slot,
            other: slot,
            opener: task,
            nature: None,
        };
        self.known(task).held.insert(slot, end);
        let what = sample.name.to_owned();
        self.step(task, Action::Make { slot, what, number });
    }

    /// Changes a state.
    pub(super) fn change(&mut self, task: u8, sample: &Sample, first: u16, helper: Option<u8>) {
        let change = Action::Change {
            what: sample.name.to_owned(),
            first,
            helper,
        };
        self.step(task, change);
    }
}

/// Who is in a state: a task, or a helper of one.
type Holder = (u8, Option<u8>);

/// How many values that add up one subject has.
const TOGETHER: usize = 40;

/// The tasks and helpers of a subject, in the order in which they come.
fn holders(sample: &Sample) -> &'static [Holder] {
    const TASKS: &[Holder] = &[(0, None), (1, None), (2, None)];
    const CHILDREN: &[Holder] = &[(1, None), (2, None), (2, Some(0)), (2, Some(1))];
    const HELPERS: &[Holder] = &[(2, Some(0)), (2, Some(1)), (2, Some(2))];
    const ALL: &[Holder] = &[(0, None), (1, None), (2, None), (2, Some(0)), (2, Some(1))];
    match (sample.place, sample.owner) {
        (Place::Helpers, _) => HELPERS,
        (Place::Children, _) => CHILDREN,
        (Place::Anywhere, Owner::Process) => TASKS,
        (Place::Anywhere, Owner::Thread) => ALL,
    }
}

/// Subjects that together are in all states that the samples have: a root, its child and the child
/// of that, and threads of the last, each with other values. Who is forked has its parent's.
pub(super) fn states(all: &mut Vec<State>) {
    for sample in samples::own() {
        let holders = holders(sample);
        let count = sample.values.all().len();
        let together = if sample.adds { TOGETHER } else { holders.len() };
        for (number, values) in (0..).zip((0..count).step_by(together)) {
            // Of what does not add up, each has one.
            let end = if sample.adds { count } else { usize::MAX };
            let values: Vec<usize> = (values..end.min(values + together)).collect();
            let begin = |generator: &mut Generator| {
                generator.has_sharing = false;
                generator.tasks_wanted = 1;
                for task in 0..3 {
                    if task > 0 {
                        fork(generator, task - 1);
                    }
                    let its = holders.iter().enumerate();
                    for (at, holder) in its.filter(|(_, holder)| holder.0 == task) {
                        let its = values.iter().skip(at).step_by(holders.len());
                        for value in its {
                            let first = (value % count) as u16;
                            generator.change(task, sample, first, holder.1);
                        }
                    }
                }
            };
            let go_on = |generator: &mut Generator| {
                for (task, helper) in holders.iter().step_by(2) {
                    let first = generator.chance.below(1 << 16) as u16;
                    generator.change(*task, sample, first, *helper);
                }
            };
            add(all, format!("own-{}-{number}", sample.name), begin, go_on);
        }
    }
}

/// How many descriptors one subject has.
const DESCRIPTORS: usize = 12;

/// Subjects that together have a descriptor in each state that the samples know. A child has those
/// of its root as well.
pub(super) fn made_states(all: &mut Vec<State>) {
    for sample in made() {
        let count = sample.values.all().len();
        for (number, first) in (0..).zip((0..count).step_by(DESCRIPTORS)) {
            let begin = |generator: &mut Generator| {
                generator.tasks_wanted = 1;
                for value in first..count.min(first + DESCRIPTORS) {
                    generator.make(0, sample, value as u16);
                }
                fork(generator, 0);
            };
            let go_on = |generator: &mut Generator| {
                (0..4).for_each(|_| {
                    let task = generator.any_task();
                    generator.use_descriptor(task);
                });
                generator.make_any(1);
            };
            add(all, format!("made-{}-{number}", sample.name), begin, go_on);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::storm::generate::states as all_states;

    #[test]
    fn a_descriptor_is_made_in_each_state() {
        let all = all_states();
        for sample in made() {
            let makes = |step: &crate::storm::step::Step| match &step.action {
                Action::Make { what, number, .. } if what == sample.name => Some(*number),
                _ => None,
            };
            let its = all.iter().flat_map(|state| &state.steps);
            let numbers: BTreeSet<u16> = its.filter_map(makes).collect();
            let count = sample.values.all().len() as u16;
            assert!(
                (0..count).all(|number| numbers.contains(&number)),
                "{}",
                sample.name
            );
        }
    }

    #[test]
    fn each_value_of_each_sample_is_set() {
        let all = all_states();
        for sample in samples::own() {
            let its = all.iter().flat_map(|state| &state.steps);
            let values: BTreeSet<u16> = its
                .filter_map(|step| match &step.action {
                    Action::Change { what, first, .. } if what == sample.name => Some(*first),
                    _ => None,
                })
                .collect();
            let count = sample.values.all().len() as u16;
            assert!(count > 0, "{}", sample.name);
            for value in 0..count {
                assert!(values.contains(&value), "{} {value}", sample.name);
            }
        }
    }
}
