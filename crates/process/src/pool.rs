//! The descriptors that tasks inherit: opened for them, and closed here before they run.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use abi::{Addr, PAGE_BYTES};
use guard::UndoList;
use image::{Reader, SpaceId, SpaceKind};
use pages::{Extent, sink};
use resources::callers::Callers;
use resources::fd::tcp::lock::{self, Leftover};
use resources::fd::{DescriptionId, RestoreContext, Stage, attributes, unix};
use resources::map::layout::DECODED_FILE;
use resources::{Allow, Error as ResourceError};
use rustix::fs::{FileType, MemfdFlags, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::collect::fetch;
use crate::plan::{self, Plan};
use crate::portion::Portion;
use crate::records::Saved;
use crate::{Error, InheritFd, Result};

/// The descriptors that tasks inherit.
pub(crate) struct Pool {
    allow: Allow,
    reader: Arc<Reader>,
    inherited: Vec<(Vec<u8>, Arc<OwnedFd>)>,
    open: Vec<Own>,
    portions: Vec<Portion>,
    /// Descriptions of portions of which a copy was fetched.
    fetched: RefCell<Vec<usize>>,
    shared: HashMap<(u16, u64), Vec<OwnedFd>>,
    seen: HashMap<Vec<u8>, FileType>,
    unix: unix::Deferred,
    /// What was made in the file system, by name.
    names: Option<UndoList>,
    then: Vec<Box<dyn FnOnce()>>,
}

/// A descriptor of the pool.
#[derive(Default)]
struct Own {
    /// In this process; of what is in a portion a copy, while it is used.
    here: OnceCell<Arc<OwnedFd>>,
    there: Option<Place>,
}

/// Where a portion's holder has a descriptor.
#[derive(Clone, Copy)]
struct Place {
    portion: usize,
    number: i32,
}

impl Own {
    fn here(own: Arc<OwnedFd>) -> Self {
        Self {
            here: own.into(),
            there: None,
        }
    }

    /// Its number, in this process or in that of its holder.
    fn number(&self) -> i32 {
        match self.there {
            Some(place) => place.number,
            None => self.resident().as_raw_fd(),
        }
    }

    fn resident(&self) -> &Arc<OwnedFd> {
        let own = self.here.get();
        own.expect("it is open and in no portion")
    }
}

/// What is left to be done when nothing can keep the tree from going on.
///
/// Of all that was opened only connections are open still: what the tasks give up from now on, a
/// lock or the last writer's end of a pipe, is given up.
pub(crate) struct Finish {
    allow: Allow,
    /// By the numbers of their descriptions.
    connections: Vec<(usize, Arc<OwnedFd>)>,
    names: Option<UndoList>,
    then: RefCell<Vec<Box<dyn FnOnce()>>>,
}

impl Finish {
    /// Has connections run again, in one go or, where somebody was killed meanwhile, from where
    /// they are. The result is to be dropped when the tree runs.
    ///
    /// # Errors
    /// Those of [`resources::fd::Kind::act`].
    pub fn wake(&self, saved: &Saved<'_>) -> Result<Option<Leftover>> {
        let leftover = lock::release(&saved.descriptions)?;
        for (id, own) in &self.connections {
            saved.descriptions[*id].act(Stage::Wake, own.as_fd(), &self.allow)?;
        }
        Ok(leftover)
    }

    /// The descriptors that [`Finish::wake`] and [`Finish::catch_up`] need.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let sockets = self.connections.iter().map(|(_, own)| own.as_fd());
        sockets.chain(self.names.iter().map(UndoList::fd)).collect()
    }

    /// Whether there are connections that sleep.
    pub fn has_connections(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Whether there is something to be done when the tree goes on.
    pub fn has_put_off(&self) -> bool {
        !self.then.borrow().is_empty()
    }

    /// Does what was put off until the tree goes on.
    pub fn catch_up(&self) {
        self.then.take().into_iter().for_each(|then| then());
    }
}

/// The numbers of descriptors that tasks will give away: those of theirs, and 0, which must be free
/// for a while.
struct Taken(BTreeSet<i32>);

impl Taken {
    /// `fetches`: tasks close what the pool has before they get theirs.
    fn of(saved: &Saved<'_>, fetches: bool) -> Self {
        if fetches {
            return Self([0].into());
        }
        let descriptors = saved.tasks.iter().flat_map(|task| &task.descriptors);
        let numbers = descriptors.map(|descriptor| descriptor.fd);
        Self(numbers.chain([0]).collect())
    }

    fn has(&self, number: i32) -> bool {
        self.0.contains(&number)
    }

    /// A copy of a descriptor under a number that is not taken: above all of them, or, where the
    /// limit of open files leaves too little room there, between them.
    fn copy_beside(&self, own: impl AsFd) -> rustix::io::Result<OwnedFd> {
        let above = self.0.last().map_or(0, |last| last.saturating_add(1));
        match fcntl_dupfd_cloexec(&own, above) {
            Err(Errno::MFILE | Errno::INVAL) => {}
            copied => return copied,
        }
        let mut from = 3;
        loop {
            let copy = fcntl_dupfd_cloexec(&own, from)?;
            if !self.has(copy.as_raw_fd()) {
                return Ok(copy);
            }
            from = copy.as_raw_fd() + 1;
        }
    }
}

impl Pool {
    pub fn new(allow: Allow, reader: Arc<Reader>, inherit: &[InheritFd]) -> Self {
        let inherited = inherit
            .iter()
            .map(|one| (one.stands_for.name(), one.fd.clone()));
        let inherited = inherited.collect();
        let (open, then) = (Vec::new(), Vec::new());
        let (shared, seen) = (HashMap::new(), HashMap::new());
        Self {
            allow,
            reader,
            inherited,
            open,
            portions: Vec::new(),
            fetched: RefCell::default(),
            shared,
            seen,
            unix: unix::Deferred::default(),
            names: None,
            then,
        }
    }

    /// Opens all descriptions.
    ///
    /// # Errors
    /// Those of the [`resources::fd::Kind`]s and of [`Portion::begin`].
    pub fn open_all(&mut self, saved: &Saved<'_>, plan: &Plan) -> Result<()> {
        for description in &saved.descriptions {
            description.prepare(self)?;
        }
        self.open_in_order(saved, plan)?;
        for (id, description) in (0u32..).zip(&saved.descriptions) {
            let own = self.copy(id as usize)?;
            description.finish(own.as_fd(), self)?;
            // What is late is only a placeholder now.
            let attributes = saved.attributes.get(&id);
            if let Some(attributes) = attributes
                && !description.is_late()
            {
                attributes::finish(attributes, own.as_fd())?;
            }
            self.forget();
        }
        self.unix.finish()?;
        self.shared.clear();
        Ok(())
    }

    fn open_in_order(&mut self, saved: &Saved<'_>, plan: &Plan) -> Result<()> {
        let order = plan::order(saved, &plan.portions);
        let mut last = HashMap::new();
        for id in &order {
            if let Some(key) = saved.descriptions[*id as usize].holder() {
                last.insert(key, *id);
            }
        }
        let sizes = plan.portions.sizes();
        let reserved = plan.scripts.iter().map(|script| script.tid);
        let reserved = reserved.collect::<HashSet<_>>();
        let mut portion = Vec::new();
        self.open.resize_with(order.len(), Own::default);
        for id in order {
            let at = id as usize;
            let own = saved.descriptions[at].open(self);
            let own = own.map_err(|error| without_room(error, saved, id))?;
            self.open[at] = Own::here(Arc::new(own));
            let key = saved.descriptions[at].holder();
            if let Some(key) = key.filter(|key| last.get(key) == Some(&id)) {
                self.shared.remove(&key);
            }
            self.forget();
            if let Some(number) = plan.portions.of(id) {
                portion.push(at);
                if portion.len() == sizes[number as usize] {
                    self.hand_over(std::mem::take(&mut portion), &reserved)?;
                }
            }
        }
        Ok(())
    }

    /// Has another process hold the next portion, and closes it here.
    fn hand_over(&mut self, ids: Vec<usize>, reserved: &HashSet<i32>) -> Result<()> {
        let numbers = ids.iter().map(|id| self.open[*id].number());
        let numbers = numbers.collect::<Vec<_>>();
        let holder = Portion::begin(&numbers, reserved)?;
        let portion = self.portions.len();
        self.portions.push(holder);
        let mut left = Vec::new();
        for (id, number) in ids.into_iter().zip(numbers) {
            let there = Some(Place { portion, number });
            let own = Own {
                here: OnceCell::new(),
                there,
            };
            left.extend(std::mem::replace(&mut self.open[id], own).here.into_inner());
        }
        sys::close::all(left.into_iter().filter_map(Arc::into_inner));
        Ok(())
    }

    /// Keeps one more, which gets the next number.
    pub fn keep(&mut self, own: OwnedFd) {
        self.open.push(Own::here(Arc::new(own)));
    }

    /// Keeps the pidfds of those that hold portions.
    pub fn keep_pidfds(&mut self) {
        let pidfds = self
            .portions
            .iter()
            .map(|portion| Own::here(portion.pidfd()));
        self.open.extend(pidfds);
    }

    /// The descriptor of a description that is in no portion.
    pub fn own(&self, id: usize) -> BorrowedFd<'_> {
        self.open[id].resident().as_fd()
    }

    /// The descriptor of a description, or a copy of it for as long as the caller has it.
    fn copy(&self, id: usize) -> Result<Arc<OwnedFd>> {
        let own = &self.open[id];
        match (own.here.get(), own.there) {
            (None, Some(place)) => {
                let fetched = self.portions[place.portion].fetch(place.number)?;
                Ok(Arc::new(fetched))
            }
            _ => Ok(own.resident().clone()),
        }
    }

    /// The same, kept until [`Pool::forget`].
    fn borrow(&self, id: usize) -> Result<BorrowedFd<'_>> {
        let own = &self.open[id];
        if own.here.get().is_none() {
            let copy = self.copy(id)?;
            self.fetched.borrow_mut().push(id);
            return Ok(own.here.get_or_init(|| copy).as_fd());
        }
        Ok(own.resident().as_fd())
    }

    /// Closes the copies that were fetched from portions.
    fn forget(&mut self) {
        for id in self.fetched.get_mut().drain(..) {
            self.open[id].here.take();
        }
    }

    /// Has descriptions act in [`Stage::Call`].
    ///
    /// # Errors
    /// Those of [`resources::fd::Kind::call`].
    pub fn call(&self, saved: &Saved<'_>, callers: &mut dyn Callers) -> Result<()> {
        let all = (0u32..).zip(&saved.descriptions);
        for (id, description) in all.filter(|(_, one)| one.acts_in(Stage::Call, &self.allow)) {
            let own = self.own(id as usize);
            description.call((DescriptionId(id), own), callers)?;
        }
        Ok(())
    }

    /// Does what waits until nothing else can fail, but for connections, and closes all but these.
    ///
    /// # Errors
    /// Those of [`resources::fd::Kind::act`].
    pub fn resume(mut self, saved: &Saved<'_>) -> Result<Finish> {
        for (id, payload) in saved.attributes_in_flight() {
            if self.open.get(id as usize).is_some() {
                attributes::resume_in_flight(payload, self.copy(id as usize)?.as_fd())?;
            }
        }
        self.enable(saved)?;
        let mut connections = Vec::new();
        for (id, description) in saved.descriptions.iter().enumerate() {
            if description.acts_in(Stage::Wake, &self.allow) {
                connections.push((id, self.open[id].resident().clone()));
            }
        }
        self.portions.clear();
        let open = self.open.drain(..).filter_map(|own| own.here.into_inner());
        sys::close::all(open.filter_map(Arc::into_inner));
        Ok(Finish {
            allow: self.allow,
            connections,
            names: self.names,
            then: RefCell::new(self.then),
        })
    }

    /// Has descriptions act in [`Stage::Enable`].
    fn enable(&self, saved: &Saved<'_>) -> Result<()> {
        let all = (0u32..).zip(&saved.descriptions);
        let acting = all.filter(|(_, one)| one.acts_in(Stage::Enable, &self.allow));
        let (needing, others): (Vec<_>, Vec<_>) = acting.partition(|one| one.1.needs().is_some());
        for (id, description) in needing.into_iter().chain(others) {
            let own = match (description.is_late(), saved.holder(id)) {
                (false, _) => self.copy(id as usize)?,
                (true, Some((pid, fd))) => Arc::new(fetch(&saved.process(pid), fd)?),
                (true, None) => continue,
            };
            description.act(Stage::Enable, own.as_fd(), &self.allow)?;
        }
        Ok(())
    }

    /// The number of each pool descriptor; none of them is a number that a task will give away.
    pub fn numbers(&mut self, saved: &Saved<'_>, plan: &Plan) -> Result<Vec<i32>> {
        let taken = Taken::of(saved, plan.fetches);
        let mut left = Vec::new();
        let here = self.open.iter_mut().filter(|own| own.there.is_none());
        for own in here {
            if taken.has(own.number()) {
                let moved = taken.copy_beside(&**own.resident());
                let moved = moved.map_err(|e| Error::kernel("cannot move a descriptor", e))?;
                let old = std::mem::replace(own, Own::here(Arc::new(moved)));
                left.extend(old.here.into_inner().and_then(Arc::into_inner));
            }
        }
        sys::close::all(left);
        let own = self.open.iter().map(Own::number);
        let mut numbers = own.collect::<Vec<_>>();
        for number in &plan.files {
            numbers.push(match *number {
                DECODED_FILE => self.decoded(&plan.decoded, &taken)?,
                number => self.pages_file(number, &taken)?,
            });
        }
        Ok(numbers)
    }

    /// The number of a descriptor of a pages file that tasks read: the reader's own, or another
    /// one.
    fn pages_file(&mut self, number: u32, taken: &Taken) -> Result<i32> {
        let object = self.reader.file(number)?;
        let failed = |errno| Error::kernel("cannot copy a descriptor", errno);
        let own = object.as_fd().ok_or(Errno::OPNOTSUPP).map_err(failed)?;
        if !taken.has(own.as_raw_fd()) {
            return Ok(own.as_raw_fd());
        }
        let copy = taken.copy_beside(own).map_err(failed)?;
        let number = copy.as_raw_fd();
        self.keep(copy);
        Ok(number)
    }

    /// The number of a memfd with pages that tasks cannot read as they are stored.
    fn decoded(&mut self, extents: &[Extent], taken: &Taken) -> Result<i32> {
        let failed = |errno| Error::kernel("cannot make a file of decoded pages", errno);
        let fd = memfd_create("decoded", MemfdFlags::CLOEXEC).map_err(failed)?;
        let moved = taken.copy_beside(&fd).map_err(failed)?;
        let placed = pages::place(&self.reader, extents)?;
        pages::fill(&self.reader, &placed, &sink::Object::new(fd), &|_| ())?;
        let number = moved.as_raw_fd();
        self.keep(moved);
        Ok(number)
    }
}

