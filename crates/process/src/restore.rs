//! The restore of a process tree: built → loaded → running.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use abi::{Addr, Op, offset};
use image::{Reader, Run, RunKind};
use pages::sink;
use resources::Allow;
use resources::task::interrupted::Remake;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use sys::ptrace::{self, Event, Registers};
use sys::spawn::{Entry, spawn};

use crate::build::{Built, build};
use crate::plan::{self, Outside, Setting, Staying, word};
use crate::records::{Saved, SavedThread, State};
use crate::sentinel::Sentinel;
use crate::{Afterwards, Error, Observer, RestoreOptions, Restored, Result, Stage};

/// Brings back the tree that `options.images_dir` holds.
///
/// # Errors
/// Every failure leaves no task behind.
pub fn restore(options: &RestoreOptions, observer: &mut dyn Observer) -> Result<Restored> {
    let began = Instant::now();
    let store = store::Directory::open(&options.images_dir).map_err(Error::Store)?;
    let reader = Arc::new(Reader::open(&store)?);
    let saved = Saved::read(&reader)?;
    observer
        .stage(Stage::PreRestore, None)
        .map_err(Error::Vetoed)?;
    check_vdso(&saved)?;
    let setting = setting(options)?;
    let plan = plan::plan(&reader, &saved, &setting)?;
    let built = build(plan, &saved, &reader, &allow(options), &options.inherit_fds)?;
    log::info!("{} scripts are built", built.plan.scripts.len());
    let root = saved.tasks[0].node.pid;
    let root_pid = Pid::from_raw(root).expect("checked when read");
    let loaded = Loaded::new(&built, root, options.sibling)?;
    let filled_pages = loaded.fill(&reader)?;
    log::info!("{filled_pages} pages are filled from outside");
    loaded.wait_ready()?;
    log::info!("all tasks are there");
    observer
        .stage(Stage::PostRestore, Some(root_pid))
        .map_err(Error::Vetoed)?;
    let mut running = loaded.trace()?;
    running.stop_all()?;
    log::info!("all threads are stopped at the end of their scripts");
    running.write_outside()?;
    running.give_registers(&saved)?;
    observer
        .stage(Stage::PreResume, Some(root_pid))
        .map_err(Error::Vetoed)?;
    running.let_go(&saved, options.afterwards)?;
    let threads = built.plan.threads.len() as u64;
    built.succeed();
    observer
        .stage(Stage::PostResume, Some(root_pid))
        .map_err(Error::Vetoed)?;
    Ok(Restored {
        root: root_pid,
        tasks: saved.tasks.len() as u64,
        threads,
        filled_pages,
        total_us: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
    })
}

/// Returns the scripts that a restore would run, one line a call, without running anything.
///
/// # Errors
/// Those of [`restore`] that show without touching the kernel.
pub fn plan(options: &RestoreOptions) -> Result<String> {
    let store = store::Directory::open(&options.images_dir).map_err(Error::Store)?;
    let reader = Reader::open(&store)?;
    let saved = Saved::read(&reader)?;
    let setting = Setting {
        parent: 0,
        ..setting(options)?
    };
    let plan = plan::plan(&reader, &saved, &setting)?;
    plan::print(&plan, &saved, &reader)
}

fn setting(options: &RestoreOptions) -> Result<Setting> {
    let own = std::process::id().cast_signed();
    let parent = if options.sibling { 0 } else { own };
    let born = resources::Born::read()?;
    Ok(Setting {
        parent,
        born,
        ..Setting::default()
    })
}

fn allow(options: &RestoreOptions) -> Allow {
    let allowed = &options.allowed;
    Allow {
        tcp_established: allowed.tcp_established,
        tcp_close: allowed.tcp_close,
        ext_unix_sk: allowed.ext_unix_sk,
        shell_job: allowed.shell_job,
        file_locks: allowed.file_locks,
        link_remap: allowed.link_remap,
        ..Allow::default()
    }
}

/// The image's vDSO must be this kernel's.
fn check_vdso(saved: &Saved<'_>) -> Result<()> {
    let own = sys::vdso::own_build_id().unwrap_or_default();
    for task in &saved.tasks {
        let theirs = &task.memory.vdso_build_id;
        if !theirs.is_empty() && *theirs != own {
            let pid = task.node.pid;
            let what = format!("pid {pid}: its vDSO is another kernel's, which is not supported");
            return Err(Error::Unfit(what));
        }
    }
    Ok(())
}

