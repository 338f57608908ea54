//! Running: every task and thread exists and is traced; what is left is what only a tracer can set.

use std::collections::{HashMap, HashSet};

use abi::Addr;
use freeze::watchdog::{Target, Watchdog, send};
use resources::fd::tcp::lock::Leftover;
use resources::task::attributes::Attribute;
use resources::task::interrupted::Remake;
use resources::task::tags;
use rustix::io::Errno;
use rustix::process::Signal;
use sys::arch::{INT_80, SYSCALL};
use sys::process::Process;
use sys::ptrace::{self, Event};
use syscalls::Sysno;
use tracee::Call;

use super::calls::Threads;
use super::ending::kill_tree;
use super::registered;
use super::stops::wait_stop;
use super::stops::{self, Untold};
use crate::build::Built;
use crate::plan::Staying;
use crate::pool::{Finish, Pool};
use crate::processor::{Processor, Rewrite};
use crate::records::{Saved, SavedTask, SavedThread, State};
use crate::{Afterwards, Error, Result};

/// All threads are parked at the end of their scripts and traced.
pub(super) struct Running<'a> {
    built: &'a Built,
    root: i32,
    armed: bool,
    /// Whether those leaders have ended that had at the dump.
    leaders_have_ended: bool,
}

impl<'a> Running<'a> {
    pub(super) fn new(built: &'a Built, root: i32) -> Self {
        Self {
            built,
            root,
            armed: true,
            leaders_have_ended: false,
        }
    }

    /// The threads that are traced: all, until [`Running::end_leaders`] has ended some.
    fn threads(&self) -> impl Iterator<Item = &Staying> {
        let ended = self.leaders_have_ended;
        let threads = self.built.plan.threads.iter();
        threads.filter(move |staying| !ended || staying.end.is_none())
    }

    pub(super) fn stop_all(&mut self) -> Result<()> {
        let failed = |tid, e| Error::kernel(format!("cannot stop {tid}"), e);
        for staying in self.threads() {
            ptrace::interrupt(staying.tid).map_err(|e| failed(staying.tid, e))?;
        }
        for staying in self.threads() {
            wait_stop(staying.tid)?;
        }
        Ok(())
    }

    /// Writes what only the restorer can set.
    pub(super) fn write_outside(&self) -> Result<()> {
        for (tid, join) in &self.built.plan.thread_groups {
            let file = (self.built.groups).open(&join.hierarchy, &join.path, true)?;
            let written = rustix::io::write(file, tid.to_string().as_bytes());
            let doing = || format!("cannot put {tid} into control group {}", join.shown());
            written.map_err(|e| Error::kernel(doing(), e))?;
        }
        for (tid, write) in &self.built.plan.writes {
            let path = sys::procfs::path(format_args!("{tid}/{}", write.file));
            let written = std::fs::write(&path, &write.text);
            written.map_err(|e| Error::kernel(format!("cannot write {path}"), e))?;
        }
        Ok(())
    }

    /// Has threads make the mappings and the calls that only they can make, and registers memory
    /// with the tree's userfaultfds.
    pub(super) fn call(&self, saved: &Saved<'_>, pool: &Pool) -> Result<()> {
        let mut threads = Threads {
            saved,
            syscall: self.syscall(),
            submit_loop: self.built.submit_loop(),
            scratch: self.built.scratch(),
            write: &|at, bytes| self.built.area.write(at, bytes),
        };
        threads.map()?;
        pool.call(saved, &mut threads)?;
        registered::register(saved, pool, &mut threads)
    }

    /// Ends the leaders that had ended at the dump. From then on the first of the other threads of
    /// such a process stands for it.
    fn end_leaders(&mut self, saved: &Saved<'_>) -> Result<()> {
        for leader in &self.built.plan.threads {
            let Some(status) = leader.end else { continue };
            let tasks = saved.tasks.iter();
            let children = tasks.filter(|task| task.node.parent == leader.pid);
            // The end of the thread that made them is not to be told to them now.
            let told = children.flat_map(SavedTask::living);
            let told = told.filter_map(|thread| Some((thread.tid, parent_death(thread)?)));
            let told = told.collect::<Vec<_>>();
            told.iter().try_for_each(|(tid, _)| self.tell(*tid, 0))?;
            let own = saved.tasks.iter().find(|task| task.node.pid == leader.pid);
            let mask = own.map_or(0, |task| task.threads[0].state.mask);
            let how = (u64::from(status.cast_unsigned() >> 8), mask);
            tracee::end(leader.tid, self.syscall(), how, leader.is_filtered)?;
            told.iter()
                .try_for_each(|(tid, signal)| self.tell(*tid, *signal))?;
        }
        self.leaders_have_ended = true;
        Ok(())
    }

