//! The dump of a tree that goes on: stopped for an instant, copied while it runs.
//!
//! The tree is stopped twice, and in between where I/O is under way ([`crate::settle`]). The first
//! time each task gets a userfaultfd, by which its memory is protected and copied while it runs
//! ([`memory::live`]). The second time it is collected, and what it has written in the last few
//! milliseconds is protected: that is the instant of the image. Then it goes on, and what is not
//! copied yet is copied before it changes.
//!
//! Where a task discards pages before they were copied, there is another instant; the last one is
//! copied while the tree is stopped. While it is stopped are also copied: shared memory and deleted
//! files, pages of private file mappings, and all memory of tasks that were not there at the first
//! stop.
//!
//! Which pages are equal is found out afterwards, from what was written: until the copy is over
//! they change.
//!
//! - What: live dumps
//! - Kept: the memory of one instant, while the tree runs.
//! - Refused: "it is registered with a userfaultfd, and a live dump does not keep it"; "a live dump
//!   on a kernel without PAGEMAP_SCAN (before Linux 6.7)".
//! - CRIU 4.2: has none; `--lazy-pages` has the tree stand until its pages are fetched.

mod equal;
mod memory_view;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use abi::Span;
use abi::spans::intersect;
use freeze::returned::{self, check_returned, patiently};
use freeze::start_ticks;
use freeze::tracker::Client;
use freeze::uffd::userfaultfd;
use freeze::{DEFAULT_TIMEOUT, Frozen, Guard, freeze, read_proc, stat_of};
use image::Run;
use memory::live::{Areas, LiveMemory};
use pages::{Drain, DrainSummary};
use resources::map::listing::Listed;
use resources::map::memory::Mapping;
use resources::map::{placed, registered};
use sys::process::Process;
use sys::realtime::Realtime;

use self::memory_view::LiveView;
use crate::collect::Inventory;
use crate::collect::memory_view::{MemoryView, Prepared};
use crate::contents::{Progress, Sources};
use crate::draft::{Draft, Sealed};
use crate::end::go_on;
use crate::numbering::Numbering;
use crate::settle::settle;
use crate::statistics::as_micros;
use crate::stopping::freeze_and_collect;
use crate::undo::Undo;
use crate::{DumpOptions, DumpReport, Error, Result, Stage, track};

/// How many instants there may be; the last is copied while the tree is stopped.
const INSTANTS: u64 = 4;

/// How often memory is copied before the first instant, at most.
const ROUNDS: usize = 4;

/// When a round is likely to copy less, the instant follows.
const LITTLE_BYTES: u64 = 16 << 20;

/// How long protecting may take at the instant, as far as that can be known.
const SHORT: Duration = Duration::from_millis(1);

/// Saves the tree under `options.tree` into `options.images` and leaves it running.
///
/// # Errors
/// Every failure leaves the tree running as before and no image behind.
pub(crate) fn dump(
    options: &DumpOptions,
    began: Instant,
    mut progress: Progress,
) -> Result<DumpReport> {
    check_kernel(options.tree.as_raw_nonzero().get())?;
    crate::alone::raise_open_files_to_the_hard_limit();
    progress.stage(Stage::PreDump, options.tree)?;
    let store = options.images.create().map_err(image::Error::Place)?;
    let deadline = began + options.timeout.unwrap_or(DEFAULT_TIMEOUT);
    loop {
        let draft = Draft::begin(options, &store, None, began)?;
        match dump_once(options, draft, &mut progress) {
            Err(Error::Left { pid }) if Instant::now() < deadline => {
                log::info!("pid {pid} runs another program: the dump begins anew");
            }
            done => return done.map(Sealed::finish),
        }
    }
}

fn dump_once(options: &DumpOptions, draft: Draft, progress: &mut Progress) -> Result<Sealed> {
    progress.companion(|companion| companion.begin(&draft.writer))?;
    let mut dump = Dump::begin(options, draft, progress)?;
    dump.copy_before()?;
    for instant in 1..=INSTANTS {
        if let Some(saved) = dump.try_instant(instant == INSTANTS)? {
            return dump.seal(saved);
        }
        log::info!("instant {instant} was not copied in time: another follows");
        dump.round()?;
    }
    Err(Error::Torn {
        pid: options.tree.as_raw_nonzero().get(),
        instants: INSTANTS,
    })
}

/// Pages must be found and protected in one call.
pub(crate) fn check_kernel(root: i32) -> Result<()> {
    let scan = sys::features::named("pagemap_scan").expect("it is on the list");
    scan.probe().map(drop).map_err(|why| {
        log::debug!("{why}");
        let what = "a live dump on a kernel without PAGEMAP_SCAN (before Linux 6.7)".to_owned();
        resources::Error::unsupported(root, what).into()
    })
}

