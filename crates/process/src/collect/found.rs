//! One task, looked at.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::rc::Rc;

use abi::{Addr, Span};
use freeze::returned::check_returned;
use freeze::uffd;
use freeze::{Body, Task};
use image::Record;
use prost::Message;
use resources::map::listing::Listed;
use resources::map::memory::{self, Mapping, Memory};
use resources::map::policy::Policy;
use resources::map::registered::{self, Registration, Registrations};
use resources::script::Script;
use resources::task::{self, Facts, ProcessCheck};
use resources::{Allow, fd};
use sys::proc::{Stat, Status};
use sys::process::Process;
use syscalls::Sysno;
use tracee::{Batch, Injection, Thread};

use super::auxv::Auxv;
use super::facts::ThreadFacts;
use super::memory_view::MemoryView;
use super::questions::{Calls, Questions};
use super::sharing::Sharing;
use super::untold::Untold;
use super::{fitness, leader, policies, spaces, stops, thread, vdso};
use crate::Result;
use crate::obstacles::Obstacles;
use crate::records::{Descriptors, Node, Place, State, TaskId, What, record, tag};

/// One task, looked at.
pub(super) struct Found {
    pub process: Process,
    pub node: Node,
    pub stat: Stat,
    /// Its mappings; none of one whose memory is another's that was looked at before.
    pub listed: Vec<Listed>,
    /// The mappings of that memory.
    others_listed: Vec<Listed>,
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
    /// What of its memory is registered with userfaultfds of the tree.
    pub registered: Vec<Registration>,
    /// Its descriptors; none where they are another's that was looked at before.
    pub rows: Vec<fd::table::Row>,
}

/// The files of a task: numbers of descriptions.
pub(super) struct OfTask {
    /// By mapping.
    pub mapped: Vec<Option<u32>>,
    pub exe: u32,
    /// Its own locks on files.
    pub locks: Option<Vec<u8>>,
    pub descriptors: Descriptors,
    pub place: Place,
}

/// A task that is to be looked at.
#[derive(Clone, Copy)]
pub(super) struct OneTask<'a> {
    pub task: &'a Task,
    /// Of its descriptors.
    pub links: &'a [fd::table::Link],
    /// Whether it may have locks on files.
    pub has_locks: bool,
    /// Whether its mappings are listed now, with their flags, whatever was seen of them before.
    pub is_listed_anew: bool,
}

impl Found {
    /// Looks at a task from outside, after those in `before`, its parent among them.
    pub fn new(
        one: OneTask<'_>,
        allow: &Allow,
        (view, before, sharing): (&mut dyn MemoryView, &[Self], &Sharing),
        (vdsos, obstacles): (&mut vdso::Vdsos, &mut Obstacles),
    ) -> Result<Self> {
        let task = one.task;
        let ((stat, _), pid) = (task.stat()?, task.pid());
        let next = before.last().map_or(TaskId::FIRST, Self::next_id);
        let leader_is_known = before.iter().any(|one| one.node.pid == stat.session);
        let mut found = Self {
            process: task.process.clone(),
            node: node(task, &stat, next),
            stat,
            listed: Vec::new(),
            others_listed: Vec::new(),
            brk: 0,
            auxv: None,
            leader_is_known,
            vdso: vdso::Seen::default(),
            statuses: Vec::new(),
            lock_future: 0,
            policies: HashMap::new(),
            records: Vec::new(),
            registered: Vec::new(),
            rows: Vec::new(),
        };
        if task.is_zombie() {
            return found.identify(task);
        }
        found.share(before, sharing);
        let first = found.node.memory_of;
        let first = before.iter().find(|one| one.node.number == first);
        found.node.space_number = match first {
            Some(first) => first.node.space_number,
            None => view.numbering().space(pid, found.stat.start_ticks).0,
        };
        found.listed = view.mappings(task)?;
        if one.is_listed_anew && view.keeps_registered() {
            found.listed = task.smaps()?;
        }
        found.listed.retain(|listed| listed.name != b"[vsyscall]");
        check_returned(task, &found.listed)?;
        let vdso = obstacles.note(vdsos.inspect(task, &mut found.listed))?;
        found.vdso = vdso.unwrap_or_default();
        obstacles.note(fitness::check_kind(task, &found.vdso))?;
        if first.is_some() {
            found.others_listed = std::mem::take(&mut found.listed);
        }
        for listed in &found.listed {
            obstacles.note(Mapping::of(listed, pid, None))?;
        }
        let mut check = ProcessCheck::default();
        for thread in task.threads() {
            let facts = found.facts((task, task.asked()), thread, allow);
            obstacles.note(check.thread(&facts))?;
            found.statuses.push(facts.status()?);
        }
        found.node.namespace_pids = match task.leader_end {
            None => found.statuses[0].ns_tids.clone(),
            Some(_) => leader::status(task)?.ns_tids,
        };
        let parent = found.node.parent;
        let parent = sharing.first(What::Descriptors, parent).unwrap_or(parent);
        let parent = before.iter().find(|one| one.node.pid == parent);
        let parent = parent.map_or(&[][..], |one| &one.rows);
        let proc = (task.proc.as_fd(), &*task.close_queue);
        found.rows = fd::table::read(pid, proc, one.links, (parent, one.has_locks))?;
        Ok(found)
    }

