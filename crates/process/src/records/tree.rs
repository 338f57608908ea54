//! What the records of the tree as a whole say.

use image::{Record, SpaceId};
use prost::Message;
use resources::task::interrupted::Remake;
use resources::task::{ErasedPart, Holder};
use sys::ptrace::Dispatch;

use super::shared::What;
use super::tag;
use super::task_id::TaskId;
use crate::{Error, Result};

/// The version in which the tree's record is written. In version 1 the tasks had no numbers of
/// their own: a task's number was its pid, a thread's its tid, and a space's its task's pid.
pub(crate) const TREE_VERSION: u16 = 2;

/// Spaces of tasks have lower numbers; objects have these and higher ones.
pub(crate) const FIRST_OBJECT: u32 = 1 << 31;

/// The tasks of the tree, parents before children, the root first.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Tree {
    #[prost(message, repeated, tag = "1")]
    pub tasks: Vec<Node>,
    /// The boot of the host in which they ran, where their memory was tracked from then on: only in
    /// one boot a pid and a time of start name one task.
    #[prost(bytes = "vec", tag = "2")]
    pub boot: Vec<u8>,
    /// True if the tree was in a pid namespace of its own.
    #[prost(bool, tag = "3")]
    pub has_pid_ns: bool,
}

/// One task.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Node {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// Its parent; of the root, one outside of the tree.
    #[prost(int32, tag = "2")]
    pub parent: i32,
    #[prost(int32, tag = "3")]
    pub group: i32,
    #[prost(int32, tag = "4")]
    pub session: i32,
    #[prost(enumeration = "State", tag = "5")]
    pub state: i32,
    /// The wait status that its parent will get (zombies).
    #[prost(int32, tag = "6")]
    pub exit_status: i32,
    /// The signal that its parent gets when it ends; 0 for none.
    #[prost(int32, tag = "7")]
    pub exit_signal: i32,
    /// Its threads, the leader first; none for a zombie.
    #[prost(int32, repeated, tag = "8")]
    pub threads: Vec<i32>,
    /// Its name (zombies; of others a resource).
    #[prost(bytes = "vec", tag = "9")]
    pub name: Vec<u8>,
    /// The device number of the controlling terminal of the session that it leads; 0 for none.
    #[prost(int32, tag = "10")]
    pub terminal: i32,
    /// The process group in the foreground of its controlling terminal.
    #[prost(int32, tag = "11")]
    pub foreground: i32,
    /// Whether it has no controlling terminal although its session, led by a task of the tree, has
    /// one: it gave it up (`TIOCNOTTY`).
    #[prost(bool, tag = "12")]
    pub left_terminal: bool,
    /// The signal by which it was stopped; 0 in old images.
    #[prost(int32, tag = "13")]
    pub stop_signal: i32,
    /// Whether its parent has waited for that stop.
    #[prost(bool, tag = "14")]
    pub stop_seen: bool,
    /// Whether it is not stopped yet, but about to be.
    #[prost(bool, tag = "15")]
    pub stop_comes: bool,
    /// Real, effective, saved and file system user id (zombies; of others a resource).
    #[prost(uint32, repeated, tag = "16")]
    pub uids: Vec<u32>,
    /// The same of groups.
    #[prost(uint32, repeated, tag = "17")]
    pub gids: Vec<u32>,
    /// Supplementary groups (zombies).
    #[prost(uint32, repeated, tag = "18")]
    pub groups: Vec<u32>,
    /// Its number in the image, by which its records are found.
    #[prost(uint32, tag = "19")]
    pub number: u32,
    /// The numbers of its threads, in their order; the leader's is its own.
    #[prost(uint32, repeated, tag = "20")]
    pub thread_numbers: Vec<u32>,
    /// The number of the space that its memory is; 0 for a zombie.
    #[prost(uint32, tag = "21")]
    pub space_number: u32,
    /// When it was started, in ticks since the boot; 0 in old images.
    #[prost(uint64, tag = "22")]
    pub start_ticks: u64,
    /// Its pid in each pid namespace from the dumper's inward; none in old images.
    #[prost(int32, repeated, tag = "23")]
    pub namespace_pids: Vec<i32>,
    /// The number of an earlier task whose descriptor table it has, and so no descriptors of its
    /// own; 0 for none.
    #[prost(uint32, tag = "24")]
    pub descriptors_of: u32,
    /// The same of working directory, root directory and umask.
    #[prost(uint32, tag = "25")]
    pub directories_of: u32,
    /// The same of what is undone to semaphores.
    #[prost(uint32, tag = "26")]
    pub undo_of: u32,
    /// The wait status with which its leader has ended while its other threads run on; none where
    /// the leader lives, and of a zombie. Records of the process have its number all the same.
    #[prost(int32, optional, tag = "27")]
    pub leader_end: Option<i32>,
    /// As `descriptors_of`, of the I/O context.
    #[prost(uint32, tag = "28")]
    pub io_of: u32,
    /// The number of an earlier task whose memory it has, and so no record of its own of that, nor
    /// of what belongs to it; its space is that task's. 0 for none.
    #[prost(uint32, tag = "29")]
    pub memory_of: u32,
    /// The same of signal handlers.
    #[prost(uint32, tag = "30")]
    pub handlers_of: u32,
    /// Whether it was continued by `SIGCONT`, and its parent has not waited for that.
    #[prost(bool, tag = "31")]
    pub continued: bool,
}