    /// Has a thread get `signal` when its parent ends; 0 for none.
    fn tell(&self, tid: i32, signal: u64) -> Result<()> {
        const PR_SET_PDEATHSIG: u64 = libc::PR_SET_PDEATHSIG as u64;
        let call = Call {
            at: self.syscall(),
            number: Sysno::prctl as u64,
            args: [PR_SET_PDEATHSIG, signal, 0, 0, 0, 0],
        };
        match call.make(tid)? {
            0 => Ok(()),
            result => {
                let errno = i32::try_from(-result).unwrap_or(0);
                let source = std::io::Error::from_raw_os_error(errno);
                let doing = format!("cannot set the parent-death signal of {tid}");
                Err(Error::kernel(doing, source))
            }
        }
    }

    /// Gives every thread its registers; leaders first unmap the restore area, of memory that
    /// several share the first one's does when all others have theirs. Children come
    /// before their parents, who are told of their stops while they are still in the blob.
    pub(super) fn give_registers(
        &mut self,
        saved: &Saved<'_>,
        processor: Option<&Processor>,
    ) -> Result<()> {
        self.end_leaders(saved)?;
        processor.map_or(Ok(()), rewrite)?;
        let untold = Untold::new(saved)?;
        let (syscall, scratch) = (self.syscall(), self.built.scratch());
        let living = |task: &&SavedTask<'_>| task.node.state() != State::Zombie;
        for task in saved.tasks.iter().rev().filter(living) {
            let write = |at, bytes: &[u8]| self.built.area.write(at, bytes);
            untold.consume_seen(saved, task, syscall, scratch, write)?;
            if stops::is_stopped(task) {
                stops::stop(task, syscall)?;
            } else if task.node.continued {
                stops::proceed(task, syscall, scratch, write)?;
            }
            let (leader, others) = task.living().split_first().expect("checked when read");
            for thread in others {
                set_state(thread, self.remake(thread)?, processor)?;
            }
            let result = self.remake(leader)?;
            // Of those who share memory, the first one comes last.
            if task.node.memory_of == 0 {
                self.unmap_area(leader)?;
            }
            set_state(leader, result, processor)?;
        }
        Ok(())
    }

    /// The blob's own `syscall` instruction.
    fn syscall(&self) -> Addr {
        self.instruction(SYSCALL)
    }

    /// An instruction of the blob's that makes system calls.
    fn instruction(&self, bytes: [u8; 2]) -> Addr {
        let call = blob::code().windows(2).position(|two| two == bytes);
        let call = call.expect("the blob makes system calls") as u64;
        self.built.area.span().start.plus(call)
    }

    /// Makes the call again that the thread was in, if the kernel has to know it.
    fn remake(&self, thread: &SavedThread) -> Result<Option<i64>> {
        let Some(remake) = &thread.state.remake else {
            return Ok(None);
        };
        let scratch = self.built.scratch();
        let args = remake.args(scratch.0).ok_or_else(|| {
            let record = format!("thread {}", thread.tid);
            resources::Error::corrupt(record, "its interrupted call makes no sense")
        })?;
        self.built.area.write(scratch, &remake.timespec());
        let call = |at| Call {
            at,
            number: remake.number,
            args,
        };
        let made = match remake.is_32_bit {
            false => call(self.syscall()).make_interrupted(thread.tid),
            true => call(self.instruction(INT_80)).make_interrupted_32(thread.tid),
        };
        Ok(Some(made?))
    }

