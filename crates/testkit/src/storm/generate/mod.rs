//! From a seed to steps.
mod descriptors;
mod memory;
mod numbered;
mod own;
mod sockets;
mod state;
mod states;

use std::collections::BTreeMap;

use descriptors::End;
pub use state::State;
pub use states::states;

use super::memory::Memory;
use super::step::{ALL_SHARES, Action, Backing, OBJECTS, SHARES, Step, TASKS, Wait};
use crate::chance::Chance;

/// How often the tree is dumped and restored.
const PAUSES: usize = 3;
/// The most pages that are written to, in small, middle and large seeds. Not yet above 8 MiB, where
/// pages are filled from outside, and not over mappings that differ in little.
const BUDGETS: [u32; 3] = [300, 900, 1900];

/// What the generator knows of a task.
#[derive(Clone, Debug, Default)]
struct TaskModel {
    memory: Memory,
    /// Objects that it has open, with their pages.
    objects: BTreeMap<u8, u32>,
    /// What it has open, by name.
    held: BTreeMap<u16, End>,
    /// Sets of semaphores that it knows, and its contexts.
    sets: Vec<u8>,
    /// Segments that it has attached, with their pages.
    segments: Vec<(u8, u16)>,
    contexts: u8,
    /// What it may share with others, and whether it can have no threads.
    shares: u8,
    is_cloned: bool,
    threads: usize,
    parent: u8,
    is_alive: bool,
}

/// A seed on its way to steps.
struct Generator {
    chance: Chance,
    steps: Vec<Step>,
    tasks: Vec<TaskModel>,
    next_object: u8,
    next_slot: u16,
    next_set: u8,
    next_segment: u8,
    /// How many programs of 32 bits were started.
    programs: u8,
    /// What lies in each mailbox.
    mail: BTreeMap<u16, Vec<End>>,
    /// Of 100 steps, how many concern descriptors.
    descriptors: u64,
    has_tcp: bool,
    has_owners: bool,
    /// Of 100 other steps, how many concern what has numbers.
    numbered: u64,
    has_sharing: bool,
    /// How many pages may still be written, and how many mapped.
    budget_pages: u32,
    room_pages: u32,
    /// How many tasks are wanted.
    tasks_wanted: usize,
}

/// One in how many seeds is about a root whose first thread has ended.
const ONE_WITHOUT_LEADER: u64 = 7;

/// The steps of a seed: always the same ones.
pub fn steps(seed: u64) -> Vec<Step> {
    let mut generator = Generator::new(seed);
    if seed % ONE_WITHOUT_LEADER == 3 {
        generator.step(0, Action::EndLeader);
    }
    let first = 15 + generator.chance.below(60) as usize;
    generator.add(first);
    for _ in 1..PAUSES {
        generator.pause();
        // What was restored must be able to go on.
        let more = generator.chance.below(12) as usize;
        generator.add(more);
    }
    generator.end()
}

