//! I/O that is under way: its data reaches pages that nobody can protect any more.
//!
//! For a read with direct I/O (`O_DIRECT`, and all of some file systems of FUSE) the kernel looks
//! the pages up when the call begins, and a device or another process fills them later. That a page
//! is written is noticed when it is looked up, and not when the data comes. So who protects pages
//! of a running tree, or has the kernel forget what was written to them, may read them only when
//! all calls are over that were under way then. A later call finds them protected.
//!
//! A thread that is stopped is in no call, and who waits for an event moves no data.

use freeze::read_proc;
use freeze::returned::freeze_and;
use resources::task::interrupted::may_move_data;
use rustix::fs::{CWD, Mode, OFlags, openat};
use sys::process::Process;
use sys::realtime::Realtime;

use crate::end::go_on;
use crate::statistics::as_micros;
use crate::{DumpOptions, DumpReport, Result};

/// Returns when no call of the tree is under way any more that was when this began. `processes` are
/// those whose memory it is about. Stops the tree for that if it has to.
///
/// # Errors
/// Those of [`freeze_and`].
pub(crate) fn settle(
    options: &DumpOptions,
    processes: &[Process],
    report: &mut DumpReport,
) -> Result<()> {
    let Some(busy) = processes.iter().find(|process| !is_quiet(process)) else {
        return Ok(());
    };
    log::debug!("pid {} may be in a call that moves data", busy.pid());
    let realtime = Realtime::new();
    let (frozen, ()) = freeze_and(options.tree, options.timeout, |_| Result::Ok(()))?;
    let (since, freezing) = (frozen.since, frozen.freezing);
    go_on(frozen, None)?;
    drop(realtime);
    report.statistics.freezing_us += as_micros(freezing);
    report.stopped_since(since);
    Ok(())
}

/// Whether every thread of a task was seen in no call that moves data. One that is made meanwhile
/// begins later what it does.
fn is_quiet(process: &Process) -> bool {
    let pid = process.pid();
    let Ok(tids) = threads(pid) else {
        return false;
    };
    let is_quiet = |tid: &i32| {
        let syscall = read_proc(process, &format!("task/{tid}/syscall"));
        // A leader that has ended makes no call any more.
        let is_over = || *tid == pid && process.is_leaderless();
        syscall.is_ok_and(|syscall| !may_move_data(&syscall)) || is_over()
    };
    // A listing while threads end may leave others out.
    tids.iter().all(is_quiet) && threads(pid).is_ok_and(|again| again == tids)
}

fn threads(pid: i32) -> rustix::io::Result<Vec<i32>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(
        CWD,
        sys::procfs::path(format_args!("{pid}/task")),
        flags,
        Mode::empty(),
    )?;
    sys::numbers::of(folder)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{FileType, mknodat};
    use testkit::program::Program;

    use super::*;

    #[test]
    fn who_waits_for_an_event_is_quiet_and_who_works_is_not() {
        let asleep = Program::new("sleep").arg("1000").spawn();
        asleep.wait_ready("its sleep", || {
            is_quiet(&Process::new(asleep.pid().cast_signed()))
        });
        let busy = Program::new("sh")
            .arg("-c")
            .arg("while :; do :; done")
            .spawn();
        assert!(!is_quiet(&Process::new(busy.pid().cast_signed())));
        // A read is one whose end nobody knows, whatever it reads.
        let folder = tempfile::tempdir().expect("a folder");
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        let _written_to = File::options().read(true).write(true).open(&fifo);
        let reads = Program::new("cat").arg(&fifo).spawn();
        reads.wait_ready("its read", || {
            let syscall = read_proc(&Process::new(reads.pid().cast_signed()), "syscall");
            syscall.is_ok_and(|syscall| syscall.starts_with(b"0 "))
        });
        assert!(!is_quiet(&Process::new(reads.pid().cast_signed())));
        assert!(!is_quiet(&Process::new(i32::MAX)));
    }
}
