//! Frozen → inventory: everything but the contents of memory.

mod auxv;
mod cgroups;
mod facts;
mod files;
mod fitness;
pub(crate) mod look;
mod policies;
mod segments;
mod semaphores;
mod sharing;
mod spaces;
mod stops;
mod thread;
mod vdso;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use abi::{Addr, Span};
use image::{Record, Run, SpaceId};
use pages::Extent;
use prost::Message;
use resources::fd::tcp::backlog;
use resources::fd::tcp::lock::{Leftover, Lock};
use resources::fd::tty::control;
use resources::map::listing::{Backing, Listed};
use resources::map::memory::{self, Mapping, Memory};
use resources::map::policy::Policy;
use resources::map::vdso::Vdso;
use resources::script::{Answers, Layout, Script};
use resources::task::{Asked, Facts, PARTS, Part, Scope, xstate};
use resources::{Allow, fd};
use rustix::fs::{AtFlags, OFlags, statat};
use sys::proc::Stat;
use syscalls::Sysno;
use tracee::{Batch, Outcome, Thread, Visit};

use crate::clocks::TreeClocks;
use crate::freeze::{Body, Frozen, Task};
use crate::plan::births::births;
use crate::records::{Descriptor, Descriptors, Node, Place, State, Tree, tag};
use crate::{Error, Result, track, uffd};
use auxv::Auxv;
use facts::ThreadFacts;
use files::Files;
pub(crate) use files::{Contents, Object, fetch};
use look::Look;
use semaphores::Semaphores;

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
    /// To be called when the dump fails later.
    pub undo: Vec<Box<dyn FnOnce()>>,
    /// Keeps the tree's TCP connections quiet.
    pub lock: Option<Lock>,
    /// What kept new connections away while the tree was waited for; to be dropped when it runs.
    pub leftover: Option<Leftover>,
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
/// # Errors
/// [`resources::Error::Unsupported`] for what cannot be saved, before anything was changed.
pub(crate) fn collect(
    frozen: &mut Frozen,
    allow: &Allow,
    stay: bool,
    look: &mut dyn Look,
) -> Result<Inventory> {
    let has_its_clocks = fitness::check(frozen)?;
    let cgroups = cgroups::collect(frozen, allow)?;
    let mut found = Vec::new();
    let mut vdsos = vdso::Vdsos::default();
    let limit = frozen.limit;
    for task in &mut frozen.tasks {
        limit.check(task.pid)?;
        found.push(Found::new(task, stay, allow, (look, &found), &mut vdsos)?);
    }
    if !allow.skip_in_flight {
        let rows = found.iter().map(|one| (one.node.pid, &one.rows));
        backlog::check(rows.flat_map(|(pid, rows)| rows.iter().map(move |row| (pid, row))))?;
    }
    let mut tree = Tree {
        tasks: found.iter().map(|found| found.node.clone()).collect(),
    };
    find_terminals_left(&mut tree, &found);
    fitness::check_session(&tree, allow)?;
    births(&tree)?;
    segments::check(found.iter().map(|one| (one.node.pid, &*one.listed)))?;
    let mut files = Files::default();
    let mut records = vec![record(tag::TREE, 0, tree.encode_to_vec())];
    let mut spaces = spaces::Spaces::default();
    for (task, found) in frozen.tasks.iter().zip(found) {
        if task.is_zombie() {
            continue;
        }
        let mut sinks = Sinks {
            files: &mut files,
            spaces: &mut spaces,
            records: &mut records,
        };
        found.records(task, &mut sinks, allow, look)?;
    }
    spaces.find_shared(&tree)?;
    let described = files::describe(files, allow)?;
    check_terminals(&tree, &described.records)?;
    records.extend(described.records.into_iter().chain(cgroups));
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
        undo: described.undo,
        lock: described.lock,
        leftover: None,
    })
}

pub(super) fn record(tag: u16, id: i32, payload: Vec<u8>) -> Record {
    Record {
        tag,
        version: 1,
        id: id.cast_unsigned(),
        payload,
    }
}

/// Marks the tasks that do not have the controlling terminal of their session.
fn find_terminals_left(tree: &mut Tree, found: &[Found]) {
    let leaders = tree.tasks.iter().filter(|node| node.terminal != 0);
    let sessions = leaders.map(|node| node.pid).collect::<HashSet<_>>();
    for (node, found) in tree.tasks.iter_mut().zip(found) {
        let living = node.state() != State::Zombie;
        node.left_terminal = living && found.stat.tty == 0 && sessions.contains(&node.session);
    }
}

/// The controlling terminals of the tree's sessions must be open in it.
fn check_terminals(tree: &Tree, records: &[Record]) -> Result<()> {
    for node in tree.tasks.iter().filter(|node| node.terminal != 0) {
        let mut terminals = records.iter().filter(|one| one.tag == fd::tags::TTY);
        let is_it = |one: &Record| control::is_terminal(&one.payload, node.terminal);
        if !terminals.any(|one| is_it(one).unwrap_or(false)) {
            let number = node.terminal;
            let what =
                format!("its controlling terminal {number:#x}, which is not open in the tree,");
            return Err(resources::Error::unsupported(node.pid, what).into());
        }
    }
    Ok(())
}

/// What tasks add to.
struct Sinks<'s, 'a> {
    files: &'s mut Files<'a>,
    spaces: &'s mut spaces::Spaces,
    records: &'s mut Vec<Record>,
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
    lock_future: u32,
    /// The memory policies of its mappings, by their first addresses.
    policies: HashMap<Addr, Policy>,
    records: Vec<Record>,
    rows: Vec<fd::table::Row>,
}

