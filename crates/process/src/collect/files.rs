//! The descriptions of a tree: those behind descriptors, those that are mapped, and the places
//! where tasks are.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

use freeze::Task;
use image::{Record, SpaceId};
use resources::fd::socket::peek;
use resources::fd::table::{Grouping, Row};
use resources::fd::tcp::lock::{self, Lock};
use resources::fd::watched::Watched;
use resources::fd::{self, Description, DescriptionId, DumpContext, ErasedKind, Info, Open, Opens};
use resources::map::listing::Listed;
use resources::map::placed;
use resources::{Allow, Error, ledger};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, openat, statat};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use sys::close::Deferred;
use sys::kcmp::Descriptor;
use sys::process::Process;

use super::how::How;
use crate::Result;
use crate::links::{self, Link};
use crate::obstacles::Obstacles;
use crate::records::FIRST_OBJECT;
use crate::undo::Undo;

/// An object whose contents are stored as a space of their own.
pub(crate) struct Object {
    pub space: SpaceId,
    pub contents: Contents,
    pub len_bytes: u64,
}

/// What an object has in it.
pub(crate) enum Contents {
    /// What this file has.
    File(OwnedFd),
    /// These bytes.
    Bytes(Vec<u8>),
}

/// How many descriptors this process may have besides those of the tree.
const OWN_DESCRIPTORS: u64 = 1024;

/// All descriptions found so far.
#[derive(Default)]
pub(super) struct Files {
    grouping: Grouping,
    /// Ids by the grouping's own numbers.
    grouped: HashMap<DescriptionId, DescriptionId>,
    /// Ids of files without a descriptor, by (device, inode, flags).
    placed: HashMap<(u64, u64, u32), DescriptionId>,
    /// Ids by (pid, fd).
    at: HashMap<(i32, i32), DescriptionId>,
    opens: Opens<'static>,
    /// The process of each process and thread of the tree, and what that is.
    tasks: HashMap<i32, (Process, fd::Task)>,
    /// Device and inode of this process's root.
    own_root: OnceCell<(u64, u64)>,
}

impl Files {
    /// Device and inode of this process's root directory.
    pub fn own_root(&self) -> rustix::io::Result<(u64, u64)> {
        if let Some(root) = self.own_root.get() {
            return Ok(*root);
        }
        let root = rustix::fs::stat("/")?;
        Ok(*self.own_root.get_or_init(|| (root.st_dev, root.st_ino)))
    }

    /// Files that refer to tasks of a tree, this one among them, are of the tree's own.
    pub fn know(&mut self, task: &Task) {
        let state = match task.is_zombie() {
            true => fd::Task::Ended,
            false => fd::Task::Alive,
        };
        let threads = task.threads().iter().map(|thread| thread.tid);
        // The leader as well, should it have ended.
        let all = threads.chain([task.pid()]);
        self.tasks
            .extend(all.map(|tid| (tid, (task.process.clone(), state))));
    }

    fn next(&self) -> DescriptionId {
        DescriptionId(u32::try_from(self.opens.len()).expect("fewer than 2^32 descriptions"))
    }

    /// The description behind a descriptor.
    pub fn descriptor(&mut self, process: &Process, row: Row) -> Result<DescriptionId> {
        let pid = process.pid();
        if let Some(id) = row.same.and_then(|at| self.at.get(&at)).copied() {
            self.at.insert((pid, row.fd), id);
            return Ok(id);
        }
        let (group, new) = self.grouping.show(process, &row)?;
        let next = self.next();
        let id = *self.grouped.entry(group).or_insert(next);
        self.at.insert((pid, row.fd), id);
        if new {
            let fd = row.fd;
            let holder = process.clone();
            let fetch = move || fetch(&holder, fd);
            self.opens.push(Open::new(
                id,
                (process.clone(), fd),
                (row.link, row.stat, row.info),
                fetch,
            ));
        }
        Ok(id)
    }

