//! Frozen → inventory: everything but the contents of memory.

mod auxv;
mod cgroups;
mod facts;
mod files;
mod fitness;
pub(crate) mod look;
mod outside;
mod policies;
mod segments;
mod sharing;
mod spaces;
mod stops;
mod thread;
mod tree;
mod untold;
mod vdso;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::rc::Rc;

use abi::{Addr, Span};
use image::{Record, Run, SpaceId, SpaceKind, Writer};
use pages::Extent;
use prost::Message;
use resources::fd::tcp::backlog;
use resources::fd::tcp::lock::{Leftover, Lock};
use resources::map::listing::{Backing, Listed};
use resources::map::memory::{self, Mapping, Memory};
use resources::map::policy::Policy;
use resources::map::vdso::Vdso;
use resources::script::{Answers, Layout, Script};
use resources::task::{Asked, Facts, PARTS, Part, Scope, xstate};
use resources::{Allow, fd};
use sys::proc::{Stat, Status};
use syscalls::Sysno;
use tracee::{Batch, Outcome, Thread, Visit};

use crate::clocks::TreeClocks;
use crate::dump::Undo;
use crate::freeze::{Body, Frozen, Task};
use crate::links::{self, Link};
use crate::obstacles::Obstacles;
use crate::plan::births::births;
use crate::records::{Node, State, tag};
use crate::{Error, Result, over, track, uffd};
use auxv::Auxv;
use facts::ThreadFacts;
pub(crate) use files::{Contents, Object, fetch};
use look::Look;
use outside::{OfTask, Outside};
use untold::Untold;

/// What was found, ready to be written.
pub(crate) struct Inventory {
    pub records: Vec<Record>,
    /// Pages of the tasks' own.
    pub memory: Vec<spaces::Memory>,
    /// Pages that may be copies of the same page of a file.
    pub copies: Vec<(SpaceId, Range<u64>)>,
    /// Pages that children share with their parents.
    pub same: Vec<Run>,
    /// Contents of shared memory and deleted files.
    pub objects: Vec<Object>,
    /// What the parent image has: spaces and how many pages from the first on.
    pub kept: Vec<(SpaceId, u64)>,
    /// The vDSOs that are not this host's, with their code.
    pub foreign: Vec<Vdso>,
    /// Hard links that were made for the image.
    pub links: Vec<Link>,
    /// Called when the dump fails later.
    pub undo: Undo,
    /// Keeps the tree's TCP connections quiet.
    pub lock: Option<Lock>,
    /// What kept new connections away while the tree was waited for; to be dropped when it runs.
    pub leftover: Option<Leftover>,
}

impl Inventory {
    /// Says what the spaces of the objects are.
    pub fn name_objects(&self, writer: &Writer) {
        for object in &self.objects {
            let kind = match object.contents {
                Contents::File(_) => SpaceKind::Object,
                Contents::Bytes(_) => SpaceKind::Vdso,
            };
            let pages = object.len_bytes.div_ceil(abi::PAGE_BYTES);
            writer.space(over::named(object.space, kind, pages));
        }
    }
}

impl Inventory {
    /// How much is to be read of tasks and objects, at most.
    pub fn bytes(&self) -> u64 {
        let extents = self.memory.iter().flat_map(|memory| &memory.extents);
        let objects = self.objects.iter().map(|object| object.len_bytes);
        extents.map(Extent::bytes).chain(objects).sum()
    }
}

