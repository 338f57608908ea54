//! Processes that cannot be stopped to be saved, and why.
//!
//! - What: what cannot be stopped
//! - Refused: "stillframe itself"; "a tree with stillframe itself (pid …)"; "a kernel thread (…)";
//!   "its tracer, pid … (…)" (gdb, strace: detach it); "a process that can map no memory to read
//!   and write: its personality makes that executable (READ_IMPLIES_EXEC), which it has forbidden
//!   (PR_SET_MDWE)".
//! - CRIU 4.2: cannot seize a kernel thread or a traced task either; of itself not known.

use std::ffi::CStr;
use std::io;

use resources::cgroup::{self, Membership};
use rustix::fs::{Mode, OFlags};
use sys::close::CloseQueue;
use sys::proc::{Stat, Status};

use crate::{Error, Result};

/// The name of a process that removes what a killed dump has left, and traces it for a moment.
pub const REMOVER: &CStr = c"stillframe-rm";

/// The kernel's mark of its own threads (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = libc::PF_KTHREAD as u32;

/// Checks that a process is one that this process can stop.
///
/// # Errors
/// [`resources::Error::Unsupported`] for this process.
pub fn check(root: i32) -> Result<()> {
    if std::process::id().cast_signed() == root {
        let what = "stillframe itself".to_owned();
        return Err(resources::Error::unsupported(root, what).into());
    }
    Ok(())
}

/// Checks that the tasks of the control group that a process is in can run.
///
/// # Errors
/// [`resources::Error::Unsupported`].
pub fn check_thawed(root: i32) -> Result<()> {
    let close_queue = CloseQueue::default();
    // What is not there is told by who looks for it.
    if let Some(text) = text(
        &sys::procfs::path(format_args!("{root}/cgroup")),
        &close_queue,
    ) {
        cgroup::check_thawed(root, &Membership::parse(&text), &Membership::own()?)?;
    }
    Ok(())
}

/// Checks that this process is not below `root`, a stopped process that has children, given with
/// its stat.
///
/// # Errors
/// [`resources::Error::Unsupported`].
pub fn check_children(root: i32, stat: &Stat, close_queue: &CloseQueue) -> Result<()> {
    if !is_ancestor((root, stat), close_queue) {
        return Ok(());
    }
    let own = std::process::id();
    let what = format!("a tree with stillframe itself (pid {own})");
    Err(resources::Error::unsupported(root, what).into())
}

/// Whether process `elder`, given with its stat, is an ancestor of this one.
fn is_ancestor((elder, found): (i32, &Stat), close_queue: &CloseQueue) -> bool {
    let first = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    // In a time namespace, what started before its clock did seems to start in a far future.
    let known = found.start_ticks < 1 << 40;
    let above = |pid: &i32| {
        let stat = stat(*pid, close_queue)?;
        // Whoever started before it does not descend from it, nor do those above.
        let older = known && stat.start_ticks < found.start_ticks;
        (!older && stat.ppid > 0).then_some(stat.ppid)
    };
    // A pid that is used again meanwhile could make a circle.
    let mut line = std::iter::successors(first, above).take(1 << 16);
    line.any(|pid| pid == elder)
}

fn stat(pid: i32, close_queue: &CloseQueue) -> Option<Stat> {
    Stat::parse(&text(
        &sys::procfs::path(format_args!("{pid}/stat")),
        close_queue,
    )?)
    .ok()
}

/// A short file of /proc, read at once; `close_queue` closes it.
fn text(path: &str, close_queue: &CloseQueue) -> Option<Vec<u8>> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = vec![0; 4096];
    let got = rustix::io::read(&file, &mut bytes[..]).ok()?;
    bytes.truncate(got);
    close_queue.push(file);
    Some(bytes)
}