    /// Takes over what a task has told of a descriptor of it since.
    pub fn learn(&mut self, pid: i32, row: &Row) {
        if let Some(id) = self.at.get(&(pid, row.fd)) {
            let open = &mut self.opens[id.0 as usize];
            // Others that have it as well were asked, too; one says what there is to say.
            if (open.process.pid(), open.fd) == (pid, row.fd) {
                open.info.clone_from(&row.info);
            }
        }
    }

    /// The processes of the tree that have not ended, in ascending order.
    pub fn processes(&self) -> Vec<Process> {
        let living = self.tasks.values();
        let living = living.filter(|(_, state)| *state == fd::Task::Alive);
        let mut processes = living
            .map(|(process, _)| process.clone())
            .collect::<Vec<_>>();
        processes.sort_unstable_by_key(Process::pid);
        processes.dedup();
        processes
    }

    /// The descriptions of userfaultfds.
    pub fn userfaultfds(&self) -> impl Iterator<Item = &Open<'_>> {
        let all = self.opens.iter();
        all.filter(|open| open.link == fd::userfaultfd::LINK)
    }

    /// A description.
    pub fn open(&self, id: u32) -> &Open<'_> {
        &self.opens[id as usize]
    }

    /// All descriptions.
    pub fn all(&self) -> &[Open<'_>] {
        &self.opens
    }

    /// All descriptors of a description, as (pid, fd), in ascending order.
    pub fn numbers(&self, id: DescriptionId) -> Vec<(i32, i32)> {
        let all = self.at.iter().filter(|(_, own)| **own == id);
        let mut numbers = all.map(|(at, _)| *at).collect::<Vec<_>>();
        numbers.sort_unstable();
        numbers
    }

    /// The description of a mapped ring, whose descriptors were listed before.
    pub fn ring(&self, pid: i32, listed: &Listed) -> Result<DescriptionId> {
        let is_here = |open: &&Open<'_>| self.numbers(open.id).iter().any(|at| at.0 == pid);
        let opens = self.opens.iter().filter(|open| open.link == listed.name);
        let opens = opens.filter(is_here);
        Ok(match listed.is_ring() {
            true => placed::ring(opens, pid, listed)?.id,
            false => placed::packet_ring(opens, pid, listed)?,
        })
    }

    /// The description of a mapping's file.
    pub fn mapped(
        &mut self,
        process: &Process,
        proc: &Rc<Deferred>,
        listed: &Listed,
    ) -> Result<DescriptionId> {
        let pid = process.pid();
        let writes = listed.shared && listed.has(b"mw");
        let flags = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let key = (listed.dev, listed.ino, flags.bits());
        if let Some(id) = self.placed.get(&key) {
            return Ok(*id);
        }
        let link = format!(
            "map_files/{:x}-{:x}",
            listed.span.start.0, listed.span.end.0
        );
        let path = Path::new(std::ffi::OsStr::from_bytes(&listed.name));
        let same = |stat: &Stat| (stat.st_dev, stat.st_ino) == (listed.dev, listed.ino);
        let plain = rustix::fs::lstat(path).ok().filter(same);
        let at_path = plain.is_some();
        let stat = match plain {
            Some(stat) => stat,
            None => statat(proc, &link, AtFlags::empty()).map_err(|errno| {
                Error::kernel(format!("cannot look at /proc/{pid}/{link}"), errno)
            })?,
        };
        let id = self.place((process, proc), link, (listed.name.clone(), stat), flags);
        let open = &mut self.opens[id.0 as usize];
        open.at_path = at_path;
        open.role = format!("mapping {}", listed.span);
        self.placed.insert(key, id);
        Ok(id)
    }

    /// The description of /proc/PID/`name`: "exe", "cwd", "root".
    pub fn link(
        &mut self,
        process: &Process,
        proc: &Rc<Deferred>,
        name: &str,
        flags: OFlags,
    ) -> Result<DescriptionId> {
        let pid = process.pid();
        let failed = |errno| Error::kernel(format!("cannot look at /proc/{pid}/{name}"), errno);
        let stat = statat(proc, name, AtFlags::empty()).map_err(failed)?;
        let key = (stat.st_dev, stat.st_ino, flags.bits());
        if let Some(id) = self.placed.get(&key) {
            return Ok(*id);
        }
        let target = rustix::fs::readlinkat(proc, name, Vec::new()).map_err(failed)?;
        let id = self.place(
            (process, proc),
            name.to_owned(),
            (target.into_bytes(), stat),
            flags,
        );
        self.opens[id.0 as usize].role = match name {
            "exe" => "its program",
            "cwd" => "its working directory",
            _ => "its root directory",
        }
        .to_owned();
        self.placed.insert(key, id);
        Ok(id)
    }

    /// Adds a description in flight, which is held here.
    fn add(&mut self, process: Process, own: OwnedFd, row: Row) {
        let id = self.next();
        let fetch = move || {
            let copy = rustix::io::fcntl_dupfd_cloexec(&own, 0);
            copy.map_err(|errno| Error::kernel("cannot copy a descriptor", errno))
        };
        let seen = (row.link, row.stat, row.info);
        let mut open = Open::new(id, (process, -1), seen, fetch);
        open.in_flight = true;
        self.opens.push(open);
    }

    fn place(
        &mut self,
        (process, proc): (&Process, &Rc<Deferred>),
        link: String,
        (target, stat): (Vec<u8>, Stat),
        flags: OFlags,
    ) -> DescriptionId {
        let id = self.next();
        let info = Info {
            flags: flags.bits(),
            ..Info::default()
        };
        let (pid, proc) = (process.pid(), proc.clone());
        let fetch = move || {
            let opened = openat(&*proc, &link, flags | OFlags::CLOEXEC, Mode::empty());
            opened.map_err(|errno| Error::kernel(format!("cannot open /proc/{pid}/{link}"), errno))
        };
        self.opens.push(Open::new(
            id,
            (process.clone(), -1),
            (target, stat, info),
            fetch,
        ));
        id
    }
}

