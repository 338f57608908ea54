//! Words of each task of a subject in memory that all of them share: its rounds, and what it found
//! to be wrong.
use rustix::mm::{MapFlags, ProtFlags};

use crate::calls::Mapping;
use crate::subjects::{Control, Failure, Question, not_understood};
use crate::wait;

/// A cache line of its own for each task.
const SLOT_BYTES: usize = 64;
const ROUNDS: usize = 0;
const WRONG: usize = 8;
/// Where a subject's own words begin.
const OWN: usize = 16;

/// The words of all tasks; to be made before they are forked.
pub(crate) struct Slots {
    memory: Mapping,
    tasks: usize,
}

impl Slots {
    pub fn new(tasks: usize) -> std::io::Result<Self> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let memory = Mapping::anonymous(tasks * SLOT_BYTES, both, MapFlags::SHARED)?;
        Ok(Self { memory, tasks })
    }

    /// Adds a round of `task`.
    pub fn add_round(&self, task: usize) {
        self.memory.add(task * SLOT_BYTES + ROUNDS, 1);
    }

    /// Says that `task` has found something wrong.
    pub fn add_wrong(&self, task: usize) {
        self.memory.add(task * SLOT_BYTES + WRONG, 1);
    }

    /// Word `number` of a task's own.
    pub fn own(&self, task: usize, number: usize) -> u64 {
        self.memory.load(own_at(task, number))
    }

    /// Sets word `number` of a task's own.
    pub fn set_own(&self, task: usize, number: usize, value: u64) {
        self.memory.store(own_at(task, number), value);
    }

    /// Waits until every task has made more than `rounds`.
    pub fn wait_rounds(&self, rounds: u64) {
        let what = format!("more than {rounds} rounds of every task");
        wait::wait_until(&what, wait::SOON, || self.rounds() > rounds);
    }

    /// Answers `rounds`, those of the slowest task, and `check`, "right" or who was wrong; has
    /// `answer` answer the rest.
    pub fn serve(
        &self,
        control: Control,
        mut answer: impl FnMut(&Question) -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        control.serve(|question| match question.verb.as_str() {
            "rounds" => Ok(self.rounds().to_string()),
            "check" => Ok(self.check()),
            _ => answer(question),
        })
    }

    /// Does the same for a subject that answers nothing else.
    pub fn serve_alone(&self, control: Control) -> Result<(), Failure> {
        self.serve(control, not_understood)
    }

    /// How often the task that looked least has looked.
    pub fn rounds(&self) -> u64 {
        let rounds = (0..self.tasks).map(|task| self.memory.load(task * SLOT_BYTES + ROUNDS));
        rounds.min().unwrap_or(0)
    }

    /// "right", or who was wrong.
    pub fn check(&self) -> String {
        let wrong = |task: &usize| self.memory.load(task * SLOT_BYTES + WRONG) != 0;
        let wrong = (0..self.tasks).find(wrong);
        wrong.map_or("right".into(), |task| format!("wrong in task {task}"))
    }
}

fn own_at(task: usize, number: usize) -> usize {
    let at = OWN + number * 8;
    assert!(at < SLOT_BYTES, "a word of the task's own");
    task * SLOT_BYTES + at
}