impl Tree {
    /// The record of the tree, one an image.
    pub fn record(&self) -> Record {
        Record {
            tag: tag::TREE,
            version: TREE_VERSION,
            id: 0,
            payload: self.encode_to_vec(),
        }
    }

    /// What a record of the tree says, of whichever version.
    ///
    /// # Errors
    /// [`resources::Error::Corrupt`].
    pub fn read(record: &Record) -> Result<Self> {
        let corrupt = |what: String| Error::from(resources::Error::corrupt("tree", what));
        let read = image::strict::decode::<Self>(&record.payload);
        let mut tree = read.map_err(|error| corrupt(format!("the list of tasks: {error}")))?;
        match record.version {
            TREE_VERSION => Ok(tree),
            1 => match tree.number_by_pids() {
                true => Ok(tree),
                false => Err(corrupt("tasks of version 1 have numbers".to_owned())),
            },
            other => Err(corrupt(format!("the list of tasks has version {other}"))),
        }
    }

    /// Numbers tasks and spaces as version 1 did; false where they have numbers.
    fn number_by_pids(&mut self) -> bool {
        let mut were_none = self.boot.is_empty();
        for node in &mut self.tasks {
            were_none &= node.number == 0
                && node.thread_numbers.is_empty()
                && node.space_number == 0
                && node.start_ticks == 0
                && node.leader_end.is_none()
                && What::ALL.iter().all(|what| node.shared_with(*what) == 0)
                && node.namespace_pids.is_empty();
            node.number = node.pid.cast_unsigned();
            let tids = node.threads.iter();
            node.thread_numbers = tids.map(|tid| tid.cast_unsigned()).collect();
            if node.state() != State::Zombie {
                node.space_number = node.number;
            }
        }
        were_none
    }
}

impl Node {
    /// Its number in the image.
    pub fn id(&self) -> TaskId {
        TaskId::new(self.number).expect("checked when read")
    }

    /// Its threads: tid and number of each.
    pub fn numbered_threads(&self) -> impl Iterator<Item = (i32, TaskId)> {
        let numbers = self.thread_numbers.iter();
        let numbers = numbers.map(|number| TaskId::new(*number).expect("checked when read"));
        self.threads.iter().copied().zip(numbers)
    }

    /// The numbers of its threads that have not ended: all but the leader, where that has.
    pub fn living_ids(&self) -> Vec<TaskId> {
        let ended = usize::from(self.leader_end.is_some());
        let living = self.numbered_threads().skip(ended);
        living.map(|(_, id)| id).collect()
    }

    /// The number of the task whose one it has of `what` as well; 0 for one of its own.
    pub const fn shared_with(&self, what: What) -> u32 {
        match what {
            What::Descriptors => self.descriptors_of,
            What::Directories => self.directories_of,
            What::SemaphoreUndo => self.undo_of,
            What::IoContext => self.io_of,
            What::Memory => self.memory_of,
            What::Handlers => self.handlers_of,
        }
    }

