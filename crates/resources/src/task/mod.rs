//! The family of task state: what a process or a thread has besides memory and descriptors.

use std::rc::Rc;

use sys::arch::Registers;
use sys::proc::{Malformed, Stat, Status};
use sys::process::Process;
use sys::ptrace::{Filter, RseqArea};

use crate::kernel::credentials::{Credentials, CredentialsReader};
use crate::map::memory::Memory;
use crate::script::{Answers, DataAt, Script, StepAt};
use crate::{Allow, Error, Inherited, Result};

mod actions;
mod altstack;
pub mod attributes;
mod autogroup;
mod comm;
pub(crate) mod core_filter;
pub(crate) mod credentials;
mod dumpable;
mod futex_hash;
pub mod interrupted;
mod io_flusher;
mod itimers;
pub mod keyrings;
mod ldt;
pub mod leader;
mod limits;
pub(crate) mod login_uid;
mod membarrier;
mod memory_policy;
mod oom;
mod parts;
pub mod pending;
mod posix_timers;
mod refused;
mod robust;
mod rseq;
pub(crate) mod sandbox;
pub mod scheduling;
pub mod seccomp;
pub mod semaphores;
mod speculation;
mod state;
pub mod tags;
mod thread_areas;
mod tid_address;
mod umask;

pub use parts::{PARTS, part_of};
pub use state::{ErasedPart, PartState};

/// Whether a part belongs to a process or to each of its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One per process; planned in the leader's script.
    Process,
    /// One per thread.
    Thread,
}

/// Whose a part is, where processes may have that together by clone(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The process's, or the thread's.
    Task,
    /// The memory's (`CLONE_VM`).
    Memory,
    /// The signal handlers' (`CLONE_SIGHAND`).
    Handlers,
}

/// What a thread (the leader stands for its process) looks like from outside while it is stopped.
///
/// Text of /proc files is read on first need and once.
pub trait Facts {
    /// What the caller allows.
    fn allow(&self) -> &Allow;
    /// The process.
    fn process(&self) -> &Process;
    /// The process's number.
    fn pid(&self) -> i32 {
        self.process().pid()
    }
    /// The thread; equal to [`Facts::pid`] for the leader.
    fn tid(&self) -> i32;
    /// The contents of /proc/PID/task/TID/`name` ("stat", "status", "limits", "timerslack_ns", …;
    /// for the leader and files that only processes have ("timers"), of /proc/PID/`name`).
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn proc(&self, name: &str) -> Result<Rc<[u8]>>;
    /// What /proc/PID/task/TID/status says. Whoever implements this keeps it: nearly every part
    /// asks.
    ///
    /// # Errors
    /// As [`Facts::proc`].
    fn status(&self) -> Result<Rc<Status>> {
        let status = Status::parse(&self.proc("status")?);
        status.map(Rc::new).map_err(|e| malformed(self.tid(), e))
    }
    /// What /proc/PID/task/TID/stat says.
    ///
    /// # Errors
    /// As [`Facts::proc`].
    fn stat(&self) -> Result<Rc<Stat>> {
        let stat = Stat::parse(&self.proc("stat")?);
        stat.map(Rc::new).map_err(|e| malformed(self.tid(), e))
    }
    /// Whether the leader of the thread's session, process `session`, is there.
    fn is_there(&self, session: i32) -> bool {
        sys::procfs::has(session)
    }
    /// Whether thread `tid` of the process is there.
    fn has_thread(&self, tid: i32) -> bool {
        let pid = self.pid();
        tid == pid || sys::procfs::has(format_args!("{pid}/task/{tid}"))
    }
    /// Copies of the pending signals' `siginfo_t`, oldest first (`PTRACE_PEEKSIGINFO`); `shared`:
    /// those of the process. Asked only when a status says that there are some.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn pending(&self, shared: bool) -> Result<Vec<[u8; 128]>> {
        sys::ptrace::peek_siginfo(self.tid(), shared).map_err(|e| untraced(self.tid(), e))
    }
    /// The thread's registered area for restartable sequences (`PTRACE_GET_RSEQ_CONFIGURATION`);
    /// with address 0 when there is none.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn rseq(&self) -> Result<RseqArea> {
        sys::ptrace::rseq(self.tid()).map_err(|e| untraced(self.tid(), e))
    }
    /// The registers with which the thread was stopped.
    fn registers(&self) -> Registers;
    /// Which breakpoints of a debugger the processor has for the thread (debug register 7).
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn breakpoints(&self) -> Result<u64> {
        sys::ptrace::breakpoints(self.tid()).map_err(|e| untraced(self.tid(), e))
    }
    /// A segment of the thread's own (`PTRACE_GET_THREAD_AREA`), if it is set.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn thread_area(&self, number: u32) -> Result<Option<[u32; 4]>> {
        let area = sys::ptrace::thread_area(self.tid(), number);
        area.map_err(|e| untraced(self.tid(), e))
    }
    /// The seccomp filters of thread `tid` of the process, oldest first
    /// (`PTRACE_SECCOMP_GET_FILTER`). Asked only when a status says that there are some.
    ///
    /// # Errors
    /// [`crate::Error::Gone`] or [`crate::Error::Kernel`].
    fn filters(&self, tid: i32) -> Result<Vec<Filter>> {
        sys::ptrace::filters(tid).map_err(|e| untraced(tid, e))
    }
}

