//! What must hold of the list of tasks before anything is done with it.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use super::shared::What;
use super::tree::{FIRST_OBJECT, Node, State, Tree};
use crate::{Error, Result};

/// Signals.
const SIGNALS: RangeInclusive<i32> = 0..=64;
/// Signals that stop a task instead of ending it.
const STOPS: RangeInclusive<i32> = 19..=22;

fn corrupt(what: impl Into<String>) -> Error {
    resources::Error::corrupt("tree", what).into()
}

/// What was seen of the tasks before.
#[derive(Default)]
struct Seen {
    /// Pids and tids.
    pids: HashSet<i32>,
    /// Numbers of tasks and threads.
    numbers: HashSet<u32>,
    /// Spaces, and the numbers of the tasks whose memory they are first.
    spaces: HashMap<u32, u32>,
    /// Whose memory each living task has, by their numbers.
    memories: HashMap<u32, u32>,
    /// Pids of those that have not ended.
    living: HashSet<i32>,
    /// Those whose numbers others may name, as they have it first.
    first: HashSet<(What, u32)>,
}

/// Checks a list of tasks.
///
/// # Errors
/// [`resources::Error::Corrupt`].
pub(super) fn check(tree: &Tree) -> Result<()> {
    let mut seen = Seen::default();
    for (index, node) in tree.tasks.iter().enumerate() {
        seen.check_ids(node)?;
        seen.check_shared(node)?;
        check_state(node)?;
        if index > 0 && (node.parent == node.pid || !seen.living.contains(&node.parent)) {
            let pid = node.pid;
            return Err(corrupt(format!("task {pid} has no parent before it")));
        }
    }
    let root = tree.tasks.first();
    let root = root.ok_or_else(|| corrupt("the image has no task"))?;
    if root.state() == State::Zombie {
        return Err(corrupt("the root task is a zombie"));
    }
    Ok(())
}

impl Seen {
    /// Checks what a task is called, and what its numbers are: they are nobody else's.
    fn check_ids(&mut self, node: &Node) -> Result<()> {
        let pid = node.pid;
        let ids = node.threads.iter().copied().chain([pid]);
        let zombie = node.state() == State::Zombie;
        let led = node.threads.first() == Some(&pid) || zombie && node.threads.is_empty();
        let fresh = ids
            .skip(usize::from(!zombie))
            .all(|id| id > 0 && self.pids.insert(id));
        if !led || !fresh {
            let what = format!("task {pid} is there twice or has no leader");
            return Err(corrupt(what));
        }
        let numbers = &node.thread_numbers;
        let own = numbers.first().is_none_or(|first| *first == node.number);
        let all = numbers.iter().copied().chain([node.number]);
        let fresh = all
            .skip(usize::from(!zombie))
            .all(|number| number > 0 && self.numbers.insert(number));
        if numbers.len() != node.threads.len() || !own || !fresh {
            let what = format!("task {pid} has no numbers of its own");
            return Err(corrupt(what));
        }
        if zombie {
            return Ok(());
        }
        let is_of_task = (1..FIRST_OBJECT).contains(&node.space_number);
        let known = self.spaces.get(&node.space_number);
        let fits = match node.memory_of {
            0 => known.is_none(),
            first => known == Some(&first),
        };
        if !is_of_task || !fits {
            return Err(corrupt(format!("task {pid} has no space of its own")));
        }
        let memory = node.memory_number();
        self.spaces.insert(node.space_number, memory);
        self.memories.insert(node.number, memory);
        self.living.insert(pid);
        Ok(())
    }

    /// Checks that what a task shares is had by one before it.
    fn check_shared(&mut self, node: &Node) -> Result<()> {
        for what in What::ALL {
            let of = node.shared_with(what);
            let living = node.state() != State::Zombie;
            if of == 0 && living {
                self.first.insert((what, node.number));
            } else if of != 0 && !(living && self.first.contains(&(what, of))) {
                let (name, _) = what.names();
                let what = format!("task {} has the {name} of nobody before it", node.pid);
                return Err(corrupt(what));
            }
        }
        let memory_of = |number: &u32| self.memories.get(number);
        if node.handlers_of != 0 && memory_of(&node.handlers_of) != memory_of(&node.number) {
            let what = format!("task {} has handlers without their memory", node.pid);
            return Err(corrupt(what));
        }
        Ok(())
    }
}

/// Checks how a task ends or is stopped, and whose it is.
fn check_state(node: &Node) -> Result<()> {
    let (pid, zombie) = (node.pid, node.state() == State::Zombie);
    let signals = [node.exit_signal, node.exit_status & 0x7f];
    if signals.iter().any(|signal| !SIGNALS.contains(signal)) {
        return Err(corrupt(format!("task {pid} ends by no signal")));
    }
    if node.stop_signal != 0 && !STOPS.contains(&node.stop_signal) {
        return Err(corrupt(format!("task {pid} is stopped by no signal")));
    }
    if let Some(end) = node.leader_end {
        let by_itself = end & !0xff00 == 0;
        if zombie || node.threads.len() < 2 || !by_itself {
            let what = format!("task {pid} has a leader that cannot have ended");
            return Err(corrupt(what));
        }
    }
    if zombie && STOPS.contains(&(node.exit_status & 0x7f)) {
        return Err(corrupt(format!("task {pid} ends by no signal")));
    }
    // Old images have none.
    if [&node.uids, &node.gids]
        .iter()
        .any(|ids| ![0, 4].contains(&ids.len()))
    {
        return Err(corrupt(format!("task {pid} has half an identity")));
    }
    Ok(())
}