    /// Whether it has what `part` is of as its own, or is the first of those who share it.
    pub fn has_own(&self, part: &dyn ErasedPart) -> bool {
        match part.holder() {
            Holder::Task => true,
            Holder::Memory => self.memory_of == 0,
            Holder::Handlers => self.handlers_of == 0,
        }
    }

    /// The number of the task whose `what` it has: its own, or that of an earlier one.
    pub const fn number_of(&self, what: What) -> u32 {
        match self.shared_with(what) {
            0 => self.number,
            first => first,
        }
    }

    /// The number of the task whose memory it has.
    pub const fn memory_number(&self) -> u32 {
        self.number_of(What::Memory)
    }

    /// Notes that it has that of task number `first`.
    pub const fn share(&mut self, what: What, first: u32) {
        match what {
            What::Descriptors => self.descriptors_of = first,
            What::Directories => self.directories_of = first,
            What::SemaphoreUndo => self.undo_of = first,
            What::IoContext => self.io_of = first,
            What::Memory => self.memory_of = first,
            What::Handlers => self.handlers_of = first,
        }
    }

    /// The space that its memory is.
    pub const fn space(&self) -> SpaceId {
        SpaceId(self.space_number)
    }
}

/// What a task was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum State {
    Running = 0,
    Stopped = 1,
    Zombie = 2,
}

/// What the processor knows of a thread.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ThreadState {
    /// `struct user_regs_struct`, word by word.
    #[prost(uint64, repeated, tag = "1")]
    pub registers: Vec<u64>,
    /// The XSAVE area as `PTRACE_GETREGSET` gives it.
    #[prost(bytes = "vec", tag = "2")]
    pub xstate: Vec<u8>,
    /// The mask of blocked signals.
    #[prost(fixed64, tag = "3")]
    pub mask: u64,
    /// A call to be made before the thread gets its registers, so that the kernel knows how much
    /// of its wait remains.
    #[prost(message, optional, tag = "4")]
    pub remake: Option<Remake>,
    /// Which of its calls are handed to itself, if any are.
    #[prost(message, optional, tag = "5")]
    pub dispatch: Option<UserDispatch>,
}

/// System calls that are not made but handed to the thread's handler of `SIGSYS`
/// (`PR_SET_SYSCALL_USER_DISPATCH`, prctl(2)).
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct UserDispatch {
    /// `PR_SYS_DISPATCH_EXCLUSIVE_ON` (1) or `PR_SYS_DISPATCH_INCLUSIVE_ON` (2).
    #[prost(uint64, tag = "1")]
    pub mode: u64,
    /// The address of the byte that says whether calls are made; 0 for none.
    #[prost(uint64, tag = "2")]
    pub selector: u64,
    /// Where the code begins whose calls are made in any case, or alone are not.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    /// How long that code is, in bytes.
    #[prost(uint64, tag = "4")]
    pub len: u64,
}

impl From<Dispatch> for UserDispatch {
    fn from(dispatch: Dispatch) -> Self {
        Self {
            mode: dispatch.mode,
            selector: dispatch.selector,
            offset: dispatch.offset,
            len: dispatch.len,
        }
    }
}

impl From<UserDispatch> for Dispatch {
    fn from(dispatch: UserDispatch) -> Self {
        Self {
            mode: dispatch.mode,
            selector: dispatch.selector,
            offset: dispatch.offset,
            len: dispatch.len,
        }
    }
}

impl ThreadState {
    /// That of a leader that has ended and had this `mask`: it runs no code any more.
    pub fn of_ended(mask: u64) -> Self {
        Self {
            registers: vec![0; 27],
            mask,
            ..Self::default()
        }
    }
}

/// The descriptors of a task.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Descriptors {
    #[prost(message, repeated, tag = "1")]
    pub descriptors: Vec<Descriptor>,
}

/// One descriptor.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Descriptor {
    #[prost(int32, tag = "1")]
    pub fd: i32,
    #[prost(uint32, tag = "2")]
    pub description: u32,
    #[prost(bool, tag = "3")]
    pub close_on_exec: bool,
}

/// Where in the file system a task is: descriptions of directories.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Place {
    #[prost(uint32, tag = "1")]
    pub cwd: u32,
    /// The root, if it is not the one that everybody has.
    #[prost(uint32, optional, tag = "2")]
    pub root: Option<u32>,
}