impl Files {
    /// Looks at each path once that several descriptions of one file have, as /dev/null often is.
    fn find_repeated(&mut self) {
        let key = |open: &Open<'_>| (open.link.clone(), open.stat.st_dev, open.stat.st_ino);
        let mut repeated: HashMap<_, Vec<usize>> = HashMap::new();
        for (at, open) in self.opens.iter().enumerate() {
            if open.link.starts_with(b"/") && !open.at_path {
                repeated.entry(key(open)).or_default().push(at);
            }
        }
        for ((path, dev, ino), all) in repeated.into_iter().filter(|(_, all)| all.len() > 1) {
            let path = Path::new(std::ffi::OsStr::from_bytes(&path));
            let same = |stat: Stat| (stat.st_dev, stat.st_ino) == (dev, ino);
            if rustix::fs::lstat(path).is_ok_and(same) {
                all.iter().for_each(|at| self.opens[*at].at_path = true);
            }
        }
    }
}

/// A descriptor of the very description that descriptor `fd` of a process refers to.
pub(crate) fn fetch(process: &Process, fd: i32) -> resources::Result<OwnedFd> {
    let pid = process.pid();
    let failed = |errno| Error::kernel(format!("cannot fetch fd {fd} of pid {pid}"), errno);
    let task = process.pidfd();
    let task = task.map_err(|e| Error::kernel(format!("cannot ask pid {pid}"), e))?;
    pidfd_getfd(task, fd, PidfdGetfdFlags::empty()).map_err(failed)
}

/// What the kinds make of the descriptions.
#[derive(Default)]
pub(crate) struct Described {
    pub descriptions: Vec<(DescriptionId, Box<dyn Description>)>,
    /// The records of their attributes.
    pub attributes: Vec<Record>,
    pub objects: Vec<Object>,
    /// Hard links that were made.
    pub links: Vec<Link>,
    /// Called when the dump fails later.
    pub undo: Undo,
    /// Keeps the tree's TCP connections quiet.
    pub lock: Option<Lock>,
}