/// A live dump on its way.
struct Dump<'a, 'b> {
    options: &'a DumpOptions,
    draft: Draft,
    /// Sees to what this process would leave in the tasks if it was killed.
    _guard: Option<Box<dyn Guard>>,
    live: LiveMemory,
    numbering: Numbering,
    /// Each task and its parent, or whose memory that one has, as they were at the first stop.
    parents: Vec<(i32, i32)>,
    /// Who had the memory of another then, and of whom.
    sharers: HashMap<i32, i32>,
    /// Where pages may be shared by copy-on-write.
    shared: HashMap<i32, Vec<Span>>,
    progress: &'a mut Progress<'b>,
}

/// What was saved of an instant.
struct Saved {
    inventory: Inventory,
    pids: Vec<i32>,
    stopped: Vec<Run>,
    undo: Undo,
}

impl<'a, 'b> Dump<'a, 'b> {
    /// Stops the tree for the first time: each task gets a userfaultfd.
    fn begin(
        options: &'a DumpOptions,
        mut draft: Draft,
        progress: &'a mut Progress<'b>,
    ) -> Result<Self> {
        let root = options.tree.as_raw_nonzero().get();
        let prepared = Prepared::of(root)?;
        prepared.check_tracked(root)?;
        prepared.check()?;
        let realtime = Realtime::new();
        let mut frozen = freeze_returned(options)?;
        // Later, this process has threads, and cannot post one.
        returned::watch(&mut frozen);
        let guard = frozen.guard.take();
        let limit = frozen.limit;
        let (mut tasks, mut parents) = (Vec::new(), Vec::new());
        let mut numbering = Numbering::default();
        let owners = track::memory_owners(&frozen);
        let owner = |pid: i32| owners.get(&pid).copied().unwrap_or(pid);
        for task in frozen.tasks.iter_mut().filter(|task| !task.is_zombie()) {
            limit.check(task.pid())?;
            if owner(task.pid()) != task.pid() {
                continue;
            }
            let listed = task.maps()?;
            placed::refuse(task.pid(), &listed)?;
            let uffd = userfaultfd(task, &listed, false, memory::live::FEATURES)?;
            let areas = Areas {
                spans: memory_view::live_spans(&listed),
                shared: Vec::new(),
            };
            let (stat, _) = task.stat()?;
            parents.push((task.pid(), owner(stat.ppid)));
            let space = numbering.space(task.pid(), stat.start_ticks);
            tasks.push((task.process.clone(), space, uffd, areas));
        }
        let sharers = owners.into_iter().filter(|(pid, owner)| pid != owner);
        let sharers = sharers.collect();
        let live = LiveMemory::new(tasks)?;
        draft.stopped(&frozen);
        let since = frozen.since;
        go_on(frozen, None)?;
        drop(realtime);
        draft.report.stopped_since(since);
        log::info!("{} tasks have a userfaultfd", live.processes().count());
        Ok(Self {
            options,
            draft,
            _guard: guard,
            live,
            numbering,
            parents,
            sharers,
            shared: memory_view::shared(&prepared),
            progress,
        })
    }

    /// Copies what can be copied before the instant.
    fn copy_before(&mut self) -> Result<()> {
        let areas = self.areas()?;
        self.find_common(&areas)?;
        let spans = areas.iter().flat_map(|(_, areas)| &areas.spans);
        self.progress.expect(spans.map(|span| span.bytes()).sum());
        let copying = Instant::now();
        for round in 1..=ROUNDS {
            let copied_bytes = self.round()?;
            let written_bytes = self.live.written_bytes();
            log::info!("round {round}: {copied_bytes} bytes were copied, {written_bytes} written");
            // When a round ends, what it protected has been so for half of its time, on average.
            let next_bytes = 2 * written_bytes;
            if next_bytes <= LITTLE_BYTES || next_bytes / 3 * 4 > copied_bytes {
                break;
            }
        }
        self.draft.report.statistics.memory_us = as_micros(copying.elapsed());
        Ok(())
    }

    /// Finds what children have of their parents.
    fn find_common(&mut self, areas: &[(i32, Areas)]) -> Result<()> {
        for (child, parent) in &self.parents {
            let of = |pid: i32| areas.iter().find(|(task, _)| *task == pid);
            let (Some((_, own)), Some((_, theirs))) = (of(*child), of(*parent)) else {
                continue;
            };
            let shared = intersect(&own.spans, &own.shared);
            let shared = intersect(&shared, &theirs.spans);
            self.live.find_common(*child, *parent, &shared)?;
        }
        Ok(())
    }

