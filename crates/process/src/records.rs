//! The records that belong to the tree as a whole; everything else stands with its resource.

use std::collections::{HashMap, HashSet};

use image::{Reader, Record, SpaceKind};
use prost::Message;
use resources::cgroup::{self, Cgroups};
use resources::fd::tags;
use resources::map::memory;
use resources::map::vdso::{self, Vdso};
use resources::task::interrupted::Remake;
use resources::task::xstate::Layout;

use crate::clocks::TreeClocks;
use crate::{Error, Result, Statistics, known};

/// Record numbers of this crate.
pub(crate) mod tag {
    /// [`super::Tree`], one an image.
    pub const TREE: u16 = 1;
    /// [`super::ThreadState`], by tid.
    pub const THREAD: u16 = 2;
    /// [`super::Descriptors`], by pid.
    pub const DESCRIPTORS: u16 = 3;
    /// [`super::Place`], by pid.
    pub const PLACE: u16 = 4;
    /// [`crate::Statistics`], one an image.
    pub const STATISTICS: u16 = 5;
    /// [`crate::clocks::TreeClocks`], one an image.
    pub const CLOCKS: u16 = 6;
    /// [`resources::task::xstate::Layout`], one an image.
    pub const PROCESSOR: u16 = 7;
    /// Hard links that the dump made (`links`), one an image.
    pub const LINKS: u16 = 8;
}

/// The tasks of the tree, parents before children, the root first.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Tree {
    #[prost(message, repeated, tag = "1")]
    pub tasks: Vec<Node>,
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

/// The records of an image, sorted out and checked against each other.
pub(crate) struct Saved<'a> {
    pub tree: Tree,
    pub tasks: Vec<SavedTask<'a>>,
    /// Open file descriptions by id: the kind's number and the payload.
    pub descriptions: Vec<(u16, &'a [u8])>,
    /// Owners and locks of descriptions, by the description's id.
    pub attributes: HashMap<u32, &'a [u8]>,
    /// The code of the tasks' vDSOs.
    pub vdsos: Vec<Vdso>,
    /// What the tree's clocks said; old images do not know.
    pub clocks: Option<TreeClocks>,
    /// Where the processor kept the extended state; old images do not know.
    pub processor: Option<Layout>,
    /// The control groups that the tasks are in, where those are not the dumper's.
    pub cgroups: Option<Cgroups>,
}

/// The records of one task; empty for a zombie.
pub(crate) struct SavedTask<'a> {
    pub node: Node,
    pub memory: memory::Memory,
    pub descriptors: Vec<Descriptor>,
    pub place: Place,
    /// Its own locks on files.
    pub locks: Option<&'a [u8]>,
    pub threads: Vec<SavedThread<'a>>,
}

/// The records of one thread.
pub(crate) struct SavedThread<'a> {
    pub tid: i32,
    pub state: ThreadState,
    /// Parts by number: those of the process stand with the leader.
    pub parts: Vec<(u16, &'a [u8])>,
}

impl SavedThread<'_> {
    /// The payload of a part.
    pub fn part(&self, tag: u16) -> Option<&[u8]> {
        self.parts
            .iter()
            .find(|part| part.0 == tag)
            .map(|part| part.1)
    }
}

fn corrupt(what: impl Into<String>) -> Error {
    resources::Error::corrupt("tree", what).into()
}

/// The records of an image by what they are about.
struct Sorted<'a> {
    /// By number and id; the first of each.
    all: HashMap<(u16, u32), &'a Record>,
    /// Parts of threads, by tid.
    parts: HashMap<u32, Vec<(u16, &'a [u8])>>,
}

impl<'a> Sorted<'a> {
    fn new(reader: &'a Reader) -> Self {
        let mut sorted = Self {
            all: HashMap::new(),
            parts: HashMap::new(),
        };
        for record in reader.records() {
            let key = (record.tag, record.id);
            sorted.all.entry(key).or_insert(record);
            if is_part(record.tag) {
                let part = (record.tag, record.payload.as_slice());
                sorted.parts.entry(record.id).or_default().push(part);
            }
        }
        sorted
    }

    fn find(&self, tag: u16, id: i32) -> Option<&'a Record> {
        self.all.get(&(tag, id.cast_unsigned())).copied()
    }

    fn decode<M: Message + Default>(&self, tag: u16, id: i32, what: &str) -> Result<M> {
        let record = self.find(tag, id);
        let record = record.ok_or_else(|| corrupt(format!("{what} of {id} is missing")))?;
        image::strict::decode(&record.payload).map_err(|e| corrupt(format!("{what} of {id}: {e}")))
    }
}

/// Whether the image is one of a virtual machine's memory.
pub(crate) fn is_of_machine(reader: &Reader) -> bool {
    let mut spaces = reader.spaces().iter();
    spaces.any(|space| space.kind == SpaceKind::Block)
}

