//! Work inside of the namespaces that a tree has of its own: a restore in new ones, and the dump of
//! a tree that has some.
//!
//! A copy of this process does the work in there, so every number, name and address that the kernel
//! tells it or takes from it is the tree's own. The process itself waits outside. It is asked at
//! each stage, since what its caller does then (action scripts, the pidfile) concerns its own
//! namespaces. In a mount namespace of the tree's, paths are the tree's as well; images, helpers'
//! sockets and control groups are the host's ([`sys::host`]), and the copy has a procfs that no
//! mount hides ([`sys::procfs`]).
//!
//! In a new pid namespace every task gets its number, whoever has that outside. The copy of a
//! restore is its first process. It brings the tree back as its child, and stays: process 1 takes
//! in orphans, and the kernel ends the namespace with it. As long as the tree can be undone, the
//! copy is tied to the process outside by its parent-death signal, and its end is the end of
//! everything in the namespace. From [`Stage::PreResume`] on it goes on alone. The copy of a dump
//! is tied to the process outside until it ends.
//!
//! A tree whose root is process 1 itself gets a namespace that the process outside makes around it
//! ([`Init`]): the root waits there, the copy is another process, has it begin and ends when the
//! tree runs. With `--restore-sibling` its parent is this process's parent, and a helper ends it
//! when this process is killed ([`UndoList`]). At a dump nobody inside can kill process 1. The copy
//! traces it, and the kernel kills it when its tracer ends; so it goes last, and everything in the
//! namespace with it.
//!
//! A tree that has other namespaces alone comes back as a child of the process outside, and the
//! copy ends when it runs.
//!
//! - What: pid namespaces
//! - Kept: one of the whole tree, of which the first process is the tree's root, or
//!   `stillframe-init`: of a tree that `restore --new-pid-ns` has brought back. Tasks have their
//!   numbers again, and /proc is of the namespace.
//! - At a restore: "a process with number 1, which is the namespace's own"; "a tree with namespaces
//!   of its own goes without …" (`--lazy-pages`, `--shell-job`, `--leave-stopped`, and
//!   `--restore-sibling` where its root is not process 1).
//! - Refused: "a /proc of another pid namespace than its own"; "its own … namespace", as "process
//!   …, which is not of the tree, is in it as well".
//! - CRIU 4.2: keeps those whose first process is the tree's root; has no `--new-pid-ns`.

mod inner;
mod membership;
mod message;
mod outer;

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use guard::{Channel, UndoList};
use resources::ns;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};
use sys::fork::{Fork, fork, fork_in, fork_init};
use sys::init::Init;
use sys::process::Process;
use sys::procfs;

pub use self::inner::Inner;
use self::membership::{check_alone, theirs};
pub use self::outer::{Outcome, Outer};
use crate::options::OwnNamespaces;
use crate::records::Saved;
use crate::{Afterwards, DumpOptions, Error, RestoreOptions, Result};

/// The process outside of the namespace, or its copy inside.
#[derive(Debug)]
pub enum Side {
    /// Outside.
    Outer(Outer),
    /// Inside, where the work is done.
    Inner(Inner),
}

/// The way in which the root of a restored tree is made.
#[derive(Debug, Default)]
pub(crate) enum Way {
    /// As a child of the copy, which stays as process 1 of a pid namespace.
    #[default]
    Child,
    /// As process 1 of a pid namespace, which the process outside has made and which waits.
    First(Init),
    /// As a child of the process outside; the copy ends then.
    Sibling,
}