impl Generator {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::with(seed);
        let size = chance.pick(&[0, 0, 0, 0, 1, 1, 2]);
        let budget_pages = BUDGETS[size];
        let tasks_wanted = chance.pick(&[1, 2, 2, 3, 3, 4, 5, 7, 10]);
        let root = TaskModel {
            is_alive: true,
            ..TaskModel::default()
        };
        Self {
            steps: Vec::new(),
            tasks: vec![root],
            next_object: 0,
            next_slot: 0,
            next_set: 0,
            next_segment: 0,
            programs: 0,
            mail: BTreeMap::new(),
            descriptors: chance.pick(&[0, 20, 40, 70]),
            has_tcp: chance.once_in(6),
            has_owners: chance.once_in(3),
            numbered: chance.pick(&[0, 0, 10, 30]),
            has_sharing: chance.once_in(4),
            budget_pages,
            room_pages: budget_pages * 2 + 600,
            tasks_wanted,
            chance,
        }
    }

    /// The last pause, and all that is to be seen after it.
    fn end(mut self) -> Vec<Step> {
        self.pause();
        self.receive_all();
        self.fetch_all();
        self.steps
    }

    fn pause(&mut self) {
        self.step(0, Action::Pause);
    }

    fn step(&mut self, task: u8, action: Action) {
        self.steps.push(Step { task, action });
    }

    fn add(&mut self, steps: usize) {
        for _ in 0..steps {
            self.add_one();
        }
    }

    /// Some task that lives, one time in two that which did something last.
    fn any_task(&mut self) -> u8 {
        if let Some(last) = self.steps.last()
            && self.tasks[usize::from(last.task)].is_alive
            && self.chance.once_in(2)
        {
            return last.task;
        }
        let alive: Vec<u8> = (0..self.tasks.len() as u8)
            .filter(|&task| self.tasks[usize::from(task)].is_alive)
            .collect();
        self.chance.pick(&alive)
    }

    fn known(&mut self, task: u8) -> &mut TaskModel {
        &mut self.tasks[usize::from(task)]
    }

    fn add_one(&mut self) {
        let task = self.any_task();
        if self.chance.below(100) < self.descriptors {
            return self.change_descriptors(task);
        }
        if self.chance.below(100) < self.numbered {
            return self.change_numbered(task);
        }
        match self.chance.below(100) {
            0..12 => self.fork(task),
            12..14 => self.exit(task),
            14..15 => self.step(task, Action::Reap),
            15..17 => self.step(task, Action::Session),
            17..19 => {
                let leader = if self.chance.once_in(2) {
                    task
                } else {
                    self.any_task()
                };
                self.step(task, Action::Group { leader });
            }
            19..20 => self.step(task, Action::Subreaper),
            20..23 => self.thread(task),
            23..28 => self.object(task),
            30..36 => self.change_own(task),
            28..30 => {
                let call = self.chance.below(4) as u8;
                let all = self.chance.once_in(2);
                self.step(task, Action::Filter { call, all });
            }
            _ => self.change_memory(task),
        }
    }

    fn fork(&mut self, task: u8) {
        let shares = match self.has_sharing && self.chance.once_in(2) {
            true => 1 + self.chance.below(ALL_SHARES.into()) as u8,
            false => 0,
        };
        self.share(task, shares);
    }

    /// Forks a task that shares what is said with the one that forks it.
    fn share(&mut self, task: u8, shares: u8) {
        let child = self.tasks.len() as u8;
        let known = self.known(task);
        let forbidden = known.threads > 0 || known.contexts > 0;
        if forbidden || child >= TASKS || usize::from(child) >= self.tasks_wanted {
            return self.change_memory(task);
        }
        let known = self.known(task);
        known.shares |= shares;
        let mut child_known = TaskModel {
            memory: known.memory.forked(),
            parent: task,
            shares,
            is_cloned: known.is_cloned || shares != 0,
            ..known.clone()
        };
        // What is in a table that both have stays its parent's.
        if shares & SHARES[0] != 0 {
            child_known.held.clear();
            child_known.objects.clear();
        }
        self.tasks.push(child_known);
        self.step(task, Action::Fork { child, shares });
    }

    fn exit(&mut self, task: u8) {
        if task == 0 {
            return;
        }
        self.known(task).is_alive = false;
        let status = self.chance.below(256) as u8;
        self.step(task, Action::Exit { status });
        let parent = self.known(task).parent;
        if self.known(parent).is_alive && self.chance.once_in(2) {
            self.step(parent, Action::Reap);
        }
    }

    fn thread(&mut self, task: u8) {
        if self.known(task).is_cloned {
            return self.change_memory(task);
        }
        let waits = [
            Wait::Futex,
            Wait::FutexTimed,
            Wait::SleepUntil,
            Wait::EpollTimed,
            Wait::Poll,
            Wait::Read,
        ];
        let wait = self.chance.pick(&waits);
        let stack_pages = self.chance.pick(&[8, 16, 17, 64, 512, 2048, 2049]);
        self.known(task).threads += 1;
        self.step(task, Action::Thread { wait, stack_pages });
    }

    fn object(&mut self, task: u8) {
        if self.next_object >= OBJECTS {
            return;
        }
        let open: Vec<u8> = self.known(task).objects.keys().copied().collect();
        if !open.is_empty() && self.chance.once_in(3) {
            let id = self.chance.pick(&open);
            self.known(task).objects.remove(&id);
            return self.step(task, Action::Forget { id });
        }
        let kinds = [
            Backing::File,
            Backing::Deleted,
            Backing::Unnamed,
            Backing::Memfd,
        ];
        let kind = self.chance.pick(&kinds);
        // A deleted file goes into the image as a whole, up to the limit.
        let most = if kind == Backing::Memfd {
            self.budget_pages.max(1)
        } else {
            240
        };
        let pages = self.size().min(most).min(super::step::OBJECT_PAGES);
        let id = self.next_object;
        self.next_object += 1;
        self.known(task).objects.insert(id, pages);
        self.step(task, Action::Object { id, kind, pages });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storm::step::{from_text, to_text};

    #[test]
    fn a_seed_gives_its_steps_again_and_as_text() {
        for seed in 0..50 {
            let made = steps(seed);
            assert_eq!(made, steps(seed));
            assert_eq!(made, from_text(&to_text(&made)).unwrap());
            let pauses = made.iter().filter(|step| step.action == Action::Pause);
            assert_eq!(pauses.count(), PAUSES);
        }
    }
}
