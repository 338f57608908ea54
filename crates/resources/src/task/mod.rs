//! The family of task state: what a process or a thread has besides memory and descriptors.

use crate::script::{Answers, DataAt, Script, StepAt};
use crate::{Allow, Result};

/// Whether a part belongs to a process or to each of its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One per process; planned in the leader's script.
    Process,
    /// One per thread.
    Thread,
}

/// What a thread (the leader stands for its process) looks like from outside while it is stopped.
///
/// Text of /proc files is read on first need and once.
pub trait Facts {
    /// What the caller allows.
    fn allow(&self) -> &Allow;
    /// The process.
    fn pid(&self) -> i32;
    /// The thread; equal to [`Facts::pid`] for the leader.
    fn tid(&self) -> i32;
    /// The contents of /proc/PID/task/TID/`name` ("stat", "status", "limits", "timerslack_ns", …;
    /// for the leader and files that only processes have ("timers"), of /proc/PID/`name`).
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn proc(&self, name: &str) -> Result<std::rc::Rc<[u8]>>;
}

/// The questions that a part put into a script, to be read out of its answers.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Steps whose results matter.
    pub steps: Vec<StepAt>,
    /// Data that they write.
    pub data: Vec<DataAt>,
}

/// When in a thread's script something is done. Every thread of every task reaches the end of
/// `Alone` before any begins `Together`: from there on all tasks and threads exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// First of all, in the new task.
    Birth,
    /// After memory is in place, before descriptors have their numbers (pool descriptors are
    /// still open).
    Alone,
    /// All tasks and threads exist.
    Together,
    /// What loses privileges, in this order of calls.
    Privileges,
    /// Timers, pending signals: after everything that takes time.
    Last,
    /// After the thread is traced and would be killed with the restorer: what until now held that
    /// tie (the parent-death signal).
    Final,
}

/// The script of one thread, by phase.
#[derive(Clone, Debug, Default)]
pub struct ThreadPlan {
    phases: [Script; 6],
}

impl ThreadPlan {
    /// The part of the script that belongs to `phase`.
    pub fn at(&mut self, phase: Phase) -> &mut Script {
        &mut self.phases[phase as usize]
    }

    /// Takes the part of the script that belongs to `phase`.
    pub fn take(&mut self, phase: Phase) -> Script {
        std::mem::take(&mut self.phases[phase as usize])
    }
}

/// Facts about the thread that is planned, which its parts may need.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// The process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
}

/// One part of a task's state. Implementers are unit structs, listed in [`PARTS`].
pub trait Part: Sync {
    /// The part's number in images; never reused.
    fn tag(&self) -> u16;
    /// The part's name, as users see it.
    fn name(&self) -> &'static str;
    /// Process or thread.
    fn scope(&self) -> Scope;
    /// Adds the calls that only the task itself can make (all threads of the tree are stopped,
    /// signals blocked). As few as possible.
    ///
    /// # Errors
    /// When the facts cannot be read.
    fn ask(&self, _facts: &dyn Facts, _questions: &mut Script) -> Result<Asked> {
        Ok(Asked::default())
    }
    /// The payload for the image; `None` when everything is as in a fresh task.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a state that cannot be restored.
    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Vec<u8>>>;
    /// One line for people.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`].
    fn describe(&self, payload: &[u8]) -> Result<String>;
    /// Adds the calls that make a fresh thread be as dumped. `payload` is `None` when the image
    /// has no record of this part for the thread: it was as in a fresh task.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`].
    fn plan(&self, payload: Option<&[u8]>, who: Planned, plan: &mut ThreadPlan) -> Result<()>;
}

/// Every part, in the order in which they are planned.
pub static PARTS: &[&dyn Part] = &[];
