//! Sockets of this very process that are dumped, closed and opened again.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::FileType;
use sys::process::Process;

use crate::fd::tcp::lock::{self, Lock};
use crate::fd::testing::stored;
use crate::fd::{
    Description, DescriptionId, DumpContext, Info, Open, Opens, RestoreContext, Stage, claim,
    kind_of,
};
use crate::{Allow, Error, Result};

/// A tree's descriptions, from the dump to the restore.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) allow: Allow,
    live: Vec<OwnedFd>,
    dumped: Vec<Box<dyn Description>>,
    lock: Option<Lock>,
}

fn dup(fd: BorrowedFd<'_>) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(fd, 0).unwrap()
}

/// A socket of this process, as a dump sees it.
pub(crate) fn describe(id: usize, own: &OwnedFd) -> Open<'static> {
    let link = rustix::fs::readlink(
        format!("/proc/thread-self/fd/{}", own.as_raw_fd()),
        Vec::new(),
    );
    let stat = rustix::fs::fstat(own).unwrap();
    let flags = rustix::fs::fcntl_getfl(own).unwrap().bits();
    let info = Info {
        flags,
        ..Info::default()
    };
    let copy = dup(own.as_fd());
    let fetch = move || Ok(dup(copy.as_fd()));
    let at = (Process::own(), own.as_raw_fd());
    let id = DescriptionId(u32::try_from(id).unwrap());
    Open::new(id, at, (link.unwrap().into_bytes(), stat, info), fetch)
}

impl World {
    pub(crate) fn new(live: Vec<OwnedFd>) -> Self {
        Self {
            live,
            ..Self::default()
        }
    }

    /// Dumps everything; the descriptors stay open.
    pub(crate) fn dump(&mut self) -> Result<()> {
        let opens = |live: &[OwnedFd]| {
            let all = live.iter().enumerate();
            all.map(|(id, own)| describe(id, own)).collect::<Vec<_>>()
        };
        let mut cx = Dumping {
            allow: self.allow.clone(),
            all: opens(&self.live).into_iter().collect(),
            flying: Vec::new(),
            watched: Default::default(),
        };
        self.dumped.clear();
        let mut queue = opens(&self.live);
        self.lock = None;
        self.lock = Lock::install(&queue, &self.allow)?;
        let mut at = 0;
        while at < queue.len() {
            let kind = claim(&queue[at])?;
            let description = kind.dump(&queue[at], &mut cx)?;
            self.dumped.push(stored(kind, queue[at].id, &*description)?);
            at += 1;
            let known = queue.len() - self.live.len();
            for (index, own) in cx.flying[known..].iter().enumerate() {
                queue.push(describe(self.live.len() + known + index, own));
            }
        }
        Ok(())
    }

    /// Closes everything, opens it again, and gives the descriptors in the order of the dump;
    /// those that were only in flight stand at the end.
    pub(crate) fn restore(self) -> Result<Vec<OwnedFd>> {
        let cx = self.restore_until_resume()?;
        let _leftover = lock::release(&cx.dumped)?;
        for index in 0..cx.opened.len() {
            let own = dup(cx.opened[index].as_fd());
            for stage in [Stage::Enable, Stage::Wake] {
                if cx.dumped[index].acts_in(stage, &cx.allow) {
                    cx.dumped[index].act(stage, own.as_fd(), &cx.allow)?;
                }
            }
        }
        Ok(cx.opened)
    }

    /// The same image once more.
    pub(crate) fn copy(&self) -> Self {
        Self {
            dumped: self.dumped.iter().map(|one| again(&**one)).collect(),
            ..Self::default()
        }
    }

    /// The part of a restore that can fail.
    pub(crate) fn restore_until_resume(mut self) -> Result<Restoring> {
        if let Some(mut lock) = self.lock.take() {
            lock.stay(&lock::Label::default())?;
            lock.silence()?;
        }
        self.live.clear();
        let mut cx = Restoring {
            allow: self.allow.clone(),
            opened: Vec::new(),
            shared: HashMap::new(),
            seen: HashMap::new(),
            unix: crate::fd::unix::Deferred::default(),
            dumped: Vec::new(),
        };
        for description in &self.dumped {
            description.prepare(&mut cx)?;
        }
        for description in &self.dumped {
            let own = description.open(&mut cx)?;
            cx.opened.push(own);
        }
        for (index, description) in self.dumped.iter().enumerate() {
            let own = dup(cx.opened[index].as_fd());
            description.finish(own.as_fd(), &mut cx)?;
        }
        cx.unix.finish()?;
        cx.shared.clear();
        cx.dumped = self.dumped;
        Ok(cx)
    }

