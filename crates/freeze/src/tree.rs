//! Target → frozen: every thread of every task of the tree is stopped.

mod left;
mod limit;

pub use limit::{DEFAULT_TIMEOUT, Limit};

use std::cell::OnceCell;
use std::collections::HashSet;
use std::fmt::Debug;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use resources::task::interrupted::{self, Before, Clocks};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use sys::close::{CloseQueue, Deferred};
use sys::proc::{Stat, Status};
use sys::process::Process;
use sys::tick::{Deadline, Ticker};
use tracee::{Seized, Thread};

use crate::proc::{open, read_at};
use crate::waits::{self, Wait};
use crate::{Error, Result, refetch, target};

/// A stopped tree, parents before children. It goes on when this is dropped.
#[derive(Debug)]
pub struct Frozen {
    /// The tasks; the root first.
    pub tasks: Vec<Task>,
    /// When the first thread was asked to stop.
    pub since: Instant,
    /// How long it took until all were stopped.
    pub freezing: Duration,
    /// How long that may go on.
    pub limit: Limit,
    /// Ends waits for tasks that do not do as they are told.
    ticker: Option<Ticker>,
    /// Ends this process where it does not get on itself: that alone lets the tree go then.
    deadline: Option<Deadline>,
    /// Sees to what this process would leave in the tasks if it was killed, until they go on.
    pub guard: Option<Box<dyn Guard>>,
}

/// A resource that lives as long as a tree is stopped.
pub trait Guard: Debug {}

impl Frozen {
    /// Lets the tree go on.
    ///
    /// # Errors
    /// [`Error::Tracee`] when a thread has ended.
    pub fn release(self) -> Result<()> {
        self.tasks.into_iter().try_for_each(Task::release)
    }

    /// Lets the stop take as long as it may: the tasks stay as they are from here on.
    pub fn take_time(&mut self) {
        self.limit.lift();
        self.ticker = None;
        self.deadline = None;
    }
}

/// A stopped task, or one that has ended and whose parent has not asked how.
#[derive(Debug)]
pub struct Task {
    /// The process. Where its leader has ended, the first of its threads answers.
    pub process: Process,
    /// Its threads.
    pub body: Body,
    /// What each thread had been waiting for, in the order of the threads.
    pub waits: Vec<Wait>,
    /// /proc/PID; where its leader has ended, /proc/TID of its first living thread.
    pub proc: Rc<Deferred>,
    /// Files of it that were read.
    pub close_queue: Rc<CloseQueue>,
    /// The wait status with which its leader has ended while other threads run on.
    pub leader_end: Option<i32>,
    stat: OnceCell<Vec<u8>>,
}

/// The threads of a task.
#[derive(Debug)]
pub enum Body {
    /// None: a zombie.
    Ended,
    /// Stopped, the leader first if it lives.
    Stopped(Vec<Thread>),
    /// Stopped, with the blob in the process.
    Injected(tracee::Injection),
}