/// Says more of a process that may not be traced: that it is the kernel's, or who traces it
/// already.
pub fn explain(pid: i32, error: tracee::Error) -> Error {
    let refused = is_denied(&error);
    let found = refused.then(|| stat(pid, &CloseQueue::default())).flatten();
    if let Some(found) = found.filter(|found| found.flags & KERNEL_THREAD != 0) {
        let name = String::from_utf8_lossy(&found.comm).into_owned();
        let what = format!("a kernel thread ({name})");
        return resources::Error::unsupported(pid, what).into();
    }
    let tracer = refused.then(|| tracer(pid)).flatten();
    match tracer {
        // It is there for a moment.
        Some((_, name)) if name.as_bytes() == REMOVER.to_bytes() => Error::Returning { pid },
        Some((tracer, name)) => {
            let what = format!("its tracer, pid {tracer} ({name}),");
            resources::Error::unsupported(pid, what).into()
        }
        None => error.into(),
    }
}

/// Says more of a process in which no memory can be mapped.
pub fn explain_mapping(pid: i32, error: tracee::Error) -> Error {
    let personality = || {
        let text = sys::procfs::read_text(format_args!("{pid}/personality")).ok()?;
        u32::from_str_radix(text.trim_end(), 16).ok()
    };
    let implies = |bits: u32| bits & libc::READ_IMPLIES_EXEC.cast_unsigned() != 0;
    if is_denied(&error) && personality().is_some_and(implies) {
        let what = "a process that can map no memory to read and write: its personality makes that \
            executable (READ_IMPLIES_EXEC), which it has forbidden (PR_SET_MDWE),";
        return resources::Error::unsupported(pid, what.to_owned()).into();
    }
    error.into()
}

fn is_denied(error: &tracee::Error) -> bool {
    matches!(error, tracee::Error::Kernel { source, .. }
        if source.kind() == io::ErrorKind::PermissionDenied)
}

/// Who traces a process: pid and name.
fn tracer(pid: i32) -> Option<(i32, String)> {
    let status = Status::parse(&sys::procfs::read(format_args!("{pid}/status")).ok()?).ok()?;
    let stat = || stat(status.tracer, &CloseQueue::default());
    let name = || stat().map(|stat| String::from_utf8_lossy(&stat.comm).into_owned());
    (status.tracer != 0).then(|| (status.tracer, name().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use testkit::program::Program;

    use super::*;
    use crate::freeze;

    #[test]
    fn a_tree_with_this_process_is_named() {
        let own = std::process::id().cast_signed();
        let error = check(own).expect_err("itself").to_string();
        assert_eq!(
            error,
            format!("pid {own}: stillframe itself is not supported")
        );
        let parent = stat(own, &CloseQueue::default()).expect("it runs").ppid;
        let want = format!("a tree with stillframe itself (pid {own}) is not supported");
        let error = freeze(parent, None).expect_err("its parent").to_string();
        assert_eq!(error, format!("pid {parent}: {want}"));
        assert!(
            testkit::tree::state(parent.cast_unsigned()) != Some('t'),
            "it goes on"
        );
    }

    #[test]
    fn a_kernel_thread_is_named() {
        let numbers = std::fs::read_dir("/proc").expect("it is mounted");
        let pids = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let stat = |pid: &i32| stat(*pid, &CloseQueue::default());
        let is_kernel = |pid: &i32| stat(pid).is_some_and(|it| it.flags & KERNEL_THREAD != 0);
        let Some(pid) = pids.into_iter().find(is_kernel) else {
            testkit::skip!("kernel threads are not seen from here");
        };
        let error = freeze(pid, None).expect_err("the kernel's").to_string();
        assert!(
            error.starts_with(&format!("pid {pid}: a kernel thread (")),
            "{error}"
        );
    }

    #[test]
    fn a_tracer_is_named() {
        testkit::needs_root!();
        let program = Program::new("sleep").arg("1000").spawn();
        let pid = program.pid().cast_signed();
        sys::ptrace::seize(pid, false).expect("it can be traced");
        let own = rustix::thread::gettid();
        let error = freeze(pid, None).expect_err("it is traced").to_string();
        assert!(
            error.starts_with(&format!("pid {pid}: its tracer, pid {own} (")),
            "{error}"
        );
    }
}
