//! The script of every task and thread, from its fork to the point where it can be let go.

use std::collections::HashMap;

use image::Reader;
use resources::fd::tty::control;
use resources::map::inherit;
use resources::map::layout::{self, AtFork, Fill, Laid, Pages};
use resources::script::{Arg, PoolId, Script, ScriptId, WordId};
use resources::task::{PARTS, Phase, Scope, ThreadPlan, scheduling, seccomp};
use resources::{Inherited, fd};
use syscalls::Sysno;

use super::early::Early;
use super::forks::{self, Fork, ForkId, Joining, Kind, groups_are_inherited};
use super::groups::Joins;
use super::late::Late;
use super::memories::Memories;
use super::scripts::{Outside, Plan, Planned, Staying, word};
use super::sessions::Sessions;
use super::setting::Setting;
use super::sharing::{Shared, Sharing, thread_flag};
use super::sources::{pages_of, resolve};
use super::turns::{Turn, Turns};
use super::{closing, ended, lifecycle, pinned, pooled, terminal, vdso};
use crate::Result;
use crate::records::{Node, Saved, SavedTask, SavedThread, What};

/// Everything that is known of the tree while its scripts are made.
pub(super) struct Tasks<'a> {
    saved: &'a Saved<'a>,
    forks: &'a [Fork],
    sharing: &'a Sharing,
    turns: Turns,
    memories: Memories,
    setting: &'a Setting,
    /// What tasks start with that another task of the tree makes.
    descendants_inherited: Inherited,
    /// By index of the task in the tree: its pages.
    pages: Vec<Pages>,
    /// What its children find mapped.
    early: Early,
    /// Of whose memory a task starts with a copy, by index of the task.
    memory_parents: Vec<Option<usize>>,
    /// The first task, by index, that has a description.
    first_holders: HashMap<u32, usize>,
    /// How many forks and how many threads there are.
    all: (u32, u32),
    joining: Joining,
    /// Whether nobody has to join a group or to wait for somebody's end.
    simple: bool,
    /// Whether some thread does something that depends on others.
    meeting: bool,
    /// By index of the task: what its children start with.
    at_fork: Vec<AtFork>,
    /// The control groups that tasks and threads join.
    joins: Joins,
    late: Late,
    sessions: Sessions,
}

/// What is planned of a task before it is known whether the tasks have to meet.
struct Prepared {
    /// By thread, the leader first.
    threads: Vec<ThreadPlan>,
    /// What the leader does when all tasks and threads exist.
    together: Script,
}

/// The parts of a task's script that are made before the forks are put between them.
struct Body {
    laid: Laid,
    /// Posted when the restorer may fill pages, and when it has.
    exchange: Option<(WordId, WordId)>,
}

impl<'a> Tasks<'a> {
    pub(super) fn new(
        reader: &'a Reader,
        saved: &'a Saved<'a>,
        (forks, sharing): (&'a [Fork], &'a Sharing),
        setting: &'a Setting,
    ) -> Result<Self> {
        let count = |len: usize| u32::try_from(len).expect("checked when read");
        let threads = saved.tasks.iter().map(|task| task.threads.len());
        let mut tasks = Self {
            saved,
            forks,
            sharing,
            turns: Turns::default(),
            memories: Memories::default(),
            setting,
            descendants_inherited: setting.inherited.of_descendants(),
            pages: vec![Pages::default(); saved.tasks.len()],
            early: Early::default(),
            memory_parents: vec![None; saved.tasks.len()],
            first_holders: HashMap::new(),
            all: (count(forks.len()), count(threads.sum())),
            joining: Joining::of(forks),
            simple: groups_are_inherited(forks),
            meeting: false,
            at_fork: vec![AtFork::default(); saved.tasks.len()],
            joins: Joins::default(),
            late: Late::default(),
            sessions: Sessions::default(),
        };
        for (index, task) in saved.tasks.iter().enumerate() {
            for descriptor in &task.descriptors {
                let holder = tasks.first_holders.entry(descriptor.description);
                holder.or_insert(index);
            }
        }
        for id in forks::makers_first(forks) {
            if let Kind::Live(index) = forks[id].kind {
                tasks.find_pages(reader, index, &forks[id])?;
            }
        }
        let of_tasks = forks[..saved.tasks.len()].iter();
        let made_by: Vec<_> = of_tasks.map(|fork| tasks.living_maker(fork)).collect();
        tasks.sessions = Sessions::find(saved, (forks, &made_by), &setting.inherited)?;
        if let Some(placing) = &setting.cgroups {
            tasks.joins = Joins::find(placing, saved, &made_by);
        }
        tasks.early = Early::find(saved, &tasks.memory_parents, &tasks.pages, &setting.vdso);
        Ok(tasks)
    }

