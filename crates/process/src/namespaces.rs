//! Work inside of the namespaces that a tree has of its own: a restore in new ones, and the dump of
//! a tree that has some.
//!
//! A copy of this process does the work in there, so every number, name and address that the kernel
//! tells it or takes from it is the tree's own. The process itself waits outside. It is asked at
//! each stage, since what its caller does then (action scripts, the pidfile) concerns its own
//! namespaces.
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
//! tree runs. At a dump nobody inside can kill process 1. The copy traces it, and the kernel kills
//! it when its tracer ends; so it goes last, and everything in the namespace with it.
//!
//! A tree that has other namespaces alone comes back as a child of the process outside, and the
//! copy ends when it runs.
//!
//! - What: pid namespaces
//! - Kept: one of the whole tree, of which the first process is the tree's root, or
//!   `stillframe-init`: of a tree that `restore --new-pid-ns` has brought back. Tasks have their
//!   numbers again, and /proc is of the namespace.
//! - At a restore: "a process with number 1, which is the namespace's own"; "a tree with namespaces
//!   of its own goes without …" (`--lazy-pages`, `--shell-job`, `--restore-sibling`,
//!   `--leave-stopped`).
//! - Refused: "a /proc of another pid namespace than its own"; "its own … namespace", as "process
//!   …, which is not of the tree, is in it as well".
//! - CRIU 4.2: keeps those whose first process is the tree's root; has no `--new-pid-ns`.

mod membership;
mod message;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use guard::Channel;
use resources::ns;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, pidfd_open, set_parent_process_death_signal,
    wait, waitpid,
};
use sys::fork::{Fork, fork, fork_in, fork_init};
use sys::init::Init;
use sys::process::Process;
use sys::{mounts, procfs};

use self::membership::{check_alone, theirs};
use self::message::{Answer, Event};
use crate::options::OwnNamespaces;
use crate::records::Saved;
use crate::{Afterwards, Error, Observer, RestoreOptions, Result, Stage, Veto};

/// The process outside of the namespace, or its copy inside.
#[derive(Debug)]
pub enum Side {
    /// Outside.
    Outer(Outer),
    /// Inside, where the work is done.
    Inner(Inner),
}