    /// The target goes on and its connections with it, until everything is closed.
    pub(crate) fn left_running(&mut self) {
        self.lock = None;
        self.live.clear();
    }

    /// Closes everything.
    pub(crate) fn forget(&mut self) {
        self.live.clear();
    }

    /// One description.
    pub(crate) fn description(&self, index: usize) -> &dyn Description {
        &*self.dumped[index]
    }

    /// What people see of each description.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.dumped.iter().map(|one| one.describe()).collect()
    }
}

/// The same description once more.
fn again(description: &dyn Description) -> Box<dyn Description> {
    let kind = kind_of(description.tag()).unwrap();
    stored(kind, DescriptionId(0), description).unwrap()
}

/// Dumps, closes and opens sockets again.
pub(crate) fn cycle<const N: usize>(live: [OwnedFd; N]) -> [OwnedFd; N] {
    let mut world = World::new(live.into());
    world.dump().unwrap();
    let opened = world.restore().unwrap();
    opened
        .into_iter()
        .take(N)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

struct Dumping {
    allow: Allow,
    all: Opens<'static>,
    flying: Vec<OwnedFd>,
    watched: crate::fd::watched::Watched,
}

impl DumpContext for Dumping {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn all(&self) -> &Opens<'_> {
        &self.all
    }

    fn at(&self, _pid: i32, fd: i32) -> Option<DescriptionId> {
        self.all
            .iter()
            .find(|open| open.fd == fd)
            .map(|open| open.id)
    }

    fn task(&self, _tid: i32) -> Option<crate::fd::Task> {
        None
    }

    fn add(&mut self, _process: &Process, own: OwnedFd) -> Result<DescriptionId> {
        let stat = rustix::fs::fstat(&own).unwrap();
        let same =
            |other: &rustix::fs::Stat| (other.st_dev, other.st_ino) == (stat.st_dev, stat.st_ino);
        if let Some(known) = self.all.iter().find(|open| same(&open.stat)) {
            return Ok(known.id);
        }
        let mut flying = self.flying.iter();
        let known = flying.position(|own| same(&rustix::fs::fstat(own).unwrap()));
        let index = known.unwrap_or(self.flying.len());
        if index == self.flying.len() {
            self.flying.push(own);
        }
        Ok(DescriptionId(
            u32::try_from(self.all.len() + index).unwrap(),
        ))
    }

    fn store(&mut self, _file: OwnedFd, _len_bytes: u64) -> Result<u32> {
        Err(Error::unsupported(0, "files"))
    }

    fn on_failure(&mut self, _undo: Box<dyn FnOnce()>) {}

    fn watched(&mut self) -> &mut crate::fd::watched::Watched {
        &mut self.watched
    }
}

/// What is open so far.
pub(crate) struct Restoring {
    allow: Allow,
    dumped: Vec<Box<dyn Description>>,
    opened: Vec<OwnedFd>,
    shared: HashMap<(u16, u64), Vec<OwnedFd>>,
    seen: HashMap<Vec<u8>, FileType>,
    unix: crate::fd::unix::Deferred,
}

impl RestoreContext for Restoring {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn description(&self, id: DescriptionId) -> Result<BorrowedFd<'_>> {
        let own = self.opened.get(id.0 as usize).map(AsFd::as_fd);
        own.ok_or_else(|| Error::corrupt("description", "is not there"))
    }

    fn opened(&self) -> Vec<BorrowedFd<'_>> {
        self.opened.iter().map(AsFd::as_fd).collect()
    }

    fn shared(&mut self) -> &mut HashMap<(u16, u64), Vec<OwnedFd>> {
        &mut self.shared
    }

    fn seen(&mut self) -> &mut HashMap<Vec<u8>, FileType> {
        &mut self.seen
    }

    fn load(&mut self, _space: u32, _file: BorrowedFd<'_>) -> Result<()> {
        Err(Error::unsupported(0, "files"))
    }

    fn make(&mut self, _path: &std::path::Path, _is_folder: bool) -> Result<bool> {
        unreachable!("sockets are no files that are saved")
    }

    fn unix(&mut self) -> &mut crate::fd::unix::Deferred {
        &mut self.unix
    }

    fn on_success(&mut self, then: Box<dyn FnOnce()>) {
        then();
    }
}