/// Collects the tree, with `look` for its memory. With `stay`, the blob stays in the tasks: they
/// are going to be killed.
///
/// What can be seen from outside is looked at first, and refused before a task is made to call
/// anything.
///
/// # Errors
/// [`Error::Obstacles`] for all that cannot be saved, before anything was changed.
pub(crate) fn collect(
    frozen: &mut Frozen,
    allow: &Allow,
    stay: bool,
    look: &mut dyn Look,
) -> Result<Inventory> {
    let mut obstacles = Obstacles::default();
    let has_its_clocks = fitness::check(frozen, &mut obstacles)?;
    let cgroups = obstacles.note(cgroups::collect(frozen, allow))?;
    let mut found = Vec::new();
    let mut vdsos = vdso::Vdsos::default();
    let limit = frozen.limit;
    for task in &frozen.tasks {
        limit.check(task.pid)?;
        let sinks = (&mut vdsos, &mut obstacles);
        found.push(Found::new(task, allow, (look, &found), sinks)?);
    }
    check_tree(&found, allow, &mut obstacles)?;
    let mut outside = None;
    // Where the kernel does not tell all of descriptors, their tasks are asked before.
    if !found.iter().any(Found::has_untold) {
        outside = Some(Outside::look(frozen, &mut found, allow, &mut obstacles)?);
    }
    obstacles.check()?;
    ask_all(frozen, &mut found, (stay, allow), &mut obstacles)?;
    let outside = match outside {
        Some(outside) => outside,
        None => Outside::look(frozen, &mut found, allow, &mut obstacles)?,
    };
    obstacles.check()?;
    let tree = tree::of(&found);
    let mut records = vec![record(tag::TREE, 0, tree.encode_to_vec())];
    let mut spaces = spaces::Spaces::default();
    let Outside {
        described,
        of_tasks,
    } = outside;
    for ((task, found), outside) in frozen.tasks.iter().zip(found).zip(of_tasks) {
        if let Some(outside) = outside {
            found.records(task, outside, (&mut spaces, look), &mut records)?;
        }
    }
    spaces.find_shared(&tree)?;
    records.extend(described.records);
    records.extend(cgroups.into_iter().flatten());
    records.extend(links::record(&described.links));
    let mut objects = described.objects;
    let foreign = vdsos.foreign();
    let kept = vdsos.store(look.vdsos(), &mut records, &mut objects);
    let copies = spaces.copies();
    let (memory, same) = spaces.into_parts();
    // After all timers were looked at: what was left of them then ends no earlier by these.
    let clocks = TreeClocks::of_stopped(has_its_clocks.then(|| &frozen.tasks[0]))?;
    records.push(record(tag::CLOCKS, 0, clocks.encode_to_vec()));
    let processor = xstate::Layout::here();
    records.push(record(tag::PROCESSOR, 0, processor.encode_to_vec()));
    Ok(Inventory {
        records,
        memory,
        copies,
        same,
        objects,
        kept,
        foreign,
        links: described.links,
        undo: described.undo,
        lock: described.lock,
        leftover: None,
    })
}

/// Asks all tasks what only they can say.
fn ask_all(
    frozen: &mut Frozen,
    found: &mut [Found],
    how: (bool, &Allow),
    obstacles: &mut Obstacles,
) -> Result<()> {
    let limit = frozen.limit;
    for (task, found) in frozen.tasks.iter_mut().zip(found) {
        limit.check(task.pid)?;
        if !task.is_zombie() {
            found.ask(task, how, obstacles)?;
        }
    }
    Ok(())
}

/// Notes what of the tree as a whole is not saved.
fn check_tree(found: &[Found], allow: &Allow, obstacles: &mut Obstacles) -> Result<()> {
    if !allow.skip_in_flight {
        let rows = found.iter().map(|one| (one.node.pid, &one.rows));
        backlog::check(rows.flat_map(|(pid, rows)| rows.iter().map(move |row| (pid, row))))?;
    }
    let tree = tree::of(found);
    obstacles.note(fitness::check_session(&tree, allow))?;
    obstacles.note(births(&tree))?;
    let listed = found.iter().map(|one| (one.node.pid, &*one.listed));
    segments::check(listed, obstacles)
}

pub(super) fn record(tag: u16, id: i32, payload: Vec<u8>) -> Record {
    Record {
        tag,
        version: 1,
        id: id.cast_unsigned(),
        payload,
    }
}

/// One task, looked at.
struct Found {
    node: Node,
    stat: Stat,
    listed: Vec<Listed>,
    brk: u64,
    auxv: Option<Vec<u8>>,
    /// Whether the leader of its session was found in the tree before.
    leader_is_known: bool,
    vdso: vdso::Seen,
    /// What /proc says of each thread, in their order.
    statuses: Vec<Rc<Status>>,
    lock_future: u32,
    /// The memory policies of its mappings, by their first addresses.
    policies: HashMap<Addr, Policy>,
    records: Vec<Record>,
    rows: Vec<fd::table::Row>,
}