impl<'a> Saved<'a> {
    /// Sorts out the records of an image.
    pub fn read(reader: &'a Reader) -> Result<Self> {
        let sorted = Sorted::new(reader);
        if Statistics::is_of_predump(reader)? {
            let what = "is of a pre-dump: it has memory, but no tasks to bring back".to_owned();
            return Err(Error::Unfit(format!("the image {what}")));
        }
        if is_of_machine(reader) {
            let what = "the image is of a virtual machine's memory: there are no tasks in it";
            return Err(Error::Unfit(what.to_owned()));
        }
        let tree: Tree = sorted.decode(tag::TREE, 0, "the list of tasks")?;
        check_tree(&tree)?;
        known::check(reader.records(), &tree)?;
        let mut descriptions = Vec::new();
        for record in reader
            .records()
            .iter()
            .filter(|record| tags::is_kind(record.tag))
        {
            if record.id as usize != descriptions.len() {
                return Err(corrupt(format!(
                    "description {} is out of order",
                    record.id
                )));
            }
            descriptions.push((record.tag, record.payload.as_slice()));
        }
        let attributes = reader
            .records()
            .iter()
            .filter(|record| record.tag == tags::ATTRIBUTES);
        let attributes = attributes.map(|record| (record.id, record.payload.as_slice()));
        let attributes = attributes.collect();
        let mut tasks = Vec::new();
        for node in &tree.tasks {
            tasks.push(SavedTask::read(&sorted, node, descriptions.len())?);
        }
        let vdsos = reader.records().iter();
        let vdsos = vdsos.filter(|record| record.tag == vdso::TAG);
        let vdsos = vdsos.map(|record| vdso::read(&record.payload));
        let vdsos = vdsos.collect::<std::result::Result<_, _>>()?;
        let clocks = sorted.find(tag::CLOCKS, 0);
        let clocks = clocks.map(|record| TreeClocks::read(&record.payload));
        let processor = sorted.find(tag::PROCESSOR, 0);
        let processor = processor.map(|_| sorted.decode(tag::PROCESSOR, 0, "the processor"));
        let cgroups = sorted.find(cgroup::TAG, 0);
        let cgroups = cgroups.map(|record| cgroup::decode(&record.payload));
        let cgroups = cgroups.transpose()?;
        Ok(Self {
            tree,
            tasks,
            descriptions,
            attributes,
            vdsos,
            clocks: clocks.transpose()?,
            processor: processor.transpose()?,
            cgroups,
        })
    }
}

impl Saved<'_> {
    /// What an image of memory alone has.
    pub fn nothing() -> Self {
        Self {
            tree: Tree::default(),
            tasks: Vec::new(),
            descriptions: Vec::new(),
            attributes: HashMap::new(),
            vdsos: Vec::new(),
            clocks: None,
            processor: None,
            cgroups: None,
        }
    }

    /// Reads the code of those vDSOs that are not this host's, `own`, from the image.
    ///
    /// # Errors
    /// [`Error::Image`], also where an image that has their pages is missing; a code that is
    /// nowhere is corrupt.
    pub fn read_vdsos(&mut self, reader: &Reader, own: Option<&[u8]>) -> Result<()> {
        let needed = |vdso: &&mut Vdso| Some(vdso.build_id.as_slice()) != own;
        for vdso in self.vdsos.iter_mut().filter(needed) {
            let Some(space) = vdso.space else { continue };
            let kind = reader.space(image::SpaceId(space)).map(|space| space.kind);
            if kind.is_some_and(|kind| kind != image::SpaceKind::Vdso) {
                let what = format!("space {space:#x} is of another kind: {kind:?}");
                return Err(resources::Error::corrupt("vdso", what).into());
            }
            let len = vdso.len_bytes as usize;
            vdso.code = vec![0; len.next_multiple_of(image::PAGE_BYTES)];
            let read = reader.read_pages(image::SpaceId(space), 0, &mut vdso.code);
            read.map_err(|error| match error {
                image::Error::NoPage { page, .. } => {
                    let what = format!("space {space:#x} has only {page} pages");
                    Error::from(resources::Error::corrupt("vdso", what))
                }
                error => error.into(),
            })?;
            vdso.code.truncate(len);
        }
        Ok(())
    }

    /// The code of the vDSO with this build id.
    pub fn vdso_code(&self, build_id: &[u8]) -> Option<&[u8]> {
        let mut all = self.vdsos.iter();
        let vdso = all.find(|vdso| vdso.build_id == build_id);
        vdso.map(|vdso| vdso.code.as_slice())
    }

    /// Attributes of descriptions that no task has a descriptor of.
    pub fn attributes_in_flight(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let descriptors = self.tasks.iter().flat_map(|task| &task.descriptors);
        let held = descriptors.map(|descriptor| descriptor.description);
        let held = if self.attributes.is_empty() {
            HashSet::new()
        } else {
            held.collect::<HashSet<_>>()
        };
        let all = self.attributes.iter().map(|(id, payload)| (*id, *payload));
        all.filter(move |(id, _)| !held.contains(id))
    }

    /// How many descriptors a restore needs room for: above the highest number that a task has
    /// stand the pool's, and the restorer has some of its own.
    pub fn descriptors_room(&self) -> u64 {
        const OWN: u64 = 256;
        let descriptors = self.tasks.iter().flat_map(|task| &task.descriptors);
        let highest = descriptors.map(|descriptor| descriptor.fd).max();
        let highest = u64::from(highest.unwrap_or(0).cast_unsigned());
        highest + 2 * self.descriptions.len() as u64 + OWN
    }
}

