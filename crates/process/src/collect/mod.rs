//! Frozen → inventory: everything but the contents of memory.

mod auxv;
mod cgroups;
mod descriptors;
mod facts;
mod files;
mod fitness;
mod found;
mod how;
mod leader;
pub(crate) mod memory_view;
mod outside;
mod patience;
mod policies;
mod questions;
mod registered;
mod segments;
mod sharing;
mod spaces;
mod stops;
mod thread;
mod tree;
mod untold;
mod vdso;
mod watches;
mod working;

use std::collections::HashSet;
use std::ops::Range;

use abi::Span;
use freeze::Frozen;
use freeze::returned;
use image::{Record, Run, SpaceId, SpaceKind, Writer};
use pages::Extent;
use prost::Message;
use resources::Allow;
use resources::arch::xstate;
use resources::fd::tcp::backlog;
use resources::fd::tcp::lock::{Leftover, Lock};
use resources::fd::tcp::newcomers::Held;
use resources::fd::{locks, table, userfaultfd};
use resources::map::vdso::Vdso;
use resources::ns;
use resources::task::semaphores;

use crate::clocks::TreeClocks;
use crate::homework::Homework;
use crate::links::{self, Link};
use crate::obstacles::Obstacles;
use crate::plan;
use crate::records::{What, record, tag};
use crate::undo::Undo;
use crate::{Result, parent};
pub(crate) use files::{Contents, Object, fetch};
use found::{Found, OneTask};
pub(crate) use how::How;
use memory_view::MemoryView;
use outside::{Listed, Outside};
pub(crate) use registered::cached_in;
use sharing::Sharing;
use sys::process::Process;

/// What was found, ready to be written.
pub(crate) struct Inventory {
    pub records: Vec<Record>,
    /// Pages of the tasks' own.
    pub memory: Vec<spaces::Memory>,
    /// Pages that may be copies of the same page of a file.
    pub copies: Vec<(SpaceId, Range<u64>)>,
    /// Pages that children share with their parents.
    pub same: Vec<Run>,
    /// Contents of shared memory and deleted files.
    pub objects: Vec<Object>,
    /// What the parent image has: spaces and how many pages from the first on.
    pub kept: Vec<(SpaceId, u64)>,
    /// The vDSOs that are not this host's, with their code.
    pub foreign: Vec<Vdso>,
    /// Hard links that were made for the image.
    pub links: Vec<Link>,
    /// True if the kernel works for the tree while it is stopped.
    pub works: bool,
    /// Memory that is registered with userfaultfds of the tree, by process.
    pub registered: Vec<(i32, Vec<Span>)>,
    /// Called when the dump fails later.
    pub undo: Undo,
    /// Keeps the tree's TCP connections quiet.
    pub lock: Option<Lock>,
    /// The rules that kept new connections away while the dump waited for the tree; dropped when
    /// the tree runs.
    pub leftover: Option<Leftover>,
    /// The rules that keep new connections away until the tree is killed.
    pub held: Option<Held>,
    /// Facts that were found out before; some of them are dropped when the tree runs.
    pub homework: Homework,
}

impl Inventory {
    /// Says what the spaces of the objects are.
    pub fn name_objects(&self, writer: &Writer) {
        for object in &self.objects {
            let kind = match object.contents {
                Contents::File(_) => SpaceKind::Object,
                Contents::Bytes(_) => SpaceKind::Vdso,
            };
            let pages = object.len_bytes.div_ceil(abi::PAGE_BYTES);
            writer.space(parent::named(object.space, kind, pages));
        }
    }
}

impl Inventory {
    /// How much is to be read of tasks and objects, at most.
    pub fn bytes(&self) -> u64 {
        let extents = self.memory.iter().flat_map(|memory| &memory.extents);
        let objects = self.objects.iter().map(|object| object.len_bytes);
        extents.map(Extent::bytes).chain(objects).sum()
    }
}

/// Collects the tree, with `view` for its memory.
///
/// What can be seen from outside is looked at first, and refused before a task is made to call
/// anything.
///
/// # Errors
/// [`Error::Obstacles`] for all that cannot be saved, before anything was changed.
pub(crate) fn collect(
    frozen: &mut Frozen,
    mut how: How<'_>,
    view: &mut dyn MemoryView,
) -> Result<Inventory> {
    let mut obstacles = Obstacles::default();
    match collect_all(frozen, &mut how, view, &mut obstacles) {
        // That may be why something could not be looked at, as sockets of another network. Where
        // the dump is put off, the next one finds all of them.
        Err(error) if !obstacles.is_empty() && !how.homework.is_there() => {
            log::debug!("{error}");
            Err(obstacles.check().expect_err("there are some"))
        }
        result => result,
    }
}