/// The kind of each description that a tree has in its tasks, in their order; none of those that no
/// kind claims, which are noted.
pub(super) struct Claimed(Vec<Option<&'static dyn ErasedKind>>);

impl Described {
    /// Encodes the descriptions.
    pub fn encode(&mut self) -> impl Iterator<Item = Record> {
        let all = self.descriptions.drain(..);
        all.map(|(id, description)| record(description.tag(), id, description.encode()))
    }
}

impl Claimed {
    /// Claims all descriptions that were found.
    pub fn of(files: &Files, obstacles: &mut Obstacles) -> Result<Self> {
        // One of each is held here, and others come and go.
        crate::alone::raise_open_files(2 * files.opens.len() as u64 + OWN_DESCRIPTORS);
        Ok(Self(claim(&files.opens, obstacles)?))
    }

    /// The kind of a description.
    pub fn kind(&self, id: u32) -> Option<&'static dyn ErasedKind> {
        self.0.get(id as usize).copied().flatten()
    }
}

/// Describes all descriptions, and those that come up meanwhile; notes those that are not saved.
/// Connections are kept quiet, and read, once every description is known to be of a kind that is:
/// also those that are on their way in sockets' queues.
pub(super) fn describe(
    files: &mut Files,
    Claimed(mut kinds): Claimed,
    how: &mut How<'_>,
    obstacles: &mut Obstacles,
) -> Result<Described> {
    let allow = how.allow;
    let watched = &mut how.homework.watched;
    let mut described = Described::default();
    let mut saved: Vec<Dumped> = Vec::new();
    let mut all: Vec<Option<&'static dyn ErasedKind>> = Vec::new();
    files.find_repeated();
    let (mut first, mut watchdogs, mut connections) = (0, Vec::new(), Vec::new());
    while first < files.opens.len() {
        watchdogs.extend(peek::guard(&files.opens[first..])?);
        let mut context = Context::new((allow, files), watched, &mut described);
        all.extend(&kinds);
        for (at, kind) in (first..).zip(kinds) {
            let mut dumped = Dumped::default();
            match kind {
                // One that is on its way in a queue is not read as long as it is established.
                Some(kind) if is_kept_quiet(kind, allow) && !files.opens[at].in_flight => {
                    connections.push((at, kind));
                }
                Some(kind) => dumped = context.dump(at, kind, obstacles)?,
                None => {}
            }
            saved.push(dumped);
        }
        let added = context.added;
        first = files.opens.len();
        for (process, own, row) in added {
            files.add(process, own, row);
        }
        kinds = claim(&files.opens[first..], obstacles)?;
    }
    for (open, kind) in files.opens.iter().zip(&all) {
        let checked = kind.map_or(Ok(()), |kind| kind.check_among(open, &files.opens, allow));
        obstacles.note(checked)?;
    }
    if obstacles.is_empty() {
        described.lock = Lock::install(&files.opens, allow)?;
    }
    for (at, kind) in connections {
        // Reading one needs its packets held back; of a tree that is refused it is left out.
        if described.lock.is_some() || !lock::is_needed(&files.opens[at])? {
            let mut context = Context::new((allow, files), watched, &mut described);
            saved[at] = context.dump(at, kind, obstacles)?;
        }
    }
    for (open, (description, attributes)) in files.opens.iter().zip(saved) {
        let description = description.map(|description| (open.id, description));
        described.descriptions.extend(description);
        described.attributes.extend(attributes);
    }
    Ok(described)
}

/// A description that is saved, and the record of its attributes.
type Dumped = (Option<Box<dyn Description>>, Option<Record>);

/// The kind of each description; none of those that no kind claims, which are noted.
fn claim(
    opens: &[Open<'_>],
    obstacles: &mut Obstacles,
) -> Result<Vec<Option<&'static dyn ErasedKind>>> {
    let claimed = opens.iter().map(|open| obstacles.note(fd::claim(open)));
    claimed.collect()
}

/// Whether there may be established connections of a kind, whose packets are held back before they
/// are read.
fn is_kept_quiet(kind: &dyn ErasedKind, allow: &Allow) -> bool {
    allow.tcp_established && !allow.tcp_close && kind.tag() == fd::tags::TCP
}

fn record(tag: u16, id: DescriptionId, payload: Vec<u8>) -> Record {
    Record {
        tag,
        version: 1,
        id: id.0,
        payload,
    }
}

