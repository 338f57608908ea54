//! The records that belong to the tree as a whole; everything else stands with its resource.

use std::collections::{HashMap, HashSet};

use image::{Reader, Record, SpaceKind};
use prost::Message;
use resources::arch::instructions::Instructions;
use resources::arch::xstate::Layout;
use resources::cgroup::{self, Cgroups};
use resources::fd::{self, Description, DescriptionId, tags};
use resources::map::aio::{self, Context, Contexts};
use resources::map::memory;
use resources::map::placed::ProcessMappings;
use resources::map::registered::{self, Registration, Registrations};
use resources::map::vdso::{self, Vdso};
use resources::ns::{self, ErasedKind, Namespace};
use resources::task::{self, PartState};
use sys::arch::Registers;
use sys::process::Process;

mod check;
mod kind;
mod shared;
pub(crate) mod tag;
mod task_id;
mod tree;

pub use self::kind::ImageKind;
pub(crate) use self::shared::What;
pub(crate) use self::task_id::TaskId;
pub(crate) use self::tree::{
    Descriptor, Descriptors, FIRST_OBJECT, Node, Place, State, TREE_VERSION, ThreadState, Tree,
};
use crate::clocks::TreeClocks;
use crate::{Error, Result, known};

/// A record of the first version.
pub(crate) fn record(tag: u16, id: u32, payload: Vec<u8>) -> Record {
    Record {
        tag,
        version: 1,
        id,
        payload,
    }
}

/// The records of an image, sorted out and checked against each other.
pub(crate) struct Saved<'a> {
    pub tree: Tree,
    pub tasks: Vec<SavedTask<'a>>,
    /// Open file descriptions, by id.
    pub descriptions: Vec<Box<dyn Description>>,
    /// Owners and locks of descriptions, by the description's id.
    pub attributes: HashMap<u32, &'a [u8]>,
    /// The code of the tasks' vDSOs.
    pub vdsos: Vec<Vdso>,
    /// What the tree's clocks said; old images do not know.
    pub clocks: Option<TreeClocks>,
    /// Where the processor kept the extended state; old images do not know.
    pub processor: Option<Layout>,
    /// Which sets of instructions it had, where the dump was to say.
    pub instructions: Option<Instructions>,
    /// The control groups that the tasks are in, where those are not the dumper's.
    pub cgroups: Option<Cgroups>,
    /// The namespaces that the tree had of its own, in the order of [`ns::KINDS`].
    pub namespaces: Vec<Box<dyn Namespace>>,
}

/// The records of one task; empty for a zombie.
pub(crate) struct SavedTask<'a> {
    pub node: Node,
    pub memory: memory::Memory,
    pub descriptors: Vec<Descriptor>,
    pub place: Place,
    /// Its own locks on files.
    pub locks: Option<&'a [u8]>,
    /// Its contexts of asynchronous I/O.
    pub contexts: Vec<Context>,
    /// What of its memory is registered with userfaultfds of the tree.
    pub registered: Vec<Registration>,
    pub threads: Vec<SavedThread>,
}

/// The records of one thread.
pub(crate) struct SavedThread {
    pub tid: i32,
    pub state: ThreadState,
    /// Parts: those of the process stand with the leader, also one that has ended.
    pub parts: Vec<Box<dyn PartState>>,
}

impl SavedThread {
    /// What it has of the part with this number, if anything.
    pub fn part(&self, tag: u16) -> Option<&dyn PartState> {
        let part = self.parts.iter().find(|part| part.tag() == tag);
        part.map(|part| &**part)
    }

    /// The registers with which it goes on.
    pub fn registers(&self) -> Registers {
        let words = self.state.registers.as_slice();
        Registers::from_words(words.try_into().expect("checked when read"))
    }

    /// Where its stack ends.
    pub fn stack(&self) -> abi::Addr {
        self.registers().stack()
    }

    /// What it has of seccomp(2), if anything.
    pub fn filters(&self) -> Option<&dyn PartState> {
        self.part(task::tags::SECCOMP)
    }
}

fn corrupt(what: impl Into<String>) -> Error {
    resources::Error::corrupt("tree", what).into()
}