    /// Has a stopped leader unmap the restore area, by the blob's own `syscall` instruction.
    fn unmap_area(&self, thread: &SavedThread) -> Result<()> {
        let tid = thread.tid;
        let span = self.built.area.span();
        let call = Call {
            at: self.syscall(),
            number: Sysno::munmap as u64,
            args: [span.start.0, span.bytes(), 0, 0, 0, 0],
        };
        let result = call.make_last(tid, thread.registers())?;
        if result != 0 {
            let errno = i32::try_from(-result).unwrap_or(0);
            let source = std::io::Error::from_raw_os_error(errno);
            let doing = format!("cannot unmap the restore area of {tid}");
            return Err(Error::kernel(doing, source));
        }
        Ok(())
    }

    /// Lets the tree go, and its connections. The result is to be dropped afterwards, and nothing
    /// of the pool is open then.
    ///
    /// What holds the connections back stands until nothing can keep the tree from going on: where
    /// this process is killed earlier, the image can be restored again.
    pub(super) fn let_go(
        mut self,
        saved: &Saved<'_>,
        pool: Pool,
        afterwards: Afterwards,
    ) -> Result<Option<Leftover>> {
        for task in &saved.tasks {
            let stops = task.node.stop_comes || afterwards == Afterwards::Stop;
            if stops && task.node.state() == State::Running {
                stop_thread(task.node.pid, task.process().tid())?;
            }
        }
        let finish = pool.resume(saved)?;
        let (watchdog, held) = self.post_watchdog(saved, &finish, afterwards)?;
        let let_go = finish.wake(saved).and_then(|leftover| {
            let signals = held.iter().map(|pid| {
                // By the number of the thread that stands for the process.
                let tid = saved.process(*pid).tid();
                Ok((tid, take_stop(tid)?))
            });
            self.detach(saved, &signals.collect::<Result<_>>()?)?;
            finish.catch_up();
            Ok(leftover)
        });
        drop(finish);
        watchdog.iter().for_each(Watchdog::dismiss);
        self.armed = let_go.is_err();
        let_go
    }

    /// Posts a watchdog that kills the tree or, from now on, has all of it go on if this process is
    /// killed; none where one call lets it go and nothing else is to be done. Tells for whom a stop
    /// signal waits.
    fn post_watchdog(
        &self,
        saved: &Saved<'_>,
        last: &Finish,
        afterwards: Afterwards,
    ) -> Result<(Option<Watchdog>, Vec<i32>)> {
        let mut pids = self
            .threads()
            .map(|staying| staying.pid)
            .collect::<Vec<_>>();
        pids.dedup();
        if pids.len() < 2 && !last.has_connections() && !last.has_put_off() {
            return Ok((None, Vec::new()));
        }
        let held = match self.threads().count() {
            1 if !last.has_connections() => Vec::new(),
            _ => held(saved, afterwards),
        };
        let finish = |tasks: &[Target]| {
            drop(last.wake(saved));
            last.catch_up();
            let held = |task: &&Target| held.contains(&task.pid);
            send(tasks.iter().filter(held), Signal::CONT);
        };
        let take_back = |tasks: &[Target]| send(tasks, Signal::KILL);
        let watchdog = Watchdog::post(&last.descriptors(), &pids, take_back, finish)?;
        // While some would be killed by the end of this process and others let go, and as long as
        // connections sleep (reading them fails then), it lets nobody run: a stop signal waits.
        for pid in &held {
            stop_thread(*pid, saved.process(*pid).tid())?;
        }
        // Until now the end of this process kills them; after this it lets them go.
        for staying in self.threads() {
            let spared = ptrace::set_kill_on_exit(staying.tid, false);
            spared.map_err(|e| Error::kernel(format!("cannot let {} go", staying.tid), e))?;
        }
        watchdog.commit();
        Ok((Some(watchdog), held))
    }

    /// Lets every thread go on, those that stand for their processes with the signal that is theirs
    /// in `signals`.
    fn detach(&self, saved: &Saved<'_>, signals: &HashMap<i32, i32>) -> Result<()> {
        // Leaders last: until then a process of several threads is not whole.
        let answering = saved.tasks.iter().map(|task| task.process().tid());
        let answering = answering.collect::<HashSet<_>>();
        let (leaders, others): (Vec<&Staying>, Vec<&Staying>) = self
            .threads()
            .partition(|staying| answering.contains(&staying.tid));
        for staying in others.into_iter().chain(leaders) {
            let signal = signals.get(&staying.tid).copied().unwrap_or(0);
            match ptrace::detach(staying.tid, signal) {
                // A signal that came back has ended it.
                Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                detached => {
                    detached
                        .map_err(|e| Error::kernel(format!("cannot let {} go", staying.tid), e))?;
                }
            }
        }
        Ok(())
    }
}