    /// Protects and copies what is stale while the tree runs. What is protected when I/O is under
    /// way to it changes unheard of until that is over.
    fn round(&mut self) -> Result<u64> {
        let all = self.live.processes().map(Process::pid).collect::<Vec<_>>();
        self.live.unshare(&all);
        let mut rounds = Vec::new();
        for (pid, areas) in self.areas()? {
            match self.live.protect(pid, &areas) {
                Ok(round) => rounds.push((pid, round)),
                Err(error) => self.unless_root(pid, error)?,
            }
        }
        let processes = self.live.processes().cloned().collect::<Vec<_>>();
        settle(self.options, &processes, &mut self.draft.report)?;
        let mut copied_bytes = 0;
        for (pid, round) in rounds {
            let progress = |bytes| self.progress.add(bytes);
            match self.live.copy(pid, &round, &self.draft.writer, &progress) {
                Ok(bytes) => copied_bytes += bytes,
                Err(error) => self.unless_root(pid, error)?,
            }
        }
        Ok(copied_bytes)
    }

    /// A task that ends before the instant is not part of the image; the root is.
    fn unless_root(&self, pid: i32, error: memory::Error) -> Result<()> {
        match error {
            memory::Error::Gone { .. } if pid != self.options.tree.as_raw_nonzero().get() => Ok(()),
            memory::Error::Gone { pid } if start_ticks(pid).is_some() => Err(Error::Left { pid }),
            error => Err(error.into()),
        }
    }

