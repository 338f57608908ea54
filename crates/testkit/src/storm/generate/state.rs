//! One small subject, and how it is made.
use super::{Generator, PAUSES};
use crate::storm::step::Step;

/// A small subject.
#[derive(Clone, Debug)]
pub struct State {
    /// What it is about, once each.
    pub name: String,
    /// What it does.
    pub steps: Vec<Step>,
}

/// Makes a subject: `first` before the first pause, `next` before each of the others.
pub(super) fn add(
    all: &mut Vec<State>,
    name: String,
    first: impl FnOnce(&mut Generator),
    mut next: impl FnMut(&mut Generator),
) {
    let mut generator = Generator::new(1_000_000 + all.len() as u64);
    generator.has_tcp = true;
    first(&mut generator);
    for _ in 1..PAUSES {
        generator.pause();
        next(&mut generator);
    }
    let steps = generator.end();
    all.push(State { name, steps });
}

/// Forks one more task than was wanted.
pub(super) fn fork(generator: &mut Generator, parent: u8) {
    generator.tasks_wanted += 1;
    generator.fork(parent);
}