struct Context<'a> {
    allow: &'a Allow,
    files: &'a Files,
    added: Vec<(Process, OwnedFd, Row)>,
    described: &'a mut Described,
    watched: &'a mut Watched,
}

impl<'a> Context<'a> {
    fn new(
        (allow, files): (&'a Allow, &'a Files),
        watched: &'a mut Watched,
        described: &'a mut Described,
    ) -> Self {
        Self {
            watched,
            allow,
            files,
            added: Vec::new(),
            described,
        }
    }

    /// Has description number `at` described by its kind.
    fn dump(
        &mut self,
        at: usize,
        kind: &'static dyn ErasedKind,
        obstacles: &mut Obstacles,
    ) -> Result<Dumped> {
        let files = self.files;
        let open = &files.opens[at];
        if obstacles.note(ledger::fdinfo::check(kind, open))?.is_none() {
            return Ok(Dumped::default());
        }
        let own = obstacles.note(kind.dump(open, self))?;
        let payload = obstacles.note(fd::attributes::dump(open, self.allow))?;
        let attributes = payload.flatten();
        let attributes = attributes.map(|payload| record(fd::tags::ATTRIBUTES, open.id, payload));
        Ok((own, attributes))
    }
}

impl DumpContext for Context<'_> {
    fn allow(&self) -> &Allow {
        self.allow
    }

    fn all(&self) -> &Opens<'_> {
        &self.files.opens
    }

    fn at(&self, pid: i32, fd: i32) -> Option<DescriptionId> {
        self.files.at.get(&(pid, fd)).copied()
    }

    fn task(&self, tid: i32) -> Option<fd::Task> {
        self.files.tasks.get(&tid).map(|task| task.1)
    }

    fn process(&self, tid: i32) -> Option<i32> {
        self.files.tasks.get(&tid).map(|task| task.0.pid())
    }

    fn processes(&self) -> Vec<Process> {
        self.files.processes()
    }

    fn numbers(&self, id: DescriptionId) -> Vec<(i32, i32)> {
        self.files.numbers(id)
    }

    fn add(&mut self, process: &Process, own: OwnedFd) -> resources::Result<DescriptionId> {
        let row = resources::fd::table::own(own.as_fd())?;
        let here = Process::own();
        let key = (row.link.as_slice(), row.stat.st_dev, row.stat.st_ino);
        let equal = |open: &&Open<'_>| {
            key == (open.link.as_slice(), open.stat.st_dev, open.stat.st_ino) && open.fd >= 0
        };
        let own_file = Descriptor {
            process: &here,
            fd: row.fd,
        };
        let is_same = |process: &Process, fd: i32| {
            let other = Descriptor { process, fd };
            sys::kcmp::compare_files(own_file, other).is_ok_and(std::cmp::Ordering::is_eq)
        };
        let mut known = self.files.opens.iter().filter(equal);
        if let Some(known) = known.find(|open| is_same(&open.process, open.fd)) {
            return Ok(known.id);
        }
        let first = self.files.opens.len();
        let again = self
            .added
            .iter()
            .position(|(_, _, other)| is_same(&here, other.fd));
        let at = again.unwrap_or(self.added.len());
        if again.is_none() {
            self.added.push((process.clone(), own, row));
        }
        Ok(DescriptionId(
            u32::try_from(first + at).expect("fewer than 2^32 descriptions"),
        ))
    }

    fn store(&mut self, file: OwnedFd, len_bytes: u64) -> resources::Result<u32> {
        let count = u32::try_from(self.described.objects.len()).expect("fewer than 2^31 objects");
        let space = SpaceId(FIRST_OBJECT + count);
        self.described.objects.push(Object {
            space,
            contents: Contents::File(file),
            len_bytes,
        });
        Ok(space.0)
    }

    fn watched(&mut self) -> &mut Watched {
        self.watched
    }

    fn linked(&mut self, link: &Path) {
        self.described.links.extend(links::made(link));
    }

    fn on_failure(&mut self, undo: Box<dyn FnOnce()>) {
        self.described.undo.0.push(undo);
    }
}