fn untraced(tid: i32, error: std::io::Error) -> Error {
    Error::kernel(
        format!("asking the kernel about stopped thread {tid}"),
        error,
    )
}

/// The error for a /proc file that cannot be understood.
pub(crate) fn malformed(tid: i32, error: Malformed) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
    Error::kernel(format!("reading what /proc says of {tid}"), source)
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
    Fork,
    /// After memory is in place, while the task still has the restorer's root directory. Number 0
    /// of its descriptors is free.
    Unplaced,
    /// After that, before descriptors have their numbers (pool descriptors are still open).
    Alone,
    /// All tasks and threads exist.
    Together,
    /// What a thread can only do once it is traced, while it still has all privileges. Where there
    /// is any of it, the rest of the script waits for the tracer.
    Filters,
    /// What loses privileges, in this order of calls.
    Privileges,
    /// Timers, pending signals: after everything that takes time.
    Last,
    /// After the thread is traced and would be killed with the restorer: what until now held that
    /// tie (the parent-death signal).
    Final,
}

/// The script of one thread, by phase, and what only the restorer can do for it.
#[derive(Clone, Debug, Default)]
pub struct ThreadPlan {
    phases: [Script; 8],
    /// The dumpable attribute, as long as it is what the thread starts with.
    dumpable: Option<u32>,
    /// Files that the restorer writes when the thread's script has ended, before it goes on.
    pub outside: Vec<Write>,
    /// Ended threads and processes that are there again for as long as [`Phase::Together`] lasts.
    pub ended: Vec<Ended>,
    /// Other processes that are needed in [`Phase::Together`], by the processor time that they use.
    pub clocks: Vec<i32>,
}

/// A thread of the process, or a child of it, that has ended and that something still refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ended {
    /// Its number.
    pub tid: i32,
    /// True for a thread, false for a process.
    pub thread: bool,
}

/// A file of /proc that the restorer writes from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Its name in /proc/PID.
    pub file: &'static str,
    /// What is written, at once.
    pub text: String,
}

impl ThreadPlan {
    /// The part of the script that belongs to `phase`.
    pub fn at(&mut self, phase: Phase) -> &mut Script {
        &mut self.phases[phase as usize]
    }

    /// Whether nothing belongs to `phase`.
    #[must_use]
    pub fn is_empty(&self, phase: Phase) -> bool {
        self.phases[phase as usize].steps.is_empty()
    }

    /// Takes the part of the script that belongs to `phase`.
    pub fn take(&mut self, phase: Phase) -> Script {
        std::mem::take(&mut self.phases[phase as usize])
    }
}