/// How long a wait lasts before it is looked at whether all tasks still live.
const LOOK: Duration = Duration::from_millis(100);

/// The root task runs its script. Dropping this kills it, and with it every task that it made.
struct Loaded<'a> {
    built: &'a Built,
    root: i32,
    sibling: bool,
    armed: bool,
}

impl<'a> Loaded<'a> {
    fn new(built: &'a Built, root: i32, sibling: bool) -> Result<Self> {
        let span = built.window.span();
        let entry = Entry {
            code: span.start,
            ops: built.scripts[0],
            header: built.header(),
        };
        let begun = Instant::now();
        loop {
            match spawn(root, sibling, entry) {
                Ok(()) => {
                    return Ok(Self {
                        built,
                        root,
                        sibling,
                        armed: true,
                    });
                }
                Err(error) if error.raw_os_error() == Some(EEXIST) => {
                    if !is_ending(root) || begun.elapsed() > PATIENCE {
                        return Err(Error::Taken { pid: root });
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => {
                    return Err(Error::kernel(
                        format!("cannot make a task with pid {root}"),
                        error,
                    ));
                }
            }
        }
    }

    /// Fills the pages of the tasks that wait for it.
    fn fill(&self, reader: &Reader) -> Result<u64> {
        let mut pages = 0;
        for outside in &self.built.plan.outside {
            self.wait(outside.ready, 1)?;
            let filled = self.fill_one(reader, outside)?;
            let window = &self.built.window;
            window.post(window.word(self.built.word(outside.filled)), 1);
            pages += filled;
        }
        verify_rest(reader, self.built)?;
        Ok(pages)
    }

    fn fill_one(&self, reader: &Reader, outside: &Outside) -> Result<u64> {
        let (script, step) = outside.uffd;
        let op = self.built.op(script, step);
        let fd = self.built.window.load(op.plus(offset::RESULT as u64)) as i32;
        let uffd = crate::collect::fetch(outside.pid, fd)?;
        let extents = outside.stored.iter().map(|stored| pages::Extent {
            space: image::SpaceId(outside.pid.cast_unsigned()),
            first_page: stored.span.start.page(),
            at: stored.span.start,
            pages: stored.span.pages(),
        });
        let extents = extents.collect::<Vec<_>>();
        let placed = pages::place(reader, &extents)?;
        let spans = outside
            .stored
            .iter()
            .map(|stored| stored.span)
            .collect::<Vec<_>>();
        let sink = sink::Missing::new(outside.pid, sys::uffd::Uffd::from(uffd), &spans)?;
        Ok(pages::fill(reader, &placed, &sink, &|_| ())?.pages)
    }

    fn wait_ready(&self) -> Result<()> {
        let threads = u32::try_from(self.built.plan.threads.len()).expect("checked when read");
        self.wait(word::READY, threads)
    }

    /// Waits until a shared word is at least `value`.
    fn wait(&self, id: resources::script::WordId, value: u32) -> Result<()> {
        let window = &self.built.window;
        let word = window.word(self.built.word(id));
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            self.check()?;
            window.sleep_on(word, seen, LOOK);
            if word.load(Ordering::Acquire) == seen {
                self.check_alive()?;
            }
        }
    }

    /// Whether a call failed.
    fn check(&self) -> Result<()> {
        let built = self.built;
        let header = built.header();
        let failing = built.window.word(header.plus(offset::FAILING as u64));
        if failing.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let failed = Addr(built.window.load(header.plus(offset::FAILED as u64)));
        let starts = built.scripts.iter().enumerate();
        let (script, start) = starts
            .filter(|(_, start)| **start <= failed)
            .max_by_key(|(_, start)| **start)
            .expect("the op of some script failed");
        let planned = &built.plan.scripts[script];
        let step = (failed.0 - start.0) as usize / Op::BYTES;
        let result = built
            .window
            .load(failed.plus(offset::RESULT as u64))
            .cast_signed();
        let call = planned.script.line(step).to_string();
        if result == -i64::from(EEXIST) && call.starts_with("clone3") {
            let child = &planned.script.steps[step].extra;
            if let resources::script::Arg::Script(child) = child {
                return Err(Error::Taken {
                    pid: built.plan.scripts[child.0 as usize].tid,
                });
            }
        }
        let source = if result < 0 {
            std::io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(0))
        } else {
            std::io::Error::other(format!("it returned {result:#x}"))
        };
        Err(Error::Call {
            pid: planned.tid,
            call,
            source,
        })
    }

