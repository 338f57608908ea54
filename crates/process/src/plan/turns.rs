//! In which order tasks that share something do what is done once for all of them.
//!
//! Until a task has its own descriptors it uses those of the pool, and some numbers of its own
//! choice; and it has the restorer's directories. So those who share a descriptor table, or their
//! directories, do all that one after the other, and the last one gives them what they had. Who
//! only hands one on has left it before the first one begins.

use std::collections::BTreeMap;

use resources::script::{Script, WordId};

use super::Plan;
use super::forks::ForkId;
use super::sharing::{Shared, Sharing};
use crate::records::What;

/// The words on which those wait who share something.
#[derive(Default)]
pub(super) struct Turns(BTreeMap<Shared, WordId>);

/// When it is a task's turn.
#[derive(Default)]
pub(super) struct Turn(Vec<Place>);

/// The place of a task among those who share one thing.
struct Place {
    what: What,
    word: WordId,
    /// How many come before it, those who only hand it on among them.
    before: u32,
    /// How many there are.
    all: u32,
}

impl Turns {
    /// Takes the words that are needed.
    pub fn find(sharing: &Sharing, plan: &mut Plan) -> Self {
        let all = sharing.members().map(|(shared, ..)| shared);
        // What is undone to semaphores is put there by one, at any time; nothing is put into an
        // I/O context; of memory, others only wait until it is there.
        let in_turn =
            all.filter(|shared| matches!(shared.what, What::Descriptors | What::Directories));
        Self(in_turn.map(|shared| (shared, plan.word())).collect())
    }

    /// The turn of the task that fork `id` brings.
    pub fn of(&self, sharing: &Sharing, id: ForkId) -> Turn {
        let all = sharing.members().filter_map(|(shared, members, carriers)| {
            let count = |len: usize| u32::try_from(len).expect("checked when read");
            let at = members.iter().position(|member| *member == id)?;
            Some(Place {
                what: shared.what,
                word: *self.0.get(&shared)?,
                before: carriers + count(at),
                all: carriers + count(members.len()),
            })
        });
        Turn(all.collect())
    }

    /// Tells that a task has left what it only handed on.
    pub fn left(&self, shared: Shared, script: &mut Script) {
        if let Some(word) = self.0.get(&shared) {
            script.post(*word);
        }
    }
}

impl Turn {
    /// Waits for it.
    pub fn begin(&self, script: &mut Script) {
        for place in self.0.iter().filter(|place| place.before > 0) {
            script.wait(place.word, place.before);
        }
    }

    /// Whether what is shared is given to all by this task: it is the last one, or has its own.
    pub fn is_last(&self, what: What) -> bool {
        let mut places = self.0.iter().filter(|place| place.what == what);
        places.all(|place| place.before + 1 == place.all)
    }

    /// Lets the next one begin, and waits until all have what they share.
    pub fn end(&self, script: &mut Script) {
        for place in &self.0 {
            script.post(place.word);
        }
        for place in &self.0 {
            script.wait(place.word, place.all);
        }
    }
}