fn collect_all(
    frozen: &mut Frozen,
    how: &mut How<'_>,
    view: &mut dyn MemoryView,
    obstacles: &mut Obstacles,
) -> Result<Inventory> {
    how.homework.watched.begin();
    let sharing = Sharing::find(frozen)?;
    let links = descriptors::links(frozen, &sharing, how, obstacles)?;
    log::info!("{} tasks are stopped", frozen.tasks.len());
    let has_its_clocks = fitness::check(frozen, how.namespaces, how.stay, obstacles)?;
    let around = around(frozen, &links, how, obstacles)?;
    let settled = settled((frozen, links, &sharing), how, view, obstacles)?;
    let Settled {
        mut found,
        vdsos,
        listed,
        of_mappings,
        works,
    } = settled;
    let outside = describe_and_ask(frozen, (&mut found, listed), how, obstacles)?;
    let mut tree = tree::of(&found, view.numbering().boot());
    tree.has_pid_ns = how.namespaces.pids;
    let mut records = vec![tree.record()];
    let registered = found.iter().map(Found::registered_spans).collect();
    let mut spaces = spaces::Spaces::default();
    let Outside {
        mut described,
        of_tasks,
        ..
    } = outside;
    for ((task, found), outside) in frozen.tasks.iter().zip(found).zip(of_tasks) {
        if let Some(outside) = outside {
            found.records(task, outside, (&mut spaces, view), &mut records)?;
        }
    }
    spaces.find_shared(&tree)?;
    records.extend(of_mappings.into_iter().flatten());
    records.extend(described.encode());
    records.extend(described.attributes);
    records.extend(around);
    records.extend(links::record(&described.links));
    let mut objects = described.objects;
    let foreign = vdsos.foreign();
    let kept = vdsos.store(view.vdsos(), &mut records, &mut objects);
    let copies = spaces.copies();
    let (memory, same) = spaces.into_parts();
    // After all timers were looked at: what was left of them then ends no earlier by these.
    let clocks = TreeClocks::of_stopped(has_its_clocks.then(|| &frozen.tasks[0]))?;
    records.push(record(tag::CLOCKS, 0, clocks.encode_to_vec()));
    let processor = xstate::Layout::here();
    records.push(record(tag::PROCESSOR, 0, processor.encode_to_vec()));
    Ok(Inventory {
        records,
        memory,
        copies,
        same,
        objects,
        kept,
        foreign,
        links: described.links,
        works,
        registered,
        undo: described.undo,
        lock: described.lock,
        leftover: None,
        held: None,
        homework: Homework::default(),
    })
}

/// The records of the tree's control groups and of its own namespaces; what is not saved of them is
/// noted.
fn around(
    frozen: &Frozen,
    links: &[Vec<table::Link>],
    how: &How<'_>,
    obstacles: &mut Obstacles,
) -> Result<Vec<Record>> {
    let cgroups = obstacles.note(cgroups::collect(frozen, how.allow))?;
    let tasks = frozen.tasks.iter().zip(links);
    let tasks = tasks.map(|(task, links)| ns::TreeTask {
        pid: task.pid(),
        links,
    });
    let tree = ns::Tree {
        root: frozen.tasks[0].pid(),
        tasks: &tasks.collect::<Vec<_>>(),
        options: &how.allow.namespaces,
    };
    let mut records = cgroups.flatten().into_iter().collect::<Vec<_>>();
    let flags = how.namespaces.flags;
    let entered = ns::KINDS.iter().filter(|kind| kind.flag() & flags != 0);
    for kind in entered {
        let mut refused = Vec::new();
        let payload = kind.dump(&tree, &mut refused)?;
        for refused in refused {
            obstacles.note(Err::<(), _>(refused))?;
        }
        records.push(record(kind.tag(), 0, payload));
    }
    Ok(records)
}

/// A tree in which no requests are under way that end by themselves, looked at from outside.
struct Settled {
    found: Vec<Found>,
    vdsos: vdso::Vdsos,
    listed: Listed,
    /// The records of mappings that the kernel works on, by task.
    of_mappings: Vec<Option<Record>>,
    /// True if the kernel works for the tree while it is stopped.
    works: bool,
}

/// Looks at a tree. What its requests did before they ended, some of them meanwhile, is seen in
/// files and descriptors: so those that have any are looked at again when nothing is under way.
fn settled(
    (frozen, mut links, sharing): (&mut Frozen, Vec<Vec<table::Link>>, &Sharing),
    how: &mut How<'_>,
    view: &mut dyn MemoryView,
    obstacles: &mut Obstacles,
) -> Result<Settled> {
    let allow = how.allow;
    let (mut found, mut vdsos) = look((frozen, &links, sharing), allow, view, obstacles)?;
    check_tree(&found, how, obstacles)?;
    if let Some(pid) = working::with_mappings(&found).next().map(Process::pid) {
        how.homework.check_mappings(pid)?;
    }
    let has_mappings = working::settle_mappings(&found)?;
    let records = found
        .iter()
        .map(|found| working::mappings(found, obstacles));
    let records = records.collect::<Result<Vec<_>>>()?;
    let mut listed = Listed::new(frozen, &mut found, allow, obstacles)?;
    let has_working = listed.working().next().is_some();
    if has_working {
        // For that, tasks make calls.
        obstacles.check()?;
        working::settle(frozen, &mut found, &listed)?;
    }
    let works = has_working || has_mappings;
    // A tree with obstacles is refused, whatever its requests did.
    if works && obstacles.is_empty() {
        // A request that opens a file makes a descriptor.
        links = descriptors::links(frozen, sharing, how, obstacles)?;
        (found, vdsos) = look((frozen, &links, sharing), allow, view, obstacles)?;
        check_tree(&found, how, obstacles)?;
        listed = Listed::new(frozen, &mut found, allow, obstacles)?;
    }
    registered::find(&mut found, &listed, view.keeps_registered(), obstacles)?;
    Ok(Settled {
        found,
        vdsos,
        listed,
        of_mappings: records,
        works,
    })
}

