//! Processes that cannot be stopped to be saved, and why.

use std::io;

use rustix::fs::{Mode, OFlags};
use sys::close::Later;
use sys::proc::{Stat, Status};

use crate::{Error, Result};

/// The kernel's mark of its own threads (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Checks that the tree below `root` is one that this process can stop, before it stops any of it.
///
/// # Errors
/// [`resources::Error::Unsupported`] for a kernel thread and for a tree that this process is in.
pub(crate) fn check(root: i32) -> Result<()> {
    let spent = Later::default();
    let Some(found) = stat(root, &spent) else {
        // Who stops it says that it is not there.
        return Ok(());
    };
    if found.flags & KERNEL_THREAD != 0 {
        let name = String::from_utf8_lossy(&found.comm).into_owned();
        let what = format!("a kernel thread ({name})");
        return Err(resources::Error::unsupported(root, what).into());
    }
    let own = std::process::id().cast_signed();
    let what = match own {
        own if own == root => "stillframe itself".to_owned(),
        own if may_have_children(root, &found, &spent) && is_ancestor(root, &spent) => {
            format!("a tree with stillframe itself (pid {own})")
        }
        _ => return Ok(()),
    };
    Err(resources::Error::unsupported(root, what).into())
}

/// Whether a process may have children: what its only thread says of them is quickly asked.
fn may_have_children(pid: i32, stat: &Stat, spent: &Later) -> bool {
    let listed = || text(&format!("/proc/{pid}/task/{pid}/children"), spent);
    stat.threads > 1 || listed().is_none_or(|listed| !listed.is_empty())
}

/// Whether process `elder` is an ancestor of this one.
fn is_ancestor(elder: i32, spent: &Later) -> bool {
    let first = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    let above = |pid: &i32| stat(*pid, spent).map(|stat| stat.ppid);
    let parent = |pid: &i32| above(pid).filter(|ppid| *ppid > 0);
    // A pid that is used again meanwhile could make a circle.
    let mut line = std::iter::successors(first, parent).take(1 << 16);
    line.any(|pid| pid == elder)
}

fn stat(pid: i32, spent: &Later) -> Option<Stat> {
    Stat::parse(&text(&format!("/proc/{pid}/stat"), spent)?).ok()
}

/// A short file of /proc, read at once; `spent` closes it.
fn text(path: &str, spent: &Later) -> Option<Vec<u8>> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = vec![0; 4096];
    let got = rustix::io::read(&file, &mut bytes[..]).ok()?;
    bytes.truncate(got);
    spent.push(file);
    Some(bytes)
}

/// Says more of a process that may not be traced: who traces it already.
pub(crate) fn explain(pid: i32, error: tracee::Error) -> Error {
    let refused = matches!(&error, tracee::Error::Kernel { source, .. }
        if source.kind() == io::ErrorKind::PermissionDenied);
    let tracer = refused.then(|| tracer(pid)).flatten();
    match tracer {
        Some((tracer, name)) => {
            let what = format!("its tracer, pid {tracer} ({name}),");
            resources::Error::unsupported(pid, what).into()
        }
        None => error.into(),
    }
}

/// Who traces a process: pid and name.
fn tracer(pid: i32) -> Option<(i32, String)> {
    let status = Status::parse(&std::fs::read(format!("/proc/{pid}/status")).ok()?).ok()?;
    let stat = || stat(status.tracer, &Later::default());
    let name = || stat().map(|stat| String::from_utf8_lossy(&stat.comm).into_owned());
    (status.tracer != 0).then(|| (status.tracer, name().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use testkit::program::Program;

    use super::*;
    use crate::freeze::freeze;

    #[test]
    fn a_tree_with_this_process_is_named() {
        let own = std::process::id().cast_signed();
        let error = check(own).expect_err("itself").to_string();
        assert_eq!(
            error,
            format!("pid {own}: stillframe itself is not supported")
        );
        let parent = stat(own, &Later::default()).expect("it runs").ppid;
        let error = check(parent).expect_err("its parent").to_string();
        let want = format!("a tree with stillframe itself (pid {own}) is not supported");
        assert_eq!(error, format!("pid {parent}: {want}"));
        let error = freeze(parent, None).expect_err("its parent").to_string();
        assert!(error.ends_with(&want), "{error}");
    }

    #[test]
    fn a_kernel_thread_is_named() {
        let numbers = std::fs::read_dir("/proc").expect("it is mounted");
        let pids = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let stat = |pid: &i32| stat(*pid, &Later::default());
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
