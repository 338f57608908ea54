//! The thread by which a process is asked for what its threads have together.
//!
//! That is its leader, whose number is the process's. A leader that has ended while others run on
//! (it called exit(2), or pthread_exit(3)) is there as a zombie, without memory, descriptors or
//! directories: whoever asks by the process's number learns nothing, or is refused. Of such a
//! process another thread is noted here, once somebody has found it ([`find`]); all that asks about
//! memory and descriptors of a process asks by [`tid`].

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::proc::Stat;

/// Threads that are asked, by processes whose leaders have ended.
static THREADS: RwLock<BTreeMap<i32, i32>> = RwLock::new(BTreeMap::new());

/// Whether there was ever one.
static ANY: AtomicBool = AtomicBool::new(false);

/// The thread by which process `pid` is asked: `pid` itself, unless [`find`] has found that its
/// leader has ended. Another one is looked for when that thread has ended, too. A thread's number
/// is given back as it is.
#[must_use]
pub fn tid(pid: i32) -> i32 {
    if !ANY.load(Ordering::Acquire) {
        return pid;
    }
    let known = THREADS.read().unwrap_or_else(PoisonError::into_inner);
    let known = known.get(&pid).copied();
    match known {
        None => pid,
        Some(tid) if is_there(pid, tid) => tid,
        Some(_) => find(pid).unwrap_or(pid),
    }
}

/// Looks whether the leader of process `pid` has ended while other threads run on, and gives the
/// one by which the process is asked from now on.
pub fn find(pid: i32) -> Option<i32> {
    let found = living(pid);
    if let Some(tid) = found {
        note(pid, tid);
    } else if ANY.load(Ordering::Acquire) {
        let mut threads = THREADS.write().unwrap_or_else(PoisonError::into_inner);
        threads.remove(&pid);
    }
    found
}

/// A pidfd of that thread, by which descriptors of the process are fetched (pidfd_getfd(2)).
///
/// # Errors
/// `ESRCH`; `EINVAL` where the leader has ended and the kernel has no pidfds of other threads
/// (before Linux 6.9).
pub fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    /// `PIDFD_THREAD`.
    const THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0o200);
    let asked = tid(pid);
    let flags = match asked == pid {
        true => PidfdFlags::empty(),
        false => THREAD,
    };
    let asked = Pid::from_raw(asked).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(asked, flags)?)
}

/// Notes that the leader of process `pid` has ended, and that its thread `tid` lives.
pub fn note(pid: i32, tid: i32) {
    let mut threads = THREADS.write().unwrap_or_else(PoisonError::into_inner);
    threads.insert(pid, tid);
    ANY.store(true, Ordering::Release);
}

/// Whether what /proc says of a process is that all of it has ended.
#[must_use]
pub const fn has_ended(stat: &Stat) -> bool {
    is_over(stat.state) && stat.threads <= 1
}

const fn is_over(state: u8) -> bool {
    matches!(state, b'Z' | b'X')
}

/// The first living thread of a process whose leader has ended.
fn living(pid: i32) -> Option<i32> {
    let state = |path: String| Stat::parse(&std::fs::read(path).ok()?).ok();
    let leader = state(format!("/proc/{pid}/stat"))?;
    if !is_over(leader.state) || has_ended(&leader) {
        return None;
    }
    let folder = std::fs::File::open(format!("/proc/{pid}/task")).ok()?;
    let mut tids = crate::numbers::of(OwnedFd::from(folder)).ok()?;
    tids.sort_unstable();
    let lives = |tid: &i32| {
        let stat = state(format!("/proc/{pid}/task/{tid}/stat"));
        stat.is_some_and(|stat| !is_over(stat.state))
    };
    tids.into_iter().find(lives)
}

fn is_there(pid: i32, tid: i32) -> bool {
    let sent = crate::signal::to_thread(pid, tid, 0);
    !sent.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_its_leader_is_asked_by_it() {
        let own = std::process::id().cast_signed();
        assert_eq!((find(own), tid(own)), (None, own));
        pidfd(own).expect("a pidfd");
        assert_eq!(find(i32::MAX), None);
    }

    #[test]
    fn who_has_ended_is_told_by_state_and_threads() {
        let stat = |state, threads| Stat {
            state,
            threads,
            ..Stat::default()
        };
        let ended = [(b'Z', 1), (b'X', 1)].map(|(state, threads)| stat(state, threads));
        assert!(ended.iter().all(has_ended));
        let living = [(b'Z', 2), (b'S', 1)].map(|(state, threads)| stat(state, threads));
        assert!(!living.iter().any(has_ended));
    }
}