/// Makes namespaces for a tree, a pid namespace if `has_pids`, and in there a copy of this process.
/// Where it has another pid namespace, it has a mount namespace and a /proc of its own, and numbers
/// that the kernel chooses are above those of the tree, so that helpers of the restore take none of
/// them.
///
/// # Errors
/// [`Error::Threads`]; [`Error::Kernel`] without the right to make namespaces. The copy, too,
/// returns an error when it has no /proc, or a namespace does not take what it had.
pub(crate) fn make(saved: &Saved<'_>, has_pids: bool, options: &RestoreOptions) -> Result<Side> {
    if !has_pids {
        let side = split(fork, || Way::Sibling)?;
        if let Side::Inner(_) = side {
            make_others(saved, options)?;
        }
        return Ok(side);
    }
    let last = last_number(saved)?;
    let has_init = saved.tasks[0].node.pid == sys::init::NUMBER;
    let side = if has_init {
        make_around(last, options.sibling)?
    } else {
        split(fork_init, || Way::Child)?
    };
    if let Side::Inner(_) = side {
        if saved.namespace_flags() & libc::CLONE_NEWNS == 0 {
            let mounted = sys::mounts::mount_own_procfs();
            mounted.map_err(|e| Error::kernel("cannot mount a /proc of the namespace", e))?;
        }
        make_others(saved, options)?;
        if !has_init {
            let set = procfs::write("sys/kernel/ns_last_pid", last.to_string());
            set.map_err(|e| Error::kernel("cannot set /proc/sys/kernel/ns_last_pid", e))?;
        }
    }
    Ok(side)
}

/// Has this process, a copy, enter new namespaces of the tree's other kinds, and gives them what
/// they had.
fn make_others(saved: &Saved<'_>, options: &RestoreOptions) -> Result<()> {
    let failed = |e| Error::kernel("cannot make the namespaces of the tree", e);
    let mut flags = saved.namespace_flags();
    for namespace in &saved.namespaces {
        if !namespace.is_entered() {
            flags &= !namespace.flag();
        }
        if let Some(name) = namespace.external() {
            flags &= !namespace.flag();
            let given = options.inherit_fds.iter();
            let mut given = given.filter(|one| one.stands_for.name() == name.as_bytes());
            let given = given.next().ok_or_else(|| {
                let kind = namespace.name();
                let what = format!("the {kind} namespace is external ({name}): --inherit-fd");
                Error::Unfit(what)
            })?;
            sys::world::enter(given.fd.as_fd()).map_err(failed)?;
        }
    }
    if saved.namespace_flags() & libc::CLONE_NEWCGROUP != 0 {
        // From inside, hierarchies are mounted in other places.
        sys::host::keep().map_err(failed)?;
    }
    leave_mounts(flags, || sys::world::unshare(flags)).map_err(failed)?;
    let threads = saved.tasks.iter().flat_map(|task| &task.threads);
    let parts = threads.flat_map(|thread| thread.parts.iter().map(|part| &**part));
    let construction = ns::Construction {
        parts: &parts.collect::<Vec<_>>(),
        options: &options.allowed.namespaces,
        cgroups: &options.allowed.cgroups,
    };
    let mut all = saved.namespaces.iter();
    Ok(all.try_for_each(|namespace| namespace.restore(&construction))?)
}

/// Has this process, a copy, go to other namespaces, of the kinds `flags`. Where it leaves its
/// mount namespace, it keeps the way to the host's files, and has a procfs of its own.
fn leave_mounts(flags: i32, go: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    if flags & libc::CLONE_NEWNS == 0 {
        return go();
    }
    sys::host::keep()?;
    let own = procfs::mount()?;
    go()?;
    procfs::stay_in(own)
}

/// Makes a namespace whose first process waits to be the root of the tree, and a copy of this
/// process in there.
fn make_around(last: i32, is_sibling: bool) -> Result<Side> {
    let failed = |e| Error::kernel("cannot make a pid namespace", e);
    // The kernel ties no process to one that is not its parent.
    let guard = is_sibling.then(UndoList::leave);
    let guard = guard.transpose().map_err(failed)?;
    let first = Init::make(last, is_sibling).map_err(failed)?;
    let guarded = guard.as_ref().map(|guard| guard.add_process(first.pidfd()));
    if let Err(error) = guarded.transpose() {
        first.end();
        return Err(failed(error));
    }
    let pids = Process::new(first.pid().as_raw_nonzero().get());
    let pids = pids.open("ns/pid").map_err(failed);
    let mut first = Some(first);
    let split = pids.and_then(|pids| {
        split(
            || fork_in(pids.as_fd()),
            || Way::First(first.take().expect("it is taken once")),
        )
    });
    if let Some(first) = first {
        first.end();
    }
    let mut split = split?;
    match &mut split {
        Side::Outer(outer) => outer.guard = guard,
        // The process outside keeps the list.
        Side::Inner(_) => drop(guard.map(UndoList::into_channel)),
    }
    Ok(split)
}

