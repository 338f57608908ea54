//! A userfaultfd of a process that is no target: somebody else's machine, of which nothing but some
//! memory is saved.

use std::time::Duration;

use rustix::process::Pid;
use sys::realtime::Realtime;
use sys::uffd::{Features, Uffd};

use crate::returned::{self, freeze_and};
use crate::{Error, Result, uffd};

/// How long the process may take until all of its threads have stopped.
const PATIENCE: Duration = Duration::from_secs(5);

/// Has a running process make a userfaultfd for its memory, and brings it here; the process keeps
/// nothing of it, and its threads go on with what they waited for. It is stopped for about a
/// millisecond. With `user_mode_only`, system calls of it are not held back by faults, which only
/// an asynchronous write protection does not need.
///
/// # Errors
/// [`Error::Resource`] naming what keeps the process from making one; [`Error::Gone`],
/// [`Error::Tracee`].
pub fn userfaultfd_of(pid: i32, user_mode_only: bool, features: Features) -> Result<Uffd> {
    let root = Pid::from_raw(pid).ok_or(Error::Gone { pid })?;
    // Without the privilege the stop takes longer.
    let realtime = Realtime::new();
    let (frozen, uffd) = freeze_and(root, Some(PATIENCE), |frozen| {
        let task = &mut frozen.tasks[0];
        let listed = task.maps()?;
        returned::check_returned(task, &listed)?;
        uffd::userfaultfd(task, &listed, user_mode_only, features)
    })?;
    frozen.release()?;
    drop(realtime);
    Ok(uffd)
}

#[cfg(test)]
mod tests {
    use testkit::program::Program;

    use super::*;

    #[test]
    fn a_process_gives_one_away_and_goes_on() {
        testkit::needs_root!();
        let program = Program::new("sleep").arg("1000").spawn();
        let pid = program.pid().cast_signed();
        let features = Features::WP | Features::WP_HUGETLBFS_SHMEM;
        let uffd = userfaultfd_of(pid, false, features).expect("a userfaultfd");
        let enabled = uffd.enabled().expect("it is one");
        assert!(enabled.contains(features), "{enabled:?}");
        assert!(program.is_alive());
        program.kill();
        testkit::wait::wait_until("its end", testkit::wait::SOON, || {
            userfaultfd_of(pid, true, features).is_err()
        });
    }
}