    /// Finds the pages of a task, those of its memory parent being known.
    fn find_pages(&mut self, reader: &Reader, index: usize, fork: &Fork) -> Result<()> {
        let task = &self.saved.tasks[index];
        if task.node.memory_of != 0 {
            return Ok(());
        }
        let parent = self.memory_parent(fork);
        let parents_space = parent.map(|parent| self.saved.tasks[parent].node.space());
        let mut pages = pages_of(reader, &task.node, parents_space)?;
        if let Some(parent) = parent {
            let theirs = (&self.saved.tasks[parent].memory, &self.pages[parent]);
            for span in pages.split_inherited(&task.memory, theirs) {
                resolve(reader, task.node.space(), span, &mut pages)?;
            }
        }
        pages.stored.sort_unstable_by_key(|stored| stored.span);
        pages.zero.sort_unstable();
        pages.drop_plain_zeros(&task.memory);
        self.memory_parents[index] = parent;
        self.pages[index] = pages;
        Ok(())
    }

    /// The task that makes another, or the stand-in that does.
    fn living_maker(&self, fork: &Fork) -> Option<usize> {
        let maker = &self.forks[fork.maker?];
        match maker.kind {
            Kind::Live(index) => Some(index),
            _ => self.living_maker(maker),
        }
    }

    /// The first task that has the memory of which a newborn has a copy.
    fn memory_parent(&self, fork: &Fork) -> Option<usize> {
        let maker = self.living_maker(fork)?;
        let first = self.saved.with_memory_of(&self.saved.tasks[maker]);
        let mut tasks = self.saved.tasks.iter();
        tasks.position(|task| std::ptr::eq(task, first))
    }

    pub(super) fn plan(&mut self, plan: &mut Plan) -> Result<()> {
        self.late = Late::find(self.saved, plan)?;
        self.turns = Turns::find(self.sharing, plan);
        self.memories = Memories::find(self.sharing, self.forks.len(), plan);
        plan.groups.clone_from(&self.joins.all);
        plan.thread_groups.clone_from(&self.joins.threads);
        // A fork's script has the fork's number; threads come behind.
        for fork in self.forks {
            let role = match fork.kind {
                Kind::Live(_) => "task",
                Kind::Zombie(_) => "zombie",
                Kind::StandIn => "stand-in",
            };
            let script = Script::default();
            plan.scripts.push(Planned {
                tid: fork.pid,
                role,
                script,
            });
        }
        let mut prepared = (0..self.saved.tasks.len())
            .map(|index| self.prepare(index, plan))
            .collect::<Result<Vec<_>>>()?;
        let depends = |thread: &ThreadPlan| !thread.is_empty(Phase::Together);
        self.meeting = prepared
            .iter()
            .any(|one| !one.together.steps.is_empty() || one.threads.iter().any(depends));
        for id in forks::makers_first(self.forks) {
            let script = match self.forks[id].kind {
                Kind::Live(index) => {
                    let prepared = &mut prepared[index];
                    self.live(id, index, prepared, plan)?
                }
                Kind::Zombie(index) => self.zombie(id, index),
                Kind::StandIn => self.stand_in(id),
            };
            plan.scripts[id].script = script;
        }
        Ok(())
    }

