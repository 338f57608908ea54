//! Remains of a dump that was killed: threads on their way back, and memory of its own.

use std::time::{Duration, Instant};

use abi::Span;
use resources::map::listing::{Backing, Listed};
use rustix::process::Pid;
use tracee::{Injection, Left};

use crate::target::REMOVER;
use crate::uffd::{executable, open_memory, suspend_filters};
use crate::watchdog::{Target, Watchdog};
use crate::{Body, Error, Frozen, Guard, Result, Task, freeze, stat_of};

/// Checks that no thread runs what a dump left that was killed, and that nothing of it is there.
///
/// # Errors
/// [`Error::Returning`]; [`Error::LeftArea`] for memory that [`remove`] takes out.
pub fn check_returned(task: &Task, listed: &[Listed]) -> Result<()> {
    let ours = listed.iter().filter(|map| {
        let blob = map.backing() == Backing::Anonymous && map.prot & 4 != 0;
        blob || map.backing() == Backing::Vdso
    });
    let ours = ours.map(|map| map.span).collect::<Vec<_>>();
    let pid = task.pid();
    for thread in task.threads() {
        let at = thread.saved.registers.at();
        let suspect = ours.iter().find(|span| span.contains(at));
        let is_injected = |span: &Span| tracee::is_injected(&task.process, *span, at);
        if suspect.map(is_injected).transpose()? == Some(true) {
            return Err(Error::Returning { pid });
        }
    }
    match left_areas(task, listed)?[..] {
        [] => Ok(()),
        ref left if left.iter().any(|left| left.is_busy) => Err(Error::Returning { pid }),
        _ => Err(Error::LeftArea { pid }),
    }
}

fn left_areas(task: &Task, listed: &[Listed]) -> Result<Vec<Left>> {
    let code = listed.iter().filter(|map| {
        let is_own = map.backing() == Backing::Anonymous && !map.shared;
        is_own && map.prot & 4 != 0
    });
    let code = code.map(|map| map.span).collect::<Vec<_>>();
    Ok(tracee::left_areas(&task.process, &code)?)
}

/// Stops process `pid`, and those below it, and removes the memory that a dump left in it.
///
/// # Errors
/// Those of [`freeze`] and [`check_returned`]; [`Error::Tracee`].
pub fn remove(pid: i32, timeout: Option<Duration>) -> Result<()> {
    let mut frozen = freeze(pid, timeout)?;
    let removed = remove_of(&mut frozen.tasks[0]);
    removed.and(frozen.release())
}

/// An error of work on a stopped tree.
pub trait WorkError: From<Error> {
    /// The error of the stop, where the stop has failed and not the work.
    fn stop(&self) -> Option<&Error>;
}

impl WorkError for Error {
    fn stop(&self) -> Option<&Error> {
        Some(self)
    }
}

/// Stops the tree under `root` and has `look` look at it.
///
/// # Errors
/// Those of [`freeze`] and of `look`; the tree goes on then.
pub fn freeze_and<T, E: WorkError>(
    root: Pid,
    timeout: Option<Duration>,
    mut look: impl FnMut(&mut Frozen) -> Result<T, E>,
) -> Result<(Frozen, T), E> {
    patiently(timeout, || {
        let mut frozen = freeze(root.as_raw_nonzero().get(), timeout)?;
        let found = look(&mut frozen)?;
        Ok((frozen, found))
    })
}

/// Tries again while threads are still on their way back from a dump that was cut short, or out of
/// a function of the vDSO. Memory that such a dump has left is removed.
///
/// # Errors
/// Those of `work` and of removing what is left.
pub fn patiently<T, E: WorkError>(
    timeout: Option<Duration>,
    mut work: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let mut begun = None;
    loop {
        let mut tried = work();
        let stopped = tried.as_ref().err().and_then(WorkError::stop);
        if let Some(&Error::LeftArea { pid }) = stopped {
            match remove(pid, timeout) {
                Ok(()) => continue,
                Err(error) => tried = Err(error.into()),
            }
        }
        let stopped = tried.as_ref().err().and_then(WorkError::stop);
        let is_returning = matches!(stopped, Some(Error::Returning { .. }));
        if !is_returning || begun.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
            return tried;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process that removes what this one would leave if it was killed.
#[derive(Debug)]
struct Watch(Watchdog);

impl Guard for Watch {}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.dismiss();
    }
}

/// Posts a process that removes what this one would leave in tasks of several threads if it was
/// killed. Where that cannot be, whoever stops them next does so.
pub fn watch(frozen: &mut Frozen) {
    let several = frozen.tasks.iter().filter(|task| task.threads().len() > 1);
    let pids = several.map(|task| task.pid()).collect::<Vec<_>>();
    if pids.is_empty() || frozen.guard.is_some() {
        return;
    }
    let posted = Watchdog::post(&[], &pids, remove_all, |_| ());
    let posted = posted.inspect_err(|error| log::debug!("{error}"));
    frozen.guard = posted
        .ok()
        .map(|watchdog| Box::new(Watch(watchdog)) as Box<dyn Guard>);
}

/// Removes what a dump has left in processes, which are on their way back from it.
fn remove_all(targets: &[Target]) {
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(2);
    let _ = rustix::thread::set_name(REMOVER);
    let begun = Instant::now();
    for target in targets {
        let is_there = || {
            let stat = stat_of(target.pid);
            stat.is_some_and(|stat| stat.start_ticks == target.start_ticks)
        };
        while is_there() && begun.elapsed() < PATIENCE {
            if remove(target.pid, Some(PATIENCE)).is_ok() {
                break;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

fn remove_of(task: &mut Task) -> Result<()> {
    let pid = task.pid();
    let listed = task.smaps()?;
    match check_returned(task, &listed) {
        Err(Error::LeftArea { .. }) => {}
        done => return done,
    }
    suspend_filters(task.asked(), &task.status()?)?;
    for left in left_areas(task, &listed)? {
        let elsewhere = |span: &Span| !span.overlaps(left.area);
        let code = executable(&listed).into_iter().filter(elsewhere);
        let memory = open_memory(task)?;
        let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
            return Ok(());
        };
        let threads = Injection::remove(threads, memory, &code.collect::<Vec<_>>(), left.area)?;
        task.body = Body::Stopped(threads);
        log::info!(
            "pid {pid}: {} is removed, which a killed dump had left",
            left.area
        );
    }
    Ok(())
}
