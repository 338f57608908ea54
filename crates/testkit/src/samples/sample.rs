//! A state of a thread or a process: the values that it can have, and how it is set and read.

use std::io;

use sys::ledger::{Fate, List};

/// The owner of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Each thread has its own.
    Thread,
    /// All threads of a process have it in common.
    Process,
}

/// The tasks that can be in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Any thread.
    Anywhere,
    /// Those of any process but the root of a tree.
    Children,
    /// Threads that do nothing but answer, as others could not go on in it.
    Helpers,
}

/// The numbers that a state can be set to.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// Those.
    These(&'static [u64]),
    /// The numbers of a list's kept entries.
    Of(&'static List),
    /// Others.
    Made(fn() -> Vec<u64>),
}

impl Values {
    /// All of them.
    #[must_use]
    pub fn all(self) -> Vec<u64> {
        match self {
            Self::These(values) => values.to_vec(),
            Self::Made(make) => make(),
            Self::Of(list) => {
                let kept = list.entries.iter();
                let kept = kept.filter(|entry| entry.fate == Fate::Kept);
                kept.filter_map(|entry| entry.number).collect()
            }
        }
    }
}

/// A state of a thread or a process, with the ways to set and to read it.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Its name in steps, once each.
    pub name: &'static str,
    /// The entries of the ledger that it is about.
    pub entries: &'static [&'static str],
    /// The lists whose kept entries are all among its values.
    pub lists: &'static [&'static List],
    /// The owner.
    pub owner: Owner,
    /// The tasks that can be in it.
    pub place: Place,
    /// False where later steps of other kinds may fail for it.
    pub is_mild: bool,
    /// False where a killed dump may lose it (docs/limits.md).
    pub is_safe: bool,
    /// True where each value is one more of what a task has, as one more timer.
    pub adds: bool,
    /// The system call that reads it and that a program makes for nothing else, by number.
    pub call: Option<u32>,
    /// The numbers that it can be set to.
    pub values: Values,
    /// Sets it for the calling thread or its process.
    pub set: fn(u64) -> io::Result<()>,
    /// Reads what the calling thread or its process has; none for a state that a tracer reads.
    pub read: Option<fn() -> io::Result<String>>,
}

impl Sample {
    pub(super) const fn new(
        name: &'static str,
        values: Values,
        set: fn(u64) -> io::Result<()>,
        read: fn() -> io::Result<String>,
    ) -> Self {
        Self {
            name,
            entries: &[],
            lists: &[],
            owner: Owner::Thread,
            place: Place::Anywhere,
            is_mild: true,
            is_safe: true,
            adds: false,
            call: None,
            values,
            set,
            read: Some(read),
        }
    }

    pub(super) const fn about(self, entries: &'static [&'static str]) -> Self {
        Self { entries, ..self }
    }

    pub(super) const fn of_lists(self, lists: &'static [&'static List]) -> Self {
        Self { lists, ..self }
    }

    pub(super) const fn of_process(self) -> Self {
        let owner = Owner::Process;
        Self { owner, ..self }
    }

    pub(super) const fn in_children(self) -> Self {
        let place = Place::Children;
        Self { place, ..self }
    }

    pub(super) const fn in_helpers(self) -> Self {
        let place = Place::Helpers;
        Self { place, ..self }
    }

    pub(super) const fn harsh(self) -> Self {
        let is_mild = false;
        Self { is_mild, ..self }
    }

    pub(super) const fn adding(self) -> Self {
        let adds = true;
        Self { adds, ..self }
    }

    pub(super) const fn by_call(self, call: u32) -> Self {
        let call = Some(call);
        Self { call, ..self }
    }

    pub(super) const fn lost_by_kills(self) -> Self {
        let is_safe = false;
        Self { is_safe, ..self }
    }

    pub(super) const fn read_by_tracers(self) -> Self {
        let read = None;
        Self { read, ..self }
    }

    /// Sets it to another value than it has, the first that the kernel takes from value number
    /// `first` on, round to the beginning; false if it takes none. For tests.
    #[must_use]
    pub fn change(&self, first: usize) -> bool {
        let read = || self.read.map(|read| read().unwrap_or_default());
        let before = read();
        let mut all = self.values.all();
        let middle = first % all.len().max(1);
        all.rotate_left(middle);
        all.into_iter()
            .any(|value| (self.set)(value).is_ok() && (before.is_none() || read() != before))
    }

    /// The value that it has, in words; the error's where it cannot be read.
    #[must_use]
    pub fn told(&self) -> Option<String> {
        let told = self.read?();
        Some(told.unwrap_or_else(|error| error.to_string()))
    }
}

/// A line of /proc/thread-self/status.
pub(super) fn status(name: &str) -> io::Result<String> {
    // The thread's name may be any bytes.
    let text = std::fs::read("/proc/thread-self/status")?;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let line = lines.find(|(found, _)| *found == name);
    let (_, value) = line.ok_or(io::ErrorKind::NotFound)?;
    Ok(value.trim().to_owned())
}
