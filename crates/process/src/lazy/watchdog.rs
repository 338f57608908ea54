//! Ends trees whose pages do not come any more.
//!
//! A page that is missing when its userfaultfd is closed reads as zeros. So somebody else holds the
//! userfaultfds as well: a process that kills the trees if the server of their pages dies, and lets
//! go only when they are gone. It logs, as the server does, to a file that it was left.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use freeze::stat_of;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process, pidfd_send_signal, setsid};
use sys::fork::fork_for_numbers;
use sys::socket::{self, Along};
use sys::uffd::Uffd;

/// How often it is looked at who is still there.
const LOOK: Duration = Duration::from_millis(1);
/// After how long that is said.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the watchdog is told, as the first of three numbers.
const TASK: u64 = 1;
const HELD: u64 = 2;
const DONE: u64 = 3;
const WHOLE: u64 = 4;
const DISMISSED: u64 = 5;

/// A task of a tree whose pages are to come.
#[derive(Debug)]
pub(super) struct Task {
    /// Its pid.
    pub pid: i32,
    /// Itself.
    pub pidfd: OwnedFd,
}

/// A waiting child process.
#[derive(Debug)]
pub(super) struct Watchdog(OwnedFd);

impl Watchdog {
    /// Starts it, from a process that has one thread. `log` stays open in it.
    pub fn start(log: Option<RawFd>) -> io::Result<Self> {
        let (theirs, own) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let kept = [Some(theirs.as_raw_fd()), log];
        let kept = kept.into_iter().flatten().collect::<Vec<_>>();
        fork_for_numbers(&kept, || {
            // Nothing that ends the server's group may end this process.
            let _ = setsid();
            crate::alone::raise_open_files_to_the_hard_limit();
            watch(&theirs);
            log::logger().flush();
        })?;
        Ok(Self(own))
    }

    fn tell(&self, words: [u64; 3], rights: &[BorrowedFd<'_>]) {
        let bytes = words.map(u64::to_ne_bytes).concat();
        let along = Along {
            rights,
            ..Along::default()
        };
        if let Err(error) = socket::send(&self.0, &bytes, along, 0) {
            log::warn!("the watchdog is gone: {error}");
        }
    }

    /// A task that is to end if the server does.
    pub fn task(&self, owner: u64, task: &Task) {
        let pid = u64::from(task.pid.cast_unsigned());
        self.tell([TASK, owner, pid], &[task.pidfd.as_fd()]);
    }

    /// A userfaultfd of an owner's processes that is not to be closed before they end.
    pub fn hold(&self, number: u64, owner: u64, uffd: &Uffd) {
        self.tell([HELD, owner, number], &[uffd.as_fd()]);
    }

    /// All pages of that one have come.
    pub fn done(&self, number: u64) {
        self.tell([DONE, 0, number], &[]);
    }

    /// All pages of an owner have come.
    pub fn whole(&self, owner: u64) {
        self.tell([WHOLE, owner, 0], &[]);
    }

    /// Ends it.
    pub fn dismiss(&self) {
        self.tell([DISMISSED, 0, 0], &[]);
    }
}

/// What the watchdog knows.
#[derive(Default)]
struct Watched {
    tasks: BTreeMap<u64, Vec<Task>>,
    held: BTreeMap<u64, (u64, Uffd)>,
}

/// The watchdog's life.
fn watch(server: &OwnedFd) {
    let mut watched = Watched::default();
    let mut bytes = [0; 24];
    loop {
        let received = match socket::receive(server, &mut bytes, 0) {
            Ok(received) if received.len == bytes.len() => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // The server is gone.
            _ => break,
        };
        let word = |at: usize| {
            let bytes = &bytes[8 * at..8 * at + 8];
            u64::from_ne_bytes(bytes.try_into().expect("eight of them"))
        };
        let (what, owner, number) = (word(0), word(1), word(2));
        match (what, received.rights.into_iter().next()) {
            (TASK, Some(pidfd)) => {
                let pid = number as i32;
                let tasks = watched.tasks.entry(owner).or_default();
                tasks.push(Task { pid, pidfd });
            }
            (HELD, Some(uffd)) => {
                watched.held.insert(number, (owner, uffd.into()));
            }
            (DONE, _) => {
                watched.held.remove(&number);
            }
            (WHOLE, _) => {
                watched.tasks.remove(&owner);
            }
            (DISMISSED, _) => return,
            _ => {}
        }
    }
    let left = watched.held.values().map(|(owner, _)| *owner);
    let left = left.collect::<std::collections::BTreeSet<_>>();
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
        let found = descendants(&roots);
        let known = all.len();
        for pid in found {
            if !all.contains(&pid) {
                send(pid, Signal::STOP);
                all.push(pid);
            }
        }
        if all.len() == known {
            break;
        }
    }
    let begun = Instant::now();
    let mut said = false;
    loop {
        all.iter().for_each(|one| send(*one, Signal::KILL));
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

fn send((pid, start_ticks): (i32, u64), signal: Signal) {
    let is_it = stat_of(pid).is_some_and(|stat| stat.start_ticks == start_ticks);
    if let (true, Some(pid)) = (is_it, Pid::from_raw(pid)) {
        let _ = kill_process(pid, signal);
    }
}