    /// The anonymous memory of all tasks that are still there.
    fn areas(&self) -> Result<Vec<(i32, Areas)>> {
        let mut all = Vec::new();
        for process in self.live.processes() {
            let pid = process.pid();
            match read_proc(process, "maps") {
                Ok(maps) => {
                    let listed = freeze::parse(&maps)?;
                    let spans = memory_view::live_spans(&listed);
                    let shared = self.shared.get(&pid).cloned().unwrap_or_default();
                    all.push((pid, Areas { spans, shared }));
                }
                Err(freeze::Error::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(all)
    }

    /// Stops the tree and saves it as it is then. Returns nothing when pages were discarded before
    /// they were copied. The `last` instant is copied while the tree is stopped.
    fn try_instant(&mut self, last: bool) -> Result<Option<Saved>> {
        let root = self.options.tree.as_raw_nonzero().get();
        let prepared = Prepared::of(root)?;
        self.shared = memory_view::shared(&prepared);
        let seen = (prepared, std::mem::take(&mut self.numbering));
        let mut view = LiveView::new(seen, (&self.live, &self.sharers), !last);
        self.live.protect_ahead(&self.areas()?, SHORT)?;
        let mut realtime = Realtime::new().ok();
        let (frozen, mut inventory) = freeze_and_collect(self.options, false, &mut view)?;
        self.numbering = std::mem::take(view.numbering());
        if inventory.works {
            // They were made since the first stop.
            let living = frozen.tasks.iter().filter(|task| !task.is_zombie());
            for task in living {
                placed::refuse(task.pid(), &task.maps()?)?;
            }
        }
        self.progress.stage(Stage::PostFreeze, self.options.tree)?;
        let since = frozen.since;
        let pids = frozen
            .tasks
            .iter()
            .map(|task| task.pid())
            .collect::<Vec<_>>();
        self.draft.stopped(&frozen);
        let undo = std::mem::take(&mut inventory.undo);
        let writer = &self.draft.writer;
        self.progress
            .companion(|companion| companion.instant(writer))?;
        let copying = Instant::now();
        if last || inventory.bytes() > LITTLE_BYTES {
            realtime = None;
        }
        let (drained, stopped) = self.copy_stopped(&mut inventory)?;
        self.draft.report.statistics.count(&drained);
        self.live.unshare(&pids);
        let stale_bytes = self.live.stale_bytes();
        let whole = match last {
            true => Some(self.finish(&pids, true)?),
            false => None,
        };
        let lock = inventory.lock.take();
        let _leftover = inventory.leftover.take();
        go_on(frozen, lock)?;
        drop(realtime);
        self.draft.report.stopped_since(since);
        log::info!("{stale_bytes} bytes were left to copy at the instant");
        let whole = match whole {
            Some(whole) => whole,
            None => self.finish(&pids, false)? && (last || !view.has_changed(root)?),
        };
        let report = &mut self.draft.report;
        report.instants += 1;
        report.statistics.memory_us += as_micros(copying.elapsed());
        let saved = Saved {
            inventory,
            pids,
            stopped,
            undo,
        };
        Ok(whole.then_some(saved))
    }

    /// Copies what is left. A task that ends before its memory was copied makes another instant
    /// necessary, at which it is no more; at the `last` one none ends, for they are stopped.
    fn finish(&self, pids: &[i32], last: bool) -> Result<bool> {
        let progress = |bytes| self.progress.add(bytes);
        match self.live.finish(pids, &self.draft.writer, &progress) {
            Err(memory::Error::Gone { pid }) if !last => {
                self.unless_root(pid, memory::Error::Gone { pid })?;
                log::info!("pid {pid} has ended or runs another program");
                Ok(false)
            }
            done => Ok(done?),
        }
    }

    /// Copies what can only be copied while the tree is stopped.
    fn copy_stopped(&self, inventory: &mut Inventory) -> Result<(DrainSummary, Vec<Run>)> {
        inventory.name_objects(&self.draft.writer);
        let sources = Sources::of(inventory);
        let writer = &self.draft.writer;
        Ok(pages::drain_to_runs(
            &sources.each(),
            writer,
            Drain::default(),
        )?)
    }

    /// Finishes the image.
    fn seal(self, saved: Saved) -> Result<Sealed> {
        let Saved {
            mut inventory,
            pids,
            stopped,
            mut undo,
        } = saved;
        let (mut draft, live, progress) = (self.draft, self.live, self.progress);
        let (pages, mut stored) = live.describe(&pids, &draft.writer);
        draft.report.longest_wait_us = as_micros(live.longest_wait());
        // From here on the tree runs as if nothing had been.
        drop(live);
        let statistics = &mut draft.report.statistics;
        statistics.stored_pages += pages.stored;
        statistics.zero_pages += pages.zero;
        statistics.shared_pages += pages.shared;
        stored.extend(stopped);
        let copies = std::mem::take(&mut inventory.copies);
        let found = equal::find(stored, copies, &mut draft, progress)?;
        draft.writer.describe(found);
        progress.companion(|companion| companion.put(&draft.writer))?;
        draft.note(&mut inventory);
        let sealed = draft.seal(false, &inventory.foreign, None)?;
        // What was changed on the host for the image is taken back with it.
        sealed.tell(progress, self.options.tree)?;
        undo.0.clear();
        Ok(sealed)
    }
}

/// Stops the tree when none of its threads is on the way back from a dump that was cut short.
fn freeze_returned(options: &DumpOptions) -> Result<Frozen> {
    patiently(options.timeout, || {
        let frozen = freeze(options.tree.as_raw_nonzero().get(), options.timeout)?;
        for task in frozen.tasks.iter().filter(|task| !task.is_zombie()) {
            let listed = task.maps()?;
            check_returned(task, &listed)?;
        }
        Ok(frozen)
    })
}

impl Prepared {
    /// Names who tracks memory of the tree under `root` for a chain of images: it has a userfaultfd
    /// already.
    fn check_tracked(&self, root: i32) -> Result<()> {
        let tracked = |listed: &Listed| listed.has(b"uw") && !listed.has(b"um");
        let mut tasks = self.listed();
        let Some((pid, _)) = tasks.find(|(_, listed)| listed.iter().any(tracked)) else {
            return Ok(());
        };
        // The chain may be of a part of the tree, or of a tree that this one is a part of.
        let parent = |pid: &i32| stat_of(*pid).map(|stat| stat.ppid).filter(|pid| *pid > 1);
        let above = std::iter::successors(Some(root), parent);
        for root in above.chain(self.listed().map(|(pid, _)| pid)) {
            if let Ok(Some(client)) = Client::find(root) {
                let image = client.image.map(|image| image.to_string());
                let tracker = client.pid()?;
                return Err(Error::Tracked {
                    pid,
                    tracker,
                    root,
                    image,
                });
            }
        }
        Ok(())
    }

    /// Refuses mappings that cannot be saved, before anything is touched.
    fn check(&self) -> Result<()> {
        for (pid, listed) in self.listed() {
            let listed = listed.iter().filter(|listed| listed.name != b"[vsyscall]");
            for listed in listed {
                Mapping::of(listed, pid, None)?;
                if registered::modes(listed) != 0 {
                    let why =
                        "it is registered with a userfaultfd, and a live dump does not keep it";
                    let refused = resources::Error::unsupported(pid, listed.place());
                    return Err(refused.because(why).into());
                }
            }
        }
        Ok(())
    }
}