    fn parent_of(&self, id: ForkId) -> i32 {
        if id == 0 {
            self.setting.parent
        } else {
            self.forks[id].parent
        }
    }

    fn fork_all(&self, script: &mut Script, children: &[ForkId], sibling: bool) {
        for child in children {
            if let Some(of) = self.sharing.of(*child) {
                self.leave(&of.left_before, script);
            }
            let flags = self.sharing.flags(*child);
            if flags & What::IoContext.flag() != 0 {
                self.have_io_context(self.forks[*child].maker, script);
            }
            let child = ((&self.forks[*child], flags), script_id(*child));
            lifecycle::fork(script, child.0, sibling, child.1);
        }
    }

    /// Has the maker of a child that is to share its I/O context have one: the kernel makes it when
    /// the first block is read, or when a priority is set.
    fn have_io_context(&self, maker: Option<ForkId>, script: &mut Script) {
        let flags = maker.map_or(0, |maker| self.sharing.flags(maker));
        if flags & What::IoContext.flag() == 0 {
            scheduling::keep_io_priority(&self.setting.inherited, script);
        }
    }

    /// Leaves what was handed on to all who share it.
    fn leave(&self, shared: &[Shared], script: &mut Script) {
        for shared in shared {
            script.call(Sysno::unshare, [shared.what.flag().into()]);
            self.turns.left(*shared, script);
        }
    }

    /// Leaves what fork `id` has handed on to the last ones that it makes.
    fn leave_at_end(&self, id: ForkId, script: &mut Script) {
        if let Some(of) = self.sharing.of(id) {
            self.leave(&of.left_at_end, script);
        }
    }

    fn prepare(&self, index: usize, plan: &mut Plan) -> Result<Prepared> {
        let task = &self.saved.tasks[index];
        let threads = task.threads.iter();
        let threads = threads.map(|thread| self.thread_plan(task, thread, plan));
        let mut threads = threads.collect::<Result<Vec<_>>>()?;
        let filters = task.threads.iter().map(SavedThread::filters);
        let filters = (task.node.pid, &*filters.collect::<Vec<_>>());
        seccomp::plan(filters, &mut threads, || plan.word())?;
        let mut together = Script::default();
        if let Some(leader) = threads.first_mut() {
            self.sessions.plan((index, task), self.setting, leader)?;
            let children = self.forks.iter();
            let children = children.filter(|other| other.parent == task.node.pid);
            lifecycle::see_children_end(&mut together, &children.collect::<Vec<_>>());
            ended::check_clocks(self.saved, task, &leader.clocks)?;
            let ended = ended::begin(task.node.pid, &leader.ended, plan, &mut together);
            together.append(leader.take(Phase::Together));
            ended.end(&mut together);
            self.late.plan(self.saved, index, &mut together)?;
            self.in_task(index, &mut together)?;
            terminal::foreground(self.saved, index, &mut together);
        }
        Ok(Prepared { threads, together })
    }

