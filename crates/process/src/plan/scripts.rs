//! What a restore will do: the scripts, who runs them, and what the restorer does meanwhile.

use image::SpaceId;
use resources::map::layout::{DECODED_FILE, Place, Stored};
use resources::script::{PoolId, Script, ScriptId, StepAt, WordId};
use resources::task::Write;

use super::groups::Join;
use crate::records::{Node, SavedThread};

/// Which descriptions other processes hold than the restorer.
#[derive(Debug, Default)]
pub struct Portions {
    /// The portion of each description that is in one.
    pub of: std::collections::HashMap<u32, u32>,
    /// How many portions there are.
    pub count: u32,
}

impl Portions {
    /// The portion of a description; none if the restorer holds it.
    pub fn of(&self, id: u32) -> Option<u32> {
        self.of.get(&id).copied()
    }

    /// How many descriptions each portion has.
    pub fn sizes(&self) -> Vec<usize> {
        let mut sizes = vec![0; self.count as usize];
        for portion in self.of.values() {
            sizes[*portion as usize] += 1;
        }
        sizes
    }
}

/// All scripts of a restore.
#[derive(Debug, Default)]
pub struct Plan {
    /// The scripts; a [`ScriptId`] is an index.
    pub scripts: Vec<Planned>,
    /// How many shared words they use.
    pub words: u32,
    /// The threads that stay, each at the end of its script; leaders before their threads.
    pub threads: Vec<Staying>,
    /// Pages that the restorer fills while a task waits.
    pub outside: Vec<Outside>,
    /// How many descriptions the pool begins with.
    pub descriptions: u32,
    /// The files by which tasks join control groups, as they stand in the pool behind the
    /// descriptions.
    pub groups: Vec<Join>,
    /// Threads that the restorer puts into groups of their own when the scripts have ended.
    pub thread_groups: Vec<(i32, Join)>,
    /// True if tasks fetch their descriptors from the restorer; its pidfd stands in the pool behind
    /// those files then.
    pub fetches: bool,
    /// The descriptions that other processes than the restorer hold; the pidfds of these stand in
    /// the pool behind the restorer's.
    pub portions: Portions,
    /// The numbers of the files whose pages tasks read for themselves, as they stand in the pool.
    pub files: Vec<u32>,
    /// The pages of which the restorer makes the file [`DECODED_FILE`], and where they are there.
    pub decoded: Vec<pages::Extent>,
    /// Threads that are there for a while, and that must be gone before the tree goes on: each
    /// with its process.
    pub ended: Vec<(i32, i32)>,
    /// Files of /proc that the restorer writes when the scripts have ended: the thread, the file
    /// and its text.
    pub writes: Vec<(i32, Write)>,
    /// Addresses that the restore area must leave free, as mappings of the image's tasks are.
    pub taken: Vec<abi::Span>,
}

/// One script and who runs it.
#[derive(Debug)]
pub struct Planned {
    /// The thread.
    pub tid: i32,
    /// What it is to become: "task", "thread", "zombie", "stand-in".
    pub role: &'static str,
    /// Its calls.
    pub script: Script,
}

/// A thread that runs on after the restore.
#[derive(Clone, Copy, Debug)]
pub struct Staying {
    /// Its process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
    /// The wait status with which it ends when all else is done, of a leader that had ended.
    pub end: Option<i32>,
    /// Whether its script gives it seccomp filters, by which its tracer keeps it from being judged.
    pub is_filtered: bool,
}

impl Staying {
    /// A saved thread of the task `node`.
    pub fn of(node: &Node, thread: &SavedThread) -> Self {
        Self {
            pid: node.pid,
            tid: thread.tid,
            end: node.leader_end.filter(|_| thread.tid == node.pid),
            is_filtered: thread.filters().is_some(),
        }
    }
}

/// Pages to be filled from outside.
#[derive(Debug)]
pub struct Outside {
    /// The process.
    pub pid: i32,
    /// The space that its memory is.
    pub space: SpaceId,
    /// The call that gives its userfaultfd, in its script.
    pub uffd: (ScriptId, StepAt),
    /// Posted when the userfaultfd is there.
    pub ready: WordId,
    /// To be posted when all is filled.
    pub filled: WordId,
    /// The pages.
    pub stored: Vec<Stored>,
    /// The mappings that they are in.
    pub mappings: Vec<abi::Span>,
    /// The mappings whose pages come when they are touched.
    pub lazy: Vec<abi::Span>,
    /// Where its threads' stacks are: what they touch first.
    pub stacks: Vec<abi::Addr>,
}

/// Words that all scripts share.
pub mod word {
    use resources::script::WordId;

    /// How many forks are done and have their own session and group.
    pub const FORKED: WordId = WordId(0);
    /// How many have joined their process group.
    pub const GROUPED: WordId = WordId(1);
    /// How many threads have everything that does not depend on others.
    pub const ALONE: WordId = WordId(2);
    /// How many threads are complete and wait to be traced.
    pub const READY: WordId = WordId(3);
    /// Set to 1 by the restorer when all are traced.
    pub const GO: WordId = WordId(4);
    /// The first free one.
    pub const FREE: u32 = 5;
}

impl Plan {
    /// The restorer's pidfd, where tasks need it.
    pub fn restorer(&self) -> Option<PoolId> {
        let groups = u32::try_from(self.groups.len()).expect("fewer than tasks");
        self.fetches.then_some(PoolId(self.descriptions + groups))
    }

    /// The pidfd of the process that holds a portion.
    pub fn portion(&self, portion: u32) -> PoolId {
        let restorer = self.restorer().expect("tasks fetch their descriptors");
        PoolId(restorer.0 + 1 + portion)
    }

    /// The pool descriptor of a pages file.
    pub fn pages_file(&mut self, number: u32) -> PoolId {
        let known = self.files.iter().position(|file| *file == number);
        let at = known.unwrap_or_else(|| {
            self.files.push(number);
            self.files.len() - 1
        });
        let pidfds = usize::from(self.fetches) + self.portions.count as usize;
        let at = self.groups.len() + pidfds + at;
        PoolId(self.descriptions + u32::try_from(at).expect("at most 65,536 files"))
    }

    /// Has the restorer decode pages of a task's space; where they are then.
    pub fn decode(&mut self, space: SpaceId, span: abi::Span) -> Place {
        let last = self.decoded.last();
        let end = last.map_or(abi::Addr(0), |last| last.span().end);
        self.decoded.push(pages::Extent {
            space,
            first_page: span.start.page(),
            at: end,
            pages: span.pages(),
        });
        Place {
            file: DECODED_FILE,
            offset_bytes: end.0,
        }
    }

    /// A new shared word.
    pub fn word(&mut self) -> WordId {
        self.words += 1;
        WordId(self.words - 1)
    }
}
