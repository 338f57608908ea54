//! The restore of a process tree: built → loaded → running.

mod calls;
mod ending;
mod fill;
mod job;
mod lazy_chunks;
mod loaded;
mod parent;
mod registered;
mod running;
mod stops;
mod taken;

use std::sync::Arc;
use std::time::Instant;

use ending::Adopting;
use image::Reader;
pub use job::Job;
use loaded::{Loaded, Origin};
use resources::Inherited;
use resources::cgroup::{Membership, Mode};
use resources::map::placed;
use resources::task::{PartState, keyrings};
use rustix::process::Pid;

use crate::alone::Alone;
use crate::build::build;
use crate::clocks::Resumed;
use crate::lazy::{Client, Lazy};
use crate::namespaces::{Outcome, Outer, Side};
use crate::plan::{self, Placing, Setting};
use crate::processor::Processor;
use crate::records::Saved;
use crate::statistics::as_micros;
use crate::{Error, Observer, RestoreOptions, Result, Stage};
use crate::{host, huge_pages, namespaces, overcommit};

/// Tasks with less memory than this get it at once: to have it come later takes longer.
const LAZY_FROM_BYTES: u64 = 1 << 20;

/// What a restore brought back.
#[derive(Debug)]
pub struct Restored {
    /// The root task.
    pub root: Pid,
    /// Tasks brought back.
    pub tasks: u64,
    /// Threads brought back, the leaders included.
    pub threads: u64,
    /// Pages filled.
    pub filled_pages: u64,
    /// How long the restore took.
    pub total_us: u64,
    /// The tree as a job of the caller's shell, which has the terminal now: to be waited for by
    /// [`Job::wait`].
    pub job: Option<Job>,
    /// Who brings in memory that is still to come.
    pub lazy: Option<Lazy>,
    /// The side of the tree's pid namespace that this process is on, if the tree has one. The
    /// function returns twice then, as fork(2) does. [`Side::Inner`] is to stay with the tree.
    pub namespace: Option<Side>,
}

/// Brings back the tree that `options.images` holds.
///
/// # Errors
/// Every failure leaves no task behind.
pub fn restore(options: &RestoreOptions, observer: &mut dyn Observer) -> Result<Restored> {
    let _alone = Alone::enter()?;
    let began = Instant::now();
    let store = options.images.open().map_err(image::Error::Place)?;
    let reader = Arc::new(Reader::open(&*store)?);
    check_machine(&reader)?;
    crate::alone::check_threads()?;
    let saved = Saved::read(&reader)?;
    let has_init = saved.tasks[0].node.pid == sys::init::NUMBER;
    let wants_pids = options.new_pid_ns || saved.tree.has_pid_ns || has_init;
    let wants_namespaces = wants_pids || !saved.namespaces.is_empty();
    if wants_namespaces {
        namespaces::check(options, has_init)?;
    }
    observer
        .stage(Stage::PreRestore, None)
        .map_err(Error::Vetoed)?;
    if !wants_namespaces {
        let origin = match options.sibling {
            true => Origin::Sibling { parent: None },
            false => Origin::Child,
        };
        return bring_back_here(options, &reader, saved, origin, began, observer);
    }
    observer.fork();
    match namespaces::make(&saved, wants_pids, options)? {
        Side::Outer(outer) => attend(outer, &saved, began, observer),
        Side::Inner(mut inner) => {
            inner.announce_namespaces(saved.namespace_flags())?;
            let way = std::mem::take(&mut inner.way);
            let origin = Origin::of_way(&way, saved.namespace_flags());
            let restored = bring_back_here(options, &reader, saved, origin, began, &mut inner)?;
            Ok(Restored {
                root: inner.root_outside().unwrap_or(restored.root),
                namespace: Some(Side::Inner(inner)),
                ..restored
            })
        }
    }
}

