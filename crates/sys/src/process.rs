//! A process of this host as a handle: its number, and the thread that answers for it.
//!
//! That is its leader, whose number is the process's. A leader that has ended while others run on
//! (it called exit(2), or pthread_exit(3)) is there as a zombie, without memory, descriptors or
//! directories: who asks by the process's number learns nothing, or is refused. Another thread of
//! such a process answers, once somebody has looked for it ([`Process::elect`]).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::proc::Stat;
use crate::procfs;

/// A process. All clones of a handle know the same thread that answers.
#[derive(Clone, Debug)]
pub struct Process(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pid: i32,
    answering: AtomicI32,
}

impl PartialEq for Process {
    fn eq(&self, other: &Self) -> bool {
        self.0.pid == other.0.pid
    }
}

impl Eq for Process {}

impl Process {
    /// Process `pid`, for which its leader answers.
    #[must_use]
    pub fn new(pid: i32) -> Self {
        Self::answered_by(pid, pid)
    }

    /// Process `pid`, for which its thread `tid` answers.
    #[must_use]
    pub fn answered_by(pid: i32, tid: i32) -> Self {
        Self(Arc::new(Inner {
            pid,
            answering: AtomicI32::new(tid),
        }))
    }

    /// Process `pid`, for which a thread answers that has not ended.
    #[must_use]
    pub fn living(pid: i32) -> Self {
        let process = Self::new(pid);
        process.elect();
        process
    }

    /// The calling process.
    #[must_use]
    pub fn own() -> Self {
        Self::new(std::process::id().cast_signed())
    }

    /// The process's number.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.0.pid
    }

    /// The number of the thread that answers. Another thread is looked for when one that took the
    /// leader's place has ended, too.
    #[must_use]
    pub fn tid(&self) -> i32 {
        let (pid, tid) = (self.0.pid, self.0.answering.load(Ordering::Acquire));
        if tid == pid || is_there(pid, tid) {
            return tid;
        }
        self.elect().unwrap_or(pid)
    }

    /// Whether another thread than the leader answers.
    #[must_use]
    pub fn is_leaderless(&self) -> bool {
        self.tid() != self.pid()
    }

    /// Looks whether the leader has ended while other threads run on, and gives the one that
    /// answers from now on.
    pub fn elect(&self) -> Option<i32> {
        let found = first_living(self.0.pid);
        self.answer_by(found.unwrap_or(self.0.pid));
        found
    }

    /// Has thread `tid` answer from now on.
    pub fn answer_by(&self, tid: i32) {
        self.0.answering.store(tid, Ordering::Release);
    }

    /// The path of /proc/TID/`name`, of the thread that answers.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        procfs::path(format_args!("{}/{name}", self.tid()))
    }

    /// Opens /proc/TID/`name` for reading.
    ///
    /// # Errors
    /// As open(2).
    pub fn open(&self, name: &str) -> io::Result<File> {
        File::open(self.path(name))
    }

    /// Opens /proc/TID/`name` for writing.
    ///
    /// # Errors
    /// As open(2).
    pub fn open_to_write(&self, name: &str) -> io::Result<File> {
        File::options().write(true).open(self.path(name))
    }

    /// A pidfd of the thread that answers, by which descriptors of the process are fetched
    /// (pidfd_getfd(2)).
    ///
    /// # Errors
    /// `ESRCH`; `EINVAL` where the leader has ended and the kernel has no pidfds of other threads
    /// (before Linux 6.9).
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        /// `PIDFD_THREAD`.
        const THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0o200);
        let tid = self.tid();
        let flags = match tid == self.pid() {
            true => PidfdFlags::empty(),
            false => THREAD,
        };
        let tid = Pid::from_raw(tid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_open(tid, flags)?)
    }
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
fn first_living(pid: i32) -> Option<i32> {
    let state = |path: String| Stat::parse(&std::fs::read(path).ok()?).ok();
    let leader = state(procfs::path(format_args!("{pid}/stat")))?;
    if !is_over(leader.state) || has_ended(&leader) {
        return None;
    }
    let folder = File::open(procfs::path(format_args!("{pid}/task"))).ok()?;
    let mut tids = crate::numbers::of(OwnedFd::from(folder)).ok()?;
    tids.sort_unstable();
    let lives = |tid: &i32| {
        let stat = state(procfs::path(format_args!("{pid}/task/{tid}/stat")));
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
    fn leader_answers_for_its_process() {
        let own = Process::own();
        assert_eq!((own.elect(), own.tid()), (None, own.pid()));
        assert!(!own.is_leaderless());
        own.pidfd().expect("a pidfd");
        assert_eq!(Process::new(i32::MAX).elect(), None);
    }

    #[test]
    fn leader_answers_where_the_other_thread_has_ended() {
        let own = std::process::id().cast_signed();
        let process = Process::answered_by(own, i32::MAX);
        let clone = process.clone();
        assert_eq!(
            (process.tid(), clone.path("maps")),
            (own, format!("/proc/{own}/maps"))
        );
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