impl Found {
    /// Looks at a task from outside, after those in `before`, its parent among them.
    fn new(
        task: &Task,
        allow: &Allow,
        (look, before): (&mut dyn Look, &[Self]),
        (vdsos, obstacles): (&mut vdso::Vdsos, &mut Obstacles),
    ) -> Result<Self> {
        let pid = task.pid;
        let (stat, _) = task.stat()?;
        let leader_is_known = before.iter().any(|one| one.node.pid == stat.session);
        let mut found = Self {
            node: node(task, &stat),
            stat,
            listed: Vec::new(),
            brk: 0,
            auxv: None,
            leader_is_known,
            vdso: vdso::Seen::default(),
            statuses: Vec::new(),
            lock_future: 0,
            policies: HashMap::new(),
            records: Vec::new(),
            rows: Vec::new(),
        };
        if task.is_zombie() {
            return found.identify(task);
        }
        found.listed = look.mappings(task)?;
        found.listed.retain(|listed| listed.name != b"[vsyscall]");
        check_returned(task, &found.listed)?;
        let seen = obstacles.note(vdsos.look(task, &mut found.listed))?;
        found.vdso = seen.unwrap_or_default();
        track::forget_watched(pid, &mut found.listed)?;
        for listed in &found.listed {
            obstacles.note(Mapping::of(listed, pid, None))?;
        }
        for thread in task.threads() {
            let facts = found.facts(task, thread, allow);
            obstacles.note(resources::task::check(&facts))?;
            found.statuses.push(facts.status()?);
        }
        let parent = before.iter().find(|one| one.node.pid == found.node.parent);
        let parent = parent.map(|one| (one.node.pid, one.rows.as_slice()));
        found.rows = fd::table::read(pid, (task.proc.as_fd(), &task.spent), parent)?;
        Ok(found)
    }

    /// What a thread of the task looks like from outside.
    fn facts<'a>(&self, task: &'a Task, thread: &Thread, allow: &'a Allow) -> ThreadFacts<'a> {
        let proc = (task.proc.as_fd(), &*task.spent);
        let known = (thread.saved.rseq, self.leader_is_known);
        ThreadFacts::new(allow, (task.pid, thread.tid), proc, known)
    }

    /// Whether its tasks must be asked what the kernel does not tell of its descriptors.
    fn has_untold(&self) -> bool {
        Untold::is_among(&self.rows)
    }

    /// Adds whose child has ended, which a zombie still shows.
    fn identify(mut self, task: &Task) -> Result<Self> {
        let status = task.status()?;
        self.node.uids = status.uids.to_vec();
        self.node.gids = status.gids.to_vec();
        self.node.groups = status.groups;
        Ok(self)
    }

    /// Finds room for a visit's stub.
    fn prepare_visit(&self, threads: Vec<Thread>, memory: File) -> Result<Visit> {
        if let Some(stub) = self.vdso.padding {
            return Ok(Visit::at(threads, memory, stub));
        }
        let dead_end = || uffd::with_dead_end(&memory, &self.listed);
        if let Some(end) = (!self.vdso.is_there).then(dead_end).flatten() {
            return Ok(Visit::over(threads, memory, end)?);
        }
        let kernel = self.vdso.behind_proxy.into_iter();
        let executable = kernel.chain(uffd::executable(&self.listed));
        let executable = executable.collect::<Vec<_>>();
        Ok(Visit::new(threads, memory, &executable)?)
    }