    fn live(
        &mut self,
        id: ForkId,
        index: usize,
        prepared: &mut Prepared,
        plan: &mut Plan,
    ) -> Result<Script> {
        let fork = &self.forks[id];
        let task = &self.saved.tasks[index];
        let (leader, others) = prepared.threads.split_first_mut().expect("it is alive");
        let mut script = Script::default();
        if id == 0 {
            self.clear(&mut script);
        }
        lifecycle::tie_to_parent(&mut script, self.parent_of(id));
        // Before it has memory, which is charged to the group.
        self.joins.plan(fork.pid, plan.descriptions, &mut script);
        script.append(leader.take(Phase::Fork));
        let turn = self.turns.of(self.sharing, id);
        match task.node.memory_of {
            0 => self.bring_memory((id, index), &turn, plan, &mut script)?,
            _ => self.have_memory((id, index), &turn, &mut script)?,
        }
        pooled::unplaced(leader.take(Phase::Unplaced), &mut script);
        if turn.is_last(What::Directories) {
            pooled::place(task, &mut script);
        }
        script.append(leader.take(Phase::Alone));
        pooled::plan(self.saved, &self.first_holders, index, &mut script)?;
        if turn.is_last(What::Descriptors) {
            pooled::descriptors((self.saved, task), plan, &mut script);
        }
        turn.end(&mut script);
        if !self.simple {
            lifecycle::join(&mut script, fork, self.joining);
        }
        plan.threads.push(Staying::of(&task.node, &task.threads[0]));
        for (thread, phases) in task.threads[1..].iter().zip(others) {
            self.thread((&task.node, thread), phases, plan, &mut script);
        }
        self.meet(&mut script);
        script.append(std::mem::take(&mut prepared.together));
        self.memories.await_zombies(&task.node, &mut script);
        closing::close(&mut script, leader, |script| {
            lifecycle::tie_to_parent(script, self.parent_of(id));
        });
        Ok(script)
    }

    /// Makes the memory of a task, and before the rest of it its children.
    fn bring_memory(
        &mut self,
        (id, index): (ForkId, usize),
        turn: &Turn,
        plan: &mut Plan,
        script: &mut Script,
    ) -> Result<()> {
        let task = &self.saved.tasks[index];
        let body = self.body(index, plan)?;
        let others = self.memories.of(&task.node);
        script.append(body.laid.early);
        self.fork_children(id, &task.node, script)?;
        if let Some(others) = others {
            others.await_forks(script);
        }
        turn.begin(script);
        script.append(body.laid.late);
        if let Some((ready, filled)) = body.exchange {
            let step = lifecycle::ask_to_be_filled(script, ready, filled);
            plan.outside.push(Outside {
                pid: task.node.pid,
                space: task.node.space(),
                uffd: (script_id(id), step),
                ready,
                filled,
                stored: body.laid.outside,
                mappings: body.laid.filled,
                lazy: body.laid.lazy,
                stacks: task.living().iter().map(SavedThread::stack).collect(),
            });
        }
        script.append(body.laid.finish);
        if let Some(others) = others {
            others.are_there(script);
        }
        Ok(())
    }

    /// Makes the children of a task that is made with another's memory, and waits for that.
    fn have_memory(
        &self,
        (id, index): (ForkId, usize),
        turn: &Turn,
        script: &mut Script,
    ) -> Result<()> {
        let node = &self.saved.tasks[index].node;
        self.fork_children(id, node, script)?;
        let waits = self.memories.of(node).expect("it shares it");
        waits.have_forked(script);
        turn.begin(script);
        waits.await_memory(script);
        Ok(())
    }

    /// Makes the children, becoming leader of its session or group between them.
    fn fork_children(&self, id: ForkId, node: &Node, script: &mut Script) -> Result<()> {
        let fork = &self.forks[id];
        self.fork_all(script, &fork.before, false);
        lifecycle::lead(script, fork);
        // Who is in the session has its terminal by fork and in no other way.
        if let Some((id, terminal)) = terminal::of(self.saved, node) {
            control::take(script, PoolId(id), terminal);
        }
        self.fork_all(script, &fork.after, false);
        self.fork_all(script, &fork.siblings, true);
        if let Some(id) = terminal::left(self.saved, node) {
            control::give_up(script, PoolId(id));
        }
        self.leave_at_end(id, script);
        Ok(())
    }

    /// Unmaps everything that the root has of the restorer, but for the restore area.
    fn clear(&self, script: &mut Script) {
        script.call(Sysno::munmap, [0u32.into(), Arg::AreaStart]);
        script.call(Sysno::munmap, [Arg::AreaEnd, Arg::AboveArea]);
    }