    /// Whether a task ended.
    fn check_alive(&self) -> Result<()> {
        self.check()?;
        for staying in &self.built.plan.threads {
            let stat = std::fs::read(format!("/proc/{}/stat", staying.pid));
            let state = stat
                .ok()
                .and_then(|stat| sys::proc::Stat::parse(&stat).ok());
            if let Some(stat) = state.filter(|stat| matches!(stat.state, b'Z' | b'X')) {
                let how = describe_status(stat.exit_code);
                return Err(Error::Died {
                    pid: staying.pid,
                    how,
                });
            }
        }
        if !std::path::Path::new(&format!("/proc/{}", self.root)).exists() {
            return Err(Error::Died {
                pid: self.root,
                how: "unknown".to_owned(),
            });
        }
        Ok(())
    }

    /// Traces all threads, so that they are killed if this process is, and lets the scripts run to
    /// their ends.
    fn trace(mut self) -> Result<Running<'a>> {
        for staying in &self.built.plan.threads {
            let seized = ptrace::seize(staying.tid, true);
            seized.map_err(|e| Error::kernel(format!("cannot trace {}", staying.tid), e))?;
        }
        let window = &self.built.window;
        window.post(window.word(self.built.word(word::GO)), 1);
        let threads = u32::try_from(self.built.plan.threads.len()).expect("checked when read");
        let parked = window.word(self.built.header().plus(offset::PARKED as u64));
        loop {
            let seen = parked.load(Ordering::Acquire);
            if seen >= threads {
                break;
            }
            window.sleep_on(parked, seen, LOOK);
            if parked.load(Ordering::Acquire) == seen {
                self.check_alive()?;
            }
        }
        self.check()?;
        self.armed = false;
        Ok(Running {
            built: self.built,
            root: self.root,
            sibling: self.sibling,
            armed: true,
        })
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        if self.armed {
            kill_tree(self.built, self.root, self.sibling);
        }
    }
}

/// Checks the pages that tasks read for themselves, while they do so. What the restorer fills it
/// checks then.
fn verify_rest(reader: &Reader, built: &Built) -> Result<()> {
    const BATCH_BYTES: usize = 1 << 20;
    let outside = built
        .plan
        .outside
        .iter()
        .flat_map(|outside| &outside.stored);
    let mut outside = outside
        .map(|stored| (stored.offset, stored.span.bytes()))
        .collect::<Vec<_>>();
    outside.sort_unstable();
    let elsewhere = |run: &Run| {
        let RunKind::Data { offset_bytes, .. } = run.kind else {
            return true;
        };
        let after = outside.partition_point(|(at, _)| *at <= offset_bytes);
        let filled = after > 0 && offset_bytes < outside[after - 1].0 + outside[after - 1].1;
        filled || run.space.0 >> 31 == 1
    };
    let runs = reader
        .stored()
        .into_iter()
        .filter(|run| !elsewhere(run))
        .collect::<Vec<_>>();
    let mut buffer = Vec::new();
    let mut rest = runs.as_slice();
    while let Some(first) = rest.first() {
        let mut bytes = first.len_bytes() as usize;
        let follows = rest.windows(2).take_while(|pair| {
            let fits = bytes + pair[1].len_bytes() as usize <= BATCH_BYTES;
            let next = start(&pair[0]) + pair[0].len_bytes() == start(&pair[1]);
            if fits && next {
                bytes += pair[1].len_bytes() as usize;
            }
            fits && next
        });
        let count = 1 + follows.count();
        buffer.resize(bytes, 0);
        reader.read_stored(&mut buffer, start(first), first.space)?;
        let mut at = 0;
        for run in &rest[..count] {
            let end = at + run.len_bytes() as usize;
            reader.check(run, &buffer[at..end])?;
            at = end;
        }
        rest = &rest[count..];
    }
    Ok(())
}

fn start(run: &Run) -> u64 {
    match run.kind {
        RunKind::Data { offset_bytes, .. } => offset_bytes,
        _ => 0,
    }
}

