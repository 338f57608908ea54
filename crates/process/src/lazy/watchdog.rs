//! Ends trees whose pages do not come any more.
//!
//! A page that is missing when its userfaultfd is closed reads as zeros. So somebody else holds the
//! userfaultfds as well: a process that kills the trees if the server of their pages dies, and lets
//! go only when they are gone. It logs, as the server does, to a file that it was left.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use freeze::stat_of;
use freeze::watchdog::signal;
use guard::{Channel, Helper};
use rustix::process::{Signal, pidfd_send_signal};
use sys::uffd::Uffd;

/// How often it is looked at who is still there.
const LOOK: Duration = Duration::from_millis(1);
/// After how long that is said.
const PATIENCE: Duration = Duration::from_secs(5);

/// A message to the watchdog.
#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    /// The tree that it is about.
    #[prost(uint64, tag = "2")]
    owner: u64,
    /// A task's pid, or the number of a userfaultfd.
    #[prost(uint64, tag = "3")]
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum MessageKind {
    Unknown = 0,
    /// A task, as a pidfd.
    Task = 1,
    /// A userfaultfd to hold.
    Held = 2,
    /// A userfaultfd that need not be held any more.
    Done = 3,
    /// A tree that needs nothing any more.
    Whole = 4,
    Dismissed = 5,
}

/// A task of a tree whose pages are to come.
#[derive(Debug)]
pub(super) struct Task {
    /// Its pid.
    pub pid: i32,
    /// Itself.
    pub pidfd: OwnedFd,
}

/// The helper, of which nobody waits for the end.
#[derive(Debug)]
pub(super) struct Watchdog(Channel);

impl Watchdog {
    /// Starts it, from a process that has one thread. `log` stays open in it.
    pub fn start(log: Option<RawFd>) -> io::Result<Self> {
        let helper = Helper::new(c"stillframe-lzwd").log(log).start(|server| {
            crate::alone::raise_open_files_to_the_hard_limit();
            watch(&server);
        })?;
        Ok(Self(helper.into_channel()))
    }

    fn tell(&self, kind: MessageKind, owner: u64, number: u64, rights: &[BorrowedFd<'_>]) {
        let message = Message {
            kind: kind as i32,
            owner,
            number,
        };
        if let Err(error) = self.0.send(&message, rights) {
            log::warn!("the watchdog is gone: {error}");
        }
    }

    /// A task that is to end if the server does.
    pub fn task(&self, owner: u64, task: &Task) {
        let pid = u64::from(task.pid.cast_unsigned());
        self.tell(MessageKind::Task, owner, pid, &[task.pidfd.as_fd()]);
    }

    /// A userfaultfd of an owner's processes that is not to be closed before they end.
    pub fn hold(&self, number: u64, owner: u64, uffd: &Uffd) {
        self.tell(MessageKind::Held, owner, number, &[uffd.as_fd()]);
    }

    /// All pages of that one have come.
    pub fn done(&self, number: u64) {
        self.tell(MessageKind::Done, 0, number, &[]);
    }

    /// All pages of an owner have come.
    pub fn whole(&self, owner: u64) {
        self.tell(MessageKind::Whole, owner, 0, &[]);
    }

    /// Ends it.
    pub fn dismiss(&self) {
        self.tell(MessageKind::Dismissed, 0, 0, &[]);
    }
}

/// What the watchdog knows.
#[derive(Default)]
struct Watched {
    tasks: BTreeMap<u64, Vec<Task>>,
    held: BTreeMap<u64, (u64, Uffd)>,
}

/// The watchdog's life.
fn watch(server: &Channel) {
    let mut watched = Watched::default();
    while let Ok(Some((message, rights))) = server.receive::<Message>() {
        let Message { owner, number, .. } = message;
        match (message.kind(), rights.into_iter().next()) {
            (MessageKind::Task, Some(pidfd)) => {
                let pid = number as i32;
                let tasks = watched.tasks.entry(owner).or_default();
                tasks.push(Task { pid, pidfd });
            }
            (MessageKind::Held, Some(uffd)) => {
                watched.held.insert(number, (owner, uffd.into()));
            }
            (MessageKind::Done, _) => {
                watched.held.remove(&number);
            }
            (MessageKind::Whole, _) => {
                watched.tasks.remove(&owner);
            }
            (MessageKind::Dismissed, _) => return,
            _ => {}
        }
    }
    // The server is gone.
    let left = watched.held.values().map(|(owner, _)| *owner);
    let left = left.collect::<BTreeSet<_>>();
    for owner in left {
        let tasks = watched.tasks.remove(&owner).unwrap_or_default();
        let pids = tasks.iter().map(|task| task.pid).collect::<Vec<_>>();
        log::error!("the server of the lazy pages of {pids:?} has died: they are killed");
        let own = watched.held.values().filter(|one| one.0 == owner);
        let own = own.map(|one| &one.1).collect::<Vec<_>>();
        end(&tasks, &|| own.iter().all(|uffd| uffd.is_orphaned()));
    }
}

/// Kills the tasks and what descends from them, and waits until `gone` says that nobody is left who
/// waits for their pages.
pub(super) fn end(tasks: &[Task], gone: &dyn Fn() -> bool) {
    let roots = tasks.iter().map(|task| task.pid).collect::<Vec<_>>();
    // Stopped, they make no more children.
    for task in tasks {
        let _ = pidfd_send_signal(&task.pidfd, Signal::STOP);
    }
    let mut all = Vec::new();
    loop {
        let known = all.len();
        for found in descendants(&roots) {
            if !all.contains(&found) {
                let (pid, start_ticks) = found;
                signal(pid, start_ticks, Signal::STOP);
                all.push(found);
            }
        }
        if all.len() == known {
            break;
        }
    }
    let begun = Instant::now();
    let mut said = false;
    loop {
        for (pid, start_ticks) in &all {
            signal(*pid, *start_ticks, Signal::KILL);
        }
        for task in tasks {
            let _ = pidfd_send_signal(&task.pidfd, Signal::KILL);
        }
        if gone() {
            return;
        }
        if begun.elapsed() > PATIENCE && !said {
            said = true;
            log::error!(
                "processes that {roots:?} have forked and left wait for pages that do not come, \
                 and stay until they are killed"
            );
        }
        std::thread::sleep(if said { 100 * LOOK } else { LOOK });
    }
}

/// The processes that descend from `roots`, each with when it was started.
fn descendants(roots: &[i32]) -> Vec<(i32, u64)> {
    let stats = sys::procfs::processes().filter_map(|pid| Some((pid, stat_of(pid)?)));
    let stats = stats.collect::<BTreeMap<_, _>>();
    let descends = |pid: i32| {
        let parent = |pid: &i32| stats.get(pid).map(|stat| stat.ppid);
        let line = std::iter::successors(Some(pid), parent).skip(1);
        line.take(stats.len()).any(|pid| roots.contains(&pid))
    };
    let found = stats.iter().filter(|one| descends(*one.0));
    found.map(|(pid, stat)| (*pid, stat.start_ticks)).collect()
}
