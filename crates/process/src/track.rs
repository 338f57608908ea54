//! The tracked memory of a tree: which tasks have a userfaultfd, which pages must be read.
//!
//! Nothing here is ever told what the target does: each time, the mappings are listed, those that
//! are not tracked yet are registered, and the kernel is asked what was written. What is not known
//! to be as it was is read: mappings that are new, have moved or cannot be registered, tasks that
//! have called execve(2), and everything after a round that failed.
//!
//! - What: memory of tasks that is tracked between dumps
//! - Kept: their memory; that it is tracked is not seen.
//! - Refused: "process 1 of its pid namespace, of which the tracker would be a child".
//! - CRIU 4.2: the kernel tracks it by soft-dirty bits, with no process.

mod bits;

use std::collections::HashMap;
use std::os::fd::AsFd;

use abi::spans::Spans;
use abi::{Addr, PAGE_BYTES, Span};
use freeze::returned::check_returned;
use freeze::tracker::{Client, Means, TrackedTask};
use freeze::{Frozen, uffd};
use image::{ImageId, Reader, SpaceId, Writer};
use memory::scan::{Area, ScanResult};
use memory::track::{self, TrackResult};
use resources::map::listing::{Backing, Listed};
use resources::map::{placed, registered};
use rustix::io::Errno;
use sys::kcmp::{self, Shared};
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

pub(crate) use self::bits::{Cleared, Way};
use crate::{Error, Result};

/// The memory of one task as it was listed while the task was stopped.
pub(crate) struct Mapped {
    pub process: Process,
    pub start_ticks: u64,
    maps: Vec<Map>,
    /// What soft-dirty bits told while it was stopped.
    changes: Option<Changes>,
}

/// A mapping in which a task may have pages of its own.
struct Map {
    area: Area,
    /// Whether it is to be tracked.
    tracked: bool,
    by: By,
}

/// By whom a mapping is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Nobody,
    Us,
    /// Since it was listed.
    UsNow,
    /// What was written before they looked is not known, and what was before we look is theirs.
    Another,
}

/// What a task's pages are, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// To be read.
    pub written: Spans,
    /// As they were at the last reset.
    pub unwritten: Spans,
}

/// The tracked tasks of a tree.
pub(crate) struct Tracking {
    client: Client,
    tasks: Vec<TrackedTask>,
}

impl Tracking {
    /// Takes over what the tracker of the tree under `root` holds; it is left behind where there is
    /// none.
    ///
    /// # Errors
    /// Those of [`Way::check`] and [`Client::find_or_start`]; [`resources::Error::Unsupported`] for
    /// process 1 of this namespace, whose child the tracker would become.
    pub fn start(root: i32) -> Result<Self> {
        if root == sys::init::NUMBER {
            let what = "process 1 of its pid namespace, of which the tracker would be a child,";
            return Err(resources::Error::unsupported(root, what).into());
        }
        Way::here().check(root)?;
        Ok(Self::new(Client::find_or_start(root)?))
    }

    /// As [`Self::start`]; none where there is no tracker.
    ///
    /// # Errors
    /// Those of [`Client::find`].
    pub fn find(root: i32) -> Result<Option<Self>> {
        Ok(Client::find(root)?.map(Self::new))
    }

    fn new(mut client: Client) -> Self {
        let tasks = std::mem::take(&mut client.tasks);
        Self { client, tasks }
    }

    /// The image up to which writes are known.
    pub fn image(&self) -> Option<ImageId> {
        self.client.image
    }

    /// The conversation with the tracker, which holds everything.
    pub fn client(self) -> Client {
        self.client
    }

