//! Processes that cannot be stopped to be saved, and why.

use std::io;

use sys::proc::{Stat, Status};

use crate::{Error, Result};

/// The kernel's mark of its own threads (`PF_KTHREAD`).
const KERNEL_THREAD: u32 = 0x0020_0000;

/// Checks that the tree below `root` is one that this process can stop, before it stops any of it.
///
/// # Errors
/// [`resources::Error::Unsupported`] for a kernel thread and for a tree that this process is in.
pub(crate) fn check(root: i32) -> Result<()> {
    let own = std::process::id().cast_signed();
    let mut pid = own;
    // A pid that is used again meanwhile could make a circle.
    for _ in 0..1 << 16 {
        if pid == root {
            let what = match own {
                own if own == root => "stillframe itself".to_owned(),
                own => format!("a tree with stillframe itself (pid {own})"),
            };
            return Err(resources::Error::unsupported(root, what).into());
        }
        match stat(pid) {
            Some(stat) if stat.ppid > 0 => pid = stat.ppid,
            _ => break,
        }
    }
    match stat(root) {
        Some(stat) if stat.flags & KERNEL_THREAD != 0 => {
            let name = String::from_utf8_lossy(&stat.comm).into_owned();
            let what = format!("a kernel thread ({name})");
            Err(resources::Error::unsupported(root, what).into())
        }
        _ => Ok(()),
    }
}

fn stat(pid: i32) -> Option<Stat> {
    Stat::parse(&std::fs::read(format!("/proc/{pid}/stat")).ok()?).ok()
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
    let name = || stat(status.tracer).map(|stat| String::from_utf8_lossy(&stat.comm).into_owned());
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
        let parent = stat(own).expect("it runs").ppid;
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
        let is_kernel = |pid: &i32| stat(*pid).is_some_and(|it| it.flags & KERNEL_THREAD != 0);
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