    /// Asks the task what only it can say.
    fn ask(
        &mut self,
        task: &mut Task,
        (stay, allow): (bool, &Allow),
        obstacles: &mut Obstacles,
    ) -> Result<()> {
        let memory = match vdso::lead_out(task, &self.vdso, &self.listed)? {
            Some(memory) => memory,
            None => uffd::open_memory(task)?,
        };
        let pid = task.pid;
        let stat = task.stat()?.1.to_vec();
        let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
            unreachable!("a task is visited once, when it was stopped")
        };
        let tids = threads.iter().map(|thread| thread.tid).collect::<Vec<_>>();
        let facts = threads.iter().map(|thread| self.facts(task, thread, allow));
        let facts = facts.collect::<Vec<_>>();
        for (facts, status) in facts.iter().zip(&self.statuses) {
            facts.knows_status(status.clone());
        }
        facts[0].knows("stat", stat);
        let states = threads.iter().zip(&facts).zip(&task.waits);
        let states = states.map(|((thread, facts), wait)| thread::state(thread, facts, wait));
        let states = states.collect::<Result<Vec<_>>>()?;
        let mut questions = facts
            .iter()
            .map(Questions::new)
            .collect::<Result<Vec<_>>>()?;
        let brk = questions[0].script.call(Sysno::brk, [0u32.into()]);
        let policies = policies::ask(task, &self.listed, &mut questions[0].script);
        let auxv = Auxv::ask(&mut questions[0].script);
        let untold = Untold::ask(&self.rows, &mut questions[0].script);
        let batches = questions.iter().map(|questions| questions as &dyn Batch);
        let batches = batches.collect::<Vec<_>>();
        let mut visit = self.prepare_visit(threads, memory)?;
        // The process does not wait for this, nor this for the process.
        let outcomes = visit.run(&batches, || facts[0].look_ahead())?;
        stops::see(&mut self.node, visit.threads()[0].group_stop);
        for ((facts, questions), outcome) in facts.iter().zip(&questions).zip(outcomes) {
            let answers = questions.answers(facts.tid, outcome)?;
            if facts.tid == pid {
                self.brk = answers.result(brk).cast_unsigned();
                self.policies = policies.answers(&answers);
                self.auxv = auxv.answer(&answers);
                untold.answer(&mut self.rows, &answers);
            }
            questions.records(facts, &answers, (&mut self.records, obstacles))?;
        }
        for (tid, state) in tids.iter().zip(states) {
            self.records
                .push(record(tag::THREAD, *tid, state.encode_to_vec()));
        }
        // Only the flags of new memory tell whether later mappings are to be locked.
        if let (true, Some(area)) = (self.listed.iter().any(|map| map.has(b"lo")), visit.area()) {
            let now = look::parse(&task.read("smaps")?)?;
            let fresh = now.iter().find(|map| map.span.contains(area.start));
            self.lock_future = fresh.map_or(0, memory::lock_future);
        }
        task.body = if stay {
            Body::Visited(visit)
        } else {
            Body::Stopped(visit.leave()?)
        };
        Ok(())
    }

    fn records(
        self,
        task: &Task,
        outside: OfTask,
        (spaces, look): (&mut spaces::Spaces, &mut dyn Look),
        records: &mut Vec<Record>,
    ) -> Result<()> {
        let pid = task.pid;
        let memory = self.memory(task, &outside, (spaces, look))?;
        records.push(record(memory::TAG, pid, memory.encode_to_vec()));
        if let Some(payload) = outside.locks {
            records.push(record(fd::tags::LOCKS, pid, payload));
        }
        let payload = outside.descriptors.encode_to_vec();
        records.push(record(tag::DESCRIPTORS, pid, payload));
        records.push(record(tag::PLACE, pid, outside.place.encode_to_vec()));
        records.extend(self.records);
        Ok(())
    }

    fn memory(
        &self,
        task: &Task,
        outside: &OfTask,
        (spaces, look): (&mut spaces::Spaces, &mut dyn Look),
    ) -> Result<Memory> {
        let pid = task.pid;
        let mut mappings = Vec::with_capacity(self.listed.len());
        for (listed, file) in self.listed.iter().zip(&outside.mapped) {
            let policy = self.policies.get(&listed.span.start).cloned();
            mappings.push(Mapping {
                policy,
                ..Mapping::of(listed, pid, *file)?
            });
        }
        spaces.scan(pid, &mut mappings, &self.listed, look)?;
        let stat = &self.stat;
        Ok(Memory {
            marks: vec![
                stat.code.0,
                stat.code.1,
                stat.data.0,
                stat.data.1,
                stat.brk,
                self.brk,
                stat.stack,
                stat.args.0,
                stat.args.1,
                stat.env.0,
                stat.env.1,
            ],
            auxv: match &self.auxv {
                Some(auxv) => auxv.clone(),
                None => task.read("auxv")?,
            },
            exe: outside.exe,
            mappings,
            vdso_build_id: self.vdso.build_id.clone(),
            vdso_is_32_bit: self.vdso.is_32_bit,
            lock_future: self.lock_future,
        })
    }
}

