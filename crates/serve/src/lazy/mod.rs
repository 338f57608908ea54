//! The memory of running processes, brought in as they touch it: what lazily restored trees need.
//!
//! Processes map, unmap, move and give up memory and fork while their pages come; what is to come
//! is therefore kept by address ([`owed`]) and follows every event. What a process has that no page
//! is to come to reads as zeros. There are no differences here: see [`crate::Session`].

mod events;
mod missing;
mod place;
mod space;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

use abi::{Addr, Span};
use image::{Reader, RunKind, SpaceId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use sys::uffd::Uffd;

use self::events::unblock;
use self::missing::{MissingPages, Piece};
use self::place::Installer;
use self::space::AddressSpace;
use crate::session::lock;
use crate::{Error, Metrics, Result};

/// How long to wait until a fault is tried again that met a change of its process's mappings, in
/// nanoseconds.
const AGAIN_NS: i64 = 200_000;

/// A process whose pages are to come.
#[derive(Debug)]
pub struct Process {
    /// Its userfaultfd, with which `mappings` are registered for missing pages, and which tells
    /// forks, moved, removed and unmapped memory.
    pub uffd: Uffd,
    /// Its pid.
    pub pid: i32,
    /// Its owner, for the caller: spaces of one owner fail together.
    pub owner: u64,
    /// Space of the pages: each is filled at the address that is its number.
    pub space: SpaceId,
    /// Where.
    pub mappings: Vec<Span>,
    /// Addresses around which they come first.
    pub first: Vec<Addr>,
}

/// Hears the number and the owner of a userfaultfd that is served.
pub type UffdObserver = dyn Fn(u64, u64, &Uffd) + Send + Sync;

/// Callbacks, from any thread.
pub struct Hooks {
    /// A userfaultfd that is served from now on. Where it is closed before all has come, its
    /// process reads zeros; so somebody else may have to hold it as well.
    pub held: Box<UffdObserver>,
    /// It is not needed any more.
    pub done: Box<dyn Fn(u64) + Send + Sync>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooks")
    }
}

/// Events of a server.
#[derive(Debug)]
pub enum ServerEvent {
    /// This one of the descriptors that it was to watch is ready.
    Ready(usize),
    /// All pages of an owner's processes have come, or the processes are gone.
    Whole(u64),
    /// Pages of one of an owner's processes cannot come. All of the owner's wait until they are
    /// ended, and are then to be given up ([`Server::give_up`]).
    Failed(u64, Error),
    /// Somebody has called [`Server::wake`].
    Woken,
}

/// Serves the memory of any number of processes, all of one image.
pub struct Server {
    image: Arc<Reader>,
    metrics: Arc<Metrics>,
    hooks: Hooks,
    spaces: Mutex<Vec<Arc<AddressSpace>>>,
    /// Those of owners that failed. They are kept: what is closed reads zeros.
    failed: Mutex<Vec<Arc<AddressSpace>>>,
    next: AtomicU64,
    news: Mutex<VecDeque<ServerEvent>>,
    /// Written to where there are news, or more or fewer processes.
    bell: (OwnedFd, OwnedFd),
    /// True if faults are being answered: what nobody has asked for waits meanwhile.
    busy: AtomicBool,
    /// True if there is something to bring in, and the end of all.
    work: (Mutex<Work>, Condvar),
}

/// For whom there is something to bring in that nobody has asked for.
#[derive(Debug, Default)]
struct Work {
    /// Owners whose processes run.
    running: BTreeSet<u64>,
    over: bool,
}

impl Server {
    /// A server of the pages of `image`.
    ///
    /// # Errors
    /// [`Error::Descriptor`] where no pipe can be made.
    pub fn new(image: Arc<Reader>, metrics: Arc<Metrics>, hooks: Hooks) -> Result<Self> {
        let bell = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        Ok(Self {
            image,
            metrics,
            hooks,
            spaces: Mutex::default(),
            failed: Mutex::default(),
            next: AtomicU64::new(1),
            news: Mutex::default(),
            bell: bell.map_err(|errno| Error::Descriptor(errno.into()))?,
            busy: AtomicBool::new(false),
            work: (Mutex::default(), Condvar::new()),
        })
    }