impl Found {
    /// Looks at a task after those in `before`, its parent among them.
    fn new(
        task: &mut Task,
        stay: bool,
        allow: &Allow,
        (look, before): (&mut dyn Look, &[Self]),
        vdsos: &mut vdso::Vdsos,
    ) -> Result<Self> {
        let pid = task.pid;
        let (stat, stat_text) = task.stat()?;
        let stat_text = stat_text.to_vec();
        let leader_is_known = before.iter().any(|one| one.node.pid == stat.session);
        let mut found = Self {
            node: node(task, &stat),
            stat,
            listed: Vec::new(),
            brk: 0,
            auxv: None,
            leader_is_known,
            vdso: vdso::Seen::default(),
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
        found.vdso = vdsos.look(task, &mut found.listed)?;
        track::forget_watched(pid, &mut found.listed)?;
        // Everything that may be refused is looked at before the target is touched.
        for listed in &found.listed {
            Mapping::of(listed, pid, None)?;
        }
        let parent = before.iter().find(|one| one.node.pid == found.node.parent);
        let parent = parent.map(|one| (one.node.pid, one.rows.as_slice()));
        found.rows = fd::table::read(pid, (task.proc.as_fd(), &task.spent), parent)?;
        let memory = match vdso::lead_out(task, &found.vdso, &found.listed)? {
            Some(memory) => memory,
            None => uffd::open_memory(task)?,
        };
        found.visit(task, memory, (stay, allow), stat_text)?;
        Ok(found)
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
    fn visit(
        &mut self,
        task: &mut Task,
        memory: File,
        (stay, allow): (bool, &Allow),
        stat: Vec<u8>,
    ) -> Result<()> {
        let pid = task.pid;
        let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
            unreachable!("a task is visited once, when it was stopped")
        };
        let all = threads
            .iter()
            .map(|thread| (thread.tid, thread.saved))
            .collect::<Vec<_>>();
        let facts = all.iter().map(|(tid, saved)| {
            let proc = (task.proc.as_fd(), &*task.spent);
            ThreadFacts::new(allow, (pid, *tid), proc, (saved.rseq, self.leader_is_known))
        });
        let facts = facts.collect::<Vec<_>>();
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
        let semaphores = Semaphores::ask(&self.rows, &mut questions[0].script);
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
                semaphores.answer(&mut self.rows, &answers);
            }
            questions.records(facts, &answers, &mut self.records)?;
        }
        for ((tid, _), state) in all.iter().zip(states) {
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

    fn records<'a>(
        mut self,
        task: &'a Task,
        sinks: &mut Sinks<'_, 'a>,
        allow: &Allow,
        look: &mut dyn Look,
    ) -> Result<()> {
        let (pid, proc) = (task.pid, task.proc.as_fd());
        let memory = self.memory(task, sinks, look)?;
        let Sinks { files, records, .. } = sinks;
        records.push(record(memory::TAG, pid, memory.encode_to_vec()));
        if let Some(payload) = fd::locks::dump_process(pid, &self.rows, allow)? {
            records.push(record(fd::tags::LOCKS, pid, payload));
        }
        let descriptors = std::mem::take(&mut self.rows).into_iter().map(|row| {
            let (fd, close_on_exec) = (row.fd, row.cloexec);
            let description = files.descriptor(pid, row)?.0;
            Ok(Descriptor {
                fd,
                description,
                close_on_exec,
            })
        });
        let descriptors = Descriptors {
            descriptors: descriptors.collect::<Result<_>>()?,
        };
        records.push(record(tag::DESCRIPTORS, pid, descriptors.encode_to_vec()));
        let place = place(pid, proc, files)?;
        records.push(record(tag::PLACE, pid, place.encode_to_vec()));
        records.extend(self.records);
        Ok(())
    }

    fn memory<'a>(
        &self,
        task: &'a Task,
        sinks: &mut Sinks<'_, 'a>,
        look: &mut dyn Look,
    ) -> Result<Memory> {
        let Sinks { files, spaces, .. } = sinks;
        let (pid, proc) = (task.pid, task.proc.as_fd());
        let mut mappings = Vec::with_capacity(self.listed.len());
        for listed in &self.listed {
            let file = match listed.backing() {
                Backing::File => Some(files.mapped(pid, proc, listed)?.0),
                _ => None,
            };
            let policy = self.policies.get(&listed.span.start).cloned();
            mappings.push(Mapping {
                policy,
                ..Mapping::of(listed, pid, file)?
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
            exe: files.link(pid, proc, "exe", OFlags::RDONLY)?.0,
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

fn place<'a>(pid: i32, proc: BorrowedFd<'a>, files: &mut Files<'a>) -> Result<Place> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let cwd = files.link(pid, proc, "cwd", flags)?.0;
    let failed = |errno| Error::kernel(format!("cannot look at /proc/{pid}/root"), errno);
    let theirs = statat(proc, "root", AtFlags::empty()).map_err(failed)?;
    let same = (theirs.st_dev, theirs.st_ino) == files.own_root().map_err(failed)?;
    let root = if same {
        None
    } else {
        Some(files.link(pid, proc, "root", flags)?.0)
    };
    Ok(Place { cwd, root })
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
        records: &mut Vec<Record>,
    ) -> Result<()> {
        for (part, asked) in &self.asked {
            if let Some(payload) = part.dump(facts, asked, answers)? {
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
