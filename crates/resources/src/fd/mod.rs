//! The family of open file descriptions: what a descriptor number refers to.
//!
//! A description is dumped once, however many descriptors of however many tasks refer to it, and
//! opened once by the restorer; tasks inherit it and move it to its numbers with `dup2`.

pub mod attributes;
pub mod block_device;
pub mod bpf_map;
mod build_id;
pub mod carried;
pub mod chardev;
pub mod decider;
mod description;
pub mod directory;
pub mod epoll;
pub mod eventfd;
pub mod fanotify;
pub mod fifo;
mod ghost;
mod id;
mod info;
pub mod inotify;
pub mod io_uring;
mod kinds;
pub mod late;
pub mod locks;
pub mod memfd;
pub mod mqueue;
pub mod namespace;
pub mod netlink;
mod own_pipe;
pub mod packet_socket;
pub mod path;
pub mod perf_event;
pub mod pidfd;
pub mod pipe;
pub mod place;
mod pressure;
pub mod process_file;
mod queue;
pub mod raw_socket;
mod ready;
mod refused;
pub mod regular;
pub mod segment;
pub mod shmem;
pub mod signalfd;
pub mod socket;
mod status;
pub mod table;
pub mod tags;
pub mod tcp;
#[cfg(test)]
pub(crate) mod testing;
pub mod timerfd;
pub mod tty;
pub mod tun;
pub mod udp;
pub mod unix;
pub mod unread;
pub mod userfaultfd;
pub mod vsock;
pub mod watched;

use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use abi::Span;
use rustix::fs::{FileType, Stat};
use sys::process::Process;

pub use description::{Description, ErasedKind};
pub use id::DescriptionId;
pub use info::Info;
pub use kinds::{KINDS, claim, kind_of, links_looked_up, worker};

use socket::diag::UnixIndex;
use watched::Watched;

use crate::callers::Callers;
use crate::script::Script;
use crate::{Allow, Error, Result};

/// One open file description as the dump sees it.
pub struct Open<'a> {
    /// Its number in the image.
    pub id: DescriptionId,
    /// A process that has it, and as which descriptor (-1: none, see `role`).
    pub process: Process,
    /// See `process`.
    pub fd: i32,
    /// What the link in /proc/PID/fd says: a path, "pipe:[123]", "anon_inode:[eventfd]".
    pub link: Vec<u8>,
    /// `fstat` of the file.
    pub stat: Stat,
    /// /proc/PID/fdinfo of the descriptor.
    pub info: Info,
    /// Whether `stat` is that of the path in `link`, so that nobody has to look there again.
    pub at_path: bool,
    /// Whether no task has a descriptor of it: it is on its way in a socket's queue.
    pub in_flight: bool,
    /// What a description without a descriptor is to the task, for messages: "its program".
    pub role: String,
    /// Answers of the kernel about the description, if it is a socket.
    pub(crate) known: socket::Known,
    own: OnceCell<OwnedFd>,
    /// Its options that were asked for together with those of others.
    told: OnceCell<socket::options::Answers>,
    fetch: Box<dyn Fn() -> Result<OwnedFd> + 'a>,
}

impl<'a> Open<'a> {
    /// A description; `fetch` makes a descriptor of it in this process on first need.
    pub fn new(
        id: DescriptionId,
        (process, fd): (Process, i32),
        (link, stat, info): (Vec<u8>, Stat, Info),
        fetch: impl Fn() -> Result<OwnedFd> + 'a,
    ) -> Self {
        Self {
            id,
            process,
            fd,
            link,
            stat,
            info,
            at_path: false,
            in_flight: false,
            role: "a descriptor in flight in a socket".to_owned(),
            known: socket::Known::default(),
            own: OnceCell::new(),
            told: OnceCell::new(),
            fetch: Box::new(fetch),
        }
    }