/// Makes a copy of this process in the namespaces of the tree that is to be dumped, as far as these
/// are others than this process's: `None` if none is. The copy finds the root under the number that
/// [`Inner::root`] gives, and knows what it has entered ([`Inner::own`]).
///
/// A mount namespace that shows what this process's does, but for a /proc of its own pid namespace,
/// counts as a part of that.
///
/// # Errors
/// As [`make`](self::make).
pub fn join(options: &DumpOptions) -> Result<Option<Side>> {
    let root = options.tree;
    let process = Process::living(root.as_raw_nonzero().get());
    let doing = || format!("cannot join the namespaces of pid {}", process.pid());
    let failed = |e| Error::kernel(doing(), e);
    let pids = theirs(&process, "pid")?;
    // A /proc of this process's pid namespace is another mount.
    let has_own_procfs = pids.is_some() && {
        let [theirs, own] = [process.path("root/proc"), procfs::path(".")]
            .map(|path| rustix::fs::stat(path).map(|stat| stat.st_dev));
        theirs.is_ok() && theirs != own
    };
    let differ = || sys::mounts::differ_by_procfs_alone(&process);
    let has_procfs_alone = has_own_procfs && differ().map_err(failed)?;
    let mut own = OwnNamespaces {
        pids: pids.is_some(),
        flags: 0,
    };
    let mut entered = Vec::new();
    let is_part = |flag: i32| flag == libc::CLONE_NEWNS && has_procfs_alone;
    for kind in ns::KINDS.iter().filter(|kind| !is_part(kind.flag())) {
        if let Some(file) = theirs(&process, kind.name())? {
            own.flags |= kind.flag();
            let inode = rustix::fs::fstat(&file)
                .map_err(|errno| failed(errno.into()))?
                .st_ino;
            let external = options.allowed.namespaces.external_name(kind.name(), inode);
            if kind.is_entered() {
                entered.push(file);
            }
            if external.is_none() {
                check_alone(&process, kind.name())?;
            }
        }
    }
    let Some(pids) = pids else {
        if own.flags == 0 {
            return Ok(None);
        }
        let side = split(fork, Way::default)?;
        return enter(side, root, own, &entered).map(Some);
    };
    let inside = number_inside(&process).map_err(failed)?;
    if has_procfs_alone {
        entered.push(process.open("ns/mnt").map_err(failed)?);
    }
    let init = inside.is_init();
    let init = init.then(|| pidfd_open(root, PidfdFlags::empty()));
    let victim = init.transpose().map_err(|errno| failed(errno.into()))?;
    let mut side = split(|| fork_in(pids.as_fd()), Way::default)?;
    if let Side::Outer(outer) = &mut side {
        outer.victim = victim;
    }
    enter(side, inside, own, &entered).map(Some)
}

/// The names of the kinds that a dump of a tree with these namespaces has not entered.
pub(crate) fn not_entered(own: OwnNamespaces) -> impl Iterator<Item = &'static str> {
    let kinds = ns::KINDS.iter();
    let kinds = kinds.filter(move |kind| own.flags & kind.flag() != 0 && !kind.is_entered());
    kinds.map(|kind| kind.name())
}