impl Task {
    /// A task that is not stopped yet.
    fn new(pid: i32, close_queue: &Rc<CloseQueue>) -> Result<Self> {
        Ok(Self {
            process: Process::new(pid),
            body: Body::Ended,
            waits: Vec::new(),
            proc: Rc::new(Deferred::new(open(pid)?, close_queue)),
            close_queue: close_queue.clone(),
            leader_end: None,
            stat: OnceCell::new(),
        })
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// The thread by which the process is asked: its leader, if that lives. A zombie is its leader.
    #[must_use]
    pub fn asked(&self) -> i32 {
        let first = self.threads().first();
        first.map_or(self.pid(), |thread| thread.tid)
    }

    /// Its stopped threads, the leader first if it lives; none for a zombie.
    #[must_use]
    pub fn threads(&self) -> &[Thread] {
        match &self.body {
            Body::Ended => &[],
            Body::Stopped(threads) => threads,
            Body::Injected(injection) => injection.threads(),
        }
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_zombie(&self) -> bool {
        matches!(self.body, Body::Ended)
    }

    /// Reads a file of /proc/PID.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        read_at(self.proc.as_fd(), self.pid(), name, &self.close_queue)
    }

    /// Lists the numbers in a directory of /proc/PID: "task", "fd".
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn numbers(&self, name: &str) -> Result<Vec<i32>> {
        let pid = self.pid();
        let failed = |errno: Errno| match errno {
            Errno::NOENT | Errno::SRCH => Error::Gone { pid },
            errno => Error::kernel(format!("cannot list /proc/{pid}/{name}"), errno),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(&self.proc, name, flags, Mode::empty()).map_err(failed)?;
        let numbers = sys::numbers::of(&dir).map_err(failed)?;
        self.close_queue.push(dir);
        Ok(numbers)
    }

    /// Reads a file of /proc/PID/task/TID, as far as that is still there.
    fn read_of(&self, tid: i32, name: &str) -> Option<Vec<u8>> {
        self.read(&format!("task/{tid}/{name}")).ok()
    }

    /// Lets a stopped task go on; the calls in which its threads wait go on with the time that
    /// remains.
    ///
    /// # Errors
    /// [`Error::Tracee`] when a thread has ended.
    pub fn release(mut self) -> Result<()> {
        let body = std::mem::replace(&mut self.body, Body::Ended);
        let Body::Stopped(threads) = body else {
            return Ok(());
        };
        let waits = std::mem::take(&mut self.waits);
        for (mut thread, wait) in threads.into_iter().zip(waits) {
            let tid = thread.tid;
            wait.end(&mut thread, |name| self.read_of(tid, name));
            thread.release()?;
        }
        Ok(())
    }

    /// Reads /proc/PID/status.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn status(&self) -> Result<Status> {
        let doing = || format!("cannot understand /proc/{}/status", self.pid());
        let unclear = |what| std::io::Error::new(std::io::ErrorKind::InvalidData, what);
        let status = Status::parse(&self.read("status")?);
        status.map_err(|e| Error::kernel(doing(), unclear(e)))
    }

    /// Reads /proc/PID/stat, once after the task was stopped. Where the leader has ended, the text
    /// is that of the thread that is asked instead, and only what a process has of its leader is
    /// the leader's own.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn stat(&self) -> Result<(Stat, &[u8])> {
        if self.stat.get().is_none() {
            let text = self.read("stat")?;
            self.stat.get_or_init(|| text);
        }
        let text = self.stat.get().expect("just read");
        let unclear = |what| std::io::Error::new(std::io::ErrorKind::InvalidData, what);
        let doing = || format!("cannot understand /proc/{}/stat", self.pid());
        let mut stat = Stat::parse(text).map_err(|e| Error::kernel(doing(), unclear(e)))?;
        if self.leader_end.is_some() {
            let leader = stat_of(self.pid()).ok_or(Error::Gone { pid: self.pid() })?;
            stat.pid = leader.pid;
            stat.comm = leader.comm;
            stat.start_ticks = leader.start_ticks;
            stat.exit_signal = leader.exit_signal;
        }
        Ok((stat, text))
    }
}

/// Stops the tree whose root is `root`. `timeout` bounds the whole of it.
///
/// # Errors
/// [`Error::Gone`], also for a root that is a zombie: there is nothing to bring back;
/// [`Error::Tracee`] when a task may not be traced or does not stop in time. The tree goes on then.
pub fn freeze(root: i32, timeout: Option<Duration>) -> Result<Frozen> {
    target::check(root)?;
    target::check_thawed(root)?;
    let since = Instant::now();
    let close_queue = Rc::new(CloseQueue::default());
    let mut stop = Stop {
        limit: Limit::new(since, timeout),
        clocks: Clocks::default(),
        close_queue: close_queue.clone(),
    };
    limit::be_exact();
    // Also without a deadline: a leader that ends is not told of.
    let ticker = Ticker::start(Duration::from_millis(50), timeout)
        .map_err(|e| Error::kernel("cannot start a timer", e))?;
    let mut frozen = Frozen {
        tasks: Vec::new(),
        since,
        freezing: Duration::ZERO,
        limit: stop.limit,
        ticker: Some(ticker),
        deadline: timeout.map(limit::outlasted).transpose()?,
        guard: None,
    };
    frozen.tasks.push(stop_task(root, &mut stop)?);
    if frozen.tasks[0].is_zombie() {
        return Err(Error::Gone { pid: root });
    }
    // A task that was not stopped yet may have made children or left some to a stopped one, so
    // the listing is repeated until it brings nothing new. Who had no child when it was stopped
    // gets none: only its descendants could make or leave one to it.
    let mut childless = HashSet::new();
    // Process 1 takes in orphans of its namespace, and this process may be one.
    let own = (root == sys::init::NUMBER).then(|| std::process::id().cast_signed());
    loop {
        let known = frozen.tasks.len();
        let mut at = 0;
        while at < frozen.tasks.len() {
            let task = &frozen.tasks[at];
            let listed = if childless.contains(&task.pid()) {
                Vec::new()
            } else {
                children(task)?
            };
            if listed.is_empty() {
                childless.insert(task.pid());
            }
            if at == 0 && known == 1 && !listed.is_empty() {
                target::check_children(root, &task.stat()?.0, &close_queue)?;
            }
            for child in listed {
                if Some(child) != own && !frozen.tasks.iter().any(|task| task.pid() == child) {
                    match stop_task(child, &mut stop) {
                        Ok(task) => frozen.tasks.push(task),
                        Err(Error::Gone { pid }) if pid == child => {}
                        Err(error) => return Err(error),
                    }
                }
            }
            at += 1;
        }
        if frozen.tasks.len() == known {
            frozen.freezing = since.elapsed();
            if let Some(ticker) = &frozen.ticker {
                let slower = ticker.every(Duration::from_secs(1));
                slower.map_err(|e| Error::kernel("cannot set a timer", e))?;
            }
            return Ok(frozen);
        }
    }
}