    /// A descriptor of the very same description in this process (`pidfd_getfd`), made on first
    /// need: what is asked of it does not disturb the target, what is set would.
    ///
    /// # Errors
    /// [`Error::Gone`] or [`Error::Kernel`].
    pub fn own(&self) -> Result<BorrowedFd<'_>> {
        if let Some(own) = self.own.get() {
            return Ok(own.as_fd());
        }
        let own = (self.fetch)()?;
        Ok(self.own.get_or_init(|| own).as_fd())
    }

    /// Whether it is a file of this type that has a path.
    #[must_use]
    pub fn is_file(&self, of_type: FileType) -> bool {
        self.link.starts_with(b"/") && FileType::from_raw_mode(self.stat.st_mode) == of_type
    }

    /// "fd 5 (pipe:[123])" or "its program (/bin/x)", for messages; sockets by their family.
    #[must_use]
    pub fn place(&self) -> String {
        let mut what = String::from_utf8_lossy(&self.link).into_owned();
        if let Some(socket) = socket::explain(self) {
            what = format!("{what}, {socket}");
        }
        match self.fd {
            0.. => format!("fd {} ({what})", self.fd),
            _ => format!("{} ({what})", self.role),
        }
    }

    /// The error that refuses this description by name until the tree has done something about it,
    /// as reading what waits.
    #[must_use]
    pub fn passing(&self, why: &str, allow: Option<&'static str>) -> Error {
        Error::Passing {
            pid: self.process.pid(),
            what: format!("{}: {why}", self.place()),
            allow,
            early: false,
            by_tree: true,
        }
    }

    /// The error that refuses this description by name.
    #[must_use]
    pub fn unsupported(&self, why: &str, allow: Option<&'static str>) -> Error {
        Error::Unsupported {
            pid: self.process.pid(),
            what: self.place(),
            why: why.to_owned(),
            allow,
        }
    }
}

/// Memory that descriptions share, and that a restore makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// The kind's number.
    pub tag: u16,
    /// The first description of it; it is made for that one.
    pub first: u32,
    /// Its size.
    pub bytes: u64,
    /// The size of its pages where they are huge pages.
    pub huge_page_bytes: Option<u64>,
    /// The space with its contents; on the first description only.
    pub space: Option<u32>,
    /// True if the kernel sets all of it aside when it is made, and not only where it has pages.
    pub takes_all: bool,
    /// True if it is on this host already.
    pub is_there: bool,
}

/// The state of a task of the tree, for a description that refers to the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A process or a thread that runs on.
    Alive,
    /// A process that has ended, and whose parent has not asked how.
    Ended,
}

/// All descriptions of a tree that are known so far, in the order of their ids. Indexes find one
/// without a look at all of them: they are looked for while the tree stands.
#[derive(Default)]
pub struct Opens<'a> {
    list: Vec<Open<'a>>,
    /// Positions in the list by inode number, in ascending order.
    inodes: OnceCell<HashMap<u64, Vec<usize>>>,
    /// What is asked about unix sockets for all of them at once.
    unix: UnixIndex,
}

impl<'a> Opens<'a> {
    /// Adds a description, whose id comes after those that are there.
    pub fn push(&mut self, open: Open<'a>) {
        self.list.push(open);
        self.inodes.take();
        self.unix = UnixIndex::default();
    }

    /// The descriptions whose inode has this number, on whichever device, in ascending order.
    pub fn numbered(&self, inode: u64) -> impl Iterator<Item = &Open<'a>> {
        let inodes = self.inodes.get_or_init(|| {
            let mut inodes = HashMap::<_, Vec<_>>::new();
            for (position, open) in self.list.iter().enumerate() {
                inodes.entry(open.stat.st_ino).or_default().push(position);
            }
            inodes
        });
        let positions = inodes.get(&inode).map_or(&[][..], Vec::as_slice);
        positions.iter().map(|position| &self.list[*position])
    }

    /// The descriptions of the same inode as `open`, in ascending order.
    pub fn of_inode<'s>(
        &'s self,
        open: &Open<'_>,
    ) -> impl Iterator<Item = &'s Open<'a>> + use<'s, 'a> {
        let device = open.stat.st_dev;
        let all = self.numbered(open.stat.st_ino);
        all.filter(move |other| other.stat.st_dev == device)
    }
}