/// Has the copy enter namespaces in which a tree is: its root has a number in there.
fn enter(mut side: Side, root: Pid, own: OwnNamespaces, entered: &[File]) -> Result<Side> {
    if let Side::Inner(inner) = &mut side {
        let enter = |namespace: &File| sys::world::enter(namespace.as_fd());
        let entered = leave_mounts(own.flags, || entered.iter().try_for_each(enter));
        entered.map_err(|e| Error::kernel("cannot enter a namespace of the tree", e))?;
        if own.pids && own.flags & libc::CLONE_NEWNS == 0 {
            check_procfs(root)?;
        }
        let mut kinds = ns::KINDS.iter().filter(|kind| kind.flag() & own.flags != 0);
        kinds.try_for_each(|kind| kind.prepare())?;
        inner.root = Some(root);
        inner.own = own;
    }
    Ok(side)
}

/// Refuses a tree whose /proc is about another pid namespace than this process's, in which the tree
/// is.
fn check_procfs(root: Pid) -> Result<()> {
    let seen = rustix::fs::readlink(procfs::path("self"), Vec::new());
    let own = std::process::id().to_string();
    match seen {
        Ok(seen) if seen.to_bytes() == own.as_bytes() => Ok(()),
        _ => {
            let root = root.as_raw_nonzero().get();
            let what = "a /proc of another pid namespace than its own";
            Err(resources::Error::unsupported(root, what).into())
        }
    }
}

/// Makes the copy by `fork`, and ties it to this process. On both sides, the root of a restored
/// tree is made in that `way`.
fn split(fork: impl FnOnce() -> io::Result<Fork>, way: impl FnOnce() -> Way) -> Result<Side> {
    let (outer, inner) =
        Channel::pair().map_err(|e| Error::kernel("cannot make a pair of sockets", e))?;
    match fork() {
        Ok(Fork::Parent(copy)) => Ok(Side::Outer(Outer {
            copy,
            link: outer,
            way: way(),
            root: None,
            victim: None,
            guard: None,
        })),
        Ok(Fork::Child) => {
            drop(outer);
            let tied = set_parent_process_death_signal(Some(Signal::KILL));
            tied.map_err(|e| Error::kernel("cannot follow the end of the process outside", e))?;
            Ok(Side::Inner(Inner {
                link: inner,
                root: None,
                root_outside: None,
                way: way(),
                own: OwnNamespaces::default(),
            }))
        }
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(Error::Threads),
        Err(error) => Err(Error::kernel(
            "cannot work in the namespaces of a tree",
            error,
        )),
    }
}

/// Refuses a restore in namespaces that is about what is outside of them.
pub(crate) fn check(options: &RestoreOptions, has_init: bool) -> Result<()> {
    let excluded = [
        (options.allowed.shell_job, "--shell-job"),
        (options.lazy.is_some(), "--lazy-pages"),
        // Other roots are made by the copy of the process, or by process 1.
        (options.sibling && !has_init, "--restore-sibling"),
        (options.afterwards == Afterwards::Stop, "--leave-stopped"),
    ];
    match excluded.iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, option)) => Err(Error::Unfit(format!(
            "a tree with namespaces of its own goes without {option}"
        ))),
    }
}

/// The highest number of the tree.
fn last_number(saved: &Saved<'_>) -> Result<i32> {
    let tids = saved.tasks.iter().flat_map(|task| &task.threads);
    let tids = tids.map(|thread| thread.tid);
    let groups = saved.tasks.iter().flat_map(|task| {
        let node = &task.node;
        [node.pid, node.group, node.session]
    });
    let all = tids.chain(groups).collect::<Vec<_>>();
    if all.contains(&sys::init::NUMBER) && saved.tasks[0].node.pid != sys::init::NUMBER {
        let what = "a process with number 1, which is the namespace's own".to_owned();
        return Err(Error::Unfit(what));
    }
    Ok(all.into_iter().max().unwrap_or_default())
}

/// The number of a process in its own pid namespace.
fn number_inside(process: &Process) -> io::Result<Pid> {
    let status = procfs::read(format_args!("{}/status", process.pid()))?;
    let status = sys::proc::Status::parse(&status).map_err(io::Error::other)?;
    let number = status.ns_tids.last().copied().and_then(Pid::from_raw);
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}
