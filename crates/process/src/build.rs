//! Plan → built: descriptors are open, the restore area is mapped and the scripts stand in it.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use abi::{Addr, Header, Op, PAGE_BYTES, Span};
use image::{Reader, SpaceId, SpaceKind};
use pages::{Extent, sink};
use resources::cgroup::{Cgroups, Groups};
use resources::fd::tcp::lock::{self, Leftover};
use resources::fd::{DescriptionId, Kind, RestoreContext, kind_of};
use resources::fd::{attributes, late, tags, unix};
use resources::map::layout::DECODED_FILE;
use resources::script::{Layout, ScriptId, StepAt, WordId};
use resources::{Allow, Error as ResourceError};
use rustix::fs::{FileType, MemfdFlags, memfd_create};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use sys::restore_area::RestoreArea;
use tracee::arch::SUBMIT_LOOP;

use crate::plan::Plan;
use crate::records::Saved;
use crate::{Error, InheritFd, Result};

/// The address after the last one that a task can map with four-level page tables.
const TOP: Addr = Addr(0x7fff_ffff_f000);

/// How many bytes at the end of the restore area are for the restorer's use.
const SCRATCH_BYTES: u64 = 24;

/// A plan that only has to be set in motion.
pub(crate) struct Built {
    pub plan: Plan,
    pub area: RestoreArea,
    /// The address of each script's first op.
    pub scripts: Vec<Addr>,
    pool: Pool,
    /// The control groups of the tree.
    pub groups: Groups,
}

impl Built {
    /// The header that all threads report to.
    pub fn header(&self) -> Addr {
        self.area.span().start.plus(PAGE_BYTES)
    }

    /// The address of a shared word.
    pub fn word(&self, id: WordId) -> Addr {
        words(self.area.span()).plus(4 * u64::from(id.0))
    }

    /// Room of [`SCRATCH_BYTES`] in the restore area that no script uses.
    pub fn scratch(&self) -> Addr {
        Addr(self.area.span().end.0 - SCRATCH_BYTES)
    }

    /// Where [`SUBMIT_LOOP`] stands in all tasks.
    pub fn submit_loop(&self) -> Addr {
        self.area.span().start.plus(blob::code().len() as u64)
    }

    /// The descriptor of a description here.
    pub fn own(&self, id: usize) -> BorrowedFd<'_> {
        self.pool.open[id].as_fd()
    }

    /// The address of a step's op.
    pub fn op(&self, script: ScriptId, step: StepAt) -> Addr {
        self.scripts[script.0 as usize].plus(u64::from(step.0) * Op::BYTES as u64)
    }

    /// Does what waits until nothing else can fail, but for connections ([`Built::wake`]).
    ///
    /// # Errors
    /// Those of [`Kind::resume`].
    pub fn resume(&self, saved: &Saved<'_>) -> Result<()> {
        for (id, payload) in saved.attributes_in_flight() {
            if let Some(own) = self.pool.open.get(id as usize) {
                attributes::resume_in_flight(payload, own.as_fd())?;
            }
        }
        self.resume_those(saved, |tag| tag != tags::TCP)
    }

    /// Has connections run again, in one go or, where somebody was killed meanwhile, from where
    /// they are. The result is to be dropped when the tree runs.
    ///
    /// # Errors
    /// Those of [`Kind::resume`].
    pub fn wake(&self, saved: &Saved<'_>) -> Result<Option<Leftover>> {
        let leftover = lock::release(tcp(saved))?;
        self.resume_those(saved, |tag| tag == tags::TCP)?;
        Ok(leftover)
    }

    fn resume_those(&self, saved: &Saved<'_>, which: impl Fn(u16) -> bool) -> Result<()> {
        let all = saved.descriptions.iter().enumerate();
        for (id, (tag, payload)) in all.filter(|(_, (tag, _))| which(*tag)) {
            let own = self.pool.open[id].as_fd();
            kind(*tag, id)?.resume(payload, own, &self.pool.allow)?;
        }
        Ok(())
    }

    /// The sockets that [`Built::wake`] needs; none where there are no connections.
    ///
    /// # Errors
    /// Those of [`lock::table`].
    pub fn connections(&self, saved: &Saved<'_>) -> Result<Vec<BorrowedFd<'_>>> {
        if self.pool.allow.tcp_close || lock::table(tcp(saved))?.is_none() {
            return Ok(Vec::new());
        }
        let all = saved.descriptions.iter().enumerate();
        let sockets = all.filter(|(_, (tag, _))| *tag == tags::TCP);
        Ok(sockets.map(|(id, _)| self.pool.open[id].as_fd()).collect())
    }

    /// Whether there is something to be done when the tree goes on.
    pub fn has_put_off(&self) -> bool {
        !self.pool.then.borrow().is_empty()
    }

    /// Does what was put off until the tree goes on.
    pub fn catch_up(&self) {
        self.pool.then.take().into_iter().for_each(|then| then());
    }

    /// The tree goes on.
    pub fn succeed(mut self) {
        self.groups.keep();
        sys::close::all(self.pool.open.drain(..).filter_map(Arc::into_inner));
    }
}