    fn body(&mut self, index: usize, plan: &mut Plan) -> Result<Body> {
        let task = &self.saved.tasks[index];
        let pages = &self.pages[index];
        let stored = pages.stored.iter();
        let bytes = stored.map(|stored| stored.span.bytes()).sum::<u64>();
        let lazy = self.setting.lazy_from_bytes;
        // What several have comes at once: who ends of them first takes no page along.
        let is_shared = self.memories.of(&task.node).is_some();
        let lazy = lazy.filter(|_| !is_shared && !pinned::is_needed(self.saved, task));
        let fill = match bytes >= self.setting.outside_from_bytes {
            _ if lazy.is_some_and(|from| bytes >= from) => Fill::Lazily,
            true => Fill::Outside,
            false => Fill::Itself,
        };
        let parent = self.memory_parents[index].map(|parent| inherit::Parent {
            memory: &self.saved.tasks[parent].memory,
            early: &self.early.maps[parent],
            present: &self.early.present[parent],
            at_fork: &self.at_fork[parent],
        });
        let files = std::cell::RefCell::new(&mut *plan);
        let laid = layout::plan(&layout::Planning {
            memory: &task.memory,
            pages,
            parent,
            early: &self.early.maps[index],
            vdso_early: self.early.vdso[index],
            fill,
            pool: &PoolId,
            files: &|number| files.borrow_mut().pages_file(number),
            decoded: &|span| files.borrow_mut().decode(task.node.space(), span),
            vdso: vdso::old(self.saved, task, &self.setting.vdso),
            at_once_bytes: self.setting.at_once_bytes,
        })?;
        self.at_fork[index] = laid.at_fork.clone();
        plan.taken.extend_from_slice(&laid.taken);
        if let Some(proxy) = &laid.proxy {
            for other in self.saved.all_with_memory_of(task) {
                vdso::check_entries(other, (&task.memory, proxy))?;
            }
        }
        let exchange = !(laid.outside.is_empty() && laid.lazy.is_empty());
        let exchange = exchange.then(|| (plan.word(), plan.word()));
        Ok(Body { laid, exchange })
    }

    /// Calls of descriptions that only a task which has them can make: the first one does, or the
    /// one that must.
    fn in_task(&self, index: usize, script: &mut Script) -> Result<()> {
        let mut own = self.saved.tasks[index]
            .descriptors
            .iter()
            .collect::<Vec<_>>();
        own.sort_by_key(|descriptor| descriptor.description);
        own.dedup_by_key(|descriptor| descriptor.description);
        for descriptor in own {
            let (id, fd) = (descriptor.description, descriptor.fd);
            let description = &*self.saved.descriptions[id as usize];
            let task = &self.saved.tasks[index];
            let is_first = self.first_holders.get(&id) == Some(&index);
            if is_first {
                let with_memory = self.saved.with_memory_of(task);
                pinned::check(with_memory, fd, description)?;
            }
            let maker = description.task();
            if maker.map_or(is_first, |pid| pid == task.node.pid) {
                description.in_task(fd, script);
            }
            let attributes = self.saved.attributes.get(&id).filter(|_| is_first);
            if let Some(payload) = attributes {
                fd::attributes::in_task(payload, fd, description.is_late(), script)?;
            }
        }
        if let Some(payload) = self.saved.tasks[index].locks {
            fd::locks::in_process(payload, script)?;
        }
        Ok(())
    }