    /// The mappings of the memory that it has, whosever record that is in.
    fn mappings(&self) -> &[Listed] {
        match self.node.memory_of {
            0 => &self.listed,
            _ => &self.others_listed,
        }
    }

    /// Notes what it shares with those before it.
    fn share(&mut self, before: &[Self], sharing: &Sharing) {
        for what in What::ALL {
            let first = sharing.first(what, self.node.pid);
            let first = before.iter().find(|one| Some(one.node.pid) == first);
            if let Some(first) = first {
                self.node.share(what, first.node.number);
            }
        }
    }

    /// The number of the task that comes after it and its threads.
    fn next_id(&self) -> TaskId {
        self.node.id().after(self.node.thread_numbers.len().max(1))
    }

    /// What a thread of the task looks like from outside.
    fn facts<'a>(
        &self,
        (task, asked): (&'a Task, i32),
        thread: &Thread,
        allow: &'a Allow,
    ) -> ThreadFacts<'a> {
        let proc = (task.proc.as_fd(), &*task.close_queue);
        let known = (thread.saved, self.leader_is_known);
        ThreadFacts::new(allow, &task.process, (asked, thread.tid), proc, known)
    }

    /// Whether it must be asked of its descriptors before these are described.
    pub fn is_asked_first(&self) -> bool {
        Untold::comes_first(&self.rows)
    }

    /// Its number, and what of its memory is registered.
    pub fn registered_spans(&self) -> (i32, Vec<Span>) {
        let spans = self.registered.iter().map(Registration::span);
        (self.node.pid, spans.collect())
    }

    /// What it undoes to semaphores, if anything.
    pub fn semaphores(&self) -> impl Iterator<Item = (i32, &[u8])> {
        let records = self.records.iter().filter(|record| is_undo(record));
        records.map(|record| (self.node.pid, &*record.payload))
    }

    /// Adds whose child has ended, which a zombie still shows.
    fn identify(mut self, task: &Task) -> Result<Self> {
        let status = task.status()?;
        self.node.uids = status.uids.to_vec();
        self.node.gids = status.gids.to_vec();
        self.node.groups = status.groups;
        self.node.namespace_pids = status.ns_tids;
        Ok(self)
    }

    /// Finds room for an injection's stub.
    fn prepare_injection(&self, threads: Vec<Thread>, memory: File) -> Result<Injection> {
        if let Some(stub) = self.vdso.padding {
            return Ok(Injection::at(threads, memory, stub));
        }
        let dead_end = || uffd::with_dead_end(&memory, self.mappings());
        if let Some(end) = (!self.vdso.is_there).then(dead_end).flatten() {
            return Ok(Injection::over(threads, memory, end)?);
        }
        let kernel = self.vdso.behind_proxy.into_iter();
        let executable = kernel.chain(uffd::executable(self.mappings()));
        let executable = executable.collect::<Vec<_>>();
        Ok(Injection::new(threads, memory, &executable)?)
    }

    /// Has the task's threads leave the vDSO, and nobody judge what they are to call. Gives its
    /// memory.
    fn be_ready(&self, task: &mut Task) -> Result<File> {
        let tids = task.threads().iter().map(|thread| thread.tid);
        let filtered = tids.zip(&self.statuses).filter(|one| one.1.seccomp != 0);
        let filtered = filtered.map(|one| one.0).collect::<Vec<_>>();
        let is_filtered = |tid| filtered.contains(&tid);
        let vdso = (&self.vdso, self.mappings());
        let memory = match vdso::finish_vdso_calls(task, vdso, is_filtered)? {
            Some(memory) => memory,
            None => uffd::open_memory(task)?,
        };
        for (thread, status) in task.threads().iter().zip(&self.statuses) {
            uffd::suspend_filters(thread.tid, status)?;
        }
        Ok(memory)
    }

    /// Has every thread of the task make the calls of a script.
    pub fn call(&mut self, task: &mut Task, script: &Script) -> Result<()> {
        let memory = self.be_ready(task)?;
        let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
            unreachable!("nobody has been injected into yet")
        };
        let calls = threads.iter().map(|_| Calls(script)).collect::<Vec<_>>();
        let batches = calls.iter().map(|calls| calls as &dyn Batch);
        let injection = self.prepare_injection(threads, memory)?;
        let mut injection = uffd::seen_from(injection, &task.proc, &self.statuses[0])?;
        let run = injection.run(&batches.collect::<Vec<_>>(), || ());
        run.map_err(|error| freeze::explain_mapping(self.node.pid, error))?;
        task.body = Body::Stopped(injection.cure()?);
        Ok(())
    }

    /// Asks the task what only it can say.
    pub fn ask(
        &mut self,
        task: &mut Task,
        (stay, allow): (bool, &Allow),
        obstacles: &mut Obstacles,
    ) -> Result<()> {
        let memory = self.be_ready(task)?;
        let stat = task.stat()?.1.to_vec();
        let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
            unreachable!("a task is injected into once, when it was stopped")
        };
        let ids = self.node.living_ids();
        let asked = threads[0].tid;
        let facts = threads
            .iter()
            .map(|thread| self.facts((task, asked), thread, allow));
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
            .map(|facts| Questions::new(facts, &self.node))
            .collect::<Result<Vec<_>>>()?;
        let brk = questions[0].script.call(Sysno::brk, [0u32.into()]);
        let policies = policies::ask(task, &self.listed, &mut questions[0].script);
        let auxv = Auxv::ask(&mut questions[0].script);
        let untold = Untold::ask(&self.rows, &mut questions[0].script);
        let batches = questions.iter().map(|questions| questions as &dyn Batch);
        let batches = batches.collect::<Vec<_>>();
        let injection = self.prepare_injection(threads, memory)?;
        let mut injection = uffd::seen_from(injection, &task.proc, &self.statuses[0])?;
        // The process does not wait for this, nor this for the process.
        let outcomes = injection.run(&batches, || facts[0].read_ahead());
        let outcomes = outcomes.map_err(|error| freeze::explain_mapping(self.node.pid, error))?;
        stops::see(&mut self.node, &injection.threads()[0])?;
        let asked = facts.iter().zip(&questions).zip(outcomes);
        for (((facts, questions), outcome), id) in asked.zip(&ids) {
            let answers = questions.answers(facts.tid, outcome)?;
            if facts.speaks_for_all() {
                self.brk = answers.result(brk).cast_unsigned();
                self.policies = policies.answers(&answers);
                self.auxv = auxv.answer(&answers);
                untold.answer(&mut self.rows, &answers);
            }
            let whose = (facts, *id, self.node.id());
            questions.records(whose, &answers, (&mut self.records, obstacles))?;
        }
        self.settle_records(task, &facts[0], ids[0])?;
        for (id, state) in ids.iter().zip(states) {
            let payload = state.encode_to_vec();
            self.records.push(record(tag::THREAD, id.get(), payload));
        }
        self.see_lock_future(task, &injection)?;
        task.body = if stay {
            Body::Injected(injection)
        } else {
            Body::Stopped(injection.cure()?)
        };
        Ok(())
    }

    /// Adds the records of a leader that has ended, by those of the thread number `asked` that is
    /// asked in its place, and takes out what is told of another task.
    fn settle_records(&mut self, task: &Task, facts: &dyn Facts, asked: TaskId) -> Result<()> {
        if task.leader_end.is_some() {
            let whose = (self.node.id(), asked);
            let records = leader::records(task, facts, whose, &self.records)?;
            self.records.extend(records);
        }
        if self.node.undo_of != 0 {
            // It is told once.
            self.records.retain(|record| !is_undo(record));
        }
        Ok(())
    }

    /// Finds out whether later mappings are to be locked: only the flags of new memory tell.
    fn see_lock_future(&mut self, task: &Task, injection: &Injection) -> Result<()> {
        let locks = self.listed.iter().any(|map| map.has(b"lo"));
        if let Some(area) = injection.area().filter(|_| locks) {
            let now = task.smaps()?;
            let fresh = now.iter().find(|map| map.span.contains(area.start));
            self.lock_future = fresh.map_or(0, memory::lock_future);
        }
        Ok(())
    }

    pub fn records(
        self,
        task: &Task,
        outside: OfTask,
        (spaces, view): (&mut spaces::Spaces, &mut dyn MemoryView),
        records: &mut Vec<Record>,
    ) -> Result<()> {
        let number = self.node.number;
        if self.node.memory_of == 0 {
            let memory = self.memory(task, &outside, (spaces, view))?;
            records.push(record(memory::TAG, number, memory.encode_to_vec()));
        }
        if let Some(payload) = outside.locks {
            records.push(record(fd::tags::LOCKS, number, payload));
        }
        if !self.registered.is_empty() {
            let registrations = self.registered.clone();
            let payload = Registrations { registrations }.encode_to_vec();
            records.push(record(registered::TAG, number, payload));
        }
        let payload = outside.descriptors.encode_to_vec();
        records.push(record(tag::DESCRIPTORS, number, payload));
        records.push(record(tag::PLACE, number, outside.place.encode_to_vec()));
        records.extend(self.records);
        Ok(())
    }

    fn memory(
        &self,
        task: &Task,
        outside: &OfTask,
        (spaces, view): (&mut spaces::Spaces, &mut dyn MemoryView),
    ) -> Result<Memory> {
        let pid = task.pid();
        let mut mappings = Vec::with_capacity(self.listed.len());
        for (listed, file) in self.listed.iter().zip(&outside.mapped) {
            let policy = self.policies.get(&listed.span.start).cloned();
            mappings.push(Mapping {
                policy,
                ..Mapping::of(listed, pid, *file)?
            });
        }
        let whose = (&self.process, self.node.space());
        let listed = (&*self.listed, &*self.registered);
        spaces.scan(whose, &mut mappings, listed, view)?;
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

fn is_undo(record: &Record) -> bool {
    record.tag == task::tags::SEMAPHORES
}

/// Task `number` of the image, as its `stat` says.
fn node(task: &Task, stat: &Stat, number: TaskId) -> Node {
    let threads = task.threads();
    let state = match threads.first() {
        None => State::Zombie,
        Some(leader) if leader.group_stop.is_some() => State::Stopped,
        Some(_) => State::Running,
    };
    let group_stop = threads.first().and_then(|leader| leader.group_stop);
    let has_terminal = state != State::Zombie && stat.tty != 0;
    let leads = stat.session == task.pid() && has_terminal;
    let leader = task.leader_end.map(|_| task.pid());
    let tids = leader.into_iter();
    let tids = tids.chain(threads.iter().map(|thread| thread.tid));
    let tids = tids.collect::<Vec<_>>();
    let numbers = (0..tids.len()).map(|at| number.after(at).get());
    Node {
        number: number.get(),
        thread_numbers: numbers.collect(),
        space_number: 0,
        descriptors_of: 0,
        directories_of: 0,
        undo_of: 0,
        io_of: 0,
        memory_of: 0,
        handlers_of: 0,
        start_ticks: stat.start_ticks,
        namespace_pids: Vec::new(),
        terminal: if leads { stat.tty } else { 0 },
        foreground: if has_terminal { stat.tty_pgrp } else { 0 },
        left_terminal: false,
        stop_signal: group_stop.unwrap_or(0),
        stop_seen: group_stop.is_some() && stat.exit_code == 0,
        stop_comes: false,
        continued: false,
        uids: Vec::new(),
        gids: Vec::new(),
        groups: Vec::new(),
        pid: task.pid(),
        parent: stat.ppid,
        group: stat.pgrp,
        session: stat.session,
        state: state as i32,
        exit_status: stat.exit_code,
        exit_signal: stat.exit_signal,
        threads: tids,
        leader_end: task.leader_end,
        name: if state == State::Zombie {
            stat.comm.clone()
        } else {
            Vec::new()
        },
    }
}