/// Waits until the copy of this process in the tree's namespaces has brought the tree back.
fn attend(
    mut outer: Outer,
    saved: &Saved<'_>,
    began: Instant,
    observer: &mut dyn Observer,
) -> Result<Restored> {
    let root = match outer.attend(observer)? {
        Outcome::Runs(root) => root,
        Outcome::Ended(status) => {
            outer.judge(status)?;
            // It ends well with a tree alone.
            return Err(Error::Inside { code: 1 });
        }
    };
    Ok(Restored {
        namespace: Some(Side::Outer(outer)),
        ..Restored::of(saved, root, began)
    })
}

/// Brings the tree back in the namespaces that this process is in.
fn bring_back_here(
    options: &RestoreOptions,
    reader: &Arc<Reader>,
    mut saved: Saved<'_>,
    origin: Origin<'_>,
    began: Instant,
    observer: &mut dyn Observer,
) -> Result<Restored> {
    let descriptors = saved.descriptors_needed() + 2 * reader.ancestor_files();
    let mut inherited = Inherited::read()?;
    if inherited.open_files() < descriptors {
        crate::alone::raise_open_files(descriptors);
        inherited = Inherited::read()?;
    }
    if inherited.is_filtered() {
        log::warn!("restored tasks have this process's own seccomp filters as well");
    }
    reader.open_ancestors()?;
    // It makes itself ready meanwhile. Where nothing is to come later, it ends with the restore.
    let lazy = options.lazy.as_ref();
    let lazy = lazy.map(|lazy| Client::new(lazy, &options.images, reader));
    let lazy = lazy.transpose()?;
    saved.read_vdsos(reader, sys::vdso::own_build_id().as_deref())?;
    options.cpu_cap.check(&saved)?;
    registered::check(&saved)?;
    parent::check(options, &saved)?;
    let image = Image {
        processor: Processor::check(&saved, reader)?,
        saved,
        reader,
        lazy,
        origin,
    };
    let root = image.saved.tasks[0].node.pid;
    let mut waiting = taken::Waiting::default();
    loop {
        match bring_back(options, &image, &inherited, began, observer) {
            Ok(restored) => {
                return Ok(Restored {
                    lazy: image.lazy.map(Lazy::new),
                    ..restored
                });
            }
            Err(error) if is_left_to_parent(origin, root) => return Err(error),
            Err(Error::Taken { pid, .. }) => {
                waiting.wait_free(pid)?;
                log::info!("pid {pid} was taken by a process that had ended: once more");
            }
            Err(Error::Resource(error)) if error.is_in_use() && waiting.wait_for_collector() => {
                log::info!("{error}: once more");
            }
            Err(error) => return Err(error),
        }
    }
}

/// Tells whether the root was made and has ended, and its number is only free when the process
/// outside has seen that, which waits for this one.
fn is_left_to_parent(origin: Origin<'_>, root: i32) -> bool {
    let Origin::Sibling {
        parent: Some(parent),
    } = origin
    else {
        return false;
    };
    let parent = parent.as_raw_nonzero().get();
    let is_it = |stat: sys::proc::Stat| sys::process::has_ended(&stat) && stat.ppid == parent;
    freeze::stat_of(root).is_some_and(is_it)
}

/// Refuses an image of another kind of machine.
fn check_machine(reader: &Reader) -> Result<()> {
    let own = rustix::system::uname();
    let own = own.machine().to_string_lossy();
    match reader.facts().arch.as_str() {
        arch if arch == own => Ok(()),
        arch => Err(Error::Unfit(format!(
            "the image is of a machine of kind {arch:?}, and this one is {own}"
        ))),
    }
}

/// An image that was read, and looked at for what it needs.
struct Image<'a> {
    reader: &'a Arc<Reader>,
    saved: Saved<'a>,
    /// How its threads come to this processor, where it tells.
    processor: Option<Processor>,
    /// Who brings pages in when they are touched.
    lazy: Option<Client>,
    /// The maker of the root.
    origin: Origin<'a>,
}