/// The records of an image by what they are about.
struct Sorted<'a> {
    /// By number and id; the first of each.
    all: HashMap<(u16, u32), &'a Record>,
    /// Parts of threads, by the threads' numbers.
    parts: HashMap<u32, Vec<&'a Record>>,
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
            if task::part_of(record.tag).is_some() {
                sorted.parts.entry(record.id).or_default().push(record);
            }
        }
        sorted
    }

    fn find(&self, tag: u16, id: u32) -> Option<&'a Record> {
        self.all.get(&(tag, id)).copied()
    }

    /// The one record of the image with this tag.
    fn decode<M: Message + Default>(&self, tag: u16, what: &str) -> Result<M> {
        decode(self.find(tag, 0), what)
    }

    /// The record of a task, or a thread, that is number `id` and is called `pid` elsewhere.
    fn decode_of<M: Message + Default>(
        &self,
        tag: u16,
        (id, pid): (TaskId, i32),
        what: &str,
    ) -> Result<M> {
        decode(self.find(tag, id.get()), &format!("{what} of {pid}"))
    }
}

fn decode<M: Message + Default>(record: Option<&Record>, what: &str) -> Result<M> {
    let record = record.ok_or_else(|| corrupt(format!("{what} is missing")))?;
    image::strict::decode(&record.payload).map_err(|e| corrupt(format!("{what}: {e}")))
}

/// Whether the image is one of a virtual machine's memory.
pub(crate) fn is_of_machine(reader: &Reader) -> bool {
    let mut spaces = reader.spaces().iter();
    spaces.any(|space| space.kind == SpaceKind::Block)
}

/// Whether the image says nothing but what processor a host has.
pub(crate) fn is_of_processor(reader: &Reader) -> bool {
    let has = |tag| reader.records().iter().any(|record| record.tag == tag);
    has(tag::PROCESSOR) && !has(tag::TREE) && !has(tag::STATISTICS)
}

/// True if the image has a list of tasks.
pub(crate) fn has_tree(reader: &Reader) -> bool {
    reader
        .records()
        .iter()
        .any(|record| record.tag == tag::TREE)
}

/// Decodes the open file descriptions, and checks each.
fn read_descriptions(reader: &Reader) -> Result<Vec<Box<dyn Description>>> {
    let mut descriptions = Vec::new();
    for record in reader.records() {
        let Some(kind) = fd::kind_of(record.tag) else {
            continue;
        };
        if record.id as usize != descriptions.len() {
            let what = format!("description {} is out of order", record.id);
            return Err(corrupt(what));
        }
        descriptions.push(kind.decode(DescriptionId(record.id), &record.payload)?);
    }
    Ok(descriptions)
}

/// The attributes of descriptions, of which there are so many.
fn read_attributes(reader: &Reader, descriptions: usize) -> Result<HashMap<u32, &[u8]>> {
    let attributes = reader
        .records()
        .iter()
        .filter(|record| record.tag == tags::ATTRIBUTES);
    let attributes = attributes.map(|record| (record.id, record.payload.as_slice()));
    let attributes = attributes.collect::<HashMap<_, _>>();
    match attributes.keys().find(|id| **id as usize >= descriptions) {
        Some(id) => {
            let what = format!("description {id}, which has attributes, is missing");
            Err(corrupt(what))
        }
        None => Ok(attributes),
    }
}

/// The namespaces of the tree.
fn read_namespaces(reader: &Reader) -> Result<Vec<Box<dyn Namespace>>> {
    let of_kind = |kind: &&dyn ErasedKind| {
        let mut records = reader.records().iter();
        let record = records.find(|record| record.tag == kind.tag())?;
        Some(kind.decode(&record.payload))
    };
    let all = ns::KINDS.iter().filter_map(of_kind);
    Ok(all.collect::<std::result::Result<_, _>>()?)
}

