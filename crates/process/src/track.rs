//! The tracked memory of a tree: which tasks have a userfaultfd, which pages must be read.
//!
//! Nothing here is ever told what the target does: each time, the mappings are listed, those that
//! are not tracked yet are registered, and the kernel is asked what was written. What is not known
//! to be as it was is read: mappings that are new, have moved or cannot be registered, tasks that
//! have called execve(2), and everything after a round that failed.

use std::ops::Range;

use abi::{Addr, Span};
use image::{ImageId, Reader, SpaceId};
use pages::scan::Area;
use pages::track::{self, subtract};
use resources::map::listing::{self, Backing, Listed};
use sys::kcmp::{self, Shared};
use sys::uffd::{Features, Modes};

use crate::freeze::{Frozen, Task};
use crate::tracker::{Client, TrackedTask};
use crate::{Error, Result, uffd};

/// The memory of one task as it was listed while the task was stopped.
pub(crate) struct Mapped {
    pub pid: i32,
    maps: Vec<Map>,
}

/// A mapping in which a task may have pages of its own.
struct Map {
    area: Area,
    /// Whether it is to be tracked.
    tracked: bool,
    /// Whether it is tracked since it was listed.
    new: bool,
}

/// What a task's pages are, in ascending order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// To be read.
    pub written: Vec<Span>,
    /// As they were at the last reset.
    pub unwritten: Vec<Span>,
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
    /// Those of [`Client::find_or_start`].
    pub fn start(root: i32) -> Result<Self> {
        Client::find_or_start(root).map(Self::new)
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
        let owners = owners(frozen);
        let mut all = Vec::new();
        for task in frozen.tasks.iter_mut().filter(|task| !task.is_zombie()) {
            if !owners.contains(&task.pid) {
                log::info!("pid {} uses another's memory: not tracked", task.pid);
                continue;
            }
            let listed = list(task)?;
            crate::collect::check_returned(task, &listed)?;
            let mut mapped = Mapped::new(task.pid, &listed)?;
            let start_ticks = task.stat()?.0.start_ticks;
            let at = known
                .iter()
                .position(|known| (known.pid, known.start_ticks) == (task.pid, start_ticks));
            let held = at.map(|at| known.swap_remove(at));
            // One of a memory that the task has left by execve(2) is of no use.
            let known = mapped.are_tracked()?;
            let of_use = mapped.maps.iter().zip(&known);
            let of_use = of_use
                .filter(|(map, _)| map.tracked)
                .any(|(_, known)| *known);
            let tracked = match held.filter(|_| of_use) {
                Some(held) => held,
                None => TrackedTask {
                    pid: task.pid,
                    start_ticks,
                    uffd: uffd::userfaultfd(task, &listed, true, Features::WP_ASYNC)?,
                },
            };
            mapped.register(&tracked, &known)?;
            self.tasks.push(tracked);
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
        self.client.begin()
    }

    /// Finds what was written, and has the kernel forget it. None for a task that has ended.
    ///
    /// # Errors
    /// [`Error::Pages`].
    pub fn look(&self, mapped: &Mapped) -> Result<Option<Changes>> {
        let areas = mapped.maps.iter().map(|map| map.area).collect::<Vec<_>>();
        let found = match track::tracked(mapped.pid, &areas, true) {
            Err(pages::Error::Gone { .. }) => return Ok(None),
            found => found?,
        };
        let mut changes = Changes::default();
        for (found, map) in found.into_iter().zip(&mapped.maps) {
            if map.new {
                // What counts as protected here was so somewhere else: an older kernel has moved
                // it along with its pages.
                changes
                    .written
                    .extend(merge(&found.written, &found.unwritten));
            } else {
                changes.written.extend(found.written);
                changes.unwritten.extend(found.unwritten);
            }
        }
        Ok(Some(changes))
    }
}

impl Mapped {
    fn new(pid: i32, listed: &[Listed]) -> Result<Self> {
        let mut maps = Vec::new();
        for listed in listed.iter().filter(|listed| !listed.shared) {
            let file = match listed.backing() {
                Backing::Anonymous => false,
                Backing::File => true,
                Backing::Vdso | Backing::Vvar | Backing::Special => continue,
            };
            if listed.name.starts_with(b"/anon_hugepage") {
                let what = format!("{}: huge page mapping (hugetlbfs)", listed.place());
                return Err(resources::Error::unsupported(pid, what).into());
            }
            const PROT_WRITE: u32 = 2;
            maps.push(Map {
                area: Area {
                    span: listed.span,
                    file,
                    apart: false,
                },
                // A tracked file is brought in page by page, and of one that cannot be written the
                // task has no pages or few.
                tracked: !file || listed.prot & PROT_WRITE != 0,
                new: false,
            });
        }
        Ok(Self { pid, maps })
    }

    /// Which of it is tracked.
    fn are_tracked(&self) -> Result<Vec<bool>> {
        let spans = self.maps.iter().map(|map| map.area.span);
        Ok(track::are_tracked(self.pid, &spans.collect::<Vec<_>>())?)
    }