/// A stop on its way.
struct Stop {
    limit: Limit,
    clocks: Clocks,
    close_queue: Rc<CloseQueue>,
}

impl Stop {
    /// Waits for threads of a task that were asked to stop. When one fails, the others are waited
    /// for all the same: whoever was asked has left its call, and is to make it again.
    fn all(
        &mut self,
        task: &mut Task,
        asked: Vec<(i32, Before, tracee::Result<Seized>)>,
        threads: &mut Vec<Thread>,
    ) -> Result<()> {
        const PATIENCE: Duration = Duration::from_millis(500);
        let (mut deadline, mut failure) = (self.limit.deadline, None);
        for (tid, before, seized) in asked {
            let stopped = seized.and_then(|seized| seized.stopped(&task.process, deadline));
            match stopped.and_then(|thread| self.take(task, before, thread, threads)) {
                Ok(()) | Err(tracee::Error::Gone { .. }) => {}
                // One that has ended cannot be traced any more, and is soon gone from the list.
                Err(_) if tracee::has_ended(tid) && self.limit.check(tid).is_ok() => {}
                Err(error) if failure.is_none() => {
                    failure = Some(error);
                    deadline = Some(Instant::now() + PATIENCE);
                }
                Err(error) => log::debug!("{error}"),
            }
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Adds a thread that has just stopped, unless that took too long.
    fn take(
        &mut self,
        task: &mut Task,
        before: Before,
        thread: Thread,
        threads: &mut Vec<Thread>,
    ) -> tracee::Result<()> {
        let (before, mut thread) = self.look_again(task, before, thread)?;
        let tid = thread.tid;
        let wait = Wait::begin(before, &mut thread, |name| task.read_of(tid, name))?;
        self.limit.check(tid)?;
        task.waits.push(wait);
        threads.push(thread);
        Ok(())
    }

    /// Lets a thread go on until it is back in the wait that a stop shortly before had interrupted,
    /// and stops it there: only then can be told what it waits for.
    fn look_again(
        &mut self,
        task: &Task,
        mut before: Before,
        mut thread: Thread,
    ) -> tracee::Result<(Before, Thread)> {
        const PATIENCE: Duration = Duration::from_secs(2);
        const A_TRY: Duration = Duration::from_millis(100);
        let is_unknown = |before: &Before, thread: &Thread| {
            let registers = &thread.saved.registers;
            let memory = |at| waits::memory(&thread.process, at);
            thread.group_stop.is_none() && interrupted::is_unknown(registers, before, memory)
        };
        let since = Instant::now();
        while is_unknown(&before, &thread) {
            let tid = thread.tid;
            if since.elapsed() > PATIENCE {
                let what = "/proc does not tell the call that the kernel goes on with";
                log::warn!("thread {tid}: {what}: a restored thread sees EINTR");
                break;
            }
            thread.release()?;
            let released = Instant::now();
            while !interrupted::is_waiting(|name| task.read_of(tid, name))
                && released.elapsed() < A_TRY
            {
                std::thread::sleep(Duration::from_micros(50));
            }
            before = read_before(task, tid, &mut self.clocks);
            thread = Thread::seize(tid)?.stopped(&task.process, self.limit.deadline)?;
            self.limit.check(tid)?;
        }
        Ok((before, thread))
    }
}

/// A task whose threads have all stopped.
fn stopped(mut task: Task, mut threads: Vec<Thread>) -> Result<Task> {
    refetch::fetch_again(&mut threads, |tid, name| task.read_of(tid, name))?;
    task.body = Body::Stopped(threads);
    Ok(task)
}

/// A task whose leader has ended, and whose other threads have all stopped: the first of them is
/// asked from now on.
fn stopped_without_leader(mut task: Task, threads: Vec<Thread>) -> Result<Task> {
    let pid = task.pid();
    let Some(first) = threads.first() else {
        // The others have ended meanwhile.
        let is_there = !task.numbers("task")?.is_empty();
        return is_there.then_some(task).ok_or(Error::Gone { pid });
    };
    task.proc = Rc::new(Deferred::new(open(first.tid)?, &task.close_queue));
    task.leader_end = Some(left::ask(&task.process, first)?);
    stopped(task, threads)
}

/// Whether the leader of a task has ended while others run on.
fn is_left(task: &Task) -> bool {
    let has_ended = state(task).is_ok_and(|state| state == b'Z');
    has_ended && task.numbers("task").is_ok_and(|tids| tids.len() > 1)
}

fn stop_task(pid: i32, stop: &mut Stop) -> Result<Task> {
    let mut task = Task::new(pid, &stop.close_queue)?;
    let before = read_before(&task, pid, &mut stop.clocks);
    let seized = Thread::seize(pid);
    let leader = seized.and_then(|seized| seized.stopped(&task.process, stop.limit.deadline));
    let (mut threads, mut workers, mut has_leader) = (Vec::new(), HashSet::new(), true);
    match leader {
        Ok(leader) => {
            stop.take(&mut task, before, leader, &mut threads)?;
            if task.stat()?.0.threads == 1 {
                return stopped(task, threads);
            }
        }
        Err(error) if is_left(&task) => {
            log::debug!("the others run on: {error}");
            has_leader = false;
            // What its threads wait for is looked at in its memory while they are being stopped.
            task.process.elect();
        }
        Err(error) => return ended(task, error),
    }
    // The others may still change what it says.
    task.stat = OnceCell::new();
    loop {
        let ids = task.numbers("task")?;
        let stopped_tids = threads.iter().map(|thread: &Thread| thread.tid);
        let stopped_tids = stopped_tids.collect::<HashSet<_>>();
        let known = |tid: &i32| {
            let is_thread = stopped_tids.contains(tid);
            is_thread || workers.contains(tid) || !has_leader && *tid == pid
        };
        let new = ids
            .into_iter()
            .filter(|tid| !known(tid))
            .collect::<Vec<_>>();
        if new.is_empty() {
            return match has_leader {
                true => stopped(task, threads),
                false => stopped_without_leader(task, threads),
            };
        }
        // Ask all of them first: they stop side by side.
        let mut asked = Vec::with_capacity(new.len());
        for tid in new {
            let before = read_before(&task, tid, &mut stop.clocks);
            if before.may_be_kernels() && is_worker(&task, tid) {
                workers.insert(tid);
                continue;
            }
            asked.push((tid, before, Thread::seize(tid)));
        }
        stop.all(&mut task, asked, &mut threads)?;
    }
}

/// Looks at what a thread waits for before it is stopped.
fn read_before(task: &Task, tid: i32, clocks: &mut Clocks) -> Before {
    Before::read(clocks, |name| task.read_of(tid, name))
}

/// Whether a thread is one of the kernel's own that works for the process (io_uring's): it runs no
/// code of the program, and to be asked to stop would end what it does.
fn is_worker(task: &Task, tid: i32) -> bool {
    const PF_IO_WORKER: u32 = libc::PF_IO_WORKER as u32;
    let stat = task.read_of(tid, "stat");
    let stat = stat.and_then(|text| Stat::parse(&text).ok());
    stat.is_some_and(|stat| stat.flags & PF_IO_WORKER != 0)
}

/// What a task is whose leader could not be stopped, with no others.
fn ended(task: Task, error: tracee::Error) -> Result<Task> {
    let pid = task.pid();
    if state(&task).is_ok_and(|state| state == b'Z') {
        match task.numbers("task")?.len() {
            // Its parent has just waited for it.
            0 => return Err(Error::Gone { pid }),
            _ => return Ok(task),
        }
    }
    Err(gone(pid, error))
}

/// A leader that ended is a task that is gone; who traces one already is named.
fn gone(pid: i32, error: tracee::Error) -> Error {
    match error {
        tracee::Error::Gone { .. } => Error::Gone { pid },
        error => target::explain(pid, error),
    }
}

/// /proc/PID/stat of a process; none when it is gone.
pub fn stat_of(pid: i32) -> Option<Stat> {
    let stat = sys::procfs::read(format_args!("{pid}/stat")).ok()?;
    Stat::parse(&stat).ok()
}

/// When a process was started; none for one that has ended.
pub fn start_ticks(pid: i32) -> Option<u64> {
    let stat = stat_of(pid)?;
    (!sys::process::has_ended(&stat)).then_some(stat.start_ticks)
}

/// The state letter of /proc/PID/stat.
fn state(task: &Task) -> Result<u8> {
    let stat = task.read("stat")?;
    let after = stat.iter().rposition(|byte| *byte == b')').map(|at| at + 2);
    Ok(after.and_then(|at| stat.get(at)).copied().unwrap_or(b'?'))
}

/// The children of all threads of a task, as long as it is stopped or a zombie.
fn children(task: &Task) -> Result<Vec<i32>> {
    let mut all = Vec::new();
    for thread in task.threads() {
        let name = format!("task/{}/children", thread.tid);
        let text = task.read(&name)?;
        let text = String::from_utf8_lossy(&text);
        all.extend(
            text.split_ascii_whitespace()
                .filter_map(|pid| pid.parse::<i32>().ok()),
        );
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_known_right_after_a_stop_too() {
        testkit::needs_root!();
        let program = testkit::program::Program::new("sleep").arg("1000").spawn();
        let pid = program.pid().cast_signed();
        testkit::wait::wait_until("sleep to sleep", testkit::wait::SOON, || {
            testkit::tree::is_waiting(program.pid())
        });
        let mut unknown = Vec::new();
        for time in 0..2000 {
            let mut frozen = freeze(pid, Some(testkit::wait::SOON)).expect("it can be stopped");
            let task = frozen.tasks.pop().expect("the root");
            let status = task.status().expect("its status");
            let resume = task.waits[0].restored(&task.threads()[0], &status);
            if resume == interrupted::Resume::AsIs {
                let registers = &task.threads()[0].saved.registers;
                let (call, result) = (registers.call(), registers.result());
                unknown.push(format!("the {time}th stop: call {call:?}, result {result}"));
            }
            task.release().expect("it goes on");
            // At some of these moments it is on its way back into its wait.
            let (released, pause) = (Instant::now(), Duration::from_nanos(time * 30));
            while released.elapsed() < pause {
                std::hint::spin_loop();
            }
        }
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    /// Has a thread whose number is in the file `tid`, and which ends when a line comes.
    const THREAD: &str = "
import os, sys, threading, time
def end():
    with open(sys.argv[1] + '/draft', 'w') as draft: draft.write(str(threading.get_native_id()))
    os.rename(sys.argv[1] + '/draft', sys.argv[1] + '/tid')
    open(sys.argv[1] + '/end').read()
os.mkfifo(sys.argv[1] + '/end')
threading.Thread(target=end).start()
while True: time.sleep(1000)
";

    #[test]
    fn a_thread_that_has_ended_is_none_to_be_stopped() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = testkit::program::Program::new("python3")
            .args(["-c", THREAD])
            .arg(folder.path())
            .spawn();
        program.wait_file(&folder.path().join("tid"));
        let pid = program.pid().cast_signed();
        let tid = std::fs::read_to_string(folder.path().join("tid")).expect("written");
        let tid = tid.parse::<i32>().expect("a number");
        let stopped = || stat_of(pid).is_some_and(|stat| stat.state == b't');
        let wait = |what: &str, done: &dyn Fn() -> bool| {
            testkit::wait::wait_until(what, testkit::wait::SOON, done);
        };
        let (ready, go) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let end = folder.path().join("end");
            scope.spawn(move || {
                // As long as who traces it does not look, it is there, though it has ended.
                sys::ptrace::seize(tid, false).expect("it can be traced");
                std::fs::write(end, "now").expect("it reads");
                wait("its end", &|| {
                    stat_of(tid).is_some_and(|stat| stat.state == b'Z')
                });
                ready.send(()).expect("it is waited for");
                wait("the leader to be stopped", &stopped);
                // Until here, the listing has it: this is for those who look again at once.
                std::thread::sleep(Duration::from_millis(100));
                while !matches!(
                    sys::ptrace::wait(tid),
                    Ok((_, sys::ptrace::Event::Ended(_)))
                ) {}
            });
            go.recv().expect("it tells");
            let frozen = freeze(pid, Some(testkit::wait::SOON)).expect("it can be stopped");
            assert_eq!(frozen.tasks[0].threads().len(), 1);
        });
    }
}