impl<'a> Saved<'a> {
    /// Sorts out the records of an image.
    pub fn read(reader: &'a Reader) -> Result<Self> {
        let sorted = Sorted::new(reader);
        ImageKind::check_tree(reader)?;
        let tree = sorted.find(tag::TREE, 0);
        let tree = tree.ok_or_else(|| corrupt("the list of tasks is missing"))?;
        let tree = Tree::read(tree)?;
        check::check(&tree)?;
        known::check(reader.records(), &tree)?;
        let descriptions = read_descriptions(reader)?;
        let attributes = read_attributes(reader, descriptions.len())?;
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
        let processor = processor.map(|_| sorted.decode(tag::PROCESSOR, "the processor"));
        let instructions = sorted.find(tag::INSTRUCTIONS, 0);
        let instructions =
            instructions.map(|_| sorted.decode(tag::INSTRUCTIONS, "the instructions"));
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
            instructions: instructions.transpose()?,
            cgroups,
            namespaces: read_namespaces(reader)?,
        })
    }
}

impl<'a> Saved<'a> {
    /// What an image of a processor alone has.
    pub fn processor_of(reader: &Reader) -> Result<Self> {
        let sorted = Sorted::new(reader);
        known::check(reader.records(), &Tree::default())?;
        Ok(Self {
            processor: Some(sorted.decode(tag::PROCESSOR, "the processor")?),
            instructions: Some(sorted.decode(tag::INSTRUCTIONS, "the instructions")?),
            ..Self::nothing()
        })
    }

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
            instructions: None,
            cgroups: None,
            namespaces: Vec::new(),
        }
    }

    /// Gives the tree's namespaces, in which this process is, what was in the way of its objects.
    pub fn finish_namespaces(&self) -> Result<()> {
        let mut all = self.namespaces.iter();
        Ok(all.try_for_each(|namespace| namespace.finish())?)
    }

    /// The kinds of its namespaces, as flags of unshare(2).
    pub fn namespace_flags(&self) -> i32 {
        let all = self.namespaces.iter();
        all.fold(0, |flags, namespace| flags | namespace.flag())
    }

    /// A task that has description `id`, and its number there.
    pub fn holder(&self, id: u32) -> Option<(i32, i32)> {
        self.tasks.iter().find_map(|task| {
            let mut descriptors = task.descriptors.iter();
            let descriptor = descriptors.find(|one| one.description == id)?;
            Some((task.node.pid, descriptor.fd))
        })
    }

    /// What its processes have of mappings that only they can make.
    pub fn placed(&self) -> Vec<ProcessMappings<'_>> {
        let all = self.tasks.iter().map(|task| ProcessMappings {
            process: task.process(),
            mappings: &task.memory.mappings,
            contexts: &task.contexts,
        });
        all.collect()
    }

    /// Process `pid` as it is restored.
    pub fn process(&self, pid: i32) -> Process {
        let task = self.tasks.iter().find(|task| task.node.pid == pid);
        task.map_or_else(|| Process::new(pid), SavedTask::process)
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

    /// Whether a thread runs 32-bit code.
    pub fn has_32_bit_code(&self) -> bool {
        let mut threads = self.tasks.iter().flat_map(SavedTask::living);
        threads.any(|thread| thread.registers().is_32_bit())
    }

    /// The code of the vDSO with this build id.
    pub fn vdso_code(&self, build_id: &[u8]) -> Option<&[u8]> {
        let mut all = self.vdsos.iter();
        let vdso = all.find(|vdso| vdso.build_id == build_id);
        vdso.map(|vdso| vdso.code.as_slice())
    }

    /// The task whose descriptors a task has: another's, if it shares them.
    pub fn with_descriptors_of<'t>(&'t self, task: &'t SavedTask<'a>) -> &'t SavedTask<'a> {
        self.first_with(task, What::Descriptors)
    }

    /// The task that has the record of the memory that a task has: another, if it shares that.
    pub fn with_memory_of<'t>(&'t self, task: &'t SavedTask<'a>) -> &'t SavedTask<'a> {
        self.first_with(task, What::Memory)
    }

    fn first_with<'t>(&'t self, task: &'t SavedTask<'a>, what: What) -> &'t SavedTask<'a> {
        let of = task.node.shared_with(what);
        if of == 0 {
            return task;
        }
        let mut others = self.tasks.iter();
        let other = others.find(|other| other.node.number == of);
        other.unwrap_or(task)
    }

    /// All tasks that have the memory of `first`, which has it as its own or first, and itself.
    pub fn all_with_memory_of<'t>(
        &'t self,
        first: &'t SavedTask<'a>,
    ) -> impl Iterator<Item = &'t SavedTask<'a>> {
        let number = first.node.number;
        let all = self.tasks.iter().filter(|task| !task.threads.is_empty());
        all.filter(move |task| task.node.memory_number() == number)
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

    /// How many descriptors a restore needs: above the highest number that a task has
    /// stand the pool's, and the restorer has some of its own.
    pub fn descriptors_needed(&self) -> u64 {
        const OWN: u64 = 256;
        let descriptors = self.tasks.iter().flat_map(|task| &task.descriptors);
        let highest = descriptors.map(|descriptor| descriptor.fd).max();
        let highest = u64::from(highest.unwrap_or(0).cast_unsigned());
        highest + 2 * self.descriptions.len() as u64 + OWN
    }
}