/// The process outside of the namespace.
#[derive(Debug)]
pub struct Outer {
    copy: Pid,
    link: Channel,
    /// The way in which the root of a restored tree is made.
    way: Way,
    /// The root of a restored tree, once that runs.
    root: Option<Pid>,
    /// The root of a tree that is dumped, where that is process 1 of its namespace.
    victim: Option<OwnedFd>,
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

/// The copy in the namespace.
#[derive(Debug)]
pub struct Inner {
    link: Channel,
    /// The root's number in the namespace, and outside as far as that is known.
    root: Option<Pid>,
    root_outside: Option<Pid>,
    /// The way in which the root of a restored tree is made.
    pub(crate) way: Way,
    /// The namespaces of a tree that is dumped.
    own: OwnNamespaces,
}

/// The end of the wait outside.
#[derive(Debug)]
pub enum Outcome {
    /// The tree runs; its root has this number outside.
    Runs(Pid),
    /// The copy has ended.
    Ended(WaitStatus),
}

/// The name of the namespace's first process.
const NAME: &CStr = c"stillframe-init";

/// Makes namespaces for a tree, a pid namespace if `has_pids`, and in there a copy of this process.
/// Where it has another pid namespace, it has a mount namespace and a /proc of its own, and numbers
/// that the kernel chooses are above those of the tree, so that helpers of the restore take none of
/// them.
///
/// # Errors
/// [`Error::Threads`]; [`Error::Kernel`] without the right to make namespaces. The copy, too,
/// returns an error when it has no /proc, or a namespace does not take what it had.
pub(crate) fn make(saved: &Saved<'_>, has_pids: bool) -> Result<Side> {
    if !has_pids {
        let side = split(fork, || Way::Sibling)?;
        if let Side::Inner(_) = side {
            make_others(saved)?;
        }
        return Ok(side);
    }
    let last = last_number(saved)?;
    let has_init = saved.tasks[0].node.pid == sys::init::NUMBER;
    let side = if has_init {
        make_around(last)?
    } else {
        split(fork_init, || Way::Child)?
    };
    if let Side::Inner(_) = side {
        let mounted = mounts::mount_own_procfs();
        mounted.map_err(|e| Error::kernel("cannot mount a /proc of the namespace", e))?;
        if !has_init {
            let set = procfs::write("sys/kernel/ns_last_pid", last.to_string());
            set.map_err(|e| Error::kernel("cannot set /proc/sys/kernel/ns_last_pid", e))?;
        }
        make_others(saved)?;
    }
    Ok(side)
}

/// Has this process, a copy, enter new namespaces of the tree's other kinds, and gives them what
/// they had.
fn make_others(saved: &Saved<'_>) -> Result<()> {
    let failed = |e| Error::kernel("cannot make the namespaces of the tree", e);
    sys::world::unshare(saved.namespace_flags()).map_err(failed)?;
    let threads = saved.tasks.iter().flat_map(|task| &task.threads);
    let parts = threads.flat_map(|thread| thread.parts.iter().map(|part| &**part));
    let parts = parts.collect::<Vec<_>>();
    let mut all = saved.namespaces.iter();
    Ok(all.try_for_each(|namespace| namespace.restore(&parts))?)
}

/// Makes a namespace whose first process waits to be the root of the tree, and a copy of this
/// process in there.
fn make_around(last: i32) -> Result<Side> {
    let failed = |e| Error::kernel("cannot make a pid namespace", e);
    let first = Init::make(last).map_err(failed)?;
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
    split
}

/// Makes a copy of this process in the namespaces of process `root`, as far as these are others
/// than this process's: `None` if none is. The copy finds the root under the number that
/// [`Inner::root`] gives, and knows what it has entered ([`Inner::own`]). It enters a mount
/// namespace together with a pid namespace alone.
///
/// Where that shows something else than this process's, but for /proc, the tree is left to this
/// process, which refuses it.
///
/// # Errors
/// As [`make`](self::make).
pub fn join(root: Pid) -> Result<Option<Side>> {
    let process = Process::living(root.as_raw_nonzero().get());
    let doing = || format!("cannot join the namespaces of pid {}", process.pid());
    let failed = |e| Error::kernel(doing(), e);
    let pids = theirs(&process, "pid")?;
    if pids.is_some() && !mounts::differ_by_procfs_alone(&process).map_err(failed)? {
        return Ok(None);
    }
    let mut own = OwnNamespaces {
        pids: pids.is_some(),
        flags: 0,
    };
    let mut entered = Vec::new();
    for kind in ns::KINDS {
        if let Some(file) = theirs(&process, kind.name())? {
            entered.push(file);
            own.flags |= kind.flag();
            check_alone(&process, kind.name())?;
        }
    }
    let Some(pids) = pids else {
        if entered.is_empty() {
            return Ok(None);
        }
        let side = split(fork, Way::default)?;
        return enter(side, root, own, &entered).map(Some);
    };
    let inside = number_inside(&process).map_err(failed)?;
    entered.push(process.open("ns/mnt").map_err(failed)?);
    let init = inside.is_init();
    let init = init.then(|| pidfd_open(root, PidfdFlags::empty()));
    let victim = init.transpose().map_err(|errno| failed(errno.into()))?;
    let mut side = split(|| fork_in(pids.as_fd()), Way::default)?;
    if let Side::Outer(outer) = &mut side {
        outer.victim = victim;
    }
    enter(side, inside, own, &entered).map(Some)
}

/// Has the copy enter namespaces in which a tree is: its root has a number in there.
fn enter(mut side: Side, root: Pid, own: OwnNamespaces, entered: &[File]) -> Result<Side> {
    if let Side::Inner(inner) = &mut side {
        for namespace in entered {
            let entered = sys::world::enter(namespace.as_fd());
            entered.map_err(|e| Error::kernel("cannot enter a namespace of the tree", e))?;
        }
        if own.pids {
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
pub(crate) fn check(options: &RestoreOptions) -> Result<()> {
    let excluded = [
        (options.allowed.shell_job, "--shell-job"),
        (options.lazy.is_some(), "--lazy-pages"),
        (options.sibling, "--restore-sibling"),
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

impl Outer {
    /// Passes on to `observer` what the copy tells, until the tree runs or the copy has ended.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn attend(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let failed =
            |e: io::Error| Error::kernel("cannot hear of the work in the tree's namespaces", e);
        while let Some((event, rights)) = self.link.receive::<Event>().map_err(failed)? {
            let root = rights.first().map(number_outside).transpose();
            let root = root.map_err(failed)?;
            let stage = event
                .stage
                .and_then(|number| message::STAGES.get(number as usize));
            let veto = stage.and_then(|stage| observer.stage(*stage, root).err());
            let answer = Answer {
                goes_on: veto.is_none(),
                root: root.map(|root| root.as_raw_nonzero().get()),
                veto: veto.map(|veto| veto.0),
            };
            match self.link.send(&answer, &[]) {
                // It was killed meanwhile, which its end tells.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PIPE) => break,
                sent => sent.map_err(failed)?,
            }
            match (event.is_last, root) {
                (true, Some(root)) => {
                    if !matches!(self.way, Way::Child) {
                        // The copy has done its work.
                        self.wait_for_copy()?;
                    }
                    self.root = Some(root);
                    return Ok(Outcome::Runs(root));
                }
                (true, None) => return Err(failed(guard::invalid("no root came along"))),
                (false, _) => {}
            }
        }
        let status = self.wait_for_copy()?;
        if let Way::First(first) = &self.way {
            first.end();
        }
        // The kernel has killed it when its tracer, the copy, ended, where that was wanted.
        if let Some(victim) = &self.victim {
            let number = number_outside(victim);
            if number.is_ok_and(|pid| sys::ending::is_ending(pid.as_raw_nonzero().get())) {
                wait_for_victim(victim);
            }
        }
        Ok(Outcome::Ended(status))
    }

    /// The error for work that has ended so, where that is no success.
    ///
    /// # Errors
    /// [`Error::Inside`], which the copy has told of; [`Error::Died`] where it could not.
    pub fn judge(&self, status: WaitStatus) -> Result<()> {
        match status.exit_status() {
            Some(0) => Ok(()),
            Some(code) => Err(Error::Inside { code }),
            None => {
                let how = crate::text::describe_status(status.as_raw());
                let doing = "the copy of this process in the tree's namespaces ended early";
                Err(Error::kernel(doing, io::Error::other(how)))
            }
        }
    }

    /// Waits until the tree has ended that the copy has brought back, and gives how its root has.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn wait(&self) -> Result<WaitStatus> {
        let failed = |e| Error::kernel("cannot wait for the root's end", e);
        match &self.way {
            Way::Child => self.wait_for_copy(),
            Way::First(first) => first.wait().map_err(failed),
            Way::Sibling => match wait_for(self.root.unwrap_or(self.copy)) {
                Ok(status) => Ok(status),
                Err(errno) => Err(failed(errno.into())),
            },
        }
    }

    fn wait_for_copy(&self) -> Result<WaitStatus> {
        let ended = wait_for(self.copy);
        ended.map_err(|errno| {
            Error::kernel("cannot wait for the copy in the tree's namespaces", errno)
        })
    }
}

/// Waits for the end of a child.
fn wait_for(child: Pid) -> rustix::io::Result<WaitStatus> {
    let ended = rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))?;
    ended.map_or_else(|| unreachable!("it waits"), |(_, status)| Ok(status))
}

/// Waits for the end of process 1 of a namespace, which has to wait itself until somebody reaps
/// those that have entered the namespace from outside.
fn wait_for_victim(victim: &OwnedFd) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let ended = guard::wait([Some(victim.as_fd())], Some(Instant::now() + PATIENCE));
    if !ended.is_ok_and(|[ended]| ended) {
        log::warn!("process 1 of the tree's namespace was killed, and does not end");
    }
}

impl Inner {
    /// The root's number in the namespace.
    #[must_use]
    pub fn root(&self) -> Option<Pid> {
        self.root
    }