    fn thread(
        &self,
        (node, thread): (&Node, &SavedThread),
        phases: &mut ThreadPlan,
        plan: &mut Plan,
        leader: &mut Script,
    ) {
        // CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM
        const FLAGS: u64 = 0x100 | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x4_0000;
        let (id, tid) = (script_id(plan.scripts.len()), thread.tid);
        let flags = FLAGS | thread_flag(&self.saved.tree, node, tid);
        let args = lifecycle::clone_args(leader, tid, flags, 0);
        leader.spawn(args, id);
        leader.note(format!("thread {tid}"));
        let mut script = phases.take(Phase::Fork);
        script.append(phases.take(Phase::Alone));
        self.meet(&mut script);
        script.append(phases.take(Phase::Together));
        closing::close(&mut script, phases, |_| {});
        plan.threads.push(Staying::of(node, thread));
        plan.scripts.push(Planned {
            tid,
            role: "thread",
            script,
        });
    }

    /// Waits until every thread has all that does not depend on others.
    fn meet(&self, script: &mut Script) {
        if self.meeting && self.all.1 > 1 {
            script.post(word::ALONE);
            script.wait(word::ALONE, self.all.1);
        }
        if !self.simple {
            script.wait(word::GROUPED, self.all.0);
        }
    }

    fn thread_plan(
        &self,
        task: &SavedTask<'_>,
        thread: &SavedThread,
        whole: &mut Plan,
    ) -> Result<ThreadPlan> {
        let (pid, tid) = (task.node.pid, thread.tid);
        let inherited = match pid == self.saved.tasks[0].node.pid {
            true => &self.setting.inherited,
            false => &self.descendants_inherited,
        };
        let mut plan = ThreadPlan::default();
        let (leader, alone) = (pid == tid, self.forks.len() == 1);
        let parts = PARTS.iter();
        let parts = parts.filter(|part| leader || part.scope() == Scope::Thread);
        for part in parts.filter(|part| task.node.has_own(**part)) {
            let who = resources::task::Planned {
                pid,
                tid,
                inherited,
                alone,
                memory: &task.memory,
            };
            part.plan(thread.part(part.tag()), who, &mut plan)?;
        }
        let writes = plan.outside.drain(..).map(|write| (tid, write));
        whole.writes.extend(writes);
        Ok(plan)
    }

    fn zombie(&self, id: ForkId, index: usize) -> Script {
        const PR_SET_NAME: u32 = linux_raw_sys::prctl::PR_SET_NAME;
        let fork = &self.forks[id];
        let node = &self.saved.tasks[index].node;
        let mut script = Script::default();
        lifecycle::tie_to_parent(&mut script, self.parent_of(id));
        let name = script.string(&node.name);
        script.call(Sysno::prctl, [PR_SET_NAME.into(), name.into()]);
        lifecycle::lead(&mut script, fork);
        lifecycle::join(&mut script, fork, self.joining);
        script.wait(word::GROUPED, self.all.0);
        let inherited = &self.setting.inherited;
        if !node.uids.is_empty() && !inherited.has_ids(&node.uids, &node.gids, &node.groups) {
            lifecycle::identify(&mut script, node);
            // A change of identity clears the tie.
            lifecycle::tie_to_parent(&mut script, self.parent_of(id));
        }
        lifecycle::end(&mut script, fork.pid, node.exit_status);
        script
    }

    fn stand_in(&self, id: ForkId) -> Script {
        let fork = &self.forks[id];
        let mut script = Script::default();
        lifecycle::tie_to_parent(&mut script, self.parent_of(id));
        self.fork_all(&mut script, &fork.before, false);
        lifecycle::lead(&mut script, fork);
        self.fork_all(&mut script, &fork.after, false);
        self.fork_all(&mut script, &fork.siblings, true);
        self.leave_at_end(id, &mut script);
        if let Some(waits) = self.memories.handed_on(self.sharing.of(id)) {
            waits.have_forked(&mut script);
        }
        lifecycle::join(&mut script, fork, self.joining);
        script.wait(word::GROUPED, self.all.0);
        lifecycle::end(&mut script, fork.pid, 0);
        script
    }
}

fn script_id(index: usize) -> ScriptId {
    ScriptId(u32::try_from(index).expect("fewer scripts than records"))
}
