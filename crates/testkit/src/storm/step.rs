//! What tasks are told to do, one step at a time, as data.
mod opened;

use serde::{Deserialize, Serialize};

pub use self::opened::FileKind;

/// One step of one task. A step whose task or object does not exist is left out, so that any list
/// of steps can be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Who does it: 0 is the root, others are the number that their fork gave them.
    pub task: u8,
    /// What is done.
    #[serde(rename = "do")]
    pub action: Action,
}

/// Pages of a task's arena, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The first page.
    pub at: u32,
    /// How many.
    pub pages: u32,
}

impl Span {
    /// Behind the last page.
    pub fn end(self) -> u32 {
        self.at + self.pages
    }

    /// The numbers of its pages.
    pub fn range(self) -> std::ops::Range<u32> {
        self.at..self.end()
    }

    /// Its bytes, from the arena's start.
    pub fn bytes(self) -> std::ops::Range<usize> {
        self.at as usize * PAGE_BYTES..self.end() as usize * PAGE_BYTES
    }
}

/// The smallest piece of memory that is mapped.
pub const PAGE_BYTES: usize = 4096;
/// The pages of an arena.
pub const ARENA_PAGES: u32 = 1 << 19;
/// The most pages of an object, whose contents are kept apart.
pub const OBJECT_PAGES: u32 = 2304;
/// How many objects there may be.
pub const OBJECTS: u8 = 24;
/// How many names for descriptors there are.
pub const SLOTS: u16 = 256;
/// How many tasks there may be, dead ones among them.
pub const TASKS: u8 = 24;

/// How many threads of a task may answer for themselves.
pub const HELPERS: u8 = 4;
/// How many System V sets and segments there may be, and contexts of a task.
pub const NUMBERED: u8 = 8;
/// What clone(2) can have a child share: descriptors, directories, undo lists, I/O contexts.
pub const SHARES: [u8; 4] = [1, 2, 4, 8];
/// All of that.
pub const ALL_SHARES: u8 = 15;