/// Refuses what this host has too little of for the tree, before anything is made.
fn check_host(saved: &Saved<'_>, reader: &Reader) -> Result<()> {
    huge_pages::check(saved, reader)?;
    overcommit::check(saved, reader, false)?;
    let lacks = placed::check(&saved.placed())?;
    lacks.map_or(Ok(()), |lacks| Err(Error::Unfit(lacks)))
}

fn bring_back(
    options: &RestoreOptions,
    image: &Image<'_>,
    inherited: &Inherited,
    began: Instant,
    observer: &mut dyn Observer,
) -> Result<Restored> {
    let Image {
        reader,
        saved,
        lazy,
        origin,
        ..
    } = image;
    let setting = Setting {
        parent: origin.parent(),
        ..with_keys(options, saved, inherited.clone())?
    };
    let plan = plan::plan(reader, saved, &setting)?;
    let root = saved.tasks[0].node.pid;
    let root_pid = Pid::from_raw(root).expect("checked when read");
    if !matches!(origin, Origin::Init { .. }) {
        taken::check_free(root_pid)?;
    }
    check_host(saved, reader)?;
    // Before any timer is set.
    let clocks = saved.clocks.filter(|_| options.timens);
    let clocks = clocks.as_ref().map(Resumed::from_now);
    let (built, pool) = build(
        plan,
        (saved, setting.cgroups.as_ref().map(|one| &one.cgroups)),
        reader,
        &options.allowed,
        &options.inherit_fds,
    )?;
    log::info!("{} scripts are built", built.plan.scripts.len());
    // A task whose call fails ends by itself, and leaves those that it has made.
    let adopting = Adopting::begin();
    let loaded = Loaded::new(&built, root, origin, clocks)?;
    let filled_pages = loaded.fill(reader, lazy.as_ref())?;
    log::info!("{filled_pages} pages are filled from outside");
    loaded.wait_ready()?;
    log::info!("all tasks are there");
    announce(observer, Stage::PostRestore, root_pid)?;
    let mut running = loaded.trace()?;
    running.stop_all()?;
    log::info!("all threads are stopped at the end of their scripts");
    running.write_outside()?;
    running.call(saved, &pool)?;
    running.give_registers(saved, image.processor.as_ref())?;
    saved.finish_namespaces()?;
    announce(observer, Stage::PreResume, root_pid)?;
    let mut job = options.foreground.then(|| Job::of(saved)).flatten();
    job.as_mut().map(Job::give).transpose()?;
    lazy.as_ref().map(Client::runs).transpose()?;
    // What the tree leaves when it runs is not ours.
    drop(adopting);
    let gone = running.let_go(saved, pool, options.afterwards);
    if let (Err(_), Some(job)) = (&gone, &mut job) {
        job.take_back();
    }
    drop(gone?);
    built.succeed();
    announce(observer, Stage::PostResume, root_pid)?;
    Ok(Restored {
        filled_pages,
        job,
        ..Restored::of(saved, root_pid, began)
    })
}

impl Restored {
    /// The report of a tree that was brought back since `began`.
    fn of(saved: &Saved<'_>, root: Pid, began: Instant) -> Self {
        let threads = saved.tasks.iter().map(|task| task.threads.len() as u64);
        Self {
            root,
            tasks: saved.tasks.len() as u64,
            threads: threads.sum(),
            filled_pages: 0,
            total_us: as_micros(began.elapsed()),
            job: None,
            lazy: None,
            namespace: None,
        }
    }
}

/// Tells that a stage of the restore of the tree under `root` is reached.
fn announce(observer: &mut dyn Observer, stage: Stage, root: Pid) -> Result<()> {
    observer.stage(stage, Some(root)).map_err(Error::Vetoed)
}

