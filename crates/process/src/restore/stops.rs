//! Tasks that come back stopped, or continued unseen, and what their parents know of it.
//!
//! A task is stopped while it is in the blob and traced: that is when its parent is told, which is
//! in the blob as well and takes back what it had been told before the dump.

use std::collections::HashSet;

use abi::Addr;
use resources::task::pending::Pending;
use sys::proc::Status;
use sys::ptrace::{self, Event};
use syscalls::Sysno;
use tracee::Call;

use crate::records::{Saved, SavedTask, State};
use crate::text::describe_status;
use crate::{Error, Result};

const SIGCHLD: i32 = libc::SIGCHLD;
const SIGCONT: i32 = libc::SIGCONT;
const SIGTSTP: i32 = libc::SIGTSTP;
const SIGTTIN: i32 = libc::SIGTTIN;
const SIGTTOU: i32 = libc::SIGTTOU;

/// Those parents of stopped or continued tasks who have to be told of it.
pub(super) struct Untold(HashSet<i32>);

impl Untold {
    /// Looks for parents that wait to get a `SIGCHLD`: another one changes nothing.
    pub(super) fn new(saved: &Saved<'_>) -> Result<Self> {
        let children = saved.tasks[1..].iter();
        let changed = children.filter(|task| is_stopped(task) || task.node.continued);
        let parents = changed.map(|task| task.node.parent).collect::<HashSet<_>>();
        let mut untold = HashSet::new();
        for pid in parents {
            if status(pid)?.shared_pending & bit(SIGCHLD) != 0 {
                untold.insert(pid);
            }
        }
        Ok(Self(untold))
    }

    /// Has a parent, by the thread that stands for it, see the stops of its children that it had
    /// seen before, and takes back the signal that told of them. `scratch` is room for 24 bytes in
    /// the restore area.
    pub(super) fn consume_seen(
        &self,
        saved: &Saved<'_>,
        parent: &SavedTask<'_>,
        syscall: Addr,
        scratch: Addr,
        write: impl Fn(Addr, &[u8]),
    ) -> Result<()> {
        const P_PID: u64 = libc::P_PID as u64;
        const WNOHANG: u64 = libc::WNOHANG as u64;
        const WSTOPPED: u64 = libc::WSTOPPED as u64;
        let pid = parent.node.pid;
        let asked = parent.living()[0].tid;
        let children = saved.tasks.iter().filter(|task| task.node.parent == pid);
        let changed = children.filter(|task| is_stopped(task) || task.node.continued);
        let changed = changed.collect::<Vec<_>>();
        for child in changed.iter().filter(|task| task.node.stop_seen) {
            let child = u64::from(child.node.pid.cast_unsigned());
            let call = Call {
                at: syscall,
                number: Sysno::waitid as u64,
                args: [P_PID, child, 0, WSTOPPED | WNOHANG, 0, 0],
            };
            let result = call.make(asked)?;
            if result < 0 {
                let errno = i32::try_from(-result).unwrap_or(0);
                let source = std::io::Error::from_raw_os_error(errno);
                let doing = format!("cannot have {pid} wait for its stopped child {child}");
                return Err(Error::kernel(doing, source));
            }
        }
        if !changed.is_empty() && !self.0.contains(&pid) {
            // It was not told if it does not want to know of stops.
            take(asked, SIGCHLD, syscall, scratch, write)?;
        }
        Ok(())
    }
}

/// Whether the task comes back stopped.
pub(super) fn is_stopped(task: &SavedTask<'_>) -> bool {
    task.node.state() == State::Stopped
}

/// Stops a task whose threads are all in the blob and stopped by this tracer.
pub(super) fn stop(task: &SavedTask<'_>, syscall: Addr) -> Result<()> {
    let pid = task.node.pid;
    let by = match task.node.stop_signal {
        0 => ptrace::SIGSTOP,
        signal => signal,
    };
    let status = status(pid)?;
    let default = (status.ignored | status.caught) & bit(by) == 0;
    // Where another signal would not stop it any more, SIGSTOP does.
    let (first, others) = task.living().split_first().expect("it is no zombie");
    if !(default && tracee::stop(pid, first.tid, syscall, by)?) {
        tracee::stop(pid, first.tid, syscall, ptrace::SIGSTOP)?;
    }
    for thread in others {
        let tid = thread.tid;
        let failed = |e| Error::kernel(format!("cannot stop {tid}"), e);
        ptrace::interrupt(tid).map_err(failed)?;
        ptrace::resume(tid, 0).map_err(failed)?;
        wait_stop(tid)?;
    }
    Ok(())
}

/// Has a task whose threads are all in the blob and stopped by this tracer stop and be continued,
/// so that its parent may wait for that.
pub(super) fn proceed(
    task: &SavedTask<'_>,
    syscall: Addr,
    scratch: Addr,
    write: impl Fn(Addr, &[u8]),
) -> Result<()> {
    let (pid, first) = (task.node.pid, task.living()[0].tid);
    let queued = [ptrace::SIGSTOP, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU];
    if queued.into_iter().any(|signal| awaits(task, signal)) {
        log::warn!("{pid} is not known to have been continued: it would lose a signal that waits");
        return Ok(());
    }
    tracee::stop(pid, first, syscall, ptrace::SIGSTOP)?;
    let call = Call {
        at: syscall,
        number: Sysno::kill as u64,
        args: [pid, SIGCONT, 0, 0, 0, 0].map(|word: i32| u64::from(word.cast_unsigned())),
    };
    call.make(first)?;
    // It is blocked like all others, and so waits.
    take(first, SIGCONT, syscall, scratch, write)
}

/// Has a thread take a signal that waits for it, if it does. `scratch` is room for 24 bytes.
fn take(
    tid: i32,
    signal: i32,
    syscall: Addr,
    scratch: Addr,
    write: impl Fn(Addr, &[u8]),
) -> Result<()> {
    // The set, and no time to wait.
    let mut buffer = bit(signal).to_le_bytes().to_vec();
    buffer.resize(24, 0);
    write(scratch, &buffer);
    let call = Call {
        at: syscall,
        number: Sysno::rt_sigtimedwait as u64,
        args: [scratch.0, 0, scratch.0 + 8, 8, 0, 0],
    };
    call.make(tid)?;
    Ok(())
}

/// Whether the signal is on its way to the task or one of its threads.
pub(super) fn awaits(task: &SavedTask<'_>, signal: i32) -> bool {
    let parts = task.threads.iter().flat_map(|thread| &thread.parts);
    let mut queues = parts.filter_map(|part| part.record::<Pending>());
    queues.any(|queue| queue.has(signal))
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

fn status(pid: i32) -> Result<Status> {
    let failed = |e| Error::kernel(format!("cannot read /proc/{pid}/status"), e);
    let text = sys::procfs::read(format_args!("{pid}/status")).map_err(failed)?;
    let unclear = |e| std::io::Error::new(std::io::ErrorKind::InvalidData, e);
    Status::parse(&text).map_err(|e| failed(unclear(e)))
}

/// Waits until a thread that was asked to stop has.
pub(super) fn wait_stop(tid: i32) -> Result<()> {
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
            // Somebody stops it, which takes effect when it is not traced any more.
            (_, Event::Signal(ptrace::SIGSTOP)) => {
                ptrace::resume_to_stop(tid, ptrace::SIGSTOP).map_err(failed)?;
            }
            _ => ptrace::resume_to_stop(tid, 0).map_err(failed)?,
        }
    }
}