impl<'a> SavedTask<'a> {
    /// Its threads that have not ended: all but the leader, where that has.
    pub fn living(&self) -> &[SavedThread] {
        let ended = usize::from(self.node.leader_end.is_some());
        self.threads.get(ended..).unwrap_or_default()
    }

    /// The process as it is restored: the first thread that has not ended answers for it.
    pub fn process(&self) -> Process {
        let pid = self.node.pid;
        let tid = self.living().first().map_or(pid, |thread| thread.tid);
        Process::answered_by(pid, tid)
    }

    fn read(sorted: &Sorted<'a>, node: &Node, descriptions: usize) -> Result<Self> {
        let mut task = Self {
            node: node.clone(),
            memory: memory::Memory::default(),
            descriptors: Vec::new(),
            place: Place::default(),
            locks: None,
            contexts: Vec::new(),
            registered: Vec::new(),
            threads: Vec::new(),
        };
        if node.state() == State::Zombie {
            return Ok(task);
        }
        let pid = node.pid;
        let of_task = (node.id(), pid);
        if node.memory_of == 0 {
            task.memory = sorted.decode_of(memory::TAG, of_task, "memory")?;
        } else if sorted.find(memory::TAG, node.number).is_some() {
            return Err(corrupt(format!(
                "task {pid} has another's memory and its own"
            )));
        }
        let list: Descriptors = sorted.decode_of(tag::DESCRIPTORS, of_task, "descriptors")?;
        task.descriptors = list.descriptors;
        if node.descriptors_of != 0 && !task.descriptors.is_empty() {
            let what = format!("task {pid} has another's descriptors and some of its own");
            return Err(corrupt(what));
        }
        task.place = sorted.decode_of(tag::PLACE, of_task, "place")?;
        let locks = sorted.find(tags::LOCKS, node.number);
        task.locks = locks.map(|record| record.payload.as_slice());
        let contexts = sorted.find(aio::TAG, node.number);
        let contexts = contexts.map(|record| record.payload.as_slice());
        task.contexts = Contexts::read(contexts, &task.memory.mappings)?.contexts;
        let registered = sorted.find(registered::TAG, node.number);
        let registered = registered.map(|record| record.payload.as_slice());
        let registered = Registrations::read(registered, &task.memory.mappings)?;
        task.registered = registered.registrations;
        let files = task.memory.mappings.iter().filter_map(|map| map.file);
        let named = task
            .descriptors
            .iter()
            .map(|descriptor| descriptor.description);
        let exe = (node.memory_of == 0).then_some(task.memory.exe);
        let place = exe.into_iter().chain([task.place.cwd]);
        let place = place.chain(task.place.root);
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
        task.read_threads(sorted)?;
        Ok(task)
    }

    fn read_threads(&mut self, sorted: &Sorted<'a>) -> Result<()> {
        for (tid, id) in self.node.numbered_threads() {
            let state: ThreadState = sorted.decode_of(tag::THREAD, (id, tid), "registers")?;
            if state.registers.len() != 27 {
                let got = state.registers.len();
                return Err(corrupt(format!("thread {tid} has {got} registers")));
            }
            let parts = sorted.parts.get(&id.get()).into_iter().flatten();
            let parts = parts.filter_map(|record| {
                let part = task::part_of(record.tag)?;
                Some(part.decode(tid, &record.payload))
            });
            let parts = parts.collect::<resources::Result<_>>()?;
            self.threads.push(SavedThread { tid, state, parts });
        }
        Ok(())
    }
}