    /// The namespaces that it has entered.
    #[must_use]
    pub fn own(&self) -> OwnNamespaces {
        self.own
    }

    /// The root's number outside, as far as it is known.
    #[must_use]
    pub fn root_outside(&self) -> Option<Pid> {
        self.root_outside
    }

    /// Tells outside that the tree runs. Where the root is not the first process of the namespace,
    /// this one lives on as that, since the kernel ends the namespace with it: until nobody else is
    /// there. Gives how the root has ended. Where it is `detached`, its standard streams are
    /// /dev/null, so that nobody waits for their end.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn stay(self, detached: bool) -> Result<Option<WaitStatus>> {
        let failed = |errno: Errno| Error::kernel("cannot leave the standard streams", errno);
        let named = rustix::thread::set_name(NAME);
        named.map_err(|errno| Error::kernel("cannot name this process", errno))?;
        if detached {
            let null =
                rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).map_err(failed)?;
            rustix::stdio::dup2_stdin(&null).map_err(failed)?;
            rustix::stdio::dup2_stdout(&null).map_err(failed)?;
            rustix::stdio::dup2_stderr(&null).map_err(failed)?;
        }
        let event = Event {
            is_last: true,
            stage: None,
        };
        // A process outside that is gone changes nothing for the tree.
        if let Err(error) = self.ask(&event, self.root) {
            log::warn!("the restorer is gone: {error}");
        }
        drop(self.link);
        if !rustix::process::getpid().is_init() {
            return Ok(None);
        }
        let mut ended = None;
        loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if Some(pid) == self.root => ended = Some(status),
                Ok(_) | Err(Errno::INTR) => {}
                // Somebody may be there who was started elsewhere, as a dump.
                Err(_) if !wait_for_others() => return Ok(ended),
                Err(_) => {}
            }
        }
    }

    fn ask(&self, event: &Event, root: Option<Pid>) -> io::Result<Answer> {
        let pidfd = root.map(|root| pidfd_open(root, PidfdFlags::empty()));
        let pidfd = pidfd.transpose()?;
        let rights = pidfd.iter().map(|fd| fd.as_fd()).collect::<Vec<_>>();
        Ok(self.link.ask(event, &rights)?.0)
    }
}