/// The tasks that a stop signal may hold for a moment: not those that are to stop, and not those
/// for which a signal waits that a stop signal would discard.
fn held(saved: &Saved<'_>, afterwards: Afterwards) -> Vec<i32> {
    let runs = |task: &&SavedTask<'_>| {
        task.node.state() == State::Running
            && !task.node.stop_comes
            && afterwards != Afterwards::Stop
            && !stops::awaits(task, Signal::CONT.as_raw())
    };
    let running = saved.tasks.iter().filter(runs);
    running.map(|task| task.node.pid).collect()
}

/// The signal that a thread gets when its parent ends, if any.
pub(super) fn parent_death(thread: &SavedThread) -> Option<u64> {
    let part = thread.part(tags::PARENT_DEATH)?;
    let signal = part.record::<Attribute>()?.value;
    Some(signal).filter(|signal| *signal != 0)
}

/// Has a stop signal wait for thread `tid` of process `pid`. A signal for the whole process might
/// be taken by a thread that the kernel works with there, which nobody traces.
fn stop_thread(pid: i32, tid: i32) -> Result<()> {
    let sent = sys::signal::to_thread(pid, tid, ptrace::SIGSTOP);
    sent.map_err(|e| Error::kernel(format!("cannot stop pid {pid}"), e))
}

/// Takes the stop signal away that waits for a process whose threads are all stopped: thread `pid`,
/// which stands for it and stays stopped, meets it without obeying. Gives the signal with which it
/// is to go on.
fn take_stop(pid: i32) -> Result<i32> {
    const SIGCONT: i32 = Signal::CONT.as_raw();
    let failed = |e| Error::kernel(format!("cannot let {pid} go"), e);
    let mut pass_on = 0;
    loop {
        ptrace::resume(pid, pass_on).map_err(failed)?;
        pass_on = match ptrace::wait(pid).map_err(failed)?.1 {
            Event::Signal(ptrace::SIGSTOP) | Event::Ended(_) => return Ok(0),
            // Somebody has it continue, and so has taken the stop signal away.
            Event::Signal(SIGCONT) => return Ok(SIGCONT),
            // One that came back with it, and comes first.
            Event::Signal(signal) => signal,
            Event::Stop(_) | Event::Call | Event::Other(_) => 0,
        };
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.armed {
            kill_tree(self.built, self.root);
        }
    }
}

/// Makes what handlers have interrupted fit this processor.
fn rewrite(processor: &Processor) -> Result<()> {
    for Rewrite { pid, at, bytes } in processor.rewrites() {
        let written = sys::vm::write(&Process::new(*pid), *at, bytes);
        written.map_err(|e| Error::kernel(format!("cannot write to the stack of {pid}"), e))?;
    }
    Ok(())
}

fn set_state(
    thread: &SavedThread,
    remade: Option<i64>,
    processor: Option<&Processor>,
) -> Result<()> {
    let (tid, state) = (thread.tid, &thread.state);
    let failed = |what: &str, e| Error::kernel(format!("cannot set {what} of {tid}"), e);
    let extended = match processor {
        Some(processor) => processor.xstate(tid, &state.xstate)?,
        None => state.xstate.as_slice().into(),
    };
    ptrace::set_xstate(tid, &extended).map_err(|e| failed("the extended state", e))?;
    let mut registers = thread.registers();
    if let Some(result) = remade {
        Remake::finish(result, &mut registers);
    }
    ptrace::set_registers(tid, &registers).map_err(|e| failed("the registers", e))?;
    if let Some(dispatch) = state.dispatch {
        // The thread makes no call of ours any more.
        let set = ptrace::set_dispatch(tid, &dispatch.into());
        set.map_err(|e| failed("the user dispatch of system calls", e))?;
    }
    ptrace::set_signal_mask(tid, state.mask).map_err(|e| failed("the signal mask", e))
}