    /// Registers what is to be tracked and is not yet `known`, and takes away what marks of an
    /// earlier tracking are left there.
    fn register(&mut self, task: &TrackedTask, known: &[bool]) -> Result<()> {
        for (map, known) in self.maps.iter_mut().zip(known) {
            if *known || !map.tracked {
                continue;
            }
            // One that is of a kind that cannot be tracked, or somebody else's, is read in full.
            match task.uffd.register(map.area.span, Modes::WP) {
                Ok(()) => map.new = true,
                Err(error) => {
                    let span = map.area.span;
                    log::debug!("pid {}: {span} is not tracked: {error}", self.pid);
                }
            }
        }
        let new = self.maps.iter().filter(|map| map.new);
        let new = new.map(|map| map.area.span).collect::<Vec<_>>();
        let marked = track::are_protected(self.pid, &new)?;
        for (span, _) in new.iter().zip(marked).filter(|(_, marked)| *marked) {
            let cleared = task.uffd.write_protect(*span, false);
            let doing = || format!("cannot lift the protection of {span} of pid {}", self.pid);
            cleared.map_err(|error| Error::kernel(doing(), error))?;
        }
        Ok(())
    }
}

/// The mappings of a stopped task, without their flags.
fn list(task: &Task) -> Result<Vec<Listed>> {
    let understood = listing::parse(&task.read("maps")?);
    understood.map_err(|line| {
        let invalid = std::io::ErrorKind::InvalidData;
        Error::kernel(
            format!("cannot understand {line:?}"),
            std::io::Error::from(invalid),
        )
    })
}

/// The living tasks, of those that have one memory together (vfork(2)) only the first.
fn owners(frozen: &Frozen) -> Vec<i32> {
    let living = frozen.tasks.iter().filter(|task| !task.is_zombie());
    let mut pids = living.map(|task| task.pid).collect::<Vec<_>>();
    let order = |one: &i32, other: &i32| {
        kcmp::compare(*one, *other, Shared::Memory).unwrap_or_else(|_| one.cmp(other))
    };
    // A stable sort: the first stays the first of those that are equal.
    pids.sort_by(order);
    pids.dedup_by(|one, other| order(one, other).is_eq());
    pids
}

/// Takes from mappings the mark of being tracked from outside: it makes no difference to a task.
/// Who tracks itself holds a userfaultfd, which is refused as a descriptor.
///
/// # Errors
/// [`Error::Pages`].
pub(crate) fn forget_watched(pid: i32, listed: &mut [Listed]) -> Result<()> {
    let mut watched = listed
        .iter_mut()
        .filter(|map| is_watched(map))
        .collect::<Vec<_>>();
    let spans = watched.iter().map(|listed| listed.span).collect::<Vec<_>>();
    let tracked = track::are_tracked(pid, &spans)?;
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
pub(crate) fn are_watched(pid: i32, listed: &[Listed]) -> Result<bool> {
    let watched = listed.iter().filter(|map| is_watched(map));
    let spans = watched.map(|listed| listed.span).collect::<Vec<_>>();
    Ok(!track::are_tracked(pid, &spans)?.contains(&false))
}

fn is_watched(listed: &Listed) -> bool {
    listed.has(b"uw") && !listed.has(b"um")
}

/// What pages of a layer's parent can be left where they are.
pub(crate) struct Inheritance<'a> {
    parent: Option<&'a Reader>,
}

impl<'a> Inheritance<'a> {
    /// From `parent`, if it is the image up to which writes are `known`; else from none.
    pub fn new(parent: Option<&'a Reader>, known: Option<ImageId>) -> Self {
        let believed = parent.filter(|parent| Some(parent.id()) == known);
        if let (Some(parent), None) = (parent, believed) {
            log::warn!(
                "writes since image {} are not all known: everything is read",
                parent.id()
            );
        }
        Self { parent: believed }
    }

    /// Whether anything can be.
    pub fn is_possible(&self) -> bool {
        self.parent.is_some()
    }

    /// The part of `unwritten` that the parent describes, and the part that it does not.
    pub fn split(&self, space: SpaceId, unwritten: &[Span]) -> [Vec<Span>; 2] {
        let Some(parent) = self.parent else {
            return [Vec::new(), unwritten.to_vec()];
        };
        let of_pages = |pages: Range<u64>| Span {
            start: Addr::of_page(pages.start),
            end: Addr::of_page(pages.end),
        };
        let described = unwritten.iter().flat_map(|span| {
            let pieces = parent.described(space, span.start.page(), span.pages());
            pieces.into_iter().map(of_pages)
        });
        let described = described.collect::<Vec<_>>();
        let rest = subtract(unwritten, &described);
        [described, rest]
    }
}

/// Joins two lists of spans, each sorted and both disjoint.
pub(crate) fn merge(one: &[Span], other: &[Span]) -> Vec<Span> {
    let mut all = [one, other].concat();
    all.sort();
    all.dedup_by(|next, last| {
        let joins = last.end == next.start;
        if joins {
            last.end = next.end;
        }
        joins
    });
    all
}