    /// Takes a process on, whose threads may wait already; how many bytes are to come. Where there
    /// are none, it goes on without us.
    ///
    /// # Errors
    /// [`Error::Descriptor`].
    pub fn add(&self, process: Process) -> Result<u64> {
        let owed = self.owed(&process);
        let bytes = owed.bytes();
        if bytes == 0 {
            return Ok(0);
        }
        unblock(&process.uffd)?;
        let number = self.next.fetch_add(1, Relaxed);
        (self.hooks.held)(number, process.owner, &process.uffd);
        self.take_on(AddressSpace {
            number,
            owner: process.owner,
            pid: process.pid,
            uffd: process.uffd,
            space: process.space,
            order: RwLock::default(),
            owed: Mutex::new(owed),
            waiting: Mutex::default(),
            coming: Mutex::default(),
            first: Mutex::new(process.first),
            reached: AtomicU64::new(0),
        });
        Ok(bytes)
    }

    /// Returns the missing pages of a new process.
    fn owed(&self, process: &Process) -> MissingPages {
        let mut owed = MissingPages::default();
        let mut mappings = process.mappings.clone();
        mappings.sort_unstable();
        let mut runs = self.image.runs(process.space).peekable();
        for mapping in mappings {
            let (first, end) = (mapping.start.page(), mapping.end.page());
            while runs.next_if(|run| run.end_page() <= first).is_some() {}
            while let Some(run) = runs.peek().filter(|run| run.first_page < end).copied() {
                let from = run.first_page.max(first);
                let to = run.end_page().min(end);
                if !matches!(run.kind, RunKind::Zero) {
                    let span = Span {
                        start: Addr::of_page(from),
                        end: Addr::of_page(to),
                    };
                    let first_page = from;
                    owed.add(Piece { span, first_page });
                }
                if run.end_page() > end {
                    break;
                }
                runs.next();
            }
        }
        owed
    }

    fn take_on(&self, space: AddressSpace) {
        lock(&self.spaces).push(Arc::new(space));
        let (work, changed) = &self.work;
        drop(lock(work));
        changed.notify_all();
        self.ring();
    }

    /// An owner's processes run: what they have not asked for comes, too, from now on. Before, who
    /// makes them has their memory for itself.
    pub fn begin(&self, owner: u64) {
        let (work, changed) = &self.work;
        lock(work).running.insert(owner);
        changed.notify_all();
    }

    /// Has [`Server::serve`] look around.
    fn ring(&self) {
        let _ = rustix::io::write(&self.bell.1, b"!");
    }

    /// Has [`Server::serve`] return.
    pub fn wake(&self) {
        self.tell(ServerEvent::Woken);
    }

    fn tell(&self, news: ServerEvent) {
        lock(&self.news).push_back(news);
        self.ring();
    }

    /// Bytes that are to come to processes of an owner.
    #[must_use]
    pub fn remaining_bytes(&self, owner: u64) -> u64 {
        let spaces = lock(&self.spaces).clone();
        let own = spaces.iter().filter(|space| space.owner == owner);
        own.map(|space| lock(&space.owed).bytes()).sum()
    }

    /// Answers faults until there are news. One thread does.
    ///
    /// # Errors
    /// [`Error::Descriptor`] where it cannot wait for them.
    pub fn serve(&self, watched: &[BorrowedFd<'_>]) -> Result<ServerEvent> {
        let mut installer = Installer::new(self);
        loop {
            if let Some(news) = lock(&self.news).pop_front() {
                return Ok(news);
            }
            let spaces = lock(&self.spaces).clone();
            let fds = std::iter::once(self.bell.0.as_fd()).chain(watched.iter().copied());
            let fds = fds.chain(spaces.iter().map(|space| space.uffd.as_fd()));
            let mut fds = fds
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect::<Vec<_>>();
            let deferred = spaces.iter().any(|space| !lock(&space.waiting).is_empty());
            let again = Timespec {
                tv_sec: 0,
                tv_nsec: AGAIN_NS,
            };
            match poll(&mut fds, deferred.then_some(&again)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::Descriptor(errno.into())),
            }
            let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            if ready(&fds[0]) {
                let _ = rustix::io::read(&self.bell.0, &mut [0; 64]);
            }
            let (others, uffds) = fds[1..].split_at(watched.len());
            let others = others.iter().position(ready);
            for (space, fd) in spaces.iter().zip(uffds) {
                if ready(fd) || !lock(&space.waiting).is_empty() {
                    let answered = self.read_events(space);
                    let answered = answered.and_then(|()| installer.answer(space));
                    self.after(space, answered);
                }
            }
            if let Some(number) = others {
                return Ok(ServerEvent::Ready(number));
            }
        }
    }

