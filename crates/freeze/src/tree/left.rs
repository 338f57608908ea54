//! Processes that their leader has left: it has ended while other threads run on.
//!
//! - What: processes whose leader has ended
//! - Kept: as zombies, where all their threads have ended; with those that run on, where it called
//!   exit(2) (pthread_exit(3) in the first thread).
//! - Refused: "a first thread that was ended by signal …, while others run on" (by a filter,
//!   `SECCOMP_RET_KILL_THREAD`); "a process whose first thread has ended while others run on, on a
//!   kernel without pidfds of threads (before Linux 6.9)".
//! - CRIU 4.2: as zombies alone.

use resources::task::leader;
use sys::proc::Stat;
use sys::process::Process;
use tracee::Thread;

use crate::{Error, Result};

/// Has `other`, a stopped thread of a process whose leader has ended, answer from now on. The
/// wait status with which the leader has ended.
///
/// # Errors
/// [`resources::Error::Unsupported`], [`Error::Gone`].
pub(super) fn ask(process: &Process, other: &Thread) -> Result<i32> {
    let pid = process.pid();
    let unsupported = |what| Err(resources::Error::unsupported(pid, what).into());
    process.answer_by(other.tid);
    if let Err(error) = process.pidfd() {
        log::debug!("a pidfd of thread {}: {error}", other.tid);
        let what = "a process whose first thread has ended while others run on, on a kernel \
            without pidfds of threads (before Linux 6.9),";
        return unsupported(what.to_owned());
    }
    let status = status(process, other.group_stop.is_some())?;
    match status & 0x7f {
        0 => Ok(status),
        signal => unsupported(format!(
            "a first thread that was ended by signal {signal}, while others run on,"
        )),
    }
}

/// The wait status of a leader that has ended. While the process is in a group stop, the kernel
/// tells the stop signal in its place.
fn status(process: &Process, is_stopped: bool) -> Result<i32> {
    let pid = process.pid();
    if !is_stopped {
        let stat = sys::procfs::read(format_args!("{pid}/stat")).ok();
        let stat = stat.and_then(|text| Stat::parse(&text).ok());
        return stat.map(|stat| stat.exit_code).ok_or(Error::Gone { pid });
    }
    Ok(leader::status(process).unwrap_or_else(|error| {
        log::warn!("pid {pid}: how its first thread ended is not told, 0 is taken: {error}");
        0
    }))
}