    /// Gives every living task of a stopped tree a userfaultfd if it has none, lists what they have
    /// mapped, and has that tracked: while they are stopped, as a list that is old would cut their
    /// mappings in pieces, which they see (mremap(2) moves no two of them).
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`] for a task that cannot be tracked.
    pub fn enroll(&mut self, frozen: &mut Frozen) -> Result<Vec<Mapped>> {
        let mut known = std::mem::take(&mut self.tasks);
        let owners = memory_owners(frozen);
        let limit = frozen.limit;
        let mut all = Vec::new();
        for task in frozen.tasks.iter_mut().filter(|task| !task.is_zombie()) {
            limit.check(task.pid())?;
            if owners.get(&task.pid()) != Some(&task.pid()) {
                log::info!("pid {} uses another's memory: not tracked", task.pid());
                continue;
            }
            let listed = task.maps()?;
            placed::refuse(task.pid(), &listed)?;
            resources::map::memory::check_secret(&listed, task.pid())?;
            check_returned(task, &listed)?;
            let start_ticks = task.stat()?.0.start_ticks;
            let mut mapped = Mapped::new((&task.process, start_ticks), &listed);
            let at = known
                .iter()
                .position(|known| (known.pid, known.start_ticks) == (task.pid(), start_ticks));
            let held = at.map(|at| known.swap_remove(at));
            if Way::here() == Way::Bits {
                all.extend(self.take_bits(mapped, held)?);
                continue;
            }
            // One of a memory that the task has left by execve(2) is of no use.
            let known = mapped.are_tracked()?;
            let of_use = mapped.maps.iter().zip(&known);
            let of_use = of_use
                .filter(|(map, _)| map.tracked)
                .any(|(_, known)| *known);
            let held = held.filter(|_| of_use).map(|held| held.by);
            let uffd = match held {
                Some(Means::Protection(uffd)) => uffd,
                _ => uffd::userfaultfd(task, &listed, true, Features::WP_ASYNC)?,
            };
            if self.client.image.is_some() && mapped.has_new(&known) {
                // Should this round end before the marks in what is new are lifted, the next one
                // must not take what is registered then for known.
                self.client.begin()?;
            }
            let is_anothers = mapped.register(&uffd, &known);
            if is_anothers || listed.iter().any(Listed::has_huge_pages) {
                mapped.leave_out(&task.smaps()?);
            }
            self.tasks.push(TrackedTask {
                pid: task.pid(),
                start_ticks,
                by: Means::Protection(uffd),
            });
            all.push(mapped);
        }
        Ok(all)
    }

    /// Has the tracker hold what is tracked now, and tells it that writes are about to be
    /// forgotten.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn begin(&self) -> Result<()> {
        self.client.hold(&self.tasks)?;
        Ok(self.client.begin()?)
    }

    /// Takes away the marks of an earlier tracking that are left where tracking begins, before
    /// [`Self::look`] forgets what was written: a page with one may be written without being found.
    /// The task may run.
    ///
    /// # Errors
    /// [`Error::Pages`], [`Error::Kernel`].
    pub fn lift_marks(&self, mapped: &Mapped) -> Result<()> {
        let task = self.tasks.iter().find(|task| task.pid == mapped.pid());
        let Some(uffd) = task.and_then(|task| task.by.uffd()) else {
            return Ok(());
        };
        // Where writes are not all known, a round may have ended before this: no mark is trusted.
        let all = self.image().is_none();
        let maps = mapped.maps.iter();
        let maps = maps.filter(|map| map.by == By::UsNow || (map.by == By::Us && all));
        let spans = maps.map(|map| map.area.span);
        let marked = match track::marked(&mapped.process, &spans.collect::<Vec<_>>()) {
            Err(memory::Error::Gone { .. }) => return Ok(()),
            marked => marked?,
        };
        for span in marked {
            match lift(uffd, span) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => break,
                lifted => lifted.map_err(|error| {
                    let doing = format!(
                        "cannot lift the protection of {span} of pid {}",
                        mapped.pid()
                    );
                    Error::kernel(doing, error)
                })?,
            }
        }
        Ok(())
    }

    /// Finds what was written, and has the kernel forget it. None for a task that has ended.
    ///
    /// # Errors
    /// [`Error::Pages`].
    pub fn take_written(&self, mapped: &Mapped) -> Result<Option<Changes>> {
        if let Some(changes) = &mapped.changes {
            return Ok(Some(changes.clone()));
        }
        let mut all = Vec::new();
        for reset in [true, false] {
            let maps = mapped.maps.iter();
            let maps = maps.filter(|map| (map.by != By::Another) == reset);
            let maps = maps.collect::<Vec<_>>();
            let areas = maps.iter().map(|map| map.area).collect::<Vec<_>>();
            let found = match track::tracked(&mapped.process, &areas, reset) {
                Err(memory::Error::Gone { .. }) => return Ok(None),
                found => found?,
            };
            let known = maps.iter().map(|map| map.by == By::Us);
            all.extend(found.into_iter().zip(known));
        }
        Ok(Some(Changes::of(all)))
    }

    /// The descriptors by which tasks' memory is tracked, for [`is_ours`].
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn owners(&self) -> Result<HashMap<i32, Uffd>> {
        let owner = |(pid, uffd): (i32, &Uffd)| {
            let fd = uffd.as_fd().try_clone_to_owned();
            let fd = fd.map_err(|error| Error::kernel("cannot keep a userfaultfd", error))?;
            Ok((pid, fd.into()))
        };
        let tasks = self.tasks.iter();
        let uffds = tasks.filter_map(|task| Some((task.pid, task.by.uffd()?)));
        uffds.map(owner).collect()
    }
}

impl Changes {
    /// Of what was found in areas; where it is not known what was written, all was.
    fn of(areas: impl IntoIterator<Item = (TrackResult, bool)>) -> Self {
        let (mut written, mut unwritten) = (Vec::new(), Vec::new());
        for (found, known) in areas {
            written.extend(found.written);
            let kind = if known { &mut unwritten } else { &mut written };
            kind.extend(found.unwritten);
        }
        Self {
            written: Spans::of(written),
            unwritten: Spans::of(unwritten),
        }
    }
}

/// All pages that were found, written or not.
pub(crate) fn all_of(found: TrackResult) -> ScanResult {
    ScanResult {
        private: found.written.and(&found.unwritten),
        guards: found.guards,
    }
}

/// Whether a tracked mapping, of which `span` is a part, is tracked by `uffd` and not by somebody
/// else's: the kernel lets only the one register it again, which changes nothing.
pub(crate) fn is_ours(uffd: &Uffd, span: Span) -> bool {
    uffd.register(span, Modes::WP).is_ok()
}

/// Lifts the protection of `span`, and of what is still tracked of it where that is not all: the
/// rest is taken for new when it is tracked again.
fn lift(uffd: &Uffd, span: Span) -> std::io::Result<()> {
    let gone = |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NOENT);
    match uffd.write_protect(span, false) {
        Err(error) if gone(&error) => {}
        done => return done,
    }
    for page in span.start.page()..span.end.page() {
        match uffd.write_protect(Span::new(Addr::of_page(page), PAGE_BYTES), false) {
            Err(error) if gone(&error) => {}
            done => done?,
        }
    }
    Ok(())
}

impl Mapped {
    fn new((process, start_ticks): (&Process, u64), listed: &[Listed]) -> Self {
        let mut maps = Vec::new();
        for listed in listed.iter().filter(|listed| !listed.shared) {
            let file = match listed.backing() {
                Backing::Anonymous => false,
                Backing::File => true,
                Backing::Vdso | Backing::Vvar | Backing::Special => continue,
            };
            const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
            maps.push(Map {
                area: Area {
                    span: listed.span,
                    file,
                    apart: false,
                },
                // A tracked file is brought in page by page, and of one that cannot be written the
                // task has no pages or few. Huge pages are not told of in parts.
                tracked: (!file || listed.prot & PROT_WRITE != 0) && !listed.has_huge_pages(),
                by: By::Nobody,
            });
        }
        Self {
            process: process.clone(),
            start_ticks,
            maps,
            changes: None,
        }
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Which of it is tracked.
    fn are_tracked(&self) -> Result<Vec<bool>> {
        let spans = self.maps.iter().map(|map| map.area.span);
        Ok(track::are_tracked(
            &self.process,
            &spans.collect::<Vec<_>>(),
        )?)
    }

    /// Whether anything is to be tracked and is not yet `known`.
    fn has_new(&self, known: &[bool]) -> bool {
        let mut maps = self.maps.iter().zip(known);
        maps.any(|(map, known)| map.tracked && !known)
    }

    /// Registers what is to be tracked, and finds what of the `known` somebody else tracks.
    /// Gives whether somebody else has any of it.
    fn register(&mut self, uffd: &Uffd, known: &[bool]) -> bool {
        let (mut is_anothers, pid) = (false, self.pid());
        for (map, known) in self.maps.iter_mut().zip(known) {
            if !*known && !map.tracked {
                continue;
            }
            // One that is of a kind that cannot be tracked, or somebody else's, is read in full.
            match uffd.register(map.area.span, Modes::WP) {
                Ok(()) => map.by = if *known { By::Us } else { By::UsNow },
                Err(error) => {
                    is_anothers |= Errno::from_io_error(&error) == Some(Errno::BUSY);
                    map.by = if *known { By::Another } else { By::Nobody };
                    let span = map.area.span;
                    log::debug!("pid {pid}: {span} is not tracked: {error}");
                }
            }
        }
        is_anothers
    }

    /// Leaves out what a program gets pages of by a userfaultfd: to read it while it is given up
    /// would be a fault, of which the program hears. The dump at the end has it. `listed` are the
    /// mappings with their flags.
    fn leave_out(&mut self, listed: &[Listed]) {
        let faults = |map: &Map| {
            let mut listed = listed.iter();
            let listed = listed.find(|listed| listed.span == map.area.span);
            let modes = listed.map_or(0, registered::modes);
            let is_tracked = map.by != By::Nobody;
            modes & !registered::PROTECTION != 0 || modes != 0 && !is_tracked
        };
        self.maps.retain(|map| !faults(map));
    }
}

/// The living tasks, and which of them is the first that has the memory of each: mostly itself.
pub(crate) fn memory_owners(frozen: &Frozen) -> HashMap<i32, i32> {
    let living = frozen.tasks.iter().filter(|task| !task.is_zombie());
    let mut processes = living.map(|task| &task.process).collect::<Vec<_>>();
    let order = |one: &&Process, other: &&Process| {
        let compared = kcmp::compare(one, other, Shared::Memory);
        compared.unwrap_or_else(|_| one.pid().cmp(&other.pid()))
    };
    // A stable sort: the first stays the first of those that are equal.
    processes.sort_by(order);
    let groups = processes.chunk_by(|one, other| order(one, other).is_eq());
    let owners = groups.flat_map(|group| group.iter().map(|one| (one.pid(), group[0].pid())));
    owners.collect()
}

/// Takes from mappings that no userfaultfd of the tree has the mark of being tracked from outside:
/// it makes no difference to a task.
///
/// # Errors
/// [`Error::Pages`].
pub(crate) fn forget_watched(process: &Process, listed: &mut [Listed]) -> Result<()> {
    let mut watched = listed
        .iter_mut()
        .filter(|map| is_watched(map))
        .collect::<Vec<_>>();
    let spans = watched.iter().map(|listed| listed.span).collect::<Vec<_>>();
    let tracked = track::are_tracked(process, &spans)?;
    for (listed, tracked) in watched.iter_mut().zip(tracked) {
        if tracked {
            listed.flags.retain(|flag| flag != b"uw");
        }
    }
    Ok(())
}

/// Whether all mappings that were tracked when they were listed still are.
///
/// # Errors
/// [`Error::Pages`].
pub(crate) fn are_watched(process: &Process, listed: &[Listed]) -> Result<bool> {
    let watched = listed.iter().filter(|map| is_watched(map));
    let spans = watched.map(|listed| listed.span).collect::<Vec<_>>();
    Ok(!track::are_tracked(process, &spans)?.contains(&false))
}

fn is_watched(listed: &Listed) -> bool {
    listed.has(b"uw") && !listed.has(b"um")
}

/// What pages of a layer's parent can be left where they are.
pub(crate) struct Inheritance {
    is_possible: bool,
}

impl Inheritance {
    /// From `parent`, if it is the image up to which writes are `known`; else from none.
    pub fn new(parent: Option<&Reader>, known: Option<ImageId>) -> Self {
        let believed = parent.filter(|parent| Some(parent.id()) == known);
        if let (Some(parent), None) = (parent, believed) {
            log::warn!(
                "writes since image {} are not all known: everything is read",
                parent.id()
            );
        }
        let is_possible = believed.is_some();
        Self { is_possible }
    }

    /// Whether anything can be.
    pub fn is_possible(&self) -> bool {
        self.is_possible
    }

    /// Leaves those pages of `unwritten` to the parent of `writer`'s image that it describes, and
    /// tells which those are.
    ///
    /// # Errors
    /// [`Error::Image`].
    pub fn inherit_unwritten(
        &self,
        writer: &Writer,
        space: SpaceId,
        unwritten: &[Span],
    ) -> Result<Spans> {
        if !self.is_possible() || unwritten.is_empty() {
            return Ok(Spans::new());
        }
        let ranges = unwritten.iter();
        let ranges = ranges.map(|span| span.start.page()..span.end.page());
        let described = writer.inherit_described(space, &ranges.collect::<Vec<_>>())?;
        Ok(described.into_iter().map(Span::of_pages).collect())
    }
}