/// Returns the scripts that a restore would run, one line a call, without running anything.
///
/// # Errors
/// Those of [`restore`] that show without touching the kernel.
pub fn plan(options: &RestoreOptions) -> Result<String> {
    let store = options.images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    let mut saved = Saved::read(&reader)?;
    saved.read_vdsos(&reader, sys::vdso::own_build_id().as_deref())?;
    let setting = setting(options, &saved, Inherited::read()?)?;
    let plan = plan::plan(&reader, &saved, &setting)?;
    plan::print(&plan, &saved, &reader)
}

pub(crate) fn setting(
    options: &RestoreOptions,
    saved: &Saved<'_>,
    mut inherited: Inherited,
) -> Result<Setting> {
    inherited.set_session(keyrings::of_restorer(
        inherited.session(),
        of_leaders(saved),
    ));
    inherited.ask_for_session(|| {
        resources::task::prepare();
        keyrings::own_is_unset()
    });
    Ok(Setting {
        open_files: open_files(saved, &inherited),
        inherited,
        vdso: host::vdso_for(saved)?,
        cgroups: placing(options, saved)?,
        lazy_from_bytes: options.lazy.as_ref().map(|_| LAZY_FROM_BYTES),
        at_once_bytes: overcommit::at_once_bytes(saved)?,
        ..Setting::default()
    })
}

/// The setting of a restore that is made, whose tasks find the keys of their session keyrings.
fn with_keys(options: &RestoreOptions, saved: &Saved<'_>, inherited: Inherited) -> Result<Setting> {
    let mut setting = setting(options, saved, inherited)?;
    setting.keys = keyrings::make(of_leaders(saved))?;
    Ok(setting)
}

/// The parts of all leaders, what belongs to their processes among them.
fn of_leaders<'a>(saved: &'a Saved<'_>) -> impl Iterator<Item = &'a dyn PartState> {
    let leaders = saved.tasks.iter().filter_map(|task| task.threads.first());
    let parts = leaders.flat_map(|leader| &leader.parts);
    parts.map(|part| &**part)
}

/// The limit of open files, as far as it can be raised where that is needed.
fn open_files(saved: &Saved<'_>, inherited: &Inherited) -> u64 {
    match inherited.open_files() {
        enough if enough >= saved.descriptors_needed() => enough,
        few => few.max(crate::alone::open_files_at_most()),
    }
}

/// What is known of control groups, if the tree was in some and they are to be dealt with.
fn placing(options: &RestoreOptions, saved: &Saved<'_>) -> Result<Option<Placing>> {
    let management = &options.allowed.cgroups;
    let cgroups = saved.cgroups.as_ref();
    let Some(cgroups) = cgroups.filter(|_| management.mode != Mode::Ignore) else {
        return Ok(None);
    };
    let mut cgroups = cgroups.clone();
    cgroups.move_roots(management);
    let own = Membership::own()?;
    Ok(Some(Placing { cgroups, own }))
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_image_of_another_kind_of_machine_is_refused_by_name() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let place = store::Directory::open(folder.path()).expect("it was just made");
        let writer = image::Writer::create(std::sync::Arc::new(place)).expect("it is empty");
        let facts = image::Facts {
            arch: "riscv64".into(),
            ..image::Facts::default()
        };
        let seal = image::Seal {
            facts,
            ..image::Seal::default()
        };
        writer.seal(seal).expect("it is right");
        let options = crate::RestoreOptions::new(folder.path());
        let refused = crate::restore(&options, &mut crate::report::Unobserved)
            .expect_err("it is of another machine");
        assert_eq!(refused.blame(), image::Blame::Unsupported);
        let told = refused.to_string();
        assert!(
            told.contains("riscv64") && told.contains("x86_64"),
            "{told}"
        );
    }

    #[test]
    fn a_page_is_a_page() {
        assert_eq!(abi::PAGE_BYTES, image::PAGE_BYTES as u64);
    }
}
