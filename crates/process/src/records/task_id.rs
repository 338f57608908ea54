//! The number of a task in an image.

use std::fmt::{self, Display};
use std::num::NonZeroU32;

/// The number that a task, a process or a thread of one, has in an image: its records have it.
///
/// What the task is called anywhere else (its pid on the host, its pids in namespaces) is data of
/// the tree's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TaskId(NonZeroU32);

impl TaskId {
    /// The first of an image.
    pub const FIRST: Self = Self(NonZeroU32::MIN);

    /// Number `number`; 0 is none's.
    pub const fn new(number: u32) -> Option<Self> {
        match NonZeroU32::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// The number that comes `count` after it.
    pub fn after(self, count: usize) -> Self {
        let count = u32::try_from(count).expect("a host has no more tasks");
        Self(self.0.checked_add(count).expect("a host has no more tasks"))
    }
}

impl Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