impl<'a> FromIterator<Open<'a>> for Opens<'a> {
    fn from_iter<I: IntoIterator<Item = Open<'a>>>(opens: I) -> Self {
        Self {
            list: opens.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl<'a> Deref for Opens<'a> {
    type Target = [Open<'a>];

    fn deref(&self) -> &[Open<'a>] {
        &self.list
    }
}

impl<'a> DerefMut for Opens<'a> {
    fn deref_mut(&mut self) -> &mut [Open<'a>] {
        &mut self.list
    }
}

/// What a kind may ask of the dump while it describes a description.
pub trait DumpContext {
    /// What the caller allows.
    fn allow(&self) -> &Allow;
    /// All descriptions of the tree (also those that are only mapped), in the order of their ids.
    fn all(&self) -> &Opens<'_>;
    /// The description behind descriptor `fd` of task `pid`, if it is open there.
    fn at(&self, pid: i32, fd: i32) -> Option<DescriptionId>;
    /// What the process or thread with this number is, if it is of the tree.
    fn task(&self, tid: i32) -> Option<Task>;
    /// The process of a thread of the tree.
    fn process(&self, _tid: i32) -> Option<i32> {
        None
    }
    /// The processes of the tree that have not ended.
    fn processes(&self) -> Vec<Process> {
        Vec::new()
    }
    /// All descriptors of a description in the tree's tasks, as (pid, fd), in ascending order.
    fn numbers(&self, _id: DescriptionId) -> Vec<(i32, i32)> {
        Vec::new()
    }
    /// Adds a description that no task has a descriptor of (one in flight in a socket's queue);
    /// it is dumped after the present ones. Gives the id of an equal one that is known already.
    ///
    /// # Errors
    /// When it cannot be looked at.
    fn add(&mut self, process: &Process, own: OwnedFd) -> Result<DescriptionId>;
    /// Has the `len_bytes` bytes of `file` stored as a space of the image (holes and zero pages
    /// take no room) and gives the space's number.
    ///
    /// # Errors
    /// When the file cannot be read.
    fn store(&mut self, file: OwnedFd, len_bytes: u64) -> Result<u32>;
    /// Has `undo` called when the dump fails later: what a kind changes on the host while it
    /// describes a description must not outlast a failure.
    fn on_failure(&mut self, undo: Box<dyn FnOnce()>);
    /// Notes a hard link that was made for the image and stays as long as it does.
    fn linked(&mut self, _link: &std::path::Path) {}
    /// Where watched files are that are known.
    fn watched(&mut self) -> &mut Watched;
    /// Finds watched files, if they are not known yet.
    ///
    /// # Errors
    /// Those of [`Watched::find`].
    fn find_watched(&mut self, inodes: &[watched::Inode]) -> Result<()> {
        let mut watched = std::mem::take(self.watched());
        let found = watched.find_late(inodes, self.allow(), self.all());
        *self.watched() = watched;
        found
    }
}

/// What a kind may use while a description is opened again.
pub trait RestoreContext {
    /// What the caller allows.
    fn allow(&self) -> &Allow;
    /// A description that is open already (any, in [`Kind::finish`]).
    ///
    /// # Errors
    /// [`Error::Corrupt`] for an id that the image does not have or that is not open yet.
    fn description(&self, id: DescriptionId) -> Result<BorrowedFd<'_>>;
    /// All descriptions that are open already.
    fn opened(&self) -> Vec<BorrowedFd<'_>>;
    /// Objects that several descriptions share (the other end of a pipe, a deleted file's inode):
    /// the first one to be opened leaves them here for the others, by kind and key. To be dropped
    /// after the last [`Kind::finish`]: a held end of a pipe would keep its readers waiting.
    fn shared(&mut self) -> &mut HashMap<(u16, u64), Vec<OwnedFd>>;
    /// Files that were looked at already, by path: several descriptions may be of one.
    fn seen(&mut self) -> &mut HashMap<Vec<u8>, FileType>;
    /// Fills `file` with what [`DumpContext::store`] stored as `space`, in whole pages: a size that
    /// is none is to be cut again.
    ///
    /// # Errors
    /// For a space that the image does not have, damaged pages, a full disk.
    fn load(&mut self, space: u32, file: BorrowedFd<'_>) -> Result<()>;
    /// The file that takes the place of what was called `name` in the image (`--inherit-fd`):
    /// "pipe:[123]", or a path without its first slash.
    fn inherited(&self, _name: &[u8]) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Makes an empty file, or a directory, for nobody else yet, that goes again if the restore
    /// fails or is killed. Tells whether there was none of that name.
    ///
    /// # Errors
    /// When it cannot be made.
    fn make(&mut self, path: &std::path::Path, is_folder: bool) -> Result<bool>;
    /// What unix sockets put off until after the last [`Kind::finish`].
    fn unix(&mut self) -> &mut unix::Deferred;
    /// Has `then` called once the restore has succeeded as a whole.
    fn on_success(&mut self, then: Box<dyn FnOnce()>);
}

/// A stage at the end of a restore, when all tasks have what they had and their threads are
/// stopped. The restorer has all descriptions act in one stage before the next, in the order of
/// their ids, in its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All threads are stopped at the end of their scripts, memory is filled, and none has the
    /// registers of its program yet. [`Kind::call`] has threads make calls that nobody else can
    /// make. Packets are still held back, and the restore may still fail: nothing is done that
    /// others would see. Only kinds that [`Kind::STAYS`] act in this stage.
    Call,
    /// Nothing else can fail any more. One that [`Kind::needs`] another acts before that; the
    /// descriptor of one that [`Kind::is_late`] is a copy of a task's.
    Enable,
    /// Packets pass again ([`tcp::lock::release`]), and the tree may run already. Only kinds that
    /// [`Kind::STAYS`] act in this stage.
    Wake,
}

/// A kind of open file description. Implementers are unit structs, listed in [`KINDS`].
pub trait Kind: Sync + 'static {
    /// What an image says of a description (protobuf).
    type Record: prost::Message + Default + 'static;
    /// The kind's number in images; never reused.
    const TAG: u16;
    /// The kind's name, as users see it.
    const NAME: &'static str;
    /// True if the restorer keeps descriptions of this kind in its own table, however many there
    /// are: it sets them in motion at the end, or looks through all of them for an address in use.
    const STAYS: bool = false;
    /// The link of its descriptors in /proc, of kinds that have the same for all.
    const LINK: Option<&'static [u8]> = None;
    /// True if only the kernel's memory tells enough of it. The dumper looks up where the kernel
    /// has its structures before it stops a tree with a [`Kind::LINK`] of the kind.
    const LOOKED_UP: bool = false;
    /// True if the kernel works on requests of it while the tree is stopped, and maps memory of it
    /// into tasks. The dumper has [`Kind::settle`] end them, and looks at the tree once more; a
    /// process that shares its memory with others has none.
    const WORKS: bool = false;

    /// Whether requests are under way that end as soon as threads make the calls of
    /// [`Kind::settle`]. Called while the tree is stopped, only for kinds that [`Kind::WORKS`].
    fn is_busy(_open: &Open<'_>) -> bool {
        false
    }
    /// Adds the calls by which a stopped thread has such requests end; `fd` is its descriptor. They
    /// wait for nothing.
    fn settle(_fd: i32, _script: &mut Script) {}
    /// Whether `open` is of this kind. Must not change anything and be cheap: link, stat and info
    /// usually say it.
    fn claims(open: &Open<'_>) -> bool;
    /// The record that describes `open` in an image.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when it is in a state that cannot be saved.
    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Self::Record>;
    /// Refuses what is only seen once all descriptions of the tree are known, those in flight in
    /// sockets among them.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_among(_open: &Open<'_>, _all: &Opens<'_>, _allow: &Allow) -> Result<()> {
        Ok(())
    }
    /// Refuses what is another way than it was described. Called when the last task has made its
    /// last call and packets of connections are held back.
    ///
    /// # Errors
    /// [`Error::Passing`].
    fn check_last(_open: &Open<'_>, _record: &Self::Record) -> Result<()> {
        Ok(())
    }
    /// Refuses a record that no dump writes. Every other method may rely on it: an image's record
    /// is checked once, when it is decoded.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    fn check(_record: &Self::Record) -> Result<()> {
        Ok(())
    }
    /// One line for people, without the name of the kind: "count=3".
    fn describe(record: &Self::Record) -> String;
    /// The file's path for people, of kinds that have one: how /proc/PID/maps would call it.
    fn path(_record: &Self::Record) -> Option<String> {
        None
    }
    /// The memory that it is, of kinds that are memory which others may have as well.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the host is asked whether it is there.
    fn memory(_record: &Self::Record) -> Result<Option<SharedMemory>> {
        Ok(None)
    }
    /// Makes what other descriptions need when they are opened (an interface that their addresses
    /// are on): called for all of them before the first [`Kind::open`].
    ///
    /// # Errors
    /// As [`Kind::open`].
    fn prepare(_record: &Self::Record, _cx: &mut dyn RestoreContext) -> Result<()> {
        Ok(())
    }
    /// Opens the description in the restorer. Called in the order of ids. The offset and the
    /// status flags are the kind's business as well.
    ///
    /// # Errors
    /// When the file is missing or differs, or a system call fails.
    fn open(record: &Self::Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd>;
    /// The key of what it finds in, or leaves in, [`RestoreContext::shared`] under its kind's
    /// number, where nobody needs that when the last one with this key is open.
    fn holder(_record: &Self::Record) -> Option<u64> {
        None
    }
    /// What can only be done once all descriptions are open (data in flight, connections).
    ///
    /// # Errors
    /// As [`Kind::open`].
    fn finish(
        _record: &Self::Record,
        _own: BorrowedFd<'_>,
        _cx: &mut dyn RestoreContext,
    ) -> Result<()> {
        Ok(())
    }
    /// The stages at the end of a restore in which it acts.
    fn stages(_record: &Self::Record, _allow: &Allow) -> &'static [Stage] {
        &[]
    }
    /// Does what is to be done in one of [`Kind::stages`].
    ///
    /// # Errors
    /// As [`Kind::open`].
    fn act(
        _record: &Self::Record,
        _stage: Stage,
        _own: BorrowedFd<'_>,
        _allow: &Allow,
    ) -> Result<()> {
        Ok(())
    }
    /// Has threads of the tree make the calls that nobody else can make, in [`Stage::Call`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] where a thread lacks a descriptor; those of `callers`; [`Error::Kernel`]
    /// for calls that fail.
    fn call(
        _record: &Self::Record,
        _at: (DescriptionId, BorrowedFd<'_>),
        _callers: &mut dyn Callers,
    ) -> Result<()> {
        Ok(())
    }
    /// Whether the kernel looks up memory of the task for it, which is filled before that.
    fn pins_memory(_record: &Self::Record) -> bool {
        false
    }
    /// Refuses memory that cannot be looked up, in a process that has the description as `fd`;
    /// `written` is what can be written there.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_memory(
        _record: &Self::Record,
        (_pid, _fd): (i32, i32),
        _written: &[Span],
    ) -> Result<()> {
        Ok(())
    }
    /// Calls that a task which has the description must make itself, once, after all its
    /// descriptors have their numbers and all tasks and threads exist (`epoll_ctl`, locks,
    /// `F_SETOWN`). `fd` is its number there.
    fn in_task(_record: &Self::Record, _fd: i32, _script: &mut Script) {}
    /// The process that must make the calls of [`Kind::in_task`]; any one that has it where none.
    fn task(_record: &Self::Record) -> Option<i32> {
        None
    }
    /// Whether it can only be opened when all tasks exist: [`Kind::open`] gives what keeps its
    /// place then.
    fn is_late(_record: &Self::Record) -> bool {
        false
    }
    /// One that is late as well, and that the same task must have open when it opens this one.
    /// That needs none itself.
    fn needs(_record: &Self::Record) -> Option<DescriptionId> {
        None
    }
    /// Adds the calls by which a task opens one that [`Kind::is_late`]. It gets the lowest number
    /// that is free there, which is `number`; what it [`Kind::needs`] has the number `needed`.
    fn open_in_task(
        _record: &Self::Record,
        _number: i32,
        _needed: Option<i32>,
        _script: &mut Script,
    ) {
        unreachable!("{}: never late, so no task opens it", Self::NAME);
    }
}