const EEXIST: i32 = 17;
/// How long a pid that is just being freed is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the process has been killed but is not gone yet.
fn is_ending(pid: i32) -> bool {
    let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else {
        return true;
    };
    const PF_EXITING: u32 = 4;
    let stat = sys::proc::Stat::parse(&stat);
    stat.is_ok_and(|stat| matches!(stat.state, b'Z' | b'X') || stat.flags & PF_EXITING != 0)
}

/// How a task with this wait status ended.
pub(crate) fn describe_status(status: i32) -> String {
    match status & 0x7f {
        0 => format!("exit status {}", status >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}

/// Kills every task that was made so far; the root goes last, so that children cannot escape.
fn kill_tree(built: &Built, root: i32, sibling: bool) {
    for planned in built
        .plan
        .scripts
        .iter()
        .rev()
        .filter(|planned| planned.role != "thread")
    {
        let pid = planned.tid;
        let made = pid == root || is_ours(pid, root);
        if let (true, Some(pid)) = (made, Pid::from_raw(pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    if let (false, Some(root)) = (sibling, Pid::from_raw(root)) {
        let _ = waitpid(Some(root), WaitOptions::empty());
    }
}

/// Whether `pid` descends from the root: its number may belong to somebody else.
fn is_ours(pid: i32, root: i32) -> bool {
    let mut at = pid;
    for _ in 0..64 {
        let stat = std::fs::read(format!("/proc/{at}/stat")).ok();
        let Some(stat) = stat.and_then(|stat| sys::proc::Stat::parse(&stat).ok()) else {
            return false;
        };
        if stat.ppid == root {
            return true;
        }
        if stat.ppid <= 1 {
            return false;
        }
        at = stat.ppid;
    }
    false
}

/// All threads are parked at the end of their scripts and traced.
struct Running<'a> {
    built: &'a Built,
    root: i32,
    sibling: bool,
    armed: bool,
}

impl Running<'_> {
    fn threads(&self) -> &[Staying] {
        &self.built.plan.threads
    }

    fn stop_all(&mut self) -> Result<()> {
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
    fn write_outside(&self) -> Result<()> {
        for (tid, write) in &self.built.plan.writes {
            let path = format!("/proc/{tid}/{}", write.file);
            let written = std::fs::write(&path, &write.text);
            written.map_err(|e| Error::kernel(format!("cannot write {path}"), e))?;
        }
        Ok(())
    }

    /// Gives every thread its registers; leaders first unmap the window.
    fn give_registers(&mut self, saved: &Saved<'_>) -> Result<()> {
        let threads = saved.tasks.iter().flat_map(|task| &task.threads);
        let states = threads.map(|thread| (thread.tid, thread));
        let states = states.collect::<std::collections::HashMap<_, _>>();
        let (leaders, others): (Vec<&Staying>, Vec<&Staying>) = self
            .threads()
            .iter()
            .partition(|staying| staying.pid == staying.tid);
        for staying in others.into_iter().chain(leaders) {
            let thread = states[&staying.tid];
            let result = self.remake(thread)?;
            if staying.pid == staying.tid {
                self.unmap_window(staying.tid)?;
            }
            set_state(thread, result)?;
        }
        Ok(())
    }

    /// The blob's own `syscall` instruction.
    fn syscall(&self) -> Addr {
        let call = blob::code().windows(2).position(|two| two == [0x0f, 0x05]);
        let call = call.expect("the blob makes system calls") as u64;
        self.built.window.span().start.plus(call)
    }

    /// Makes the call again that the thread was in, if the kernel has to know it.
    fn remake(&self, thread: &SavedThread<'_>) -> Result<Option<i64>> {
        let Some(remake) = &thread.state.remake else {
            return Ok(None);
        };
        let scratch = self.built.scratch();
        let args = remake.args(scratch.0).ok_or_else(|| {
            let record = format!("thread {}", thread.tid);
            resources::Error::corrupt(record, "its interrupted call makes no sense")
        })?;
        self.built.window.write(scratch, &remake.timespec());
        let result = tracee::remake(thread.tid, self.syscall(), remake.number, args)?;
        Ok(Some(result))
    }

    /// Has a stopped leader unmap the window, by the blob's own `syscall` instruction.
    fn unmap_window(&self, tid: i32) -> Result<()> {
        const MUNMAP: u64 = 11;
        let failed = |e| Error::kernel(format!("cannot unmap the window of {tid}"), e);
        let span = self.built.window.span();
        let regs = ptrace::registers(tid).map_err(failed)?;
        let regs = Registers {
            rip: self.syscall().0,
            rax: MUNMAP,
            rdi: span.start.0,
            rsi: span.bytes(),
            orig_rax: u64::MAX,
            ..regs
        };
        ptrace::set_registers(tid, &regs).map_err(failed)?;
        let mut stops = 0;
        while stops < 2 {
            ptrace::resume_to_call(tid).map_err(failed)?;
            match ptrace::wait(tid).map_err(failed)? {
                (_, Event::Call) => stops += 1,
                // An interruption that was asked for before.
                (_, Event::Stop(_)) => {}
                (_, event) => {
                    let how = format!("{event:?} while the window was unmapped");
                    return Err(Error::Died { pid: tid, how });
                }
            }
        }
        let result = ptrace::registers(tid).map_err(failed)?.rax.cast_signed();
        if result != 0 {
            let errno = i32::try_from(-result).unwrap_or(0);
            return Err(failed(std::io::Error::from_raw_os_error(errno)));
        }
        Ok(())
    }

    fn let_go(mut self, saved: &Saved<'_>, afterwards: Afterwards) -> Result<()> {
        for task in &saved.tasks {
            let stopped = task.node.state() == State::Stopped || afterwards == Afterwards::Stop;
            if let (true, Some(pid)) = (
                stopped && task.node.state() != State::Zombie,
                Pid::from_raw(task.node.pid),
            ) {
                let sent = kill_process(pid, Signal::STOP);
                sent.map_err(|e| Error::kernel(format!("cannot stop pid {}", task.node.pid), e))?;
            }
        }
        let leaders = self
            .threads()
            .iter()
            .filter(|staying| staying.pid == staying.tid);
        let pids = leaders.map(|staying| staying.pid).collect::<Vec<_>>();
        let sentinel = Sentinel::post(&pids)?;
        // Leaders last: until then the death of this process kills theirs as a whole.
        let (leaders, others): (Vec<&Staying>, Vec<&Staying>) = self
            .threads()
            .iter()
            .partition(|staying| staying.pid == staying.tid);
        for staying in others.into_iter().chain(leaders) {
            let detached = ptrace::detach(staying.tid, 0);
            detached.map_err(|e| Error::kernel(format!("cannot let {} go", staying.tid), e))?;
        }
        if let Some(sentinel) = sentinel {
            sentinel.dismiss();
        }
        self.armed = false;
        Ok(())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.armed {
            kill_tree(self.built, self.root, self.sibling);
        }
    }
}

fn wait_stop(tid: i32) -> Result<()> {
    loop {
        let failed = |e| Error::kernel(format!("cannot stop {tid}"), e);
        match ptrace::wait(tid).map_err(failed)? {
            (_, Event::Stop(_)) => return Ok(()),
            (_, Event::Ended(status)) => {
                return Err(Error::Died {
                    pid: tid,
                    how: describe_status(status),
                });
            }
            // Not before the restore is complete: it stays pending.
            _ => ptrace::resume(tid, 0).map_err(failed)?,
        }
    }
}

fn set_state(thread: &SavedThread<'_>, remade: Option<i64>) -> Result<()> {
    let (tid, state) = (thread.tid, &thread.state);
    let failed = |what: &str, e| Error::kernel(format!("cannot set {what} of {tid}"), e);
    let words = state
        .registers
        .as_slice()
        .try_into()
        .expect("checked when read");
    ptrace::set_xstate(tid, &state.xstate).map_err(|e| failed("the extended state", e))?;
    let mut registers = Registers::from_words(words);
    if let Some(result) = remade {
        Remake::finish(result, &mut registers);
    }
    ptrace::set_registers(tid, &registers).map_err(|e| failed("the registers", e))?;
    ptrace::set_signal_mask(tid, state.mask).map_err(|e| failed("the signal mask", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses_are_told() {
        assert_eq!(describe_status(3 << 8), "exit status 3");
        assert_eq!(describe_status(9), "signal 9");
    }

    #[test]
    fn a_page_is_a_page() {
        assert_eq!(abi::PAGE_BYTES, image::PAGE_BYTES as u64);
    }
}