/// Facts about the thread that is planned, which its parts may need.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// The process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
    /// What it starts with, if no call changes it.
    pub inherited: &'a Inherited,
    /// Whether its process is the only one that is made.
    pub alone: bool,
    /// What its process has mapped.
    pub memory: &'a Memory,
}

impl Planned<'_> {
    /// Whether the thread is the first of its process.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.pid == self.tid
    }

    fn corrupt(&self, part: &impl Part, what: impl Into<String>) -> Error {
        Error::corrupt(format!("task {} {}", self.tid, part.name()), what)
    }

    fn mismatch(&self, part: &impl Part, what: impl std::fmt::Display) -> Error {
        let what = format!("task {}: {}: {what}", self.tid, part.name());
        Error::Mismatch { what }
    }
}

/// Reads the payload of a record that this dump has just written.
fn decode<M: prost::Message + Default>(part: &str, payload: &[u8]) -> Result<M> {
    image::strict::decode(payload).map_err(|what| Error::corrupt(part, what))
}

/// One part of a task's state. Implementers are unit structs, listed in [`PARTS`].
pub trait Part: Sync + 'static {
    /// What an image says of the part (protobuf).
    type Record: prost::Message + Default + 'static;

    /// The part's number in images; never reused.
    fn tag(&self) -> u16;
    /// The part's name, as users see it.
    fn name(&self) -> &'static str;
    /// Process or thread.
    fn scope(&self) -> Scope;
    /// Whose it is: of processes that have that together, the first is asked and planned.
    fn holder(&self) -> Holder {
        Holder::Task
    }
    /// Adds the calls that only the task itself can make (all threads of the tree are stopped,
    /// signals blocked). As few as possible.
    ///
    /// # Errors
    /// When the facts cannot be read.
    fn ask(&self, _facts: &dyn Facts, _questions: &mut Script) -> Result<Asked> {
        Ok(Asked::default())
    }
    /// The record for the image; `None` when everything is as in a fresh task.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for a state that cannot be restored.
    fn dump(
        &self,
        facts: &dyn Facts,
        asked: &Asked,
        answers: &Answers,
    ) -> Result<Option<Self::Record>>;
    /// Refuses a record that no dump writes. Every other method may rely on it: an image's record
    /// is checked once, when it is decoded.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`].
    fn check(&self, _record: &Self::Record) -> Result<()> {
        Ok(())
    }
    /// One line for people.
    fn describe(&self, record: &Self::Record) -> String;
    /// Adds the calls that make a fresh thread be as dumped. `record` is `None` when the image has
    /// none of this part for the thread: it was as in a fresh task.
    ///
    /// # Errors
    /// [`crate::Error::Mismatch`] for a state that this host or this process cannot give.
    fn plan(
        &self,
        record: Option<&Self::Record>,
        who: Planned<'_>,
        plan: &mut ThreadPlan,
    ) -> Result<()>;
}

/// Finds out before a tree is stopped what does not depend on its tasks: where the kernel's memory
/// has their credentials, and how security modules label this process.
pub fn prepare() {
    crate::kernel::credentials::prepare();
    sandbox::own_label();
}

/// The check of a process's threads, before one of them is made to call anything.
#[derive(Debug, Default)]
pub struct ProcessCheck {
    /// Credentials of the thread that was checked first.
    first: Option<Credentials>,
}

impl ProcessCheck {
    /// Checks that a thread may be made to call anything at all.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], [`crate::Error::Kernel`], and those of [`Facts::status`].
    pub fn thread(&mut self, facts: &dyn Facts) -> Result<()> {
        refused::check(facts)?;
        let reader = CredentialsReader::get().ok();
        let look = |reader: &CredentialsReader| {
            let tid = facts.tid();
            let failed = |error| Error::kernel(format!("read the credentials of {tid}"), error);
            reader.look(tid).map_err(failed)
        };
        let seen = reader.map(look).transpose()?;
        sandbox::check(facts, seen)?;
        if let Some(seen) = seen {
            keyrings::check(facts, seen, self.first)?;
            self.first.get_or_insert(seen);
        }
        seccomp::check(facts)
    }
}
