//! Memory and signal handlers that several processes have: one of them makes them for all.
//!
//! The first of them maps and fills the memory, as every process does with its own. The others are
//! made with it (`CLONE_VM`), as threads are, and change nothing in it. Their children get copies
//! of what is there at that moment, which is to be what the first one has mapped early: so it goes
//! on only when all have made theirs. Nobody uses any of it before it is there.

use std::collections::HashMap;

use resources::script::{Script, WordId};

use super::Plan;
use super::sharing::{OfFork, Sharing};
use crate::records::{Node, What};

/// The words by which those wait for each other who share memory or signal handlers, by the number
/// of the first.
#[derive(Debug, Default)]
pub(super) struct Memories {
    memories: HashMap<u32, Waits>,
    /// How many others there are, and the word that they post to when they have seen the children
    /// end that are to be dead.
    handlers: HashMap<u32, (u32, WordId)>,
}

/// The words of one memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    /// How many that were made with it have made all others.
    forked: WordId,
    /// Set to 1 when the memory is there.
    there: WordId,
    /// How many are made with it, stand-ins among them.
    made: u32,
}

impl Memories {
    /// Takes the words that are needed for `forks` forks.
    pub fn find(sharing: &Sharing, forks: usize, plan: &mut Plan) -> Self {
        let count = |len: usize| u32::try_from(len).expect("checked when read");
        let mut found = Self::default();
        for (shared, members, _) in sharing.members() {
            if shared.what == What::Handlers {
                let others = (count(members.len()) - 1, plan.word());
                found.handlers.insert(shared.first, others);
            }
            if shared.what != What::Memory {
                continue;
            }
            let made = (0..forks).filter_map(|id| sharing.of(id));
            let made = made.filter(|of| of.at_birth.contains(&shared));
            let waits = Waits {
                forked: plan.word(),
                there: plan.word(),
                made: count(made.count()),
            };
            found.memories.insert(shared.first, waits);
        }
        found
    }

    /// Those of the memory of a task, if others have it, too.
    pub fn of(&self, node: &Node) -> Option<Waits> {
        self.memories.get(&node.memory_number()).copied()
    }

    /// Those of the memory with which a stand-in is made, if that is one that others have.
    pub fn handed_on(&self, of: Option<&OfFork>) -> Option<Waits> {
        let mut at_birth = of?.at_birth.iter();
        let memory = at_birth.find(|shared| shared.what == What::Memory)?;
        self.memories.get(&memory.first).copied()
    }

    /// Before the actions of signals are set that a task shares, by which a child could vanish that
    /// is to be a zombie: has the first wait until the others have seen theirs end.
    pub fn await_zombies(&self, node: &Node, script: &mut Script) {
        let is_first = node.handlers_of == 0;
        let first = if is_first {
            node.number
        } else {
            node.handlers_of
        };
        if let Some((others, word)) = self.handlers.get(&first) {
            match is_first {
                true => script.wait(*word, *others),
                false => script.post(*word),
            };
        }
    }
}

impl Waits {
    /// Has who was made with the memory say that it has made all others.
    pub fn have_forked(&self, script: &mut Script) {
        script.post(self.forked);
    }

    /// Has the first one wait until all who were made with the memory have made theirs.
    pub fn await_forks(&self, script: &mut Script) {
        script.wait(self.forked, self.made);
    }

    /// Has the first one say that the memory is there.
    pub fn are_there(&self, script: &mut Script) {
        script.post(self.there);
    }

    /// Has the others wait for that.
    pub fn await_memory(&self, script: &mut Script) {
        script.wait(self.there, 1);
    }
}