/// What a task does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Lets the test dump and restore the tree here.
    Pause,
    /// Has the root's first thread have ended, and another make its steps: as the first step.
    EndLeader,
    /// Forks task `child`.
    Fork {
        /// The number of the new task.
        child: u8,
        /// What it shares with its parent: bits of [`SHARES`].
        #[serde(default, skip_serializing_if = "is_zero")]
        shares: u8,
    },
    /// Takes copies of its own of what it shares: bits of [`SHARES`].
    Unshare {
        /// Of what.
        shares: u8,
    },
    /// Goes to another directory and sets its umask.
    Settle {
        /// The directory's number.
        folder: u8,
        /// The umask.
        mask: u8,
    },
    /// Makes a set of System V semaphores.
    Semaphores {
        /// Its number, given once.
        set: u8,
    },
    /// Takes a semaphore, which is given back when the last one ends that shares its undo list.
    Borrow {
        /// Of which set.
        set: u8,
        /// How often.
        count: u8,
    },
    /// Attaches a new segment of System V shared memory.
    Segment {
        /// Its number, given once.
        segment: u8,
        /// How long it is.
        pages: u16,
        /// True if it goes with the last one that has it.
        doomed: bool,
        /// True if its pages are huge ones.
        #[serde(default, skip_serializing_if = "is_false")]
        huge: bool,
    },
    /// Changes a part of a segment where the task has it attached.
    Carve {
        /// The segment's number.
        segment: u8,
        /// From which of its pages.
        at: u16,
        /// How many.
        pages: u16,
        /// `PROT_` bits; nothing is mapped there any more where there are none.
        protection: Option<u8>,
    },
    /// Changes a state of the task's own that the ledger says is kept, to another value.
    Change {
        /// The name of the state's sample.
        what: String,
        /// The first of the sample's values that is tried.
        first: u16,
        /// Of this helper instead, a thread that answers for itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        helper: Option<u8>,
    },
    /// Starts a program of 32 bits, which answers for what it is told.
    Program,
    /// Has requests of asynchronous I/O end, in a context that is made where there is none.
    Requests {
        /// The context's number, among those of the task.
        context: u8,
        /// How many requests it is made for.
        room: u16,
        /// How many end now, as far as there is room.
        post: u16,
        /// How many of their events are fetched then.
        fetch: u16,
    },
    /// Ends; its children become orphans.
    Exit {
        /// Its exit status.
        status: u8,
    },
    /// Waits for its children that have ended.
    Reap,
    /// Becomes a session's leader.
    Session,
    /// Joins the process group that `leader` leads; its own where that is itself.
    Group {
        /// A task's number.
        leader: u8,
    },
    /// Becomes the one to whom the orphans below it come.
    Subreaper,
    /// Starts a thread that waits.
    Thread {
        /// In which call.
        wait: Wait,
        /// The size of its stack.
        stack_pages: u32,
    },
    /// Makes something to map, and keeps a descriptor of it.
    Object {
        /// Its number, given once.
        id: u8,
        /// What it is.
        kind: Backing,
        /// How long it is.
        pages: u32,
    },
    /// Closes its descriptor of object `id`.
    Forget {
        /// The object's number.
        id: u8,
    },
    /// Maps memory, instead of what is there.
    Map {
        /// Where.
        span: Span,
        /// `PROT_` bits.
        protection: u8,
        /// What.
        what: MappingKind,
        /// True if the memory is not counted (`MAP_NORESERVE`).
        noreserve: bool,
    },
    /// Unmaps what is there.
    Unmap(Span),
    /// Changes the protection of what is mapped there.
    Protect {
        /// Where.
        span: Span,
        /// `PROT_` bits.
        protection: u8,
    },
    /// Advises about what is mapped there.
    Advise {
        /// Where.
        span: Span,
        /// What.
        advice: Advice,
    },
    /// Locks what is mapped there into memory.
    Lock {
        /// Where.
        span: Span,
        /// True if only pages that are there (`MLOCK_ONFAULT`).
        on_fault: bool,
    },
    /// Writes to pages that can be written.
    Fill {
        /// Where.
        span: Span,
        /// Every how many pages.
        every: u32,
        /// How many pages in a row.
        run: u32,
        /// What is written.
        contents: Contents,
    },
    /// Moves what is mapped there to the page `to`, instead of what is mapped there.
    Move {
        /// From where.
        span: Span,
        /// The first page of the new place.
        to: u32,
    },
    /// Makes the private memory there end at the page `end`.
    Resize {
        /// Where.
        span: Span,
        /// Behind its new last page.
        end: u32,
    },
    /// Opens something under the name `slot`, and its other end under the next.
    Open {
        /// Its name, given once.
        slot: u16,
        /// What it is.
        kind: FileKind,
    },
    /// Makes a descriptor in a state that the ledger says is kept, and its other end under the next
    /// name.
    Make {
        /// Its name, given once.
        slot: u16,
        /// The name of the ledger's sample.
        what: String,
        /// The number of the state among the sample's values.
        number: u16,
    },
    /// Makes a socket that is neither bound nor connected.
    Socket {
        /// Its name, given once.
        slot: u16,
        /// As `AF_INET`.
        family: i32,
        /// As `SOCK_STREAM`.
        kind: i32,
        /// As `IPPROTO_TCP`.
        protocol: i32,
    },
    /// Opens something of a task that is there, or was, under the name `slot`.
    OpenTask {
        /// Its name, given once.
        slot: u16,
        /// Whose.
        of: u8,
        /// What.
        what: TaskFile,
    },
    /// Installs a seccomp filter that answers a call which does nothing else, and that is not to
    /// judge what a dump or a restore calls.
    Filter {
        /// Which of those calls.
        call: u8,
        /// True if all threads get it.
        all: bool,
    },
    /// Has another number for the same description.
    Duplicate {
        /// What.
        slot: u16,
        /// Its further name, given once.
        to: u16,
        /// The lowest number that it may get.
        least: i32,
    },
    /// Closes.
    Close {
        /// What.
        slot: u16,
    },
    /// Makes a socket that is connected to the socket `to` that `slot` names, for a listener one
    /// that waits to be accepted.
    Connect {
        /// Its name, given once, and the next for what is accepted.
        slot: u16,
        /// The other, which has a path.
        to: u16,
    },
    /// Takes the first connection that waits.
    Accept {
        /// The listener.
        slot: u16,
    },
    /// Writes.
    Send {
        /// To what.
        slot: u16,
        /// How much, as far as there is room.
        bytes: u32,
    },
    /// Reads all there is, which must be what was written.
    Receive {
        /// From what.
        slot: u16,
    },
    /// Sends a descriptor.
    Pass {
        /// Which.
        slot: u16,
        /// Through which socket.
        through: u16,
    },
    /// Receives all descriptors that were sent.
    Take {
        /// Through which socket.
        through: u16,
    },
    /// Has an epoll watch something.
    Watch {
        /// The epoll.
        epoll: u16,
        /// What.
        slot: u16,
        /// `EPOLLET`.
        edge: bool,
        /// `EPOLLONESHOT`.
        once: bool,
    },
    /// Locks a file as far as nobody else does.
    LockFile {
        /// Which.
        slot: u16,
        /// How.
        holder: LockHolder,
        /// For writing, or for reading.
        write: bool,
        /// From which byte.
        start: u16,
        /// How many bytes, 0 for all.
        bytes: u16,
    },
    /// Changes something about a description or a descriptor.
    Set {
        /// Which.
        slot: u16,
        /// What.
        what: Setting,
    },
    /// Wants to be told of the next message in a queue.
    Notify {
        /// The queue.
        slot: u16,
        /// By this netlink socket, otherwise by a signal.
        through: Option<u16>,
    },
    /// Deletes the name of a file or a socket.
    Delete {
        /// Which.
        slot: u16,
    },
    /// Blocks a signal and sends it to itself with a value.
    Signal {
        /// Which.
        signal: u8,
        /// With what.
        value: u64,
        /// True if it goes to the thread alone.
        thread: bool,
    },
}