/// The payloads of TCP sockets.
fn tcp<'a>(saved: &'a Saved<'_>) -> impl Iterator<Item = &'a [u8]> {
    let tcp = saved.descriptions.iter().filter(|one| one.0 == tags::TCP);
    tcp.map(|(_, payload)| &**payload)
}

fn words(area: Span) -> Addr {
    area.start.plus(PAGE_BYTES + Header::BYTES as u64)
}

/// Opens what the tasks inherit and lays out the restore area.
pub(crate) fn build(
    plan: Plan,
    (saved, cgroups): (&Saved<'_>, Option<&Cgroups>),
    reader: &Arc<Reader>,
    allow: &Allow,
    inherit: &[InheritFd],
) -> Result<Built> {
    let mut pool = Pool::new(allow.clone(), reader.clone(), inherit);
    pool.open_all(saved)?;
    let groups = match cgroups {
        Some(cgroups) => Groups::prepare(cgroups, &allow.cgroups)?,
        None => Groups::default(),
    };
    for join in &plan.groups {
        let file = groups.open(&join.hierarchy, &join.path, false)?;
        pool.open.push(Arc::new(file));
    }
    let numbers = pool.numbers(saved, &plan)?;
    let words_bytes = (u64::from(plan.words) * 4).next_multiple_of(64);
    let sizes = plan.scripts.iter().map(|planned| {
        let ops = planned.script.ops_bytes() as u64;
        let data = planned.script.data_bytes() as u64;
        (ops.next_multiple_of(64), data.next_multiple_of(64))
    });
    let sizes = sizes.collect::<Vec<_>>();
    let head = PAGE_BYTES + Header::BYTES as u64 + words_bytes;
    let head = head.next_multiple_of(64);
    let total = head + sizes.iter().map(|(ops, data)| ops + data).sum::<u64>() + SCRATCH_BYTES;
    let bytes = total.next_multiple_of(PAGE_BYTES);
    let memory = RestoreArea::memory(bytes, &code());
    let memory = memory.map_err(|e| Error::kernel("cannot make the restore area", e))?;
    let area = place_area(saved, &plan.taken, (bytes, memory.as_fd()))?;
    // Closed with the others.
    pool.open.push(Arc::new(memory));
    let span = area.span();
    // A task whose maker was killed finds that out by a call that fails: it must not stay.
    let header = Header {
        fatal: 1,
        ..Header::default()
    };
    area.write(span.start.plus(PAGE_BYTES), &header.to_bytes());
    let mut at = span.start.plus(head);
    let mut places = Vec::with_capacity(sizes.len());
    for (ops, data) in sizes {
        places.push((at, at.plus(ops)));
        at = at.plus(ops + data);
    }
    let scripts = places.iter().map(|place| place.0).collect::<Vec<_>>();
    for (planned, (ops, data)) in plan.scripts.iter().zip(places) {
        let layout = Layout {
            ops,
            data,
            words: words(span),
            pool: &numbers,
            scripts: &scripts,
            area: span,
            top: TOP,
        };
        let (op_bytes, data_bytes) = planned.script.compile(&layout);
        area.write(ops, &op_bytes);
        area.write(data, &data_bytes);
    }
    Ok(Built {
        plan,
        area,
        scripts,
        pool,
        groups,
    })
}

/// The blob, and what it needs no op for behind it.
fn code() -> Vec<u8> {
    [blob::code(), &SUBMIT_LOOP[..]].concat()
}

/// Maps the restore area where no task has a mapping and this process has none either.
fn place_area(
    saved: &Saved<'_>,
    more: &[Span],
    (bytes, memory): (u64, BorrowedFd<'_>),
) -> Result<RestoreArea> {
    const LOWEST: Addr = Addr(0x10_0000);
    // Stacks may grow down to this distance of their neighbour (mmap(2), "stack guard gap").
    const MARGIN_BYTES: u64 = 2 << 20;
    let maps = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let mut taken = maps
        .map(resources::map::memory::Mapping::span)
        .chain(more.iter().copied())
        .collect::<Vec<_>>();
    taken.sort_unstable();
    // Calls of 32 bits only reach what is below.
    let top = match saved.has_32_bit_code() {
        false => TOP,
        true => Addr(1 << 32),
    };
    let taken = taken.into_iter().filter(|span| span.start < top);
    let mut start = LOWEST;
    let mut last = None;
    for span in taken.chain([Span {
        start: top,
        end: top,
    }]) {
        while start.plus(bytes + MARGIN_BYTES) <= span.start {
            match RestoreArea::map(Span::new(start, bytes), memory) {
                Ok(area) => return Ok(area),
                Err(error) => last = Some(error),
            }
            start = start.plus(64 << 20);
        }
        start = start.max(span.end.plus(MARGIN_BYTES).page_start());
    }
    let source = last.unwrap_or_else(|| std::io::ErrorKind::OutOfMemory.into());
    Err(Error::kernel(
        format!("no address is free for a restore area of {bytes} bytes"),
        source,
    ))
}

/// The descriptors that tasks inherit.
struct Pool {
    allow: Allow,
    reader: Arc<Reader>,
    inherited: Vec<(Vec<u8>, Arc<OwnedFd>)>,
    open: Vec<Arc<OwnedFd>>,
    shared: HashMap<(u16, u64), Vec<OwnedFd>>,
    seen: HashMap<Vec<u8>, FileType>,
    unix: unix::Deferred,
    then: RefCell<Vec<Box<dyn FnOnce()>>>,
}

/// The numbers of descriptors that tasks will give away: those of theirs, and 0, which must be free
/// for a while.
struct Taken(BTreeSet<i32>);

impl Taken {
    fn of(saved: &Saved<'_>) -> Self {
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
    fn new(allow: Allow, reader: Arc<Reader>, inherit: &[InheritFd]) -> Self {
        let inherited = inherit
            .iter()
            .map(|one| (one.stands_for.name(), one.fd.clone()));
        let inherited = inherited.collect();
        let (open, then) = (Vec::new(), RefCell::default());
        let (shared, seen) = (HashMap::new(), HashMap::new());
        Self {
            allow,
            reader,
            inherited,
            open,
            shared,
            seen,
            unix: unix::Deferred::default(),
            then,
        }
    }

    fn open_all(&mut self, saved: &Saved<'_>) -> Result<()> {
        for (id, (tag, payload)) in saved.descriptions.iter().enumerate() {
            kind(*tag, id)?.prepare(payload, self)?;
        }
        for (id, (tag, payload)) in saved.descriptions.iter().enumerate() {
            let own = kind(*tag, id)?.open(payload, self)?;
            self.open.push(Arc::new(own));
        }
        for (id, (tag, payload)) in (0u32..).zip(&saved.descriptions) {
            let own = self.open[id as usize].clone();
            kind(*tag, id as usize)?.finish(payload, own.as_fd(), self)?;
            // What is late is only a placeholder now.
            let attributes = saved.attributes.get(&id);
            if let Some(attributes) = attributes
                && !late::is_late((*tag, payload))?
            {
                attributes::finish(attributes, own.as_fd())?;
            }
        }
        self.unix.finish()?;
        self.shared.clear();
        Ok(())
    }

    /// The number of each pool descriptor; none of them is a number that a task will give away.
    fn numbers(&mut self, saved: &Saved<'_>, plan: &Plan) -> Result<Vec<i32>> {
        let taken = Taken::of(saved);
        let mut left = Vec::new();
        for own in &mut self.open {
            if taken.has(own.as_raw_fd()) {
                let moved = taken.copy_beside(&**own);
                let moved = moved.map_err(|e| Error::kernel("cannot move a descriptor", e))?;
                left.extend(Arc::into_inner(std::mem::replace(own, Arc::new(moved))));
            }
        }
        sys::close::all(left);
        let own = self.open.iter().map(|own| own.as_raw_fd());
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
        self.open.push(Arc::new(copy));
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
        self.open.push(Arc::new(moved));
        Ok(number)
    }
}

/// The kind of description `id`, whose record has this tag.
pub(crate) fn kind(tag: u16, id: usize) -> Result<&'static dyn Kind> {
    let unknown = || {
        let what = format!("has the unknown kind {tag}");
        Error::from(ResourceError::corrupt(format!("description {id}"), what))
    };
    kind_of(tag).ok_or_else(unknown)
}

impl RestoreContext for Pool {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn description(&self, id: DescriptionId) -> resources::Result<BorrowedFd<'_>> {
        let open = self.open.get(id.0 as usize);
        let missing = || ResourceError::corrupt(format!("description {}", id.0), "is not open");
        open.map(|own| own.as_fd()).ok_or_else(missing)
    }

    fn opened(&self) -> Vec<BorrowedFd<'_>> {
        self.open.iter().map(|own| own.as_fd()).collect()
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

    fn unix(&mut self) -> &mut unix::Deferred {
        &mut self.unix
    }

    fn on_success(&mut self, then: Box<dyn FnOnce()>) {
        self.then.get_mut().push(then);
    }
}

fn other(error: pages::Error) -> std::io::Error {
    std::io::Error::other(error)
}