impl Observer for Inner {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> std::result::Result<(), Veto> {
        self.root = root.or(self.root);
        let event = Event {
            is_last: false,
            stage: Some(message::number(stage)),
        };
        let answer = match self.ask(&event, root) {
            Ok(answer) => answer,
            // The tree runs, whoever is there to hear of it.
            Err(_) if stage == Stage::PostResume => return Ok(()),
            Err(error) => return Err(Veto(format!("the process outside is gone: {error}"))),
        };
        if !answer.goes_on {
            return Err(Veto(answer.veto.unwrap_or_default()));
        }
        self.root_outside = answer.root.and_then(Pid::from_raw).or(self.root_outside);
        if stage == Stage::PreResume {
            let free = set_parent_process_death_signal(None);
            free.map_err(|errno| Veto(format!("cannot leave the process outside: {errno}")))?;
        }
        Ok(())
    }

    fn progress(&mut self, _done_bytes: u64, _total_bytes: u64) {}
}

/// Waits for the end of a process in this namespace that is no child of this one, its first; tells
/// whether there was one.
fn wait_for_others() -> bool {
    let me = std::process::id().cast_signed();
    let others = procfs::processes().filter(|pid| *pid != me);
    let pidfds = others.filter_map(Pid::from_raw);
    let mut pidfds = pidfds.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let Some(other) = pidfds.next() else {
        return false;
    };
    guard::wait_for_end(other);
    true
}

/// The number of a process in its own pid namespace.
fn number_inside(process: &Process) -> io::Result<Pid> {
    let status = procfs::read(format_args!("{}/status", process.pid()))?;
    let status = sys::proc::Status::parse(&status).map_err(io::Error::other)?;
    let number = status.ns_tids.last().copied().and_then(Pid::from_raw);
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The number that the process of a pidfd has in this process's namespace.
fn number_outside(pidfd: &OwnedFd) -> io::Result<Pid> {
    let text = procfs::read_text(format_args!("self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    let number = number.filter(|number| *number > 0).and_then(Pid::from_raw);
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}