/// What is opened of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskFile {
    /// A pidfd.
    Process,
    /// /proc/PID/status.
    Status,
    /// /proc/PID/task.
    Threads,
    /// /proc/PID, as a place (`O_PATH`).
    Place,
}

/// Who holds a lock on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LockHolder {
    /// The description, of the whole file (flock).
    Whole,
    /// The process.
    Process,
    /// The description.
    Description,
}

/// What is changed about a description or a descriptor; where it cannot be, nothing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// Whether calls fail instead of waiting.
    Nonblocking(bool),
    /// Whether execve closes it.
    CloseOnExec(bool),
    /// Whether writes go to the end.
    Append(bool),
    /// How much a pipe holds.
    PipeBytes(u32),
    /// The position, and the length of a file.
    Position(u16),
    /// The length of a file.
    Length(u16),
    /// Seals of a memfd.
    Seals(u8),
    /// Who is signalled, by what.
    Owner {
        /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`, all of the task itself.
        kind: u8,
        /// `F_SETSIG`.
        signal: u8,
    },
    /// A socket's option.
    Option {
        /// As `SOL_SOCKET`.
        level: u8,
        /// As `SO_KEEPALIVE`.
        name: u8,
        /// Its value.
        value: i32,
    },
    /// A socket's option that the ledger says is kept, to another value than it has.
    Kept {
        /// As `SOL_SOCKET`.
        level: i32,
        /// As `SO_KEEPALIVE`.
        name: i32,
        /// The first of the ledger's values that is tried.
        first: u8,
    },
    /// shutdown(2): reading, writing or both.
    Shutdown(u8),
}

/// What a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MappingKind {
    /// Private anonymous memory.
    Private,
    /// Shared anonymous memory, whose contents have the number of an object.
    Shared {
        /// The number, given once.
        object: u8,
    },
    /// An object, which the task has open.
    Object {
        /// The object's number.
        object: u8,
        /// The object's first page that is mapped.
        first: u32,
        /// True if writing changes the object.
        shared: bool,
    },
}

/// What kind of file is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// A file with a name.
    File,
    /// A file whose name was deleted.
    Deleted,
    /// A file that never had a name (`O_TMPFILE`).
    Unnamed,
    /// A memfd.
    Memfd,
}

/// What is written to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contents {
    /// Something else to each.
    Different,
    /// The same to all.
    Equal,
    /// Zeros.
    Zero,
}

/// What madvise(2) is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names are the kernel's")]
pub enum Advice {
    DontNeed,
    DontFork,
    DoFork,
    WipeOnFork,
    KeepOnFork,
    Mergeable,
    HugePage,
    NoHugePage,
    Collapse,
    DontDump,
    Random,
    Sequential,
    PopulateRead,
    GuardInstall,
    GuardRemove,
}

/// In what a thread waits, for ever or for an hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names are the kernel's")]
pub enum Wait {
    Futex,
    FutexTimed,
    SleepUntil,
    EpollTimed,
    Poll,
    Read,
}

fn is_zero(number: &u8) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_false(is: &bool) -> bool {
    !*is
}

/// The steps as text, a line each.
///
/// # Panics
/// Never: steps are plain data.
pub fn to_text(steps: &[Step]) -> String {
    let line = |step: &Step| serde_json::to_string(step).expect("plain data") + "\n";
    steps.iter().map(line).collect()
}

/// The steps of a text as [`to_text`] makes it; empty lines and those that start with `#` are
/// left out.
///
/// # Errors
/// When a line is no step.
pub fn from_text(text: &str) -> Result<Vec<Step>, serde_json::Error> {
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(serde_json::from_str)
        .collect()
}