impl<'a> SavedTask<'a> {
    fn read(sorted: &Sorted<'a>, node: &Node, descriptions: usize) -> Result<Self> {
        let mut task = Self {
            node: node.clone(),
            memory: memory::Memory::default(),
            descriptors: Vec::new(),
            place: Place::default(),
            locks: None,
            threads: Vec::new(),
        };
        if node.state() == State::Zombie {
            return Ok(task);
        }
        let pid = node.pid;
        task.memory = sorted.decode(memory::TAG, pid, "memory")?;
        let list: Descriptors = sorted.decode(tag::DESCRIPTORS, pid, "descriptors")?;
        task.descriptors = list.descriptors;
        task.place = sorted.decode(tag::PLACE, pid, "place")?;
        task.locks = sorted
            .find(tags::LOCKS, pid)
            .map(|record| record.payload.as_slice());
        let files = task.memory.mappings.iter().filter_map(|map| map.file);
        let named = task
            .descriptors
            .iter()
            .map(|descriptor| descriptor.description);
        let place = [task.memory.exe, task.place.cwd]
            .into_iter()
            .chain(task.place.root);
        if let Some(id) = files
            .chain(named)
            .chain(place)
            .find(|id| *id as usize >= descriptions)
        {
            return Err(corrupt(format!(
                "description {id}, which task {pid} has, is missing"
            )));
        }
        if task
            .descriptors
            .iter()
            .any(|descriptor| !(0..1 << 30).contains(&descriptor.fd))
        {
            return Err(corrupt(format!(
                "task {pid} has a descriptor without a number"
            )));
        }
        for tid in &node.threads {
            let state: ThreadState = sorted.decode(tag::THREAD, *tid, "registers")?;
            if state.registers.len() != 27 {
                let got = state.registers.len();
                return Err(corrupt(format!("thread {tid} has {got} registers")));
            }
            let parts = sorted.parts.get(&tid.cast_unsigned());
            let parts = parts.cloned().unwrap_or_default();
            task.threads.push(SavedThread {
                tid: *tid,
                state,
                parts,
            });
        }
        Ok(task)
    }
}

fn is_part(tag: u16) -> bool {
    (200..300).contains(&tag)
}

/// Signals that stop a task instead of ending it.
const STOPS: std::ops::RangeInclusive<i32> = 19..=22;

fn check_tree(tree: &Tree) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    let mut living = std::collections::HashSet::new();
    for (index, node) in tree.tasks.iter().enumerate() {
        let ids = node.threads.iter().copied().chain([node.pid]);
        let zombie = node.state() == State::Zombie;
        let led = node.threads.first() == Some(&node.pid) || zombie && node.threads.is_empty();
        let fresh = ids
            .skip(usize::from(!zombie))
            .all(|id| id > 0 && seen.insert(id));
        if !led || !fresh {
            return Err(corrupt(format!(
                "task {} is there twice or has no leader",
                node.pid
            )));
        }
        const SIGNALS: std::ops::RangeInclusive<i32> = 0..=64;
        let signals = [node.exit_signal, node.exit_status & 0x7f];
        if signals.iter().any(|signal| !SIGNALS.contains(signal)) {
            return Err(corrupt(format!("task {} ends by no signal", node.pid)));
        }
        if node.stop_signal != 0 && !STOPS.contains(&node.stop_signal) {
            return Err(corrupt(format!(
                "task {} is stopped by no signal",
                node.pid
            )));
        }
        if zombie && STOPS.contains(&(node.exit_status & 0x7f)) {
            return Err(corrupt(format!("task {} ends by no signal", node.pid)));
        }
        // Old images have none.
        if [&node.uids, &node.gids]
            .iter()
            .any(|ids| ![0, 4].contains(&ids.len()))
        {
            return Err(corrupt(format!("task {} has half an identity", node.pid)));
        }
        if !zombie {
            living.insert(node.pid);
        }
        if index > 0 && (node.parent == node.pid || !living.contains(&node.parent)) {
            return Err(corrupt(format!(
                "task {} has no parent before it",
                node.pid
            )));
        }
    }
    let root = tree
        .tasks
        .first()
        .ok_or_else(|| corrupt("the image has no task"))?;
    if root.state() == State::Zombie {
        return Err(corrupt("the root task is a zombie"));
    }
    Ok(())
}