/// Checks that no thread runs what a dump left that was cut short.
///
/// # Errors
/// [`Error::Returning`].
pub(crate) fn check_returned(task: &Task, listed: &[Listed]) -> Result<()> {
    let ours = listed.iter().filter(|map| {
        let blob = map.backing() == Backing::Anonymous && map.prot & 4 != 0;
        blob || map.backing() == Backing::Vdso
    });
    let ours = ours.map(|map| map.span).collect::<Vec<_>>();
    for thread in task.threads() {
        let rip = Addr(thread.saved.registers.rip);
        let suspect = ours.iter().find(|span| span.contains(rip));
        let is_visited = |span: &Span| tracee::is_visited(task.pid, *span, rip);
        if suspect.map(is_visited).transpose()? == Some(true) {
            return Err(Error::Returning { pid: task.pid });
        }
    }
    Ok(())
}

fn invalid() -> std::io::Error {
    std::io::ErrorKind::InvalidData.into()
}

fn node(task: &Task, stat: &Stat) -> Node {
    let threads = task.threads();
    let state = match threads.first() {
        None => State::Zombie,
        Some(leader) if leader.group_stop.is_some() => State::Stopped,
        Some(_) => State::Running,
    };
    let group_stop = threads.first().and_then(|leader| leader.group_stop);
    let has_terminal = state != State::Zombie && stat.tty != 0;
    let leads = stat.session == task.pid && has_terminal;
    Node {
        terminal: if leads { stat.tty } else { 0 },
        foreground: if has_terminal { stat.tty_pgrp } else { 0 },
        left_terminal: false,
        stop_signal: group_stop.unwrap_or(0),
        stop_seen: group_stop.is_some() && stat.exit_code == 0,
        stop_comes: false,
        uids: Vec::new(),
        gids: Vec::new(),
        groups: Vec::new(),
        pid: task.pid,
        parent: stat.ppid,
        group: stat.pgrp,
        session: stat.session,
        state: state as i32,
        exit_status: stat.exit_code,
        exit_signal: stat.exit_signal,
        threads: threads.iter().map(|thread| thread.tid).collect(),
        name: if state == State::Zombie {
            stat.comm.clone()
        } else {
            Vec::new()
        },
    }
}

/// The questions for one thread.
struct Questions {
    script: Script,
    asked: Vec<(&'static dyn Part, Asked)>,
}

impl Questions {
    fn new(facts: &ThreadFacts<'_>) -> Result<Self> {
        let mut questions = Self {
            script: Script::default(),
            asked: Vec::new(),
        };
        let leader = facts.tid == facts.pid;
        for part in PARTS
            .iter()
            .filter(|part| leader || part.scope() == Scope::Thread)
        {
            let asked = part.ask(facts, &mut questions.script)?;
            questions.asked.push((*part, asked));
        }
        Ok(questions)
    }

    fn answers(&self, tid: i32, outcome: Outcome) -> Result<Answers> {
        if let Some(failed) = outcome.failed {
            let call = self.script.line(failed).to_string();
            let errno = i32::try_from(-outcome.results[failed]).unwrap_or(0);
            let source = std::io::Error::from_raw_os_error(errno);
            return Err(Error::Call {
                pid: tid,
                call,
                source,
            });
        }
        Ok(Answers {
            results: outcome.results,
            data: outcome.data,
        })
    }

    fn records(
        &self,
        facts: &ThreadFacts<'_>,
        answers: &Answers,
        (records, obstacles): (&mut Vec<Record>, &mut Obstacles),
    ) -> Result<()> {
        for (part, asked) in &self.asked {
            let payload = obstacles.note(part.dump(facts, asked, answers))?;
            if let Some(payload) = payload.flatten() {
                records.push(record(part.tag(), facts.tid(), payload));
            }
        }
        Ok(())
    }
}

impl Batch for Questions {
    fn ops_bytes(&self) -> usize {
        self.script.ops_bytes()
    }

    fn data_bytes(&self) -> usize {
        self.script.data_bytes()
    }

    fn compile(&self, ops: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
        // Questions refer to nothing but their own data.
        let window = Span::default();
        let layout = Layout {
            ops,
            data,
            words: Addr(0),
            pool: &[],
            scripts: &[],
            window,
            top: Addr(0),
        };
        self.script.compile(&layout)
    }
}