/// The refusal of a description for which the restorer's table has no room.
fn without_room(error: ResourceError, saved: &Saved<'_>, id: u32) -> Error {
    let is_full = matches!(&error, ResourceError::Kernel { source, .. }
        if Errno::from_io_error(source) == Some(Errno::MFILE));
    if !is_full {
        return error.into();
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let place = match saved.holder(id) {
        Some((pid, fd)) => format!("fd {fd} of task {pid}"),
        None => format!("description {id}"),
    };
    Error::Unfit(format!(
        "{place} has no room: the restorer needs more open files than the limit of {limit} \
         (RLIMIT_NOFILE)"
    ))
}

impl RestoreContext for Pool {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn description(&self, id: DescriptionId) -> resources::Result<BorrowedFd<'_>> {
        let at = id.0 as usize;
        let open = self.open.get(at);
        if open.is_none_or(|own| own.here.get().is_none() && own.there.is_none()) {
            let place = format!("description {}", id.0);
            return Err(ResourceError::corrupt(place, "is not open"));
        }
        self.borrow(at).map_err(|error| {
            let doing = format!("fetch description {}", id.0);
            ResourceError::kernel(doing, std::io::Error::other(error.with_causes()))
        })
    }

    fn opened(&self) -> Vec<BorrowedFd<'_>> {
        let here = self.open.iter().filter_map(|own| own.here.get());
        here.map(|own| own.as_fd()).collect()
    }

    fn shared(&mut self) -> &mut HashMap<(u16, u64), Vec<OwnedFd>> {
        &mut self.shared
    }

    fn seen(&mut self) -> &mut HashMap<Vec<u8>, FileType> {
        &mut self.seen
    }

    fn load(&mut self, space: u32, file: BorrowedFd<'_>) -> resources::Result<()> {
        let failed = |source: std::io::Error| ResourceError::kernel("cannot fill a file", source);
        let kind = self.reader.space(SpaceId(space)).map(|space| space.kind);
        if kind.is_some_and(|kind| kind != SpaceKind::Object) {
            let what = format!("is a space of another kind: {kind:?}");
            return Err(ResourceError::corrupt(format!("object {space:#x}"), what));
        }
        let extents = self.reader.runs(SpaceId(space)).map(|run| Extent {
            space: run.space,
            first_page: run.first_page,
            at: Addr(run.first_page * PAGE_BYTES),
            pages: run.pages.into(),
        });
        let extents = extents.collect::<Vec<_>>();
        let placed = pages::place(&self.reader, &extents).map_err(|e| failed(other(e)))?;
        let file = file.try_clone_to_owned().map_err(failed)?;
        let sink = sink::Object::new(file);
        let filled = pages::fill(&self.reader, &placed, &sink, &|_| ());
        filled.map(drop).map_err(|e| failed(other(e)))
    }

    fn inherited(&self, name: &[u8]) -> Option<BorrowedFd<'_>> {
        let one = self.inherited.iter().find(|one| one.0 == name);
        one.map(|one| one.1.as_fd())
    }

    fn make(&mut self, path: &Path, is_folder: bool) -> resources::Result<bool> {
        let failed = |error: Error| {
            let doing = format!("make {} again", path.display());
            ResourceError::kernel(doing, std::io::Error::other(error.with_causes()))
        };
        if self.names.is_none() {
            let names = UndoList::leave().map_err(|error| {
                failed(Error::kernel("cannot make a process for new files", error))
            })?;
            self.then.push(Box::new(names.dismisser()));
            self.names = Some(names);
        }
        let names = self.names.as_ref().expect("it was just made");
        let made = match is_folder {
            true => names.make_directory(path),
            false => names.make_file(path),
        };
        let doing = || format!("cannot make {}", path.display());
        made.map_err(|error| failed(Error::kernel(doing(), error)))
    }

    fn unix(&mut self) -> &mut unix::Deferred {
        &mut self.unix
    }

    fn on_success(&mut self, then: Box<dyn FnOnce()>) {
        self.then.push(then);
    }
}

fn other(error: pages::Error) -> std::io::Error {
    std::io::Error::other(error)
}
