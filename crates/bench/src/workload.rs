//! The workloads as data: what is dumped and restored, and on which media.
use serde::{Deserialize, Serialize};

use crate::subject::PAGE_BYTES;

const MIB: u64 = 1 << 20;

/// What a subject is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Its name on the command line and in the kept numbers.
    pub name: &'static str,
    /// Its name in the table.
    pub title: &'static str,
    /// Levels of the tree: how many children each task of a level starts.
    pub children: &'static [usize],
    /// Memory that the first task writes before it starts children, in bytes.
    pub memory_bytes: u64,
    /// True if every task writes that much instead, after all were started: nothing is shared.
    pub own_memory: bool,
    /// How many of a hundred pages of it are written with zeros.
    pub zero_percent: u64,
    /// True if the rest is text instead of numbers; then it is for `bench compress` alone.
    pub is_text: bool,
    /// How many descriptors the first task opens before it starts children, which inherit them.
    pub descriptors: usize,
    /// How many mappings it makes, each with a page that it has written.
    pub mappings: usize,
    /// What share of the peer's time a dump and a restore may take, where that was set as a goal.
    pub goals: [Option<f64>; 2],
    /// Where its images are put.
    pub media: &'static [Medium],
    /// True if it is measured without the peer's cache as well.
    pub cold: bool,
}

/// Where images are put, and what for.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Medium {
    /// Memory.
    Tmpfs,
    /// A disk's file system, left to the page cache.
    Disk,
    /// A disk's file system, on the disk when the dump is done.
    Durable,
}

/// Whether a program finds what it remembers of the host.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// /run is a tmpfs, where CRIU keeps what it probed.
    Warm,
    /// /run is no tmpfs: CRIU probes the host each time.
    Cold,
}

/// What most workloads are.
const PLAIN: Workload = Workload {
    name: "",
    title: "",
    children: &[],
    memory_bytes: 0,
    own_memory: false,
    zero_percent: 0,
    is_text: false,
    descriptors: 0,
    mappings: 0,
    goals: [None, None],
    media: &[Medium::Tmpfs, Medium::Disk],
    cold: false,
};

/// Every workload.
pub const ALL: &[Workload] = &[
    Workload {
        name: "busy",
        title: "one busy task",
        goals: [Some(0.25), Some(0.25)],
        media: &[Medium::Tmpfs, Medium::Disk, Medium::Durable],
        cold: true,
        ..PLAIN
    },
    Workload {
        name: "tree10",
        title: "tree of 10",
        children: &[3, 2],
        ..PLAIN
    },
    Workload {
        name: "written1g",
        title: "1 GiB written",
        memory_bytes: 1024 * MIB,
        goals: [Some(0.6), Some(0.4)],
        media: &[Medium::Tmpfs, Medium::Disk, Medium::Durable],
        ..PLAIN
    },
    Workload {
        name: "zero1g",
        title: "1 GiB, 90 % zero pages",
        memory_bytes: 1024 * MIB,
        zero_percent: 90,
        ..PLAIN
    },
    Workload {
        name: "tree50",
        title: "50 tasks of 10 MiB",
        children: &[49],
        memory_bytes: 10 * MIB,
        goals: [Some(0.4), Some(0.4)],
        ..PLAIN
    },
    Workload {
        name: "own50",
        title: "50 tasks, 10 MiB of its own each",
        children: &[49],
        memory_bytes: 10 * MIB,
        own_memory: true,
        goals: [Some(0.4), Some(0.4)],
        ..PLAIN
    },
    Workload {
        name: "fds1000",
        title: "tree of 4, 1,000 descriptors",
        children: &[3],
        descriptors: 1000,
        goals: [Some(0.3), Some(0.3)],
        ..PLAIN
    },
    Workload {
        name: "maps10000",
        title: "10,000 mappings",
        mappings: 10_000,
        goals: [Some(0.3), Some(0.3)],
        ..PLAIN
    },
    Workload {
        name: TEXT,
        title: "1 GiB of text",
        memory_bytes: 1024 * MIB,
        is_text: true,
        media: &[Medium::Tmpfs, Medium::Disk, Medium::Durable],
        ..PLAIN
    },
];

/// Memory that can be compressed.
pub const TEXT: &str = "text1g";

impl Workload {
    /// Finds a workload by its name.
    pub fn find(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|workload| workload.name == name)
    }

    /// Returns how many bytes are compared: those of its memory, or of its mappings.
    pub fn compared_bytes(&self) -> u64 {
        let mapped = (self.mappings * PAGE_BYTES) as u64;
        self.memory_bytes.max(mapped)
    }

    /// Returns the number of tasks in the tree.
    pub fn tasks(&self) -> usize {
        let mut level = 1;
        let mut all = 1;
        for children in self.children {
            level *= children;
            all += level;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_as_many_tasks_as_they_say() {
        let tasks: Vec<_> = ALL
            .iter()
            .map(|workload| (workload.name, workload.tasks()))
            .collect();
        let want = [
            ("busy", 1),
            ("tree10", 10),
            ("written1g", 1),
            ("zero1g", 1),
            ("tree50", 50),
            ("own50", 50),
            ("fds1000", 4),
            ("maps10000", 1),
            (TEXT, 1),
        ];
        assert_eq!(tasks, want);
    }
}