    /// Brings in what nobody has asked for yet, giving way to faults, until [`Server::stop`].
    /// Several threads may.
    pub fn fetch(&self) {
        let mut installer = Installer::new(self);
        while let Some(spaces) = self.wait_for_work() {
            let mut did = false;
            for space in &spaces {
                let fetched = installer.fetch(space);
                did = !matches!(fetched, Ok(false));
                self.after(space, fetched.map(drop));
                if did {
                    break;
                }
            }
            if !did {
                // All of the rest is on its way.
                std::thread::sleep(place::GIVE_WAY);
            }
        }
    }

    /// The processes that run and to which pages are to come; none when it is over.
    fn wait_for_work(&self) -> Option<Vec<Arc<AddressSpace>>> {
        let (work, changed) = &self.work;
        let mut work = lock(work);
        loop {
            if work.over {
                return None;
            }
            let runs = |space: &&Arc<AddressSpace>| work.running.contains(&space.owner);
            let all = lock(&self.spaces).clone();
            let spaces = all.iter().filter(runs).cloned().collect::<Vec<_>>();
            if !spaces.is_empty() {
                return Some(spaces);
            }
            work = changed.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sees whether a process has all pages, or is gone, or cannot be served any more.
    fn after(&self, space: &AddressSpace, outcome: Result<()>) {
        match outcome {
            Ok(()) if !space.is_whole() => {}
            Ok(()) | Err(Error::Gone { .. }) => self.let_go(space),
            Err(error) => {
                self.tell(ServerEvent::Failed(space.owner, error));
                // The others of the tree wait for pages still, and get none before they are ended.
                self.set_aside(space.owner);
            }
        }
    }

    /// Has nothing brought in to an owner's processes any more.
    fn set_aside(&self, owner: u64) {
        let mut spaces = lock(&self.spaces);
        let failed = spaces.extract_if(.., |space| space.owner == owner);
        lock(&self.failed).extend(failed);
    }

    /// Tells whether all processes of an owner that failed have ended.
    #[must_use]
    pub fn is_gone(&self, owner: u64) -> bool {
        let failed = lock(&self.failed);
        let mut own = failed.iter().filter(|space| space.owner == owner);
        own.all(|space| space.uffd.is_orphaned())
    }

    /// Forgets the processes of an owner that failed, and gives the numbers that they had.
    pub fn give_up(&self, owner: u64) -> Vec<u64> {
        let mut failed = lock(&self.failed);
        let own = failed.extract_if(.., |space| space.owner == owner);
        own.map(|space| space.number).collect()
    }

    /// A process needs no more pages.
    fn let_go(&self, space: &AddressSpace) {
        let mut spaces = lock(&self.spaces);
        let before = spaces.len();
        spaces.retain(|one| one.number != space.number);
        if spaces.len() == before {
            return;
        }
        let last = !spaces.iter().any(|one| one.owner == space.owner);
        drop(spaces);
        (self.hooks.done)(space.number);
        match last {
            true => {
                lock(&self.work.0).running.remove(&space.owner);
                self.tell(ServerEvent::Whole(space.owner));
            }
            false => self.ring(),
        }
    }

    /// Ends [`Server::fetch`].
    pub fn stop(&self) {
        let (work, changed) = &self.work;
        lock(work).over = true;
        changed.notify_all();
    }
}