/// Looks at each task from outside, of whose descriptors the links are known.
fn look(
    (frozen, links, sharing): (&Frozen, &[Vec<table::Link>], &Sharing),
    allow: &Allow,
    view: &mut dyn MemoryView,
    obstacles: &mut Obstacles,
) -> Result<(Vec<Found>, vdso::Vdsos)> {
    let mut found = Vec::new();
    let mut vdsos = vdso::Vdsos::default();
    let limit = frozen.limit;
    // A single task has nobody to inherit from.
    let lockers = match frozen.tasks.len() {
        1 => None,
        _ => locks::holders(),
    };
    // What is registered since mappings were listed does not show in the list that needs no flags.
    let mut all = links.iter().flatten();
    let is_listed_anew = all.any(|link| link.target == userfaultfd::LINK);
    for (task, links) in frozen.tasks.iter().zip(links) {
        limit.check(task.pid())?;
        let sinks = (&mut vdsos, &mut *obstacles);
        // Where nobody tells, each may have some.
        let has_locks = lockers.as_ref();
        let has_locks = has_locks.is_none_or(|lockers| {
            let mut all = sharing.all_with(What::Descriptors, task.pid());
            all.any(|pid| lockers.contains(&pid))
        });
        let task = OneTask {
            task,
            links,
            has_locks,
            is_listed_anew,
        };
        found.push(Found::new(task, allow, (view, &found, sharing), sinks)?);
    }
    Ok((found, vdsos))
}

/// Describes all files, and asks all tasks what only they can say; nobody before all descriptions
/// are claimed.
fn describe_and_ask(
    frozen: &mut Frozen,
    (found, mut listed): (&mut [Found], Listed),
    how: &mut How<'_>,
    obstacles: &mut Obstacles,
) -> Result<Outside> {
    let mut outside = if found.iter().any(Found::is_asked_first) {
        // Where the kernel does not tell all of descriptions, tasks are asked before these are
        // described.
        obstacles.check()?;
        ask_all(frozen, found, how, obstacles)?;
        listed.learn(found);
        listed.describe(found, how, obstacles)?
    } else {
        let outside = listed.describe(found, how, obstacles)?;
        obstacles.check()?;
        ask_all(frozen, found, how, obstacles)?;
        outside
    };
    outside.learn(found);
    outside.check_last(obstacles)?;
    let records = found.iter().flat_map(Found::semaphores);
    obstacles.note(semaphores::check(records))?;
    obstacles.check()?;
    Ok(outside)
}

/// Asks all tasks what only they can say.
fn ask_all(
    frozen: &mut Frozen,
    found: &mut [Found],
    how: &How<'_>,
    obstacles: &mut Obstacles,
) -> Result<()> {
    let limit = frozen.limit;
    // Where memory is shared, each one's blob goes before that of the next comes.
    let shared = found.iter().map(|found| found.node.memory_of);
    let shared = shared.filter(|of| *of != 0).collect::<HashSet<_>>();
    let (stay, allow) = (how.stay, how.allow);
    returned::watch(frozen);
    for (task, found) in frozen.tasks.iter_mut().zip(found) {
        limit.check(task.pid())?;
        if !task.is_zombie() {
            let stay = stay && !shared.contains(&found.node.memory_number());
            found.ask(task, (stay, allow), obstacles)?;
        }
    }
    Ok(())
}

/// Notes what of the tree as a whole is not saved.
fn check_tree(found: &[Found], how: &mut How<'_>, obstacles: &mut Obstacles) -> Result<()> {
    let allow = how.allow;
    let rows = found.iter().map(|one| (one.node.pid, &one.rows));
    let rows = rows.flat_map(|(pid, rows)| rows.iter().map(move |row| (pid, row)));
    backlog::check(rows, allow, how.newcomers)?;
    watches::find(found, how)?;
    let tree = tree::of(found, &[]);
    obstacles.note(fitness::check_session(&tree, allow, how.namespaces))?;
    obstacles.note(plan::sharing::plan(&tree))?;
    working::check_memory(found, obstacles)?;
    let listed = found.iter().map(|one| (one.node.pid, &*one.listed));
    segments::check(listed, obstacles)
}
